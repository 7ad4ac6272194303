"""Factors from the forward's column masses, which are upper bounds, to the true masses.

An early launch has a looser bound of lse than a later one, so its columns would get too large a
share of a block's dropped mass. docs/design/tail.md#the-shares-of-the-columns.
"""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.forward.launches import (
    FIRST,
    LAST,
    slot_of,
    turns_before,
    turns_until,
)
from cce_dist.backends.triton.kernels.numbers import LOG2E, exp2_of


@triton.jit
def launch_of(
    column,
    V,
    splits,  # of tiles: splits that one program computes side by side count as one
    WIDTH: tl.constexpr,  # columns of a tile of these together
    LAUNCHES: tl.constexpr,
):
    """Returns the launch that computes a column, counted from FIRST; 0 if one launch computes
    all."""
    number = column * 0
    if LAUNCHES > 1:
        tile = column // WIDTH
        split = tile % splits
        num_turns = turns_before(tl.cdiv(V, WIDTH), split, splits)
        for launch in tl.static_range(FIRST, LAST):
            number += (tile // splits >= turns_until(launch, num_turns)).to(tl.int32)
    return number


@triton.jit
def launch_sums_kernel(
    mass_ptr,  # [num_blocks, V], negative where kept
    count_ptr,  # [1] int32: tokens that count
    shape_ptr,  # [3] int32: see `forward_kernel`
    state_ptr,  # [SLOTS, 4, size]: see `forward_kernel`
    lse_ptr,  # [N] natural log
    recorded_ptr,  # [num_blocks, PARTS, LAUNCHES] fp32 sum of the dropped columns' masses: out
    dropped_ptr,  # [num_blocks, LAUNCHES] fp32 their true masses, by `lse`, up to this launch: out
    V,
    size,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PARTS: tl.constexpr,
    LAUNCHES: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,  # splits that a program computes side by side
    AT_ONCE: tl.constexpr,
):
    """Sums, for a token block, the masses of some columns, or the splits' sums after a launch."""
    block = tl.program_id(0)
    num_blocks = tl.load(shape_ptr)
    splits = tl.load(shape_ptr + 1)
    if block >= num_blocks:
        return
    part = tl.program_id(1)
    if part < PARTS:
        launch = tl.arange(0, LAUNCHES)
        total = tl.zeros((LAUNCHES,), tl.float32)
        for first in range(part * BLOCK_V, V, PARTS * BLOCK_V):
            column = first + tl.arange(0, BLOCK_V)
            mass = tl.load(mass_ptr + block.to(tl.int64) * V + column, mask=column < V, other=0.0)
            mass = tl.maximum(mass.to(tl.float32), 0.0)
            number = launch_of(column, V, splits // GROUPS, WIDTH, LAUNCHES)
            total += tl.sum(tl.where(number[None, :] == launch[:, None], mass[None, :], 0.0), 1)
        tl.store(recorded_ptr + (block * PARTS + part) * LAUNCHES + launch, total)
    else:
        # A single launch that computes all columns writes LAST's slot.
        slot = slot_of(LAST - LAUNCHES + 1 + part - PARTS)
        token = block * TOKENS + tl.arange(0, TOKENS)
        counts = (token < tl.load(count_ptr))[None, :]
        lse = tl.load(lse_ptr + token) * LOG2E
        state_ptrs = state_ptr + slot * 4 * size + token
        dropped = tl.zeros((AT_ONCE, TOKENS), tl.float32)
        for first in range(0, splits, AT_ONCE):
            split = first + tl.arange(0, AT_ONCE)[:, None]
            at = state_ptrs[None, :] + split * num_blocks * TOKENS
            known = counts & (split < splits)
            ref = tl.load(at, mask=known, other=float("-inf"))
            there = tl.load(at + 2 * size, mask=known, other=0.0)
            dropped += tl.where(there > 0, there * exp2_of(ref - lse[None, :]), 0.0)
        tl.store(dropped_ptr + block * LAUNCHES + part - PARTS, tl.sum(tl.sum(dropped, 0), 0))


@triton.jit
def factors_kernel(
    shape_ptr,  # [3] int32
    full_ptr,  # [1] int32: 1 where one launch has computed all columns anew, if HAS_FULL
    recorded_ptr,  # [num_blocks, PARTS, LAUNCHES]: see `launch_sums_kernel`
    dropped_ptr,  # [num_blocks, LAUNCHES]
    factor_ptr,  # [num_blocks, LAUNCHES] fp32: out
    PARTS: tl.constexpr,
    LAUNCHES: tl.constexpr,
    HAS_FULL: tl.constexpr,
):
    """Computes the factors of a block's masses, for each launch; a program a block."""
    block = tl.program_id(0)
    if block >= tl.load(shape_ptr):
        return
    launch = tl.arange(0, LAUNCHES)
    at = block * LAUNCHES + launch
    part = block * PARTS + tl.arange(0, PARTS)[:, None]
    recorded = tl.sum(tl.load(recorded_ptr + part * LAUNCHES + launch[None, :]), 0)
    dropped = tl.load(dropped_ptr + at)
    before = tl.load(dropped_ptr + at - 1, mask=launch > 0, other=0.0)
    factor = (dropped - before) / recorded
    # An overflowed sum was computed again as a whole: there is no sum for each launch.
    known = (before >= 0) & (dropped >= before) & (dropped < float("inf"))
    together = tl.min(known.to(tl.int32), 0) == 0
    if HAS_FULL:
        together |= tl.load(full_ptr) != 0
    every = tl.load(dropped_ptr + block * LAUNCHES + LAUNCHES - 1) / tl.sum(recorded, 0)
    factor = tl.where(together, every, factor)
    # Where nothing is dropped, or nothing is known, the factor is 1.
    tl.store(factor_ptr + at, tl.where((factor >= 0) & (factor < float("inf")), factor, 1.0))
