"""invariant=True: the steps of `sharded` for each of eight segments of the vocabulary.

A segment's columns, and the order in which they are summed, follow from the size of the head alone.
So a token's statistics and its row of the hidden gradient have the same bits in every batch, and on
1, 2, 4 and 8 ranks. docs/design/loss.md#invariance.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cce_dist.algorithm.plan import Plan
from cce_dist.backends.protocol import BackwardRequest, WeightGrad
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, LocalGrads, Tokens, Upstream, accumulate_dtype
from cce_dist.ranks.hidden_sum import SumOverRanks
from cce_dist.ranks.segments import (
    SEGMENTS,
    PairwiseSum,
    merge_segments,
    segment_columns,
    sum_in_pairs,
)
from cce_dist.ranks.transport import group_size


def forward(tokens: Tokens, head: Head, plan: Plan) -> Stats:
    """Takes steps 1 and 2. Collectives: those of `merge_segments`."""
    segment = segment_columns(plan.shard, plan.group)
    request = replace(plan.forward_request(tokens, head, score=False), segment=segment)
    local, _ = plan.backend.forward(tokens, head, request)
    return merge_segments(local, plan.shard, plan.group, tokens.count)


def backward(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    stats: Stats,
    upstream: Upstream,
    *,
    hidden: bool,
    weight: WeightGrad | None,
    bias: bool,
) -> LocalGrads:
    """Takes steps 3 and 4. Arguments: as of `sharded.backward`. At most four hidden gradients in
    the accumulation dtype are in memory at once. Collectives: those of `sum_in_pairs`."""
    if tokens.fill is not None:
        tokens.fill()
    tokens, dtype = replace(tokens, fill=None), accumulate_dtype(tokens.hidden.dtype)
    total, biases = PairwiseSum(), []
    segment = segment_columns(plan.shard, plan.group)
    for number in range(SEGMENTS // group_size(plan.group)):
        start, stop = (min(i * segment, len(head.weight)) for i in (number, number + 1))
        if start == stop:
            if hidden:
                total.add(tokens.hidden.new_zeros(tokens.hidden.shape, dtype=dtype))
            continue
        local = SumOverRanks(None, scatter=False, num_rows=tokens.hidden.shape[0], dtype=dtype)
        rows = weight and WeightGrad(weight.rows[start:stop], weight.accumulate)
        part = head.rows(start, stop)
        request = BackwardRequest(
            stats=stats,
            upstream=upstream,
            kept=None,
            hidden=local if hidden else None,
            weight=rows,
            bias=bias,
            store=None,
            room=plan.room(tokens, part),
            invariant=True,
        )
        targets = tokens.local_targets - start
        inside = (targets >= 0) & (targets < stop - start)
        of_segment = replace(tokens, local_targets=targets.masked_fill(~inside, -1))
        grads = plan.backend.backward(of_segment, part, request)
        if grads.hidden is not None:
            total.add(grads.hidden)
        biases.append(grads.bias)
    grad_hidden = grad_bias = None
    if hidden:
        grad_hidden = sum_in_pairs(
            total.total,
            plan.group,
            scatter=plan.options.sequence_parallel,
            dtype=tokens.hidden.dtype,
        )
    if bias:
        empty = tokens.hidden.new_zeros(0, dtype=dtype)
        grad_bias = torch.cat([empty, *biases])
    return LocalGrads(grad_hidden, grad_bias)
