"""Apple's gradient filter (Cut Cross-Entropy) in dense torch, for any device.

Apple's kernels skip a tile of softmax less target if no entry reaches a threshold
(arXiv:2411.09009, section 4.3). A tile is 128 tokens by 128 columns; the columns are sorted by
their mean logit. The rows of neither gradient then sum to zero. This module can filter either
gradient alone, to see which of the two is sensitive to that.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist.bench.golden import LossFunction

TILE = 128
# The threshold over the uniform probability 1 / V: Apple's bf16 default 2^-12 at V=262,144.
TIMES_UNIFORM = 64


def tile_filter_loss(*, of_hidden: bool = True, of_weight: bool = True) -> LossFunction:
    """Returns a mean loss with filtered gradients; an unfiltered gradient is the dense one.

    The loss takes hidden [N, D], weight [V, D] and targets [N], none of them ignored, and returns
    a scalar in fp32.
    """
    return functools.partial(_loss, of_hidden=of_hidden, of_weight=of_weight)


def _loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, of_hidden: bool, of_weight: bool
) -> Tensor:
    loss = _TileFilter.apply(hidden, weight, targets, of_hidden, of_weight)
    assert isinstance(loss, Tensor)
    return loss


class _TileFilter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, of_hidden: bool, of_weight: bool
    ) -> Tensor:
        logits = (hidden @ weight.T).float()
        softmax = logits.softmax(-1)
        ctx.save_for_backward(hidden, weight, targets, softmax, logits.mean(0))
        ctx.filters = (of_hidden, of_weight)
        return F.cross_entropy(logits, targets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, softmax, mean_logits = ctx.saved_tensors
        of_hidden, of_weight = ctx.filters
        d_logits = softmax.clone()
        d_logits[torch.arange(len(targets), device=targets.device), targets] -= 1
        kept = kept_entries(d_logits, mean_logits.argsort(descending=True))
        scale = grads[0] / len(targets)
        unfiltered, filtered = ((x * scale).to(hidden.dtype) for x in (d_logits, d_logits * kept))
        grad_hidden = (filtered if of_hidden else unfiltered) @ weight
        grad_weight = (filtered if of_weight else unfiltered).T @ hidden
        return grad_hidden, grad_weight, None, None, None


def kept_entries(d_logits: Tensor, order: Tensor) -> Tensor:
    """Tells which entries of softmax less target [N, V] lie in a tile that is not skipped.

    Args:
        order: [V], the columns in the order in which TILE neighbours share a tile.
    Returns:
        [N, V] bool.
    """
    tokens, columns = d_logits.shape
    blocks = F.pad(d_logits.abs(), (0, 0, 0, -tokens % TILE)).unflatten(0, (-1, TILE)).amax(1)
    tiles = F.pad(blocks[:, order], (0, -columns % TILE)).unflatten(1, (-1, TILE)).amax(2)
    kept = torch.empty_like(blocks, dtype=torch.bool)
    kept[:, order] = (tiles >= TIMES_UNIFORM / columns).repeat_interleave(TILE, 1)[:, :columns]
    return kept.repeat_interleave(TILE, 0)[:tokens]
