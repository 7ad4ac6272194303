"""Benchmark of a pipeline's steps: the head on the last stage, or the vocabulary over all ranks.

With the head on the last stage, layers may be moved away from it. Every rank of the job runs this;
each has one stage.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.ranks.megatron import LOSS_TOLERANCE
from benchmarks.ranks.megatron_model import Sizes
from benchmarks.ranks.pipeline_model import StageModule, even_layout, initialize, relayout
from benchmarks.ranks.pipeline_spans import KINDS, Recorder, Span, recording
from cce_dist import LossOptions, StepQuantizer, VocabShard
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.machine import synchronize
from cce_dist.bench.ranks import Job
from cce_dist.bench.report import Cells, percentiles_ms
from cce_dist.bench.training import GIB
from cce_dist.pipeline.embedding import TiedEmbedding
from cce_dist.pipeline.head import PipelineHead
from cce_dist.pipeline.schedules.last_stage import LastStageLoss
from cce_dist.pipeline.schedules.torch_schedules import VocabOverPipeline
from cce_dist.pipeline.schedules.vocab_1f1b import ScheduleVocab1F1B
from cce_dist.planner.orders.vocab_1f1b import Times

# Places of the head; "moved" means that the head's stage has fewer layers.
HEADS = ("dense", "dense-moved", "fused", "fused-moved", "vocab-1f1b", "vocab-thread")
OVER_RANKS = HEADS[4:]


@dataclass(frozen=True)
class Plan:
    """Settings of the steps: `microbatches` microbatches a step, each of `batch` sequences."""

    heads: Sequence[str]
    sequence: int
    batch: int
    microbatches: int
    repeats: int
    gradient: str  # option of our losses
    logits: str = "full"  # option of our losses


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank."""

    layers: int
    seconds: list[float]
    spans: list[Span]  # of the last step
    peak_gib: float
    losses: list[float]  # of the last step's microbatches; empty where this rank has none

    def median_seconds(self, kind: str) -> float:
        """Returns the median seconds of the passes of one kind; 0 if there are none."""
        durations = [span.end - span.start for span in self.spans if span.kind == kind]
        return statistics.median(durations) if durations else 0.0

    @property
    def busy(self) -> float:
        return sum(span.end - span.start for span in self.spans)


def bench_pipeline(
    job: Job,
    sizes: Sizes,
    inputs: BenchInputs,
    plan: Plan,
    save: Callable[[list[Cells]], None] = lambda rows: None,
) -> tuple[list[Cells], dict[str, list[list[Span]]]]:
    """Returns a row for each place of the head and stage, and the spans of each stage's passes.

    Args:
        inputs: plan.sequence * plan.batch tokens and the whole vocabulary, the same on every rank.
            In every microbatch `inputs.hidden` replaces the last norm's output: the softmax of a
            model that has just been initialised would be flat.
        save: called with all rows so far.
    Raises:
        ValueError: a head is not one of HEADS, there are fewer than two ranks, or fewer layers
            than ranks.
        RuntimeError: a loss differs from the first head's by more than LOSS_TOLERANCE, relatively.
    """
    unknown = sorted(set(plan.heads) - set(HEADS))
    if unknown:
        raise ValueError(f"head must be among {list(HEADS)}, got {unknown}")
    if job.size < 2 or sizes.layers < job.size:
        raise ValueError(
            f"ranks must be at least 2 and at most as many as layers, {sizes.layers}, got "
            f"{job.size}"
        )
    rows: list[Cells] = []
    lanes: dict[str, list[list[Span]]] = {}
    measured: dict[str, list[Measured]] = {}
    for head in plan.heads:
        layout, times = _prepare(head, sizes.layers, job.size, measured)
        everywhere: list[Any] = [None] * job.size
        dist.all_gather_object(everywhere, _measure(job, sizes, inputs, plan, head, layout, times))
        measured[head] = everywhere
        lanes[head] = [rank.spans for rank in everywhere]
        rows += _rows(head, plan, everywhere)
        save(rows)
    _require_alike(rows)
    return rows, lanes


