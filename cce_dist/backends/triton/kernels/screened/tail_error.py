"""The error of an 8-bit forward's tail, to the second order, from the shares of its columns."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import LOG2E

# Neighbouring columns that are sampled together: their masses fill one read of memory.
RUN = tl.constexpr(16)


@triton.jit(do_not_specialize=["blocks_per_group", "every", "num_runs"])
def tail_shares_kernel(
    mass_ptr,  # [num_blocks, V] of a block's tokens that a column has, negative where kept
    shape_ptr,  # [3] int32: blocks that count, ...
    share_ptr,  # [GROUPS, num_runs RUN] of a group's tail that each column taken has: out
    V,
    num_runs,
    blocks_per_group,
    every,
    BLOCK_V: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Sums, for each `every`-th RUN of columns, the mass that a group's blocks do not keep."""
    RUNS: tl.constexpr = BLOCK_V // RUN
    num_blocks, num_taken = tl.load(shape_ptr), num_runs * RUN
    group = tl.arange(0, GROUPS)[:, None, None]
    run = tl.program_id(0) * RUNS + tl.arange(0, RUNS)
    # In runs, so that the compiler sees neighbours in memory.
    taken = (run * RUN)[:, None] + tl.arange(0, RUN)[None, :]
    column = ((run * (every * RUN))[:, None] + tl.arange(0, RUN)[None, :])[None, :, :]
    # A tiny weight for every column: without it a group that has no tail would get 0 / 0.
    share = tl.where(column < V, 1e-20, 0.0) + tl.zeros((GROUPS, RUNS, RUN), tl.float32)
    for i in range(blocks_per_group):
        block = (group * blocks_per_group + i).to(tl.int64)
        inside = (block < num_blocks) & (column < V)
        mass = tl.load(mass_ptr + block * V + column, mask=inside, other=0.0)
        share += tl.maximum(mass.to(tl.float32), 0.0)
    share = share.to(share_ptr.dtype.element_ty)
    out_ptrs = share_ptr + group.to(tl.int64) * num_taken + taken[None, :, :]
    tl.store(out_ptrs, share, mask=(taken < num_taken)[None, :, :])


