"""Orders the passes of each pipeline rank, with the vocabulary over all ranks.

A microbatch is F on every rank from the first to the last, S on all of them (log-sum-exp of the
rank's columns), T on all of them when all S are merged (gradients), and B from the last to the
first when all T are summed. One cycle F, B, S, T is repeated on every rank, each begins one F later
than the rank before it, and every pass takes the first slot of its kind after what it waits for.
Only, each rank runs ahead: it begins with as many F as it will hold microbatches at once, so that
no F waits for an S or T while the pipeline fills.
Where the gradient of each token's loss is known to the last rank alone: U there (the gradient, and
to all) between S and T. Where the input embedding is over all ranks, too: E on all of them (look
the tokens up) before F of the first rank, and G (add the gradient to the rows) after its B.
Source: arXiv:2411.05288, its schedule of two barriers, which does not run ahead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "S", "T", "U", "E", "G"]
CYCLE: tuple[Kind, ...] = ("F", "B", "S", "T")
EMBEDDING: tuple[Kind, ...] = ("E", "G")
# Log-sum-exp is one product of four; the others are of the gradients.
SHARE_OF_S = 0.25
SLOWLY = 2
# Of a forward: how long collectives may take, if that is not known, where it costs no microbatch in
# flight.
SPARE_LATENCIES = (0.25, 0.1, 0.05, 0.02)


class Pass(NamedTuple):
    kind: Kind
    microbatch: int


@dataclass(frozen=True)
class Times:
    """Times of a microbatch on a rank, in any unit.

    Raises:
        ValueError: a time is not positive and finite, or latency negative.
    """

    forward: float = 1.0
    backward: float = 2.0
    statistics: float = 0.25  # S
    gradients: float = 0.75  # T
    latency: float = 0.0  # of a collective of the head; 0: not known
    embedding: float = 0.0  # E, and G

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "statistics", "gradients"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be > 0 and finite, got {value!r}")
        for name in ("latency", "embedding"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be >= 0 and finite, got {value!r}")

    def of(self, kind: Kind) -> float:
        times = {"F": self.forward, "B": self.backward, "S": self.statistics, "T": self.gradients}
        return 0.0 if kind == "U" else times.get(kind, self.embedding)

    @property
    def cycle(self) -> float:
        return sum(self.of(kind) for kind in CYCLE)


def plan_vocab_order(
    ranks: int,
    microbatches: int,
    times: Times,
    *,
    embeds: bool = False,
    weighs: bool = False,
    runs_ahead: bool = True,
) -> list[list[Pass]]:
    """Orders each rank's passes; with `embeds` E and G as well, with `weighs` U on the last rank.
    The cycle has no place for E, G and U but between its passes.

    Of one rank at most ranks + 2 microbatches are between F and B, where the head takes no longer
    than two stages and latency is 0; ranks + 3 with a head of six stages, or a latency of F / 5,
    or `weighs`, which may wait for a pass of the last rank. Where latency is 0 passes that wait for
    a collective have a pass between, if that needs no microbatch more.

    Raises:
        ValueError: ranks or microbatches below 1.
    """
    for name, value in (("ranks", ranks), ("microbatches", microbatches)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    every, cycle = range(ranks), times.cycle
    start = _first_starts(ranks, times, weighs)
    for share in SPARE_LATENCIES if times.latency == 0 else ():
        spare = _first_starts(ranks, replace(times, latency=share * times.forward), weighs)
        if all(_held(spare, rank, cycle) <= _held(start, rank, cycle) for rank in every):
            start = spare
            break
    # A cycle before the first rank's F, and a latency after its B.
    start["E"] = [-cycle] * ranks
    start["G"] = [start["B"][0] + times.backward + times.latency] * ranks
    # U before passes that begin at the same time.
    kinds: list[Kind] = ["U", *CYCLE, *EMBEDDING] if embeds else ["U", *CYCLE]
    passes: dict[Kind, list[Pass]] = {}
    for kind in kinds:
        passes[kind] = [Pass(kind, index) for index in range(microbatches)]
    orders = []
    for rank in every:
        here = kinds if weighs and rank == ranks - 1 else kinds[1:]
        orders.append(_repeat({kind: start[kind][rank] / cycle for kind in here}, passes))
    return _run_ahead(orders) if runs_ahead else orders


def _first_starts(ranks: int, times: Times, weighs: bool) -> dict[Kind, list[float]]:
    """Returns the time at which each rank begins each kind of the first microbatch's passes."""
    cycle, every = times.cycle, range(ranks)
    offset: dict[Kind, float] = {}
    for kind in CYCLE:
        offset[kind] = sum(times.of(other) for other in CYCLE[: len(offset)])

    def slot(rank: int, kind: Kind, ready: float) -> float:
        """Returns the first start of `kind` on `rank` that is not before `ready`."""
        first = rank * times.forward + offset[kind]
        return first + math.ceil((ready - first) / cycle - 1e-9) * cycle

    arrived = ranks * times.forward + times.latency
    start: dict[Kind, list[float]] = {"F": [rank * times.forward for rank in every]}
    start["S"] = [slot(rank, "S", arrived) for rank in every]
    merged = max(start["S"]) + times.statistics + times.latency
    if weighs:
        # Between two passes of the last rank.
        merged = min(slot(ranks - 1, kind, merged) for kind in CYCLE)
        start["U"] = [merged] * ranks
        merged += times.latency
    start["T"] = [slot(rank, "T", merged) for rank in every]
    ready = max(start["T"]) + times.gradients + times.latency
    start["B"] = [0.0] * ranks
    for rank in reversed(every):
        start["B"][rank] = slot(rank, "B", ready)
        ready = start["B"][rank] + times.backward
    return start


