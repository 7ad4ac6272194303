"""The order of the tasks of all chunks' products, when one launch has them all.

A chunk of the vocabulary has two halves and five phases: SDD of the first half, SDD of the second,
DDS of the first, DSD of both, DDS of the second. A phase needs results of earlier phases, but not
of the phase just before it, so that programs hardly ever wait. Nor do they wait for memory: SDD of
the next chunk's first half overwrites what DDS of the first half, and DSD, have read.

A task has ROWS x SIDE products of logits, or of a gradient.
"""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import slice_of

# Rows and columns of a task's product.
ROWS = tl.constexpr(256)
SIDE = tl.constexpr(128)
# Slices of SIDE dims that all tiles, or all pairs, finish before the next: see `slice_of`.
AT_ONCE = tl.constexpr(12)
# The phases of a chunk.
SDD_1 = tl.constexpr(0)
SDD_2 = tl.constexpr(1)
DDS_1 = tl.constexpr(2)
DSD = tl.constexpr(3)
DDS_2 = tl.constexpr(4)
PHASES = tl.constexpr(5)


@triton.jit
def tasks_of(columns, half, pairs, dds_slices, dsd_tasks):
    """Returns the number of tasks of each phase of a chunk of `columns`."""
    first = tl.minimum(columns, half)
    second = columns - first
    return (
        tl.cdiv(first, SIDE) * pairs,
        tl.cdiv(second, SIDE) * pairs,
        tl.cdiv(first, ROWS) * dds_slices,
        dsd_tasks,
        tl.cdiv(second, ROWS) * dds_slices,
    )


@triton.jit
def range_of(stage, V, chunk, half, pairs, dds_slices, dsd_tasks):
    """Returns the first task of a stage, and the end of its tasks."""
    whole = tasks_of(chunk, half, pairs, dds_slices, dsd_tasks)
    last = tl.cdiv(V, chunk) - 1
    sizes = tasks_of(V - last * chunk, half, pairs, dds_slices, dsd_tasks)
    before_dds = last * (whole[0] + whole[1] + whole[2] + whole[3] + whole[4])
    before_dds += sizes[SDD_1] + sizes[SDD_2] + sizes[DSD]
    end = before_dds + sizes[DDS_1] + sizes[DDS_2]
    return (
        tl.where(stage == 2, before_dds, 0),
        tl.where(stage == 1, before_dds, end),
    )


@triton.jit
def place_of(task, V, chunk, half, pairs, dds_slices, dsd_tasks, programs):
    """Returns the chunk, the phase and the number in the phase of a task.

    DSD precedes DDS in the last chunk, so that the sum over ranks starts early, and in all chunks
    if DSD has so few tasks that they take longer than what follows.
    """
    whole = tasks_of(chunk, half, pairs, dds_slices, dsd_tasks)
    per_chunk = whole[0] + whole[1] + whole[2] + whole[3] + whole[4]
    last = tl.cdiv(V, chunk) - 1
    number = tl.minimum(task // tl.maximum(per_chunk, 1), last)
    at = task - number * per_chunk
    sizes = tasks_of(tl.minimum(chunk, V - number * chunk), half, pairs, dds_slices, dsd_tasks)
    is_swapped = (number == last) | (dsd_tasks <= 2 * programs)
    third = tl.where(is_swapped, sizes[DSD], sizes[DDS_1])
    fourth = tl.where(is_swapped, sizes[DDS_1], sizes[DSD])
    after_sdd = sizes[SDD_1] + sizes[SDD_2]
    phase = SDD_1 + (at >= sizes[SDD_1]).to(tl.int32) + (at >= after_sdd).to(tl.int32)
    phase += (at >= after_sdd + third).to(tl.int32)
    phase += (at >= after_sdd + third + fourth).to(tl.int32)
    start = tl.where(phase > SDD_1, sizes[SDD_1], 0) + tl.where(phase > SDD_2, sizes[SDD_2], 0)
    start += tl.where(phase > 2, third, 0) + tl.where(phase > 3, fourth, 0)
    is_swapped &= (phase == DDS_1) | (phase == DSD)
    return number, tl.where(is_swapped, DDS_1 + DSD - phase, phase), at - start


@triton.jit
def needs_of(number, phase, V, chunk, half, pairs, dds_slices, dsd_tasks):
    """Returns how many tasks of each phase, of this chunk and those before, must be done before a
    task of `phase`: those whose results it reads, and those that read what it overwrites."""
    whole = tasks_of(chunk, half, pairs, dds_slices, dsd_tasks)
    sizes = tasks_of(tl.minimum(chunk, V - number * chunk), half, pairs, dds_slices, dsd_tasks)
    reads_1 = (phase == DDS_1) | (phase == DSD)
    reads_2 = (phase == DDS_2) | (phase == DSD)
    return (
        tl.where(reads_1, number * whole[SDD_1] + sizes[SDD_1], 0),
        tl.where(reads_2, number * whole[SDD_2] + sizes[SDD_2], 0),
        tl.where(phase == SDD_1, number * whole[DDS_1], 0),
        tl.where(phase < DDS_1, number * dsd_tasks, 0),
        tl.where(phase == SDD_2, number * whole[DDS_2], 0),
    )


@triton.jit
def sdd_place(i, columns, half, phase):
    """Returns the pair of token blocks, and the first column in the chunk, of a task of SDD."""
    first = tl.where(phase == SDD_1, 0, half)
    tiles = tl.cdiv(tl.minimum(columns - first, half), SIDE)
    return i // tiles, first + i % tiles * SIDE


@triton.jit
def dds_place(i, columns, half, phase, slices):
    """Returns the first column in the chunk, and the first dim, of a task of DDS."""
    first = tl.where(phase == DDS_1, 0, half)
    tiles = tl.cdiv(tl.minimum(columns - first, half), ROWS)
    tile, slice_ = slice_of(i, tiles, slices, AT_ONCE)
    return first + tile * ROWS, slice_ * SIDE


@triton.jit
def dsd_place(i, pairs, slices, pieces):
    """Returns the pair of token blocks, the first dim and the piece of a task of DSD."""
    pair, slice_ = slice_of(i // pieces, pairs, slices, AT_ONCE)
    return pair, slice_ * SIDE, i % pieces
