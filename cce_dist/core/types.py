"""One rank's inputs, statistics and gradients, and how two ranks' statistics merge.

The (max, sum) pair of a log-sum-exp is kept as its logarithm; tiles, tensor-parallel ranks and
pipeline ranks all merge by log-add-exp. Derivations: docs/numerics.md#online-merge.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cce_dist.options import Screen


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which logits, sums and gradients are kept until they are stored."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def largest_operand(dtype: torch.dtype) -> float:
    """Returns a power of two near which the largest d_logits of 16-bit operands are to lie.

    fp16 spans 2^-24 to 2^16: what is above 1 serves tokens of small upstream gradients beside one
    of a large one. The 2^8 above that are room for an entropy's d_logits, up to ln V times its
    upstream gradient, and for sums of several.
    """
    return 2.0**8 if dtype == torch.float16 else 1.0


@dataclass(frozen=True)
class QuantizedRows:
    """A weight's rows in 8 bits: channel (row - centre) is about a scale times values."""

    values: Tensor  # [R, stride] int8 | float8_e4m3fn, the first D of a row
    of_rows: Tensor  # [2, R] fp32 the scales; row . hidden_centre
    centre: Tensor  # [D] fp32
    channel: Tensor  # [D] fp32 powers of two; hidden states are divided by them
    hidden_centre: Tensor  # [D] fp32 subtracted from hidden states before that
    for_hidden: Tensor  # [2, D] fp32: 1 / channel; -hidden_centre / channel
    # [3] fp32: means over rows of |channel (row - centre)|^2, and of the square of how far off that
    # is; centre . hidden_centre
    mean: Tensor


@dataclass(frozen=True)
class Head:
    """One rank's rows of the LM head, without padded rows, and how they make logits."""

    weight: Tensor  # [V_local, D]
    bias: Tensor | None  # [V_local], any float dtype
    class_weight: Tensor | None  # [V_local] fp32, this shard's slice
    vocab_size: int  # V of the whole vocabulary
    softcap: float | None
    logit_scale: float
    quantized: QuantizedRows | None = None  # the same rows, where the caller keeps them
    # (weight, screen, what makes them) -> them, made or of an earlier call; None: each call's own.
    quantize_once: Callable[..., QuantizedRows | None] | None = None

    def quantized_by(
        self,
        quantize: Callable[[Tokens, Tensor, Screen], QuantizedRows],
        tokens: Tokens,
        screen: Screen,
    ) -> Head:
        """Returns the head with `quantized`, where one call makes that for others too."""
        if self.quantize_once is None:
            return self
        make = functools.partial(quantize, tokens, self.weight, screen)
        return replace(self, quantized=self.quantize_once(self.weight, screen, make))


@dataclass(frozen=True)
class Tokens:
    """The tokens that are computed: hidden may hold others (ignored, shifted out)."""

    hidden: Tensor  # [N_all, D]
    rows: Tensor | None  # [N] int64, rows of hidden; None: all of them
    local_targets: Tensor  # [N] int64, or int32 where that holds them; -1 = not in this shard
    # [1] int32: only the first `count` tokens are computed, and the host doesn't know how many.
    count: Tensor | None = None
    # Fills hidden, where ranks are still to gather it: on the stream that it is called on. Called
    # again it does nothing.
    fill: Callable[[], None] | None = None
    # [N] in the accumulation dtype: multiplies each token's logits, beside Head.logit_scale.
    scale: Tensor | None = None

    def __len__(self) -> int:
        return self.local_targets.shape[0]

    def take(self, start: int, stop: int) -> Tensor:
        """Returns hidden of tokens [start, stop): a view, or a gathered copy where tokens are left
        out."""
        if self.rows is None:
            return self.hidden[start:stop]
        return self.hidden.index_select(0, self.rows[start:stop])

    def scale_of(self, start: int, stop: int) -> Tensor | None:
        """Returns the scale of tokens [start, stop)."""
        return None if self.scale is None else self.scale[start:stop]

    def reordered(self, order: Tensor) -> Tokens:
        """Returns the same tokens, the order[i]-th of them i-th; order [N] int64."""
        rows = order if self.rows is None else self.rows.index_select(0, order)
        targets = self.local_targets.index_select(0, order)
        scale = None if self.scale is None else self.scale.index_select(0, order)
        return Tokens(self.hidden, rows, targets, self.count, scale=scale)

    def slice(self, start: int, stop: int) -> Tokens:
        count = None if self.count is None else (self.count - start).clamp(0, stop - start)
        hidden, rows = self.hidden[start:stop], None
        if self.rows is not None:
            hidden, rows = self.hidden, self.rows[start:stop]
        targets, scale = self.local_targets[start:stop], self.scale_of(start, stop)
        return Tokens(hidden, rows, targets, count, scale=scale)

    def alone(self, start: int, stop: int) -> Tokens:
        """Returns a slice with nothing else in hidden: a copy where tokens are left out."""
        return replace(self.slice(start, stop), hidden=self.take(start, stop), rows=None)


