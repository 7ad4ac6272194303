"""A lower bound of each token's lse, which ranks tell each other while the forward goes on.

A rank that holds little of a token's mass would else take its few columns for all there is, and
keep them. docs/numerics.md#column-masses.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from torch import Tensor

from cce_dist.backends.protocol import Bounds
from cce_dist.backends.triton.kernels.forward.bounds import bound_kernel, lower_kernel
from cce_dist.backends.triton.kernels.forward.forward import LAST, PROBE
from cce_dist.backends.triton.launch.start import start
from cce_dist.options import TOKEN_BLOCK

# The launches of the forward after which ranks exchange bounds. One does where frequent tokens come
# first in the vocabulary; where they lie anywhere, each bound is better: docs/performance.md#ranks.
EXCHANGES = tuple(range(PROBE.value, LAST.value))


def raise_lower(
    exchange: Bounds,
    shard_lower: Tensor,
    parts: dict[str, Tensor],
    shape: Tensor,
    num_tokens: int,
    after: int,
    order: Tensor | None,
) -> None:
    """Raises parts["lower"] [N_padded], in place, to the bound that all ranks know: the next launch
    begins there.

    Args:
        shard_lower: [N_padded] its values before the first exchange, of this shard's columns alone:
            what other ranks have counted must not be counted once more by each.
        shape: [3] of the forward.
        after: the launch that this shard's bound comes from.
        order: [N] the packed tokens' places in the caller's order, if it is another one: ranks
            need not have put the tokens in the same order.
    """
    lower, state = parts["lower"], parts["state"]
    grid = (len(lower) // TOKEN_BLOCK,)
    places, has_order = (shape, False) if order is None else (order, True)
    bound = lower.new_empty(num_tokens)
    start(bound_kernel, grid)(
        shape,
        shard_lower,
        state,
        places,
        bound,
        after,
        state.shape[2],
        num_tokens,
        BLOCK_N=TOKEN_BLOCK,
        HAS_ORDER=has_order,
    )
    bounds = exchange(bound)
    start(lower_kernel, grid)(
        bounds, places, lower, len(bounds), num_tokens, BLOCK_N=TOKEN_BLOCK, HAS_ORDER=has_order
    )
