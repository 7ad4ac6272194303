"""A step's time, from each stage's times, which are measured or come from the cost model."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Literal

from .schedules import Schedule, make_schedule, peak_of_held
from .served import run_served
from .timeline import Timeline, Work, run_orders
from .vocab_1f1b import Times

# Shares of a cycle that three runs on two H200s lost between passes, for an unknown reason: in the
# planned order, and with a thread in parallel to 1F1B. docs/design/planner.md#validation
STALLED, STALLED_SERVED = 0.1, 0.2


@dataclass(frozen=True)
class StageTimes:
    """Seconds (or any unit) of one microbatch, in the order of the model's stages.

    Args:
        forward, backward: times of each stage; the last stage's include the head, unless the head
            is over all ranks.
        statistics, gradients: times of S and T of a head over all ranks, one for each rank; (): the
            head is not over all ranks.
        embedding: times of E, and again of G, of an embedding over all ranks, one for each rank.
        latency: time until the next stage has a stage's output.
        head_latency: time of a collective of the head.
        stalled: time that a rank loses between passes, in every cycle of a head over all ranks.
        weight_share: share of a split backward that computes the weights' gradients.
        chunks: number of stages of a rank.
    Raises:
        ValueError: the numbers of times do not fit together, or a time is negative or not
            finite.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    statistics: tuple[float, ...] = ()
    gradients: tuple[float, ...] = ()
    embedding: tuple[float, ...] = ()
    latency: float = 0.0
    head_latency: float = 0.0
    stalled: float = 0.0
    weight_share: float = 0.5
    chunks: int = 1

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks must be >= 1, got {self.chunks}")
        if not self.forward or len(self.forward) != len(self.backward):
            raise ValueError(
                "forward and backward must have a time for each stage, got "
                f"{len(self.forward)} and {len(self.backward)}"
            )
        for name in ("statistics", "gradients", "embedding"):
            count = len(getattr(self, name))
            if count * self.chunks not in (0, len(self.forward)):
                raise ValueError(
                    f"{name} must have a time for each of {len(self.forward) // self.chunks} "
                    f"ranks, or none, got {count}"
                )
        if not 0 <= self.weight_share <= 1:
            raise ValueError(f"weight_share must be within 0 and 1, got {self.weight_share!r}")
        for name, value in vars(self).items():
            for number in value if isinstance(value, tuple) else (value,):
                if not 0 <= number < math.inf:
                    raise ValueError(f"{name} must be >= 0 and finite, got {number!r}")
        if not any((*self.forward, *self.backward)):
            raise ValueError("forward and backward must have a time > 0, got zeros alone")

    @property
    def is_over_ranks(self) -> bool:
        return bool(self.statistics or self.gradients)

    def with_stalls(self, *, served: bool = False) -> StageTimes:
        """Returns the same times with `stalled` as it was measured for this library.

        Args:
            served: a thread serves the head; False: the planned order.
        """
        share = STALLED_SERVED if served else STALLED
        each = replace(self, stalled=0.0).slowest()
        stages = self.chunks * (each.forward + each.backward)
        return replace(self, stalled=share * (stages + each.statistics + each.gradients))

    def slowest(self) -> Times:
        """Returns one cycle for all ranks, for `plan_vocab_order`.

        It has no latency, like the times by which train, bench and megatron_patch plan.
        """
        return Times(
            forward=max(self.forward),
            backward=max(self.backward),
            # A rank may stall between any two passes.
            statistics=max(self.statistics) + self.stalled,
            gradients=max(self.gradients),
            embedding=max(self.embedding, default=0.0),
        )