def _held(start: dict[Kind, list[float]], rank: int, cycle: float) -> int:
    """Returns the number of F that a rank begins before its first B."""
    return math.ceil((start["B"][rank] - start["F"][rank]) / cycle - 1e-9)


def _repeat(begins: dict[Kind, float], passes: dict[Kind, list[Pass]]) -> list[Pass]:
    """Returns a rank's passes in the order in which they begin; ties follow the order of `begins`.

    Args:
        begins: of the first microbatch's pass of each kind, in cycles; others follow one by one.
    """
    turns: list[tuple[float, int, Kind]] = []
    for kind, begin in begins.items():
        # Sums of floats that ought to be equal.
        number = math.floor(round(begin, 9))
        turns.append((round(round(begin, 9) - number, 9), number, kind))
    turns.sort(key=lambda turn: turn[0])
    count, numbers = len(passes["F"]), [turn[1] for turn in turns]
    first, last = min(numbers), max(numbers)

    def partly(cycles: range) -> list[Pass]:
        every = [(at, passes[kind]) for _, at, kind in turns]
        return [
            order[cycle - at] for cycle in cycles for at, order in every if 0 <= cycle - at < count
        ]

    # Cycles that have a pass of each kind, which are most where there are many microbatches.
    full = range(last, max(last, first + count))
    each = [passes[kind][full.start - at : full.stop - at] for _, at, kind in turns]
    return [
        *partly(range(first, min(last, first + count))),
        *(one for cycle in zip(*each, strict=True) for one in cycle),
        *partly(range(first + count, last + count)),
    ]


def _run_ahead(orders: list[list[Pass]]) -> list[list[Pass]]:
    """Puts the first microbatches' F before all else, and before these E, for which F of the first
    rank would wait until all others have come to it."""
    most = [most_in_flight(order) for order in orders]
    reordered = []
    for rank, order in enumerate(orders):
        ahead: dict[Kind, list[Pass]] = {"E": [], "F": []}
        limits: dict[Kind, int] = {"E": most[0], "F": most[rank]}
        rest: list[Pass] = []
        for each in order:
            # Within each of the three as they were.
            kind, index = each
            (ahead[kind] if index < limits.get(kind, 0) else rest).append(each)
        reordered.append(ahead["E"] + ahead["F"] + rest)
    return reordered


