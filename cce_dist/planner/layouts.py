"""The choice of a layout: the number of layers of each stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from cce_dist.planner.cost.stages import Costs, Stage, make_stages
from cce_dist.planner.orders.schedules import Schedule

from .plan import Plan, even_layout, memory_of, plan_layout, stages_of

Layout = tuple[int, ...]

# Bounds of what a search simulates: tasks in all, and plans. If even the layouts to start from have
# more tasks, the search compares them by their slowest rank alone.
MANY_TASKS, MANY_PLANS = 60_000, 300


def best_layout(costs: Costs, schedule: Schedule) -> Plan:
    """Returns the plan of the fastest layout that fits; if none fits, of the one that needs least.

    The search starts from an even layout and those of `balanced_layout`, and moves one layer at a
    time to another stage as long as a step gets shorter.
    """
    estimates = LayoutEstimates(costs, schedule)
    needs = {layout: peak_of(costs, schedule, layout) for layout in _starts(estimates)}
    fitting = [layout for layout, need in needs.items() if need <= costs.hardware.room]
    if not fitting:
        return plan_layout(costs, schedule, min(needs, key=lambda layout: needs[layout]))
    starts = set(fitting)
    if len(set(costs.layers)) > 1:
        # `balanced_layout` counts all layers as equal. A levelled layout need not be faster.
        starts |= set(map(estimates.levelled, fitting))
    most = min(MANY_PLANS, MANY_TASKS // sum(map(len, schedule.orders)))
    if most < len(starts):
        return plan_layout(costs, schedule, min(starts, key=estimates.loads))
    plans = {layout: plan_layout(costs, schedule, layout) for layout in sorted(starts)}
    for layout in sorted(starts):
        _improve(estimates, plans, layout, most)
    return min(plans.values(), key=_speed_key)


def fits_somehow(costs: Costs, schedule: Schedule) -> bool:
    """Returns True if `best_layout` finds a layout that fits; nothing is simulated."""
    estimates = LayoutEstimates(costs, schedule)
    return any(map(estimates.fits, _starts(estimates)))


def peak_of(costs: Costs, schedule: Schedule, layout: Layout) -> float:
    """Returns the bytes of the rank that needs most memory; nothing is simulated."""
    stages = make_stages(costs, layout)
    return max(
        memory_of(costs, schedule, stages_of(schedule, stages, rank), rank).total
        for rank in range(schedule.ranks)
    )


def _speed_key(plan: Plan) -> tuple[float, float]:
    """Returns the key that sorts plans that fit, the best first."""
    return round(plan.seconds, 9), plan.peak


def _starts(estimates: LayoutEstimates) -> Iterator[Layout]:
    """Yields the layouts from which the search starts; the last needs less memory."""
    yield even_layout(estimates.costs.model.layers, estimates.schedule.stages)
    yield balanced_layout(estimates)
    if estimates.schedule.chunks > 1:
        yield balanced_layout(estimates, is_thrifty=True)


@dataclass(frozen=True)
class LayoutEstimates:
    """Estimates of any layout from the costs of its layers, without a simulation."""

    costs: Costs
    schedule: Schedule

    @cached_property
    def empty(self) -> list[Stage]:
        """Stages without layers."""
        return make_stages(self.costs, [0] * self.schedule.stages)

    @cached_property
    def layer(self) -> Stage:
        """The addition of the mean layer to a stage."""
        count = len(self.costs.layers)
        empty, full = self.inner, make_stages(self.costs, [0, count, 0])[1]
        names = ("parameters", "expert_parameters", "flops", "forward", "backward", "kept")
        means = {name: (getattr(full, name) - getattr(empty, name)) / count for name in names}
        return replace(full, layers=1, **means)

    @cached_property
    def inner(self) -> Stage:
        """A stage without layers, neither first nor last, with a share of a head over all ranks."""
        return make_stages(self.costs, [0, 0, 0])[1]

    @cached_property
    def until(self) -> tuple[list[float], list[float]]:
        """Seconds of the model's first n layers, at index n: of the forward, and of both passes."""
        stages = make_stages(self.costs, [0, *[1] * len(self.costs.layers), 0])[1:-1]
        forward = [stage.forward - self.inner.forward for stage in stages]
        both = [
            seconds + stage.backward - self.inner.backward
            for seconds, stage in zip(forward, stages, strict=True)
        ]
        return list(accumulate(forward, initial=0.0)), list(accumulate(both, initial=0.0))

    @cached_property
    def stages(self) -> list[list[int]]:
        """The stages of each rank."""
        return [self.schedule.stages_of(rank) for rank in range(self.schedule.ranks)]

    @cached_property
    def in_flight(self) -> dict[int, int]:
        """The most microbatches that are in flight in each stage."""
        return {
            stage: max(held.counts[chunk] for held in self.schedule.held[rank])
            for rank, mine in enumerate(self.stages)
            for chunk, stage in enumerate(mine)
        }

    def needs(self, rank: int, layout: list[int]) -> float:
        """Returns the bytes of a rank, as if all layers were the mean layer."""
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
        """Returns the seconds of each stage: of the forward, and of both passes."""
        forward, both = self.until
        ends = list(accumulate(layout, initial=0))
        cuts = list(zip(self.empty, ends, ends[1:], strict=False))
        return (
            [empty.forward + forward[b] - forward[a] for empty, a, b in cuts],
            [empty.forward + empty.backward + both[b] - both[a] for empty, a, b in cuts],
        )

    def loads(self, layout: Layout) -> tuple[list[float], float]:
        """Returns a sort key: each rank's seconds of a microbatch, the slowest rank first; then
        `least_seconds`.

        A head over all ranks does not count. Seconds are rounded: sums of the same numbers in
        another order may differ in their last bits.
        """
        both = self.taken(layout)[1]
        each = (round(sum(both[stage] for stage in mine), 12) for mine in self.stages)
        return sorted(each, reverse=True), self.least_seconds(layout)

    def least_seconds(self, layout: Layout) -> float:
        """Returns a lower bound of a step: the time in which the first microbatch reaches a rank,
        then that rank's work."""
        forward, both = self.taken(layout)
        way = list(accumulate(forward, initial=0.0))
        count, head = self.schedule.microbatches, self.costs.head
        over = head.forward + head.backward if self.costs.job.is_over_ranks else 0.0
        return max(
            way[min(mine)] + count * (over + sum(both[s] for s in mine)) for mine in self.stages
        )

    def fits(self, layout: Layout) -> bool:
        return peak_of(self.costs, self.schedule, layout) <= self.costs.hardware.room

    def levelled(self, layout: Layout) -> Layout:
        """Moves layers away from the slowest rank, as long as `loads` gets smaller and the layout
        fits."""
        best = self.loads(layout)
        while True:
            both = self.taken(layout)[1]
            slowest = max(self.stages, key=lambda mine: sum(both[s] for s in mine))
            moved = [(self.loads(candidate), candidate) for candidate in _moves(layout, slowest)]
            for loads, candidate in sorted(moved):
                if loads >= best:
                    return layout
                if self.fits(candidate):
                    best, layout = loads, candidate
                    break
            else:
                return layout