@dataclass(frozen=True)
class Prediction:
    """The prediction of a step, without the optimizer."""

    seconds: float  # until the last rank is done
    closed_form: float | None  # the same by formula, None where there is none
    busy: tuple[float, ...]  # time in which each rank works
    most_held: tuple[float, ...]  # the most microbatches a rank holds at once, in its chunks
    schedule: Schedule
    timeline: Timeline

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they wait."""
        # Sums of the same numbers may differ in their last bit. `StageTimes` are not all 0.
        return max(0.0, 1 - sum(self.busy) / (len(self.busy) * self.seconds))


def predict(
    times: StageTimes,
    microbatches: int,
    *,
    schedule: str = "1f1b",
    chunks: int = 1,
    framework: Literal["torch", "megatron"] = "megatron",
    weighs: bool = False,
) -> Prediction:
    """Predicts a step of `microbatches` by simulating the schedule's own order.

    Args:
        weighs: under "vocab" the last rank alone knows the gradient of each token's loss, as in
            Megatron.
    Raises:
        ValueError: the schedule does not run with these stages or microbatches, or the head's times
            are missing or do not fit together.
    """
    stages = len(times.forward)
    if stages % chunks:
        raise ValueError(f"chunks must divide the number of stages, {stages}, got {chunks}")
    ranks = stages // chunks
    if schedule == "vocab" and not times.is_over_ranks:
        raise ValueError(
            "statistics and gradients must be given for the schedule 'vocab', got none"
        )
    if times.is_over_ranks and not (times.statistics and times.gradients):
        raise ValueError("statistics and gradients must both be given, got one of them")
    if times.is_over_ranks and times.chunks != chunks:
        raise ValueError(f"chunks must be those of the times, {times.chunks}, got {chunks}")
    if times.embedding and not times.is_over_ranks:
        raise ValueError("embedding must be given with statistics and gradients, got it alone")
    orders = make_schedule(
        schedule,
        ranks,
        microbatches,
        chunks=chunks,
        framework=framework,
        times=times.slowest() if schedule == "vocab" else None,
        embeds=bool(times.embedding),
        weighs=weighs,
    )
    return simulate_schedule(orders, times)


def simulate_schedule(schedule: Schedule, times: StageTimes) -> Prediction:
    """Predicts a step by simulating the schedule."""

    def work(rank: int, kind: str, chunk: int) -> Work:
        if kind in "STUEG":
            return _work_of_head(schedule, times, rank, kind)
        return _work_of_stage(schedule, times, rank, kind, chunk)

    if times.is_over_ranks and schedule.name != "vocab":
        last = schedule.stages - 1
        timeline = run_served(schedule.orders, work, last, embeds=bool(times.embedding))
    else:
        timeline = run_orders(schedule.orders, work, dict.fromkeys("STEG", schedule.ranks))
    return Prediction(
        seconds=timeline.makespan,
        closed_form=closed_form(schedule, times),
        busy=timeline.busy,
        most_held=tuple(peak_of_held(held, [1.0] * schedule.chunks) for held in schedule.held),
        schedule=schedule,
        timeline=timeline,
    )


def _work_of_stage(schedule: Schedule, times: StageTimes, rank: int, kind: str, chunk: int) -> Work:
    stage, last = schedule.stage(rank, chunk), schedule.stages - 1

    def latency_from(sender: int) -> float:
        """Returns 0 if the stages are on the same rank, which then sends nothing."""
        return 0.0 if schedule.rank(sender) == rank else times.latency

    if kind == "F":
        taken, opens = times.forward[stage], ("F", stage)
        if stage:
            return Work(taken, ("F", stage - 1), latency_from(stage - 1), opens)
        if times.embedding and schedule.name == "vocab":
            return Work(taken, "E", times.head_latency, opens)
        return Work(taken, opens=opens)
    backward = times.backward[stage]
    if kind == "W":
        return Work(backward * times.weight_share)
    taken = backward * (1 - times.weight_share) if kind == "I" else backward
    if stage < last:
        return Work(taken, ("B", stage + 1), latency_from(stage + 1), ("B", stage))
    if schedule.name == "vocab":
        return Work(taken, "T", times.head_latency, ("B", stage))
    if times.is_over_ranks:
        # The gate opens when the sum has arrived: no further delay.
        return Work(taken, "T", 0.0, ("B", stage))
    return Work(taken, ("F", stage), 0.0, ("B", stage))


def _work_of_head(schedule: Schedule, times: StageTimes, rank: int, kind: str) -> Work:
    last = schedule.stages - 1
    waits: dict[str, Hashable] = {"S": ("F", last), "U": "S", "T": "S", "G": ("B", 0)}
    if schedule.weighs:
        waits["T"] = "U"
    if kind == "U":
        # U computes a few numbers for each token: no time.
        return Work(0.0, waits[kind], times.head_latency, kind)
    lists = {"S": times.statistics, "T": times.gradients}
    taken = lists.get(kind, times.embedding)[rank] + (times.stalled if kind == "S" else 0.0)
    return Work(taken, waits.get(kind), times.head_latency, kind)


def closed_form(schedule: Schedule, times: StageTimes) -> float | None:
    """Returns a step's time by formula, without latencies between stages; None: none is known.

    gpipe: exact. 1f1b: (m - 1) max(F + B) + sum(F + B), exact if the last stage is the slowest in
    both passes, or all stages are equal. interleaved: for equal stages alone. vocab: m cycles of
    the slowest rank, and one microbatch's way through the other stages.
    """
    count, ranks = schedule.microbatches, schedule.ranks
    forward, backward = times.forward, times.backward
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    if times.is_over_ranks and schedule.name != "vocab":
        return None
    if schedule.name == "gpipe":
        return sum(both) + (count - 1) * (max(forward) + max(backward))
    if schedule.name == "1f1b":
        return (count - 1) * max(both) + sum(both)
    if schedule.name == "vocab":
        each = times.slowest()
        way = (ranks - 1) * (each.forward + each.backward)
        return count * (each.cycle + 2 * each.embedding) + way
    even = max(both) <= min(both) * (1 + 1e-9)
    if schedule.name == "interleaved" and even and count % ranks == 0:
        return (count * schedule.chunks + ranks - 1) * both[0]
    return None