def plan_slow_start(
    ranks: int, microbatches: int, times: Times, *, embeds: bool = False, weighs: bool = False
) -> list[list[Pass]]:
    """Plans `plan_vocab_order` after `SLOWLY` microbatches that go through one after the other.

    For the first step of its kind: on a GPU kernels and communicators, of the stages too, come to
    the device at first use, which may wait for all that it has begun.
    """
    slowly = min(SLOWLY, microbatches)
    orders: list[list[Pass]] = []
    for rank in range(ranks):
        kinds: list[Kind] = ["F", "S", "T", "B"]
        if weighs and rank == ranks - 1:
            kinds.insert(2, "U")
        if embeds:
            kinds = ["E", *kinds, "G"]
        orders.append([Pass(kind, index) for index in range(slowly) for kind in kinds])
    if slowly < microbatches:
        planned = plan_vocab_order(
            ranks, microbatches - slowly, times, embeds=embeds, weighs=weighs
        )
        for order, rest in zip(orders, planned, strict=True):
            order += [Pass(kind, slowly + index) for kind, index in rest]
    return orders


def most_in_flight(order: Sequence[Pass]) -> int:
    """Microbatches that a rank holds activations of at once, at the most."""
    held = most = 0  # E and G hold tokens and one hidden state
    for kind, _ in order:
        held += (kind == "F") - (kind == "B")
        most = max(most, held)
    return most


def simulate(orders: Sequence[Sequence[Pass]], times: Times) -> list[dict[Pass, float]]:
    """Returns the time at which each rank ends each pass, where a rank waits only for its next
    pass.

    Raises:
        ValueError: the ranks wait for one another.
    """
    ranks = len(orders)
    ends: list[dict[Pass, float]] = [{} for _ in orders]
    at = [0] * ranks
    embeds = any(each.kind == "E" for order in orders for each in order)
    before_first: list[tuple[int, Kind]] = [(x, "E") for x in range(ranks)] if embeds else []
    all_s: list[tuple[int, Kind]] = [(x, "S") for x in range(ranks)]
    weighs = any(each.kind == "U" for each in orders[-1])

    def ready(rank: int, each: Pass) -> float | None:
        """Returns the end of the last pass that `each` waits for; None: not yet known."""
        index, last = each.microbatch, ranks - 1
        needs: dict[Kind, list[tuple[int, Kind]]] = {
            "F": [(rank - 1, "F")] if rank else before_first,
            "E": [],
            "G": [(0, "B")],
            "S": [(last, "F")],
            "U": all_s,
            "T": [(last, "U")] if weighs else all_s,
            "B": [(rank + 1, "B")] if rank < last else [(x, "T") for x in range(ranks)],
        }
        ends_before = [ends[other].get(Pass(kind, index)) for other, kind in needs[each.kind]]
        if any(end is None for end in ends_before):
            return None
        remote = each.kind in "STUG" or (each.kind == "B" and rank == last)
        latest = max((end for end in ends_before if end is not None), default=0.0)
        return latest + (times.latency if remote else 0.0)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                each = order[at[rank]]
                begin = ready(rank, each)
                if begin is None:
                    break
                free = ends[rank][order[at[rank] - 1]] if at[rank] else 0.0
                ends[rank][each] = max(begin, free) + times.of(each.kind)
                at[rank] += 1
                moved = True
    if any(done < len(order) for done, order in zip(at, orders, strict=True)):
        waits = [order[done] for done, order in zip(at, orders, strict=True) if done < len(order)]
        raise ValueError(f"orders must not wait in a circle, got ranks that wait at {waits}")
    return ends


def makespan(orders: Sequence[Sequence[Pass]], times: Times) -> float:
    return max(max(ends.values()) for ends in simulate(orders, times))
