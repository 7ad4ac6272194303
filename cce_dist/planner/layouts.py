"""Chooses the number of layers of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from cce_dist.planner.cost.stages import Costs, Stage, make_stages
from cce_dist.planner.orders.schedules import Schedule

from .plan import Plan, even_layout, memory_of, plan_layout, stages_of

Layout = tuple[int, ...]

# What one search simulates: tasks, above which layouts are compared by their slowest rank alone;
# and plans of few tasks.
MANY_TASKS, MANY_PLANS = 60_000, 300


def best_layout(costs: Costs, schedule: Schedule) -> Plan:
    """Returns the plan of the fastest layout that fits; if none fits, the plan that needs the least
    memory.

    From an even layout and those of `balanced_layout`, one layer after the other is moved to
    another stage as long as a step gets shorter.
    """
    parts = Parts(costs, schedule)
    needs = {layout: peak_of(costs, schedule, layout) for layout in _starts(parts)}
    fitting = [layout for layout, need in needs.items() if need <= parts.room]
    if not fitting:
        return plan_layout(costs, schedule, min(needs, key=lambda layout: needs[layout]))
    begins = set(fitting)
    if len(set(costs.layers)) > 1:
        # They counted as alike. Those that are level need not be faster.
        begins |= set(map(parts.levelled, fitting))
    most = min(MANY_PLANS, MANY_TASKS // sum(map(len, schedule.orders)))
    if most < len(begins):
        return plan_layout(costs, schedule, min(begins, key=parts.loads))
    plans = {layout: plan_layout(costs, schedule, layout) for layout in sorted(begins)}
    for layout in sorted(begins):
        _improve(parts, plans, layout, most)
    return min(plans.values(), key=_order)


def fits_somehow(costs: Costs, schedule: Schedule) -> bool:
    """Returns True where `best_layout` finds a layout that fits; nothing is simulated."""
    parts = Parts(costs, schedule)
    return any(peak_of(costs, schedule, layout) <= parts.room for layout in _starts(parts))


def peak_of(costs: Costs, schedule: Schedule, layout: Layout) -> float:
    """Returns bytes of the rank that takes most; nothing is simulated."""
    stages = make_stages(costs, layout)
    return max(
        memory_of(costs, schedule, stages_of(schedule, stages, rank), rank).total
        for rank in range(schedule.ranks)
    )


def _order(plan: Plan) -> tuple[float, float]:
    """Sorts plans that fit, the best first."""
    return round(plan.seconds, 9), plan.peak


def _starts(parts: Parts) -> Iterator[Layout]:
    """Yields layouts from which the search starts; the last helps where the others need too much
    memory."""
    yield even_layout(parts.costs.model.layers, parts.schedule.stages)
    yield balanced_layout(parts)
    if parts.schedule.chunks > 1:
        yield balanced_layout(parts, is_thrifty=True)


@dataclass(frozen=True)
class Parts:
    """The parts that layouts consist of."""

    costs: Costs
    schedule: Schedule

    @property
    def room(self) -> float:
        """Bytes of a rank."""
        return self.costs.hardware.usable * self.costs.hardware.memory

    @cached_property
    def empty(self) -> list[Stage]:
        """Stages without layers."""
        return make_stages(self.costs, [0] * self.schedule.stages)

    @cached_property
    def layer(self) -> Stage:
        """The average addition of a layer to a stage."""
        count = len(self.costs.layers)
        without, inner = self.inner, make_stages(self.costs, [0, count, 0])[1]
        names = ("parameters", "expert_parameters", "flops", "forward", "backward", "kept")
        added = {name: (getattr(inner, name) - getattr(without, name)) / count for name in names}
        return replace(inner, layers=1, **added)

    @cached_property
    def inner(self) -> Stage:
        """A stage without layers, neither first nor last. It has its share of a head that all ranks
        share."""
        return make_stages(self.costs, [0, 0, 0])[1]

    @cached_property
    def until(self) -> tuple[list[float], list[float]]:
        """For each count of layers, from the model's first: seconds of their forward, and seconds
        in all."""
        each = make_stages(self.costs, [0, *[1] * len(self.costs.layers), 0])[1:-1]
        forward = [one.forward - self.inner.forward for one in each]
        both = [
            first + one.backward - self.inner.backward
            for first, one in zip(forward, each, strict=True)
        ]
        return list(accumulate(forward, initial=0.0)), list(accumulate(both, initial=0.0))

    @cached_property
    def stages(self) -> list[list[int]]:
        """Stages of each rank."""
        schedule = self.schedule
        return [
            [schedule.stage(rank, chunk) for chunk in range(schedule.chunks)]
            for rank in range(schedule.ranks)
        ]

    @cached_property
    def in_flight(self) -> dict[int, int]:
        """Microbatches of each stage, at the most."""
        return {
            stage: max(held.counts[chunk] for held in self.schedule.held[rank])
            for rank, mine in enumerate(self.stages)
            for chunk, stage in enumerate(mine)
        }

    def needs(self, rank: int, layout: list[int]) -> float:
        """Returns bytes of a rank, where all layers are as the mean layer."""
        stages, layer = [], self.layer
        for index in self.stages[rank]:
            base, count = self.empty[index], layout[index]
            stages.append(
                replace(
                    base,
                    parameters=base.parameters + count * layer.parameters,
                    expert_parameters=count * layer.expert_parameters,
                    kept=base.kept + count * layer.kept,
                    working=max(base.working, layer.working if count else 0.0),
                )
            )
        return memory_of(self.costs, self.schedule, stages, rank).total

    def taken(self, layout: Layout) -> tuple[list[float], list[float]]:
        """Returns seconds of each stage: of the forward, and of both passes."""
        forward, both = self.until
        ends = list(accumulate(layout, initial=0))
        cuts = list(zip(self.empty, ends, ends[1:], strict=False))
        return (
            [empty.forward + forward[b] - forward[a] for empty, a, b in cuts],
            [empty.forward + empty.backward + both[b] - both[a] for empty, a, b in cuts],
        )

    def loads(self, layout: Layout) -> tuple[list[float], float]:
        """Returns a microbatch's seconds on each rank without a head over all of them, the slowest
        first; of layouts alike in that, the better first.

        Rounded: sums of the same numbers may differ in their last bits."""
        both = self.taken(layout)[1]
        each = (round(sum(both[stage] for stage in mine), 12) for mine in self.stages)
        return sorted(each, reverse=True), self.least_seconds(layout)

    def least_seconds(self, layout: Layout) -> float:
        """Returns a lower bound of a step: a rank's own work, after the first microbatch's way."""
        forward, both = self.taken(layout)
        way = list(accumulate(forward, initial=0.0))
        count, head = self.schedule.microbatches, self.costs.head
        over = head.forward + head.backward if self.costs.job.is_over_ranks else 0.0
        return max(
            way[min(mine)] + count * (over + sum(both[s] for s in mine)) for mine in self.stages
        )

    def levelled(self, layout: Layout) -> Layout:
        """Moves layers of the slowest rank to others, as long as no rank is as slow then and it
        fits: layers need not be alike."""
        best = self.loads(layout)
        while True:
            both = self.taken(layout)[1]
            slowest = max(self.stages, key=lambda mine: sum(both[s] for s in mine))
            near = [(self.loads(each), each) for each in _moves(layout, slowest)]
            for loads, each in sorted(near):
                if loads >= best:
                    return layout
                if peak_of(self.costs, self.schedule, each) <= self.room:
                    best, layout = loads, each
                    break
            else:
                return layout


def _moves(layout: Layout, sources: list[int]) -> Iterator[Layout]:
    """Yields layouts with a layer of `sources` moved elsewhere. Only the first and the last stage
    may be empty."""
    last = len(layout) - 1
    for source in sources:
        if layout[source] > (0 < source < last):
            for target in range(last + 1):
                if target != source:
                    moved = list(layout)
                    moved[source] -= 1
                    moved[target] += 1
                    yield tuple(moved)


def _improve(parts: Parts, plans: dict[Layout, Plan], layout: Layout, most: int) -> None:
    """Adds better and better plans, the first from this layout's, until there are as many."""
    every, best = list(range(parts.schedule.stages)), plans[layout]
    while True:
        near = [(parts.least_seconds(each), each) for each in _moves(best.layout, every)]
        for least, each in sorted(near):
            if least >= best.seconds or len(plans) >= most:
                return
            if each in plans or peak_of(parts.costs, parts.schedule, each) > parts.room:
                continue
            plans[each] = plan_layout(parts.costs, parts.schedule, each)
            if _order(plans[each]) < _order(best):
                best = plans[each]
                break
        else:
            return


