"""A plan: the time and memory of a layout of a model's layers, for each rank and for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from cce_dist.planner.cost.hardware import GIB, Hardware
from cce_dist.planner.cost.job import Job
from cce_dist.planner.cost.stages import Costs, Stage, costs_of, make_stages, stage_times
from cce_dist.planner.models.model import Model
from cce_dist.planner.orders.predict import Prediction, simulate_schedule
from cce_dist.planner.orders.schedules import Schedule, make_schedule, peak_of_held
from cce_dist.planner.orders.vocab_1f1b import Times


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its peak, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float  # of all microbatches in flight
    head: float  # that the loss keeps, and that its passes need
    working: float  # of a layer's backward beyond the head's
    buffers: float  # to receive, if the framework allocates them for all microbatches at once

    @property
    def total(self) -> float:
        return sum(vars(self).values())


@dataclass(frozen=True)
class RankPlan:
    """The plan of a pipeline rank; FLOPs and seconds are those of a microbatch."""

    rank: int
    stages: tuple[Stage, ...]
    parameters: float
    flops: float
    repeated: float  # FLOPs that other tensor-parallel ranks do as well, or of rows of padding
    forward: float
    backward: float
    head_seconds: float  # the head's forward and backward
    in_flight: float  # the most microbatches with activations at once, counted in chunks
    busy: float  # seconds of a step in which it works
    memory: Memory


@dataclass(frozen=True)
class Plan:
    """The plan of a layout."""

    model: Model
    job: Job
    hardware: Hardware
    layout: tuple[int, ...]  # layers of each stage, from the model's first
    ranks: tuple[RankPlan, ...]
    prediction: Prediction
    optimizer_seconds: float  # after the schedule: data-parallel communication, the optimizer

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.prediction.seconds + self.optimizer_seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs."""
        job = self.job
        return job.sequence * job.microbatch * job.microbatches * job.dp / self.seconds

    @property
    def peak(self) -> float:
        """Bytes of the rank that takes most."""
        return max(rank.memory.total for rank in self.ranks)

    @property
    def fits(self) -> bool:
        return self.peak <= self.hardware.room

    @property
    def utilization(self) -> float:
        """Model FLOPs over the FLOPs that the GPUs could do in the step.

        Attention counts by its causal half. Recomputed FLOPs, and FLOPs that several ranks repeat,
        do not count.
        """
        flops = sum(rank.flops - rank.repeated for rank in self.ranks) * self.job.microbatches
        return flops / (len(self.ranks) * self.seconds * self.hardware.flops)

    @property
    def binds(self) -> str:
        """The limit of the step's time, in words; memory, if the plan does not fit."""
        if not self.fits:
            worst = max(self.ranks, key=lambda rank: rank.memory.total)
            largest = max(vars(worst.memory), key=lambda name: getattr(worst.memory, name))
            return (
                f"memory: rank {worst.rank} needs {worst.memory.total / GIB:.1f} GiB of "
                f"{self.hardware.room / GIB:.1f}, most of it {largest}"
            )
        slowest = max(self.ranks, key=lambda rank: rank.busy)
        mean = sum(rank.busy for rank in self.ranks) / len(self.ranks)
        if self.prediction.bubble > 0.3 and slowest.busy < 1.1 * mean:
            return f"the bubble: {self.prediction.bubble:.0%} of the time, too few microbatches"
        share = slowest.head_seconds / max(slowest.forward + slowest.backward, 1e-30)
        text = f"compute of rank {slowest.rank}, {slowest.busy / mean:.2f} times the mean"
        return text + (f"; its head takes {share:.0%} of it" if share > 0.02 else "")


