"""Statistics of each token over some columns, and their merge over the shards.

The (max, sum) pair of a log-sum-exp is kept as its logarithm; tiles, tensor-parallel ranks and
pipeline ranks all merge by log-add-exp. Derivations: docs/design/loss.md#online-merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stats:
    """Per-token statistics over some of the vocabulary: of a shard, or merged over all.

    Each field is [N], fp32 (float64 for float64 inputs); None where not wanted.
    """

    lse: Tensor  # natural log; -inf over no columns
    target_logit: Tensor  # 0 where the target isn't among the columns
    smooth_logit: Tensor | None = None  # sum_v class_weight_v z_v / V: label smoothing's mean
    entropy: Tensor | None = None  # of the softmax over these columns alone
    # Log of the sum of squared probabilities over these columns alone; -inf over no columns.
    sum_p2: Tensor | None = None
    max_logit: Tensor | None = None
    target_is_argmax: Tensor | None = None  # 1 where the first largest column is the target
    # A mean near 1000 has few digits left for the variance, so it is kept relative to a logit.
    origin_logit: Tensor | None = None
    mean_logit: Tensor | None = None  # minus origin_logit
    m2_logit: Tensor | None = None  # sum of squared deviations from the mean (Welford)
    screened: Tensor | None = None  # 1 where logits had 8 bits, but for the kept columns
    # lse's digits beyond fp32, for fp32 inputs: of logits near 300 lse alone is off by more than a
    # loss of 1e-2 allows.
    lse_rest: Tensor | None = None

    @property
    def whole_lse(self) -> Tensor:
        """Returns lse with all its digits, in float64 if it has a rest."""
        return self.lse if self.lse_rest is None else self.lse.double() + self.lse_rest

    @property
    def nll(self) -> Tensor:
        near = self.lse - self.target_logit
        return near if self.lse_rest is None else near + self.lse_rest

    @property
    def is_plain(self) -> bool:
        """Tells whether lse and target logit are the only fields."""
        return all(getattr(self, field.name) is None for field in fields(self)[2:])

    def pack(self) -> Tensor:
        """Stacks the fields that are present, [K, N], in declaration order."""
        values = (getattr(self, field.name) for field in fields(self))
        return torch.stack([value for value in values if value is not None])

    def unpack(self, packed: Tensor) -> Stats:
        """Turns [K, ...] of `pack` into statistics with the fields that self has."""
        rows = iter(packed.unbind(0))
        present = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return Stats(**{name: next(rows) for name in present})

    @property
    def adds_up(self) -> bool:
        """Tells whether all fields but lse merge by adding."""
        others = (field.name for field in fields(self)[3:] if field.name != "lse_rest")
        return all(getattr(self, name) is None for name in others)

    def to_records(self) -> Tensor:
        """Returns records [N, K], if `adds_up`: base and sum, with lse = base + log sum, and the
        fields that are added. The base is lse, and the sum is exp(lse_rest) or 1; over no columns
        it is 0."""
        added = [self.target_logit]
        if self.smooth_logit is not None:
            added.append(self.smooth_logit)
        records = Stats.record_of(self.lse, *added)
        if self.lse_rest is not None:
            records[:, 1] *= self.lse_rest.exp()
        return records

    def from_records(self, records: Tensor) -> Stats:
        """Turns merged records into statistics, with the fields that self has."""
        base, total, *added = records.unbind(1)
        if self.lse_rest is None:
            return Stats(Stats.lse_of(records), *added)
        lse, rest = split_lse(base.double() + total.double().log())
        return Stats(lse, *added, lse_rest=rest)

    @staticmethod
    def record_of(lse: Tensor, *added: Tensor) -> Tensor:
        return torch.stack([lse, (lse != -torch.inf).to(lse.dtype), *added], 1)

    @staticmethod
    def lse_of(records: Tensor) -> Tensor:
        return records[:, 0] + records[:, 1].log()


def split_lse(lse: Tensor) -> tuple[Tensor, Tensor]:
    """Splits a log-sum-exp in float64 into `Stats.lse` and `Stats.lse_rest`, in fp32."""
    near = lse.float()
    # Neither infinity nor NaN has a rest.
    return near, (lse - near).nan_to_num_(0, 0, 0).float()


class MergeKernels(NamedTuple):
    """Kernels that merge lse and target logit of ranks, in place of `merge_parts`."""

    # lse [N], target logit [N], the header's eight numbers -> the message of a rank, [8 + 2 N]
    pack: Callable[[Tensor, Tensor, Sequence[int]], Tensor]
    # Messages of all ranks [W, 8 + 2 N], number of tokens that count [1] or None
    # -> lse and target logit [2, N]; `merge_header.is_sound` [1]
    merge: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


def zero_beyond(stats: Stats, count: Tensor) -> Stats:
    """Returns the statistics with 0 at tokens that don't count, where a merge of zeros is not 0."""
    packed = stats.pack()
    counts = torch.arange(packed.shape[1], device=packed.device) < count
    return stats.unpack(packed.where(counts, 0))


