"""Forward over this rank's shard, in chunked eager torch: any device, fp32, bf16, fp16, float64.

Logits exist one tile at a time, in fp32 (float64 for float64 inputs).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cce_dist.backends.protocol import ForwardRequest, Room
from cce_dist.backends.torch.filter import ColumnMasses
from cce_dist.backends.torch.tiles import (
    LogitTiles,
    TileSize,
    exact_tiles,
    find_targets,
    logits_tile,
    max_over_blocks,
    operand_dtype,
    spans,
    squash,
    sum_over_blocks,
    whole_blocks,
)
from cce_dist.core.stats import Stats, split_lse
from cce_dist.core.types import Head, Tokens, Wanted, accumulate_dtype
from cce_dist.options import TOKEN_BLOCK


class _RunningStats:
    """Per-token statistics over the columns seen so far; one object a forward."""

    def __init__(self, num_tokens: int, like: Tensor, wanted: Wanted, with_slope: bool) -> None:
        dtype = accumulate_dtype(like.dtype)

        def full(value: float) -> Tensor:
            return torch.full((num_tokens,), value, dtype=dtype, device=like.device)

        self.max, self.sum = full(-torch.inf), full(0)
        self.slope_sum = full(0) if with_slope else None
        self.surplus = full(0) if wanted.entropy else None  # sum of exp(z - max) (z - max)
        self.squares = full(0) if wanted.sum_p2 else None  # sum of exp(z - max)^2
        self.smooth = full(0) if wanted.smooth_logit else None
        self.argmax = full(-1).long() if wanted.correct else None
        # Moments of z - origin, where origin is the token's first logit: Welford's running mean of
        # numbers near 1000 would be off by more than their variance allows.
        self.origin, self.mean, self.m2 = full(0), None, None
        if wanted.moments:
            self.mean, self.m2 = full(0), full(0)

    def add(
        self,
        tokens: slice,
        z: Tensor,  # [n, columns]; overwritten with exp(z - base)
        slope: Tensor | None,  # [n, columns]
        first_column: int,
        class_weight: Tensor | None,  # [columns]
    ) -> Tensor:
        """Adds one tile; returns `base` [n]: z now holds exp(z - base)."""
        if self.mean is not None and self.m2 is not None:
            self._add_moments(tokens, z, first_column)
        if self.smooth is not None:
            self.smooth[tokens] += z.sum(1) if class_weight is None else z @ class_weight
        old_max = self.max[tokens]
        if self.argmax is None:
            tile_max = z.amax(1)
        else:
            tile_max, index = z.max(1)
            index = torch.where(tile_max > old_max, index + first_column, self.argmax[tokens])
            self.argmax[tokens] = index
        new_max = torch.maximum(old_max, tile_max)
        # A tile of -inf alone (a masked vocabulary range) must not give inf - inf.
        base = new_max.masked_fill(new_max == -torch.inf, 0)
        rescale = (old_max - base).exp_()
        z.sub_(base[:, None])
        if self.surplus is not None:
            shift = (old_max - base).masked_fill_(old_max == -torch.inf, 0)
            old = rescale * (self.surplus[tokens] + self.sum[tokens] * shift)
            finite = z.clamp_min(torch.finfo(z.dtype).min)
            self.surplus[tokens] = old + (finite * z.exp_()).sum(1)
        else:
            z.exp_()
        self.sum[tokens] = self.sum[tokens] * rescale + z.sum(1)
        if self.squares is not None:
            # Unlike z.square(), a norm takes no memory.
            squares = torch.linalg.vector_norm(z, dim=1).square()
            self.squares[tokens] = self.squares[tokens] * rescale.square() + squares
        if self.slope_sum is not None and slope is not None:
            self.slope_sum[tokens] = self.slope_sum[tokens] * rescale + slope.mul_(z).sum(1)
        self.max[tokens] = new_max
        return base

    def _add_moments(self, tokens: slice, z: Tensor, first_column: int) -> None:
        """Adds one tile by Chan's pairwise update, after `first_column` earlier columns."""
        assert self.mean is not None and self.m2 is not None
        if first_column == 0:
            self.origin[tokens] = z[:, 0].masked_fill(z[:, 0].isinf(), 0)
        count, total = z.shape[1], first_column + z.shape[1]
        shifted = z - self.origin[tokens, None]
        variance, mean = torch.var_mean(shifted, dim=1, correction=0)
        # Logits of -inf, by a bias, give var_mean a mean of NaN. A mean of -inf stays so.
        mean.masked_fill_(shifted.amin(1) == -torch.inf, -torch.inf)
        delta = (mean - self.mean[tokens]).masked_fill_(self.mean[tokens] == -torch.inf, 0)
        self.mean[tokens] += delta * (count / total)
        self.m2[tokens] += variance * count + delta**2 * (first_column * count / total)

    def log_sum(self, sums: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns log sum_v exp(z_v) over the columns so far, in `dtype`; -inf over none."""
        base = self.max.masked_fill(self.max == -torch.inf, 0)
        return base.to(dtype) + sums.to(dtype).log()


def statistics(
    tokens: Tokens,
    head: Head,
    request: ForwardRequest,
    tiles: LogitTiles | None = None,  # None: tiles of the exact logits
    size: TileSize | None = None,  # None: by the workspace
) -> tuple[Stats, ColumnMasses | None]:
    """Computes statistics of every token over this rank's shard (no communication).

    `request.screen` and `request.bounds` are not read. A store is a tensor [N, V_local] in the
    accumulation dtype, and is filled with z.

    Returns:
        Stats with fields [N] in fp32 | float64; deterministic.
        Column masses, [ceil(N / 128), V_local], if there is a filter, else None.
    Source: Cut Cross-Entropy, arXiv:2411.09009, Alg. 1-2; online sums arXiv:1805.02867.
    """
    wanted, store = request.wanted, request.store
    assert store is None or isinstance(store, Tensor)
    weight, dtype = head.weight, accumulate_dtype(head.weight.dtype)
    num_tokens, num_columns = len(tokens), weight.shape[0]
    size = size or TileSize.choose(weight, request.room.workspace_bytes)
    tiles = exact_tiles(tokens, head) if tiles is None else tiles
    softcapped_mean = wanted.smooth_logit and head.softcap is not None
    collect = replace(wanted, smooth_logit=softcapped_mean)
    running = _RunningStats(num_tokens, weight, collect, head.softcap is not None)
    target_logit = torch.zeros_like(running.sum)
    scores = target_bound = None
    if request.filter is not None:
        scores = _empty_scores(num_tokens, weight, size, request.filter.by_largest)
        target_bound = _target_bound(tokens, head, size)

    for tile, (v0, v1) in enumerate(spans(num_columns, size.columns)):
        of_columns = tiles(v0, v1)
        class_weight = None if head.class_weight is None else head.class_weight[v0:v1].to(dtype)
        for i0, i1 in spans(num_tokens, size.tokens):
            at = slice(i0, i1)
            z, slope = of_columns(i0, i1)
            # Taken from the tile itself, so that nll's two terms share their rounding.
            rows, columns_of = find_targets(tokens.local_targets[at], slice(v0, v1))
            target_logit[rows + i0] = z[rows, columns_of]
            if store is not None:
                store[at, v0:v1] = z
            base = running.add(at, z, slope, v0, class_weight)
            if scores is not None and target_bound is not None:
                bound = torch.maximum(base + running.sum[at].log(), target_bound[at])
                scores.tile_bound[tile, at] = bound
                scale = (base - bound).exp_().masked_fill_(bound == -torch.inf, 0)
                blocks = slice(i0 // TOKEN_BLOCK, -(-i1 // TOKEN_BLOCK))
                mass = z if slope is None else slope  # add() wrote exp(z - base) softcap' to it
                scores.mass[blocks, v0:v1] = sum_over_blocks(scale, mass)
                if scores.largest is not None:
                    scores.largest[blocks, v0:v1] = max_over_blocks(z.mul_(scale[:, None]))
    wide = _dtype_of_log_sums(weight)
    lse = running.log_sum(running.sum, wide)
    if scores is not None:
        slopes = running.sum if running.slope_sum is None else running.slope_sum
        scores.log_slope_sum.copy_(running.log_sum(slopes, wide))
    rest = None
    if weight.dtype == torch.float32:
        lse, rest = split_lse(lse)
    stats = _finish(running, lse, target_logit, tokens, head, wanted, size)
    return replace(stats, lse_rest=rest), scores


def statistics_of_segments(tokens: Tokens, head: Head, request: ForwardRequest) -> Stats:
    """Computes statistics of every token over each segment of the shard: see
    `ForwardRequest.segment`."""
    num_tokens, blocks, parts = len(tokens), whole_blocks(tokens), []
    # A shard without columns has one segment of none.
    for start, stop in spans(max(1, head.weight.shape[0]), request.segment):
        targets = blocks.local_targets - start
        inside = (targets >= 0) & (targets < stop - start)
        of_segment = replace(blocks, local_targets=targets.masked_fill(~inside, -1))
        size = TileSize.invariant(stop - start)
        stats, _ = statistics(of_segment, head.rows(start, stop), request, size=size)
        parts.append(stats.pack()[:, :num_tokens])
    return stats.unpack(torch.stack(parts, 1))


def largest(tokens: Tokens, head: Head, room: Room) -> tuple[Tensor, Tensor]:
    """Returns each token's largest logit over this shard, in the accumulation dtype, and the first
    column that has it, int64, [N] each: -inf and 0 over no columns, NaN and 0 where a logit is NaN.
    Not differentiable."""
    weight, size = head.weight, TileSize.choose(head.weight, room.workspace_bytes)
    value = weight.new_full((len(tokens),), -torch.inf, dtype=accumulate_dtype(weight.dtype))
    index = torch.zeros(len(tokens), dtype=torch.int64, device=weight.device)
    for start, stop in spans(len(tokens), size.tokens):
        hidden = tokens.take(start, stop).to(operand_dtype(weight))
        for first, last in spans(weight.shape[0], size.columns):
            columns = weight[first:last].to(operand_dtype(weight))
            bias = None if head.bias is None else head.bias[first:last]
            z, _ = logits_tile(hidden, columns, bias, head, wants_slope=False)
            top, column = z.max(1)
            # A NaN counts as larger than any number, and stays.
            better = (top > value[start:stop]) | top.isnan()
            value[start:stop] = torch.where(better, top, value[start:stop])
            index[start:stop] = torch.where(better, column + first, index[start:stop])
    return value, index.masked_fill(value.isnan(), 0)


def _finish(
    running: _RunningStats,
    lse: Tensor,
    target_logit: Tensor,
    tokens: Tokens,
    head: Head,
    wanted: Wanted,
    size: TileSize,
) -> Stats:
    smooth = entropy = sum_p2 = is_argmax = None
    if wanted.smooth_logit:
        smooth = (
            _mean_logit_by_linearity(tokens, head, size)
            if running.smooth is None
            else running.smooth / head.vocab_size
        )
    if running.surplus is not None:
        empty = running.sum == 0
        total = running.sum.masked_fill(empty, 1)
        entropy = (total.log() - running.surplus / total).masked_fill(empty, 0)
    if running.squares is not None:
        sum_p2 = running.squares.log() - 2 * running.sum.log()
        sum_p2.masked_fill_(running.sum == 0, -torch.inf)
    if running.argmax is not None:
        is_argmax = ((running.argmax == tokens.local_targets) & (running.argmax >= 0)).to(lse.dtype)
    needs_max = wanted.correct or wanted.moments
    return Stats(
        lse=lse,
        target_logit=target_logit,
        smooth_logit=smooth,
        entropy=entropy,
        sum_p2=sum_p2,
        max_logit=running.max if needs_max else None,
        target_is_argmax=is_argmax,
        origin_logit=None if running.mean is None else running.origin,
        mean_logit=running.mean,
        m2_logit=running.m2,
        # A shard without columns has no logit in full precision: it counts as screened.
        screened=torch.full_like(lse, head.weight.shape[0] == 0) if wanted.screened else None,
    )


def _target_bound(tokens: Tokens, head: Head, size: TileSize) -> Tensor:
    """Computes z of each token's target before any tile, [N]; -inf where the target isn't here."""
    dtype = accumulate_dtype(head.weight.dtype)
    out = torch.full((len(tokens),), -torch.inf, dtype=dtype, device=head.weight.device)
    if head.weight.shape[0] == 0:
        return out
    for i0, i1 in spans(len(tokens), size.tokens):
        ids = tokens.local_targets[i0:i1]
        columns = head.weight.index_select(0, ids.clamp_min(0)).to(dtype)
        x = torch.linalg.vecdot(tokens.take(i0, i1).to(dtype), columns)
        if head.bias is not None:
            x = x + head.bias[ids.clamp_min(0)].to(dtype)
        z, _ = squash(x[:, None], head, tokens.scale_of(i0, i1))
        out[i0:i1] = z[:, 0].masked_fill(ids < 0, -torch.inf)
    return out


def weighted_column_sum(head: Head, size: TileSize) -> tuple[Tensor, Tensor | None]:
    """Returns sum_v class_weight_v C_v [D] and the same sum of the biases [], over this shard."""
    dtype = accumulate_dtype(head.weight.dtype)
    weights = head.class_weight
    if weights is None:
        weights = torch.ones(head.weight.shape[0], dtype=dtype, device=head.weight.device)
    weights = weights.to(dtype)
    total = torch.zeros(head.weight.shape[1], dtype=dtype, device=head.weight.device)
    for v0, v1 in spans(head.weight.shape[0], size.columns):
        total += weights[v0:v1] @ head.weight[v0:v1].to(dtype)
    return total, None if head.bias is None else weights @ head.bias.to(dtype)


def _mean_logit_by_linearity(tokens: Tokens, head: Head, size: TileSize) -> Tensor:
    """Computes sum_v class_weight_v z_v / V over this shard as E . (sum_v class_weight_v C_v) / V,
    [N]."""
    total, bias = weighted_column_sum(head, size)
    parts = [
        tokens.take(i0, i1).to(total.dtype) @ total for i0, i1 in spans(len(tokens), size.tokens)
    ]
    mean = torch.cat(parts) if parts else total.new_zeros(0)
    if bias is not None:
        mean = mean + bias
    return mean * (head.logit_scale / head.vocab_size)


def _empty_scores(num_tokens: int, weight: Tensor, size: TileSize, largest: bool) -> ColumnMasses:
    dtype, device = accumulate_dtype(weight.dtype), weight.device
    num_blocks, num_columns = -(-num_tokens // TOKEN_BLOCK), weight.shape[0]
    mass = torch.empty(num_blocks, num_columns, dtype=dtype, device=device)
    num_tiles = -(-num_columns // size.columns)
    return ColumnMasses(
        mass=mass,
        largest=torch.empty_like(mass) if largest else None,
        tile_bound=torch.empty(num_tiles, num_tokens, dtype=dtype, device=device),
        tile_columns=size.columns,
        log_slope_sum=torch.empty(num_tokens, dtype=_dtype_of_log_sums(weight), device=device),
    )


def _dtype_of_log_sums(weight: Tensor) -> torch.dtype:
    """See `Stats.lse_rest`. The logits of 16-bit inputs have fewer digits than fp32."""
    return torch.float32 if weight.dtype.itemsize == 2 else torch.float64
