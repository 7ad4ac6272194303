"""Schedules of torch, of Megatron and of this library: each rank's tasks in order.

A pipeline of p ranks has p * chunks stages. Stage s is chunk s // p of rank s % p. Under ZBV rank r
has the stages r and 2 p - 1 - r, so the first rank also has the last stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import ge, mul
from typing import Any, Literal, NamedTuple

from .timeline import Task
from .vocab_1f1b import Times, plan_vocab_order

Name = Literal["gpipe", "1f1b", "interleaved", "zbv", "vocab"]
MakeTask = Callable[..., Task]
NAMES: tuple[Name, ...] = ("gpipe", "1f1b", "interleaved", "zbv", "vocab")
# The fewest and the most stages of a rank; (1, 1) for the others.
CHUNKS: dict[str, tuple[int, float]] = {"interleaved": (2, math.inf), "zbv": (2, 2)}
# A step is simulated pass by pass: so many take half a minute and 0.7 GB.
MAX_PASSES = 10**6


@dataclass(frozen=True)
class Schedule:
    """A schedule's tasks."""

    name: Name
    orders: tuple[tuple[Task, ...], ...]  # each rank's tasks
    chunks: int = 1  # number of stages of a rank
    microbatches: int = 1

    @cached_property
    def held(self) -> tuple[tuple[Held, ...], ...]:
        """The peaks of each rank's order, by `held_of`."""
        return tuple(held_of(order, self.chunks) for order in self.orders)

    @property
    def ranks(self) -> int:
        return len(self.orders)

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def stage(self, rank: int, chunk: int) -> int:
        if self.name == "zbv" and chunk:
            return self.stages - 1 - rank
        return chunk * self.ranks + rank

    def stages_of(self, rank: int) -> list[int]:
        return [self.stage(rank, chunk) for chunk in range(self.chunks)]

    def rank(self, stage: int) -> int:
        """Returns the rank of a stage."""
        if self.name == "zbv" and stage >= self.ranks:
            return self.stages - 1 - stage
        return stage % self.ranks

    @cached_property
    def weighs(self) -> bool:
        """True if the last rank has passes U, for which each T waits."""
        return any(kind == "U" for kind, _, _ in self.orders[-1])


def make_schedule(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    chunks: int = 1,
    framework: Literal["torch", "megatron"] = "megatron",
    times: Times | None = None,
    embeds: bool = False,
    weighs: bool = False,
) -> Schedule:
    """Makes the orders of a schedule.

    Args:
        chunks: stages of a rank; >= 2 for "interleaved", 2 for "zbv", else 1.
        framework: the framework whose "interleaved" it is, and whose rules for the number of
            microbatches hold.
        times, embeds, weighs: arguments of `plan_vocab_order`, for "vocab" alone.
    Raises:
        ValueError: the name is unknown, or the schedule does not run with these numbers.
    """
    for key, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if value < 1:
            raise ValueError(f"{key} must be >= 1, got {value}")
    if ranks * chunks * microbatches > MAX_PASSES:
        raise ValueError(
            f"ranks * chunks * microbatches must be <= {MAX_PASSES}, got {ranks} * {chunks} * "
            f"{microbatches}: plan fewer microbatches, of which further ones take as long each"
        )
    if name not in NAMES:
        raise ValueError(f"schedule must be one of {list(NAMES)}, got {name!r}")
    if framework not in ("torch", "megatron"):
        raise ValueError(f"framework must be 'torch' or 'megatron', got {framework!r}")
    least, most = CHUNKS.get(name, (1, 1))
    if not least <= chunks <= most:
        rule = f"{least}" if most == least else f">= {least}"
        raise ValueError(f"chunks (stages of a rank) must be {rule} for {name!r}, got {chunks}")
    every = range(ranks)
    # Ranks share equal tasks: there may be half a million.
    task = lru_cache(maxsize=None)(Task)
    if name == "gpipe":
        orders = [_gpipe(microbatches)] * ranks
    elif name == "1f1b":
        if framework == "torch" and microbatches < ranks:
            raise ValueError(
                f"microbatches must be >= the number of stages under torch's 1F1B, {ranks}, got "
                f"{microbatches}"
            )
        orders = [_one_f_one_b(rank, ranks, microbatches, task) for rank in every]
    elif name == "interleaved":
        group = _round(ranks, microbatches, framework)
        orders = [_interleaved(rank, ranks, microbatches, chunks, group, task) for rank in every]
    elif name == "zbv":
        orders = [_zbv(rank, ranks, microbatches, task) for rank in every]
    else:
        planned = plan_vocab_order(
            ranks, microbatches, times or Times(), embeds=embeds, weighs=weighs
        )
        orders = [[task(*each) for each in order] for order in planned]
    return Schedule(name, tuple(map(tuple, orders)), chunks, microbatches)  # pyright: ignore


def _gpipe(microbatches: int) -> list[Task]:
    return [Task(kind, index) for kind in "FB" for index in range(microbatches)]


def _one_f_one_b(rank: int, ranks: int, microbatches: int, task: MakeTask) -> list[Task]:
    warm = min(microbatches, ranks - rank - 1)
    tasks = [task("F", index) for index in range(warm)]
    for index in range(microbatches - warm):
        tasks += [task("F", warm + index), task("B", index)]
    return tasks + [task("B", index) for index in range(microbatches - warm, microbatches)]


