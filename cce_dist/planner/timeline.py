"""Ranks that work through fixed orders, where a task may wait for what other ranks have done."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Task(NamedTuple):
    """F and B: forward and backward of a microbatch through a stage, the `chunk`-th of its rank's.
    I and W: a backward in two, gradients of the inputs and of the weights. S, T, E, G: of the
    vocabulary over all ranks (planner/orders.py)."""

    kind: str
    microbatch: int
    chunk: int = 0


class Work(NamedTuple):
    """What a task takes, waits for and announces.

    `waits` are gates with a delay each; the task starts when all are open that long. When it ends
    it knocks at the gate `opens`, which is open at the last of its knocks.
    """

    seconds: float
    waits: tuple[tuple[Hashable, float], ...] = ()
    opens: Hashable | None = None


class Span(NamedTuple):
    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Each rank's tasks in its order, with when they ran."""

    ranks: tuple[tuple[Span, ...], ...]

    @property
    def makespan(self) -> float:
        return max((spans[-1].end for spans in self.ranks if spans), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each rank works."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.ranks)


def run_orders(
    orders: Sequence[Sequence[Task]],
    work: Callable[[int, Task], Work],
    knocks: Mapping[Hashable, int] | None = None,
) -> Timeline:
    """When each task of each rank starts and ends, where a rank does nothing but its next task.

    Args:
        work: of a rank's task.
        knocks: how many a gate needs to open; 1 where it is not named.
    Raises:
        ValueError: the ranks wait for one another.
    """
    needed = dict(knocks or {})
    opened: dict[Hashable, float] = {}
    latest: dict[Hashable, float] = {}
    blocked: dict[Hashable, list[int]] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    ready = list(range(len(orders)))

    while ready:
        rank = ready.pop()
        done, order = spans[rank], orders[rank]
        while len(done) < len(order):
            task = order[len(done)]
            seconds, waits, gate = work(rank, task)
            start, closed = done[-1].end if done else 0.0, None
            for other, delay in waits:
                if other not in opened:
                    closed = other
                    break
                start = max(start, opened[other] + delay)
            if closed is not None:
                blocked.setdefault(closed, []).append(rank)
                break
            end = start + seconds
            done.append(Span(task, start, end))
            if gate is None:
                continue
            if gate in needed:
                end = latest[gate] = max(latest.get(gate, 0.0), end)
                needed[gate] -= 1
                if needed[gate]:
                    continue
            opened[gate] = end
            if gate in blocked:
                ready.extend(blocked.pop(gate))
    stuck = [
        (rank, order[len(done)])
        for rank, (done, order) in enumerate(zip(spans, orders, strict=True))
        if len(done) < len(order)
    ]
    if stuck:
        raise ValueError(f"orders must not wait in a circle, got ranks that wait: {stuck[:4]}")
    return Timeline(tuple(tuple(each) for each in spans))
