"""The evaluation of a finished run: its loss and memory beside those of dense logits."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.core.allocations import track_allocations
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.disk import writing
from cce_dist.train.loop import Job, Run
from cce_dist.train.metrics import read_metrics
from cce_dist.train.model.fsdp import gathered_head
from cce_dist.train.model.head import (
    HeadLayout,
    HeadLoss,
    golden_loss,
    head_layout,
    make_head_loss,
)
from cce_dist.train.progress import format_bytes

if TYPE_CHECKING:
    from cce_dist.train.pipeline.step import Pipeline

# Dense logits are computed and measured only if one fp32 copy of them is at most this large.
MEASURE_DENSE_BYTES = 2**29

# Lines of metrics.jsonl, and rows of a table.
Records = list[dict[str, Any]]
Rows = list[tuple[str, str]]


@dataclass(frozen=True)
class Memory:
    """Memory of the tensors that one forward and backward of the head allocate on this rank.

    Args:
        peak_bytes: the largest size of all these tensors at a time.
        largest_numel: number of elements of the largest tensor; None on a GPU, where only the
            allocator's peak is known.
    """

    peak_bytes: int
    largest_numel: int | None

    def __str__(self) -> str:
        text = f"{format_bytes(self.peak_bytes)} a rank, measured"
        if self.largest_numel is not None:
            text += f"; largest tensor {self.largest_numel:,} numbers"
        return text


@dataclass(frozen=True)
class Evaluation:
    """A rank's evaluation of a trained model; only memory differs between ranks.

    Args:
        dense_memory: memory of the dense head on the same inputs; None: not measured.
        num_tokens: number of tokens of the held-out batch.
        tokens_here: number of tokens of the measured head's input on this rank.
    """

    loss: float
    dense_loss: float
    memory: Memory
    dense_memory: Memory | None
    num_tokens: int
    tokens_here: int


@dataclass(frozen=True)
class HeadInputs:
    """Arguments of a head's loss, and the ranks that share the vocabulary."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V_local, D]
    targets: Tensor  # [N]
    layout: HeadLayout

    def measure(self, head_loss: HeadLoss) -> tuple[float, Memory]:
        """Returns the loss and the memory of one forward and backward of the head."""
        hidden = self.hidden.detach().requires_grad_()
        weight = self.weight.detach().requires_grad_()

        def forward_and_backward() -> Tensor:
            loss = head_loss(hidden, weight, self.targets, ()).loss
            loss.backward()
            return loss

        return measure(forward_and_backward, hidden.device)


def evaluate(job: Job, run: Run) -> Evaluation:
    """Runs the held-out batch through this run's head and through dense float64 logits.

    Over a pipeline memory is measured for one microbatch: the head works on one at a time. If the
    head is on the last stage, the last stage's ranks evaluate, and tell the others. Every rank must
    call this function.
    """
    job.heartbeat.place.phase = "evaluating"
    config, ranks, pipeline = job.config, job.ranks, run.pipeline
    ids, targets = (x.to(ranks.device) for x in job.batches.held_out_batch())
    if pipeline is None:
        with torch.no_grad():
            hidden = run.model(ids)
        with gathered_head(run.model) as weight:
            inputs = HeadInputs(hidden, weight, targets.flatten(), head_layout(config, ranks))
            return _compare(run, config, *inputs.measure(run.head_loss), inputs, inputs)
    loss, hidden = pipeline.evaluate(ids, targets)
    evaluation: list[Any] = [None]
    # If the head is on the last stage, ranks of other stages have no rows of it.
    if pipeline.head is not None or pipeline.model.has_last:
        evaluation = [_evaluate_stage(job, run, pipeline, loss.item(), hidden, targets)]
    if pipeline.head is None:
        last = pipeline.layout.last_rank
        dist.broadcast_object_list(evaluation, group=pipeline.group, group_src=last)
    return evaluation[0]