def _round(ranks: int, microbatches: int, framework: str) -> int:
    """Returns the number of microbatches that pass a chunk before the next chunk's turn."""
    if framework == "torch":
        rounds = max(1, microbatches // ranks)
        if microbatches % rounds:
            nearest = microbatches // rounds * rounds
            raise ValueError(
                f"microbatches must be a multiple of {rounds}, the number of rounds under torch's "
                f"interleaved 1F1B of {ranks} ranks, got {microbatches}; the nearest is {nearest}"
            )
        return microbatches // rounds
    if microbatches % ranks:
        nearest = max(1, round(microbatches / ranks)) * ranks
        raise ValueError(
            f"microbatches must be a multiple of the pipeline's ranks, {ranks}, under Megatron's "
            f"interleaved 1F1B, got {microbatches}; the nearest is {nearest}"
        )
    return ranks


def _interleaved(
    rank: int, ranks: int, microbatches: int, chunks: int, group: int, task: MakeTask
) -> list[Task]:
    """Orders a rank's tasks of interleaved 1F1B.

    Args:
        group: result of `_round`, in which alone Megatron and torch differ.
    """
    total = chunks * microbatches
    warm = min(total, (chunks - 1) * group + 2 * (ranks - 1 - rank))
    turn = chunks * group

    def forward(step: int) -> Task:
        return task("F", step // turn * group + step % group, step % turn // group)

    def backward(step: int) -> Task:
        done = forward(step)
        return task("B", done.microbatch, chunks - 1 - done.chunk)

    tasks = [forward(step) for step in range(warm)]
    for step in range(warm, total):
        tasks += [forward(step), backward(step - warm)]
    return tasks + [backward(step) for step in range(total - warm, total)]


def _zbv(rank: int, ranks: int, microbatches: int, task: MakeTask) -> list[Task]:
    """Orders a rank's tasks as torch's ScheduleZBVZeroBubble.

    torch plans at least 2 p - 1 microbatches, and leaves out those that do not exist.
    """
    planned = max(2 * ranks - 1, microbatches)
    done = {("F", 0): 0, ("F", 1): 0, ("I", 0): 0, ("I", 1): 0, ("W", 0): 0, ("W", 1): 0}
    tasks: list[Task] = []

    def add(kinds: str, chunk: int) -> None:
        for kind in kinds:
            tasks.append(task(kind, done[kind, chunk], chunk))
            done[kind, chunk] += 1

    for _ in range(2 * (ranks - rank) - 1):
        add("F", 0)
    for _ in range(rank):
        add("F", 1)
        add("F", 0)
    for _ in range(ranks - rank):
        add("FIW", 1)
    while done["F", 1] < done["F", 0] or done["F", 0] < planned:
        if done["F", 0] < planned:
            add("F", 0)
        add("IW", 0)
        add("FIW", 1)
    for _ in range(rank):
        add("I", 0)
        add("I", 1)
    for _ in range(ranks - rank):
        add("IW", 0)
    for chunk in (1, 0):
        while done["W", chunk] < done["I", chunk]:
            add("W", chunk)
    return [each for each in tasks if each.microbatch < microbatches]


class Held(NamedTuple):
    """The microbatches that a rank holds during a task of `kind` and `chunk`, counted by chunk."""

    kind: Literal["F", "B", "head"]
    chunk: int
    counts: tuple[int, ...]


def held_of(order: Sequence[Task], chunks: int) -> tuple[Held, ...]:
    """Returns the peaks of an order.

    A peak is left out if another of its kind and chunk holds at least as much of every chunk. So
    their number does not grow with that of the microbatches.
    """
    frees = "W" if "W" in {kind for kind, _, _ in order} else "B"
    now, peaks = [0] * chunks, set()
    for kind, _, chunk in order:
        if kind == "F":
            now[chunk] += 1
            peaks.add(("F", 0, tuple(now)))
        elif kind in "BIW":
            peaks.add(("B", chunk, tuple(now)))
            if kind == frees:
                now[chunk] -= 1
        else:
            peaks.add(("head", 0, tuple(now)))
    return tuple(_largest(peaks))


def _largest(peaks: set[tuple[Any, int, tuple[int, ...]]]) -> Iterator[Held]:
    """Yields the peaks that no other of their kind reaches or exceeds in every chunk."""
    same: tuple[Any, ...] = ()
    kept: list[tuple[int, ...]] = []
    for kind, chunk, counts in sorted(peaks, reverse=True):
        if (kind, chunk) != same:
            same, kept = (kind, chunk), []
        if not any(all(map(ge, larger, counts)) for larger in kept):
            kept.append(counts)
            yield Held(kind, chunk, counts)


def peak_of_held(
    every: Sequence[Held],
    held: Sequence[float],
    working: Sequence[float] | None = None,
    *,
    phases: float = 0.0,
) -> float:
    """Returns the most memory that a rank needs in the order of its tasks, in the unit of `held`.

    Args:
        every: the order's peaks, by `held_of`.
        held: memory of a microbatch, by chunk, from its forward to its backward (or to W).
        working: further memory while a backward runs, by chunk; None: 0.
        phases: further memory while a task of the head over all ranks runs.
    """
    most = 0.0
    for kind, chunk, counts in every:
        further = phases if kind == "head" else 0.0
        if kind == "B" and working:
            further = working[chunk]
        most = max(most, sum(map(mul, counts, held)) + further)
    return most
