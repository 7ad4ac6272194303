"""How far off an 8-bit forward's tail is, to the second order, from what its columns share."""

import triton
import triton.language as tl

from cce_dist.kernels.numbers import LOG2E

# Columns side by side that are taken: their masses fill what memory is read by.
RUN = tl.constexpr(16)


@triton.jit(do_not_specialize=["blocks_per_group", "every"])
def tail_moments_kernel(
    weight_ptr,  # [V, D]
    values_ptr,  # [V, D] the same in 8 bits
    of_rows_ptr,  # [2, V] fp32: what those are multiplied by, ...
    centre_ptr,  # [D] fp32
    channel_ptr,  # [D] fp32
    mass_ptr,  # [num_blocks, V] of a block's tokens that a column has, negative where kept
    shape_ptr,  # [3] int32: blocks that count, ...
    part_ptr,  # [splits, 3, GROUPS, D] fp32 sums of mass x, mass x^2, mass rest^2: out
    seen_ptr,  # [splits, GROUPS] fp32 of mass: out
    V,
    D,
    blocks_per_group,
    every,
    stride_wv,
    stride_cv,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Over each `every`-th RUN of columns, where they are not kept: x = channel (column - centre),
    and rest what 8 bits are off from it."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    dims = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    group = tl.arange(0, GROUPS)
    centre = tl.load(centre_ptr + dims, mask=dims < D, other=0.0)[None, :]
    channel = tl.load(channel_ptr + dims, mask=dims < D, other=0.0)[None, :]
    mean = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    square = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    rest_square = tl.zeros((GROUPS, BLOCK_D), tl.float32)
    seen = tl.zeros((GROUPS,), tl.float32)
    num_blocks = tl.load(shape_ptr)
    num_taken = tl.cdiv(tl.cdiv(V, RUN), every) * RUN
    for start in range(split * BLOCK_V, num_taken, splits * BLOCK_V):
        taken = start + tl.arange(0, BLOCK_V)
        column = taken // RUN * every * RUN + taken % RUN
        # The least of weights for every column: of a group without a tail the moments are those of
        # all, and no 0 / 0.
        share = tl.where(column < V, 1e-20, 0.0)[None, :] + tl.zeros((GROUPS, BLOCK_V), tl.float32)
        for i in range(blocks_per_group):
            block = (group * blocks_per_group + i).to(tl.int64)[:, None]
            given = (block < num_blocks) & (column < V)[None, :]
            mass = tl.load(mass_ptr + block * V + column[None, :], mask=given, other=0.0)
            share += tl.maximum(mass.to(tl.float32), 0.0)
        seen += tl.sum(share, 1)
        inside = (column < V)[:, None] & (dims < D)[None, :]
        rows = column.to(tl.int64)[:, None]
        x = tl.load(weight_ptr + rows * stride_wv + dims[None, :], mask=inside, other=0.0)
        x = (x.to(tl.float32) - centre) * channel
        x = tl.where(inside, x, 0.0)
        value = tl.load(values_ptr + rows * stride_cv + dims[None, :], mask=inside)
        value = tl.where(inside, value.to(tl.float32), 0.0)
        rest = tl.load(of_rows_ptr + column, mask=column < V, other=0.0)[:, None] * value - x
        mean = tl.dot(share, x, mean, input_precision=PRECISION)
        square = tl.dot(share, x * x, square, input_precision=PRECISION)
        rest_square = tl.dot(share, rest * rest, rest_square, input_precision=PRECISION)
    out = part_ptr + (split * 3 * GROUPS + group)[:, None] * D + dims[None, :]
    tl.store(out, mean, mask=(dims < D)[None, :])
    tl.store(out + GROUPS * D, square, mask=(dims < D)[None, :])
    tl.store(out + 2 * GROUPS * D, rest_square, mask=(dims < D)[None, :])
    if tl.program_id(0) == 0:
        tl.store(seen_ptr + split * GROUPS + group, seen)


@triton.jit(do_not_specialize=["tokens_per_group"])
def tail_error_kernel(
    hidden_ptr,  # [N, D] packed
    values_ptr,  # [N, D] the same in 8 bits
    of_tokens_ptr,  # [2, N] fp32: what those are multiplied by, ...
    variance_ptr,  # [N] fp32 of a logit's error, half of which has been subtracted
    hidden_centre_ptr,  # [D] fp32
    channel_ptr,  # [D] fp32: hidden states, centred, are divided by it
    moments_ptr,  # [3, GROUPS, D] fp32 means over a group's tail of x, x^2, rest^2: see above
    full_ptr,  # [1] int32: 1: no logits are of 8 bits, nothing to do
    unkept_ptr,  # [N] log of the sum over columns not kept of exp(z); in place
    dropped_ptr,  # [N] the same of exp(z) softcap'(z); in place
    tokens_per_group,
    N,
    D,
    stride_hn,
    stride_vn,
    scale,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One program: BLOCK_N tokens of one group. docs/numerics.md#the-bias-of-the-tail"""
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
            rest = of_token * value - x
            first += tl.sum(rest * mean[None, :], 1)
            second += tl.sum(rest * rest * spread + x * x * of_columns, 1)
        unkept = tl.load(unkept_ptr + token)
        error = scale * first + 0.5 * (scale * scale * second - tl.load(variance_ptr + token))
        # Of a token without a tail, which may not count, nothing is off.
        error = tl.where(unkept == float("-inf"), 0.0, error)
        if HAS_SOFTCAP:
            dropped = tl.load(dropped_ptr + token)
            slope = tl.exp2((dropped - unkept) * LOG2E)
            error = tl.where(unkept == float("-inf"), 0.0, error * slope)
            tl.store(dropped_ptr + token, dropped - error)
        tl.store(unkept_ptr + token, unkept - error)