def sum_rows(rows: Tensor) -> Tensor:
    """Sums over dim 0, in an order that may follow from the shape."""
    return rows.sum(0)


def add_halves(rows: Tensor) -> Tensor:
    """Sums over dim 0, whose size is a power of two, in an order that follows from it alone."""
    while len(rows) > 1:
        first, second = rows.chunk(2)
        rows = first + second
    return rows[0]


def logaddexp_parts(parts: Tensor, total: Callable[[Tensor], Tensor] = sum_rows) -> Tensor:
    """Returns log sum_r exp(parts[r]) over dim 0: [W, ...] -> [...]. Args: total: sums over dim 0.

    -inf parts (an empty shard) add nothing; all of them -inf give -inf, and one of inf inf.
    """
    top = parts.amax(0)
    base = top.masked_fill(top.isinf(), 0)
    return base + total((parts - base).exp()).log()


def merge_parts(
    parts: Stats,  # fields [W, N]: one row a shard
    num_classes: Tensor,  # [W] columns of each shard, in the fields' dtype
    first_class: Tensor,  # [W] first token id of each shard
    total: Callable[[Tensor], Tensor] = sum_rows,
) -> Stats:
    """Merges the statistics of the shards: fields [N]. Pure arithmetic, deterministic.

    Args: total: sums over dim 0.
    Source: log-add-exp arXiv:1805.02867; mean and m2 by Chan, Golub and LeVeque (1983).
    """
    lses, dtype = parts.whole_lse, parts.lse.dtype
    lse = logaddexp_parts(lses, total)
    entropy = sum_p2 = max_logit = target_is_argmax = None
    if parts.entropy is not None:
        # Chain rule of entropy: H = sum_r share_r (H_r - log share_r); 0 log 0 = 0.
        log_share = (lses - lse).to(dtype)
        surprise = parts.entropy - log_share.masked_fill(parts.lse == -torch.inf, 0)
        entropy = total(log_share.exp() * surprise)
    if parts.sum_p2 is not None:
        sum_p2 = logaddexp_parts(parts.sum_p2 + 2 * (lses - lse).to(dtype), total)
    if parts.max_logit is not None:
        max_logit = parts.max_logit.amax(0)
    if parts.max_logit is not None and parts.target_is_argmax is not None:
        # Equal logits: the lowest token id wins, as in torch.argmax over dense logits on CPU.
        order = torch.where(parts.max_logit == max_logit, first_class[:, None], torch.inf)
        order = order.masked_fill((num_classes == 0)[:, None], torch.inf)
        winner = order.argmin(0, keepdim=True)
        target_is_argmax = parts.target_is_argmax.gather(0, winner)[0]
    moments = {}
    if parts.mean_logit is not None:
        moments = merge_moments(parts, num_classes, total)._asdict()
    rest = None
    if parts.lse_rest is not None:
        lse, rest = split_lse(lse)
    return Stats(
        lse=lse,
        target_logit=total(parts.target_logit),
        smooth_logit=None if parts.smooth_logit is None else total(parts.smooth_logit),
        entropy=entropy,
        sum_p2=sum_p2,
        max_logit=max_logit,
        target_is_argmax=target_is_argmax,
        screened=None if parts.screened is None else parts.screened.amin(0),
        lse_rest=rest,
        **moments,
    )


class Moments(NamedTuple):
    """The merged moments of each token's logits, as in `Stats`: [N] each."""

    origin_logit: Tensor
    mean_logit: Tensor
    m2_logit: Tensor


def merge_moments(
    parts: Stats, num_classes: Tensor, total: Callable[[Tensor], Tensor] = sum_rows
) -> Moments:
    """Merges mean and squared deviations of [W, N] parts over num_classes [W] columns each."""
    assert parts.origin_logit is not None
    assert parts.mean_logit is not None and parts.m2_logit is not None
    share = num_classes[:, None] / num_classes.sum()
    origin = parts.origin_logit.index_select(0, num_classes.argmax(0, keepdim=True))[0]
    part_mean = (parts.origin_logit - origin) + parts.mean_logit
    mean = total(share * part_mean)
    between = num_classes[:, None] * (part_mean - mean) ** 2
    m2 = total(parts.m2_logit + between)
    return Moments(origin, mean, m2)
