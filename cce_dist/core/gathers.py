"""Gathers of vectors' elements, and their gradients, as operators.

The compiler does not look into them. Where it joins loops, it may read memory before a scatter has
written it (torch 2.13, on a CPU).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("cce_dist::inverse_of", mutates_args=(), schema="(Tensor order) -> Tensor")
def inverse_of(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation, [N] int64."""
    place = torch.arange(order.shape[0], device=order.device)
    return torch.empty_like(order).scatter_(0, order, place)


@torch.library.custom_op(
    "cce_dist::permuted",
    mutates_args=(),
    schema="(Tensor values, Tensor order, Tensor inverse) -> Tensor",
)
def permuted(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Returns values[order], [N]. Differentiable. Args: inverse: of the permutation `order`."""
    return values.index_select(0, order)


@torch.library.custom_op(
    "cce_dist::taken", mutates_args=(), schema="(Tensor values, Tensor at) -> Tensor"
)
def taken(values: Tensor, at: Tensor) -> Tensor:
    """Returns values[at], of at's shape; an element may be taken several times. Differentiable,
    once: unlike index_select's, the gradient adds in one order on a GPU."""
    return values[at]


@torch.library.custom_op(
    "cce_dist::put_back", mutates_args=(), schema="(Tensor grad, Tensor at, int size) -> Tensor"
)
def _put_back(grad: Tensor, at: Tensor, size: int) -> Tensor:
    return grad.new_zeros(size).index_put_((at,), grad, accumulate=True)


@inverse_of.register_fake
def _(order: Tensor) -> Tensor:
    return torch.empty_like(order)


@permuted.register_fake
def _(values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    return values.new_empty(order.shape)


@taken.register_fake
def _(values: Tensor, at: Tensor) -> Tensor:
    return values.new_empty(at.shape)


@_put_back.register_fake
def _(grad: Tensor, at: Tensor, size: int) -> Tensor:
    return grad.new_empty(size)


def _keep_orders(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _permute_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    order, inverse = ctx.saved_tensors
    return permuted(grad, inverse, order), None, None


def _keep_places(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    values, at = inputs
    ctx.save_for_backward(at)
    ctx.size = values.shape[0]


def _take_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _put_back(grad, *ctx.saved_tensors, ctx.size), None


permuted.register_autograd(_permute_back, setup_context=_keep_orders)
taken.register_autograd(_take_back, setup_context=_keep_places)
