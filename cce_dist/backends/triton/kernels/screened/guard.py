"""After an 8-bit forward: the decision if it will do."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import LOG2E
from cce_dist.backends.triton.kernels.tokens.pack import shape_of


@triton.jit(do_not_specialize=["N", "programs", "cached_blocks", "grid"])
def guard_parts_kernel(
    mass_ptr,  # [num_blocks, V], negative where kept
    count_ptr,  # [1] int32: tokens that count
    shape_ptr,  # [3] int32: see `forward_kernel`
    lse_ptr,  # [N] natural log, of the 8-bit logits
    unkept_ptr,  # [N] log of the sum over columns not kept
    variance_ptr,  # [N] of an 8-bit logit's error
    lower_ptr,  # [N] lower bound or estimate of lse over all ranks, log2; in place
    number_ptr,  # [num_parts] int32: pairs of a column and a block that keeps it: out
    error_ptr,  # [num_parts] fp32: sum over tokens of their error's variance: out
    full_shape_ptr,  # [3] int32: shape of the forward in full precision; all but its blocks: out
    V,
    N,
    num_tiles,  # these five as of `pack_kernel`, for the full forward
    programs,
    cached_blocks,
    grid,
    row_bytes,
    BLOCKS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Counts kept pairs among BLOCKS token blocks x BLOCK_V columns; sums the errors' variance over
    a share of the tokens, and raises their lower bounds to what the 8-bit logits say."""
    part = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    num_parts = tl.num_programs(0) * tl.num_programs(1)
    count, blocks = tl.load(count_ptr), tl.load(shape_ptr)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    column = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = (block < blocks)[:, None] & (column < V)[None, :]
    at = block.to(tl.int64)[:, None] * V + column[None, :]
    kept = tl.load(mass_ptr + at, mask=inside, other=0.0) < 0
    # A thread holds the same columns of all blocks, so the first sum needs no other thread.
    tl.store(number_ptr + part, tl.sum(tl.sum(kept.to(tl.int32), 0), 0))
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(part * BLOCK_N, N, num_parts * BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        counts = token < count
        lse = tl.load(lse_ptr + token, mask=counts, other=0.0)
        unkept = tl.load(unkept_ptr + token, mask=counts, other=float("-inf"))
        variance = tl.load(variance_ptr + token, mask=counts, other=0.0)
        lower = tl.load(lower_ptr + token, mask=counts, other=0.0)
        # The tail is a share of all ranks' mass: a rank with little mass may have large errors.
        whole = tl.where(lower > lse * LOG2E, lower, lse * LOG2E)
        # A token whose unkept mass is 0 has no error; its lse may be -inf too.
        tail = tl.where(unkept == float("-inf"), 0.0, tl.exp2(unkept * LOG2E - whole))
        total += tl.where(counts, tail * tail * variance, 0.0)
        # The full forward records masses by it. An lse errs less than one 8-bit logit, and a bound
        # further below would make masses so large that a flat softmax keeps every column.
        known = (lse - tl.sqrt(variance)) * LOG2E
        raised = tl.where((tl.abs(known) < 1e30) & (known > lower), known, lower)
        tl.store(lower_ptr + token, raised, mask=counts)
    tl.store(error_ptr + part, tl.sum(total, 0))
    # The last program has tokens only if every program has.
    if part == num_parts - 1:
        splits, at_once = shape_of(
            blocks, num_tiles, programs, cached_blocks, grid, row_bytes, GROUPS
        )
        tl.store(full_shape_ptr + 1, splits)
        tl.store(full_shape_ptr + 2, at_once)


@triton.jit(do_not_specialize=["num_parts"])
def guard_kernel(
    number_ptr,  # [num_parts] int32: see `guard_parts_kernel`
    error_ptr,  # [num_parts] fp32
    count_ptr,  # [1] int32: tokens that count
    shape_ptr,  # [3] int32: see `forward_kernel`; of the sums to merge. Full precision may take
    # another number of splits: out, where it is needed
    full_ptr,  # [1] int32: 1 if full precision is needed: out
    full_shape_ptr,  # [3] int32; the first, its blocks, 0 if full precision is not needed: out
    num_parts,
    V,
    max_kept,
    max_error,
    BLOCK: tl.constexpr,
):
    """Decides if 8-bit logits are refused; a single program.
    docs/design/screened.md#when-screening-is-refused"""
    blocks = tl.load(shape_ptr)
    number = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        number += tl.load(number_ptr + part, mask=part < num_parts, other=0)
        total += tl.load(error_ptr + part, mask=part < num_parts, other=0.0)
    error = tl.sqrt(tl.sum(total, 0) / tl.maximum(tl.load(count_ptr), 1))
    share = tl.sum(number, 0).to(tl.float32) / (blocks.to(tl.float32) * V)
    # False for a NaN too.
    screened = (error <= max_error) & (share <= max_kept)
    full = 1 - screened.to(tl.int32)
    tl.store(full_ptr, full)
    tl.store(full_shape_ptr, blocks * full)
    for i in tl.static_range(1, 3):
        tl.store(shape_ptr + i, tl.load(full_shape_ptr + i), mask=full != 0)
