"""Ranks that work through fixed orders, where a task may wait for what other ranks have done."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import NamedTuple


class Task(NamedTuple):
    """F and B: forward and backward of a microbatch through a stage, the `chunk`-th of its rank's.
    I and W: a backward in two, gradients of the inputs and of the weights. S, T, U, E, G: of the
    vocabulary over all ranks (planner/orders.py)."""

    kind: str
    microbatch: int
    chunk: int = 0


class Work(NamedTuple):
    """The time of a rank's tasks of a kind and chunk; the gates they wait for and announce.

    A gate is one of each microbatch. A task starts when that of its microbatch which it waits for
    has been open for the delay; when it ends it knocks at that of `opens`, which is open at the
    last of its knocks.
    """

    seconds: float
    waits: Hashable | None = None
    delay: float = 0.0
    opens: Hashable | None = None


class Span(NamedTuple):
    task: Task
    start: float
    end: float


class Phase(NamedTuple):
    """A phase that all ranks begin at once, beside their tasks."""

    task: Task
    start: float
    seconds: Sequence[float]  # of each rank


@dataclass(frozen=True)
class Timeline:
    """The times of each rank's tasks, in its order.

    Args:
        phases: phases that ran beside them, in the order of time.
        paused: seconds of each rank's tasks in which phases ran instead; (): none.
    """

    orders: Sequence[Sequence[Task]]
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    phases: Sequence[Phase] = ()
    paused: Sequence[float] = ()

    @cached_property
    def ranks(self) -> tuple[tuple[Span, ...], ...]:
        """Tasks and then phases."""
        each = zip(self.orders, self.starts, self.ends, strict=True)
        spans_of_ranks = []
        for rank, columns in enumerate(each):
            beside = (Span(task, at, at + taken[rank]) for task, at, taken in self.phases)
            spans_of_ranks.append((*map(Span, *columns), *beside))
        return tuple(spans_of_ranks)

    @cached_property
    def makespan(self) -> float:
        last = max((ends[-1] for ends in self.ends if ends), default=0.0)
        return max(last, *(at + max(taken) for _, at, taken in self.phases[-1:]), 0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank works."""
        both = zip(self.ends, self.starts, strict=True)
        seconds = [sum(map(sub, *each)) for each in both]
        for rank, paused in enumerate(self.paused):
            seconds[rank] += sum(phase.seconds[rank] for phase in self.phases) - paused
        return tuple(seconds)


class Gate:
    """For each microbatch: the time at which the gate opened (None before), the missing knocks, and
    the ranks that wait."""

    def __init__(self, microbatches: int, knocks: int) -> None:
        self.opened: list[float | None] = [None] * microbatches
        self.latest = [0.0] * microbatches
        self.missing = [knocks] * microbatches
        self.waiting: dict[int, list[int]] = {}


class Lane(NamedTuple):
    """`Work`, its gates found."""

    seconds: float
    waits: Gate | None
    delay: float
    opens: Gate | None


class Gates:
    """Gates of a step, by name."""

    def __init__(self, microbatches: int, knocks: Mapping[Hashable, int]) -> None:
        self.microbatches, self.knocks = microbatches, knocks
        self._found: dict[Hashable, Gate] = {}

    def named(self, name: Hashable) -> Gate:
        if name not in self._found:
            self._found[name] = Gate(self.microbatches, self.knocks.get(name, 1))
        return self._found[name]

    def lanes(
        self, rank: int, order: Sequence[Task], work: Callable[[int, str, int], Work]
    ) -> dict[str, dict[int, Lane]]:
        """A rank's lanes, by kind and chunk."""
        lanes: dict[str, dict[int, Lane]] = {}
        for kind, chunk in {(kind, chunk) for kind, _, chunk in order}:
            seconds, waits, delay, opens = work(rank, kind, chunk)
            ends = [None if name is None else self.named(name) for name in (waits, opens)]
            lanes.setdefault(kind, {})[chunk] = Lane(seconds, ends[0], delay, ends[1])
        return lanes


def count_microbatches(orders: Sequence[Sequence[Task]]) -> int:
    return 1 + max((index for order in orders for _, index, _ in order), default=-1)


def run_orders(
    orders: Sequence[Sequence[Task]],
    work: Callable[[int, str, int], Work],
    knocks: Mapping[Hashable, int] | None = None,
) -> Timeline:
    """Returns the start and end of each rank's tasks, where a rank runs nothing but its next task.

    Args:
        work: of a rank's tasks of a kind and chunk.
        knocks: the number that a gate needs to open; 1 where it is not named.
    Raises:
        ValueError: the ranks wait for one another.
    """
    gates = Gates(count_microbatches(orders), knocks or {})
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    ready = list(range(len(orders)))
    running = [
        _run(rank, order, gates.lanes(rank, order, work), starts[rank], ends[rank], ready)
        for rank, order in enumerate(orders)
    ]
    while ready:
        # Until it waits at a gate, whose last knock puts it on the list again.
        next(running[ready.pop()], None)
    require_ends(orders, ends)
    return Timeline(orders, starts, ends)


def require_ends(orders: Sequence[Sequence[Task]], ends: Sequence[Sequence[float]]) -> None:
    """Raises ValueError: a rank has not come to the end of its order."""
    stuck = [
        (rank, order[len(done)])
        for rank, (done, order) in enumerate(zip(ends, orders, strict=True))
        if len(done) < len(order)
    ]
    if stuck:
        raise ValueError(f"orders must not wait in a circle, got ranks that wait: {stuck[:4]}")


def _run(
    rank: int,
    order: Sequence[Task],
    mine: Mapping[str, Mapping[int, Lane]],
    starts: list[float],
    ends: list[float],
    ready: list[int],
) -> Iterator[None]:
    """Runs a rank until it meets a closed gate. Half a million tasks are common: only calls of
    lists here."""
    now = 0.0
    for kind, index, chunk in order:
        seconds, waits, delay, opens = mine[kind][chunk]
        if waits is not None:
            opened = waits.opened[index]
            while opened is None:
                waits.waiting.setdefault(index, []).append(rank)
                yield
                opened = waits.opened[index]
            if opened + delay > now:
                now = opened + delay
        starts.append(now)
        now += seconds
        ends.append(now)
        if opens is None:
            continue
        latest, missing = opens.latest, opens.missing
        if now > latest[index]:
            latest[index] = now
        missing[index] -= 1
        if not missing[index]:
            opens.opened[index] = latest[index]
            if index in opens.waiting:
                ready += opens.waiting.pop(index)
