"""Calls over ranks play their recordings: with their collectives, in their phases."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("triton")

from cce_dist.backends.triton.launch.replay import forget_recordings
from cce_dist.core.phases import watched_by
from cce_dist.testing import TRITON_PLACES, Place, RankPool
from tests.backends.triton.launch.replay_cases import (
    PLAYED,
    WAYS,
    problem,
    recordings,
    require_same,
    run,
)


class Phases:
    """A watcher that notes the phases."""

    def __init__(self) -> None:
        self.entered: set[str] = set()

    def enter(self, phase: str, begins: bool) -> None:
        self.entered.add(phase)

    def leave(self, phase: str, error: BaseException | None) -> None: ...


def on_a_rank(group: Any, place: Place, way: str, slices: bool) -> list[list[Tensor]]:
    hidden, weight, targets = problem(place)
    weight = weight.chunk(group.size())[group.rank()]
    if slices:
        hidden = hidden.chunk(group.size())[group.rank()]
    forget_recordings()
    results, phases = [], []
    for _ in range(4):
        seen = Phases()
        with watched_by(seen):
            results.append(
                run((hidden, weight, targets), group=group, sequence_parallel=slices, **WAYS[way])
            )
        phases.append(seen.entered)
    assert len(recordings()) == PLAYED.get(way, 2)
    # Whoever watches over ranks learns in which phase each of them waits.
    assert all({"merge", "reduce"} <= each for each in phases)
    forget_recordings()
    return results


@pytest.mark.parametrize(
    ("way", "slices"),
    [
        *(("filtered", True), ("screened", False), ("distillation", True)),
        *(("in_forward", False), ("three products", True)),
    ],
)
def test_ranks_play_their_collectives(pools: dict[int, RankPool], way: str, slices: bool) -> None:
    for results in pools[2].run(2, on_a_rank, TRITON_PLACES[0], way, slices):
        for result in results[1:]:
            require_same(result, results[0])
