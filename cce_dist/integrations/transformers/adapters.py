"""The gradient of low-rank adapters beside a frozen head, without a [V, D] gradient.

With hidden states [x, u] side by side and weights [W, B], u = s A x, the logits are x W^T + u B^T.
The loss gives the gradients of x and u. The gradient of B remains: dB = G^T u, with the logits'
gradient G, in chunks of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Of a chunk's shape, at once, in the dtype of lse: the product, its logits, a softcap's slope.
TEMPORARIES = 3


@dataclass(frozen=True)
class Logits:
    """logit_scale * softcap * tanh((hidden @ weight.T + bias) / softcap) of N tokens."""

    hidden: Tensor  # [N, D + R]
    weight: Tensor  # [V, D + R]
    bias: Tensor | None  # [V]
    logit_scale: float
    softcap: float | None

    def of_columns(self, start: int, stop: int) -> Tensor:
        """Returns logits of some columns, [N, stop - start] fp32 (float64 for float64 inputs)."""
        product = self.hidden @ self.weight[start:stop].T
        logits = product.to(torch.promote_types(product.dtype, torch.float32))
        if self.bias is not None:
            logits.add_(self.bias[start:stop])
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.mul_(self.logit_scale)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Returns the derivative of logits by hidden @ weight.T."""
        if self.softcap is None:
            return self.logit_scale
        # 1 - tanh^2.
        tanh = logits / (self.logit_scale * self.softcap)
        return tanh.square_().neg_().add_(1).mul_(self.logit_scale)


class AdapterGrad(torch.autograd.Function):
    """Zeros [N], whose gradient by each token's loss makes the adapters' gradients.

    Args:
        workspace_bytes: bound of a chunk's logits and temporaries.
        targets: [N] int64; a negative one: the token does not count.
        lse, nll: [N] of the same logits.
        inputs: u of each adapter, [N, r], then B of each adapter, [V, r].
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Logits,
        workspace_bytes: int,
        targets: Tensor,
        lse: Tensor,
        nll: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        half = len(inputs) // 2
        ctx.workspace_bytes = workspace_bytes
        ctx.factors = logits.logit_scale, logits.softcap
        ctx.dtypes = [x.dtype for x in inputs[half:]]
        # The weight is a copy, [V, D + R]: it must go with the graph's other tensors.
        tensors = logits.hidden, logits.weight, logits.bias
        ctx.save_for_backward(*tensors, targets, lse, nll, *inputs[:half])
        return torch.zeros_like(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets, lse, nll, *inputs = ctx.saved_tensors
        logits = Logits(hidden, weight, bias, *ctx.factors)
        # The lse of a token that does not count may be anything.
        lse, nll, upstream = (torch.where(targets < 0, 0, x) for x in (lse, nll, *grads))
        num_classes = logits.weight.shape[0]
        results = [lse.new_zeros(num_classes, x.shape[1]) for x in inputs]
        row_bytes = TEMPORARIES * lse.element_size() * max(1, len(lse))
        step = max(1, ctx.workspace_bytes // row_bytes)
        for start in range(0, num_classes, step):
            stop = min(num_classes, start + step)
            some = logits.of_columns(start, stop)
            slope = logits.slope(some)
            grad = some.sub_(lse[:, None]).exp_().mul_(slope).mul_(upstream[:, None])
            grad.masked_fill_(targets[:, None] < 0, 0)
            del slope
            for result, part in zip(results, inputs, strict=True):
                result[start:stop] = grad.T @ part.to(grad.dtype)
        of_target = torch.where(targets < 0, 0, upstream * logits.slope(lse - nll))[:, None]
        for result, part in zip(results, inputs, strict=True):
            result.index_add_(0, targets.clamp(min=0), part.to(result.dtype) * -of_target)
        by_dtype = (x.to(dtype) for x, dtype in zip(results, ctx.dtypes, strict=True))
        return (*(None,) * (5 + len(inputs)), *by_dtype)
