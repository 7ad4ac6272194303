"""The largest logit of each token, for metrics that read nothing else."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

import cce_dist
from megatron_patch.options import PatchOptions


def largest_logits(
    layer: Any, hidden: Tensor, weight: Tensor, scale: float, options: PatchOptions
) -> tuple[Tensor, Tensor]:
    """Returns each token's largest logit over this rank's columns, and its local index: [s, b].

    Values have hidden's dtype. The result is that of `logits.max(dim=-1)` on fp32 logits.
    Megatron's logits may round to equal 16-bit numbers: the first of these need not be the largest.
    Not differentiable.
    Collectives: under sequence parallelism one all-gather of hidden.
    """
    if layer.sequence_parallel:
        size = layer.tp_group.size()
        gathered = hidden.new_empty(size * hidden.shape[0], *hidden.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(gathered, hidden.contiguous(), group=layer.tp_group)
        hidden = gathered
    largest = cce_dist.largest_logits(
        hidden,
        weight,
        logit_scale=scale,
        backend=options.loss.backend,
        workspace_bytes=options.workspace_bytes,
    )
    return largest.value.to(hidden.dtype), largest.index