def _prepare(
    head: str, layers: int, stages: int, measured: dict[str, list[Measured]]
) -> tuple[list[int], Times]:
    """Returns each stage's layers and the passes' times, planned from earlier measurements."""
    layout, times = even_layout(layers, stages), Times()
    name = head.removesuffix("-moved") if head.endswith("-moved") else "fused"
    if name not in measured:
        if head.endswith("-moved"):
            raise ValueError(f"head {head!r} must come after {name!r}, whose times plan it")
        return layout, times
    first, last = measured[name][0], measured[name][-1]
    forward, backward = (first.median_seconds(kind) / first.layers for kind in "FB")
    of_head = sum(last.median_seconds(kind) for kind in ("F", "B", "loss"))
    of_head = max(of_head - last.layers * (forward + backward), 0.02 * forward)
    if head.endswith("-moved"):
        return relayout(layers, stages, forward + backward, of_head), times
    most = max(layout)
    # The forward takes about three fifths of a filtered loss.
    statistics_, gradients = 0.6 * of_head / stages, 0.4 * of_head / stages
    return layout, Times(most * forward, most * backward, statistics_, gradients)


class _Runner:
    """A runner of this rank's stage under the schedule of one place of the head."""

    def __init__(
        self,
        job: Job,
        sizes: Sizes,
        inputs: BenchInputs,
        plan: Plan,
        name: str,
        layout: Sequence[int],
        times: Times,
    ) -> None:
        self.job, self.plan, self.inputs = job, plan, inputs
        self.is_first, self.is_last = job.rank == 0, job.rank == job.size - 1
        self.recorder = Recorder(job.device)
        self.losses: list[Tensor] = []
        shape = (plan.batch, plan.sequence)
        self.tokens = inputs.targets.view(shape).roll(1, 1).repeat(plan.microbatches, 1)
        self.targets = inputs.targets.view(shape).repeat(plan.microbatches, 1)
        self.head: PipelineHead | None = None
        self.embedding: TiedEmbedding | None = None
        self.ties: Any = None  # group of the ranks that have copies of the tied weight
        self.weight = self._make_weight(name)
        module = self._make_module(sizes, layout[job.rank])
        self.parameters = [*module.parameters()]
        if all(self.weight is not parameter for parameter in self.parameters):
            self.parameters += [self.weight] if self.weight is not None else []
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)
        self.stage = self._make_stage(module, sizes.dim)
        self.serving: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.schedule = self._make_schedule(name, times)

    def step(self) -> None:
        self.losses.clear()
        self.optimizer.zero_grad()
        args = (self.tokens,) if self.is_first else ()
        target = {"target": self.targets} if self.is_last else {}
        with self.serving():
            self.schedule.step(*args, losses=self.losses, return_outputs=False, **target)
        if self.ties is not None and (self.is_first or self.is_last):
            assert self.weight is not None
            dist.all_reduce(self.weight.grad, group=self.ties)
        self.optimizer.step()

    def close(self) -> None:
        for module in (self.embedding, self.head):
            if module is not None:
                module.close()
        if self.ties is not None and (self.is_first or self.is_last):
            dist.destroy_process_group(self.ties)

    def _make_weight(self, name: str) -> nn.Parameter | None:
        """Returns this rank's part of the weight that embedding and head share.

        Either every rank has a part, or the first and the last rank have all of it.
        """
        job, plan, full_weight = self.job, self.plan, self.inputs.weight
        if name not in OVER_RANKS:
            self.ties = dist.new_group([0, job.size - 1])
            return nn.Parameter(full_weight.clone()) if self.is_first or self.is_last else None
        shard = VocabShard.chunked(len(full_weight), job.rank, job.size)
        weight = nn.Parameter(full_weight[shard.start : shard.stop].clone())
        self.head = PipelineHead(
            weight,
            group=_world(),
            vocab_shard=shard,
            hidden_shape=(plan.batch, plan.sequence, full_weight.shape[1]),
            options=LossOptions(
                gradient=plan.gradient,  # pyright: ignore[reportArgumentType]
                logits=plan.logits,  # pyright: ignore[reportArgumentType]
            ),
            loss_scale=1 / plan.microbatches,
        )
        self.embedding = TiedEmbedding(self.head)
        return weight

    def _make_module(self, sizes: Sizes, layers: int) -> StageModule:
        embedding: nn.Module | None = None
        if self.is_first:
            embedding = self.embedding
            if embedding is None:
                assert self.weight is not None
                embedding = nn.Embedding.from_pretrained(self.weight)
                embedding.weight = self.weight
        final, shape = None, (self.plan.batch, self.plan.sequence, -1)
        if self.is_last:
            final = self.inputs.hidden.view(shape)
        module = StageModule(sizes, layers, self.plan.sequence, embedding=embedding, final=final)
        module.to(self.job.device, self.inputs.hidden.dtype)
        initialize(module)
        return module

    def _make_stage(self, module: StageModule, dim: int) -> PipelineStage:
        plan, job = self.plan, self.job
        hidden = self.inputs.hidden.new_zeros(plan.batch, plan.sequence, dim)
        taken = self.tokens[: plan.batch] if self.is_first else hidden.clone().requires_grad_()
        return PipelineStage(
            module,
            job.rank,
            job.size,
            job.device,
            group=_world(),
            input_args=taken,
            output_args=hidden.clone().requires_grad_(),
        )

    def _make_schedule(self, name: str, times: Times) -> Any:
        plan = self.plan
        if name == "vocab-1f1b":
            assert self.head is not None
            return ScheduleVocab1F1B(
                self.stage,
                plan.microbatches,
                self.head,
                embedding=self.embedding,
                times=times,
                scale_grads=False,
            )
        if self.head is not None:
            loss: Any = VocabOverPipeline(self.head, embedding=self.embedding)
        else:
            loss = self._loss_of_last_stage(name)
        schedule = Schedule1F1B(self.stage, plan.microbatches, loss_fn=loss, scale_grads=False)
        if self.head is not None:
            self.serving = lambda: loss.serving(schedule)
        return schedule

    def _loss_of_last_stage(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        weight, count = self.weight, self.plan.microbatches
        assert weight is not None or not self.is_last
        fused = None
        if name.startswith("fused") and weight is not None:
            quantizer = StepQuantizer() if self.plan.logits == "screened" else None
            if quantizer is not None:
                self.serving = quantizer.step
            fused = LastStageLoss(
                weight,
                gradient=self.plan.gradient,
                logits=self.plan.logits,
                quantized_weight=quantizer,
            )

        def loss(hidden: Tensor, targets: Tensor) -> Tensor:
            with self.recorder.span("loss"):
                if fused is not None:
                    return fused(hidden, targets) / count
                assert weight is not None
                logits = F.linear(hidden.flatten(0, 1), weight).float()
                return F.cross_entropy(logits, targets.flatten()) / count

        return loss


def _world() -> Any:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _measure(
    job: Job,
    sizes: Sizes,
    inputs: BenchInputs,
    plan: Plan,
    head: str,
    layout: Sequence[int],
    times: Times,
) -> Measured:
    """Measures steps on this rank; the first two compile and warm up."""
    runner = _Runner(job, sizes, inputs, plan, head, layout, times)
    seconds, peak = [], 0.0
    with recording(runner.recorder, runner.stage, over_ranks=head in OVER_RANKS):
        for number in range(plan.repeats + 2):
            gc.collect()
            synchronize(job.device)
            if job.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(job.device)
            dist.barrier()
            synchronize(job.device)
            runner.recorder.start_step()
            start = time.perf_counter()
            runner.step()
            synchronize(job.device)
            if number >= 2:
                seconds.append(time.perf_counter() - start)
            if job.device.type == "cuda":
                peak = torch.cuda.max_memory_allocated(job.device) / GIB
    scale = 1.0 if head in OVER_RANKS else plan.microbatches
    losses = [scale * float(loss.detach()) for loss in runner.losses]
    measured = Measured(layout[job.rank], seconds, runner.recorder.spans(), peak, losses)
    runner.close()
    del runner
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
    return measured


def _rows(head: str, plan: Plan, ranks: Sequence[Measured]) -> list[Cells]:
    steps = [max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)]
    times = percentiles_ms(steps)
    tokens = plan.sequence * plan.batch * plan.microbatches
    return [
        {
            "head": head,
            "stage": stage,
            "layers": rank.layers,
            "microbatch_tokens": plan.sequence * plan.batch,
            "microbatches": plan.microbatches,
            **times,
            "tokens_per_s": 1e3 * tokens / times["median_ms"],
            **{f"{kind.lower()}_ms": 1e3 * rank.median_seconds(kind) for kind in KINDS},
            "busy_ms": 1e3 * rank.busy,
            "peak_gib": rank.peak_gib,
            "mean_loss": statistics.mean(ranks[-1].losses),
            "failed": "",
        }
        for stage, rank in enumerate(ranks)
    ]


def _require_alike(rows: Sequence[Cells]) -> None:
    right = rows[0]["mean_loss"]
    for row in rows:
        # `>` would let a NaN pass.
        if not abs(row["mean_loss"] - right) <= LOSS_TOLERANCE * abs(right):
            raise RuntimeError(
                f"{row['head']}: the loss is {row['mean_loss']}, that of {rows[0]['head']} {right}"
            )
