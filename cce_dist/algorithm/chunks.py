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


def chunk_tokens(
    num_tokens: int, plan: Plan, logit_bytes: int, *, parts: int | None, least_bytes: int = 0
) -> int:
    """Returns the number of tokens in a chunk: a multiple of TOKEN_BLOCK. Chunks have one size: a
    small last one would take the time of a larger one.

    It follows from numbers that all ranks share, so ranks agree on it. The logits of a chunk,
    [chunk, V_local], are in memory at once.

    Args:
        logit_bytes: of a token's logits in one column, of all models.
        parts: the most chunks by default; fewer, if more tokens fit the workspace. None: a chunk
            has what fits the workspace, and a quarter of the tokens at most.
        least_bytes: by default a smaller workspace is taken as this large.
    """
    columns = -(-plan.shard.vocab_size // group_size(plan.group))
    room = plan.options.workspace_for(num_tokens)
    by_default = parts is not None and plan.options.workspace_bytes is None
    if by_default:
        room = max(room, least_bytes)
    most = room // (logit_bytes * columns * TOKEN_BLOCK)
    if parts is None:
        most = min(most, -(-num_tokens // (4 * TOKEN_BLOCK)))
    elif by_default:
        most = max(most, -(-num_tokens // (parts * TOKEN_BLOCK)))
    blocks = -(-num_tokens // TOKEN_BLOCK)
    num_chunks = max(1, -(-blocks // max(1, most)))
    return max(1, -(-blocks // num_chunks)) * TOKEN_BLOCK


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
