"""A layout's stages: the time and memory of each, whatever the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from cce_dist.planner.models.model import Model
from cce_dist.planner.orders.predict import StageTimes

from .hardware import Hardware
from .head import HeadCost, head_cost, phase_latency
from .job import Job
from .layer import LayerCost, collective, layer_cost, layer_parameters_per_rank


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline, on a rank of its tensor-parallel group."""

    first_layer: int  # index in the model
    layers: int  # number of layers
    parameters: float  # with the embedding and the head if the stage has them
    expert_parameters: float  # those of experts, which ep ranks share
    flops: float  # forward and backward of a microbatch, without recomputed FLOPs
    forward: float  # seconds of a microbatch, with the head's
    backward: float  # the same
    head_seconds: float  # those of the head, forward and backward; 0: the stage has no head
    kept: float  # bytes of a microbatch from forward to backward, without the head's
    working: float  # bytes on top of `kept` while the backward runs, without the head's
    head_kept: float  # bytes of the head, as `kept`
    head_working: float  # bytes of the head, as `working`


@dataclass(frozen=True)
class Costs:
    """The costs of a job's layers and head, of which those of a layout are sums."""

    model: Model
    job: Job
    hardware: Hardware
    layers: tuple[LayerCost, ...]
    parameters: tuple[float, ...]
    head: HeadCost

    @property
    def rows(self) -> int:
        """Rows of the embedding and the head, padding included."""
        return self.job.padded_rows(self.model.num_rows)

    @property
    def embedding_parameters(self) -> float:
        """Parameters of the embedding on a rank that has rows of it.

        Those are the first stage's ranks, or all ranks if a tied head is over all of them.
        """
        ranks = self.job.head_ranks if self.is_embedding_shared else self.job.tp
        rows = (self.rows + self.model.more_rows) / ranks
        return (rows + self.model.positions) * self.model.dim

    @property
    def head_parameters(self) -> float:
        if self.job.loss == "none" and self.model.tied:
            return 0.0
        return self.rows * self.model.dim / self.job.head_ranks + self.head_bias

    @property
    def head_bias(self) -> float:
        """Parameters of the head's bias on a rank, which a tied embedding does not have."""
        return self.rows * self.model.head_bias / self.job.head_ranks

    @property
    def is_embedding_shared(self) -> bool:
        """True if the embedding is over all ranks, tied to the head."""
        return self.job.is_over_ranks and self.model.tied

    @property
    def embedding_seconds(self) -> float:
        """Seconds of a microbatch in the embedding's forward; its backward takes about as long."""
        size = self.job.tokens * self.model.dim
        seconds = 4.0 * size / self.hardware.bytes_per_second
        if not self.is_embedding_shared:
            rounds = 1.0 if self.job.sequence_parallel else 2.0
            seconds += collective(self.hardware, self.job.tp, 2.0 * size, rounds=rounds)
        return seconds

    @property
    def latency(self) -> float:
        """Seconds until the next stage has a microbatch's hidden states."""
        job, ranks = self.job, self.job.pp * self.job.tp
        if job.pp == 1:
            return 0.0
        size = job.hidden_bytes * job.tokens * self.model.dim / job.sequence_ranks
        # Stages are on one host if all ranks of the tensor-parallel groups are.
        return self.hardware.latency / 2 + size / self.hardware.link(ranks)


@lru_cache(maxsize=64)
def costs_of(model: Model, job: Job, hardware: Hardware) -> Costs:
    """Computes the costs of a model's layers and head on a rank of the job.

    Raises:
        ValueError: the job cannot divide the model over its ranks.
    """
    job.check_model(model)
    cost_of_kind: dict[tuple[bool, str], LayerCost] = {}
    layers = []
    for index in range(model.layers):
        key = (index < model.dense_layers, model.attention_of(index))
        if key not in cost_of_kind:
            cost_of_kind[key] = layer_cost(model, job, hardware, index)
        layers.append(cost_of_kind[key])
    parameters = (layer_parameters_per_rank(model, job, index) for index in range(model.layers))
    head = head_cost(model, job, hardware)
    return Costs(model, job, hardware, tuple(layers), tuple(parameters), head)


