"""A screened forward in eager torch: 8-bit logits, then exact ones of the columns that matter.

It computes the same as the kernels of triton/screened/steps.py, from the same 8-bit rows: as their
reference, and for machines without them. It saves no time. docs/design/screened.md
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cce_dist.backends.eight_bits import (
    MOST_LOST_SHARE,
    NEAR_THRESHOLD_COLUMNS,
    NEAR_THRESHOLD_NATS,
    correct_for_rounding,
    screen_dtype,
    selects_by_errors,
)
from cce_dist.backends.protocol import ForwardRequest
from cce_dist.backends.torch.filter import (
    ColumnMasses,
    gathered_logits,
    keep_targets,
    mark_near_threshold,
    reaches,
    shares_of,
)
from cce_dist.backends.torch.forward import statistics
from cce_dist.backends.torch.quantize import moments_of, quantize, quantize_for, quantize_weight
from cce_dist.backends.torch.tiles import TileSize, find_targets, operand_dtype, spans, squash
from cce_dist.core.stats import Stats, logaddexp_parts, merge_parts
from cce_dist.core.types import Head, QuantizedRows, Tokens
from cce_dist.options import TOKEN_BLOCK, Screen


def screened_statistics(
    tokens: Tokens, head: Head, request: ForwardRequest
) -> tuple[Stats, ColumnMasses | None]:
    """Computes statistics of every token over this rank's shard, from exact logits of kept columns
    and 8-bit logits of all others. Deterministic.

    Args: request: has a screen and a filter; its bounds are called once.
    Returns: as `forward.statistics`.
    """
    screen, rule = request.screen, request.filter
    assert screen is not None and rule is not None
    head = head.quantized_by(quantize_for, tokens, screen)
    empty = len(tokens) == 0 or head.weight.shape[0] == 0
    eight = None if empty else EightBit.of(tokens, head, screen)
    tiles = None if eight is None else eight.tiles
    stats, scores = statistics(tokens, head, request, tiles)
    assert scores is not None
    lse = stats.lse
    if request.bounds is not None:
        # By its own lse, a rank that holds little of a token's mass would keep its few columns.
        lse = logaddexp_parts(request.bounds(lse / math.log(2)) * math.log(2))
    if eight is None:
        return stats, scores
    mask = reaches(scores, lse, rule)
    share = float(mask.float().mean())
    if share <= screen.max_kept:
        size = TileSize.choose(head.weight, request.room.workspace_bytes)
        mask = keep_targets(mask, tokens)
        near_threshold = None
        if not rule.by_largest and selects_by_errors(eight.rows.values.dtype):
            near_threshold = mark_near_threshold(scores, lse, rule.threshold)
        screened = _Screened.of(
            eight, stats, scores, mask, near_threshold, size, (stats.lse - lse).exp()
        )
        # False for a NaN too.
        if screened.error <= screen.max_error:
            return screened.stats, screened.scores
    return statistics(tokens, head, request)


@dataclass(frozen=True)
class EightBit:
    """Hidden states and the weight in 8 bits, and the logits that follow from their products."""

    tokens: Tokens
    head: Head
    hidden: Tensor  # [N, stride] int8 | e4m3, the first D of a row
    of_tokens: Tensor  # [2, N] fp32: factor and shift of a product
    rows: QuantizedRows  # of the weight
    variance: Tensor  # [N] of a logit's error

    @classmethod
    def of(cls, tokens: Tokens, head: Head, screen: Screen) -> EightBit:
        hidden, rows = tokens.take(0, len(tokens)), head.quantized
        if rows is None:
            dtype = screen_dtype(screen, head.weight)
            rows = quantize_weight(head.weight, moments_of(hidden), dtype)
        values, of_tokens, size = quantize(
            hidden, rows.hidden_centre, 1 / rows.channel, rows.centre, rows.values.dtype
        )
        variance = correct_for_rounding(of_tokens, size, rows, head.logit_scale)
        return cls(tokens, head, values, of_tokens, rows, variance)

    def tiles(self, v0: int, v1: int) -> Callable[[int, int], tuple[Tensor, Tensor | None]]:
        """Computes tiles of the 8-bit logits: see `LogitTiles`."""
        return self._tiles_of(slice(v0, v1))

    def gathered(self, i0: int, i1: int, index: Tensor) -> tuple[Tensor, Tensor | None]:
        """Computes (z, softcap'(z)) of some tokens and the columns `index`, [n, len(index)]."""
        return self._tiles_of(index)(i0, i1)

    def tail_error(self, share: Tensor, size: TileSize) -> Tensor:
        """Computes the error of the log of each token's tail, [N] nats, that the columns of its
        block's tail share. Source: docs/design/screened.md#the-bias-of-the-tail.

        Args: share: [num_blocks, V_local] of each column that is not kept; rows sum to 1 or 0.
        """
        rows, weight, scale = self.rows, self.head.weight, self.head.logit_scale
        dim = weight.shape[1]
        mean = share.new_zeros(len(share), dim)
        square, remainder_square = torch.zeros_like(mean), torch.zeros_like(mean)
        for v0, v1 in spans(weight.shape[0], size.columns):
            x = (weight[v0:v1].float() - rows.centre) * rows.channel
            remainder = rows.values[v0:v1, :dim].float() * rows.of_rows[0, v0:v1, None] - x
            for out, of_columns in (
                (mean, x),
                (square, x.square()),
                (remainder_square, remainder.square()),
            ):
                out += share[:, v0:v1] @ of_columns
        variance = (square - mean.square()).clamp_min_(0)
        off = torch.empty_like(self.variance)
        for block, (i0, i1) in enumerate(spans(len(self.tokens), TOKEN_BLOCK)):
            x = (self.tokens.take(i0, i1).float() - rows.hidden_centre) / rows.channel
            remainder = self.hidden[i0:i1, :dim].float() * self.of_tokens[0, i0:i1, None] - x
            second = remainder.square() @ variance[block] + x.square() @ remainder_square[block]
            second = scale**2 * second - self.variance[i0:i1]
            off[i0:i1] = scale * (remainder @ mean[block]) + 0.5 * second
        return off

    def selection_error(self, near_threshold: Tensor, lse: Tensor) -> Tensor:
        """Computes the mass that each token's tail loses because 8-bit masses choose its columns,
        [N] over exp(lse). Source: docs/design/screened.md#the-bias-of-the-tail.

        Args:
            near_threshold: [num_blocks, V_local] bool: columns whose masses are near the threshold.
            lse: [N] of the 8-bit logits.
        """
        lost_mass = torch.zeros_like(lse)
        for block, (i0, i1) in enumerate(spans(len(self.tokens), TOKEN_BLOCK)):
            index = near_threshold[block].nonzero()[:, 0]
            total = len(index)
            if total == 0:
                continue
            if total > NEAR_THRESHOLD_COLUMNS:
                place = torch.arange(NEAR_THRESHOLD_COLUMNS, device=index.device)
                index = index[
                    (place * total + NEAR_THRESHOLD_COLUMNS - 1) // NEAR_THRESHOLD_COLUMNS
                ]
            hidden = self.tokens.take(i0, i1).to(operand_dtype(self.head.weight))
            z, _ = gathered_logits(hidden, self.head, index)
            off = self.gathered(i0, i1, index)[0].sub_(z)
            p = z.sub_(lse[i0:i1, None]).exp_()
            mass = p.sum(0)
            moved = torch.where(mass > 0, ((p * off.exp()).sum(0) / mass).log(), 0.0)
            # An error that all columns or all of a token's logits share moves the threshold alone.
            moved -= (mass * moved).sum() / mass.sum().clamp_min(1e-30)
            off -= (p * off).sum(1, keepdim=True) / p.sum(1, keepdim=True).clamp_min(1e-30)
            lost_mass[i0:i1] = (p * off) @ moved * (total / len(index) / (2 * NEAR_THRESHOLD_NATS))
        return lost_mass

    def _tiles_of(self, at: slice | Tensor) -> Callable[[int, int], tuple[Tensor, Tensor | None]]:
        # torch cannot gather rows of e4m3, but their bytes.
        columns = self.rows.values.view(torch.uint8)[at].view(self.rows.values.dtype).float()
        scale, shift = self.rows.of_rows[:, at]
        bias = None if self.head.bias is None else self.head.bias[at].float()

        def tile(i0: int, i1: int) -> tuple[Tensor, Tensor | None]:
            of_token, moved = self.of_tokens[:, i0:i1, None]
            # Products of int8 are whole numbers: fp32 sums them exactly up to some 1,000 dims.
            x = (self.hidden[i0:i1].float() @ columns.T).mul_(scale).mul_(of_token)
            x.add_(shift).add_(moved)
            return squash(x if bias is None else x.add_(bias), self.head)

        return tile


@dataclass(frozen=True)
class _Screened:
    """Statistics from exact logits of kept columns and 8-bit logits of all others."""

    stats: Stats
    scores: ColumnMasses
    error: float  # nats: the guard's estimate

    @classmethod
    def of(
        cls,
        eight: EightBit,
        stats: Stats,  # like scores, from 8-bit logits alone
        scores: ColumnMasses,
        mask: Tensor,  # [num_blocks, V_local] bool: columns that are kept
        near_threshold: Tensor | None,  # of `selection_error`, where that counts
        size: TileSize,
        here: Tensor,  # [N] this shard's share of the mass over all ranks
    ) -> _Screened:
        tokens, head = eight.tokens, eight.head
        kept = torch.full_like(stats.lse, -torch.inf)
        target_logit = torch.zeros_like(kept)
        # Sums over columns that are not kept: of exp(z - lse), and of exp(z - lse) softcap'(z).
        unkept, dropped = torch.empty_like(kept), torch.empty_like(kept)
        totals = (torch.ones_like(kept), (scores.log_slope_sum - stats.lse).exp())
        has_more = any(x is not None for x in (stats.entropy, stats.sum_p2, stats.max_logit))
        parts: list[tuple[Stats, Stats]] = []  # of a block's kept columns, and of the others
        for block, (i0, i1) in enumerate(spans(len(tokens), TOKEN_BLOCK)):
            hidden = tokens.take(i0, i1).to(operand_dtype(head.weight))
            targets, of_kept = tokens.local_targets[i0:i1], []
            for index in mask[block].nonzero()[:, 0].split(size.columns):
                z, _ = gathered_logits(hidden, head, index)
                # From the same logits as lse, so that nll's two terms share the target's logit.
                rows, at = find_targets(targets, index)
                target_logit[i0 + rows] = z[rows, at]
                of_kept.append(_of_columns(stats, z, index, targets))
            kept_stats = _merge(of_kept)
            kept[i0:i1] = kept_stats.lse
            few_kept = bool(mask[block].sum() * 2 <= mask.shape[1])
            summed = mask[block] if few_kept else ~mask[block]
            sums = _sums(eight, stats.lse[i0:i1], i0, i1, summed.nonzero()[:, 0], size)
            for out, total, part in zip((unkept, dropped), totals, sums, strict=True):
                out[i0:i1] = (total[i0:i1] - part).clamp_min_(0) if few_kept else part
            if has_more:
                tail = (~mask[block]).nonzero()[:, 0].split(size.columns)
                gathered = ((eight.gathered(i0, i1, index)[0], index) for index in tail)
                of_tail = _merge([_of_columns(stats, *each, targets) for each in gathered])
                parts.append((kept_stats, of_tail))
        error = ((here * unkept).square() * eight.variance).mean().sqrt()
        off = eight.tail_error(shares_of(scores, stats.lse, mask), size)
        # Times softcap's mean slope over the tail. A token without a tail has no error.
        off = torch.where(unkept > 0, off * dropped / unkept, 0.0)
        if near_threshold is not None:
            lost_mass = eight.selection_error(near_threshold, stats.lse) / (unkept * (-off).exp())
            lost_mass = lost_mass.clamp(-MOST_LOST_SHARE, MOST_LOST_SHARE)
            off = torch.where(unkept > 0, off - lost_mass.log1p(), 0.0)
        log_unkept = stats.lse + unkept.log() - off
        lse = torch.logaddexp(kept, log_unkept)
        screened = None if stats.screened is None else torch.ones_like(lse)
        log_dropped = stats.lse + dropped.log() - off
        if parts:
            stats = _merged(stats, parts, off, eight.variance)
        if stats.mean_logit is not None and stats.m2_logit is not None:
            # All columns weigh alike here, and the kept ones are few.
            m2 = stats.m2_logit - head.weight.shape[0] * eight.variance
            mean = stats.mean_logit + 0.5 * eight.variance
            stats = replace(stats, mean_logit=mean, m2_logit=m2.clamp_min(0))
        return cls(
            replace(stats, lse=lse, target_logit=target_logit, screened=screened),
            replace(scores, mask=mask, log_dropped=log_dropped),
            float(error),
        )


def _sums(
    eight: EightBit, lse: Tensor, i0: int, i1: int, columns: Tensor, size: TileSize
) -> tuple[Tensor, Tensor]:
    """Sums exp(z - lse), and exp(z - lse) softcap'(z), over some columns' 8-bit logits, [n]."""
    plain, sloped = torch.zeros_like(lse), torch.zeros_like(lse)
    for index in columns.split(size.columns):
        z, slope = eight.gathered(i0, i1, index)
        p = z.sub_(lse[:, None]).exp_()
        plain += p.sum(1)
        sloped += (p if slope is None else p.mul_(slope)).sum(1)
    return plain, sloped


def _of_columns(like: Stats, z: Tensor, index: Tensor, targets: Tensor) -> Stats:
    """Computes those statistics that `like` has over the columns `index` alone, from their logits
    [n, K]."""
    if len(index) == 0:
        z, index = z.new_full((len(z), 1), -torch.inf), index.new_full((1,), -1)
    lse = z.logsumexp(1)
    log_p = z - lse.masked_fill(lse == -torch.inf, 0)[:, None]
    p = log_p.exp()
    top, at = z.max(1)
    hit = (index[at] == targets) & (top > -torch.inf) & (targets >= 0)
    return Stats(
        lse=lse,
        target_logit=torch.zeros_like(lse),
        entropy=None if like.entropy is None else -(p * log_p.masked_fill(p == 0, 0)).sum(1),
        sum_p2=None if like.sum_p2 is None else (2 * log_p).logsumexp(1),
        max_logit=None if like.max_logit is None else top,
        target_is_argmax=None if like.target_is_argmax is None else hit.to(lse.dtype),
    )


def _merge(parts: list[Stats]) -> Stats:
    """Merges statistics over disjoint columns, those with the lowest columns first."""
    packed = torch.stack([part.pack() for part in parts], 1)
    # Only the order counts: there are no moments.
    order = torch.arange(1, len(parts) + 1, dtype=packed.dtype, device=packed.device)
    whole = merge_parts(parts[0].unpack(packed), order, order)
    # Of no mass there is no share.
    nothing, entropy, sum_p2 = whole.lse == -torch.inf, whole.entropy, whole.sum_p2
    return replace(
        whole,
        entropy=None if entropy is None else entropy.masked_fill(nothing, 0),
        sum_p2=None if sum_p2 is None else sum_p2.masked_fill(nothing, -torch.inf),
    )


def _merged(stats: Stats, parts: list[tuple[Stats, Stats]], off: Tensor, variance: Tensor) -> Stats:
    """Returns `stats` with entropy and so on from both parts of all blocks.

    Args:
        off: [N] nats that the log of a tail's sum is too large by.
        variance: [N] of an 8-bit logit's error: a tail's logits differ more than exact ones do.
    """
    kept, tail = (
        part[0].unpack(torch.cat([each.pack() for each in part], 1))
        for part in zip(*parts, strict=True)
    )
    of_tail = {"lse": tail.lse - off}
    if tail.entropy is not None:
        of_tail["entropy"] = (tail.entropy + 0.5 * variance).masked_fill(tail.lse == -torch.inf, 0)
    if tail.sum_p2 is not None:
        of_tail["sum_p2"] = tail.sum_p2 - variance
    whole = _merge([kept, replace(tail, **of_tail)])
    names = ("entropy", "sum_p2", "max_logit", "target_is_argmax")
    return replace(stats, **{name: getattr(whole, name) for name in names})
