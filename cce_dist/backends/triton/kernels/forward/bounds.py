"""Bounds of a token's lse that ranks exchange between two launches of the forward."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.forward.launches import merged_reference, slot_of
from cce_dist.backends.triton.kernels.numbers import LOWEST, exp2_of


@triton.jit(do_not_specialize=["launch", "N"])
def bound_kernel(
    shape_ptr,  # [3] int32
    lower_ptr,  # [N_padded]
    state_ptr,  # [SLOTS, 4, size]
    order_ptr,  # [N] the packed tokens' places in the caller's order, if HAS_ORDER
    bound_ptr,  # [N] in the caller's order: a lower bound of this shard's lse, log2: out
    launch,  # the launch whose sums give the bound
    size,
    N,
    BLOCK_N: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Writes the bound of a block of tokens for the other ranks; a program a block."""
    num_blocks = tl.load(shape_ptr)
    splits = tl.load(shape_ptr + 1)
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    bound = tl.load(lower_ptr + rows)
    if tl.program_id(0) < num_blocks:
        state_ptrs = state_ptr + slot_of(launch) * 4 * size + rows
        nothing = tl.zeros((BLOCK_N,), tl.float32)
        merged = merged_reference(state_ptrs, splits, num_blocks * BLOCK_N, size, nothing)
        bound = tl.maximum(bound, merged)
    at = tl.load(order_ptr + rows, mask=rows < N, other=0) if HAS_ORDER else rows
    tl.store(bound_ptr + at, bound, mask=rows < N)


@triton.jit(do_not_specialize=["ranks", "N"])
def lower_kernel(
    bounds_ptr,  # [ranks, N] as `bound_kernel` leaves them
    order_ptr,
    lower_ptr,  # [N_padded] out
    ranks,
    N,
    BLOCK_N: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Computes log2 of the sum over the ranks, in rank order."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.load(order_ptr + rows, mask=rows < N, other=0) if HAS_ORDER else rows
    top = tl.full((BLOCK_N,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for _ in range(ranks):
        bound = tl.load(bounds_ptr + at, mask=rows < N, other=LOWEST)
        bounds_ptr += N
        higher = tl.maximum(top, bound)
        total = total * exp2_of(top - higher) + exp2_of(bound - higher)
        top = higher
    tl.store(lower_ptr + rows, top + tl.log2(total), mask=rows < N)
