"""The targets that count, in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from cce_dist.core.gathers import inverse_of
from cce_dist.core.types import Picked


def pick(ids: Tensor, ignore_index: int) -> Picked:
    """Picks the ids, of [N], that are not ignored. The host waits for their number."""
    rows = (ids != ignore_index).nonzero()[:, 0]
    if rows.shape[0] == ids.shape[0]:
        return Picked(ids, None)
    return Picked(ids[rows], rows)


def pick_on_device(ids: Tensor, ignore_index: int) -> Picked:
    """Moves the ids, of [N], that are not ignored to the front. The host doesn't wait."""
    valid = ids != ignore_index
    seen = valid.cumsum(0)
    count = seen[-1:] if ids.shape[0] else seen.new_zeros(1)
    place = torch.arange(ids.shape[0], device=ids.device)
    # Tokens that count stand in front; both they and the others keep their order.
    at = torch.where(valid, seen - 1, count + place - seen)
    rows = inverse_of(at)
    ids = ids.masked_fill(~valid, 0).index_select(0, rows)
    return Picked(ids, rows, count.int(), place < count, places=at)
