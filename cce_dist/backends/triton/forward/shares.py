"""Factors that correct the sums of the forward's column masses, launch by launch."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from torch import Tensor

from cce_dist.backends.triton.filter.marks import MassFactors
from cce_dist.backends.triton.forward.operands import Finished
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.kernels.forward.launches import FIRST, LAST
from cce_dist.backends.triton.kernels.forward.shares import factors_kernel, launch_sums_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.options import TOKEN_BLOCK

# Programs that share the columns of one token block.
PARTS = 16


def mass_factors(
    state: ForwardState,
    finished: Finished,
    num_launches: int,  # of those that record masses: all of them, or one
    full: Tensor | None,  # [1] int32: 1 where one launch has computed all columns anew
) -> MassFactors:
    """Computes, for each block and launch, the true over the recorded mass of the dropped columns.

    Call this before the targets are marked as kept: both sums still have their masses.
    """
    launches = 1 if num_launches == 1 else LAST.value - FIRST.value + 1
    new = finished.lse.new_empty
    recorded = new(state.num_blocks, PARTS, launches)
    dropped, factor = new(state.num_blocks, launches), new(state.num_blocks, launches)
    width = state.columns * state.groups
    start(launch_sums_kernel, (state.num_blocks, PARTS + launches))(
        state.buffers.mass,
        state.count,
        state.shape,
        state.buffers.split_states,
        finished.lse,
        recorded,
        dropped,
        state.weight.shape[0],
        state.buffers.size,
        TOKENS=TOKEN_BLOCK,
        BLOCK_V=8192 if interpreted() else 1024,
        PARTS=PARTS,
        LAUNCHES=launches,
        WIDTH=width,
        GROUPS=state.groups,
        AT_ONCE=16,
    )
    start(factors_kernel, (state.num_blocks,))(
        state.shape,
        state.count if full is None else full,
        recorded,
        dropped,
        factor,
        PARTS=PARTS,
        LAUNCHES=launches,
        HAS_FULL=full is not None,
        num_warps=1,
    )
    return MassFactors(factor, state.shape, width, state.groups)
