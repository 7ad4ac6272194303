"""Steps 2 and 4 over eight segments of the vocabulary, in an order that no number of ranks changes.

Statistics of all segments travel, and every rank merges the same eight. Parts of the hidden
gradient are added in pairs of segments, then of ranks: the tree of sums is the same on any number
of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cce_dist.core.phases import in_phase
from cce_dist.core.stats import Stats, add_halves, merge_parts, zero_beyond
from cce_dist.ranks.gather import all_gather, require, start_all_gather
from cce_dist.ranks.merge_header import NUM_DIGITS, RULE, decode, encode, flaw, is_sound
from cce_dist.ranks.transport import group_rank, group_size
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group

SEGMENTS = 8
# Values of the fields of `Stats` over no columns; 0 of the others.
OF_NOTHING = {"lse": -torch.inf, "sum_p2": -torch.inf, "max_logit": -torch.inf}
EVEN = (
    f"invariant=True needs ranks with shards of one size, each of whole segments: the rows of all "
    f"ranks, padding included, are cut into {SEGMENTS} segments"
)


def segment_columns(shard: VocabShard, group: Group | None) -> int:
    """Returns the columns of a segment; the last one may have fewer, or none."""
    return max(1, -(-shard.num_rows * group_size(group) // SEGMENTS))


def merge_segments(
    local: Stats,  # fields [S, N], of the segments of this rank that have columns
    shard: VocabShard,
    group: Group | None,
    count: Tensor | None,
) -> Stats:
    """Merges the statistics of all segments, in their order: fields [N], the same bits on every
    rank, whatever the number of ranks.

    Args: count: as of `merge_stats`.
    Collectives: one all-gather of S = 8 / W times what `merge_stats` sends.
    Raises:
        ValueError: as `merge_stats`, or the ranks' shards are not of one size. On a GPU a
            device-side assertion takes its place.
    """
    local = _of_all(local, SEGMENTS // group_size(group))
    packed = local.pack()
    rows = packed[:, None]
    if group is not None:
        payload = torch.cat([encode(shard, packed.numel(), packed), packed.flatten()])
        parts = all_gather(payload, group, begins=True)
        # [K, W, S, N]
        rows = parts[:, NUM_DIGITS:].view(len(parts), *packed.shape).transpose(0, 1)
        _require_sound(parts[:, :NUM_DIGITS], local.unpack(rows), count)
    size = segment_columns(shard, group)
    first = torch.arange(SEGMENTS, device=packed.device) * size
    num_classes = (shard.vocab_size - first).clamp(0, size)
    flat = local.unpack(rows.reshape(len(packed), SEGMENTS, packed.shape[-1]))
    merged = merge_parts(flat, num_classes.to(packed.dtype), first.to(packed.dtype), add_halves)
    return merged if count is None else zero_beyond(merged, count)


def _of_all(local: Stats, segments: int) -> Stats:
    """Adds rows of segments without columns."""
    packed = local.pack()
    missing = segments - packed.shape[1]
    if not missing:
        return local
    nothing = packed.new_zeros(packed.shape[0], missing, packed.shape[2])
    fields = local.unpack(nothing)
    for name, value in OF_NOTHING.items():
        field = getattr(fields, name)
        if field is not None:
            field.fill_(value)
    return local.unpack(torch.cat([packed, nothing], 1))


def _require_sound(headers: Tensor, stats: Stats, count: Tensor | None) -> None:
    # One segment of each rank, and its target's logit, tell as much as the whole shard.
    plain = Stats(stats.lse[:, 0], stats.target_logit.sum(1))
    require(is_sound(headers, plain, count), flaw, RULE, headers)
    _, start, stop, _ = decode(headers).unbind(1)
    rows, ranks = stop[0] - start[0], len(headers)
    place = torch.arange(ranks, device=start.device)
    even = (start == place * rows).all() & (stop - start == rows).all()
    even = even & (rows % (SEGMENTS // ranks) == 0)

    def message(start: Tensor, stop: Tensor) -> str:
        bounds = list(zip(start.tolist(), stop.tolist(), strict=True))
        return f"{EVEN}, got (start, stop) by rank: {bounds}"

    require(even, message, EVEN, start, stop)


class PairwiseSum:
    """The sum of parts that come one after the other, in pairs, pairs of pairs and so on."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Tensor]] = []

    def add(self, part: Tensor) -> None:
        """Takes a part, whose memory it may overwrite."""
        level = 0
        while self._waiting and self._waiting[-1][0] == level:
            part = self._waiting.pop()[1].add_(part)
            level += 1
        self._waiting.append((level, part))

    @property
    def total(self) -> Tensor:
        """The sum of a number of parts that is a power of two."""
        ((_, total),) = self._waiting
        return total


def sum_in_pairs(
    part: Tensor,  # [num_rows, D] of this rank, in the accumulation dtype
    group: Group | None,
    *,
    scatter: bool,  # sequence parallel: each rank keeps its own rows
    dtype: torch.dtype,
) -> Tensor:
    """Sums over the ranks in pairs: [num_rows, D], or this rank's rows of it.

    Collectives: W all-gathers of a W-th of `part`, so that no rank holds all parts at once.
    """
    size = group_size(group)
    if size == 1:
        return part.to(dtype)
    chunk = -(-len(part) // size)
    sums: list[Tensor] = []
    with in_phase("reduce"):
        for rank, rows in enumerate(part.split(max(1, chunk))):
            total = PairwiseSum()
            for of_rank in start_all_gather(rows, group)().unbind(0):
                total.add(of_rank)
            if not scatter or rank == group_rank(group):
                sums.append(total.total.to(dtype))
    return torch.cat(sums) if sums else part.to(dtype)
