"""The targets that count, in torch.

Operators permute them, and the compiler does not look into these: where it joins loops, it may
read memory before a scatter has written it (torch 2.13, on a CPU).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cce_dist.core.types import Picked


def pick(ids: Tensor, ignore_index: int) -> Picked:
    """Picks the ids, of [N], that are not ignored. The host waits for their number."""
    rows = (ids != ignore_index).nonzero()[:, 0]
    if rows.shape[0] == ids.shape[0]:
        return Picked(ids, None)
    return Picked(ids[rows], rows)


@torch.library.custom_op("cce_dist::inverse_of", mutates_args=(), schema="(Tensor order) -> Tensor")
def _inverse_of(order: Tensor) -> Tensor:
    place = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, place)


@_inverse_of.register_fake
def _(order: Tensor) -> Tensor:
    return torch.empty_like(order)


def inverse_of(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation, [N] int64."""
    return torch.ops.cce_dist.inverse_of(order)


@torch.library.custom_op(
    "cce_dist::permuted",
    mutates_args=(),
    schema="(Tensor values, Tensor order, Tensor inverse) -> Tensor",
)
def _permuted(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return values.index_select(0, order)


@_permuted.register_fake
def _(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return values.new_empty(order.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    order, inverse = ctx.saved_tensors
    return permuted(grad, inverse, order), None, None


_permuted.register_autograd(_backward, setup_context=_setup)


def permuted(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Returns values[order], [N]. Args: inverse: of the permutation `order`."""
    return torch.ops.cce_dist.permuted(values, order, inverse)


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
