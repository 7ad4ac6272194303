"""gradient="in_forward": the steps of `sharded` in one pass, for an upstream gradient of 1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.algorithm import sharded
from cce_dist.algorithm.call import Call, GradWeight, pad_bias
from cce_dist.algorithm.chunks import chunk_tokens, require_same_chunks
from cce_dist.algorithm.plan import Plan
from cce_dist.algorithm.two_pass import Grads, Needs
from cce_dist.backends.protocol import BackwardRequest, LateTargets, Room, WeightGrad
from cce_dist.core.records import handed_out
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, LocalGrads, Tokens, Upstream, accumulate_dtype
from cce_dist.ranks.hidden_sum import SumOverRanks

# Chunks by default, of 16-bit logits: with its other tensors one takes a quarter of the memory of
# dense logits.
NUM_CHUNKS = 5
# The most chunks whose weight gradients add up in 16 bits. Each addition rounds the sum so far:
# docs/design/loss.md#in_forward.
MOST_ROUNDINGS = 12
# Merged statistics of the tokens in a slice -> their share of the scalar loss, its derivatives.
Objective = Callable[[Stats, slice], tuple[Tensor, Upstream]]


@dataclass
class Computed:
    """The gradients of one `forward`, for an upstream gradient of 1. The first backward uses them
    up; a second one over a retained graph computes them again."""

    hidden: Tensor | None = None  # [num_rows, D]
    bias: Tensor | None = None  # [num_classes] in the accumulation dtype
    # [V_local, D] as weight, or [num_classes, D] in the accumulation dtype
    weight: Tensor | None = None

    @property
    def is_used(self) -> bool:
        return self.hidden is None and self.bias is None and self.weight is None

    def clear(self) -> None:
        self.hidden = self.bias = self.weight = None


handed_out.append(Computed)


class Forward(NamedTuple):
    """The results of `forward`."""

    loss: Tensor  # []
    stats: Stats  # over the whole vocabulary, [N] each
    tail_mass: Tensor | None  # [N]; None without `Call.tail_mass`
    computed: Computed


def forward(
    hidden: Tensor,  # [num_rows, D]
    weight: Tensor,  # [V_local, D]
    bias: Tensor | None,
    call: Call,
    objective: Objective,
    needs: Needs,
) -> Forward:
    """Computes the scalar loss, and its gradients. Collectives: those of
    `Plan.require_same_sizes` and `grads_in_forward`."""
    call.plan.require_same_sizes(hidden, len(call.local_targets))
    tokens, head = call.tokens(hidden), call.head(weight, bias)
    chunks: list[Stats] = []
    totals: list[Tensor] = []

    def upstream_of(stats: Stats, at: slice) -> Upstream:
        total, upstream = objective(stats, at)
        chunks.append(stats)
        totals.append(total)
        return upstream

    grad_weight = rows = None
    if needs.weight:
        narrow = holds_sum(weight.dtype, len(tokens), call.plan)
        grad_weight, rows = memory_of_weight(call, weight, narrow=narrow)
    grads, tail = grads_in_forward(
        tokens,
        head,
        call.plan,
        upstream_of,
        hidden=needs.hidden,
        weight=rows,
        bias=needs.bias,
        tail_mass=call.tail_mass,
    )
    loss = totals[0]
    for total in totals[1:]:
        loss = loss + total
    return Forward(
        loss, _concatenated(chunks), tail, Computed(grads.hidden, grads.bias, grad_weight)
    )


def _concatenated(chunks: list[Stats]) -> Stats:
    """Joins the statistics of consecutive chunks of tokens."""
    if len(chunks) == 1:
        return chunks[0]
    names = [field.name for field in fields(Stats) if getattr(chunks[0], field.name) is not None]
    return Stats(**{name: torch.cat([getattr(x, name) for x in chunks]) for name in names})


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,  # with the caller's buffer
    computed: Computed,
    objective: Objective,
    upstream: Tensor,  # [] the gradient by the loss
    needs: Needs,
) -> Grads:
    """Collectives: those of `forward`, if the gradients are used up."""
    if computed.is_used:
        computed = forward(hidden, weight, bias, call, objective, needs).computed
    scale = call.plan.backend.scale
    return scaled(hidden, weight, bias, call, computed, upstream, scale)


def memory_of_weight(call: Call, weight: Tensor, *, narrow: bool) -> tuple[Tensor, Tensor]:
    """Returns memory in which the weight's gradient waits for the backward, and its rows without
    padding, which the forward writes. Args: narrow: in the weight's dtype, if no buffer is given.
    """
    if narrow and call.grad_weight_into is None:
        target = GradWeight.prepare(call, weight, True)
        assert target.returned is not None and target.into is not None
        return target.returned, target.into.rows
    shape = call.plan.shard.num_classes, weight.shape[1]
    rows = weight.new_empty(shape, dtype=accumulate_dtype(weight.dtype))
    return rows, rows


def scaled(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    call: Call,
    computed: Computed,
    upstream: Tensor,  # [] the gradient by the loss
    scale: Callable[[Tensor, Tensor], None],  # multiplies a tensor by [], in place
) -> Grads:
    """Scales the gradients in place: there is room for one gradient of the weight, not for two. No
    collectives."""
    by_hidden, by_bias, by_weight = computed.hidden, computed.bias, computed.weight
    computed.clear()
    for grad in (by_hidden, by_bias, by_weight):
        if grad is not None:
            scale(grad, upstream)
    if by_weight is not None and (
        call.grad_weight_into is not None
        or by_weight.dtype != weight.dtype
        or by_weight.shape != weight.shape
    ):
        target = GradWeight.prepare(call, weight, True)
        assert target.into is not None
        if target.into.accumulate:
            target.into.rows.add_(by_weight)
        else:
            target.into.rows.copy_(by_weight)
        by_weight = target.returned
    by_hidden = None if by_hidden is None else by_hidden.to(hidden.dtype)
    return Grads(by_hidden, by_weight, pad_bias(by_bias, bias), None)


def grads_in_forward(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    upstream_of: Callable[[Stats, slice], Upstream],
    *,
    hidden: bool,  # whether its gradient is needed; so with bias
    weight: Tensor | None,  # [V_local, D] memory for its gradient, written; None: not needed
    bias: bool,
    tail_mass: bool,  # whether to return it
) -> tuple[LocalGrads, Tensor | None]:
    """Takes all four steps, for an upstream gradient of 1.

    `Plan.by_chunks` decides between two ways. A chunk of tokens keeps its logits, so every column
    takes three matrix products instead of four. Otherwise all tokens are one chunk, and its columns
    are filtered.

    Args: upstream_of: returns the upstream gradient of a slice of tokens, from their merged
        statistics.
    Returns:
        The gradients; hidden's is [num_rows, D], in hidden's dtype or in fp32.
        `Plan.tail_mass` [N]; None without `tail_mass`.
    Collectives: by chunks those of `require_same_chunks`; those of `sharded.forward` for each
        chunk, those of step 4 once, and those of `Plan.tail_mass`.
    """
    if plan.by_chunks:
        grads = _grads_by_chunks(tokens, head, plan, upstream_of, hidden, weight, bias)
        dtype = accumulate_dtype(head.weight.dtype)
        return grads, head.weight.new_zeros(len(tokens), dtype=dtype) if tail_mass else None
    in_fp32 = not holds_unscaled_gradients(head.weight.dtype)
    written = None if weight is None else weight.dtype
    expected = plan.expect(tokens, hidden=hidden, weight=written, bias=bias, in_fp32=in_fp32)
    by_hidden = torch.float32 if in_fp32 else tokens.hidden.dtype
    scaled = _dtypes(by_hidden if hidden else None, weight, bias)
    expected = replace(expected, scaled=scaled)
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
        weight=None if weight is None else WeightGrad(weight, accumulate=False),
        bias=bias,
        store=store,
        in_fp32=in_fp32,
    )
    return grads, tail


def _dtypes(
    by_hidden: torch.dtype | None, by_weight: Tensor | None, by_bias: bool
) -> tuple[torch.dtype, ...]:
    """Returns the dtypes of the gradients that `backward` scales; a bias's is fp32."""
    weight, bias = getattr(by_weight, "dtype", None), torch.float32 if by_bias else None
    return tuple({dtype for dtype in (by_hidden, weight, bias) if dtype is not None})


