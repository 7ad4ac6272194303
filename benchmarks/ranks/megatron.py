"""Benchmark of whole steps of a Megatron job, with its own losses and with `megatron_patch`.

Every rank of the job runs this; all ranks are tensor-parallel.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patch
from benchmarks.ranks.megatron_model import HeadInput, Sizes, build, make_config, wrap
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.machine import synchronize
from cce_dist.bench.ranks import Job, from_all
from cce_dist.bench.report import Cells, percentiles_ms
from cce_dist.bench.training import GIB

# The options of megatron_patch for each of our losses; the environment may give the other options.
options_of = megatron_patch.PatchOptions.from_environment
OURS: dict[str, Callable[[], megatron_patch.PatchOptions]] = {
    "exact": lambda: options_of(gradient="exact", keep_logits=False),
    # "exact" with its default options.
    "exact-kept": lambda: options_of(gradient="exact"),
    "filtered": lambda: options_of(gradient="filtered"),
    "screened": lambda: options_of(logits="screened"),
}
# A step without head and loss.
NO_HEAD = "no head"
LOSSES = ("unfused", "native", *OURS, NO_HEAD)
# Relative tolerance of the mean loss: Megatron rounds its logits to 16 bits.
LOSS_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Plan:
    """Settings of the steps: `microbatches` microbatches a step, each of `batch` sequences.

    Args:
        recompute: the backward computes all layers anew, so that a larger microbatch fits.
    """

    losses: Sequence[str]
    sequence: int
    batch: int
    microbatches: int
    repeats: int
    sequence_parallel: bool
    recompute: bool = False


class Step(NamedTuple):
    """A step's time, peak before the optimizer, and mean loss."""

    seconds: float
    peak_gib: float
    loss: float


def bench_megatron(job: Job, sizes: Sizes, inputs: BenchInputs, plan: Plan) -> list[Cells]:
    """Returns a row for each loss. Needs Megatron's groups.

    The losses take turns. The first turn compiles, the second warms up. `head_ms` is a microbatch's
    share of what a step takes beyond one without head and loss.

    Args:
        inputs: plan.sequence * plan.batch tokens and the whole vocabulary, the same on every rank.
            In every microbatch `inputs.hidden` replaces the last norm's output: the softmax of a
            model that has just been initialised would be flat.
    Raises:
        ValueError: a loss is not one of LOSSES.
        RuntimeError: a loss differs from Megatron's by more than LOSS_TOLERANCE, relatively.
    """
    unknown = sorted(set(plan.losses) - set(LOSSES))
    if unknown:
        raise ValueError(f"loss must be among {list(LOSSES)}, got {unknown}")
    # Free the previous model, which is in a reference cycle.
    gc.collect()
    trainer = Trainer(job, sizes, inputs, plan)
    taken: dict[str, list[Step]] = {loss: [] for loss in plan.losses}
    for turn in range(plan.repeats + 2):
        # Alternate the order, so that no loss always follows the same one.
        for loss in sorted(plan.losses, reverse=bool(turn % 2)):
            with using(loss, trainer.model):
                taken[loss].append(trainer.step())
    everywhere = from_all(job, taken)
    rows: list[Cells] = [
        _row(loss, job, plan, [rank[loss][2:] for rank in everywhere]) for loss in plan.losses
    ]
    for without in (row["median_ms"] for row in rows if row["loss"] == NO_HEAD):
        heads = [(row["median_ms"] - without) / plan.microbatches for row in rows]
        rows = [{**row, "head_ms": head} for row, head in zip(rows, heads, strict=True)]
    means = {row["loss"]: row["mean_loss"] for row in rows if row["loss"] != NO_HEAD}
    require_alike(means, means.get("unfused", means.get("native")))
    return rows


def require_alike(means: Mapping[str, float], right: float | None) -> None:
    """Checks that mean losses are `right`; None: it is not known.

    Raises:
        RuntimeError: a loss differs by more than LOSS_TOLERANCE, relatively.
    """
    for name, mean in means.items():
        # `>` would let a NaN pass.
        if right is not None and not abs(mean - right) <= LOSS_TOLERANCE * abs(right):
            raise RuntimeError(f"{name}: the mean loss must be {right}, got {mean}")


