"""The terms of late targets, which a sum over chunks of tokens leaves out: see `LateTargets`."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.kernels.pairs import add_pairs_kernel
from cce_dist.backends.triton.launch.arguments import rows_of, with_unit_inner_stride
from cce_dist.backends.triton.launch.start import start
from cce_dist.core.types import Tokens

# Tokens and dims that a program reads at once.
TOKENS, DIMS = 16, 256


def add_late_targets(tokens: Tokens, grads: Tensor, grad_weight: Tensor) -> None:
    """Adds each token's term to its target's row, in the order of tokens: see
    `protocol.Backend.add_late_targets`."""
    if not len(tokens):
        return
    columns, order = torch.sort(tokens.local_targets, stable=True)
    hidden, dim = with_unit_inner_stride(tokens.hidden), grad_weight.shape[1]
    start(add_pairs_kernel, (len(tokens), triton.cdiv(dim, DIMS)))(
        hidden,
        rows_of(tokens)[0],
        order,
        columns,
        grads,
        grad_weight,
        len(tokens),
        dim,
        hidden.stride(0),
        grad_weight.stride(0),
        BLOCK_P=TOKENS,
        BLOCK_D=DIMS,
    )
