"""Records that go into a rank's share of the loss, and the gradients that come out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from cce_dist.options import Screen

# Returns a weight's 8-bit rows: those of an earlier call, or else those that the function makes;
# None: each call makes its own.
QuantizeOnce = Callable[[Tensor, "Screen", Callable[[], "QuantizedRows"]], "QuantizedRows | None"]


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which logits, sums and gradients are kept until they are stored."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def largest_operand(dtype: torch.dtype) -> float:
    """Returns a power of two near which the largest d_logits of 16-bit operands are to lie.

    fp16 spans 2^-24 to 2^16. With the largest at 2^8, tokens of small upstream gradients keep their
    digits beside a token of a large one. Another 2^8 are left for an entropy's d_logits, up to ln V
    times the upstream gradient, and for sums of several d_logits.
    """
    return 2.0**8 if dtype == torch.float16 else 1.0


@dataclass(frozen=True)
class QuantizedRows:
    """A weight's rows in 8 bits: channel * (row - centre) is about the row's scale times values."""

    values: Tensor  # [R, stride] int8 | float8_e4m3fn; the first D of a row are values
    of_rows: Tensor  # [2, R] fp32 the scales; row . hidden_centre
    centre: Tensor  # [D] fp32
    channel: Tensor  # [D] fp32 powers of two; hidden states are divided by them
    hidden_centre: Tensor  # [D] fp32 subtracted from hidden states before that
    for_hidden: Tensor  # [2, D] fp32: 1 / channel; -hidden_centre / channel
    # [3] fp32: the mean over rows of |channel * (row - centre)|^2; the mean of the squared rounding
    # error; centre . hidden_centre
    mean: Tensor


@dataclass(frozen=True)
class Head:
    """One rank's rows of the LM head, without padded rows, and the options of its logits."""

    weight: Tensor  # [V_local, D]
    bias: Tensor | None  # [V_local], any float dtype
    class_weight: Tensor | None  # [V_local] fp32, this shard's slice
    vocab_size: int  # V of the whole vocabulary
    softcap: float | None
    logit_scale: float
    quantized: QuantizedRows | None = None  # the same rows in 8 bits; None: no copy is kept
    quantize_once: QuantizeOnce | None = None  # None: each call quantises the rows

    def rows(self, start: int, stop: int) -> Head:
        """Returns the head of rows [start, stop)."""

        def part(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[start:stop]

        parts = part(self.bias), part(self.class_weight)
        return Head(
            self.weight[start:stop], *parts, self.vocab_size, self.softcap, self.logit_scale
        )

    def quantized_by(
        self,
        quantize: Callable[[Tokens, Tensor, Screen], QuantizedRows],
        tokens: Tokens,
        screen: Screen,
    ) -> Head:
        """Returns the head with `quantized`, if several calls share one copy; else itself."""
        if self.quantize_once is None:
            return self
        make = functools.partial(quantize, tokens, self.weight, screen)
        return replace(self, quantized=self.quantize_once(self.weight, screen, make))


@dataclass(frozen=True)
class Tokens:
    """The tokens that are computed; hidden may have more rows (tokens ignored or shifted out).

    In a call by kernels of one rank hidden may be a view of its first rows: see `Extension`. They
    read it by `rows`; `take` and `alone` need all rows.
    """

    hidden: Tensor  # [N_all, D]
    rows: Tensor | None  # [N] int64, rows of hidden; None: all of them
    local_targets: Tensor  # [N] int64, or int32 where it fits; -1 = not in this shard
    # [1] int32: only the first `count` tokens are computed, and the host doesn't know how many.
    count: Tensor | None = None
    # Gathers the ranks' tokens into hidden, on the stream on which it is called, once. None: hidden
    # is there.
    fill: Callable[[], None] | None = None
    # [N] in the accumulation dtype: multiplies each token's logits, beside Head.logit_scale.
    scale: Tensor | None = None

    def __len__(self) -> int:
        return self.local_targets.shape[0]

    def take(self, start: int, stop: int) -> Tensor:
        """Returns hidden of tokens [start, stop): a view, or a copy if hidden has more rows."""
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

    def chunks(self, size: int) -> list[Tokens]:
        """Returns consecutive slices of `size` tokens, the last of what is left; without tokens one
        empty slice."""
        whole, starts = replace(self, count=None), range(0, max(len(self), 1), size)
        slices = [whole.slice(start, start + size) for start in starts]
        if self.count is None:
            return slices
        counts = [self.count]
        if len(slices) > 1:
            # All at once, 16 bytes apart: one binary serves pointers that are aligned alike.
            firsts = torch.arange(0, len(self), size, dtype=torch.int32, device=self.count.device)
            left = (self.count - firsts[:, None].expand(-1, 4)).clamp(0, size)
            counts = [each[:1] for each in left.unbind()]
        return [replace(x, count=count) for x, count in zip(slices, counts, strict=True)]

    def alone(self, places: Tensor | None = None) -> Tokens:
        """Returns these tokens with a hidden of no other rows: a view, or a copy as `take` makes
        it. Args: places: [at least N] int64, 0 and on, for kernels, which would make it."""
        rows = None if places is None else places[: len(self)]
        return replace(self, hidden=self.take(0, len(self)), rows=rows)


@dataclass(frozen=True)
class Pairs:
    """Pairs of a token and a token id whose logits a caller wants, in the order of tokens."""

    rows: Tensor  # [P] int64, rows of hidden, the same for all pairs of a token; -1: left out
    ids: Tensor  # [P] int64 in [0, vocab_size)
    offsets: Tensor  # [T + 1] int64: where the pairs of each token start
    order: Tensor  # [P] int64: the pairs sorted by id, those of an id in the order of tokens

    def columns(self, first: int, count: int) -> Tensor:
        """Returns the rows of a weight of ids [first, first + count), [P]; -1: of another shard, or
        left out."""
        column = self.ids - first
        return column.where((column >= 0) & (column < count) & (self.rows >= 0), -1)


class Picked(NamedTuple):
    """The targets that count, out of N targets.

    A backend that does not wait for their number has N entries in each field: first those of the
    targets that count. Other backends have entries of these targets alone.
    """

    targets: Tensor  # int64, 0 for a target that does not count
    rows: Tensor | None  # int64, the place among the N targets; None: all count
    count: Tensor | None = None  # [1] int32, the number of targets that count
    counts: Tensor | None = None  # bool, True for a target that counts; None: all count
    local_targets: Tensor | None = None  # int32, -1 = not in this shard; None: not computed yet
    # [1] int32, 0 if a target is no class; None: not computed yet; True: the device checks it
    in_range: Tensor | bool | None = None
    number: Tensor | None = None  # [1] fp32, the larger of `count` and 1; None: not computed yet
    places: Tensor | None = None  # int64, the inverse of `rows`; None: not computed yet


@dataclass(frozen=True)
class Wanted:
    """Optional statistics that the forward collects from the tiles of logits."""

    smooth_logit: bool = False
    entropy: bool = False
    sum_p2: bool = False
    correct: bool = False
    moments: bool = False
    screened: bool = False


@dataclass(frozen=True)
class Upstream:
    """Gradient of the scalar loss with respect to each token's outputs, [N]; None: zero."""

    nll: Tensor | None = None
    lse: Tensor | None = None
    smooth_logit: Tensor | None = None
    entropy: Tensor | None = None

    def scaled(self, factor: Tensor | float) -> Upstream:
        """Returns the gradients times `factor`, which is [N] or a number."""
        values = (getattr(self, field.name) for field in fields(self))
        return Upstream(*(None if value is None else factor * value for value in values))


@dataclass(frozen=True)
class LocalGrads:
    """The gradients that a backward returns; None: not needed."""

    # [num_rows, D], summed over ranks; under sequence parallel this rank's rows
    hidden: Tensor | None
    bias: Tensor | None  # [V_local] of this shard, complete, in the accumulation dtype