@contextmanager
def using(loss: str, model: Any) -> Iterator[None]:
    """Makes `model`, a GPTModel, use this loss until the context ends."""
    if loss in OURS:
        with megatron_patch.patched(model, OURS[loss]()):
            yield
        return
    if loss != NO_HEAD:
        model.config.cross_entropy_loss_fusion = loss == "native"
        yield
        return
    with (
        patch.object(model.output_layer, "forward", lambda hidden, **_: (hidden, None)),
        patch.object(model, "compute_language_model_loss", lambda labels, hidden: _mean_of(hidden)),
    ):
        yield


def _mean_of(hidden: Tensor) -> Tensor:
    return hidden.mean(-1, dtype=torch.float32)


class Trainer:
    """Steps of one model, whose loss may change between them."""

    def __init__(self, job: Job, sizes: Sizes, inputs: BenchInputs, plan: Plan) -> None:
        self.job, self.plan = job, plan
        on_gpu = job.device.type == "cuda"
        config = make_config(sizes, job.size, plan.sequence_parallel, on_gpu, plan.recompute)
        self.model = build(sizes, config, plan.sequence, inputs, job.device)
        self.wrapped, self.optimizer = wrap(config, self.model)
        self.labels = inputs.targets.view(plan.batch, plan.sequence)
        self.tokens = self.labels.roll(1, 1)
        hidden = inputs.hidden.view(plan.batch, plan.sequence, -1).transpose(0, 1).contiguous()
        if plan.sequence_parallel:
            hidden = hidden.chunk(job.size)[job.rank]
        self.model.decoder.final_layernorm.register_forward_hook(
            lambda module, arguments, output: HeadInput.apply(output, hidden)
        )

    def step(self) -> Step:
        # A rank that collects garbage in a step would make all others wait.
        gc.collect()
        gc.disable()
        try:
            return self._timed_step()
        finally:
            gc.enable()

    def _timed_step(self) -> Step:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        device, on_gpu = self.job.device, self.job.device.type == "cuda"
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        dist.barrier()
        synchronize(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        outputs = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter([None] * self.plan.microbatches),
            model=self.wrapped,
            num_microbatches=self.plan.microbatches,
            seq_length=self.plan.sequence,
            micro_batch_size=self.plan.batch,
            forward_only=False,
        )
        peak = torch.cuda.max_memory_allocated(device) / GIB if on_gpu else 0.0
        self.optimizer.step()
        synchronize(device)
        seconds = time.perf_counter() - start
        loss = statistics.mean(float(output["loss"]) for output in outputs)
        return Step(seconds, peak, loss)

    def _forward_step(self, batches: Iterator[None], model: Any) -> tuple[Any, Any]:
        next(batches)
        position = torch.arange(self.plan.sequence, device=self.job.device).expand_as(self.labels)
        output = model(self.tokens, position, None, labels=self.labels)

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            # Megatron divides the loss in place, so report a copy.
            return loss, {"loss": loss.detach().clone()}

        return output, mean


def _row(loss: str, job: Job, plan: Plan, ranks: Sequence[Sequence[Step]]) -> Cells:
    """Returns the row of all ranks: times of the slowest rank, and the largest peak."""
    steps = zip(*ranks, strict=True)
    times = percentiles_ms([max(rank.seconds for rank in step) for step in steps])
    tokens = plan.batch * plan.sequence
    return {
        "loss": loss,
        "tp": job.size,
        "sequence_parallel": "yes" if plan.sequence_parallel else "",
        "recompute": "full" if plan.recompute else "",
        "microbatch_tokens": tokens,
        "microbatches": plan.microbatches,
        **times,
        "tokens_per_s": 1e3 * tokens * plan.microbatches / times["median_ms"],
        "head_ms": None,
        "peak_gib": max(step.peak_gib for rank in ranks for step in rank),
        "mean_loss": ranks[0][0].loss,
        "failed": "",
    }
