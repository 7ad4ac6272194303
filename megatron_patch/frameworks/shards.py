"""Log-probabilities from hidden and a rank's rows of the head, without a model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import TokenLogprobs, VocabShard, token_logprobs
from megatron_patch.errors import PatchError
from megatron_patch.head import IGNORED
from megatron_patch.logprobs import Stat
from megatron_patch.options import PatchOptions


def shard_logprobs(
    hidden: Tensor,  # [..., h]; with sequence_parallel [s / tp, ..., h]
    weight: Tensor,  # [V / tp, h]
    targets: Tensor,  # [...] int64
    *,
    group: Any,
    options: PatchOptions,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    stats: tuple[Stat, ...] = (),
) -> TokenLogprobs:
    """Computes log-probabilities of targets; a target that is no class has 0 and costs nothing.

    The gradient of hidden is the sum over the group's ranks, on each of them.
    Returns: fields [...] fp32, the same bits on every rank.
    Collectives: those of `token_logprobs` over the group.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    shard = VocabShard.even(weight.shape[0], rank, size, options.vocab_size)
    inside = (targets >= 0) & (targets < shard.vocab_size)
    return token_logprobs(
        hidden,
        weight,
        torch.where(inside, targets, IGNORED),
        temperature=temperature,
        stats=stats,
        group=group if size > 1 else None,
        vocab_shard=shard,
        sequence_parallel=sequence_parallel,
        softcap=options.softcap,
        gradient=options.gradient,  # pyright: ignore[reportArgumentType]
        backend=options.loss.backend,
        workspace_bytes=options.workspace_bytes,
    )


def require_even_rows(start: int, end: int, weight: Tensor, group: Any) -> None:
    """Checks that a rank's rows are those of an even split of the vocabulary.

    Raises:
        PatchError: the rank's rows begin or end elsewhere.
    """
    rows, rank = weight.shape[0], dist.get_rank(group)
    if (start, end) != (rank * rows, (rank + 1) * rows):
        raise PatchError(
            f"rank {rank}'s {rows} rows of the head must be the classes {rank * rows} to "
            f"{(rank + 1) * rows}, got {start} to {end}"
        )