def _evaluate_stage(
    job: Job, run: Run, pipeline: Pipeline, loss: float, hidden: Tensor, targets: Tensor
) -> Evaluation:
    config, ranks, count = job.config, job.ranks, pipeline.layout.microbatches
    layout, slices = head_layout(config, ranks), config.parallel.sequence_parallel
    first, first_targets = hidden.chunk(count)[0], targets.chunk(count)[0]
    here = first.chunk(ranks.tp)[ranks.tp_rank] if slices else first
    weight, memory = pipeline.model.head_weight, None
    if pipeline.head is not None:
        weight, memory = pipeline.head.weight, _measure_phases(pipeline, here, first_targets)
        here, layout = first, HeadLayout(ranks.vocab_group, config.data.vocab_size, False)
    part = HeadInputs(here.flatten(0, 1), weight, first_targets.flatten(), layout)
    unsliced = dataclasses.replace(layout, sequence_parallel=False)
    whole = HeadInputs(hidden.flatten(0, 1), weight, targets.flatten(), unsliced)
    return _compare(run, config, loss, memory or part.measure(run.head_loss)[1], part, whole)


def _compare(
    run: Run,
    config: TrainConfig,
    loss: float,
    memory: Memory,
    part: HeadInputs,  # whose memory is measured
    whole: HeadInputs,
) -> Evaluation:
    dense_memory = None
    if run.head == "cce" and len(part.hidden) * config.data.vocab_size * 4 <= MEASURE_DENSE_BYTES:
        dense_memory = part.measure(make_head_loss(config, part.layout, "dense"))[1]
    return Evaluation(
        loss=loss,
        dense_loss=golden_loss(
            whole.hidden, whole.weight.detach(), whole.targets, config, whole.layout
        ),
        memory=memory,
        dense_memory=dense_memory,
        num_tokens=whole.targets.numel(),
        tokens_here=len(part.hidden),
    )


def _measure_phases(pipeline: Pipeline, hidden: Tensor, targets: Tensor) -> Memory:
    """Measures the memory of a microbatch in the head's phases, on this rank."""
    head, root = pipeline.head, pipeline.layout.last_rank
    assert head is not None
    tensors = (hidden, targets) if head.rank == root else ()

    def phases() -> Tensor:
        head.post(0, root, *tensors)
        head.statistics(0)
        loss = head.gradients(0, root)
        head.take(0)
        head.finish_step()
        return loss

    memory = measure(phases, hidden.device)[1]
    head.weight.grad = None
    return memory


