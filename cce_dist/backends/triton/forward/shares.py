"""Factors of the forward's column masses, with which their sums are right."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from torch import Tensor

from cce_dist.backends.triton.filter.marks import MassFactors
from cce_dist.backends.triton.forward.operands import Finished
from cce_dist.backends.triton.forward.state import Forward
from cce_dist.backends.triton.kernels.forward.forward import FIRST, LAST
from cce_dist.backends.triton.kernels.forward.shares import factors_kernel, launch_sums_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.options import TOKEN_BLOCK

# Programs of a token block, each with a part of the columns.
PARTS = 16


def mass_factors(
    run: Forward,
    finished: Finished,
    num_launches: int,  # of those that record masses: all of them, or one
    full: Tensor | None,  # [1] int32: 1 where one launch has computed all columns anew
) -> MassFactors:
    """Returns the true over the recorded mass of the columns that a block drops, launch by launch.

    To be called before targets are marked as kept, whose masses are in both sums.
    """
    launches = 1 if num_launches == 1 else LAST.value - FIRST.value + 1
    new = finished.lse.new_empty
    recorded = new(run.num_blocks, PARTS, launches)
    dropped, factor = new(run.num_blocks, launches), new(run.num_blocks, launches)
    width = run.columns * run.groups
    start(launch_sums_kernel, (run.num_blocks, PARTS + launches))(
        run.parts["mass"],
        run.count,
        run.shape,
        run.parts["state"],
        finished.lse,
        recorded,
        dropped,
        run.weight.shape[0],
        run.grid * TOKEN_BLOCK,
        TOKENS=TOKEN_BLOCK,
        BLOCK_V=8192 if interpreted() else 1024,
        PARTS=PARTS,
        LAUNCHES=launches,
        WIDTH=width,
        GROUPS=run.groups,
        AT_ONCE=16,
    )
    start(factors_kernel, (run.num_blocks,))(
        run.shape,
        run.count if full is None else full,
        recorded,
        dropped,
        factor,
        PARTS=PARTS,
        LAUNCHES=launches,
        HAS_FULL=full is not None,
        num_warps=1,
    )
    return MassFactors(factor, run.shape, width, run.groups)
