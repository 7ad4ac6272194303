"""The order of the tasks of `hopper_exact_kernel`: complete, and no task waits for a later one."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportIndexIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from cce_dist.testing import TRITON_PLACES, Place, grid

pytest.importorskip("triton")
import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.backward.exact_schedule import (
    DDS_1,
    DSD,
    PHASES,
    dds_place,
    dsd_place,
    needs_of,
    place_of,
    range_of,
    sdd_place,
)

FIELDS = 6  # chunk, phase, then row, column or dim, and piece


@triton.jit
def list_tasks(
    task_ptr,  # [tasks, FIELDS + PHASES]: out
    range_ptr,  # [2]: out
    stage,
    V,
    chunk,
    half,
    pairs,
    slices,
    pieces,
    dds_slices,
    dsd_tasks,
    programs,
    FIELDS: tl.constexpr,
):
    first, end = range_of(stage, V, chunk, half, pairs, dds_slices, dsd_tasks)
    tl.store(range_ptr, first)
    tl.store(range_ptr + 1, end)
    for task in range(first, end):
        number, phase, i = place_of(task, V, chunk, half, pairs, dds_slices, dsd_tasks, programs)
        columns = tl.minimum(chunk, V - number * chunk)
        row, column, piece = 0, 0, 0
        if phase < DDS_1:
            row, column = sdd_place(i, columns, half, phase)
        elif phase == DSD:
            row, column, piece = dsd_place(i, pairs, slices, pieces)
        else:
            row, column = dds_place(i, columns, half, phase, slices)
        out = task_ptr + task * (FIELDS + PHASES)
        tl.store(out, number)
        tl.store(out + 1, phase)
        tl.store(out + 2, i)
        tl.store(out + 3, row)
        tl.store(out + 4, column)
        tl.store(out + 5, piece)
        needs = needs_of(number, phase, V, chunk, half, pairs, dds_slices, dsd_tasks)
        for each in tl.static_range(PHASES):
            tl.store(out + FIELDS + each, needs[each])


def expected_tasks(
    V: int, chunk: int, half: int, pairs: int, slices: int, pieces: int, dsd: bool, dds: bool
) -> set[tuple[int, ...]]:
    """Chunk, phase, row, column or dim, piece of every task."""
    tasks = set()
    for number, first in enumerate(range(0, V, chunk)):
        columns = min(chunk, V - first)
        halves = (range(0, min(half, columns)), range(half, columns))
        for sdd, dds_of, inside in zip((0, 1), (2, 4), halves, strict=True):
            tasks |= {(number, sdd, i, c, 0) for c in inside[::128] for i in range(pairs)}
            if dds:
                tasks |= {
                    (number, dds_of, c, 128 * i, 0) for c in inside[::256] for i in range(slices)
                }
        if dsd:
            every = itertools.product(range(pairs), range(slices), range(pieces))
            tasks |= {(number, 3, pair, 128 * i, piece) for pair, i, piece in every}
    return tasks


# V, chunk, half, pairs of token blocks, slices, pieces: a last chunk of one half; ragged; of one
# chunk without a second half; three tiles in a chunk; no token that counts.
SHAPES = (
    *((1000, 512, 256, 2, 3, 1), (5000, 1024, 512, 3, 2, 2), (100, 256, 256, 1, 1, 1)),
    *((3000, 768, 512, 2, 3, 1), (2048, 512, 256, 0, 3, 1)),
    # More slices than are computed at once.
    *((900, 512, 256, 3, 14, 1), (900, 512, 256, 2, 26, 2)),
)


@pytest.mark.parametrize(
    **grid(
        places=TRITON_PLACES,
        shape=SHAPES,
        products={"both": (True, True), "DSD": (True, False), "DDS": (False, True)},
        stages={"all": (0,), "two_stages": (1, 2)},
        programs={"many_tasks": 1, "few_tasks": 132},
    )
)
def test_each_task_comes_once_and_after_what_it_needs(
    place: Place,
    shape: tuple[int, ...],
    products: tuple[bool, bool],
    stages: tuple[int, ...],
    programs: int,
) -> None:
    dsd, dds = products
    pairs, slices, pieces = shape[3:]
    dsd_tasks = pairs * slices * pieces if dsd else 0
    tasks: list[list[int]] = []
    for stage in stages:
        out = torch.full((4096, FIELDS + PHASES.value), -1, dtype=torch.int32, device=place.device)
        ends = torch.zeros(2, dtype=torch.int32, device=place.device)
        list_tasks[(1,)](
            out, ends, stage, *shape, slices if dds else 0, dsd_tasks, programs, FIELDS
        )
        assert int(ends[0]) == len(tasks)
        tasks += out[int(ends[0]) : int(ends[1])].tolist()
    places = [(task[0], task[1], *task[3:FIELDS]) for task in tasks]
    assert len(set(places)) == len(places)
    assert set(places) == expected_tasks(*shape, dsd, dds)

    done: Counter[int] = Counter()
    before_phase, last = done.copy(), None
    for task in tasks:
        if task[:2] != last:
            before_phase, last = done.copy(), task[:2]
        # All that it needs is of phases that began earlier.
        assert all(before_phase[phase] >= n for phase, n in enumerate(task[FIELDS:]))
        assert_reads_what_is_written(task, places)
        done[task[1]] += 1


def assert_reads_what_is_written(task: list[int], places: list[tuple[int, ...]]) -> None:
    """Its needs count every task of the phases that it reads, or whose memory it overwrites."""
    number, phase = task[:2]
    reads = {2: (0,), 3: (0, 1), 4: (1,)}.get(phase, ())
    overwrites = {0: (2, 3), 1: (3, 4)}.get(phase, ())
    for other, needed in enumerate(task[FIELDS:]):
        upto = number + 1 if other in reads else number if other in overwrites else 0
        assert needed == sum(place[1] == other and place[0] < upto for place in places)
