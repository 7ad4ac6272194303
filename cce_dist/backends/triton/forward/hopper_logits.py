"""The launch of Hopper's forward of a chunk whose logits stay."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from cce_dist.backends.triton.filter.kept_logits import Region
from cce_dist.backends.triton.forward.hopper import Groups
from cce_dist.backends.triton.launch.start import start
from cce_dist.core.types import Head
from cce_dist.options import TOKEN_BLOCK

if TYPE_CHECKING:
    from cce_dist.backends.triton.forward.operands import ForwardBuffers


def launch_logits(
    hidden: Tensor,
    weight: Tensor,
    head: Head,
    buffers: ForwardBuffers,
    count: Tensor,
    shape: Tensor,
    number: int,
    grouping: Groups,
    region: Region,
) -> None:
    """Launches the forward that keeps the logits of every column.

    Args:
        hidden: [N_padded, D] packed.
        count: [1] int32: tokens that count.
        shape: [3] int32: see `forward_kernel`.
        number: of the launch.
    """
    from cce_dist.backends.triton.kernels.forward.hopper_logits import hopper_logits_kernel

    tiles = grouping.tiles
    start(hopper_logits_kernel, (grouping.programs,))(
        *grouping.descriptors(hidden, weight),
        count if head.bias is None else head.bias,
        count,
        shape,
        buffers.lower,
        buffers.split_states,
        region.as_logits(),
        region.ref,
        number,
        buffers.size,
        hidden.shape[0],
        weight.shape[0],
        weight.shape[1],
        head.logit_scale,
        head.softcap or 1.0,
        BLOCK_N=TOKEN_BLOCK,
        ROWS=grouping.rows,
        BLOCK_D=tiles.dims,
        STAGES=tiles.stages,
        HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None,
        num_warps=4,
    )
