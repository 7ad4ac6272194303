"""gradient="in_forward": the loss and its gradients, of one chunk of tokens after another.

A chunk's logits stay in memory from its sums to its gradients, so both heads are multiplied once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.algorithm import in_forward
from cce_dist.algorithm.call import Call, require_in_memory
from cce_dist.algorithm.chunks import chunk_tokens, require_same_chunks
from cce_dist.algorithm.once import once_differentiable, outside_autocast
from cce_dist.algorithm.plan import Plan
from cce_dist.backends.choose import TORCH, repeated
from cce_dist.backends.torch.tiles import operand_dtype, put_product
from cce_dist.core.types import accumulate_dtype
from cce_dist.distillation.function import (
    Objective,
    Student,
    Teacher,
    merge,
    pair_of,
    require_equal_sizes,
    value_and_mean,
)
from cce_dist.distillation.sweep import (
    Pair,
    Upstream,
    d_logits,
    first_pass,
    scale_of,
)
from cce_dist.frontend.reduction import TokenLoss
from cce_dist.ranks.transport import group_size

# Chunks by default, with kernels. Of 8,192 tokens each has 768, a multiple of the tiles that cuBLAS
# has on Hopper: the products of 896 take longer. The sum of their weight gradients may be in 16
# bits: `MOST_ROUNDINGS`.
NUM_CHUNKS = 11
# Of the logits of a chunk by default, with kernels, if an eleventh of the tokens has fewer: on a
# small head the launches of many chunks would take longer than the device.
LEAST_BYTES = 2**29


class _Sums(NamedTuple):
    """The gradients of the chunks so far; None where not needed."""

    hidden: Tensor | None  # [N, D] of the computed tokens
    weight: Tensor | None  # [num_classes, D]
    bias: Tensor | None  # [num_classes] in the accumulation dtype


class DistillInForward(torch.autograd.Function):
    """Outputs: the loss, []; each token's divergence and, if alpha > 0, nll, [N], whose derivatives
    are refused."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Teacher,
        call: Call,
        objective: Objective,
        terms: TokenLoss,
        needs: tuple[bool, ...],
    ):
        """Args: needs: whether a backward may ask for the gradients by hidden, weight, bias."""
        ctx.call, ctx.softcap_and_scale = call, teacher[3:5]
        ctx.of_loss = of_loss = call, objective, terms, needs
        run = _played if objective.takes_tiles else _forward
        loss, value, nll, ctx.once = run((hidden, weight, bias), teacher, *of_loss)
        # token_weight may be the caller's memory: autograd refuses a backward after a write to it.
        ctx.save_for_backward(hidden, weight, bias, *teacher[:3], terms.token_weight)
        ctx.set_materialize_grads(False)
        return loss, value, nll

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor | None):
        hidden, weight, bias, *tensors, _ = ctx.saved_tensors
        (call, objective, _, _), upstream = ctx.of_loss, grads[0]
        for name, grad in zip(("divergence", "nll"), grads[1:], strict=True):
            if grad is not None:
                raise RuntimeError(
                    f'stats "{name}" cannot be differentiated with gradient="in_forward", whose '
                    'forward computes the gradients; use gradient="filtered" or "exact"'
                )
        # A second backward over a retained graph finds no gradients, and computes them again.
        computed, ctx.once = ctx.once, in_forward.Computed()
        if upstream is None:
            return (None,) * 8
        if computed.is_used:
            teacher = Teacher(*tensors, *ctx.softcap_and_scale)
            require_in_memory(weight)
            require_in_memory(teacher.weight, "teacher_weight")
            computed = _forward((hidden, weight, bias), teacher, *ctx.of_loss)[-1]
        scale = TORCH.scale
        if objective.takes_tiles:
            # Triton may be missing elsewhere.
            from cce_dist.backends.triton.grads import scale
        out = in_forward.scaled(hidden, weight, bias, call, computed, upstream, scale)
        return out.hidden, out.weight, out.bias, *(None,) * 5


