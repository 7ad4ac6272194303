"""gradient="in_forward": the steps of `sharded` in one pass, for an upstream gradient of 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cce_dist.algorithm import sharded
from cce_dist.algorithm.plan import Plan
from cce_dist.backends.protocol import BackwardRequest, WeightGrad
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, LocalGrads, Tokens, Upstream, accumulate_dtype
from cce_dist.options import TOKEN_BLOCK
from cce_dist.ranks.hidden_sum import SumOverRanks
from cce_dist.ranks.transport import group_size


def grads_in_forward(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    upstream_of: Callable[[Stats, slice], Upstream],
    *,
    hidden: bool,  # whether its gradient is needed, as bias's
    weight: Tensor | None,  # [V_local, D] of its gradient, written; None: not needed
    bias: bool,
    tail_mass: bool,  # asked for
) -> tuple[LocalGrads, Tensor | None]:
    """Takes all four steps, for an upstream gradient of 1.

    By chunks of tokens there are three products of every column instead of four, and the weight's
    gradient is in the accumulation dtype. Else all tokens are one chunk, which is filtered.
    `upstream_of` is told the merged statistics of the tokens it is asked for.

    Returns:
        hidden: [num_rows, D] of this rank's tokens, in hidden's dtype, or in fp32.
        [N] `Plan.tail_mass` if asked for.
    Collectives: one all-gather a chunk of tokens, step 4's, and `tail_mass`'s.
    """
    into = None if weight is None else WeightGrad(weight, accumulate=plan.by_chunks)
    if plan.by_chunks:
        grads = _grads_by_chunks(tokens, head, plan, upstream_of, hidden, into, bias)
        dtype = accumulate_dtype(head.weight.dtype)
        nothing = head.weight.new_zeros(len(tokens), dtype=dtype)
        return grads, nothing if tail_mass else None
    in_fp32 = not scales_by_any(head.weight.dtype)
    written = None if weight is None else weight.dtype
    expected = plan.expect(tokens, hidden=hidden, weight=written, bias=bias, in_fp32=in_fp32)
    store = plan.store_for(tokens, head, expected)
    plan.warm_up(tokens, head, expected, store)
    stats, scores = sharded.forward(tokens, head, plan, score=True, store=store)
    kept = sharded.choose_columns(tokens, head, plan, scores, stats)
    tail = plan.tail_mass(kept, stats.lse) if tail_mass else None
    grads = sharded.backward(
        tokens,
        head,
        plan,
        stats,
        upstream_of(stats, slice(0, len(tokens))),
        kept=kept,
        hidden=hidden,
        weight=into,
        bias=bias,
        store=store,
        in_fp32=in_fp32,
    )
    return grads, tail


def scales_by_any(dtype: torch.dtype) -> bool:
    """Tells whether it can store gradients for an upstream gradient of 1: a mean over tokens puts
    them below fp16's smallest number."""
    return dtype != torch.float16


def _grads_by_chunks(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    upstream_of: Callable[[Stats, slice], Upstream],
    needs_hidden: bool,
    into: WeightGrad | None,
    needs_bias: bool,
) -> LocalGrads:
    """Takes steps 1-3 over chunks of tokens, whose logits are kept in between, and step 4 at
    once."""
    weight = head.weight
    dtype = accumulate_dtype(weight.dtype)
    size = chunk_tokens(len(tokens), plan)
    buffer = weight.new_empty((min(size, len(tokens)), weight.shape[0]), dtype=dtype)
    hidden = weight.new_empty((len(tokens), weight.shape[1]), dtype=dtype) if needs_hidden else None
    bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needs_bias else None
    if into is not None:
        into.rows.zero_()
    # One empty chunk where there is no token: statistics and gradients keep their shapes.
    for start in range(0, max(len(tokens), 1), size):
        at = slice(start, min(start + size, len(tokens)))
        chunk = tokens.alone(at.start, at.stop)
        store = buffer[: len(chunk)]
        stats, _ = sharded.forward(chunk, head, plan, score=False, store=store)
        part = None
        if needs_hidden:
            part = SumOverRanks(None, scatter=False, num_rows=len(chunk), dtype=dtype)
        request = BackwardRequest(
            stats=stats,
            upstream=upstream_of(stats, at),
            kept=None,
            hidden=part,
            weight=into,
            bias=needs_bias,
            store=store,
            room=plan.room(tokens, head),
        )
        grads = plan.backend.backward(chunk, head, request)
        if hidden is not None and grads.hidden is not None:
            hidden[at] = grads.hidden
        if bias is not None and grads.bias is not None:
            bias += grads.bias
    if hidden is not None:
        hidden = plan.hidden_sum(tokens, dtype).of_tokens(hidden, tokens.rows)
    return LocalGrads(hidden, bias)


def chunk_tokens(num_tokens: int, plan: Plan) -> int:
    """Returns the tokens of a chunk, from numbers that all ranks share, so that they agree.

    At most a quarter of the tokens: the chunk's logits [chunk, V_local] are in memory at once.
    """
    columns = -(-plan.shard.vocab_size // group_size(plan.group))
    room = plan.options.workspace_for(num_tokens)
    by_memory = room // (4 * columns) // TOKEN_BLOCK * TOKEN_BLOCK
    quarter = -(-num_tokens // (4 * TOKEN_BLOCK)) * TOKEN_BLOCK
    return max(TOKEN_BLOCK, min(by_memory, quarter))
