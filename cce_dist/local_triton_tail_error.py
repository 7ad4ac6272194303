"""The tail of an 8-bit forward, without the error that its columns share."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cce_dist.eight_bits import Rounding, every_for_centre
from cce_dist.kernels.tail_error import tail_error_kernel, tail_moments_kernel
from cce_dist.local_triton_forward import Forward
from cce_dist.local_triton_launch import start
from cce_dist.local_triton_operands import Finished
from cce_dist.local_triton_tiles import interpreted, num_programs
from cce_dist.options import TOKEN_BLOCK
from cce_dist.partials import QuantizedRows

# Blocks of tokens whose tails have columns in common, at most so many groups of them.
MOST_GROUPS = 64


def correct_tail(
    run: Forward,
    made: Finished,
    rounding: Rounding,
    full: Tensor,  # [1] int32: 1: no logits are of 8 bits
) -> None:
    """`made.unkept` and `made.dropped` in place. Source: docs/numerics.md#the-bias-of-the-tail."""
    eight, rows = run.eight, rounding.rows
    assert eight is not None
    blocks_per_group = triton.cdiv(run.num_blocks, MOST_GROUPS)
    moments = _moments_of(run, rows, blocks_per_group)
    padded, dim = run.packed.shape[0], run.weight.shape[1]
    block = TOKEN_BLOCK if interpreted() else 16
    start(tail_error_kernel, (triton.cdiv(padded, block),))(
        run.packed,
        eight.hidden,
        eight.of_tokens,
        rounding.variance,
        rows.hidden_centre,
        rows.channel,
        moments,
        full,
        made.unkept,
        made.dropped,
        blocks_per_group * TOKEN_BLOCK,
        padded,
        dim,
        run.packed.stride(0),
        eight.hidden.stride(0),
        run.head.logit_scale,
        GROUPS=moments.shape[1],
        BLOCK_N=block,
        BLOCK_D=128,
        HAS_SOFTCAP=run.has_unkept,
    )


def _moments_of(run: Forward, rows: QuantizedRows, blocks_per_group: int) -> Tensor:
    """[3, GROUPS, D] fp32 means over a group's tail: see `tail_moments_kernel`."""
    weight = run.weight
    num_columns, dim = weight.shape
    groups = max(16, triton.next_power_of_2(triton.cdiv(run.num_blocks, blocks_per_group)))
    # As many columns as the centre is the mean of: of a flat tail these err as that does.
    every = every_for_centre(weight)
    block_v, block_d = 1024 if interpreted() else 64, 64
    slices, tiles = triton.cdiv(dim, block_d), triton.cdiv(num_columns, every * block_v)
    splits = max(1, min(tiles, 4 * num_programs(weight) // slices))
    part = weight.new_empty(splits, 3, groups, dim, dtype=torch.float32)
    seen = weight.new_empty(splits, groups, dtype=torch.float32)
    start(tail_moments_kernel, (slices, splits))(
        weight,
        rows.values,
        rows.of_rows,
        rows.centre,
        rows.channel,
        run.parts["mass"],
        run.shape,
        part,
        seen,
        num_columns,
        dim,
        blocks_per_group,
        every,
        weight.stride(0),
        rows.values.stride(0),
        BLOCK_V=block_v,
        BLOCK_D=block_d,
        GROUPS=groups,
        PRECISION="tf32",
        num_warps=8,
    )
    return part.sum(0) / seen.sum(0)[:, None]
