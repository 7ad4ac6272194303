"""A simulation of the vocabulary over all ranks under a schedule that does not order its phases.

`VocabOverPipeline` runs it so: a thread on every rank, with a stream of high priority, takes one
microbatch after the other. The last stage's hidden states go to all ranks; all ranks do S, merge,
do T, and sum the hidden gradient, for which the last stage's backward waits. The next microbatch
starts after that sum. The thread and the schedule's passes share the GPU: S and T run as soon as
they can, and a pass under way takes longer by their time. If the input embedding is over all ranks,
E of all microbatches comes before the first pass, and G of all after the last.
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

# The thread's number among the numbers of ranks in events.
_HEAD = -1


def run_served(
    orders: Sequence[Sequence[Task]],
    work: Callable[[int, str, int], Work],
    last: int,
    *,
    embeds: bool,
) -> Timeline:
    """Simulates a schedule's passes, as `run_orders`, and the thread's phases.

    Args:
        work: as in `run_orders`; the last stage's backward waits for the gate "T", which opens when
            the microbatch's sum has arrived. The delay of S is that of each collective: before S,
            between S and T, after T.
        last: the last stage, for which the thread computes loss and gradient.
        embeds: the input embedding is over all ranks.
    Raises:
        ValueError: ranks wait for one another in a circle.
    """
    count, latency = count_microbatches(orders), work(0, "S", 0).delay
    phases = {
        kind: [work(rank, kind, 0).seconds for rank in range(len(orders))]
        for kind in ("STEG" if embeds else "ST")
    }
    gates = Gates(count, {})
    before = count * (max(phases["E"]) + latency) if embeds else 0.0
    ranks = [
        _Rank(order, gates.lanes(rank, order, work), before) for rank, order in enumerate(orders)
    ]
    hidden, summed = gates.named(("F", last)), gates.named("T")
    simulation = _Simulation(ranks, phases, latency, hidden, summed, before)
    simulation.run()
    require_ends(orders, [rank.ends for rank in ranks])
    return simulation.timeline(count)


class _Rank:
    """A rank's progress through its order."""

    def __init__(
        self, order: Sequence[Task], lanes: Mapping[str, Mapping[int, Lane]], free: float
    ) -> None:
        self.order, self.lanes, self.free = order, lanes, free
        self.starts: list[float] = []
        self.ends: list[float] = []
        self.running = math.inf  # end of the running task; inf: the rank waits
        self.busy_until = free  # end of the thread's phase
        self.worked = 0.0  # seconds of its tasks, without delays by phases

    def interrupt(self, at: float, seconds: float) -> None:
        """Gives the GPU to the thread for `seconds` from `at`."""
        self.busy_until = at + seconds
        if at < self.running < math.inf:
            start = self.starts[-1]
            # A task whose start lies ahead starts after the phase; a running task is extended.
            late = seconds if start < at else max(0.0, self.busy_until - start)
            self.starts[-1] = start if start < at else start + late
            self.running += late


@dataclass
class _Simulation:
    """The state of the ranks and of the thread, which runs on all ranks alike."""

    ranks: list[_Rank]
    seconds: Mapping[str, Sequence[float]]  # of each phase, on each rank
    latency: float
    hidden: Gate  # opens after the last stage's forward
    summed: Gate  # opens when the hidden gradient is summed
    free: float  # time at which the thread ended its last microbatch
    events: list[tuple[float, int]] = field(default_factory=list)
    num_ready: int = 0  # microbatches whose last forward has ended
    served: int = 0  # microbatches that the thread has ended
    phase: str = ""  # the thread's next phase; "": it waits for a microbatch
    phases: list[Phase] = field(default_factory=list)

    def run(self) -> None:
        """Handles events in the order of time.

        A rank's event is the end of its task, as known at its start; a phase may delay it.
        """
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
            if opens is self.hidden:
                self.num_ready += 1
                if not self.phase:
                    self._start_microbatch(now)
            self._start(number, now)

    def _start(self, number: int, now: float) -> None:
        """Starts the rank's next task, unless it waits at a gate."""
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

    def _start_microbatch(self, now: float) -> None:
        """Starts the thread's next microbatch, if its last forward has ended."""
        self.phase = "S" if self.served < self.num_ready else ""
        if self.phase:
            heappush(self.events, (now + self.latency, _HEAD))

    def _phase(self, now: float) -> None:
        index = self.served
        if self.phase == "sum":
            self.served += 1
            self.free = now
            self._open(self.summed, index, now)
            self._start_microbatch(now)
            return
        taken = self.seconds[self.phase]
        for rank, seconds in zip(self.ranks, taken, strict=True):
            rank.interrupt(now, seconds)
        self.phases.append(Phase(Task(self.phase, index), now, taken))
        heappush(self.events, (now + max(taken) + self.latency, _HEAD))
        self.phase = "T" if self.phase == "S" else "sum"

    def timeline(self, count: int) -> Timeline:
        after = max(self.free, *(rank.free for rank in self.ranks)) + self.latency
        return Timeline(
            [rank.order for rank in self.ranks],
            [rank.starts for rank in self.ranks],
            [rank.ends for rank in self.ranks],
            [*self._rows("E", count, 0.0), *self.phases, *self._rows("G", count, after)],
            # By how much the phases have extended each rank's tasks.
            [sum(map(sub, rank.ends, rank.starts)) - rank.worked for rank in self.ranks],
        )

    def _rows(self, kind: str, count: int, start: float) -> list[Phase]:
        """Returns E or G of all microbatches, one after the other."""
        if kind not in self.seconds:
            return []
        taken = self.seconds[kind]
        each = max(taken) + self.latency
        return [Phase(Task(kind, n), start + n * each, taken) for n in range(count)]
