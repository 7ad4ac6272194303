"""gradient="in_forward" by chunks: their size, the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cce_dist.algorithm.plan import Plan
from cce_dist.options import TOKEN_BLOCK
from cce_dist.ranks.gather import all_gather, require
from cce_dist.ranks.transport import group_size

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group


def chunk_tokens(num_tokens: int, plan: Plan, dtype: torch.dtype) -> int:
    """Returns the number of tokens in a chunk: a multiple of TOKEN_BLOCK.

    It follows from numbers that all ranks share, so ranks agree on it. The logits of a chunk,
    [chunk, V_local], are in memory at once: by default those of a fifth of the tokens, or what fits
    the workspace if that is more. Wide logits take the workspace, and a quarter at most.
    """
    columns = -(-plan.shard.vocab_size // group_size(plan.group))
    options, narrow = plan.options, plan.backend.traits.narrow_logits
    logit_bytes = dtype.itemsize if narrow else 4
    most = options.workspace_for(num_tokens) // (logit_bytes * columns * TOKEN_BLOCK)
    if not narrow:
        most = min(most, -(-num_tokens // (4 * TOKEN_BLOCK)))
    elif options.workspace_bytes is None:
        # With its other tensors such a chunk takes a quarter of the memory of dense logits.
        most = max(most, -(-num_tokens // (5 * TOKEN_BLOCK)))
    return even_chunks(num_tokens, most)


def require_same_chunks(size: int, device: torch.device, group: Group | None) -> None:
    """Checks that all ranks have chunks of `size` tokens: with others, which another
    workspace_bytes makes, their collectives would not meet. Collectives: one all-gather of 8 bytes.

    Raises:
        ValueError: they have not; on a GPU a device-side assertion fails.
    """
    if group_size(group) == 1:
        return
    sizes = all_gather(torch.full((1,), size, device=device), group).flatten()
    rule = 'gradient="in_forward" needs one workspace_bytes on all ranks'
    require(
        (sizes == sizes[0]).all(),
        lambda sizes: f"{rule}, got chunks of so many tokens by rank: {sizes.tolist()}",
        rule,
        sizes,
    )


def even_chunks(num_tokens: int, most: int) -> int:
    """Returns the tokens of a chunk of at most so many blocks, or one. Chunks have one size: a
    small last one would take the time of a larger one."""
    blocks = -(-num_tokens // TOKEN_BLOCK)
    num_chunks = max(1, -(-blocks // max(1, most)))
    return max(1, -(-blocks // num_chunks)) * TOKEN_BLOCK
