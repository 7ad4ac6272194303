"""A layout's stages: what each takes in time and memory, before any schedule is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from cce_dist.planner.models.model import Model
from cce_dist.planner.orders.predict import StageTimes

from .hardware import Hardware
from .head import HeadCost, head_cost, phase_latency
from .job import Job
from .layer import LayerCost, collective, layer_cost, layer_parameters_per_rank


@dataclass(frozen=True)
class Stage:
    """A stage of the pipeline, on a rank of its tensor-parallel group.

    Args:
        first_layer, layers: its first layer in the model, and their number.
        parameters: with the embedding and the head where they are here.
        expert_parameters: of those, the ones that data-parallel ranks do not share.
        flops: forward and backward of a microbatch, what is computed again left out.
        forward, backward: seconds of a microbatch.
        head_seconds: of those, the head's, where it is here.
        kept: bytes of a microbatch from forward to backward, without the head's.
        working: bytes beside them while the backward runs.
        head_kept, head_working: the head's.
    """

    first_layer: int
    layers: int
    parameters: float
    expert_parameters: float
    flops: float
    forward: float
    backward: float
    head_seconds: float
    kept: float
    working: float
    head_kept: float
    head_working: float


@dataclass(frozen=True)
class Costs:
    """The costs of a model, a job and hardware that layouts consist of."""

    model: Model
    job: Job
    hardware: Hardware
    layers: tuple[LayerCost, ...]
    parameters: tuple[float, ...]
    head: HeadCost

    @property
    def rows(self) -> int:
        """Rows of the embedding and the head, with padding."""
        return self.job.padded_rows(self.model.num_rows)

    @property
    def embedding_parameters(self) -> float:
        """Parameters on the first stage, or on every rank where the head is over all and tied to
        the embedding."""
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
        """Parameters of the head that no embedding has."""
        return self.rows * self.model.head_bias / self.job.head_ranks

    @property
    def is_embedding_shared(self) -> bool:
        """Over all ranks, in the rows of the head."""
        return self.job.is_over_ranks and self.model.tied

    @property
    def embedding_seconds(self) -> float:
        """Seconds of a microbatch in the forward; the backward takes about as long."""
        size = self.job.tokens * self.model.dim
        seconds = 4.0 * size / self.hardware.bytes_per_second
        if not self.is_embedding_shared:
            rounds = 1.0 if self.job.sequence_parallel else 2.0
            seconds += collective(self.hardware, self.job.tp, 2.0 * size, rounds=rounds)
        return seconds

    @property
    def latency(self) -> float:
        """Until the next stage has a microbatch's hidden states."""
        job, ranks = self.job, self.job.pp * self.job.tp
        if job.pp == 1:
            return 0.0
        size = job.hidden_bytes * job.tokens * self.model.dim
        size /= job.tp if job.sequence_parallel else 1
        # Neighbouring stages are on one host as long as tensor-parallel groups are.
        return self.hardware.latency / 2 + size / self.hardware.link(ranks)


@lru_cache(maxsize=64)
def costs_of(model: Model, job: Job, hardware: Hardware) -> Costs:
    """Raises ValueError: the model cannot be cut like this."""
    job.check_model(model)
    alike: dict[tuple[bool, str], LayerCost] = {}
    layers = []
    for index in range(model.layers):
        key = (index < model.dense_layers, model.attention_of(index))
        if key not in alike:
            alike[key] = layer_cost(model, job, hardware, index)
        layers.append(alike[key])
    parameters = tuple(
        layer_parameters_per_rank(model, job, index) for index in range(model.layers)
    )
    return Costs(model, job, hardware, tuple(layers), parameters, head_cost(model, job, hardware))


def make_stages(costs: Costs, layout: Sequence[int]) -> list[Stage]:
    """Makes stages with these numbers of layers, from the model's first stage to its last."""
    last = len(layout) - 1
    stages, first = [], 0
    for index, count in enumerate(layout):
        stages.append(_stage(costs, first, count, is_first=index == 0, is_last=index == last))
        first += count
    return stages


def _stage(costs: Costs, first: int, count: int, *, is_first: bool, is_last: bool) -> Stage:
    model, job, hardware, head = costs.model, costs.job, costs.hardware, costs.head
    mine = costs.layers[first : first + count]
    parameters = sum(costs.parameters[first : first + count])
    flops = sum(layer.flops for layer in mine)
    forward = sum(layer.forward for layer in mine)
    backward = sum(layer.backward for layer in mine)
    working = max((layer.working for layer in mine), default=0.0)
    kept = sum(layer.kept for layer in mine)
    experts = _expert_parameters(costs, first, count)
    seconds = 0.0
    if is_first and not costs.is_embedding_shared:
        parameters += costs.embedding_parameters
        forward += costs.embedding_seconds
        backward += costs.embedding_seconds
    has_head = is_last and not job.is_over_ranks
    # On one rank with the embedding: alone, or at the end of a V.
    is_tied_here = model.tied and (job.pp == 1 or job.schedule_name == "zbv")
    if has_head:
        parameters += costs.head_bias if is_tied_here else costs.head_parameters
        flops += head.flops
        forward, backward = forward + head.forward, backward + head.backward
        seconds = head.forward + head.backward
        if is_tied_here:
            # One gradient for both uses: it waits for the embedding's.
            working += head.transient
    if is_last:
        # The last norm's input and output.
        split = job.tp if job.sequence_parallel else 1
        kept += (job.hidden_bytes + 2.0) * job.tokens * model.dim / split
    if is_first and not costs.is_embedding_shared:
        # Zeros for each row, and read again to be added: no kernel adds a token's to the others'.
        whole = max(4.0 - job.software.accumulate, 0.0) * costs.embedding_parameters
        backward += whole / hardware.bytes_per_second
        # The embedding's gradient is made whole when nothing else of the microbatch is left.
        embedding_gradient = 2.0 * costs.embedding_parameters
        working = max(
            working,
            embedding_gradient + (head.transient if has_head and is_tied_here else 0.0) - kept,
        )
    owned = parameters
    if costs.is_embedding_shared or job.is_over_ranks:
        owned += costs.head_parameters / job.chunks
    moved = job.software.accumulate + 2 * job.gradient_bytes
    if job.precision == "fp32":
        forward += 6.0 * owned / hardware.bytes_per_second  # autocast's copy
    backward += moved * owned / hardware.bytes_per_second
    return Stage(
        first_layer=first,
        layers=count,
        parameters=owned,
        expert_parameters=experts,
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
    """Returns the stages' times for planner/predict.py."""
    forward = tuple(stage.forward for stage in stages)
    backward = tuple(stage.backward for stage in stages)
    job, head = costs.job, costs.head
    if not job.is_over_ranks:
        return StageTimes(forward, backward, latency=costs.latency)
    every = job.pp
    embedding = (costs.embedding_seconds,) * every if costs.is_embedding_shared else ()
    times = StageTimes(
        forward,
        backward,
        statistics=(head.forward,) * every,
        gradients=(head.backward,) * every,
        embedding=embedding,
        latency=costs.latency,
        head_latency=phase_latency(costs.model, job, costs.hardware),
        chunks=job.chunks,
    )
    return times.with_stalls(served=job.is_served)
