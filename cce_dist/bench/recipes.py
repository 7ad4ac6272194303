"""Losses that torch alone makes: compiled, and in chunks of tokens as training libraries do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .golden import LossFunction, dense_loss
from .inputs import IGNORE_INDEX


def compiled_dense(softcap: float | None = None) -> LossFunction:
    return torch.compile(functools.partial(dense_loss, softcap=softcap), dynamic=False)


def compiled_sum() -> LossFunction:
    """The dense recipe of a chunk, summed, compiled."""

    def loss_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = (hidden @ weight.T).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")

    return torch.compile(loss_sum, dynamic=False)


def num_counted(targets: Tensor) -> Tensor:
    return (targets != IGNORE_INDEX).sum().clamp(min=1)


def mean_of(nll: Tensor, targets: Tensor) -> Tensor:
    """Mean of per-token losses over the tokens that are not ignored."""
    counted = targets != IGNORE_INDEX
    return torch.where(counted, nll.float(), 0.0).sum() / num_counted(targets)


def chunked_by_autograd(num_chunks: int) -> LossFunction:
    """Chunks of tokens, whose logits autograd keeps for the backward: as torchtune's."""
    loss_sum = compiled_sum()

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chunks = zip(hidden.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
        total = torch.stack([loss_sum(rows, weight, ids) for rows, ids in chunks]).sum()
        return total / num_counted(targets)

    return loss


def chunked_in_forward(num_chunks: int) -> LossFunction:
    """Chunks of tokens, each with its own backward at once: as torchtitan's."""
    loss_sum = compiled_sum()

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _ChunkedInForward.apply(hidden, weight, targets, loss_sum, num_chunks)
        chunks = zip(hidden.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
        total = torch.stack([loss_sum(rows, weight, ids) for rows, ids in chunks]).sum()
        return total / num_counted(targets)

    return loss


class _ChunkedInForward(torch.autograd.Function):
    """The hidden states' gradient is kept in fp32, the weight's adds up in its own dtype."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        loss_sum: Callable[..., Tensor],
        num_chunks: int,
    ) -> Tensor:
        count = num_counted(targets)
        total = torch.zeros((), device=hidden.device)
        grad_hidden = torch.empty_like(hidden, dtype=torch.float32)
        leaf = weight.detach().requires_grad_()
        parts = zip(
            hidden.detach().chunk(num_chunks),
            targets.chunk(num_chunks),
            grad_hidden.chunk(num_chunks),
            strict=True,
        )
        for chunk, ids, grad in parts:
            with torch.enable_grad():
                rows = chunk.detach().requires_grad_()
                loss = loss_sum(rows, leaf, ids) / count
            loss.backward()
            total += loss.detach()
            assert rows.grad is not None
            grad.copy_(rows.grad)
        ctx.save_for_backward(grad_hidden.to(hidden.dtype), leaf.grad)
        return total

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_weight.mul_(grad_loss), None, None, None
