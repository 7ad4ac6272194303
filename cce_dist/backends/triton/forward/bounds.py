"""A lower bound of each token's lse, which ranks exchange between launches of the forward.

Without it, a rank that holds little of a token's mass would normalise by its few columns alone, and
keep them. docs/design/filter.md#column-masses.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from torch import Tensor

from cce_dist.backends.protocol import Bounds
from cce_dist.backends.triton.forward.operands import ForwardBuffers
from cce_dist.backends.triton.kernels.forward.bounds import bound_kernel, lower_kernel
from cce_dist.backends.triton.kernels.forward.launches import LAST, PROBE
from cce_dist.backends.triton.launch.start import start
from cce_dist.options import TOKEN_BLOCK

# The launches of the forward after which ranks exchange bounds. One exchange would do where
# frequent tokens come first in the vocabulary; where they lie anywhere, each of the four makes the
# bound tighter: docs/design/ranks.md#exchanges-of-bounds.
EXCHANGES = tuple(range(PROBE.value, LAST.value))


def raise_lower(
    exchange: Bounds,
    shard_lower: Tensor,
    buffers: ForwardBuffers,
    shape: Tensor,
    num_tokens: int,
    after: int,
    order: Tensor | None,
) -> None:
    """Raises `buffers.lower`, in place, to the bound that all ranks know. The next launch starts
    from it.

    Args:
        shard_lower: [N_padded] the values before the first exchange, which are of this shard's
            columns alone: each rank must count the other ranks' columns once only.
        shape: [3] of the forward.
        after: the number of the launch whose sums give this shard's bound.
        order: [N] the packed tokens' places in the caller's order; None: the two are the same.
            Ranks may order their tokens differently.
    """
    lower = buffers.lower
    grid = (len(lower) // TOKEN_BLOCK,)
    places, has_order = (shape, False) if order is None else (order, True)
    bound = lower.new_empty(num_tokens)
    start(bound_kernel, grid)(
        shape,
        shard_lower,
        buffers.split_states,
        places,
        bound,
        after,
        buffers.size,
        num_tokens,
        BLOCK_N=TOKEN_BLOCK,
        HAS_ORDER=has_order,
    )
    bounds = exchange(bound)
    start(lower_kernel, grid)(
        bounds, places, lower, len(bounds), num_tokens, BLOCK_N=TOKEN_BLOCK, HAS_ORDER=has_order
    )
