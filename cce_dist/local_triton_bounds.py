"""What the ranks tell each other while the forward goes on: a lower bound of each token's lse.

A rank that holds little of a token's mass would else take its few columns for all there is, and
keep them. docs/numerics.md#column-masses.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cce_dist.kernels.forward import LAST, bound_kernel
from cce_dist.local_triton_launch import start
from cce_dist.options import TOKEN_BLOCK

# How often the forward asks: before each launch but PROBE.
ROUNDS = LAST.value
# A lower bound of this shard's lse -> one of all ranks', log2, [N] fp32.
Agree = Callable[[Tensor], Tensor]


def raise_lower(
    agree: Agree,
    own: Tensor,
    parts: dict[str, Tensor],
    shape: Tensor,
    num_tokens: int,
    after: int,
    order: Tensor | None,
) -> None:
    """Where the next launch begins: parts["lower"] [N_padded], in place, as all ranks know it.

    Args:
        own: [N_padded] what it was before the first exchange, of this shard's columns alone: what
            other ranks have counted must not be counted once more by each.
        shape: [3] of the forward.
        after: the launch that this shard's bound comes from.
        order: [N] the packed tokens' places in the caller's order, if it is another one.
    """
    lower, state = parts["lower"], parts["state"]
    bound = torch.empty_like(lower)
    start(bound_kernel, (len(lower) // TOKEN_BLOCK,))(
        shape, own, state, bound, after, state.shape[2], BLOCK_N=TOKEN_BLOCK
    )
    mine = bound[:num_tokens]
    if order is None:
        lower[:num_tokens] = agree(mine)
    else:
        # Ranks need not have put the tokens in the same order.
        lower[:num_tokens] = agree(torch.empty_like(mine).index_copy_(0, order, mine))[order]