class Picked(NamedTuple):
    """The targets that count, of [N].

    Where the host is not to wait for how many they are, there are N of each field, those that
    count in front; else there are fields of theirs alone.
    """

    targets: Tensor  # int64, 0 for those that don't count
    rows: Tensor | None  # int64, where each came from; None: all count
    count: Tensor | None = None  # [1] int32, how many count
    counts: Tensor | None = None  # bool, which do; None: all
    local_targets: Tensor | None = None  # int32, -1 = not in this shard; None: still to be found
    in_range: Tensor | None = None  # [1] int32, 0 if one that counts is no class; None: as above


@dataclass(frozen=True)
class Wanted:
    """Optional statistics that the forward collects while a tile is at hand."""

    smooth_logit: bool = False
    entropy: bool = False
    correct: bool = False
    moments: bool = False
    screened: bool = False


@dataclass(frozen=True)
class Stats:
    """Per-token statistics over some of the vocabulary: of a shard, or merged over all.

    Each field is [N], fp32 (float64 for float64 inputs); None where not wanted.
    """

    lse: Tensor  # natural log; -inf over no columns
    target_logit: Tensor  # 0 where the target isn't among the columns
    smooth_logit: Tensor | None = None  # sum_v class_weight_v z_v / V: label smoothing's mean
    entropy: Tensor | None = None  # of the softmax over these columns alone
    max_logit: Tensor | None = None
    target_is_argmax: Tensor | None = None  # 1 where the first largest column is the target
    # Means near 1000 would lose the digits of the spread: they are kept relative to a logit.
    origin_logit: Tensor | None = None
    mean_logit: Tensor | None = None  # minus origin_logit
    m2_logit: Tensor | None = None  # sum of squared deviations from the mean (Welford)
    screened: Tensor | None = None  # 1 where logits were of 8 bits, but for those that matter

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but lse and target logit."""
        return all(getattr(self, field.name) is None for field in fields(self)[2:])

    def pack(self) -> Tensor:
        """Stacks the fields that are present, [K, N], in declaration order."""
        values = (getattr(self, field.name) for field in fields(self))
        return torch.stack([value for value in values if value is not None])

    def unpack(self, packed: Tensor) -> Stats:
        """Reverses `pack` on [K, ...] rows: fields of `packed` where self has them."""
        rows = iter(packed.unbind(0))
        present = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        return Stats(**{name: next(rows) for name in present})

    @property
    def adds_up(self) -> bool:
        """Whether there is nothing but lse and fields that merge by adding."""
        others = (field.name for field in fields(self)[3:])
        return all(getattr(self, name) is None for name in others)

    def to_records(self) -> Tensor:
        """Returns [N, K] where `adds_up`: base and sum, which stand for lse = base + log sum, and
        the fields that are added. Any base will do: lse itself, with a sum of 1, or 0 over no
        columns."""
        added = [self.target_logit]
        if self.smooth_logit is not None:
            added.append(self.smooth_logit)
        return Stats.record_of(self.lse, *added)

    def from_records(self, records: Tensor) -> Stats:
        """Returns the statistics that merged records stand for, with the fields that self has."""
        _, _, *added = records.unbind(1)
        return Stats(Stats.lse_of(records), *added)

    @staticmethod
    def record_of(lse: Tensor, *added: Tensor) -> Tensor:
        return torch.stack([lse, (lse != -torch.inf).to(lse.dtype), *added], 1)

    @staticmethod
    def lse_of(records: Tensor) -> Tensor:
        return records[:, 0] + records[:, 1].log()


class MergeKernels(NamedTuple):
    """Kernels that merge lse and target logit of ranks, in place of `merge_parts`."""

    # lse [N], target logit [N], the header's eight numbers -> what a rank sends, [8 + 2 N]
    pack: Callable[[Tensor, Tensor, Sequence[int]], Tensor]
    # What all ranks sent [W, 8 + 2 N], how many tokens count -> lse and target logit [2, N],
    # whether it belongs together, [1], as `merge_header.is_sound`
    merge: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]


def zero_beyond(stats: Stats, count: Tensor) -> Stats:
    """Returns the statistics with 0 at tokens that don't count, where the ranks' zeros have
    merged."""
    packed = stats.pack()
    counts = torch.arange(packed.shape[1], device=packed.device) < count
    return stats.unpack(packed.where(counts, 0))


def logaddexp_parts(parts: Tensor) -> Tensor:
    """Returns log sum_r exp(parts[r]) over dim 0, in the order of r: [W, ...] -> [...].

    -inf parts (an empty shard) add nothing; all of them -inf give -inf.
    """
    top = parts.amax(0)
    base = top.masked_fill(top == -torch.inf, 0)
    return base + (parts - base).exp().sum(0).log()


def merge_parts(
    parts: Stats,  # fields [W, N]: one row a shard
    num_classes: Tensor,  # [W] columns of each shard, in the fields' dtype
    first_class: Tensor,  # [W] first token id of each shard
) -> Stats:
    """Merges the statistics of the shards: fields [N]. Pure arithmetic, deterministic.

    Source: log-add-exp arXiv:1805.02867; mean and m2 by Chan, Golub and LeVeque (1983).
    """
    lse = logaddexp_parts(parts.lse)
    merged: dict[str, Tensor] = {"lse": lse, "target_logit": parts.target_logit.sum(0)}
    if parts.smooth_logit is not None:
        merged["smooth_logit"] = parts.smooth_logit.sum(0)
    if parts.entropy is not None:
        # Chain rule of entropy: H = sum_r share_r (H_r - log share_r); 0 log 0 = 0.
        log_share = parts.lse - lse
        surprise = parts.entropy - log_share.masked_fill(parts.lse == -torch.inf, 0)
        merged["entropy"] = (log_share.exp() * surprise).sum(0)
    if parts.max_logit is not None and parts.target_is_argmax is not None:
        top = parts.max_logit.amax(0)
        # Equal logits: the lowest token id wins, as in torch.argmax over dense logits on CPU.
        order = torch.where(parts.max_logit == top, first_class[:, None], torch.inf)
        order = order.masked_fill((num_classes == 0)[:, None], torch.inf)
        winner = order.argmin(0, keepdim=True)
        merged["max_logit"] = top
        merged["target_is_argmax"] = parts.target_is_argmax.gather(0, winner)[0]
    elif parts.max_logit is not None:
        merged["max_logit"] = parts.max_logit.amax(0)
    if parts.mean_logit is not None:
        merged |= merge_moments(parts, num_classes)
    if parts.screened is not None:
        merged["screened"] = parts.screened.amin(0)
    return Stats(**merged)


def merge_moments(parts: Stats, num_classes: Tensor) -> dict[str, Tensor]:
    """Merges mean and squared deviations of [W, N] parts over num_classes [W] columns each."""
    assert parts.origin_logit is not None
    assert parts.mean_logit is not None and parts.m2_logit is not None
    share = num_classes[:, None] / num_classes.sum()
    origin = parts.origin_logit.index_select(0, num_classes.argmax(0, keepdim=True))[0]
    part_mean = (parts.origin_logit - origin) + parts.mean_logit
    mean = (share * part_mean).sum(0)
    between = num_classes[:, None] * (part_mean - mean) ** 2
    m2 = (parts.m2_logit + between).sum(0)
    return {"origin_logit": origin, "mean_logit": mean, "m2_logit": m2}


@dataclass(frozen=True)
class Upstream:
    """Gradient of the scalar loss with respect to each token's outputs, [N]; None: zero."""

    nll: Tensor | None = None
    lse: Tensor | None = None
    smooth_logit: Tensor | None = None
    entropy: Tensor | None = None

    def scaled(self, factor: Tensor | float) -> Upstream:
        """Returns all of them times `factor`, [N] or a number."""
        values = (getattr(self, field.name) for field in fields(self))
        return Upstream(*(None if value is None else factor * value for value in values))


@dataclass(frozen=True)
class LocalGrads:
    """The gradients that a backward returns; None where not needed."""

    hidden: Tensor | None  # [num_rows, D] as hidden, summed over ranks; their rows under scatter
    bias: Tensor | None  # [V_local] of this shard, complete, in the accumulation dtype
