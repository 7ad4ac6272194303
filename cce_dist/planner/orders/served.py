"""The vocabulary over all ranks under a schedule that knows nothing of it.

As `VocabOverPipeline` runs it: on every rank a thread, with a stream of
high priority, takes one microbatch after the other: what the last stage has made goes to all, S on
all of them, the merge, T on all of them, the sum, which the last stage's backward waits for. The
next microbatch begins after that sum. The schedule's passes and these share the GPU: S and T run
when they can, and a pass that is under way takes as much longer. With the input embedding over all
ranks, E of all microbatches comes before the first pass, and G of all after the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import sub

from .timeline import (
    Gate,
    Gates,
    Lane,
    Phase,
    Task,
    Timeline,
    Work,
    count_microbatches,
    require_ends,
)

# Of the thread, among the ranks' events.
_HEAD = -1


@dataclass(frozen=True)
class Served:
    """The thread's work for each microbatch, one number a rank.

    Args:
        statistics, gradients: seconds of S and of T.
        embedding: of E, and of G; (): the first stage's own.
        latency: of each collective: before S, between S and T, after T.
        last: the last stage, whose forward gives and whose backward takes.
    """

    statistics: Sequence[float]
    gradients: Sequence[float]
    embedding: Sequence[float]
    latency: float
    last: int


def run_served(
    orders: Sequence[Sequence[Task]], work: Callable[[int, str, int], Work], head: Served
) -> Timeline:
    """Runs `run_orders` of the schedule's own passes, beside the thread's.

    Args:
        work: as of `run_orders`; the last stage's backward waits for the gate "T", which is open
            when a microbatch's sum is there.
    Raises:
        ValueError: the ranks wait for one another.
    """
    count = count_microbatches(orders)
    gates = Gates(count, {})
    before = count * (max(head.embedding) + head.latency) if head.embedding else 0.0
    ranks = [
        _Rank(order, gates.lanes(rank, order, work), before) for rank, order in enumerate(orders)
    ]
    simulation = _Run(ranks, head, gates.named(("F", head.last)), gates.named("T"), before)
    simulation.run()
    require_ends(orders, [rank.ends for rank in ranks])
    return simulation.timeline(count)


class _Rank:
    """A rank's progress: its next task, which has an end once it waits for nothing."""

    def __init__(
        self, order: Sequence[Task], lanes: Mapping[str, Mapping[int, Lane]], free: float
    ) -> None:
        self.order, self.lanes, self.free = order, lanes, free
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.running = math.inf  # until when; inf: it waits
        self.busy_until = free  # with the head
        self.worked = 0.0

    def interrupt(self, at: float, seconds: float) -> None:
        """Gives the GPU to the head from `at`."""
        self.busy_until = at + seconds
        if at < self.running < math.inf:
            start = self.starts[-1]
            # A task that has not begun begins after it.
            late = seconds if start < at else max(0.0, self.busy_until - start)
            self.starts[-1] = start if start < at else start + late
            self.running += late


@dataclass
class _Run:
    ranks: list[_Rank]
    head: Served
    gives: Gate  # the last stage's forward
    takes: Gate  # its backward
    free: float  # when the thread is, of its last microbatch
    events: list[tuple[float, int]] = field(default_factory=list)
    num_given: int = 0  # microbatches that the last stage has given
    served: int = 0
    phase: str = ""  # that is to come; "": the thread waits for a microbatch
    phases: list[Phase] = field(default_factory=list)

    def run(self) -> None:
        """Events in the order of time. A rank's is the end of its task as it was when it began."""
        for number in range(len(self.ranks)):
            self._start(number, 0.0)
        while self.events:
            now, number = heappop(self.events)
            if number == _HEAD:
                self._phase(now)
                continue
            rank = self.ranks[number]
            if rank.running > now:
                heappush(self.events, (rank.running, number))
                continue
            kind, index, chunk = rank.order[len(rank.ends)]
            rank.ends.append(now)
            rank.free, rank.running = now, math.inf
            opens = rank.lanes[kind][chunk].opens
            if opens is not None:
                self._open(opens, index, now)
            if opens is self.gives:
                self.num_given += 1
                if not self.phase:
                    self._begin(now)
            self._start(number, now)

    def _start(self, number: int, now: float) -> None:
        """Starts the rank's next task, if it has a task that waits for nothing."""
        rank = self.ranks[number]
        if len(rank.ends) == len(rank.order):
            return
        kind, index, chunk = rank.order[len(rank.ends)]
        seconds, waits, delay, _ = rank.lanes[kind][chunk]
        start = max(rank.free, now, rank.busy_until)
        if waits is not None:
            opened = waits.opened[index]
            if opened is None:
                waits.waiting.setdefault(index, []).append(number)
                return
            start = max(start, opened + delay)
        rank.starts.append(start)
        rank.running = start + seconds
        rank.worked += seconds
        heappush(self.events, (rank.running, number))

    def _open(self, gate: Gate, index: int, now: float) -> None:
        gate.opened[index] = now
        if index in gate.waiting:
            for number in gate.waiting.pop(index):
                self._start(number, now)

    def _begin(self, now: float) -> None:
        """Begins the next microbatch, if the last stage has given it."""
        self.phase = "S" if self.served < self.num_given else ""
        if self.phase:
            heappush(self.events, (now + self.head.latency, _HEAD))

    def _phase(self, now: float) -> None:
        head, index = self.head, self.served
        if self.phase == "sum":
            self.served += 1
            self.free = now
            self._open(self.takes, index, now)
            self._begin(now)
            return
        lists = {"S": head.statistics, "T": head.gradients}
        for rank, seconds in zip(self.ranks, lists[self.phase], strict=True):
            rank.interrupt(now, seconds)
        self.phases.append(Phase(Task(self.phase, index), now, lists[self.phase]))
        heappush(self.events, (now + max(lists[self.phase]) + head.latency, _HEAD))
        self.phase = "T" if self.phase == "S" else "sum"

    def timeline(self, count: int) -> Timeline:
        return Timeline(
            [rank.order for rank in self.ranks],
            [rank.starts for rank in self.ranks],
            [rank.ends for rank in self.ranks],
            [*self._rows("E", count, 0.0), *self.phases, *self._rows("G", count, self._after())],
            # The passes' seconds beside their seconds alone.
            [sum(map(sub, rank.ends, rank.starts)) - rank.worked for rank in self.ranks],
        )

    def _rows(self, kind: str, count: int, start: float) -> list[Phase]:
        """Runs E or G of all microbatches, one after the other."""
        if not self.head.embedding:
            return []
        each, rows = max(self.head.embedding) + self.head.latency, self.head.embedding
        return [Phase(Task(kind, n), start + n * each, rows) for n in range(count)]

    def _after(self) -> float:
        return max(self.free, *(rank.free for rank in self.ranks)) + self.head.latency
