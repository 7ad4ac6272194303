"""Benchmark of whole steps of a Megatron job, with its own losses and with `megatron_patch`.

Every rank of the job runs this; all ranks are tensor-parallel.
"""

from __future__ import annotations

import gc
import statistics
import time
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patch
from benchmarks.ranks.megatron_model import (
    MARKED,
    RECOMPUTE,
    HeadInput,
    HeadOutput,
    Marks,
    Sizes,
    build,
    make_config,
    wrap,
)
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.machine import synchronize
from cce_dist.bench.ranks import Job
from cce_dist.bench.report import Cells, percentiles_ms
from cce_dist.bench.training import GIB, USABLE

# The options of megatron_patch for each of our losses; the environment may give the other options.
options_of = megatron_patch.PatchOptions.from_environment
OURS: dict[str, Callable[[], megatron_patch.PatchOptions]] = {
    "exact": lambda: options_of(gradient="exact", keep_logits=False),
    # "exact" with its default options.
    "exact-kept": lambda: options_of(gradient="exact"),
    "filtered": lambda: options_of(gradient="filtered"),
    "screened": lambda: options_of(logits="screened"),
}
# Megatron's losses, ours, and a step without head and loss. The time that a step takes beyond this
# last one is the time of its head and loss.
LOSSES = ("unfused", "native", *OURS, "no head")
# Relative tolerance of the mean loss: Megatron rounds its logits to 16 bits.
LOSS_TOLERANCE = 2e-3


@dataclass(frozen=True)
class Plan:
    """Settings of the steps: `microbatches` microbatches a step, each of `batch` sequences."""

    losses: Sequence[str]
    sequence: int
    batch: int
    microbatches: int
    repeats: int
    sequence_parallel: bool
    largest: Sequence[str]  # losses that also run about their largest microbatch


def bench_megatron(
    job: Job,
    sizes: Sizes,
    inputs: BenchInputs,
    plan: Plan,
    save: Callable[[list[Cells]], None] = lambda rows: None,
) -> list[Cells]:
    """Returns a row for each loss and size of a microbatch. Needs Megatron's groups.

    Args:
        inputs: plan.sequence * plan.batch tokens and the whole vocabulary, the same on every rank.
            In every microbatch `inputs.hidden` replaces the last norm's output: the softmax of a
            model that has just been initialised would be flat.
        save: called with all rows so far.
    Raises:
        ValueError: a loss is not one of LOSSES.
        RuntimeError: a loss differs from Megatron's by more than LOSS_TOLERANCE, relatively.
    """
    for name, names, allowed in (
        ("loss", plan.losses, LOSSES),
        ("largest", plan.largest, LOSSES[:-1]),
    ):
        unknown = sorted(set(names) - set(allowed))
        if unknown:
            raise ValueError(f"{name} must be among {list(allowed)}, got {unknown}")
    # Free the previous model, which is in a reference cycle.
    gc.collect()
    meter = Meter(job, sizes, inputs, plan)
    rows: list[Cells] = meter.compare()
    save(rows)
    if job.device.type == "cuda":
        for loss in plan.largest:
            rows.append(meter.largest(loss))
            save(rows)
    return rows


@contextmanager
def using(loss: str, model: Any) -> Iterator[None]:
    """Makes `model`, a GPTModel, use this loss until the context ends."""
    if loss in OURS:
        with megatron_patch.patched(model, OURS[loss]()):
            yield
        return
    if loss != "no head":
        model.config.cross_entropy_loss_fusion = loss == "native"
        yield
        return
    layer = model.output_layer
    layer.forward = types.MethodType(lambda self, input_, **_: (input_, None), layer)

    def mean_of_hidden(self: Any, labels: Tensor, hidden: Tensor) -> Tensor:
        return hidden.mean(-1, dtype=torch.float32)

    model.compute_language_model_loss = types.MethodType(mean_of_hidden, model)
    try:
        yield
    finally:
        del layer.forward, model.compute_language_model_loss


