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
    """What a rank's tasks of one kind and chunk take, wait for and announce.

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


@dataclass(frozen=True)
class Timeline:
    """When each rank's tasks ran, in its order."""

    orders: Sequence[Sequence[Task]]
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]

    @cached_property
    def ranks(self) -> tuple[tuple[Span, ...], ...]:
        each = zip(self.orders, self.starts, self.ends, strict=True)
        return tuple(tuple(map(Span, *columns)) for columns in each)

    @cached_property
    def makespan(self) -> float:
        return max((ends[-1] for ends in self.ends if ends), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank works."""
        return tuple(sum(map(sub, *both)) for both in zip(self.ends, self.starts, strict=True))


class _Gate:
    """Of each microbatch: when it opened, None before; how many knocks are missing; who waits."""

    def __init__(self, microbatches: int, knocks: int) -> None:
        self.opened: list[float | None] = [None] * microbatches
        self.latest = [0.0] * microbatches
        self.missing = [knocks] * microbatches
        self.waiting: dict[int, list[int]] = {}


def run_orders(
    orders: Sequence[Sequence[Task]],
    work: Callable[[int, str, int], Work],
    knocks: Mapping[Hashable, int] | None = None,
) -> Timeline:
    """When each task of each rank starts and ends, where a rank does nothing but its next task.

    Args:
        work: of a rank's tasks of a kind and chunk.
        knocks: how many a gate needs to open; 1 where it is not named.
    Raises:
        ValueError: the ranks wait for one another.
    """
    count = 1 + max((index for order in orders for _, index, _ in order), default=-1)
    gates: dict[Hashable, _Gate] = {}

    def gate(name: Hashable | None) -> _Gate | None:
        if name is None:
            return None
        if name not in gates:
            gates[name] = _Gate(count, (knocks or {}).get(name, 1))
        return gates[name]

    starts: list[list[float]] = [[] for _ in orders]
    ends: list[list[float]] = [[] for _ in orders]
    ready = list(range(len(orders)))
    running = []
    for rank, order in enumerate(orders):
        mine: dict[str, dict[int, _Lane]] = {}
        for kind, chunk in {(kind, chunk) for kind, _, chunk in order}:
            seconds, waits, delay, opens = work(rank, kind, chunk)
            mine.setdefault(kind, {})[chunk] = _Lane(seconds, gate(waits), delay, gate(opens))
        running.append(_run(rank, order, mine, starts[rank], ends[rank], ready))
    while ready:
        # Until it waits at a gate, whose last knock puts it on the list again.
        next(running[ready.pop()], None)
    stuck = [
        (rank, order[len(done)])
        for rank, (done, order) in enumerate(zip(ends, orders, strict=True))
        if len(done) < len(order)
    ]
    if stuck:
        raise ValueError(f"orders must not wait in a circle, got ranks that wait: {stuck[:4]}")
    return Timeline(orders, starts, ends)


class _Lane(NamedTuple):
    """`Work`, its gates found."""

    seconds: float
    waits: _Gate | None
    delay: float
    opens: _Gate | None


def _run(
    rank: int,
    order: Sequence[Task],
    mine: Mapping[str, Mapping[int, _Lane]],
    starts: list[float],
    ends: list[float],
    ready: list[int],
) -> Iterator[None]:
    """One rank; stops where a gate is closed. Half a million tasks are not many: no calls here but
    those of lists."""
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