def _forward(
    student: Student,
    teacher: Teacher,
    call: Call,
    objective: Objective,
    terms: TokenLoss,
    needs: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor | None, in_forward.Computed]:
    """Returns the loss, each token's divergence and nll, and gradients for an upstream gradient
    of 1. Collectives: those of `pair_of` and `require_same_chunks`; for each chunk those of
    `merge` and `value_and_mean`; and the sum of the hidden gradient."""
    hidden, weight, _ = student
    require_equal_sizes(hidden, teacher, call)
    pair, plan = pair_of(*student, teacher, call, objective), call.plan
    num_tokens = len(pair.student)
    parts = None if pair.kernels is None else NUM_CHUNKS
    size = chunk_tokens(
        num_tokens, plan, pair.bytes_of_logits, parts=parts, least_bytes=LEAST_BYTES
    )
    require_same_chunks(size, hidden.device, plan.group)
    value, alpha = pair.rows(1, 0.0, pair.dtype)[0], objective.alpha
    nll = torch.empty_like(value) if pair.has_targets else None
    # Each token's loss is linear in its values.
    by_token = terms.upstream(value, None).nll
    assert by_token is not None
    upstream = Upstream((1 - alpha) * by_token, alpha * by_token if pair.has_targets else None)
    scale = scale_of(pair, upstream)
    # Many roundings would be seen in a sum over chunks.
    few = -(-num_tokens // size) <= in_forward.MOST_ROUNDINGS
    is_narrow = pair.kernels is not None and in_forward.holds_unscaled_gradients(weight.dtype)
    held, sums = _memory(pair, weight, call, needs, is_narrow, is_narrow and few)
    for start in range(0, num_tokens, size):
        at = slice(start, min(start + size, num_tokens))
        _add_chunk(pair, at, plan, (value, nll), upstream, scale, sums)
    each = value if nll is None else (1 - alpha) * value + alpha * nll
    loss = terms.per_token(each, each, None, slice(None)).sum()
    if scale is not None:
        for grad in sums:
            if grad is not None:
                grad.mul_(scale)
    of_hidden = sums.hidden
    if of_hidden is not None:
        # Ranks add up what is not rounded, and round the sum.
        total = plan.hidden_sum(pair.student, weight.dtype if is_narrow else of_hidden.dtype)
        of_hidden = total.of_tokens(of_hidden, pair.student.rows)
    return loss, value, nll, in_forward.Computed(of_hidden, sums.bias, held)


# Chunks take dozens of launches each.
_played = repeated(_forward)


def _memory(
    pair: Pair,
    weight: Tensor,
    call: Call,
    needs: tuple[bool, ...],
    narrow_hidden: bool,
    narrow_weight: bool,
) -> tuple[Tensor | None, _Sums]:
    """Returns memory of the weight's gradient with padded rows, and of all gradients without."""
    head, wide = pair.head, accumulate_dtype(weight.dtype)
    hidden = held = rows = bias = None
    if needs[0]:
        narrow = narrow_hidden and group_size(call.plan.group) == 1
        shape = len(pair.student), weight.shape[1]
        hidden = weight.new_zeros(shape, dtype=weight.dtype if narrow else wide)
    if needs[1]:
        held, rows = in_forward.memory_of_weight(call, weight, narrow=narrow_weight)
        if not len(pair.student):
            rows.zero_()
    if needs[2]:
        bias = weight.new_zeros(head.weight.shape[0], dtype=wide)
    return held, _Sums(hidden, rows, bias)


def _add_chunk(
    pair: Pair,
    at: slice,
    plan: Plan,
    values: tuple[Tensor, Tensor | None],  # divergence and nll, [N]: written
    upstream: Upstream,
    scale: Tensor | None,
    sums: _Sums,
) -> None:
    """Computes the tokens `at`. The chunk's logits are freed when it returns."""
    chunk = pair.of_tokens(at.start, at.stop)
    of_ranks = {"has_targets": pair.has_targets, "checks": at.start == 0}
    of_pair = pair.divergences, plan, pair.kernels, pair.dtype
    merged = merge(first_pass(chunk), *of_pair, **of_ranks)
    value, mean = value_and_mean(chunk, merged.sums, plan)
    values[0][at] = value
    if values[1] is not None:
        values[1][at] = merged.lse - merged.target_logit
    if chunk.whole is None or all(x is None for x in sums):
        return
    of_chunk = Upstream(*(None if x is None else x[at] for x in upstream))  # pyright: ignore[reportArgumentType]
    vectors = (*merged.sums[:2], mean, merged.lse)
    grad = d_logits(chunk, chunk.whole, vectors, of_chunk, scale, wide=sums.bias is not None)
    if sums.bias is not None:
        sums.bias.add_(grad.sum(0))
    weight, hidden = pair.head.weight, chunk.student.hidden
    operands = operand_dtype(weight)
    grad = grad.to(operands)
    if sums.hidden is not None:
        put_product(sums.hidden[at], grad, weight.to(operands), accumulate=False)
    if sums.weight is not None:
        put_product(sums.weight, grad.T, hidden.to(operands), accumulate=at.start > 0)