def holds_unscaled_gradients(dtype: torch.dtype) -> bool:
    """Tells whether a dtype holds gradients for an upstream gradient of 1. In fp16 those of a mean
    over tokens would be below the smallest number."""
    return dtype != torch.float16


def holds_sum(dtype: torch.dtype, num_tokens: int, plan: Plan) -> bool:
    """Tells whether the weight's gradient, for an upstream gradient of 1, waits for the backward in
    the weight's dtype; otherwise it does so in the accumulation dtype."""
    if not holds_unscaled_gradients(dtype):
        return False
    if not plan.by_chunks:
        return True
    num_chunks = -(-num_tokens // tokens_of_chunk(num_tokens, plan, dtype))
    return plan.backend.traits.narrow_logits and num_chunks <= MOST_ROUNDINGS


def tokens_of_chunk(num_tokens: int, plan: Plan, dtype: torch.dtype) -> int:
    narrow = plan.backend.traits.narrow_logits
    logit_bytes, parts = (dtype.itemsize, NUM_CHUNKS) if narrow else (4, None)
    return chunk_tokens(num_tokens, plan, logit_bytes, parts=parts)


@dataclass(frozen=True)
class _Sums:
    """The gradients of all chunks; None where not needed."""

    hidden: Tensor | None  # [N, D] of the computed tokens
    weight: Tensor | None  # [V_local, D]
    bias: Tensor | None  # [V_local] in the accumulation dtype
    late: LateTargets | None  # left out of `weight`


def _grads_by_chunks(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    upstream_of: Callable[[Stats, slice], Upstream],
    needs_hidden: bool,
    grad_weight: Tensor | None,
    needs_bias: bool,
) -> LocalGrads:
    """Takes steps 1 to 3 for each chunk of tokens, whose logits stay in memory from step 1 to step
    3, and then step 4 once for all tokens."""
    weight, num_tokens = head.weight, len(tokens)
    wide = dtype = accumulate_dtype(weight.dtype)
    if plan.backend.traits.narrow_logits and holds_unscaled_gradients(weight.dtype):
        dtype = weight.dtype
    total = plan.hidden_sum(tokens, dtype)
    hidden = bias = None
    if needs_hidden:
        # Ranks add up what is not rounded yet.
        kept = dtype if total.is_local else wide
        hidden = weight.new_empty((num_tokens, weight.shape[1]), dtype=kept)
    if needs_bias:
        bias = weight.new_zeros(weight.shape[0], dtype=wide)
    size = tokens_of_chunk(num_tokens, plan, weight.dtype)
    late, add_late = None, plan.backend.add_late_targets
    if add_late is not None and grad_weight is not None:
        late = _late_targets(grad_weight, num_tokens, size)
    of_chunks = late if num_tokens > size else None
    sums, room = _Sums(hidden, grad_weight, bias, of_chunks), plan.room(tokens, head)
    written = None if grad_weight is None else grad_weight.dtype
    expected = replace(
        plan.expect(tokens, hidden=needs_hidden, weight=written, bias=needs_bias),
        hidden=_sum_of_chunk(wide, len(tokens)) if needs_hidden else None,
        scaled=_dtypes(dtype if needs_hidden else None, grad_weight, needs_bias),
        by_chunks=True,
        # Later calls may have more chunks than one.
        late_targets=late is not None,
    )
    plan.warm_up(tokens, head, expected, None)
    require_same_chunks(size, weight.device, plan.group)
    # Without tokens there is one empty chunk, which gives statistics and gradients their shapes.
    chunks, start, places = tokens.chunks(size), 0, None
    if tokens.count is not None:
        places = torch.arange(len(chunks[0]), device=weight.device)
    for chunk in chunks:
        at = slice(start, start + len(chunk))
        _add_chunk(sums, chunk.alone(places), at, head, plan, upstream_of, room)
        start = at.stop
    if sums.late is not None:
        assert add_late is not None and grad_weight is not None
        add_late(tokens, sums.late.grads, grad_weight)
    if hidden is not None:
        hidden = total.of_tokens(hidden, tokens.rows)
    return LocalGrads(hidden, bias)


def _late_targets(grad_weight: Tensor, num_tokens: int, size: int) -> LateTargets | None:
    """Returns memory for late targets if the sum over chunks is rounded; else None."""
    wide = accumulate_dtype(grad_weight.dtype)
    if grad_weight.dtype == wide:
        return None
    grads, sums = (
        grad_weight.new_empty(number, dtype=wide) for number in (num_tokens, len(grad_weight))
    )
    return LateTargets(grads, sums, num_tokens, size)


def _add_chunk(
    sums: _Sums,
    chunk: Tokens,
    at: slice,  # of all tokens
    head: Head,
    plan: Plan,
    upstream_of: Callable[[Stats, slice], Upstream],
    room: Room,
) -> None:
    """Takes steps 1 to 3 of a chunk. What it allocates is freed when it returns: the next chunk's
    logits take that memory."""
    weight = local_sum = None
    if sums.weight is not None:
        late = sums.late and replace(sums.late, grads=sums.late.grads[at])
        weight = WeightGrad(sums.weight, at.start > 0, late)
    if sums.hidden is not None:
        local_sum = _sum_of_chunk(accumulate_dtype(head.weight.dtype), len(chunk))
    store = plan.backend.store_for_chunk(head, len(chunk))
    stats, _ = sharded.forward(chunk, head, plan, score=False, store=store)
    request = BackwardRequest(
        stats=stats,
        upstream=sharded.of_logits(upstream_of(stats, at), chunk, plan),
        kept=None,
        hidden=local_sum,
        weight=weight,
        bias=sums.bias is not None,
        store=store,
        room=room,
    )
    grads = plan.backend.backward(chunk, head, request)
    if sums.hidden is not None and grads.hidden is not None:
        sums.hidden[at] = grads.hidden
    if sums.bias is not None and grads.bias is not None:
        sums.bias.add_(grads.bias)


def _sum_of_chunk(dtype: torch.dtype, num_tokens: int) -> SumOverRanks:
    """Builds the sum over one rank: step 4 follows once, over all chunks."""
    return SumOverRanks(None, scatter=False, num_rows=num_tokens, dtype=dtype)
