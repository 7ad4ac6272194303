"""A layout as Megatron's flags and as torch's stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from cce_dist.planner.cost.job import MEGATRON_ROWS, OURS, Job
from cce_dist.planner.models.model import Model

# Names of attention here -> values of --attention-backend, where the two differ.
BACKENDS = {"cudnn": "fused"}


def layout_string(layout: Sequence[int]) -> str:
    """Writes Megatron's --pipeline-model-parallel-layout.

    E is the embedding, t a layer, L the loss. | separates the stages, in the order of the model.
    """
    last = len(layout) - 1
    texts = []
    for index, count in enumerate(layout):
        layers = "t" if count == 1 else f"t*{count}" if count else ""
        texts.append("E" * (index == 0) + layers + "L" * (index == last))
    if last == 0:
        return texts[0]
    layout_text = texts[0] + "|"
    for text, same in groupby(texts[1:-1]):
        count = len(list(same))
        layout_text += f"{text}|" if count == 1 else f"({text}|)*{count}"
    return layout_text + texts[-1]


def megatron_flags(model: Model, job: Job, layout: Sequence[int]) -> list[str]:
    """Returns the flags of Megatron's training script for the job and its layout of layers.

    Raises:
        ValueError: neither Megatron nor `megatron_patch` can run the job.
    """
    _require_megatrons(model, job)
    flags = [
        f"--num-layers {model.layers}",
        f"--seq-length {job.sequence}",
        f"--micro-batch-size {job.microbatch}",
        f"--global-batch-size {job.microbatch * job.microbatches * job.dp}",
        f"--tensor-model-parallel-size {job.tp}",
        f"--pipeline-model-parallel-size {job.pp}",
        "--bf16",
    ]
    divisible_by = job.rows_divisible_by(model.num_rows)
    backend = BACKENDS.get(job.attention, job.attention)
    optional = (
        ("--grad-reduce-in-bf16", job.gradients == "bf16"),
        (f"--context-parallel-size {job.cp}", job.cp > 1),
        (f"--expert-model-parallel-size {job.ep}", job.ep > 1),
        # Megatron warns about sequence parallelism with one rank, and refuses overlap without it.
        ("--sequence-parallel", job.sequence_parallel and job.tp > 1),
        ("--tp-comm-overlap", job.overlap_tensor and job.tp > 1),
        ("--use-distributed-optimizer", job.distributed_optimizer),
        ("--overlap-grad-reduce", job.overlap_data),
        ("--overlap-param-gather", job.overlap_data and job.distributed_optimizer),
        (f"--attention-backend {backend}", job.attention != "auto"),
        # Megatron's defaults are 0.1.
        ("--attention-dropout 0", not job.dropout),
        ("--hidden-dropout 0", not job.dropout),
        (f"--recompute-granularity {job.recompute}", job.recompute != "none"),
        ("--recompute-method uniform", job.recompute == "full"),
        ("--recompute-num-layers 1", job.recompute == "full"),
        ("--cross-entropy-loss-fusion", job.loss == "native"),
        ("--untie-embeddings-and-output-weights", not model.tied),
        (f"--make-vocab-size-divisible-by {divisible_by}", divisible_by != MEGATRON_ROWS),
    )
    return flags + [flag for flag, holds in optional if holds] + layout_flags(job, layout)


def patch_flags(job: Job) -> list[str]:
    """Returns python's arguments to run Megatron's script with our loss; docs/guide/megatron.md."""
    if job.loss not in OURS:
        return []
    over = ["--vocab-over-pipeline true"] if job.is_over_ranks else []
    return ["-m megatron_patch", f"--gradient {job.loss}", *over]


def _require_megatrons(model: Model, job: Job) -> None:
    """Checks that Megatron or megatron_patch can run the job.

    Raises:
        ValueError: neither can; the message says what both need.
    """
    name = job.schedule_name
    if name not in ("1f1b", "interleaved", "vocab"):
        raise ValueError(f"schedule must be '1f1b' or 'interleaved' in Megatron, got {name!r}")
    if name == "interleaved" and job.pp == 1:
        raise ValueError("pp must be >= 2 under Megatron's interleaved 1F1B, got 1")
    if model.experts and job.tp > 1 and not job.sequence_parallel:
        raise ValueError(
            "sequence_parallel must be true in Megatron with experts and tp > 1, got false and tp "
            f"{job.tp}"
        )
    if job.sequence_parallel and job.sequence // job.cp % job.tp:
        raise ValueError(
            f"sequence must be a multiple of cp * tp, {job.cp * job.tp}, under Megatron's "
            f"sequence parallelism, got {job.sequence}"
        )
    if name == "interleaved" and job.microbatches % job.pp:
        raise ValueError(
            f"microbatches must be a multiple of pp, {job.pp}, under Megatron's interleaved 1F1B, "
            f"got {job.microbatches}"
        )
    if job.is_served:
        raise ValueError(
            f"schedule must be 'vocab' in megatron_patch with vocab_over {job.vocab_over!r}, got "
            f"{name!r}, which only torch runs with it"
        )
    if job.is_over_ranks and job.pp == 1:
        raise ValueError(
            f"pp must be >= 2 in megatron_patch with vocab_over {job.vocab_over!r}, got 1"
        )
    if job.vocab_over == "pp" and job.tp > 1:
        raise ValueError(
            f"vocab_over must be 'pp-tp' in megatron_patch with tp > 1, got 'pp' with tp {job.tp}"
        )
    if job.loss in ("chunked", "none"):
        raise ValueError(
            "loss must be 'dense' or 'native' in Megatron, 'exact' or 'filtered' in "
            f"megatron_patch, got {job.loss!r}"
        )
    if job.precision != "mixed":
        raise ValueError(
            "precision must be 'mixed' in Megatron, which keeps fp32 copies of its 16-bit weights "
            f"and has no autocast, got {job.precision!r}"
        )


def layout_flags(job: Job, layout: Sequence[int]) -> list[str]:
    """Returns the fewest flags that give this layout.

    They are none, the number of layers of the first and the last stage, or the layout itself.
    """
    if job.pp == 1:
        return []
    middle = set(layout[1:-1])
    if len(set(layout)) == 1:
        return [f"--num-virtual-stages-per-pipeline-rank {job.chunks}"] if job.chunks > 1 else []
    if job.chunks == 1 and len(middle) == 1 and min(layout) > 0:
        (inner,) = middle
        flags = []
        if layout[0] != inner:
            flags.append(f"--decoder-first-pipeline-num-layers {layout[0]}")
        if layout[-1] != inner:
            flags.append(f"--decoder-last-pipeline-num-layers {layout[-1]}")
        return flags
    return [f'--pipeline-model-parallel-layout "{layout_string(layout)}"']


def torch_stages(layout: Sequence[int], *, has_head: bool = True) -> list[list[str]]:
    """Lists the modules of each stage by their names in a torch decoder; layers are one slice."""
    stages, first, last = [], 0, len(layout) - 1
    for index, count in enumerate(layout):
        modules = ["embed_tokens"] if index == 0 else []
        if count:
            modules.append(f"layers[{first}:{first + count}]")
        if index == last:
            modules += ["norm", "lm_head"] if has_head else ["norm"]
        stages.append(modules)
        first += count
    return stages
