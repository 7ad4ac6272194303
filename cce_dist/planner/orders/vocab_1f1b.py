"""The order of passes on each pipeline rank, with the vocabulary over all ranks.

A microbatch takes these passes:

    F   forward, on one rank after the other, from the first to the last
    S   log-sum-exp of the rank's columns, on all ranks
    T   gradients of the rank's columns, on all ranks, after the merge of all S
    B   backward, on one rank after the other, from the last to the first, after the sum of all T
    U   between S and T, on the last rank, if it alone knows the gradient of each token's loss: it
        sends that gradient to all ranks
    E   before F of the first rank, on all ranks, if they share the input embedding: looks tokens up
    G   after B of the first rank, on all ranks, with E: adds the gradient to the embedding's rows

Every rank repeats one cycle F, B, S, T, and starts one F later than the rank before it. A pass
takes the first slot of its kind after the passes that it waits for. But each rank runs ahead: it
starts with as many F as it will hold microbatches at once, so that no F waits for an S or T while
the pipeline fills.
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
# Microbatches that pass one at a time at the start of `plan_slow_start`.
SLOWLY = 2
# If the latency of collectives is unknown, an order allows for the first of these, in forwards,
# that needs no further microbatch in flight.
SPARE_LATENCIES = (0.25, 0.1, 0.05, 0.02)


class Pass(NamedTuple):
    kind: Kind
    microbatch: int


@dataclass(frozen=True)
class Times:
    """Times of a microbatch on a rank, in any unit.

    Raises:
        ValueError: a time of a pass is not positive and finite, or latency or embedding is
            negative or not finite.
    """

    forward: float = 1.0
    backward: float = 2.0
    statistics: float = 0.25  # S
    gradients: float = 0.75  # T
    latency: float = 0.0  # of a collective of the head; 0: not known
    embedding: float = 0.0  # E, and G

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            rule = ">= 0" if name in ("latency", "embedding") else "> 0"
            if not 0 <= value < math.inf or (value == 0 and rule == "> 0"):
                raise ValueError(f"{name} must be {rule} and finite, got {value!r}")

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
    """Orders the passes of each rank.

    A rank has at most ranks + 2 microbatches between F and B if the head takes no longer than two
    stages and latency is 0. It has ranks + 3 with a head as long as six stages, with a latency of
    F / 5, or with `weighs`, since U may wait for a pass of the last rank. With a latency of 0 a
    pass that waits for a collective comes one pass later, if that needs no further microbatch.

    Args:
        embeds: E and G are ordered as well, between passes of the cycle.
        weighs: U is ordered on the last rank, between passes of the cycle.
        runs_ahead: False: the repeated cycle alone.
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
    # E comes a cycle before the first rank's F, G a latency after its B.
    start["E"] = [-cycle] * ranks
    start["G"] = [start["B"][0] + times.backward + times.latency] * ranks
    # U comes before passes that start at the same time.
    kinds: list[Kind] = ["U", *CYCLE, *EMBEDDING] if embeds else ["U", *CYCLE]
    indices = range(microbatches)
    passes: dict[Kind, list[Pass]] = {kind: [Pass(kind, i) for i in indices] for kind in kinds}
    orders = []
    for rank in every:
        here = kinds if weighs and rank == ranks - 1 else kinds[1:]
        orders.append(_repeat({kind: start[kind][rank] / cycle for kind in here}, passes))
    return _run_ahead(orders) if runs_ahead else orders


def _first_starts(ranks: int, times: Times, weighs: bool) -> dict[Kind, list[float]]:
    """Returns the start of each of the first microbatch's passes on each rank, by kind."""
    cycle, every = times.cycle, range(ranks)
    offset: dict[Kind, float] = {}
    for kind in CYCLE:
        offset[kind] = sum(times.of(earlier) for earlier in CYCLE[: len(offset)])

    def slot(rank: int, kind: Kind, ready: float) -> float:
        """Returns the first start of `kind` on `rank` that is not before `ready`."""
        first = rank * times.forward + offset[kind]
        return first + math.ceil((ready - first) / cycle - 1e-9) * cycle

    arrived = ranks * times.forward + times.latency
    start: dict[Kind, list[float]] = {"F": [rank * times.forward for rank in every]}
    start["S"] = [slot(rank, "S", arrived) for rank in every]
    merged = max(start["S"]) + times.statistics + times.latency
    if weighs:
        # U starts between two passes of the last rank.
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
    """Returns the number of F that a rank starts before its first B."""
    return math.ceil((start["B"][rank] - start["F"][rank]) / cycle - 1e-9)


def _repeat(starts: dict[Kind, float], passes: dict[Kind, list[Pass]]) -> list[Pass]:
    """Returns a rank's passes in the order of their starts; ties follow the order of `starts`.

    Args:
        starts: in cycles, of the first microbatch's pass of each kind; each further microbatch
            starts one cycle later.
    """
    turns: list[tuple[float, int, Kind]] = []
    for kind, start in starts.items():
        # Rounded, since sums of the same floats may differ in their last bits.
        number = math.floor(round(start, 9))
        turns.append((round(round(start, 9) - number, 9), number, kind))
    turns.sort(key=lambda turn: turn[0])
    every = [(at, passes[kind]) for _, at, kind in turns]
    count, numbers = len(passes["F"]), [at for at, _ in every]
    cycles = range(min(numbers), max(numbers) + count)
    return [order[cycle - at] for cycle in cycles for at, order in every if 0 <= cycle - at < count]


def _run_ahead(orders: list[list[Pass]]) -> list[list[Pass]]:
    """Moves each rank's first F to the front, as many as it will hold microbatches.

    Their E come before them: else the first rank's F would wait until all ranks reach that E.
    """
    most = [most_in_flight(order) for order in orders]
    reordered = []
    for rank, order in enumerate(orders):
        ahead: dict[Kind, list[Pass]] = {"E": [], "F": []}
        limits: dict[Kind, int] = {"E": most[0], "F": most[rank]}
        remaining: list[Pass] = []
        for each in order:
            # E, F and the remaining passes each keep their order.
            kind, index = each
            (ahead[kind] if index < limits.get(kind, 0) else remaining).append(each)
        reordered.append(ahead["E"] + ahead["F"] + remaining)
    return reordered


def plan_slow_start(
    ranks: int, microbatches: int, times: Times, *, embeds: bool = False, weighs: bool = False
) -> list[list[Pass]]:
    """Orders a first step: `SLOWLY` microbatches one at a time, the others as `plan_vocab_order`.

    On a GPU the first use of a kernel or a communicator loads it, which may wait for all work that
    was launched before.
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
        for order, following in zip(orders, planned, strict=True):
            order += [Pass(kind, slowly + index) for kind, index in following]
    return orders


def most_in_flight(order: Sequence[Pass]) -> int:
    """Returns the most microbatches whose activations a rank holds at once."""
    held = most = 0  # E and G hold only tokens and one hidden state
    for kind, _ in order:
        held += (kind == "F") - (kind == "B")
        most = max(most, held)
    return most
