"""The configuration of a training run: every key of the YAML file, its bounds and its default.

`cce-dist train --help` takes a key's meaning from the docstring of its section.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, Union, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cce_dist import LossOptions
from cce_dist.distributed.launchers import MAX_SECONDS

from .pipeline import Layout, ScheduleName, require_microbatches, split_layers, stages_of_a_rank

# The integers of torch and NumPy.
MAX_INT = 2**63 - 1
# AdamW multiplies fp32 numbers by lr * weight_decay, and by lr / (1 - beta).
MAX_LR, MAX_DECAY = 1e30, 1e6
Count = Annotated[int, Field(ge=1, le=MAX_INT)]
Natural = Annotated[int, Field(ge=0, le=MAX_INT)]
Share = Annotated[float, Field(ge=0, lt=1)]


def _nameable(path: Path) -> Path:
    with suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(path):
            return path
    raise PydanticCustomError("no_file_name", "Path should be a name that a file can have")


SystemPath = Annotated[Path, Field(strict=False), AfterValidator(_nameable)]

# 256 bytes and the end-of-text token: no byte-level vocabulary is smaller.
MIN_VOCAB_SIZE = 257
MIB = 2**20
# Options of the loss that the job sets itself. The file's workspace is in MiB.
SET_BY_JOB = (
    *("sequence_parallel", "ignore_index", "reduction", "shift", "stats"),
    *("workspace_bytes", "keep_logits", "check_ranks", "invariant"),
)


class Section(BaseModel):
    """A section of the file. An unknown key is an error: it may be a misspelt one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RunConfig(Section):
    """The run's name and folder.

    Args:
        name: folder under run.out.
        seed: seed of the initial weights and of the data order.
        out: folder of all runs.
    """

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    seed: int = Field(default=0, ge=0, lt=2**31)
    out: SystemPath = Path("runs")


class DataConfig(Section):
    """The text.

    Args:
        paths: files, folders, JSONL; empty is text of this Python installation.
        megabytes: stop reading after so many million characters.
        vocab_size: number of ids; any, whatever parallel.tp is.
        sequence_length: tokens of a sequence.
        held_out: share of the text, at its end, that is never trained on.
        cache: folder of tokenizers and token ids, which every rank sees.
    """

    paths: tuple[SystemPath, ...] = Field(default=(), strict=False)
    megabytes: float = Field(default=40.0, gt=0)
    vocab_size: int = Field(default=16384, ge=MIN_VOCAB_SIZE, le=2**24)
    sequence_length: int = Field(default=256, ge=2, le=MAX_INT)
    held_out: float = Field(default=0.02, gt=0, le=0.5)
    cache: SystemPath = Path("runs/.cache")


class ModelConfig(Section):
    """The decoder's size.

    Args:
        dim: hidden size, a multiple of 2 x heads.
        layers: number of layers.
        heads: attention heads of a layer.
        tied: one parameter for embedding and head.
    """

    dim: Count = 192
    layers: Count = 4
    heads: Count = 3
    tied: bool = False

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.dim % (2 * self.heads):
            raise ValueError(
                "model.dim must be a multiple of 2 * model.heads, since rotary embeddings turn "
                f"pairs of each head's channels, got dim={self.dim} and heads={self.heads}"
            )
        return self


class ParallelConfig(Section):
    """The ranks' layout; the data-parallel ranks are those that pp and tp leave.

    Args:
        tp: ranks that share the vocabulary; all is as many as pp leaves.
        sequence_parallel: each tp rank runs the body on its share of the sequences.
        fsdp: split parameters, gradients and optimizer state over the dp ranks.
        pp: ranks of a pipeline.
        schedule: the pipeline's order of passes.
        vocab_over_pipeline: the head's rows over all pp x tp ranks.
        microbatches: microbatches of a step; null is as many as possible.
        virtual_stages: stages of a rank with looped, interleaved, zero_bubble.
        layers_per_stage: layers in the order of the forward; null splits them evenly.
        timeout_s: seconds of a rank's silence that end the job.
    """

    tp: Count = 1
    sequence_parallel: bool = False
    fsdp: bool = False
    pp: Count = 1
    schedule: ScheduleName = "1f1b"
    vocab_over_pipeline: bool = False
    microbatches: Count | None = None
    virtual_stages: Count | None = None
    layers_per_stage: tuple[Natural, ...] | None = Field(default=None, strict=False)
    timeout_s: float = Field(default=60.0, ge=2, le=MAX_SECONDS)

    @model_validator(mode="after")
    def _check_pipeline(self) -> ParallelConfig:
        if self.pp == 1:
            return self
        if self.fsdp:
            raise ValueError(
                f"parallel.fsdp is not supported with a pipeline, got fsdp=true and pp={self.pp}: "
                "set fsdp to false, or pp to 1"
            )
        if self.schedule == "vocab_1f1b" and not self.vocab_over_pipeline:
            raise ValueError(
                "parallel.schedule=vocab_1f1b needs the vocabulary over the pipeline, got "
                "parallel.vocab_over_pipeline=false: set it to true, or use schedule=1f1b"
            )
        stages_of_a_rank(self.schedule, self.virtual_stages)
        return self


