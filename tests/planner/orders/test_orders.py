"""The static order of a pipeline that has the vocabulary on all ranks."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from cce_dist.planner.orders.circles import require_no_circle
from cce_dist.planner.orders.vocab_1f1b import (
    CYCLE,
    EMBEDDING,
    Pass,
    Times,
    most_in_flight,
    plan_slow_start,
    plan_vocab_order,
)
from tests.planner.plan_jobs import makespan

SIZES = [(1, 1), (1, 6), (2, 1), (2, 3), (2, 16), (3, 12), (4, 2), (4, 16), (8, 64), (16, 128)]
PLANNER = Path(__file__).parents[3] / "docs" / "design" / "planner.md"
HEADS = [0.05, 0.3, 1.0, 2.0, 6.0]  # stage times


def times_of(ranks: int, head: float, latency: float = 0.0) -> Times:
    each = 3 * head / ranks
    return Times(statistics=each / 4, gradients=3 * each / 4, latency=latency)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_pass_once_and_nobody_waits_in_a_circle(
    ranks: int, microbatches: int, head: float
) -> None:
    embeds = (*CYCLE, *EMBEDDING)
    for latency, kinds, weighs in (
        *((0.0, CYCLE, False), (0.2, CYCLE, False), (0.1, embeds, False)),
        *((0.0, CYCLE, True), (0.1, embeds, True)),
    ):
        times = times_of(ranks, head, latency)
        how = {"embeds": kinds == embeds, "weighs": weighs}
        orders = plan_vocab_order(ranks, microbatches, times, **how)
        every = {Pass(kind, index) for kind in kinds for index in range(microbatches)}
        of_last = {Pass("U", index) for index in range(microbatches)} if weighs else set()
        for rank, order in enumerate(orders):
            expected = every | of_last if rank == ranks - 1 else every
            assert set(order) == expected and len(order) == len(expected)
            for kind in kinds:
                # Collectives of a kind are in the order of microbatches on all ranks.
                found = [each.microbatch for each in order if each.kind == kind]
                assert found == list(range(microbatches))
        require_no_circle(orders)
        require_no_circle(orders, ahead=1, unawaited=2)
        cycle_alone = plan_vocab_order(ranks, microbatches, times, runs_ahead=False, **how)
        # Whatever the times turn out to be, the order has no circle.
        makespan(orders, Times(1.0, 1.0, 3.0, 0.1, 0.5, 0.2))
        assert makespan(orders, times) >= microbatches * times.cycle
        most = [most_in_flight(order) for order in orders]
        more = (latency > 0 or head > 2) + weighs
        assert max(most) <= min(microbatches, ranks + 2 + more)
        assert most == sorted(most, reverse=True)
        # Whoever runs ahead holds no more.
        assert most == [most_in_flight(order) for order in cycle_alone]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 16), (4, 16), (8, 64), (16, 128)])
def test_time_of_the_order(ranks: int, microbatches: int, head: float) -> None:
    """m cycles, and one microbatch on its way through the other ranks; without running ahead m - 1
    cycles, and what the first and last microbatch take: ranks + 2 cycles at most."""
    times = times_of(ranks, head)
    ideal = microbatches * times.cycle + (ranks - 1) * 3.0
    took = makespan(plan_vocab_order(ranks, microbatches, times), times)
    assert took <= 1.006 * ideal
    cycle_alone = makespan(plan_vocab_order(ranks, microbatches, times, runs_ahead=False), times)
    assert took < cycle_alone <= (microbatches - 1 + ranks + 2) * times.cycle * (1 + 1e-9)
    assert cycle_alone <= (1.22 if ranks == 4 else 1.08) * ideal


def test_room_for_collectives_where_it_costs_nothing() -> None:
    """Of two ranks the last had T right after S, and waited for the merge between: 0.05 in each of
    16 cycles. As many microbatches are in flight as where no room was looked for."""
    times, late = Times(1.0, 2.1, 0.3, 0.3), Times(1.0, 2.1, 0.3, 0.3, latency=0.05)
    orders = plan_vocab_order(2, 16, times)
    assert [most_in_flight(order) for order in orders] == [4, 3]
    for first, second in zip(orders[1], orders[1][1:], strict=False):
        assert (first.kind, second) != ("S", Pass("T", first.microbatch))
    # Once on the way of the first and of the last microbatch.
    assert makespan(orders, late) <= makespan(orders, times) + 4 * 0.05
    with mock.patch("cce_dist.planner.orders.vocab_1f1b.SPARE_LATENCIES", ()):
        before = plan_vocab_order(2, 16, times)
    assert [most_in_flight(order) for order in before] == [4, 3]
    assert makespan(before, late) >= makespan(before, times) + 15 * 0.05


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 16), (4, 16), (8, 64), (16, 128)])
def test_the_planners_document_has_these_makespans(ranks: int, microbatches: int) -> None:
    lines = []
    for ahead in (False, True):
        name = "| running ahead" if ahead else f"{ranks}, {microbatches} |"
        cells = []
        for head in (0.3, 1.0, 2.0, 6.0):
            times = times_of(ranks, head)
            orders = plan_vocab_order(ranks, microbatches, times, runs_ahead=ahead)
            ideal = microbatches * times.cycle + (ranks - 1) * 3.0
            cells.append(f"{makespan(orders, times) / ideal:.3f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    assert "\n".join(lines) in PLANNER.read_text(encoding="utf-8")


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 16), (4, 16), (8, 32)])
def test_running_ahead_pays_where_times_are_not_as_planned(ranks: int, microbatches: int) -> None:
    planned = times_of(ranks, 1.0)
    orders, cycle_alone = (
        plan_vocab_order(ranks, microbatches, planned, runs_ahead=ahead) for ahead in (True, False)
    )
    for forward in (0.7, 1.4):
        for head in (0.5, 2.0):
            for latency in (0.0, 0.1, 0.5):
                times = Times(
                    forward,
                    statistics=head * planned.statistics,
                    gradients=head * planned.gradients,
                    latency=latency,
                )
                assert makespan(orders, times) < makespan(cycle_alone, times)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("weighs", [False, True], ids=["", "weighs"])
@pytest.mark.parametrize("embeds", [False, True], ids=["untied", "tied"])
def test_a_slow_start(ranks: int, embeds: bool, weighs: bool) -> None:
    for count in (1, 2, 3, 12):
        # Whether a layer or the head takes longer.
        for head in (1e-3, 0.3, 30.0):
            times = Times(statistics=head, gradients=3 * head)
            orders = plan_slow_start(ranks, count, times, embeds=embeds, weighs=weighs)
            require_no_circle(orders, ahead=1, unawaited=2)
            assert [x.microbatch for x in orders[0][:4]] == [0] * 4
            for order in orders:
                assert len(set(order)) == len(order)
                assert [x.microbatch for x in order if x.kind == "B"] == list(range(count))


def test_times_that_would_have_ranks_wait_for_one_another_are_refused() -> None:
    orders = plan_vocab_order(3, 3, Times(10, 0.5, 1, 1, latency=5))
    with pytest.raises(ValueError, match="must give an order in which no ranks wait for one"):
        require_no_circle(orders)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"forward": 0.0}, r"forward must be > 0 and finite, got 0.0"),
        ({"gradients": float("inf")}, "gradients must be > 0 and finite, got inf"),
        ({"latency": -1.0}, r"latency must be >= 0 and finite, got -1.0"),
    ],
)
def test_bad_times_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Times(**values)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks must be >= 1, got 0"):
        plan_vocab_order(0, 4, Times())
    with pytest.raises(ValueError, match="microbatches must be >= 1, got -1"):
        plan_vocab_order(4, -1, Times())
