"""gradient="in_forward" as an autograd function of hidden, weight and bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _get_current_graph_task_keep_graph

from cce_dist.algorithm import in_forward
from cce_dist.algorithm.call import Call, GradWeight, pad_bias
from cce_dist.algorithm.once import once_differentiable, outside_autocast
from cce_dist.algorithm.saved import put_together, take_apart
from cce_dist.algorithm.two_pass import plain_outputs
from cce_dist.core.stats import Stats
from cce_dist.core.types import Upstream, accumulate_dtype

# nll, lse, smooth_logit [N] of the tokens in the slice -> their share of the scalar loss, and its
# derivatives by these.
Objective = Callable[[Tensor, Tensor, Tensor | None, slice], tuple[Tensor, Upstream]]


def concatenate(chunks: list[Stats]) -> Stats:
    """Joins the statistics of consecutive chunks of tokens."""
    packed = torch.cat([chunk.pack() for chunk in chunks], dim=1)
    return chunks[0].unpack(packed)


def no_forward_mode(ctx: Any, *tangents: Tensor | None):
    raise RuntimeError(
        "linear_cross_entropy has no forward-mode derivative (torch.autograd.forward_ad): use "
        "backward() or torch.autograd.grad, or dense logits"
    )


def _forget_buffer(ctx: Any) -> None:
    """Drops the caller's buffer: a loss must not keep it alive after the backward."""
    into = ctx.call.grad_weight_into
    # Autograd would free a saved tensor, but hooks would put a copy in its place.
    if into is not None and not _get_current_graph_task_keep_graph():
        ctx.call = replace(ctx.call, grad_weight_into=None)


@dataclass(frozen=True)
class InForwardGrads:
    """The gradients of one in_forward, for an upstream gradient of 1."""

    hidden: Tensor | None  # [num_rows, D]
    bias: Tensor | None  # [num_classes] in the accumulation dtype
    weight: Tensor | None  # [V_local, D] as weight, or [num_classes, D] in the accumulation dtype

    def scale(self, upstream: Tensor, multiply: Callable[[Tensor, Tensor], None]) -> None:
        """Scales in place: there is room for one weight gradient, not for two."""
        for grad in (self.hidden, self.bias, self.weight):
            if grad is not None:
                multiply(grad, upstream)


class InForward(torch.autograd.Function):
    """gradient="in_forward": the forward computes the gradients of the scalar loss.

    Outputs: the loss [], then lse, entropy and `_plain_outputs`, each [N]. The first backward
    scales the gradients; a later one over a retained graph computes them again.
    """

    jvp = staticmethod(no_forward_mode)

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        objective: Objective,
    ):
        ctx.call, ctx.objective = replace(call, class_weight=None, quantized=None), objective
        ctx.quantized, tensors = take_apart(call.quantized)
        ctx.save_for_backward(hidden, weight, bias, call.class_weight, *tensors)
        ctx.computed, loss, stats, tail = InForward._compute(ctx, call, hidden, weight, bias)
        plain = plain_outputs(stats, tail)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x in plain if x is not None))
        return (loss, stats.lse, stats.entropy, *plain)

    @staticmethod
    def _compute(
        ctx: Any, call: Call, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[InForwardGrads, Tensor, Stats, Tensor | None]:
        call.plan.require_same_sizes(hidden, len(call.local_targets))
        tokens, head = call.tokens(hidden), call.head(weight, bias)
        chunks: list[Stats] = []
        loss = hidden.new_zeros((), dtype=accumulate_dtype(hidden.dtype))

        def upstream_of(stats: Stats, at: slice) -> Upstream:
            chunks.append(stats)
            nll = stats.lse - stats.target_logit
            value, upstream = ctx.objective(nll, stats.lse, stats.smooth_logit, at)
            loss.add_(value)
            return upstream

        grad_weight = rows = None
        if ctx.needs_input_grad[1]:
            classes = head.weight.shape[0]
            narrow = in_forward.holds_sum(weight.dtype, len(tokens), call.plan)
            if call.grad_weight_into is not None or not narrow:
                grad_weight = rows = torch.empty_like(
                    head.weight,
                    dtype=loss.dtype,
                    memory_format=torch.contiguous_format,
                )
            else:
                grad_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
                grad_weight[classes:].zero_()
                rows = grad_weight[:classes]
        grads, tail = in_forward.grads_in_forward(
            tokens,
            head,
            call.plan,
            upstream_of,
            hidden=ctx.needs_input_grad[0],
            weight=rows,
            bias=ctx.needs_input_grad[2],
            tail_mass=call.tail_mass,
        )
        computed = InForwardGrads(grads.hidden, grads.bias, grad_weight)
        return computed, loss, concatenate(chunks), tail

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor | None):
        hidden, weight, bias, class_weight, *tensors = ctx.saved_tensors
        quantized = put_together(ctx.quantized, iter(tensors))
        call: Call = replace(ctx.call, class_weight=class_weight, quantized=quantized)
        for name, grad in zip(("lse", "entropy"), grads[1:3], strict=True):
            if grad is not None:
                raise RuntimeError(
                    f'stats "{name}" cannot be differentiated with gradient="in_forward", whose '
                    'forward computes the gradients; use gradient="filtered" or "exact"'
                    + (", or the option z_loss" if name == "lse" else "")
                )
        _forget_buffer(ctx)
        computed: InForwardGrads | None = ctx.computed
        ctx.computed, upstream = None, grads[0]
        if upstream is None:
            return None, None, None, None, None
        if computed is None:
            computed, *_ = InForward._compute(ctx, call, hidden, weight, bias)
        computed.scale(upstream, call.plan.backend.scale)
        grad_hidden = None if computed.hidden is None else computed.hidden.to(hidden.dtype)
        grad_weight = computed.weight
        if grad_weight is not None and (
            call.grad_weight_into is not None
            or grad_weight.dtype != weight.dtype
            or grad_weight.shape != weight.shape
        ):
            target = GradWeight.prepare(call, weight, True)
            assert target.into is not None
            if target.into.accumulate:
                target.into.rows.add_(grad_weight)
            else:
                target.into.rows.copy_(grad_weight)
            grad_weight = target.returned
        return grad_hidden, grad_weight, pad_bias(computed.bias, bias), None, None
