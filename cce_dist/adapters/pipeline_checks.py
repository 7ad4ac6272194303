"""What the vocabulary over pipeline ranks asks of its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.options import LossOptions
from cce_dist.transport import group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def check_scalar(options: LossOptions) -> None:
    """For a schedule that begins its backward at the loss of a microbatch."""
    if options.reduction == "none":
        raise ValueError(
            "options.reduction must be 'mean' or 'sum' under a schedule that is handed a "
            "microbatch's loss, got 'none'"
        )


def check_weight(
    group: ProcessGroup | None, weight: Tensor, shape: tuple[int, ...], options: LossOptions
) -> None:
    if group is None:
        raise ValueError("group must be the pipeline's ranks, got None")
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        raise ValueError(f"group must have its ranks in ascending order, got {ranks}")
    if weight.ndim != 2:
        raise ValueError(f"weight must be [V_local, D], got {list(weight.shape)}")
    if len(shape) < 2 or shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden_shape must be [..., D] with D = {weight.shape[1]} of weight, got {shape}"
        )
    refused = {
        "gradient": options.gradient == "in_forward",
        "stats": bool(options.stats),
        "sequence_parallel": options.sequence_parallel,
        "keep_logits": options.keep_logits,
        "check_ranks": options.check_ranks,
    }
    for name, is_refused in refused.items():
        if is_refused:
            got = getattr(options, name)
            raise ValueError(f"options.{name} is not supported over pipeline ranks, got {got!r}")
    for name in ("_post_accumulate_grad_hooks", "_backward_hooks"):
        if getattr(weight, name, None):
            raise ValueError(
                "weight must have no gradient hooks, as DDP and FSDP put on parameters: none would "
                "run; keep the head out of what they wrap"
            )


def check_product(
    group: ProcessGroup, whole: ProcessGroup, tensor: ProcessGroup | None, scatters: bool
) -> None:
    size, of_vocab, of_tensor = group_size(group), group_size(whole), group_size(tensor)
    if of_vocab != size * of_tensor:
        raise ValueError(
            f"vocab_group must have the ranks of group times those of tensor_group, {size} x "
            f"{of_tensor}, got {of_vocab}"
        )
    if scatters and tensor is None:
        raise ValueError("sequence_parallel=True needs tensor_group, got None")


def check_microbatch(
    hidden: Tensor,
    targets: Tensor,
    hidden_shape: tuple[int, ...],
    targets_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """What the last stage gives against what all ranks expect."""
    if hidden.shape != hidden_shape or hidden.dtype != dtype:
        raise ValueError(
            f"hidden of every microbatch must be {list(hidden_shape)} {dtype}, which the other "
            f"ranks expect, got {list(hidden.shape)} {hidden.dtype}; pad microbatches to one shape"
        )
    if targets.shape != targets_shape or targets.dtype != torch.int64:
        raise ValueError(
            f"targets of every microbatch must be {list(targets_shape)} torch.int64, hidden's "
            f"shape without D, got {list(targets.shape)} {targets.dtype}"
        )
