"""The upstream gradients as the backward's kernels read them, one value a token."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cce_dist.local_triton_inputs import pad_tokens
from cce_dist.options import TOKEN_BLOCK
from cce_dist.partials import Head, Tokens, Upstream

LOG2E = math.log2(math.e)
# Above any logit: every exp2(logit - HIGHEST) is 0.
HIGHEST = 1e30


def probability_pull(upstream: Upstream, lse: Tensor) -> Tensor:
    """The upstream gradient of each token's probabilities, [N]."""
    parts = [g for g in (upstream.nll, upstream.lse) if g is not None]
    return sum(parts[1:], parts[0]) if parts else torch.zeros_like(lse)


def choose_unit(upstream: Upstream, head: Head, weight: Tensor, lse: Tensor) -> Tensor:
    """A power of two near the largest upstream gradient, [1]: a mean over tokens puts d_logits
    below fp16's smallest number."""
    given = [g for g in (upstream.nll, upstream.lse, upstream.entropy) if g is not None]
    if upstream.smooth_logit is not None and head.softcap is not None:
        given.append(upstream.smooth_logit)
    if weight.element_size() > 2 or not given:
        return lse.new_ones(1)
    largest = torch.stack([g.abs().amax() for g in given]).amax() * abs(head.logit_scale)
    return largest.clamp_min(2.0**-100).log2().floor().exp2().view(1)


def in_order(values: Tensor, order: Tensor | None) -> Tensor:
    """[..., N] of the caller's tokens -> of the blocks'."""
    return values if order is None else values.index_select(-1, order)


def token_pull(
    tokens: Tokens,
    head: Head,
    lse: Tensor,
    target_logit: Tensor,
    upstream: Upstream,
    entropy: Tensor | None,
    unit: Tensor,
    count: Tensor,
    order: Tensor | None,  # [N] of the blocks' tokens
    num_blocks: int,
) -> Tensor:
    """What d_logits needs of each token, [7, num_blocks * 128]: see `sdd_task`.

    A token that doesn't count has upstream gradients 0 and an lse above any logit.
    """
    zero = torch.zeros_like(lse)
    squashed = upstream.smooth_logit if head.softcap is not None else None
    factor = head.logit_scale / unit
    counts = torch.arange(len(tokens), device=lse.device) < count
    rows = [
        probability_pull(upstream, lse) * factor,
        zero if upstream.nll is None else upstream.nll * factor,
        zero if upstream.entropy is None else upstream.entropy * factor,
        zero if entropy is None else entropy,
        zero if squashed is None else squashed * (factor / head.vocab_size),
    ]
    stacked = torch.stack([*rows, lse * LOG2E, target_logit * LOG2E]).where(counts, 0)
    stacked[5].masked_fill_(~counts, HIGHEST)
    stacked = pad_tokens(in_order(stacked, order), num_blocks * TOKEN_BLOCK, 0)
    if stacked.shape[1] > len(tokens):
        stacked[5, len(tokens) :] = HIGHEST
    return stacked.contiguous()
