"""The evaluation of a run over a pipeline; run.py evaluates other runs."""

from __future__ import annotations

import dataclasses

import torch.distributed as dist
from torch import Tensor

from cce_dist.train.loop import Job, Run
from cce_dist.train.model.head import HeadLayout, golden_loss, head_layout, make_head_loss
from cce_dist.train.pipeline.step import Pipeline

from .run import MEASURE_DENSE_BYTES, Evaluation, Memory, measure, measure_head


def evaluate_pipeline(job: Job, run: Run) -> Evaluation:
    """Compares the pipeline's loss on the held-out batch with dense float64 logits.

    Memory is measured for one microbatch: the head works on one microbatch at a time. If the head
    is on the last stage, the last stage's ranks measure, and tell the others. Every rank must call
    this function.
    """
    job.heartbeat.phase = "evaluating"
    ranks, pipeline = job.ranks, run.pipeline
    assert pipeline is not None
    ids, targets = (x.to(ranks.device) for x in job.batches.held_out_batch())
    loss, hidden = pipeline.evaluate(ids, targets)
    evaluation: list[Evaluation | None] = [None]
    # If the head is on the last stage, ranks of other stages have no rows of it.
    if pipeline.head is not None or pipeline.model.has_last:
        evaluation = [_compare(job, run, pipeline, loss.item(), hidden, targets)]
    if pipeline.head is None:
        last = pipeline.layout.last_rank
        dist.broadcast_object_list(evaluation, group=pipeline.group, group_src=last)
    assert evaluation[0] is not None
    return evaluation[0]


def _compare(
    job: Job, run: Run, pipeline: Pipeline, loss: float, hidden: Tensor, targets: Tensor
) -> Evaluation:
    config, ranks = job.config, job.ranks
    count, slices = pipeline.layout.microbatches, config.parallel.sequence_parallel
    first, first_targets = hidden.chunk(count)[0], targets.chunk(count)[0]
    here = first.chunk(ranks.tp)[ranks.tp_rank] if slices else first
    layout = head_layout(config, ranks)
    if pipeline.head is None:
        weight = pipeline.model.head_weight
        memory = measure_head(run.head_loss, here.flatten(0, 1), weight, first_targets.flatten())[1]
    else:
        memory, weight = _measure_phases(pipeline, here, first_targets), pipeline.head.weight
        layout = HeadLayout(ranks.vocab_group, config.data.vocab_size, False)
        here = first
    here = here.flatten(0, 1)
    dense_memory = None
    if run.head == "cce" and len(here) * config.data.vocab_size * 4 <= MEASURE_DENSE_BYTES:
        dense = make_head_loss(config, layout, "dense")
        dense_memory = measure_head(dense, here, weight, first_targets.flatten())[1]
    unsliced = dataclasses.replace(layout, sequence_parallel=False)
    flat = hidden.flatten(0, 1), weight.detach(), targets.flatten()
    return Evaluation(
        loss=loss,
        dense_loss=golden_loss(*flat, config, unsliced),
        memory=memory,
        dense_memory=dense_memory,
        num_tokens=targets.numel(),
        tokens_here=len(here),
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
