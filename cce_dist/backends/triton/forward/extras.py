"""Statistics that few callers ask for, merged over the splits of the forward in plain torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cce_dist.backends.triton.filter.tail import mean_column
from cce_dist.core.stats import Stats, merge_moments
from cce_dist.core.types import Head, Wanted

NUM_EXTRAS = 7


def in_order(stats: Stats, order: Tensor) -> Stats:
    """Returns statistics in which token i stands at place order[i]. Copies all fields at once."""
    packed = stats.pack()
    return stats.unpack(torch.empty_like(packed).index_copy_(1, order, packed))


def sums_softcapped(wanted: Wanted, head: Head) -> bool:
    """Tells whether the forward sums the mean logit: a softcapped one is not linear in hidden."""
    return wanted.smooth_logit and head.softcap is not None


def merge_extras(
    merged: Stats,
    extras: Tensor,
    stride: int,
    num_splits: Tensor,
    targets: Tensor,
    counts: Tensor,
    wanted: Wanted,
    head: Head,
) -> Stats:
    """Merges the statistics of each split into those that are merged already.

    Args:
        merged: [N] each, in the order of the packed tokens.
        extras: [NUM_EXTRAS, at least splits x stride]; what lies beyond the splits is not read.
        stride: distance of two splits, N_padded.
        num_splits: [] the number of splits.
        targets: [N_padded].
        counts: [N] bool.
    """
    top, _, origin, mean, m2, weighted, seen = _of_splits(extras, stride, num_splits, len(counts))
    if wanted.correct or wanted.moments:
        largest, column = largest_of(extras, stride, num_splits, len(counts))
        hit = (column == targets[: len(counts)]) & counts & (largest > -torch.inf)
        merged = replace(merged, max_logit=torch.where(counts, largest, 0))
        if wanted.correct:
            merged = replace(merged, target_is_argmax=hit.to(top.dtype))
    if wanted.moments:
        # The number of columns that a split saw is the same for every token that counts.
        parts = Stats(top, top, origin_logit=origin, mean_logit=mean, m2_logit=m2)
        moments = merge_moments(parts, seen[:, 0])
        merged = replace(
            merged,
            origin_logit=torch.where(counts, moments.origin_logit, 0),
            mean_logit=torch.where(counts, moments.mean_logit, 0),
            m2_logit=torch.where(counts, moments.m2_logit, 0),
        )
    if sums_softcapped(wanted, head):
        smooth = weighted.sum(0) / head.vocab_size
        merged = replace(merged, smooth_logit=torch.where(counts, smooth, 0))
    return merged


def _of_splits(
    extras: Tensor, stride: int, num_splits: Tensor, num_tokens: int
) -> tuple[Tensor, ...]:
    """Returns the fields, [splits, N] each; the first is -inf where there is no split."""
    splits = extras.shape[1] // stride
    top, *others = extras[:, : splits * stride].view(NUM_EXTRAS, splits, stride)[..., :num_tokens]
    used = torch.arange(splits, device=extras.device)[:, None] < num_splits
    return torch.where(used, top, -torch.inf), *others


def largest_of(
    extras: Tensor, stride: int, num_splits: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor]:
    """Returns the largest logit, and the first column that has it as a float, [N] each."""
    top, index, *_ = _of_splits(extras, stride, num_splits, num_tokens)
    largest = top.amax(0)
    return largest, torch.where(top == largest, index, torch.inf).amin(0)


def mean_logit_by_linearity(hidden: Tensor, counts: Tensor, head: Head) -> Tensor:
    """Computes sum_v class_weight_v z_v / V over this shard as
    E . (sum_v class_weight_v C_v) / V, [N]."""
    centroid, _ = mean_column(head, head.weight)
    mean = torch.mv(hidden.float(), centroid)
    if head.bias is not None:
        bias = head.bias.float()
        weights = head.class_weight
        mean = mean + (bias if weights is None else bias * weights).sum()
    return torch.where(counts, mean * (head.logit_scale / head.vocab_size), 0)
