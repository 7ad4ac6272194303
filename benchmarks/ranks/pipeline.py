"""Benchmark of a pipeline's steps: the head on the last stage, or the vocabulary over all ranks.

Every rank of the job runs this; each has one stage.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.ranks.megatron import require_alike
from benchmarks.ranks.megatron_model import Sizes
from benchmarks.ranks.pipeline_model import StageModule, initialize, layout_of
from cce_dist import LossOptions, StepQuantizer, VocabShard
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.machine import synchronize
from cce_dist.bench.ranks import Job, from_all
from cce_dist.bench.report import Cells, percentiles_ms
from cce_dist.bench.training import GIB
from cce_dist.pipeline.embedding import TiedEmbedding
from cce_dist.pipeline.head import PipelineHead
from cce_dist.pipeline.schedules.last_stage import LastStageLoss
from cce_dist.pipeline.schedules.torch_schedules import VocabOverPipeline
from cce_dist.pipeline.schedules.vocab_1f1b import ScheduleVocab1F1B
from cce_dist.planner.orders.vocab_1f1b import Times

# Places of the head: the last stage, or all ranks.
HEADS = ("dense", "fused", "vocab-1f1b", "vocab-thread")
OVER_RANKS = HEADS[2:]


@dataclass(frozen=True)
class Plan:
    """Settings of the steps: `microbatches` microbatches a step, each of `batch` sequences.

    Args:
        logits: option of our losses.
        last_layers: layers of the last stage; None: an even share.
    """

    heads: Sequence[str]
    sequence: int
    batch: int
    microbatches: int
    repeats: int
    logits: str = "full"
    last_layers: int | None = None


class Measured(NamedTuple):
    """Measurements of one rank; `losses` are of the last step, and empty if the rank has none."""

    seconds: list[float]
    peak_gib: float
    losses: list[float]


def bench_pipeline(job: Job, sizes: Sizes, inputs: BenchInputs, plan: Plan) -> list[Cells]:
    """Returns a row for each place of the head and stage.

    Args:
        inputs: as of `bench_megatron`.
    Raises:
        ValueError: a head is not one of HEADS, there are fewer than two ranks, or a stage would
            have no layer.
        RuntimeError: a loss differs from the first head's: `require_alike`.
    """
    unknown = sorted(set(plan.heads) - set(HEADS))
    if unknown:
        raise ValueError(f"head must be among {list(HEADS)}, got {unknown}")
    layout = layout_of(sizes.layers, job.size, plan.last_layers)
    rows: list[Cells] = []
    for head in plan.heads:
        everywhere = from_all(job, _measure(job, sizes, inputs, plan, head, layout))
        rows += _rows(head, plan, layout, everywhere)
    require_alike({row["head"]: row["mean_loss"] for row in rows}, rows[0]["mean_loss"])
    return rows


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
    ) -> None:
        self.job, self.plan, self.inputs = job, plan, inputs
        self.is_first, self.is_last = job.rank == 0, job.rank == job.size - 1
        self.losses: list[Tensor] = []
        self.group: Any = dist.group.WORLD
        shape = (plan.batch, plan.sequence)
        self.tokens = inputs.targets.view(shape).roll(1, 1).repeat(plan.microbatches, 1)
        self.targets = inputs.targets.view(shape).repeat(plan.microbatches, 1)
        over_ranks = name in OVER_RANKS
        # Embedding and head share a weight: every rank has a part, or the first and the last all.
        self.ties: Any = None if over_ranks else dist.new_group([0, job.size - 1])
        self.head = self._make_head() if over_ranks else None
        self.weight: Tensor | None = None if self.head is None else self.head.weight
        if self.ties is not None and (self.is_first or self.is_last):
            self.weight = nn.Parameter(inputs.weight.clone())
        self.embedding = None if self.head is None else TiedEmbedding(self.head)
        final = inputs.hidden.view(*shape, -1) if self.is_last else None
        module = StageModule(
            sizes, layout[job.rank], plan.sequence, embedding=self._embed(), final=final
        )
        initialize(module.to(job.device, inputs.hidden.dtype))
        weights = [] if self.weight is None else [self.weight]
        parameters = dict.fromkeys([*module.parameters(), *weights])
        self.optimizer = torch.optim.AdamW(list(parameters), lr=0.0, fused=True)
        hidden = inputs.hidden.new_zeros(*shape, sizes.dim).requires_grad_()
        self.stage = PipelineStage(
            module,
            job.rank,
            job.size,
            job.device,
            group=self.group,
            input_args=self.tokens[: plan.batch] if self.is_first else hidden,
            output_args=hidden.detach().clone().requires_grad_(),
        )
        self.serving: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
        self.schedule = self._make_schedule(name, max(layout) * module.parameters_of_a_layer)

    def step(self) -> None:
        self.losses.clear()
        self.optimizer.zero_grad()
        args = (self.tokens,) if self.is_first else ()
        target = {"target": self.targets} if self.is_last else {}
        with self.serving():
            self.schedule.step(*args, losses=self.losses, return_outputs=False, **target)
        if self.ties is not None and self.weight is not None:
            dist.all_reduce(self.weight.grad, group=self.ties)
        self.optimizer.step()

    def close(self) -> None:
        for module in (self.embedding, self.head):
            if module is not None:
                module.close()
        if self.ties is not None and self.weight is not None:
            dist.destroy_process_group(self.ties)

    def _make_head(self) -> PipelineHead:
        plan, weight = self.plan, self.inputs.weight
        shard = VocabShard.chunked(len(weight), self.job.rank, self.job.size)
        return PipelineHead(
            nn.Parameter(weight[shard.start : shard.stop].clone()),
            group=self.group,
            vocab_shard=shard,
            hidden_shape=(plan.batch, plan.sequence, weight.shape[1]),
            options=LossOptions(logits=plan.logits),  # pyright: ignore[reportArgumentType]
            loss_scale=1 / plan.microbatches,
        )

    def _embed(self) -> nn.Module | None:
        """Returns the first stage's embedding."""
        if not self.is_first or self.embedding is not None:
            return self.embedding if self.is_first else None
        assert isinstance(self.weight, nn.Parameter)
        embedding = nn.Embedding.from_pretrained(self.weight)
        embedding.weight = self.weight
        return embedding

    def _make_schedule(self, name: str, forward: float) -> Any:
        """Returns the schedule; `forward` is a stage's multiplications for a token."""
        plan, stage = self.plan, self.stage
        if self.head is None:
            loss = self._loss_of_last_stage(name)
            return Schedule1F1B(stage, plan.microbatches, loss_fn=loss, scale_grads=False)
        if name == "vocab-thread":
            over = VocabOverPipeline(self.head, embedding=self.embedding)
            schedule = Schedule1F1B(stage, plan.microbatches, loss_fn=over, scale_grads=False)
            self.serving = lambda: over.serving(schedule)
            return schedule
        statistics_ = self.inputs.weight.numel() / self.job.size
        return ScheduleVocab1F1B(
            stage,
            plan.microbatches,
            self.head,
            embedding=self.embedding,
            # The forward takes about three fifths of a filtered loss.
            times=Times(forward, 2 * forward, statistics_, 2 / 3 * statistics_),
            scale_grads=False,
        )

    def _loss_of_last_stage(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        weight, count = self.weight, self.plan.microbatches
        if name == "fused" and weight is not None:
            quantizer = StepQuantizer() if self.plan.logits == "screened" else None
            if quantizer is not None:
                self.serving = quantizer.step
            fused = LastStageLoss(weight, logits=self.plan.logits, quantized_weight=quantizer)
            return lambda hidden, targets: fused(hidden, targets) / count

        def dense(hidden: Tensor, targets: Tensor) -> Tensor:
            assert weight is not None
            logits = F.linear(hidden.flatten(0, 1), weight).float()
            return F.cross_entropy(logits, targets.flatten()) / count

        return dense


def _measure(
    job: Job, sizes: Sizes, inputs: BenchInputs, plan: Plan, head: str, layout: Sequence[int]
) -> Measured:
    """Measures steps on this rank; the first two compile and warm up."""
    runner = _Runner(job, sizes, inputs, plan, head, layout)
    seconds, peak, on_gpu = [], 0.0, job.device.type == "cuda"
    for number in range(plan.repeats + 2):
        gc.collect()
        synchronize(job.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(job.device)
        dist.barrier()
        synchronize(job.device)
        start = time.perf_counter()
        runner.step()
        synchronize(job.device)
        if number >= 2:
            seconds.append(time.perf_counter() - start)
        if on_gpu:
            peak = torch.cuda.max_memory_allocated(job.device) / GIB
    scale = 1.0 if head in OVER_RANKS else plan.microbatches
    losses = [scale * float(loss.detach()) for loss in runner.losses]
    runner.close()
    del runner
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    return Measured(seconds, peak, losses)


def _rows(head: str, plan: Plan, layout: Sequence[int], ranks: Sequence[Measured]) -> list[Cells]:
    steps = [max(step) for step in zip(*(rank.seconds for rank in ranks), strict=True)]
    times, tokens = percentiles_ms(steps), plan.sequence * plan.batch
    return [
        {
            "head": head,
            "stage": stage,
            "layers": layout[stage],
            "microbatch_tokens": tokens,
            "microbatches": plan.microbatches,
            **times,
            "tokens_per_s": 1e3 * tokens * plan.microbatches / times["median_ms"],
            "peak_gib": rank.peak_gib,
            "mean_loss": statistics.mean(ranks[-1].losses),
            "failed": "",
        }
        for stage, rank in enumerate(ranks)
    ]