def _moves(layout: Layout, sources: list[int]) -> Iterator[Layout]:
    """Yields layouts in which a stage of `sources` has given a layer to another stage.

    Only the first and the last stage may be empty.
    """
    last = len(layout) - 1
    for source in sources:
        if layout[source] > (0 < source < last):
            for target in range(last + 1):
                if target != source:
                    moved = list(layout)
                    moved[source] -= 1
                    moved[target] += 1
                    yield tuple(moved)


def _improve(
    estimates: LayoutEstimates, plans: dict[Layout, Plan], layout: Layout, most: int
) -> None:
    """Adds better and better plans, starting from this layout's, until `plans` has `most` plans."""
    every, best = list(range(estimates.schedule.stages)), plans[layout]
    while True:
        moved = [(estimates.least_seconds(each), each) for each in _moves(best.layout, every)]
        for least, each in sorted(moved):
            if least >= best.seconds or len(plans) >= most:
                return
            if each in plans or not estimates.fits(each):
                continue
            plans[each] = plan_layout(estimates.costs, estimates.schedule, each)
            if _speed_key(plans[each]) < _speed_key(best):
                best = plans[each]
                break
        else:
            return


def balanced_layout(estimates: LayoutEstimates, *, is_thrifty: bool = False) -> Layout:
    """Gives each layer to the fastest rank that has memory for it, and there to the fastest stage.

    All layers count as the mean layer.

    Args:
        is_thrifty: a rank's layers go to its stage with the fewest microbatches in flight.
    """
    layout = [0] * estimates.schedule.stages
    room, ranks = estimates.costs.hardware.room, list(range(estimates.schedule.ranks))
    full: set[int] = set()
    takes = [stage.forward + stage.backward for stage in estimates.empty]

    for _ in range(estimates.costs.model.layers):
        while True:
            if len(full) == len(ranks):
                # No rank has memory for the layer: go on without the limit.
                full, room = set(), float("inf")
            open_ = (rank for rank in ranks if rank not in full)
            rank = min(open_, key=lambda r: (sum(takes[s] for s in estimates.stages[r]), r))
            mine = estimates.stages[rank]
            key = estimates.in_flight if is_thrifty else takes
            stage = min(mine, key=lambda s: (key[s], s))
            layout[stage] += 1
            if estimates.needs(rank, layout) <= room:
                break
            layout[stage] -= 1
            full.add(rank)
        takes[stage] += estimates.layer.forward + estimates.layer.backward
    return _without_gaps(tuple(layout))


def _without_gaps(layout: Layout) -> Layout:
    """Gives each empty inner stage a layer of a largest stage.

    Only the first and the last stage may be empty.
    """
    filled = list(layout)
    for index in range(1, len(filled) - 1):
        if not filled[index]:
            largest = filled.index(max(filled))
            if filled[largest] == 1:
                # Only the first and the last stage can do without their layer.
                largest = 0 if filled[0] else len(filled) - 1
            filled[largest] -= 1
            filled[index] = 1
    return tuple(filled)
