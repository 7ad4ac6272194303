"""Log-probabilities from hidden and a rank's rows of the head, without a model."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from cce_dist import TokenLogprobs, VocabShard, token_logprobs
from megatron_patch.errors import PatchError
from megatron_patch.head import classes_of
from megatron_patch.logprobs import Stat
from megatron_patch.options import PatchOptions
from megatron_patch.refusals import why_changed
from megatron_patch.seams import find_seams


def require_plain(layer: Any, config: Any, options: PatchOptions, switch: str) -> None:
    """Checks that a head's logits are its input times the weight that is in it now.

    A framework that reads the weight and does not call the head leaves out all else that it does.

    Args: switch: the framework's, for messages.
    Raises:
        PatchError: the head does more than that product, or a hook brings its weight.
    """
    reason = why_changed(layer, find_seams(), options)
    if reason is None and layer._forward_pre_hooks:
        reason = (
            "output_layer has forward pre-hooks, which the framework does not call: set "
            "overlap_param_gather=False, and no FSDP"
        )
    if reason is None and getattr(config, "use_mup", False):
        reason = "use_mup scales logits, which the framework does not: set it False"
    if reason is not None:
        raise PatchError(f"{switch} cannot use this model: {reason}")


def shard_logprobs(
    hidden: Tensor,  # [..., h]; with sequence_parallel [s / tp, ..., h]
    weight: Tensor,  # [V / tp, h]
    targets: Tensor,  # [...] int32 or int64
    *,
    group: Any,
    options: PatchOptions,
    bounds: tuple[int, int] | None = None,
    sequence_parallel: bool = False,
    temperature: float = 1.0,
    stats: tuple[Stat, ...] = (),
) -> TokenLogprobs:
    """Computes log-probabilities of targets; a target that is no class has 0 and costs nothing.

    The gradient of hidden is the sum over the group's ranks, on each of them.
    Args: bounds: the ids of this rank's rows; None: an even split. Ranks that are split otherwise
        need `options.vocab_size`. Where the ranks' rows do not tile it, each raises ValueError.
    Returns: fields [...] fp32, the same bits on every rank.
    Collectives: those of `token_logprobs` over the group.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    rows = weight.shape[0]
    start, stop = bounds or (rank * rows, (rank + 1) * rows)
    shard = VocabShard(start, stop, options.vocab_size or size * rows)
    return token_logprobs(
        hidden,
        weight,
        classes_of(targets, shard),
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
