"""The largest logit of each token, for metrics that ask for no more."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def largest_logits(
    layer: Any, hidden: Tensor, weight: Tensor, scale: float, workspace_bytes: int
) -> tuple[Tensor, Tensor]:
    """Values in hidden's dtype and local indices [s, b] over this rank's columns.

    As `logits.max(dim=-1)` of Megatron's logits, some tokens at a time. Not differentiable.
    Collectives: under sequence parallelism one all-gather of hidden.
    """
    if layer.sequence_parallel:
        size = layer.tp_group.size()
        whole = hidden.new_empty(size * hidden.shape[0], *hidden.shape[1:])
        dist.all_gather_into_tensor(whole, hidden.contiguous(), group=layer.tp_group)
        hidden = whole
    rows = max(1, workspace_bytes // (weight.shape[0] * 2 * hidden.element_size()))
    found = []
    for part in hidden.flatten(0, -2).split(rows):
        logits = torch.nn.functional.linear(part, weight)
        found.append((logits if scale == 1 else logits * scale).max(-1))
    values, indices = (
        torch.cat(parts).view(hidden.shape[:-1]) for parts in zip(*found, strict=True)
    )
    return values, indices
