"""The loss of all tokens and its gradient, where each token's loss is its negative log-likelihood:
two kernels, where torch takes four."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
from torch import Tensor

from cce_dist.backends.protocol import LossKernels
from cce_dist.backends.triton.kernels.tokens.loss import share_gradient_kernel, total_loss_kernel
from cce_dist.backends.triton.launch.start import start

BLOCK = 4096


def total_loss(lse: Tensor, target_logit: Tensor, divisor: Tensor | float) -> Tensor:
    total = lse.new_empty(())
    start(total_loss_kernel, (1,))(
        lse.contiguous(),
        target_logit.contiguous(),
        *_divisor(divisor, lse, total),
        BLOCK_N=BLOCK,
        num_warps=8,
    )
    return total


def share_gradient(grad: Tensor, lse: Tensor, divisor: Tensor | float) -> Tensor:
    shares = lse.new_empty(lse.shape)
    start(share_gradient_kernel, (triton.cdiv(len(lse), BLOCK),))(
        grad, *_divisor(divisor, lse, shares), BLOCK_N=BLOCK, num_warps=8
    )
    return shares


def _divisor(
    divisor: Tensor | float, lse: Tensor, out: Tensor
) -> tuple[Tensor, Tensor, int, float, bool]:
    """Returns the kernels' arguments from `divisor_ptr` to HAS_DIVISOR."""
    if isinstance(divisor, Tensor):
        return divisor, out, len(lse), 1.0, True
    return lse, out, len(lse), divisor, False


KERNELS = LossKernels(total_loss, share_gradient)
