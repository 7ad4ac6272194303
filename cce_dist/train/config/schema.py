"""The configuration of a training run: every key of the YAML file, its bounds and its default."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)
from pydantic_core import PydanticCustomError

from .pipeline import Layout, ScheduleName, require_microbatches, split_layers, stages_of_a_rank

Int = Annotated[int, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]


def _nameable(path: Path) -> Path:
    try:
        is_name = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_name = False
    if not is_name:
        raise PydanticCustomError("no_file_name", "no name of a file")
    return path


SystemPath = Annotated[Path, AfterValidator(_nameable)]

# 256 bytes and the end-of-text token: no byte-level vocabulary is smaller.
MIN_VOCAB_SIZE = 257


class Section(BaseModel):
    """A section of the file. An unknown key is an error: it may be a misspelt one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RunConfig(Section):
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")] = "run"
    seed: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    out: SystemPath = Path("runs")


class DataConfig(Section):
    paths: tuple[SystemPath, ...] = ()
    megabytes: Annotated[Float, Field(gt=0)] = 40.0
    vocab_size: Annotated[Int, Field(ge=MIN_VOCAB_SIZE, le=2**24)] = 16384
    sequence_length: Annotated[Int, Field(ge=2)] = 256
    held_out: Annotated[Float, Field(gt=0, le=0.5)] = 0.02
    cache: SystemPath = Path("runs/.cache")


class ModelConfig(Section):
    dim: Count = 192
    layers: Count = 4
    heads: Count = 3
    tied: Flag = False

    @model_validator(mode="after")
    def _check_heads(self) -> ModelConfig:
        if self.dim % (2 * self.heads):
            raise ValueError(
                "model.dim must be a multiple of 2 * model.heads, since rotary embeddings turn "
                f"pairs of each head's channels, got dim={self.dim} and heads={self.heads}"
            )
        return self


class ParallelConfig(Section):
    tp: Count = 1
    sequence_parallel: Flag = False
    fsdp: Flag = False
    pp: Count = 1
    schedule: ScheduleName = "1f1b"
    vocab_over_pipeline: Flag = False
    microbatches: Count | None = None
    virtual_stages: Count | None = None
    layers_per_stage: tuple[Annotated[Int, Field(ge=0)], ...] | None = None
    timeout_s: Annotated[Float, Field(ge=2)] = 60.0

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


