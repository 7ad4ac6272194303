"""Statistics that few callers ask for, merged over the splits of the forward."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.filter.tail import mean_column
from cce_dist.backends.triton.kernels.forward.extras import merge_extras_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, Wanted
from cce_dist.options import TOKEN_BLOCK

# Fields of each split: see `add_extras`. `finish_kernel` merges the fields SQUARES and UNKEPT.
NUM_EXTRAS = 8


def in_order(stats: Stats, order: Tensor) -> Stats:
    """Returns statistics in which token i stands at place order[i]. Copies all fields at once."""
    packed = stats.pack()
    return stats.unpack(torch.empty_like(packed).index_copy_(1, order, packed))


def sums_softcapped(wanted: Wanted, head: Head) -> bool:
    """Tells whether the forward sums the mean logit: a softcapped one is not linear in hidden."""
    return wanted.smooth_logit and head.softcap is not None


def merge_extras(
    extras: Tensor,
    shape: Tensor,
    count: Tensor,
    targets: Tensor,
    wanted: Wanted,
    head: Head,
    segments: int,
) -> tuple[Tensor, ...]:
    """Merges the statistics of the splits of each segment.

    Args:
        extras: [NUM_EXTRAS, size], see `add_extras`.
        shape: [3] int32, see `forward_kernel`.
        count: [1] int32, the tokens that count.
        targets: [N_padded].
    Returns: the rows of `merge_extras_kernel`, [segments, N_padded] each; what is not wanted has
        any value.
    """
    num_tokens, block = len(targets), 128
    merged = extras.new_empty(segments, NUM_EXTRAS - 1, num_tokens)
    start(merge_extras_kernel, (triton.cdiv(num_tokens, block), segments))(
        count,
        shape,
        extras,
        targets,
        merged,
        head.vocab_size,
        num_tokens,
        extras.shape[1],
        TOKENS=TOKEN_BLOCK,
        BLOCK_N=block,
        HAS_ARGMAX=wanted.correct or wanted.moments,
        HAS_MOMENTS=wanted.moments,
        HAS_SMOOTH=sums_softcapped(wanted, head),
    )
    return merged.unbind(1)


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
