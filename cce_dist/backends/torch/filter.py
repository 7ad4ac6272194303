"""The filter in eager torch: from the forward's column masses to each block's kept columns."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from cce_dist.backends.eight_bits import NEAR_THRESHOLD_NATS
from cce_dist.backends.protocol import ColumnFilter, Room
from cce_dist.backends.torch.tiles import (
    TileSize,
    logits_tile,
    max_over_blocks,
    operand_dtype,
    spans,
)
from cce_dist.core.types import Head, Tokens
from cce_dist.options import DRAW_FACTOR, TOKEN_BLOCK


@dataclass(frozen=True)
class ColumnMasses:
    """The forward's scores for the filter, one value per column and block of 128 tokens.

    `mass` is an upper bound of sum_i p_iv softcap'(z_iv) over the block's tokens: it is normalised
    by the best lower bound of each token's lse at the time. `tile_bound` is that lower bound; the
    mass is tightened by it once lse is known. docs/design/filter.md#column-masses.
    """

    mass: Tensor  # [num_blocks, V_local]
    largest: Tensor | None  # [num_blocks, V_local] largest p of one token, for Filter(eps=...)
    tile_bound: Tensor  # [num_tiles, N]
    tile_columns: int
    log_slope_sum: Tensor  # [N] log sum_v exp(z_v) softcap'(z_v) over the shard
    # Where a screened forward has already chosen: the kept columns, [num_blocks, V_local] bool; and
    # the log of the sum above over the dropped columns, [N].
    mask: Tensor | None = None
    log_dropped: Tensor | None = None


@dataclass(frozen=True)
class ColumnMask:
    """The columns that each block of tokens keeps, and the marginals of those it drops."""

    mask: Tensor  # [num_blocks, V_local] bool
    dropped_mass: Tensor  # [N] sum of p softcap'(z) over this shard's dropped columns
    share: Tensor | None  # [num_blocks, V_local], rows sum to 1 or 0; None: no tail
    drawn: Tensor | None = None  # [num_blocks, V_local] bool: columns that stand in for others
    times: Tensor | None = None  # [V_local] how many times a drawn column counts

    @property
    def scores(self) -> None:
        """None: the masses are not needed any more."""
        return None


def keep_columns(
    tokens: Tokens,
    head: Head,
    scores: ColumnMasses,
    lse: Tensor,  # [N] over all ranks, without `Stats.lse_rest`
    rule: ColumnFilter,
    room: Room,
) -> ColumnMask | None:
    """Turns scores into the columns that each block keeps; None if nothing is dropped.

    A column is kept if its score reaches the threshold or is NaN, or if it is the target of one of
    the block's tokens. A screened forward's own choice stays. If the forward has not summed the
    dropped mass, the logits of the kept columns, or of the dropped ones where they are fewer, are
    computed again.
    """
    if len(tokens) == 0:
        return None
    mask = scores.mask
    if mask is None:
        mask = keep_targets(reaches(scores, lse, rule), tokens)
    if bool(mask.all()):
        return None
    if scores.log_dropped is None:
        size = TileSize.choose(head.weight, room.workspace_bytes)
        total = (scores.log_slope_sum - lse).exp().to(lse.dtype)
        dropped = _dropped_mass(tokens, head, lse, mask, total, size)
    else:
        dropped = (scores.log_dropped - lse).exp()
    if not rule.tail:
        return ColumnMask(mask, dropped, None)
    mass = scores.mass * _tighten(scores, lse)
    drawn = times = None
    if rule.draws:
        # The seed follows from the data: the same inputs draw the same, the next step draws anew.
        seed = scores.log_slope_sum[:1].float().view(torch.int32)
        draw_level = draw_levels_of(mask.shape[1], seed)
        full = _block_tokens(len(tokens), mass) / TOKEN_BLOCK
        ratio = DRAW_FACTOR * rule.threshold * full / mass.clamp_min(torch.finfo(mass.dtype).tiny)
        exponent = torch.frexp(ratio).exponent - 1
        drawn = (exponent.clamp_min(0) + 1 == draw_level) & (mass > 0) & ~mask
        times = torch.exp2(draw_level.to(mass.dtype))
    return ColumnMask(mask, dropped, _shares(mass, mask), drawn, times)


def shares_of(scores: ColumnMasses, lse: Tensor, mask: Tensor) -> Tensor:
    """Returns the share of each column in the mass that its block drops, [num_blocks, V_local]."""
    assert scores.mass is not None
    return _shares(scores.mass * _tighten(scores, lse), mask)


def _shares(mass: Tensor, mask: Tensor) -> Tensor:
    """Returns each column's share of its block's dropped mass. Args: mass: overwritten."""
    share = mass.masked_fill_(mask, 0)
    share /= share.sum(1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
    return share


def reaches(scores: ColumnMasses, lse: Tensor, rule: ColumnFilter) -> Tensor:
    """Marks columns whose score reaches the threshold by all ranks' lse, [num_blocks, V_local]."""
    score = scores.largest if rule.by_largest else scores.mass
    assert score is not None
    full = 1 if rule.by_largest else _block_tokens(lse.shape[0], score) / TOKEN_BLOCK
    # A token of NaN makes its block's scores NaN: the others' gradients need every column then.
    return ~(score * _tighten(scores, lse) < rule.threshold * full)