class Meter:
    """Measurements of one model with varying loss and microbatch."""

    def __init__(self, job: Job, sizes: Sizes, inputs: BenchInputs, plan: Plan) -> None:
        self.job, self.inputs, self.plan = job, inputs, plan
        on_gpu = job.device.type == "cuda"
        self.config = make_config(sizes, job.size, plan.sequence_parallel, on_gpu)
        self.model = build(sizes, self.config, plan.sequence, inputs, job.device)
        self.wrapped, self.optimizer = wrap(self.config, self.model)
        self.marks = Marks()
        self.hidden = self.tokens = self.labels = inputs.targets
        self.model.decoder.final_layernorm.register_forward_hook(
            lambda module, arguments, output: HeadInput.apply(output, self.hidden, self.marks)
        )

    def _fill(self, batch: int) -> None:
        """Sets the inputs of a microbatch of `batch` sequences, repeating the plan's sequences."""
        sequence, size = self.plan.sequence, self.job.size
        dim = self.inputs.hidden.shape[1]
        chosen = torch.arange(batch, device=self.job.device) % self.plan.batch
        self.labels = self.inputs.targets.view(-1, sequence)[chosen]
        self.tokens = self.labels.roll(1, 1)
        hidden = self.inputs.hidden.view(-1, sequence, dim).transpose(0, 1)
        if self.plan.sequence_parallel:
            hidden = hidden.chunk(size)[self.job.rank]
        self.hidden = hidden[:, chosen]

    def _step(self, microbatches: int) -> tuple[float, list[float], float, float]:
        # A rank that collects garbage in a step would make all others wait.
        gc.collect()
        gc.disable()
        try:
            return self._timed_step(microbatches)
        finally:
            gc.enable()

    def _timed_step(self, microbatches: int) -> tuple[float, list[float], float, float]:
        """Runs one step.

        Returns:
            seconds: time of the step.
            heads: seconds of each microbatch's head.
            peak: largest memory before the optimizer, GiB.
            loss: mean loss.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        device, on_gpu = self.job.device, self.job.device.type == "cuda"
        self.marks.taken.clear()
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        dist.barrier()
        synchronize(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        outputs = get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iter([None] * microbatches),
            model=self.wrapped,
            num_microbatches=microbatches,
            seq_length=self.plan.sequence,
            micro_batch_size=len(self.labels),
            forward_only=False,
        )
        peak = torch.cuda.max_memory_allocated(device) / GIB if on_gpu else 0.0
        self.optimizer.step()
        synchronize(device)
        seconds = time.perf_counter() - start
        loss = statistics.mean(float(x["loss"]) for x in outputs)
        return seconds, self._heads(), peak, loss

    def _forward_step(self, batches: Iterator[None], model: Any) -> tuple[Any, Any]:
        next(batches)
        batch, sequence = self.labels.shape
        position = torch.arange(sequence, device=self.job.device).expand(batch, sequence)
        output = model(self.tokens, position, None, labels=self.labels)
        output = HeadOutput.apply(output, self.marks)

        def mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = losses.float().mean()
            # Megatron divides the loss in place, so report a copy.
            return loss, {"loss": loss.detach().clone()}

        return output, mean

    def _heads(self) -> list[float]:
        """Returns the seconds that each microbatch spends in LM head and loss, both passes."""
        parts = [[x for key, x in self.marks.taken if key == name] for name in MARKED]

        def between(start: Any, end: Any) -> float:
            return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3

        return [between(*x[:2]) + between(*x[2:]) for x in zip(*parts, strict=True)]

    def compare(self) -> list[Cells]:
        """Measures whole steps of all losses in turns; returns a row for each loss.

        The first turn compiles, the second warms up.
        """
        plan = self.plan
        self._fill(plan.batch)
        taken: dict[str, list[Any]] = {loss: [] for loss in plan.losses}
        for turn in range(plan.repeats + 2):
            # Alternate the order, so that no loss always follows the same one.
            for loss in sorted(plan.losses, reverse=bool(turn % 2)):
                with using(loss, self.model):
                    taken[loss].append(self._step(plan.microbatches))
        everywhere: list[Any] = [None] * self.job.size
        dist.all_gather_object(everywhere, taken)
        rows = [
            self._row(loss, plan.batch, plan.microbatches, [x[loss][2:] for x in everywhere])
            for loss in plan.losses
        ]
        self._require_alike(rows)
        return rows

    def _require_alike(self, rows: Sequence[Cells]) -> None:
        means = {row["loss"]: row["mean_loss"] for row in rows if row["loss"] != "no head"}
        right = means.get("unfused", means.get("native"))
        for loss, mean in means.items():
            # `>` would let a NaN pass.
            if right is not None and not abs(mean - right) <= LOSS_TOLERANCE * abs(right):
                raise RuntimeError(f"{loss}: the loss is {mean}, Megatron's {right}")

    def _row(
        self, loss: str, batch: int, microbatches: int, ranks: list[list[Any]], recompute: str = ""
    ) -> Cells:
        """Returns the row of all ranks: times of the slowest rank, and the largest peak."""
        steps = [max(x[0] for x in step) for step in zip(*ranks, strict=True)]
        heads = [
            max(times)
            for step in zip(*ranks, strict=True)
            for times in zip(*(x[1] for x in step), strict=True)
        ]
        tokens = batch * self.plan.sequence
        times = percentiles_ms(steps)
        return {
            "loss": loss,
            "tp": self.job.size,
            "sequence_parallel": "yes" if self.plan.sequence_parallel else "",
            "recompute": recompute,
            "microbatch_tokens": tokens,
            "microbatches": microbatches,
            **times,
            "tokens_per_s": 1e3 * tokens * microbatches / times["median_ms"],
            "head_ms": None if loss == "no head" else 1e3 * statistics.median(heads),
            "peak_gib": max(x[2] for rank in ranks for x in rank),
            "mean_loss": ranks[0][0][3],
            "failed": "",
        }

    def largest(self, loss: str) -> Cells:
        """Runs a step of about the largest microbatch, with full recompute; returns its row.

        A line through the peaks of two smaller microbatches gives the size whose peak is USABLE of
        the memory.
        """
        before = {name: getattr(self.config, name) for name in RECOMPUTE}
        vars(self.config).update(RECOMPUTE)
        try:
            with using(loss, self.model):
                first, second = self.plan.batch, self._second_batch()
                peaks = [self._peak(batch) for batch in (first, second)]
                each = (peaks[1] - peaks[0]) / (second - first)
                room = USABLE * torch.cuda.get_device_properties(self.job.device).total_memory / GIB
                batch = int(first + (room - peaks[0]) / each)
                return self._try(loss, batch)
        finally:
            vars(self.config).update(before)
            self._fill(self.plan.batch)

    def _second_batch(self) -> int:
        """Returns a batch with more than 2^31 logits on a rank.

        From there on torch.compile compiles Megatron's fused loss anew. If the GPU were full by
        then, it would try kernels on copies of the logits in the host's memory.
        """
        logits = len(self.inputs.weight) // self.job.size * self.plan.sequence
        return max(2 * self.plan.batch, 2**31 // logits + 1)

    def _peak(self, batch: int) -> float:
        self._fill(batch)
        self._step(1)
        peak = torch.tensor(self._step(1)[2], device=self.job.device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        return float(peak)

    def _try(self, loss: str, batch: int) -> Cells:
        gc.collect()
        torch.cuda.empty_cache()
        self._fill(batch)
        everywhere: list[Any] = [None] * self.job.size
        dist.all_gather_object(everywhere, [self._step(1)])
        row = self._row(loss, batch, 1, everywhere, "full")
        # A single step, with the first allocations of its size, says nothing about speed.
        timed = ("median_ms", "p10_ms", "p90_ms", "tokens_per_s", "head_ms")
        return {**row, **dict.fromkeys(timed)}