def measure(compute_loss: Callable[[], Tensor], device: torch.device) -> tuple[float, Memory]:
    """Returns the loss that the function computes, and its memory."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss = compute_loss()
        peak = torch.cuda.max_memory_allocated(device) - before
        return loss.item(), Memory(peak, None)
    with track_allocations() as allocations:
        loss = compute_loss()
    return loss.item(), Memory(allocations.peak_bytes, allocations.largest_numel)


def write_report(job: Job, folder: Path, evaluation: Evaluation, dense: Path | None) -> str:
    """Writes report.md and loss.png in the run's folder; returns the report's text.

    Args:
        dense: the folder of a run with a dense head, for comparison.
    """
    records = read_metrics(folder)
    dense_records = read_metrics(dense) if dense is not None else []
    lines = [f"# {job.config.run.name}", ""]
    lines += _table(_rows(job, records, evaluation))
    if dense_records:
        lines += ["", "## Beside the same run with dense logits", ""]
        lines += _table(_comparison_rows(records, dense_records))
    lines += ["", f"Curve: loss.png. Every step: metrics.jsonl ({len(records)} lines).", ""]
    text = "\n".join(lines)
    with writing("the report", folder):
        plot_losses(
            folder / "loss.png", job.config.run.name, records, dense_records, evaluation.loss
        )
        (folder / "report.md").write_text(text)
    return text


def _rows(job: Job, records: Records, evaluation: Evaluation) -> Rows:
    config, ranks = job.config, job.ranks
    rows = [
        ("ranks", f"{ranks.world_size} x {ranks.device.type}, {describe_ranks(job)}"),
        *([("pipeline", config.layout().describe())] if ranks.pp > 1 else []),
        *_losses(records),
        ("held-out loss", f"{evaluation.loss:.6f} nats over {evaluation.num_tokens} tokens"),
        ("dense loss of the same batch", f"{evaluation.dense_loss:.6f} nats (float64 logits)"),
        ("difference", f"{evaluation.loss - evaluation.dense_loss:+.2e} nats"),
        *_speed_and_memory(records),
        ("memory of the head, forward and backward", str(evaluation.memory)),
        ("the same with dense logits", _describe_dense_memory(evaluation, config)),
    ]
    if tail_masses := _logged(records, "tail_mass"):
        rows.append(("tail mass, last logged", f"{tail_masses[-1]:.2e}"))
    if screened := _logged(records, "screened"):
        share = f"{sum(screened)} of {len(screened)}"
        rows.append(("logged steps whose logits were screened", share))
    return rows


def _losses(records: Records) -> Rows:
    # Somebody may have removed metrics.jsonl, or lines of it.
    if not records:
        return []
    first, last = records[0]["loss"], records[-1]["loss"]
    change = f"{abs(first - last):.2f} {'lower' if last <= first else 'higher'}"
    return [
        ("first loss", f"{first:.4f} nats"),
        (f"final loss (step {records[-1]['step']})", f"{last:.4f} nats, {change}"),
    ]


def _describe_dense_memory(evaluation: Evaluation, config: TrainConfig) -> str:
    vocab_size = config.data.vocab_size
    shape = f"[{evaluation.tokens_here}, {vocab_size}]"
    if evaluation.dense_memory is not None:
        return f"{evaluation.dense_memory} with logits {shape}"
    # A dense head needs at least fp32 logits and the logits' gradient.
    num_bytes = 2 * 4 * evaluation.tokens_here * vocab_size
    return f"{format_bytes(num_bytes)} a rank, computed: fp32 logits {shape} and their gradient"


def _comparison_rows(records: Records, dense_records: Records) -> Rows:
    losses = {record["step"]: record["loss"] for record in records}
    differences = [
        (abs(losses[record["step"]] - record["loss"]), -record["step"])
        for record in dense_records
        if record["step"] in losses
    ]
    worst, step = max(differences, default=(math.nan, 0))
    return [
        ("dense final loss", f"{dense_records[-1]['loss']:.4f} nats"),
        ("largest difference of the curves", f"{worst:.2e} nats in step {-step}"),
        *((f"dense {name}", value) for name, value in _speed_and_memory(dense_records)),
    ]


def _speed_and_memory(records: Records) -> Rows:
    if not records:
        return []
    # The median leaves out the first steps, which include warm-up.
    rates = sorted(record["tokens_per_s"] for record in records)
    peak = max(record["peak_memory"] for record in records)
    rows = [
        ("tokens/s, median step", f"{rates[len(rates) // 2]:,.0f}"),
        ("peak memory of training", f"{format_bytes(peak)} on the rank with the most"),
    ]
    if places := _logged(records, "peak_memory_of_pp"):
        # Steps before a checkpoint may have had another number of ranks.
        alike = [each for each in places if len(each) == len(places[-1])]
        largest = [format_bytes(max(values)) for values in zip(*alike, strict=True)]
        rows.append(("peak memory by pipeline rank", ", ".join(largest)))
    return rows


def _logged(records: Records, name: str) -> list[Any]:
    return [record[name] for record in records if name in record]


def describe_ranks(job: Job) -> str:
    ranks = job.ranks
    pipeline = f", pp {ranks.pp}" if ranks.pp > 1 else ""
    return f"dp {ranks.dp}{' (fsdp)' if job.config.parallel.fsdp else ''}{pipeline}, tp {ranks.tp}"


def _table(rows: Rows) -> list[str]:
    return ["| what | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def plot_losses(
    path: Path, name: str, records: Records, dense_records: Records, held_out: float
) -> None:
    """Draws the loss of each step, and as a level the trained model's held-out loss, in nats."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, curve, style in (("cce_dist", records, "-"), ("dense", dense_records, "--")):
        if curve:
            steps = [record["step"] for record in curve]
            axes.plot(steps, [record["loss"] for record in curve], style, label=label)
    axes.axhline(held_out, color="C2", linestyle=":", label="held out, after the last step")
    axes.set(xlabel="step", ylabel="loss, nats per token", title=name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
