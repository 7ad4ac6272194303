"""How the loss's backwards run: outside of autocast, and differentiable once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def outside_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward called within an autocast region must not have its fp32 products cast."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None):
        with torch.autocast(ctx.call.device_type, enabled=False):
            return backward(ctx, *grads)

    return run


class _Once(torch.autograd.Function):
    """The first `count` tensors as they are, as a function of the others, without a derivative."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None):
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        raise RuntimeError(
            "linear_cross_entropy is differentiable once: its gradients were made with "
            "create_graph=True, and a derivative of them was asked for; use dense logits there"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's does nothing unless the upstream gradient requires grad: gradients would pass for
    constants, and a penalty of their norm would have no effect."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Tensor | None):
        with torch.no_grad():
            made = backward(ctx, *grads)
        if not torch.is_grad_enabled() or all(grad is None for grad in made):
            return made
        given = [grad for grad in made if grad is not None]
        marked = iter(_Once.apply(len(given), *given, *ctx.saved_tensors, *grads))
        return tuple(None if grad is None else next(marked) for grad in made)

    return run
