"""The order of a play's steps: its launches lie together, and its memory peaks as before."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

pytest.importorskip("triton")

from cce_dist.backends.triton.launch.arrange import _together
from cce_dist.backends.triton.launch.memory import LARGE, Layout, Memory, Place
from cce_dist.backends.triton.launch.steps import Allocation, Operator, Release, Step, Zero

SMALL = 1000


def allocation(base: int, num_bytes: int) -> Allocation:
    return Allocation(base, Layout((num_bytes,), (1,), torch.uint8))


def use(base: int) -> Zero:
    return Zero(Place(Memory(base), 0, Layout((1,), (1,), torch.uint8)), 0)


def operator(*uses: int) -> Operator:
    return Operator(print, tuple(use(base).place for base in uses), {}, [], True, 0)


def peak(steps: Sequence[Step]) -> int:
    """Returns the most bytes of large memory in use. Every use lies in its memory's life."""
    alive: dict[int, int] = {}
    most = 0
    for step in steps:
        if isinstance(step, Allocation):
            assert step.base not in alive
            alive[step.base] = step.layout.shape[0]
        elif isinstance(step, Release):
            for base in step.bases:
                del alive[base]
        elif isinstance(step, Zero):
            assert step.place.memory.base in alive
        elif isinstance(step, Operator):
            assert all(place.memory.base in alive for place in step.args)
            # It may allocate as much again.
            most = max(most, sum(size for size in alive.values() if size >= LARGE) + LARGE)
        most = max(most, sum(size for size in alive.values() if size >= LARGE))
    assert not alive
    return most


def test_launches_lie_together_but_for_releases_of_large_memory() -> None:
    steps = [
        *(allocation(0, LARGE), use(0), allocation(1, SMALL), use(1), Release([1])),
        *(allocation(2, LARGE), use(2), Release([0]), use(2), allocation(3, LARGE), use(3)),
        *(Release([2, 3]),),
    ]
    expected = [
        *(allocation(0, LARGE), allocation(1, SMALL), allocation(2, LARGE)),
        *(use(0), use(1), use(2), use(2), Release([1, 0]), allocation(3, LARGE), use(3)),
        *(Release([2, 3]),),
    ]

    def told(steps: Sequence[Step]) -> list[object]:
        return [step.place.memory.base if isinstance(step, Zero) else step for step in steps]

    assert told(_together(steps, {0, 2, 3})) == told(expected)


@pytest.mark.parametrize("seed", range(50))
def test_memory_peaks_as_before(seed: int) -> None:
    draw = random.Random(seed)
    steps: list[Step] = []
    alive: list[int] = []
    large: set[int] = set()
    for base in range(30):
        size = draw.choice([SMALL, LARGE, 3 * LARGE])
        if size >= LARGE:
            large.add(base)
        steps.append(allocation(base, size))
        alive.append(base)
        for _ in range(draw.randrange(4)):
            some = draw.sample(alive, min(2, len(alive)))
            steps += [operator(*some)] if draw.random() < 0.2 else map(use, some)
        ended = draw.sample(alive, draw.randrange(len(alive) + 1))
        if ended:
            steps.append(Release(ended))
            alive = [base for base in alive if base not in ended]
    if alive:
        steps.append(Release(alive))
    together = _together(steps, large)
    assert peak(together) == peak(steps)
    kinds = (Allocation, Release)
    uses = [[x for x in each if not isinstance(x, kinds)] for each in (steps, together)]
    assert uses[0] == uses[1]