def make_stages(costs: Costs, layout: Sequence[int]) -> list[Stage]:
    """Makes stages with these numbers of layers, in the order of the model."""
    last = len(layout) - 1
    cuts = enumerate(zip(accumulate(layout, initial=0), layout, strict=False))
    return [
        _stage(costs, first, count, is_first=index == 0, is_last=index == last)
        for index, (first, count) in cuts
    ]


def _stage(costs: Costs, first: int, count: int, *, is_first: bool, is_last: bool) -> Stage:
    model, job, hardware, head = costs.model, costs.job, costs.hardware, costs.head
    mine = costs.layers[first : first + count]
    parameters = sum(costs.parameters[first : first + count])
    flops = sum(layer.flops for layer in mine)
    forward = sum(layer.forward for layer in mine)
    backward = sum(layer.backward for layer in mine)
    working = max((layer.working for layer in mine), default=0.0)
    kept = sum(layer.kept for layer in mine)
    seconds = 0.0
    has_embedding = is_first and not costs.is_embedding_shared
    if has_embedding:
        parameters += costs.embedding_parameters
        forward += costs.embedding_seconds
        backward += costs.embedding_seconds
    has_head = is_last and not job.is_over_ranks
    # The first and the last stage are on one rank without a pipeline, and under ZBV.
    is_tied_here = model.tied and (job.pp == 1 or job.schedule_name == "zbv")
    if has_head:
        parameters += costs.head_bias if is_tied_here else costs.head_parameters
        flops += head.flops
        forward, backward = forward + head.forward, backward + head.backward
        seconds = head.forward + head.backward
        if is_tied_here:
            # The head's gradient is held until it is added to the embedding's.
            working += head.transient
    if is_last:
        # The last norm's input and output.
        kept += (job.hidden_bytes + 2.0) * job.tokens * model.dim / job.sequence_ranks
    if has_embedding:
        # The gradient has all rows: zeros are written, then read for the sum of tokens' rows.
        zeroed = max(4.0 - job.software.accumulate, 0.0) * costs.embedding_parameters
        backward += zeroed / hardware.bytes_per_second
        # That gradient exists when all else of the microbatch has been freed.
        held = head.transient if has_head and is_tied_here else 0.0
        working = max(working, 2.0 * costs.embedding_parameters + held - kept)
    owned = parameters
    if job.is_over_ranks:
        owned += costs.head_parameters / job.chunks
    moved = job.software.accumulate + 2 * job.gradient_bytes
    if job.precision == "fp32":
        forward += 6.0 * owned / hardware.bytes_per_second  # autocast's copy
    backward += moved * owned / hardware.bytes_per_second
    return Stage(
        first_layer=first,
        layers=count,
        parameters=owned,
        expert_parameters=_expert_parameters(costs, first, count),
        flops=3 * flops,
        forward=forward,
        backward=backward,
        head_seconds=seconds,
        kept=kept,
        working=working,
        head_kept=head.kept if has_head else 0.0,
        head_working=head.working if has_head else 0.0,
    )


def _expert_parameters(costs: Costs, first: int, count: int) -> float:
    model, job = costs.model, costs.job
    if job.ep == 1:
        return 0.0
    each = model.experts * model.mlp_of(model.mlp_dim) / (job.tp * job.ep)
    return each * sum(index >= model.dense_layers for index in range(first, first + count))


def stage_times(costs: Costs, stages: Sequence[Stage]) -> StageTimes:
    """Returns the stages' times for planner/orders/predict.py."""
    forward = tuple(stage.forward for stage in stages)
    backward = tuple(stage.backward for stage in stages)
    job, head = costs.job, costs.head
    times = StageTimes(forward, backward, latency=costs.latency)
    if not job.is_over_ranks:
        return times
    over = replace(
        times,
        statistics=(head.forward,) * job.pp,
        gradients=(head.backward,) * job.pp,
        embedding=(costs.embedding_seconds,) * job.pp if costs.is_embedding_shared else (),
        head_latency=phase_latency(costs.model, job, costs.hardware),
        chunks=job.chunks,
    )
    return over.with_stalls(served=job.is_served)