def mark_near_threshold(scores: ColumnMasses, lse: Tensor, threshold: float) -> Tensor:
    """Marks columns whose mass is at most NEAR_THRESHOLD_NATS from the threshold,
    [num_blocks, V_local]."""
    assert scores.mass is not None
    mass = scores.mass * _tighten(scores, lse)
    least = threshold * _block_tokens(lse.shape[0], mass) / TOKEN_BLOCK
    reach = math.exp(NEAR_THRESHOLD_NATS)
    return (mass * reach >= least) & (mass < least * reach)


def keep_targets(mask: Tensor, tokens: Tokens) -> Tensor:
    """Marks the targets of a block's tokens as kept, in `mask` [num_blocks, V_local] in place."""
    here = (tokens.local_targets >= 0).nonzero()[:, 0]
    mask[here // TOKEN_BLOCK, tokens.local_targets[here]] = True
    return mask


def _tighten(scores: ColumnMasses, lse: Tensor) -> Tensor:
    """Returns the factor that tightens the forward's masses, once lse is known."""
    tighten = max_over_blocks((scores.tile_bound - lse).T).exp()  # [blocks, tiles]
    return tighten.repeat_interleave(scores.tile_columns, 1)[:, : scores.mass.shape[1]]


def draw_levels_of(num_columns: int, seed: Tensor) -> Tensor:
    """Draws each column's level j >= 1, with probability 2^-j: docs/design/filter.md#drawn-columns.

    Args:
        seed: [1] int32
    Returns:
        [num_columns] int64, at most 24; the same as `draw_level_of` in
            kernels/filter/column_lists.py.
    """
    low = 2**32 - 1
    column = torch.arange(num_columns, device=seed.device)
    x = ((column * 2654435761) ^ seed) & low
    x = ((x ^ (x >> 16)) * 2246822507) & low
    x = ((x ^ (x >> 13)) * 3266489909) & low
    x ^= x >> 16
    return 25 - torch.frexp(((x >> 8) | 1).float()).exponent


def _block_tokens(num_tokens: int, like: Tensor) -> Tensor:
    """Returns the number of tokens in each block, [num_blocks, 1]: the last may have fewer, and so
    less mass."""
    full = like.new_full((like.shape[0], 1), TOKEN_BLOCK)
    full[-1] = num_tokens - (like.shape[0] - 1) * TOKEN_BLOCK
    return full


def _dropped_mass(
    tokens: Tokens, head: Head, lse: Tensor, mask: Tensor, total: Tensor, size: TileSize
) -> Tensor:
    """Sums p softcap'(z) over each token's dropped columns, [N]."""
    dropped = torch.zeros_like(lse)
    for block, (i0, i1) in enumerate(spans(len(tokens), TOKEN_BLOCK)):
        hidden = tokens.take(i0, i1).to(operand_dtype(head.weight))
        few_kept = bool(mask[block].sum() * 2 <= mask.shape[1])
        wanted = mask[block] if few_kept else ~mask[block]
        summed = torch.zeros_like(lse[i0:i1])
        for index in wanted.nonzero()[:, 0].split(size.columns):
            p, slope = gathered_logits(hidden, head, index, tokens.scale_of(i0, i1))
            p.sub_(lse[i0:i1, None]).exp_()
            summed += (p if slope is None else p.mul_(slope)).sum(1)
        dropped[i0:i1] = (total[i0:i1] - summed).clamp_min_(0) if few_kept else summed
    return dropped


def gathered_logits(
    hidden: Tensor, head: Head, index: Tensor, scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Computes (z, softcap'(z)) of some tokens and the columns `index`, [n, len(index)]."""
    columns = head.weight.index_select(0, index).to(hidden.dtype)
    bias = None if head.bias is None else head.bias[index]
    return logits_tile(hidden, columns, bias, head, scale)
