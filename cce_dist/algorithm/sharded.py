"""The algorithm. Read this first.

Every rank holds some rows of the LM head. A loss and its gradients take four steps. Steps 2 and 4
communicate; step 1 also does, if several ranks choose columns in the forward:

    1  local statistics  log-sum-exp and target logit of this rank's columns    a backend's forward
    2  merge             log-add-exp over the ranks: all of them get one lse    ranks/merge.py
    3  local gradients   d_logits of the columns that matter, times hidden      a backend's backward
                         and weight
    4  sum               every rank's part of the hidden gradient               ranks/hidden_sum.py

`forward` is steps 1 and 2, `backward` is 3 and 4; `choose_columns` says between them which columns
matter, if the gradient is filtered. plan.py builds each step's request to the backend,
backends/protocol.py defines a backend, and backends/choose.py chooses one.

The group may be tensor-parallel ranks, pipeline ranks, or their product.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from cce_dist.algorithm import invariant
from cce_dist.algorithm.plan import Plan
from cce_dist.backends.protocol import BackwardRequest, Kept, LogitStore, Scores, WeightGrad
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, LocalGrads, Tokens, Upstream
from cce_dist.ranks.merge import merge_stats


def forward(
    tokens: Tokens, head: Head, plan: Plan, *, score: bool, store: LogitStore | None = None
) -> tuple[Stats, Scores | None]:
    """Takes steps 1 and 2.

    Args:
        score: record the scores from which `choose_columns` chooses.
        store: memory of `Plan.store_for`, which the forward fills.
    Returns:
        Statistics over the whole vocabulary, [N] each, the same bits on every rank.
        This rank's scores of its columns; None without `score`.
    Collectives: those of `merge_stats`; before them all-gathers of [N] fp32, if several ranks
        choose columns in the forward.
    """
    if plan.options.invariant:
        return invariant.forward(tokens, head, plan), None
    request = plan.forward_request(tokens, head, score=score, store=store)
    local, scores = plan.backend.forward(tokens, head, request)
    kernels = plan.backend.merge_kernels
    return merge_stats(local, plan.shard, plan.group, tokens.count, kernels), scores


def choose_columns(
    tokens: Tokens, head: Head, plan: Plan, scores: Scores | None, stats: Stats
) -> Kept | None:
    """Chooses the columns that each block keeps, by the merged lse; None: all. No collectives."""
    rule = plan.column_filter(score=True)
    if scores is None or rule is None:
        return None
    return plan.backend.keep(tokens, head, scores, stats.lse, rule, plan.room(tokens, head))


def backward(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    stats: Stats,  # of `forward`
    upstream: Upstream,  # the loss's gradient with respect to each token's statistics
    *,
    kept: Kept | None,  # of `choose_columns`
    hidden: bool,  # whether its gradient is needed; so with bias
    weight: WeightGrad | None,  # None: not needed
    bias: bool,
    store: LogitStore | None = None,  # as the forward left it
    in_fp32: bool = False,  # the hidden gradient is fp32, not of hidden's dtype
) -> LocalGrads:
    """Takes steps 3 and 4. A backend starts step 4 itself, as early as it can: see `HiddenSum`.

    Collectives: those of `reduce_grad_hidden`; under sequence parallel hidden is gathered first.
    """
    upstream = of_logits(upstream, tokens, plan)
    if plan.options.invariant:
        return invariant.backward(
            tokens, head, plan, stats, upstream, hidden=hidden, weight=weight, bias=bias
        )
    dtype = torch.float32 if in_fp32 else tokens.hidden.dtype
    request = BackwardRequest(
        stats=stats,
        upstream=upstream,
        kept=kept,
        hidden=plan.hidden_sum(tokens, dtype) if hidden else None,
        weight=weight,
        bias=bias,
        store=store,
        room=plan.room(tokens, head),
    )
    return plan.backend.backward(tokens, head, request)


def of_logits(upstream: Upstream, tokens: Tokens, plan: Plan) -> Upstream:
    """Returns the loss's gradient with respect to statistics of logits before a token's scale."""
    if plan.shard.vocab_size == 1 and upstream.nll is not None:
        # One class has probability 1: a difference of two roundings is no gradient.
        upstream = replace(upstream, nll=0 * upstream.nll)
    # The chain rule: a token's logits are multiplied by its scale.
    return upstream if tokens.scale is None else upstream.scaled(tokens.scale)
