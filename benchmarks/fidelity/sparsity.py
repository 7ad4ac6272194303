"""Sparsity of a softmax: the share of tiles that reach a threshold."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist.bench.inputs import BenchInputs
from cce_dist.options import TOKEN_BLOCK

# Columns of a tile of Apple's backward. The tile has as many tokens as our blocks.
TILE_COLUMNS = 128


@dataclass(frozen=True)
class Peaks:
    """Largest entries of each column in each block of 128 tokens; tokens keep their order.

    Args:
        gradient: [blocks, V] fp32, the largest |softmax - onehot|, which Apple's filter looks at.
        by_mean_logit: [V] int64, the columns by their mean logit over all tokens, largest first;
            Apple's backward takes the columns in this order.
    """

    gradient: Tensor
    by_mean_logit: Tensor


@torch.no_grad()
def find_peaks(inputs: BenchInputs) -> Peaks:
    """Returns the peaks of inputs that have no ignored tokens."""
    weight = inputs.weight.float()
    total = weight.new_zeros(len(weight), dtype=torch.float64)
    gradient = []
    blocks = zip(inputs.hidden.split(TOKEN_BLOCK), inputs.targets.split(TOKEN_BLOCK), strict=True)
    for hidden, ids in blocks:
        logits = hidden.float() @ weight.T
        total += logits.sum(0)
        p = logits.softmax(-1)
        p[torch.arange(len(ids), device=ids.device), ids] -= 1
        gradient.append(p.abs_().amax(0))
    order = total.argsort(descending=True, stable=True)
    return Peaks(torch.stack(gradient), order)


def share_of_tiles(peaks: Tensor, threshold: float, order: Tensor | None = None) -> float:
    """Returns the share of tiles, 128 columns by a block, with a peak of at least `threshold`.

    Args:
        order: [V] int64, the columns in the order in which they fill the tiles; None: by id.
    """
    if order is not None:
        peaks = peaks[:, order]
    missing = -peaks.shape[1] % TILE_COLUMNS
    tiles = F.pad(peaks, (0, missing)).unflatten(1, (-1, TILE_COLUMNS)).amax(-1)
    return float((tiles >= threshold).double().mean())
