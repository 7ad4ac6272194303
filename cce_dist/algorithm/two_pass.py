"""gradient="filtered" and "exact": a forward, and a backward that computes again the logits that it
needs. Neither records autograd's graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.algorithm import sharded
from cce_dist.algorithm.call import Call, GradWeight, pad_bias
from cce_dist.backends.protocol import ExpectedBackward, Kept, LogitStore, Scores
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, Tokens, Upstream


@dataclass(frozen=True)
class Selection:
    """The columns that the backward keeps, or the scores from which it chooses them."""

    scores: Scores | None  # None: columns are not scored, or `kept` is chosen already
    kept: Kept | None


@dataclass(frozen=True)
class State:
    """The tensors and options that a forward leaves to its backward, but for hidden, weight, bias
    and the caller's buffer."""

    call: Call
    scale: Tensor | None
    stats: Stats
    selection: Selection


@dataclass
class Once:
    """Memory that the first backward uses up. A second one over a retained graph has none."""

    target: GradWeight | None = None  # None: the backward allocates it
    store: LogitStore | None = None

    def take(self) -> tuple[GradWeight | None, LogitStore | None]:
        target, store = self.target, self.store
        self.clear()
        return target, store

    def clear(self) -> None:
        self.target = self.store = None


class Forward(NamedTuple):
    """The results of `forward`; state and memory for a backward are None without `Call.record`."""

    stats: Stats  # over the whole vocabulary, [N] each
    tail_mass: Tensor | None  # [N]; None without `Call.tail_mass`
    state: State | None
    once: Once | None


class Needs(NamedTuple):
    """Whether these need a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    scale: bool = False

    @property
    def any_of_head(self) -> bool:
        return self.hidden or self.weight or self.bias


class Grads(NamedTuple):
    """The gradients; None: not needed."""

    hidden: Tensor | None  # [num_rows, D] as hidden
    weight: Tensor | None  # [V_local, D] as weight; None as well with the caller's buffer
    bias: Tensor | None  # [V_local] as bias
    scale: Tensor | None  # [N]


def forward(
    hidden: Tensor,  # [num_rows, D]
    weight: Tensor,  # [V_local, D]
    bias: Tensor | None,
    scale: Tensor | None,  # [N] each token's factor of its logits
    call: Call,
    needs: Needs,
) -> Forward:
    """Takes steps 1 and 2 of `sharded`, and prepares the others. Collectives: those of
    `Plan.require_same_sizes`, `sharded.forward` and `Plan.tail_mass`."""
    call.plan.require_same_sizes(hidden, len(call.local_targets))
    tokens, head = call.tokens(hidden, scale), call.head(weight, bias)
    once = Once()
    if call.record and needs.any_of_head:
        expected = call.expect(tokens, weight.dtype, needs[:3])
        _store_logits(once, call, tokens, head, weight, expected)
        call.plan.warm_up(tokens, head, expected, once.store)
    score = call.record or call.tail_mass
    stats, scores = sharded.forward(tokens, head, call.plan, score=score, store=once.store)
    kept = tail = None
    if call.tail_mass:
        kept = sharded.choose_columns(tokens, head, call.plan, scores, stats)
        tail = call.plan.tail_mass(kept, stats.lse)
        scores = None
    if not call.record:
        return Forward(stats, tail, None, None)
    # The caller keeps the head's tensors for as long as autograd does.
    left = replace(call, quantized=None, quantize_once=None, grad_weight_into=None)
    others = {"entropy": stats.entropy, "lse_rest": stats.lse_rest}
    kept_stats = Stats(stats.lse, stats.target_logit, stats.smooth_logit, **others)
    return Forward(stats, tail, State(left, scale, kept_stats, Selection(scores, kept)), once)


def _store_logits(
    once: Once, call: Call, tokens: Tokens, head: Head, weight: Tensor, expected: ExpectedBackward
) -> None:
    """Allocates memory for logits; some of it may be memory of the weight's gradient."""
    spare = None
    if call.plan.keeps_logits and call.plan.screen is None:
        once.target = GradWeight.prepare(call, weight, expected.weight is not None)
        into = once.target.into
        spare = None if into is None or into.accumulate else into.rows
    once.store = call.plan.store_for(tokens, head, expected, spare)


def backward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: State,
    once: Once,
    upstream: Upstream,
    needs: Needs,
    grad_weight_into: Tensor | None = None,  # as in the forward's `Call`
) -> Grads:
    """Takes steps 3 and 4 of `sharded`. Collectives: those of `sharded.backward`."""
    call = state.call
    if grad_weight_into is not None:
        call = replace(call, grad_weight_into=grad_weight_into)
    target, store = once.take()
    scale, stats = state.scale, state.stats
    grad_scale = None
    if needs.scale:
        assert scale is not None
        grad_scale = _grad_of_scale(scale, stats, upstream)
    if not needs.any_of_head:
        return Grads(None, None, None, grad_scale)
    tokens, head = call.tokens(hidden, scale, defer_fill=True), call.head(weight, bias)
    selection = state.selection
    kept = selection.kept
    if selection.scores is not None:
        kept = sharded.choose_columns(tokens, head, call.plan, selection.scores, stats)
    if target is None:
        target = GradWeight.prepare(call, weight, needs.weight)
    out = sharded.backward(
        tokens,
        head,
        call.plan,
        replace(stats, smooth_logit=None),
        upstream,
        kept=kept,
        hidden=needs.hidden,
        weight=target.into,
        bias=needs.bias,
        store=store,
    )
    grad_hidden = None if out.hidden is None else out.hidden.to(hidden.dtype)
    return Grads(grad_hidden, target.returned, pad_bias(out.bias, bias), grad_scale)


def _grad_of_scale(scale: Tensor, stats: Stats, upstream: Upstream) -> Tensor:
    """Returns [N], the gradient by the factor s of a token's logits. d lse / ds is the mean logit,
    lse - entropy, divided by s; d target_logit / ds is target_logit / s."""
    # The entropy's derivative by s takes the logits' variance: `token_logprobs` refuses it.
    assert upstream.entropy is None and stats.entropy is not None
    total = torch.zeros_like(scale)
    if upstream.nll is not None:
        total = total + upstream.nll * (stats.nll - stats.entropy)
    if upstream.lse is not None:
        total = total + upstream.lse * (stats.lse - stats.entropy)
    return total / scale


def plain_outputs(stats: Stats, tail: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the statistics that are not differentiable, in the order of `Finish.with_stats`."""
    mean = stats.mean_logit
    if mean is not None and stats.origin_logit is not None:
        mean = stats.origin_logit + mean
    moments = (stats.max_logit, stats.target_is_argmax, mean, stats.m2_logit)
    return (stats.sum_p2, *moments, stats.screened, tail)