def _section_of(options: type, key: str) -> Any:
    """Returns a field type: the section whose keys are a dataclass's fields becomes the dataclass.

    Args: key: the section's key, by which messages name the fields.
    """

    def make(section: Section) -> Any:
        values = dict(section)
        if (size := values.pop("workspace_mib", None)) is not None:
            values["workspace_bytes"] = int(size * MIB)
        try:
            return options(**values)
        except ValueError as error:
            text = str(error).replace(f"{options.__name__}.", f"{key}.")
            raise ValueError(text if text.startswith(key) else f"{key}.{text}") from None

    types, keys = get_type_hints(options), {}
    for name, field in options.__dataclass_fields__.items():
        if name == "workspace_bytes":
            size = Annotated[float, Field(ge=2**-4, le=MAX_INT / MIB)]
            keys["workspace_mib"] = Union[size, None], None  # noqa: UP007
        elif is_dataclass(types[name]):
            keys[name] = _section_of(types[name], f"{key}.{name}"), types[name]()
        elif name not in SET_BY_JOB:
            keys[name] = types[name], field.default
    section = create_model(key, __base__=Section, **keys)
    section.__doc__ = str(options.__doc__).replace("workspace_bytes:", "workspace_mib:")
    return Annotated[section, AfterValidator(make)]


def _as_keys(loss: LossOptions) -> dict[str, Any]:
    keys = {name: value for name, value in asdict(loss).items() if name not in SET_BY_JOB}
    size = loss.workspace_bytes
    return {**keys, "workspace_mib": None if size is None else size / MIB}


if TYPE_CHECKING:
    LossSection: TypeAlias = LossOptions
else:
    LossSection = Annotated[_section_of(LossOptions, "loss"), PlainSerializer(_as_keys)]


class OptimizerConfig(Section):
    """AdamW, its learning rates and the limit of its gradients.

    Args:
        lr: learning rate after the warmup.
        betas: decay of AdamW's two moments.
        weight_decay: of matrices; norms do not decay.
        warmup: steps of linear warmup.
        schedule: cosine falls to a tenth of lr at the last step.
        clip: limit of the global gradient norm; null is none.
    """

    lr: float = Field(default=3e-3, gt=0, le=MAX_LR)
    betas: tuple[Share, Share] = Field(default=(0.9, 0.95), strict=False)
    weight_decay: float = Field(default=0.1, ge=0, le=MAX_DECAY)
    warmup: Natural = 20
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: float | None = Field(default=1.0, gt=0)


class CheckpointConfig(Section):
    """Times and number of checkpoints.

    Args:
        every: steps between checkpoints; 0 is only at the end and when stopped.
        keep: number of newest checkpoints that are kept.
    """

    every: Natural = 100
    keep: Count = 2


class TrainConfig(Section):
    """The whole configuration.

    Args:
        steps: number of steps.
        batch: sequences that a data-parallel rank takes a step.
        global_batch: in place of batch, sequences of a step over all data-parallel ranks.
        dtype: bfloat16 is autocast and a bf16 head, with fp32 master weights.
        log: tensorboard gets each step's numbers, too, as events in the run's folder.
        log_every: steps between printed lines and between measurements of the tail mass.
    """

    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    loss: LossSection = LossOptions()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    steps: Count = 200
    batch: Count = 8
    # load_config computes `batch` from it.
    global_batch: Count | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    log: Literal["tensorboard"] | None = None
    log_every: Count = 10

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.global_batch is not None:
            raise ValueError(
                "global_batch is for load_config, which knows the number of ranks, got "
                f"{self.global_batch}: set batch"
            )
        tp = self.parallel.tp
        if self.parallel.sequence_parallel and self.batch % tp:
            raise ValueError(
                "batch must be a multiple of parallel.tp with parallel.sequence_parallel, since "
                f"each of the tp ranks takes whole sequences, got batch={self.batch} and tp={tp}"
            )
        if self.loss.logits == "screened" and self.dtype == "float32":
            raise ValueError(
                f"loss.logits=screened needs 16-bit training, got dtype={self.dtype}: use "
                "dtype=bfloat16, or loss.logits=full"
            )
        if self.parallel.pp > 1:
            self._check_pipeline()
        return self

    def _check_pipeline(self) -> None:
        parallel = self.parallel
        unit = parallel.tp if parallel.sequence_parallel else 1
        if self.batch % (self.microbatches * unit):
            raise ValueError(
                "batch must be a multiple of parallel.microbatches"
                + (" x parallel.tp with parallel.sequence_parallel" if unit > 1 else "")
                + f", got batch={self.batch} and microbatches={self.microbatches}"
                + (f" and tp={unit}" if unit > 1 else "")
            )
        require_microbatches(parallel.schedule, parallel.pp, self.microbatches)
        self.layout()
        if parallel.vocab_over_pipeline and self.loss.gradient == "in_forward":
            raise ValueError(
                "loss.gradient=in_forward is not supported with parallel.vocab_over_pipeline=true: "
                "use loss.gradient=filtered or exact"
            )

    @property
    def microbatches(self) -> int:
        """The number of a pipeline's microbatches; by default as many as the batch allows."""
        parallel = self.parallel
        if parallel.microbatches is not None:
            return parallel.microbatches
        return max(1, self.batch // (parallel.tp if parallel.sequence_parallel else 1))

    def layout(self, head: str = "cce") -> Layout:
        """Returns the layout for a head over all ranks' stages; "dense" is on the last stage.

        Raises:
            ValueError: model.layers or parallel.layers_per_stage do not fit the number of stages.
        """
        parallel, schedule = self.parallel, self.parallel.schedule
        if parallel.pp == 1:
            return Layout(schedule, 1, 1, (range(self.model.layers),), over_pipeline=False)
        over_pipeline = parallel.vocab_over_pipeline and head == "cce"
        if schedule == "vocab_1f1b" and not over_pipeline:
            schedule = "1f1b" if self.microbatches >= parallel.pp else "gpipe"
        stages = parallel.pp * stages_of_a_rank(schedule, parallel.virtual_stages)
        layers = split_layers(self.model.layers, stages, parallel.layers_per_stage)
        return Layout(schedule, parallel.pp, self.microbatches, layers, over_pipeline)

    @property
    def run_dir(self) -> Path:
        return self.run.out / self.run.name
