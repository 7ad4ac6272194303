"""Decorators of the loss's backwards: outside of autocast, and differentiable once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Switches autocast off, if it is on: the context costs as much as some launches."""
    if not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, enabled=False)


def outside_autocast(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Switches autocast off in a backward: it would cast the operands of fp32 products."""

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None):
        with without_autocast(ctx.call.device_type):
            return backward(ctx, *grads)

    return wrapper


class _Once(torch.autograd.Function):
    """A function that returns its first `count` tensors, and has no derivative by any of them."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None):
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        raise RuntimeError(
            "a loss of cce_dist is differentiable once, got a backward through its gradients "
            "(create_graph=True): compute the loss from dense logits there"
        )


class _Read:
    """A context whose saved tensors have been read, which checkpointing without reentry allows
    once."""

    def __init__(self, ctx: Any, saved_tensors: tuple[Tensor, ...]) -> None:
        vars(self).update(ctx=ctx, saved_tensors=saved_tensors)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.ctx, name, value)


# Of a tensor that autograd makes of a batch of upstream gradients.
_BATCHED: Any = torch._C._parse_dispatch_key("Batched")


def _is_batched(grad: Tensor) -> bool:
    return torch._C._dispatch_keys(grad).has(_BATCHED)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a derivative of the gradients raise a RuntimeError.

    torch's decorator of this name acts only if the upstream gradient requires grad. Otherwise the
    gradients would count as constants, and a penalty on their norm would have no effect.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None):
        if any(grad is not None and _is_batched(grad) for grad in grads):
            raise RuntimeError(
                "the backward of cce_dist takes one upstream gradient at a time, got a "
                "batch of them (is_grads_batched=True, jacobian with vectorize=True): use a loop"
            )
        # With create_graph=True.
        is_recorded = torch.is_grad_enabled()
        if is_recorded:
            ctx = _Read(ctx, ctx.saved_tensors)
        with torch.no_grad():
            input_grads = backward(ctx, *grads)
        if not is_recorded or all(grad is None for grad in input_grads):
            return input_grads
        needed = [grad for grad in input_grads if grad is not None]
        marked = iter(_Once.apply(len(needed), *needed, *ctx.saved_tensors, *grads))
        return tuple(None if grad is None else next(marked) for grad in input_grads)

    return wrapper


def is_asked_for(ctx: Any, number: int) -> bool:
    """Tells whether this backward wants a gradient by the tensor of a number among a function's
    inputs, which `autograd.grad` may not: a buffer would count it twice."""
    node = ctx.next_functions[number][0]
    try:
        return node is None or torch._C._will_engine_execute_node(node)
    except RuntimeError:
        # autograd.grad by that leaf.
        return True