def even_layout(layers: int, stages: int) -> tuple[int, ...]:
    """Splits layers as Megatron and torch do: evenly, with the remainder on the first stages.

    With two stages more than layers the first stage has only the embedding, and the last only the
    head.
    """
    if stages == layers + 2:
        return (0, *[1] * layers, 0)
    return tuple(layers // stages + (index < layers % stages) for index in range(stages))


def schedule_of(costs: Costs) -> Schedule:
    """Returns the job's schedule.

    "vocab" is planned for an even layout, from the times that the training code knows when it plans
    the same order.
    """
    job = costs.job
    if job.schedule_name != "vocab":
        framework = job.software.framework
        return _fixed_schedule(
            job.schedule_name, job.pp, job.microbatches, chunks=job.chunks, framework=framework
        )
    layout, embeds = even_layout(costs.model.layers, job.stages), costs.is_embedding_shared
    if job.is_patched:
        times = _times_of_sizes(costs, layout)
    else:
        times = stage_times(costs, make_stages(costs, layout)).slowest()
    return make_schedule(
        "vocab", job.pp, job.microbatches, times=times, embeds=embeds, weighs=job.is_patched
    )


def _times_of_sizes(costs: Costs, layout: Sequence[int]) -> Times:
    """Returns the times by which megatron_patch plans: numbers of parameters, whose products take
    most of the time."""
    cuts = zip(accumulate(layout, initial=0), layout, strict=False)
    largest = max(1.0, *(sum(costs.parameters[first : first + count]) for first, count in cuts))
    head = costs.head_parameters / largest
    backward = 3.0 if costs.job.recompute == "full" else 2.0
    return Times(1.0, backward, statistics=head, gradients=3 * head)


# A schedule that needs no times: a search makes it many times.
_fixed_schedule = lru_cache(maxsize=4)(make_schedule)


def make_plan(
    model: Model, job: Job, hardware: Hardware, layout: Sequence[int] | None = None
) -> Plan:
    """Plans a layout's time and memory.

    Args:
        layout: layers of each of the pp * chunks stages; None: even.
    Raises:
        ValueError: the job cannot divide the model, the layout has another number of layers than
            the model, or the schedule does not run with these numbers.
    """
    costs = costs_of(model, job, hardware)
    return plan_layout(costs, schedule_of(costs), layout)


def plan_layout(costs: Costs, schedule: Schedule, layout: Sequence[int] | None) -> Plan:
    """Plans a layout, as `make_plan`, from costs and a schedule that are known."""
    model, job, hardware = costs.model, costs.job, costs.hardware
    chosen = tuple(layout) if layout is not None else even_layout(model.layers, job.stages)
    if len(chosen) != job.stages or sum(chosen) != model.layers or min(chosen) < 0:
        raise ValueError(
            f"layout must have {job.stages} stages (pp * chunks) of {model.layers} layers in all, "
            f"got {len(chosen)} of {sum(chosen)}: {list(chosen)}; an even one is "
            f"{list(even_layout(model.layers, job.stages))}"
        )
    stages = make_stages(costs, chosen)
    prediction = simulate_schedule(schedule, stage_times(costs, stages))
    ranks = tuple(_rank_plan(costs, schedule, prediction, stages, rank) for rank in range(job.pp))
    optimizer_seconds = max(_optimizer_seconds(costs, rank) for rank in ranks)
    return Plan(model, job, hardware, chosen, ranks, prediction, optimizer_seconds)


def stages_of(schedule: Schedule, stages: Sequence[Stage], rank: int) -> tuple[Stage, ...]:
    return tuple(stages[index] for index in schedule.stages_of(rank))


def _rank_plan(
    costs: Costs, schedule: Schedule, prediction: Prediction, stages: Sequence[Stage], rank: int
) -> RankPlan:
    mine = stages_of(schedule, stages, rank)
    head = costs.head
    is_over_ranks = costs.job.is_over_ranks
    parameters = sum(stage.parameters for stage in mine)
    phases = head.forward + head.backward if is_over_ranks else 0.0
    has_head = is_over_ranks or any(stage.head_seconds for stage in mine)
    padding = 3 * head.flops * (1 - costs.model.num_rows / costs.rows) if has_head else 0.0
    num_copies = costs.job.tp if costs.job.vocab_over == "pp" else 1
    return RankPlan(
        rank=rank,
        stages=mine,
        parameters=parameters,
        flops=sum(stage.flops for stage in mine) + (3 * head.flops if is_over_ranks else 0.0),
        repeated=padding / num_copies + 3 * head.flops * (1 - 1 / num_copies),
        forward=sum(stage.forward for stage in mine) + (head.forward if is_over_ranks else 0.0),
        backward=sum(stage.backward for stage in mine) + (head.backward if is_over_ranks else 0.0),
        head_seconds=sum(stage.head_seconds for stage in mine) + phases,
        in_flight=prediction.most_held[rank],
        busy=prediction.busy[rank],
        memory=memory_of(costs, schedule, mine, rank),
    )


def memory_of(costs: Costs, schedule: Schedule, mine: Sequence[Stage], rank: int) -> Memory:
    """Returns the memory of a rank with these stages under the schedule."""
    job = costs.job
    order = schedule.held[rank]
    parameters = sum(stage.parameters for stage in mine)
    experts = sum(stage.expert_parameters for stage in mine)
    shared, of_experts = parameters - experts, experts
    if job.distributed_optimizer:
        shared /= job.dp * job.cp
        of_experts /= job.dp * job.cp / job.ep
    held = [stage.kept for stage in mine]
    with_head = [stage.kept + stage.head_kept for stage in mine]
    activations = peak_of_held(order, held)
    phases = always_held = 0.0
    if job.is_over_ranks:
        phases = costs.head.kept + costs.head.working
        # The thread of a served head has one microbatch at a time, and keeps nothing of others.
        always_held = 0.0 if job.is_served else costs.head.kept
        # megatron_patch accumulates into Megatron's own gradient, if that is in fp32.
        if not (job.is_patched and job.precision == "mixed" and job.gradients == "fp32"):
            always_held += 4.0 * costs.head_parameters
    working = [max(stage.head_working, stage.working - stage.head_kept) for stage in mine]
    peak = peak_of_held(order, with_head, working, phases=phases)
    if job.is_served:
        # The phases may run at the schedule's peak; a backward under way has freed some memory.
        peak = max(peak, activations + phases)
    peak += always_held
    without = peak_of_held(order, held, [stage.working for stage in mine])
    return Memory(
        weights=job.weight_bytes * parameters,
        gradients=job.gradient_bytes * parameters,
        optimizer=job.state_bytes * (shared + of_experts),
        activations=activations,
        head=max(0.0, peak - without),
        working=min(peak, without) - activations,
        buffers=_buffers(costs, schedule, rank),
    )


def _buffers(costs: Costs, schedule: Schedule, rank: int) -> float:
    """Returns the bytes of a rank's buffers, which have the size of hidden for every microbatch.

    torch's stages receive into such buffers. If a schedule does not know of a tied embedding over
    all ranks, the first rank also holds the embedding's rows, and later their gradients.
    """
    job, last = costs.job, schedule.stages - 1
    size = job.tokens * costs.model.dim / job.sequence_ranks
    size_in_bytes = 0.0
    if job.software.receives_apart:
        neighbours = sum((stage > 0) + (stage < last) for stage in schedule.stages_of(rank))
        size_in_bytes += neighbours * job.microbatches * job.hidden_bytes * size
    if job.is_served and costs.is_embedding_shared and rank == 0:
        # Microbatches in flight have used their rows, and have no gradient of the rows yet.
        started = peak_of_held(schedule.held[0], [1.0, *[0.0] * (schedule.chunks - 1)])
        size_in_bytes += 2.0 * size * (job.microbatches - started)
    return size_in_bytes


def _optimizer_seconds(costs: Costs, rank: RankPlan) -> float:
    """Returns a rank's seconds after its last backward.

    They are the sum of gradients over data-parallel ranks, clipping, the optimizer, and the sum of
    gradients over the two copies of a tied head.
    """
    job, hardware = costs.job, costs.hardware
    ranks = job.dp * job.cp
    seconds, owned = 0.0, rank.parameters
    if ranks > 1:
        # Neighbouring ranks are tensor-parallel, so data-parallel ranks are tp apart.
        link = hardware.ring(ranks, apart=job.tp)
        share = (ranks - 1) / ranks
        rounds = 1.0 if job.distributed_optimizer else 2.0
        reduced = rounds * share * job.gradient_bytes * rank.parameters / link
        gathered = 0.0
        if job.distributed_optimizer:
            owned /= ranks
            gathered = share * 2.0 * rank.parameters / link
        if job.overlap_data:
            reduced = _visible(costs, rank, reduced, rank.backward)
            gathered = _visible(costs, rank, gathered, rank.forward)
        seconds += hardware.latency + reduced + gathered
    is_copied = costs.model.tied and job.pp > 1 and not job.is_over_ranks
    if is_copied and job.schedule_name != "zbv" and rank.rank in (0, job.pp - 1):
        copied = job.gradient_bytes * costs.head_parameters
        seconds += hardware.latency + copied / hardware.link(job.pp * job.tp)
    return seconds + job.step_traffic * owned / hardware.bytes_per_second


def _visible(costs: Costs, rank: RankPlan, seconds: float, passes: float) -> float:
    """Returns the seconds of data-parallel communication that a microbatch's passes do not hide.

    Args:
        seconds: of the sum of gradients, or of the gather of weights.
        passes: seconds of the passes that run at the same time.
    """
    job = costs.job
    # The embedding's gradient is complete last, and its rows are needed first.
    exposed = costs.embedding_parameters / rank.parameters if rank.rank == 0 else 0.0
    # Interleaved: a chunk's gradients are complete while other chunks still have a group of
    # microbatches to do.
    group = job.pp if job.schedule_name == "interleaved" else 1
    last = (seconds - passes) / (job.chunks if group > 1 else 1)
    return max(exposed * seconds, last, seconds - group * passes)
