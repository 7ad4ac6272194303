"""Stretches: steps that follow each other, which a CUDA graph starts at once."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cce_dist.backends.triton.launch.graphs import Graph, Uncapturable
from cce_dist.backends.triton.launch.steps import (
    Allocation,
    Fork,
    Join,
    Launch,
    Operator,
    Play,
    Release,
    Step,
)

# A graph of fewer launches saves nothing.
FEWEST_LAUNCHES = 3
# Bytes by which allocations that come earlier may raise the peak of memory.
SLACK = 2**20


@dataclass
class Stretch:
    """Allocations, then kernels and fills in their order, then releases.

    Args: graph: starts the kernels and fills; None: there is none yet, or none can be captured.
    """

    allocations: list[Allocation]
    work: list[Step]
    releases: list[int]
    graph: Graph | None = None
    may_capture: bool = True

    def run(self, play: Play) -> None:
        for allocation in self.allocations:
            allocation.run(play)
        if play.may_start_graphs and self.may_capture and self.graph is None:
            self._capture(play)
        if play.may_start_graphs and self.graph is not None:
            self.graph.launch(play)
        else:
            for step in self.work:
                step.run(play)
        # Only now: another thread may use freed memory on the same stream.
        for number in self.releases:
            play.bases[number] = None

    def _capture(self, play: Play) -> None:
        self.may_capture = False
        try:
            self.graph = Graph(self.work, play)
        except Uncapturable as reason:
            warnings.warn(
                f"cce_dist starts kernels one by one, which takes the host longer: {reason}",
                RuntimeWarning,
                stacklevel=1,
            )


def in_stretches(steps: Iterable[Step], num_bytes: Sequence[int], inputs: int) -> list[Step]:
    """Joins steps to stretches, as long as possible without more memory at once.

    Args:
        num_bytes: of each memory.
        inputs: the number of memories that exist before the first step.
    """
    blocks = _blocks(steps)
    live = sum(num_bytes[:inputs])
    most, now = live, live
    for block in blocks:
        for step in block:
            now += _change(step, num_bytes)
            most = max(most, now)
    joined: list[Step] = []
    stretch: list[Step] = []
    for block in blocks:
        if stretch and not _fits([*stretch, *block], live, most + SLACK, num_bytes):
            joined += _joined(stretch)
            live += sum(_change(step, num_bytes) for step in stretch)
            stretch = []
        if _fits(block, live, most + SLACK, num_bytes):
            stretch += block
        else:
            joined += block
            live += sum(_change(step, num_bytes) for step in block)
    return [*joined, *_joined(stretch)]


def _blocks(steps: Iterable[Step]) -> list[list[Step]]:
    """Returns the steps one by one, but all from a fork to its join together."""
    blocks: list[list[Step]] = []
    forks: set[int] = set()
    for step in steps:
        if forks:
            blocks[-1].append(step)
        else:
            blocks.append([step])
        if isinstance(step, Fork):
            forks.add(step.number)
        elif isinstance(step, Join):
            forks.discard(step.number)
    return blocks


def _change(step: Step, num_bytes: Sequence[int]) -> int:
    """Returns by how many bytes a step changes the memory in use."""
    if isinstance(step, Allocation):
        return num_bytes[step.number]
    if isinstance(step, Release):
        return -sum(num_bytes[number] for number in step.numbers)
    return sum(num_bytes[number] for _, number in step.makes) if isinstance(step, Operator) else 0


def _fits(steps: Sequence[Step], live: int, most: int, num_bytes: Sequence[int]) -> bool:
    """Tells whether the steps can be a stretch: all allocations come first, all releases last."""
    if any(isinstance(step, Operator) for step in steps):
        return False
    allocated = sum(_change(step, num_bytes) for step in steps if isinstance(step, Allocation))
    return live + allocated <= most


def _joined(steps: list[Step]) -> list[Step]:
    if sum(isinstance(step, Launch) for step in steps) < FEWEST_LAUNCHES:
        return steps
    allocations = [step for step in steps if isinstance(step, Allocation)]
    releases = [number for step in steps if isinstance(step, Release) for number in step.numbers]
    work = [step for step in steps if not isinstance(step, Allocation | Release)]
    return [Stretch(allocations, work, releases)]
