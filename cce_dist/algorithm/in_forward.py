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
    hidden: bool,  # whether its gradient is needed; so with bias
    weight: Tensor | None,  # [V_local, D] memory for its gradient; None: not needed
    bias: bool,
    tail_mass: bool,  # whether to return it
) -> tuple[LocalGrads, Tensor | None]:
    """Takes all four steps, for an upstream gradient of 1.

    `Plan.by_chunks` decides between two ways. A chunk of tokens keeps its logits, so every column
    takes three matrix products instead of four; the weight's gradient has the accumulation dtype.
    Otherwise all tokens are one chunk, and its columns are filtered.

    Args: upstream_of: returns the upstream gradient of a slice of tokens, from their merged
        statistics.
    Returns:
        The gradients; hidden's is [num_rows, D], in hidden's dtype or in fp32.
        `Plan.tail_mass` [N]; None without `tail_mass`.
    Collectives: those of `sharded.forward` for each chunk, those of step 4 once, and those of
        `Plan.tail_mass`.
    """
    into = None if weight is None else WeightGrad(weight, accumulate=plan.by_chunks)
    if plan.by_chunks:
        grads = _grads_by_chunks(tokens, head, plan, upstream_of, hidden, into, bias)
        dtype = accumulate_dtype(head.weight.dtype)
        nothing = head.weight.new_zeros(len(tokens), dtype=dtype)
        return grads, nothing if tail_mass else None
    in_fp32 = not holds_unscaled_gradients(head.weight.dtype)
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


def holds_unscaled_gradients(dtype: torch.dtype) -> bool:
    """Tells whether a dtype holds gradients for an upstream gradient of 1. In fp16 those of a mean
    over tokens would be below the smallest number."""
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
    """Takes steps 1 to 3 for each chunk of tokens, whose logits stay in memory from step 1 to step
    3, and then step 4 once for all tokens."""
    weight = head.weight
    dtype = accumulate_dtype(weight.dtype)
    size = chunk_tokens(len(tokens), plan)
    buffer = weight.new_empty((min(size, len(tokens)), weight.shape[0]), dtype=dtype)
    hidden = weight.new_empty((len(tokens), weight.shape[1]), dtype=dtype) if needs_hidden else None
    bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needs_bias else None
    if into is not None:
        into.rows.zero_()
    # Without tokens there is one empty chunk, which gives statistics and gradients their shapes.
    for start in range(0, max(len(tokens), 1), size):
        at = slice(start, min(start + size, len(tokens)))
        chunk = tokens.alone(at.start, at.stop)
        store = buffer[: len(chunk)]
        stats, _ = sharded.forward(chunk, head, plan, score=False, store=store)
        local_sum = None
        if needs_hidden:
            # Step 4 follows once, over all chunks.
            local_sum = SumOverRanks(None, scatter=False, num_rows=len(chunk), dtype=dtype)
        request = BackwardRequest(
            stats=stats,
            upstream=upstream_of(stats, at),
            kept=None,
            hidden=local_sum,
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
    """Returns the number of tokens in a chunk: a multiple of TOKEN_BLOCK.

    It follows from numbers that all ranks share, so ranks agree on it. The logits of a chunk,
    [chunk, V_local], are in memory at once: a chunk has at most a quarter of the tokens.
    """
    columns = -(-plan.shard.vocab_size // group_size(plan.group))
    room = plan.options.workspace_for(num_tokens)
    by_memory = room // (4 * columns) // TOKEN_BLOCK * TOKEN_BLOCK
    quarter = -(-num_tokens // (4 * TOKEN_BLOCK)) * TOKEN_BLOCK
    return max(TOKEN_BLOCK, min(by_memory, quarter))
