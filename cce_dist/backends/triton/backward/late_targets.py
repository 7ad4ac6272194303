"""The terms of late targets, which a sum over chunks of tokens leaves out: see `LateTargets`."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import LateTargets
from cce_dist.backends.triton.kernels.pairs import add_pairs_kernel
from cce_dist.backends.triton.launch.arguments import rows_of, with_unit_inner_stride
from cce_dist.backends.triton.launch.start import start
from cce_dist.core.types import Tokens

# A target is late if the softmaxes of all tokens give its id less than the mass of so many tokens.
# The id's row is then a sum of few large terms and many small ones, whose digits are lost once a
# large one is in a sum of 16 bits. docs/design/loss.md#in_forward.
MOST_MASS = 4
# Pairs and dims that a program of `add_pairs_kernel` reads at once, and its warps.
PAIRS, DIMS, WARPS = 4, 512, 1


def late_bounds(late: LateTargets) -> tuple[float, float]:
    """Returns the bounds of `exact_targets_kernel`: log2 of the probability of a late target, were
    all tokens like its own; and its id's sum over the first chunk's tokens, over its term."""
    tokens = late.num_tokens
    return math.log2(MOST_MASS / tokens), MOST_MASS * late.first_tokens / tokens


def add_late_targets(tokens: Tokens, grads: Tensor, grad_weight: Tensor) -> None:
    """Adds each token's term to its target's row, in one fixed order: see
    `protocol.Backend.add_late_targets`."""
    if not len(tokens):
        return
    # Other tokens stand in front; their programs end at once.
    columns, order = torch.sort(tokens.local_targets.where(grads != 0, -1), stable=True)
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
        BLOCK_P=PAIRS,
        BLOCK_D=DIMS,
        num_warps=WARPS,
    )
