"""A simulation of ranks that work through fixed orders, and wait for tasks of other ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import NamedTuple


class Task(NamedTuple):
    """A task of a rank, for a microbatch.

    F and B are forward and backward of the rank's `chunk`-th stage. I and W are the two halves of a
    split backward: gradients of the inputs, and of the weights. S, T, U, E and G belong to a
    vocabulary over all ranks (planner/orders/vocab_1f1b.py).
    """

    kind: str
    microbatch: int
    chunk: int = 0


class Work(NamedTuple):
    """The seconds of a rank's tasks of one kind and chunk, and the gates that they use.

    A gate opens once for each microbatch. A task starts `delay` seconds after the gate `waits` has
    opened for its microbatch. A task that ends arrives at the gate `opens`, which opens when the
    last of its tasks has arrived.
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
    """A phase that all ranks start at the same time, in parallel to their tasks."""

    task: Task
    start: float
    seconds: Sequence[float]  # of each rank


@dataclass(frozen=True)
class Timeline:
    """The times of each rank's tasks, in its order."""

    orders: Sequence[Sequence[Task]]
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    phases: Sequence[Phase] = ()  # that ran in parallel to the tasks, in the order of time
    paused: Sequence[float] = ()  # seconds of each rank's tasks in which phases ran instead

    @cached_property
    def ranks(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank: its tasks, then the phases."""
        each = zip(self.orders, self.starts, self.ends, strict=True)
        spans_of_ranks = []
        for rank, columns in enumerate(each):
            phases = (Span(task, at, at + taken[rank]) for task, at, taken in self.phases)
            spans_of_ranks.append((*map(Span, *columns), *phases))
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
    """A gate that opens, for each microbatch, when the last of its tasks has arrived."""

    def __init__(self, microbatches: int, arrivals: int) -> None:
        self.opened: list[float | None] = [None] * microbatches  # time of opening; None: closed
        self.latest = [0.0] * microbatches  # time of the last arrival
        self.missing = [arrivals] * microbatches  # number of tasks that have not arrived
        self.waiting: dict[int, list[int]] = {}  # ranks that wait, by microbatch


class Lane(NamedTuple):
    """A `Work` with its gates in place of their names."""

    seconds: float
    waits: Gate | None
    delay: float
    opens: Gate | None


class Gates:
    """The gates of a step, by name.

    Args:
        arrivals: number of tasks that open a gate, by name; 1 for others.
    """

    def __init__(self, microbatches: int, arrivals: Mapping[Hashable, int]) -> None:
        self.microbatches, self.arrivals = microbatches, arrivals
        self._gates: dict[Hashable, Gate] = {}

    def named(self, name: Hashable) -> Gate:
        if name not in self._gates:
            self._gates[name] = Gate(self.microbatches, self.arrivals.get(name, 1))
        return self._gates[name]

    def lanes(
        self, rank: int, order: Sequence[Task], work: Callable[[int, str, int], Work]
    ) -> dict[str, dict[int, Lane]]:
        """Returns a rank's lanes, by kind and chunk."""
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
    arrivals: Mapping[Hashable, int] | None = None,
) -> Timeline:
    """Simulates ranks that take their tasks in order; returns the tasks' starts and ends.

    Args:
        work: returns the `Work` of a rank's tasks of a kind and chunk.
        arrivals: number of tasks that open a gate, by name; 1 for others.
    Raises:
        ValueError: ranks wait for one another in a circle.
    """
    gates = Gates(count_microbatches(orders), arrivals or {})
    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    ready = list(range(len(orders)))
    running = [
        _run_rank(rank, order, gates.lanes(rank, order, work), starts[rank], ends[rank], ready)
        for rank, order in enumerate(orders)
    ]
    while ready:
        # A rank runs until it waits at a gate; the gate's opening puts it on the list again.
        next(running[ready.pop()], None)
    require_ends(orders, ends)
    return Timeline(orders, starts, ends)


def require_ends(orders: Sequence[Sequence[Task]], ends: Sequence[Sequence[float]]) -> None:
    """Checks that each rank has come to the end of its order.

    Raises:
        ValueError: some wait in a circle.
    """
    stuck = [
        (rank, order[len(done)])
        for rank, (done, order) in enumerate(zip(ends, orders, strict=True))
        if len(done) < len(order)
    ]
    if stuck:
        raise ValueError(f"orders must not wait in a circle, got ranks that wait: {stuck[:4]}")


def _run_rank(
    rank: int,
    order: Sequence[Task],
    lanes: Mapping[str, Mapping[int, Lane]],
    starts: list[float],
    ends: list[float],
    ready: list[int],
) -> Iterator[None]:
    """Runs a rank, and yields whenever it meets a closed gate.

    Half a million tasks are common, so the loop calls only methods of lists and dicts.
    """
    now = 0.0
    for kind, index, chunk in order:
        seconds, waits, delay, opens = lanes[kind][chunk]
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
