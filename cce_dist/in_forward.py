"""gradient="in_forward": the steps of `sharded` in one pass, for an upstream gradient of 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cce_dist import sharded
from cce_dist.loss_plan import Plan
from cce_dist.options import TOKEN_BLOCK
from cce_dist.partials import (
    Head,
    LocalGrads,
    Needs,
    Stats,
    Tokens,
    Upstream,
    accumulate_dtype,
)
from cce_dist.transport import group_size


def grads_in_forward(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    upstream_of: Callable[[Stats, slice], Upstream],
    *,
    needs: Needs,
    grad_weight: Tensor | None,  # [V_local, D], written
    tail_mass_wanted: bool,
) -> tuple[LocalGrads, Tensor | None]:
    """gradient="in_forward": all four steps, for an upstream gradient of 1.

    A backend that keeps logits goes over chunks of tokens: three products of every column instead
    of four, and grad_weight in the accumulation dtype. Another one takes all tokens at once, and
    filters. `upstream_of` is told the merged statistics of the tokens it is asked for.

    Returns:
        hidden: [num_rows, D] of this rank's tokens, in hidden's dtype, or in fp32.
        [N] `tail_mass` if wanted.
    Collectives: one all-gather a chunk of tokens, step 4's, and `tail_mass`'s.
    """
    if plan.backend.keeps_logits:
        grads = _grads_by_chunks(tokens, head, plan, upstream_of, needs, grad_weight)
        if grads.hidden is not None:
            num_rows = tokens.hidden.shape[0]
            wide = grads.hidden.dtype
            hidden = sharded.finish_grad_hidden(grads.hidden, tokens.rows, num_rows, plan, wide)
            grads = LocalGrads(hidden, grads.bias)
        dtype = accumulate_dtype(head.weight.dtype)
        nothing = head.weight.new_zeros(len(tokens), dtype=dtype)
        return grads, nothing if tail_mass_wanted else None
    in_fp32 = not scales_by_any(head.weight.dtype)
    dtype = None if grad_weight is None else grad_weight.dtype
    sharded.rehearse(tokens, head, plan, needs, dtype, accumulate=False, in_fp32=in_fp32)
    logits = sharded.room_for_listed(plan, needs)
    stats, scores = sharded.forward(tokens, head, plan, score=True, keep_logits=logits)
    kept = sharded.find_kept(tokens, head, plan, scores, stats.lse)
    tail = sharded.tail_mass(kept, stats.lse, plan) if tail_mass_wanted else None
    grads = sharded.backward(
        tokens,
        head,
        plan,
        stats,
        upstream_of(stats, slice(0, len(tokens))),
        kept=kept,
        needs=needs,
        grad_weight=grad_weight,
        accumulate=False,
        logits=logits,
        in_fp32=in_fp32,
    )
    return grads, tail


def scales_by_any(dtype: torch.dtype) -> bool:
    """Whether gradients for an upstream gradient of 1 can be stored in it: a mean over tokens puts
    them below fp16's smallest number."""
    return dtype != torch.float16


def _grads_by_chunks(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    upstream_of: Callable[[Stats, slice], Upstream],
    needs: Needs,
    grad_weight: Tensor | None,
) -> LocalGrads:
    """Steps 1-3 over chunks of tokens, whose logits are kept in between."""
    weight = head.weight
    dtype = accumulate_dtype(weight.dtype)
    size = chunk_tokens(len(tokens), plan)
    buffer = weight.new_empty((min(size, len(tokens)), weight.shape[0]), dtype=dtype)
    hidden = weight.new_empty((len(tokens), weight.shape[1]), dtype=dtype) if needs.hidden else None
    bias = weight.new_zeros(weight.shape[0], dtype=dtype) if needs.bias else None
    if grad_weight is not None:
        grad_weight.zero_()
    # One empty chunk where there is no token: statistics and gradients keep their shapes.
    for start in range(0, max(len(tokens), 1), size):
        at = slice(start, min(start + size, len(tokens)))
        chunk = tokens.slice(at.start, at.stop)
        logits = buffer[: len(chunk)]
        stats, _ = sharded.forward(chunk, head, plan, score=False, keep_logits=logits)
        grads = plan.backend.grads(
            chunk,
            head,
            stats.lse,
            upstream_of(stats, at),
            target_logit=stats.target_logit,
            entropy=None,
            kept=None,
            needs=needs,
            grad_weight=grad_weight,
            accumulate=True,
            workspace_bytes=plan.options.workspace_for(len(tokens)),
            logits=logits,
        )
        if hidden is not None and grads.hidden is not None:
            hidden[at] = grads.hidden
        if bias is not None and grads.bias is not None:
            bias += grads.bias
    return LocalGrads(hidden, bias)


def chunk_tokens(num_tokens: int, plan: Plan) -> int:
    """Tokens a chunk of in_forward, from numbers that all ranks share, so that they agree.

    At most a quarter of the tokens: the chunk's logits [chunk, V_local] are in memory at once.
    """
    columns = -(-plan.shard.vocab_size // group_size(plan.group))
    room = plan.options.workspace_for(num_tokens)
    by_memory = room // (4 * columns) // TOKEN_BLOCK * TOKEN_BLOCK
    quarter = -(-num_tokens // (4 * TOKEN_BLOCK)) * TOKEN_BLOCK
    return max(TOKEN_BLOCK, min(by_memory, quarter))
