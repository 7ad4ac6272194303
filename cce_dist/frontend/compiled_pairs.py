"""`algorithm.pairs.PairLogits` within torch.compile, and of fake tensors: operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cce_dist.algorithm.call import Call
from cce_dist.algorithm.pairs import PairLogits, call_of_pairs
from cce_dist.core.types import Pairs, accumulate_dtype
from cce_dist.frontend import validation
from cce_dist.frontend.compiled import bind, refuse_mpi
from cce_dist.frontend.compiled_operators import BOUND, OperatorContext, like_needed
from cce_dist.frontend.inputs import Inputs
from cce_dist.frontend.prepare import differentiates
from cce_dist.options import LossOptions
from cce_dist.vocab_shard import VocabShard


def functions(
    inputs: Inputs, options: LossOptions, group: Any, vocab_shard: VocabShard | None
) -> tuple[Callable[[Pairs], Tensor], Callable[[int, Tensor], tuple[Tensor, Tensor]], int]:
    """Checks the arguments; returns a function that traces `PairLogits`, one that refuses top_k,
    and vocab_size."""
    hidden, weight, bias = inputs.hidden, inputs.weight, inputs.bias
    refuse_mpi(group)
    validation.check_hidden_and_weight(hidden, weight)
    key, shard, size = bind(weight, options, group, vocab_shard)
    validation.check_tensors(inputs, options, shard, size)
    needs = [differentiates(x) for x in (hidden, weight, bias)]

    def compute(pairs: Pairs) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        return torch.ops.cce_dist.pair_logits(
            flat, weight, bias, pairs.rows, pairs.ids, pairs.offsets, pairs.order, needs, key
        )

    return compute, _no_largest, shard.vocab_size


def _no_largest(k: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    raise ValueError(
        f"top_k must be None within torch.compile and of fake tensors, got {k}: the host waits for "
        "the number of tokens; call token_logprobs with top_k outside of the compiled function"
    )


def _call(hidden: Tensor, weight: Tensor, key: str) -> Call:
    plan = BOUND[key].plan(hidden, hidden.shape[0], [False] * 4)
    return call_of_pairs(plan, weight)


@torch.library.custom_op(
    "cce_dist::pair_logits",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor rows, Tensor ids, Tensor offsets, "
    "Tensor order, bool[] needs, str key) -> Tensor",
)
def pair_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: Tensor,
    ids: Tensor,
    offsets: Tensor,
    order: Tensor,
    needs: list[bool],
    key: str,
) -> Tensor:
    """Runs `PairLogits.forward`."""
    ctx: Any = OperatorContext(needs)
    with torch.autocast(hidden.device.type, enabled=False):
        call = _call(hidden, weight, key)
        return PairLogits.forward(ctx, hidden, weight, bias, rows, ids, offsets, order, call)


@pair_logits.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor, *_: Any) -> Tensor:
    return hidden.new_empty(rows.shape[0], dtype=accumulate_dtype(hidden.dtype))


@torch.library.custom_op(
    "cce_dist::pair_logits_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor hidden, Tensor weight, Tensor? bias, Tensor rows, Tensor ids, "
    "Tensor offsets, Tensor order, bool[] needs, str key) -> Tensor[]",
)
def pair_logits_backward(grad: Tensor, *inputs: Any) -> list[Tensor]:
    """Runs `PairLogits.backward`. Returns: the gradients that are needed, in the inputs' order."""
    *tensors, needs, key = inputs
    ctx: Any = OperatorContext(needs)
    ctx.saved_tensors = tuple(tensors)
    ctx.call = _call(tensors[0], tensors[1], key)
    with torch.no_grad():
        grads = PairLogits.backward(ctx, grad.contiguous())
    return [x for x, need in zip(grads, needs, strict=False) if need and x is not None]


@pair_logits_backward.register_fake
def _(grad: Tensor, *arguments: Any) -> list[Tensor]:
    return like_needed(arguments[:3], arguments[-2])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.needs, ctx.key = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    grads = iter(
        torch.ops.cce_dist.pair_logits_backward(grad, *ctx.saved_tensors, ctx.needs, ctx.key)
    )
    return (*(next(grads) if need else None for need in ctx.needs), *(None for _ in range(6)))


pair_logits.register_autograd(_backward, setup_context=_setup)