def balanced_layout(parts: Parts, *, is_thrifty: bool = False) -> Layout:
    """Gives layer by layer to the rank whose stages take least, as long as it has the memory, and
    there to the stage that takes least, or if thrifty has the fewest microbatches in flight. All
    layers count as the mean layer."""
    layout = [0] * parts.schedule.stages
    room, ranks = parts.room, list(range(parts.schedule.ranks))
    full: set[int] = set()
    takes = [stage.forward + stage.backward for stage in parts.empty]

    for _ in range(parts.costs.model.layers):
        while True:
            if len(full) == len(ranks):
                # Nothing fits: balanced all the same.
                full, room = set(), float("inf")
            open_ = (rank for rank in ranks if rank not in full)
            rank = min(open_, key=lambda r: (sum(takes[s] for s in parts.stages[r]), r))
            mine = parts.stages[rank]
            # One without layers is the embedding's or the head's alone, or has nothing to do.
            key = parts.in_flight if is_thrifty else takes
            stage = min(mine, key=lambda s: (key[s], s))
            layout[stage] += 1
            if parts.needs(rank, layout) <= room:
                break
            layout[stage] -= 1
            full.add(rank)
        takes[stage] += parts.layer.forward + parts.layer.backward
    return _without_gaps(tuple(layout))


def _without_gaps(layout: Layout) -> Layout:
    """Gives each empty inner stage a layer of a largest stage. Only the first and the last may be
    empty."""
    filled = list(layout)
    for index in range(1, len(filled) - 1):
        if not filled[index]:
            largest = filled.index(max(filled))
            if filled[largest] == 1:
                # Only the ends have one that is not needed there.
                largest = 0 if filled[0] else len(filled) - 1
            filled[largest] -= 1
            filled[index] = 1
    return tuple(filled)
