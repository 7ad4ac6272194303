"""The correction of an 8-bit forward's tail: the error that the tail's columns share is removed."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from cce_dist.backends.eight_bits import (
    MOST_LOST_SHARE,
    Rounding,
    every_for_centre,
    selects_by_errors,
)
from cce_dist.backends.triton.forward.operands import Finished
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.kernels.screened.tail_error import (
    RUN,
    tail_error_kernel,
    tail_moments_kernel,
    tail_shares_kernel,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted, num_programs
from cce_dist.backends.triton.screened.quantize import sum_parts
from cce_dist.backends.triton.screened.selection_error import selection_error
from cce_dist.core.streams import start_on_side_stream
from cce_dist.core.types import QuantizedRows
from cce_dist.options import TOKEN_BLOCK

# Of the moments: columns and dims of a tile, warps, pipeline stages. Of the tokens' errors: tokens
# and dims of a tile, warps.
MOMENT_TILES = (32, 64, 4, 4)
ERROR_TILES = (16, 256, 4)
# The most groups of token blocks whose tails share their columns' means.
MOST_GROUPS = 64


def correct_tail(
    state: ForwardState,
    finished: Finished,
    rounding: Rounding,
    full: Tensor,  # [1] int32: 1: no logits are of 8 bits
    threshold: float | None,  # of the masses that chose the kept columns; None: masses did not
) -> Callable[[], None]:
    """Starts to correct `finished.unkept` and `finished.dropped` in place, on a side stream: the
    current stream's next kernels, which list the kept columns, leave most of the device idle.

    Returns: a function that waits for the correction; call it even after an error. Until then
        nothing may write to the column masses.
    Source: docs/design/screened.md#the-bias-of-the-tail.
    """
    eight, rows = state.eight, rounding.rows
    assert eight is not None
    lost_mass, launch_lost_mass = None, None
    if threshold is not None and selects_by_errors(rows.values.dtype):
        lost_mass, launch_lost_mass = selection_error(state, finished, full, threshold)
    blocks_per_group = triton.cdiv(state.num_blocks, MOST_GROUPS)
    moments, launch_moments = _moments_of(state, rows, blocks_per_group)
    padded, dim = state.packed.shape[0], state.weight.shape[1]
    block, block_d, warps = (TOKEN_BLOCK, 256, 8) if interpreted() else ERROR_TILES
    launch_error = functools.partial(
        start(tail_error_kernel, (triton.cdiv(padded, block),)),
        state.packed,
        eight.hidden,
        eight.of_tokens,
        rounding.variance,
        rows.hidden_centre,
        rows.channel,
        moments,
        finished.lse,
        finished.lse if lost_mass is None else lost_mass,
        full,
        finished.unkept,
        finished.dropped,
        blocks_per_group * TOKEN_BLOCK,
        padded,
        dim,
        state.packed.stride(0),
        eight.hidden.stride(0),
        state.head.logit_scale,
        MOST_LOST_SHARE,
        GROUPS=moments.shape[1],
        BLOCK_N=block,
        BLOCK_D=block_d,
        HAS_SOFTCAP=state.has_unkept,
        HAS_LOST_MASS=lost_mass is not None,
        num_warps=warps,
    )

    def launch() -> None:
        if launch_lost_mass is not None:
            launch_lost_mass()
        launch_moments()
        launch_error()

    # The lists take many short kernels in sequence, which should not wait for the moments.
    return start_on_side_stream(state.weight.device, launch, first=False)


def _moments_of(
    state: ForwardState, rows: QuantizedRows, blocks_per_group: int
) -> tuple[Tensor, Callable[[], None]]:
    """Returns memory for means over each group's tail, [3, GROUPS, D] fp32 as of
    `tail_moments_kernel`, and a function that launches the kernels that fill it."""
    weight = state.weight
    num_columns, dim = weight.shape
    groups = _num_groups(state.num_blocks, blocks_per_group)
    # As many columns as the centre is the mean of: for a flat tail both means then err alike.
    every = every_for_centre(weight)
    num_runs = triton.cdiv(triton.cdiv(num_columns, RUN.value), every)
    block_v, block_d, warps, stages = (1024, 64, 8, 4) if interpreted() else MOMENT_TILES
    slices, tiles = triton.cdiv(dim, block_d), triton.cdiv(num_runs * RUN.value, block_v)
    # Two programs at a time on each multiprocessor.
    splits = max(1, min(tiles, 2 * num_programs(weight) // slices))
    fp32 = torch.float32
    # Rounding the shares costs less than leaving out columns does.
    share_dtype = fp32 if interpreted() else torch.bfloat16
    share = weight.new_empty(groups, num_runs * RUN.value, dtype=share_dtype)
    part = weight.new_empty(splits, 3, groups, dim, dtype=fp32)
    seen = weight.new_empty(splits, groups, dtype=fp32)
    means = torch.empty_like(part[0])
    launch_shares = functools.partial(
        start(tail_shares_kernel, (triton.cdiv(num_runs * RUN.value, 2 * block_v),)),
        state.buffers.mass,
        state.shape,
        share,
        num_columns,
        num_runs,
        blocks_per_group,
        every,
        BLOCK_V=2 * block_v,
        GROUPS=groups,
    )
    launch_moments = functools.partial(
        start(tail_moments_kernel, (slices, splits)),
        weight,
        rows.values,
        rows.of_rows,
        rows.centre,
        rows.channel,
        share,
        part,
        seen,
        num_columns,
        num_runs,
        dim,
        every,
        weight.stride(0),
        rows.values.stride(0),
        BLOCK_V=block_v,
        BLOCK_D=block_d,
        GROUPS=groups,
        num_warps=warps,
        num_stages=stages,
    )

    def launch() -> None:
        launch_shares()
        launch_moments()
        sum_parts(part, means, seen)

    return means, launch


def _num_groups(num_blocks: int, blocks_per_group: int) -> int:
    """Returns GROUPS: for the same binaries with any number of tokens it does not follow that."""
    if not interpreted():
        return max(16, MOST_GROUPS)
    # Empty groups would take the interpreter time.
    return max(16, triton.next_power_of_2(triton.cdiv(num_blocks, blocks_per_group)))