class FilterConfig(Section):
    keep: Literal["auto"] | Annotated[Float, Field(ge=0, le=128)] = "auto"
    tail: Flag = True
    eps: Annotated[Float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _check_criterion(self) -> FilterConfig:
        if self.eps is not None and self.keep != "auto":
            raise ValueError(
                "loss.filter.keep and loss.filter.eps exclude each other, got "
                f"keep={self.keep} and eps={self.eps}: leave one of them out"
            )
        return self


class ScreenConfig(Section):
    dtype: Literal["auto", "int8", "e4m3"] = "auto"
    max_kept: Annotated[Float, Field(ge=0, le=1)] = 0.125
    max_error: Annotated[Float, Field(ge=0)] = 2.0**-7


class LossConfig(Section):
    gradient: Literal["filtered", "exact", "in_forward"] = "filtered"
    filter: FilterConfig = FilterConfig()
    logits: Literal["full", "screened"] = "full"
    screen: ScreenConfig = ScreenConfig()
    label_smoothing: Annotated[Float, Field(ge=0, le=1)] = 0.0
    z_loss: Annotated[Float, Field(ge=0)] = 0.0
    softcap: Annotated[Float, Field(gt=0)] | None = None
    logit_scale: Float = 1.0
    workspace_mib: Annotated[Float, Field(ge=0.0625)] | None = None
    backend: Literal["auto", "triton", "torch"] = "auto"

    @property
    def workspace_bytes(self) -> int | None:
        return None if self.workspace_mib is None else int(self.workspace_mib * 2**20)

    @model_validator(mode="after")
    def _check_filter(self) -> LossConfig:
        if self.gradient == "exact" and self.filter != FilterConfig():
            raise ValueError(
                "loss.filter has no effect with loss.gradient=exact, which keeps every "
                "column: use loss.gradient=filtered, or leave loss.filter out"
            )
        keeps_all = self.filter.keep == 0 or self.filter.eps == 0
        filters = self.gradient == "filtered" or self.filter != FilterConfig()
        screens = self.logits == "screened"
        reaches_all = self.softcap is not None and self.label_smoothing > 0
        if reaches_all and (screens or (filters and not keeps_all)):
            raise ValueError(
                f"loss.softcap={self.softcap} with loss.label_smoothing={self.label_smoothing} "
                "gives every column its own gradient, so that no filter can leave columns out: use "
                "loss.gradient=exact, or in_forward without a filter, with loss.logits=full"
            )
        if screens and (self.gradient == "exact" or keeps_all):
            raise ValueError(
                "loss.logits=screened needs a filter that leaves columns out, got loss.gradient="
                f"{self.gradient} with loss.filter.keep={self.filter.keep}, loss.filter.eps="
                f"{self.filter.eps}: use loss.gradient=filtered and a filter whose keep or eps is "
                "above 0, or loss.logits=full"
            )
        if self.screen != ScreenConfig() and not screens:
            raise ValueError(
                f"loss.screen has no effect with loss.logits={self.logits}: use "
                "loss.logits=screened, or leave loss.screen out"
            )
        return self


class OptimizerConfig(Section):
    lr: Annotated[Float, Field(gt=0)] = 3e-3
    betas: tuple[
        Annotated[Float, Field(ge=0, lt=1)],
        Annotated[Float, Field(ge=0, lt=1)],
    ] = (0.9, 0.95)
    weight_decay: Annotated[Float, Field(ge=0)] = 0.1
    warmup: Annotated[Int, Field(ge=0)] = 20
    schedule: Literal["cosine", "constant"] = "cosine"
    clip: Annotated[Float, Field(gt=0)] | None = 1.0


class CheckpointConfig(Section):
    every: Annotated[Int, Field(ge=0)] = 100
    keep: Count = 2


class TrainConfig(Section):
    run: RunConfig = RunConfig()
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    steps: Count = 200
    batch: Count = 8
    # Sequences of a step over all data-parallel ranks; load_config computes `batch` from it.
    global_batch: Count | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    log_every: Count = 10

    @model_validator(mode="after")
    def _check_batch(self) -> TrainConfig:
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
        return self

    @model_validator(mode="after")
    def _check_screened(self) -> TrainConfig:
        if self.loss.logits == "screened" and self.dtype == "float32":
            raise ValueError(
                f"loss.logits=screened needs 16-bit training, got dtype={self.dtype}: use "
                "dtype=bfloat16, or loss.logits=full"
            )
        return self

    @model_validator(mode="after")
    def _check_pipeline(self) -> TrainConfig:
        parallel = self.parallel
        if parallel.pp == 1:
            return self
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
        return self

    @property
    def microbatches(self) -> int:
        """The number of a pipeline's microbatches; by default as many as the batch allows."""
        parallel = self.parallel
        if parallel.microbatches is not None:
            return parallel.microbatches
        return max(1, self.batch // (parallel.tp if parallel.sequence_parallel else 1))

    def layout(self, head: str = "cce") -> Layout:
        """Returns the pipeline's layout for a head; "dense" is always on the last stage.

        Raises:
            ValueError: model.layers or parallel.layers_per_stage do not fit the number of stages.
        """
        parallel, schedule = self.parallel, self.parallel.schedule
        over_pipeline = parallel.vocab_over_pipeline and head == "cce"
        if schedule == "vocab_1f1b" and not over_pipeline:
            schedule = "1f1b" if self.microbatches >= parallel.pp else "gpipe"
        stages = parallel.pp * stages_of_a_rank(schedule, parallel.virtual_stages)
        layers = split_layers(self.model.layers, stages, parallel.layers_per_stage)
        return Layout(schedule, parallel.pp, self.microbatches, layers, over_pipeline)

    @property
    def run_dir(self) -> Path:
        return self.run.out / self.run.name