@triton.jit(do_not_specialize=["every", "num_runs"])
def tail_moments_kernel(
    weight_ptr,  # [V, D]
    values_ptr,  # [V, D] the same in 8 bits
    of_rows_ptr,  # [2, V] fp32: their factors, ...
    centre_ptr,  # [D] fp32
    channel_ptr,  # [D] fp32
    share_ptr,  # [GROUPS, num_runs RUN]: see above
    part_ptr,  # [splits, 3, GROUPS, D] fp32 sums of share x, share x^2, share remainder^2: out
    seen_ptr,  # [splits, GROUPS] fp32 of share: out
    V,
    num_runs,
    D,
    every,
    stride_wv,
    stride_cv,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Sums x = channel (column - centre), x^2 and remainder^2 over each `every`-th RUN of columns.

    The remainder is the 8-bit value minus x. The operands are rounded to the shares' dtype: that
    costs less than leaving out columns does.
    """
    split, splits = tl.program_id(1), tl.num_programs(1)
    dims = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    group, num_taken = tl.arange(0, GROUPS), num_runs * RUN
    factor = share_ptr.dtype.element_ty
    centre = tl.load(centre_ptr + dims, mask=dims < D, other=0.0)[None, :]
    channel = tl.load(channel_ptr + dims, mask=dims < D, other=0.0)[None, :]
    mean = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    square = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    remainder_square = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    seen = tl.zeros((GROUPS,), tl.float32)
    share_ptrs = share_ptr + group.to(tl.int64)[:, None] * num_taken
    for start in range(split * BLOCK_V, num_taken, splits * BLOCK_V):
        taken = start + tl.arange(0, BLOCK_V)
        column = taken // RUN * every * RUN + taken % RUN
        is_taken = (taken < num_taken) & (column < V)
        share = tl.load(share_ptrs + taken[None, :], mask=(taken < num_taken)[None, :], other=0.0)
        inside = is_taken[:, None] & (dims < D)[None, :]
        rows = column.to(tl.int64)[:, None]
        x = tl.load(weight_ptr + rows * stride_wv + dims[None, :], mask=inside, other=0.0)
        x = (x.to(tl.float32) - centre) * channel
        x = tl.where(inside, x, 0.0)
        value = tl.load(values_ptr + rows * stride_cv + dims[None, :], mask=inside)
        value = tl.where(inside, value.to(tl.float32), 0.0)
        remainder = tl.load(of_rows_ptr + column, mask=is_taken, other=0.0)[:, None] * value - x
        mean = tl.dot(share, x.to(factor), mean)
        square = tl.dot(share, (x * x).to(factor), square)
        remainder_square = tl.dot(share, (remainder * remainder).to(factor), remainder_square)
        seen += tl.sum(share.to(tl.float32), 1)
    out = part_ptr + (split * 3 * GROUPS + group)[:, None] * D + dims[None, :]
    tl.store(out, mean, mask=(dims < D)[None, :])
    tl.store(out + GROUPS * D, square, mask=(dims < D)[None, :])
    tl.store(out + 2 * GROUPS * D, remainder_square, mask=(dims < D)[None, :])
    if tl.program_id(0) == 0:
        tl.store(seen_ptr + split * GROUPS + group, seen)


@triton.jit(do_not_specialize=["tokens_per_group"])
def tail_error_kernel(
    hidden_ptr,  # [N, D] packed
    values_ptr,  # [N, D] the same in 8 bits
    of_tokens_ptr,  # [2, N] fp32: their factors, ...
    variance_ptr,  # [N] fp32 of a logit's error, half of which has been subtracted
    hidden_centre_ptr,  # [D] fp32
    channel_ptr,  # [D] fp32: hidden states, centred, are divided by it
    moments_ptr,  # [3, GROUPS, D] fp32 means over a group's tail of x, x^2, remainder^2: see above
    lse_ptr,  # [N] natural log, of 8-bit logits
    lost_mass_ptr,  # [N] the tail's loss by the choice of columns, over exp(lse)
    full_ptr,  # [1] int32: 1: no logits are of 8 bits, nothing to do
    unkept_ptr,  # [N] log of the sum over columns not kept of exp(z); in place
    dropped_ptr,  # [N] the same of exp(z) softcap'(z); in place
    tokens_per_group,
    N,
    D,
    stride_hn,
    stride_vn,
    scale,
    most_lost_share,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_LOST_MASS: tl.constexpr,
):
    """Corrects the tails of BLOCK_N tokens of one group.
    docs/design/screened.md#the-bias-of-the-tail"""
    if tl.load(full_ptr) == 0:
        token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        group = tl.program_id(0) * BLOCK_N // tokens_per_group
        of_token = tl.load(of_tokens_ptr + token)[:, None]
        rows = token.to(tl.int64)[:, None]
        first = tl.zeros((BLOCK_N,), tl.float32)
        second = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, D, BLOCK_D):
            dims = start + tl.arange(0, BLOCK_D)
            inside = dims < D
            moment_ptrs = moments_ptr + group * D + dims
            mean = tl.load(moment_ptrs, mask=inside, other=0.0)
            square = tl.load(moment_ptrs + GROUPS * D, mask=inside, other=0.0)
            of_columns = tl.load(moment_ptrs + 2 * GROUPS * D, mask=inside, other=0.0)[None, :]
            spread = tl.where(square > mean * mean, square - mean * mean, 0.0)[None, :]
            channel = tl.load(channel_ptr + dims, mask=inside, other=1.0)
            x = tl.load(hidden_ptr + rows * stride_hn + dims[None, :], mask=inside[None, :])
            x = x.to(tl.float32) - tl.load(hidden_centre_ptr + dims, mask=inside)[None, :]
            x = tl.where(inside[None, :], x / channel[None, :], 0.0)
            value = tl.load(values_ptr + rows * stride_vn + dims[None, :], mask=inside[None, :])
            value = tl.where(inside[None, :], value.to(tl.float32), 0.0)
            remainder = of_token * value - x
            first += tl.sum(remainder * mean[None, :], 1)
            second += tl.sum(remainder * remainder * spread + x * x * of_columns, 1)
        unkept = tl.load(unkept_ptr + token)
        error = scale * first + 0.5 * (scale * scale * second - tl.load(variance_ptr + token))
        if HAS_SOFTCAP:
            dropped = tl.load(dropped_ptr + token)
            error *= tl.exp2((dropped - unkept) * LOG2E)
        if HAS_LOST_MASS:
            tail = tl.exp2((unkept - error - tl.load(lse_ptr + token)) * LOG2E)
            lost_mass = tl.load(lost_mass_ptr + token) / tail
            error -= tl.log(1.0 + tl.clamp(lost_mass, -most_lost_share, most_lost_share))
        # A token without a tail, which may not count, has no error.
        error = tl.where(unkept == float("-inf"), 0.0, error)
        if HAS_SOFTCAP:
            tl.store(dropped_ptr + token, dropped - error)
        tl.store(unkept_ptr + token, unkept - error)
