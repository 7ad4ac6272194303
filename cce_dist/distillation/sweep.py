"""Sweeps over the tiles of both models' logits on this rank's shard.

The products are torch's. What follows them is eager torch too, or kernels that read a tile once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cce_dist.backends.protocol import WeightGrad
from cce_dist.backends.torch.tiles import (
    TILES_ALIVE,
    TileSize,
    add_product,
    exact_tiles,
    find_targets,
    operand_dtype,
    spans,
)
from cce_dist.core.types import Head, Tokens, accumulate_dtype, largest_operand
from cce_dist.distillation.divergences import Divergences, Sums, log_softmax, log_sum

if TYPE_CHECKING:
    from cce_dist.backends.triton.teacher.tiles import TileKernels

# Tiles of both models in memory at once, over those of one model's loss, in eager torch.
TILES_OVER = 3


@dataclass(frozen=True)
class Pair:
    """A student's and a teacher's tokens and head, and what of them is compared."""

    student: Tokens
    head: Head
    teacher: Tokens
    teacher_head: Head
    divergences: Divergences
    temperature: float
    has_targets: bool  # the target's cross-entropy, at temperature 1, is part of the loss
    workspace_bytes: int
    kernels: TileKernels | None  # None: eager torch
    whole: Tile | None = None  # all tokens and columns, whose logits stay in memory

    @property
    def dtype(self) -> torch.dtype:
        both = (accumulate_dtype(x.weight.dtype) for x in (self.head, self.teacher_head))
        return max(both, key=lambda dtype: dtype.itemsize)

    @property
    def dtype_of_sums(self) -> torch.dtype:
        """See `Sums`."""
        narrow = self.kernels is not None and all(
            x.weight.element_size() == 2 for x in (self.head, self.teacher_head)
        )
        return torch.float32 if narrow else torch.float64

    @property
    def size(self) -> TileSize:
        weight, memory = self.head.weight, self.workspace_bytes
        if self.kernels is None:
            return TileSize.choose(weight, memory // TILES_OVER)
        return TileSize.tallest(weight, len(self.student), memory // self.bytes_of_logits)

    @property
    def bytes_of_logits(self) -> int:
        """The bytes that a token's logits of one column take until their gradient is there."""
        if self.kernels is None:
            return TILES_OVER * TILES_ALIVE * accumulate_dtype(self.head.weight.dtype).itemsize
        # Both models' logits, of which the student's become the gradient; the softcap's slope; of a
        # gradient that a bias sums in full precision the rounded one.
        numbers = 2 + (self.head.softcap is not None)
        rounded = 0 if self.head.bias is None else operand_dtype(self.head.weight).itemsize
        return numbers * self.dtype.itemsize + rounded

    def of_tokens(self, start: int, stop: int) -> Pair:
        """Returns the pair of some tokens, with all their logits in memory."""
        student, teacher = (x.slice(start, stop).alone() for x in (self.student, self.teacher))
        part = replace(self, student=student, teacher=teacher)
        size = TileSize(max(1, stop - start), max(1, self.head.weight.shape[0]))
        return replace(part, whole=next(part._tiles_of(size), None))

    def tiles(self) -> Iterator[Tile]:
        """Yields all tiles, those of the same columns one after the other."""
        if self.whole is None:
            yield from self._tiles_of(self.size)
        else:
            yield self.whole

    def _tiles_of(self, size: TileSize) -> Iterator[Tile]:
        of_student = exact_tiles(self.student, self.head)
        of_teacher = exact_tiles(self.teacher, self.teacher_head, wants_slope=False)
        for first, last in spans(self.head.weight.shape[0], size.columns):
            student, teacher = of_student(first, last), of_teacher(first, last)
            for start, stop in spans(len(self.student), size.tokens):
                z, slope = student(start, stop)
                y, _ = teacher(start, stop)
                at, columns = slice(start, stop), slice(first, last)
                z, y = z.to(self.dtype), y.to(self.dtype)
                if self.kernels is None:
                    y = y.div_(self.temperature)
                yield Tile(at, columns, z, slope, y)

    def rows(self, number: int, value: float, dtype: torch.dtype) -> Tensor:
        """Returns sums over no columns, [number, N]. A kernel writes them at a shard's first tile,
        and does not read them."""
        hidden, shape = self.student.hidden, (number, len(self.student))
        if self.kernels is not None and self.head.weight.shape[0]:
            return hidden.new_empty(shape, dtype=dtype)
        return hidden.new_full(shape, value, dtype=dtype)


class Tile(NamedTuple):
    tokens: slice
    columns: slice
    z: Tensor  # the student's logits at temperature 1
    slope: Tensor | None  # of the student's softcap
    y: Tensor  # the teacher's logits, in eager torch over the temperature


class FirstPass(NamedTuple):
    """Sums over this rank's columns, [N] each."""

    sums: Sums
    # Of the student at temperature 1; anything unless `has_targets`. So is the next.
    lse: Tensor
    target_logit: Tensor  # 0 where the target is not of this shard
    # [1] above 0 where columns' logits of the teacher are in full precision; None: all are
    full: Tensor | None = None
    rows: Tensor | None = None  # [3 or 5, N], of which these sums are the rows; None: of none

    @classmethod
    def of_rows(cls, rows: Tensor, full: Tensor | None = None) -> FirstPass:
        """Args: rows: the student's lse, the teacher's, KL; with targets the student's lse at
        temperature 1 and the target's logit. Without, these two are any of the others."""
        student, teacher, kl, *others = rows.unbind(0)
        lse, target_logit = others or (student, kl)
        return cls(Sums(student, teacher, kl), lse, target_logit, full, rows)


def first_pass(pair: Pair) -> FirstPass:
    rows = pair.rows(5 if pair.has_targets else 3, -torch.inf, pair.dtype_of_sums)
    sums = FirstPass.of_rows(rows)
    total, lse, target_logit = sums[:3]
    if pair.kernels is None or not pair.head.weight.shape[0]:
        # KL and the target's logit are no log-sum-exps.
        rows[2::2].zero_()
    local_targets = pair.student.local_targets
    for tile in pair.tiles():
        at = tile.tokens
        if pair.kernels is not None:
            targets = local_targets[at] if pair.has_targets else None
            pair.kernels.add_sums(tile.z, tile.y, tile.columns.start, rows[:, at], targets)
            continue
        new = pair.divergences.sums(tile.z / pair.temperature, tile.y)
        parts = (torch.stack([old[at], part]) for old, part in zip(total, new, strict=True))
        for old, merged in zip(
            total, pair.divergences.merge(Sums(*parts), pair.dtype), strict=True
        ):
            old[at] = merged
        if pair.has_targets:
            lse[at] = torch.logaddexp(lse[at], log_sum(tile.z))
            tokens, columns = find_targets(local_targets[at], tile.columns)
            target_logit[tokens + at.start] = tile.z[tokens, columns].to(rows.dtype)
    return sums


def second_pass(pair: Pair, sums: Sums) -> Tensor:
    """Returns this rank's parts of the value and of the mean slope, [2, N]: see `terms`."""
    terms = pair.rows(2, 0.0, pair.dtype)
    for tile in pair.tiles():
        at = tile.tokens
        some = Sums(*(x[at] for x in sums))
        if pair.kernels is not None:
            pair.kernels.add_terms(tile.z, tile.y, tile.columns.start, some[:2], terms[:, at])
            continue
        value, slope = pair.divergences.terms(tile.z / pair.temperature, tile.y, some)
        terms[0, at] += value
        terms[1, at] += slope
    return terms


class Upstream(NamedTuple):
    """Gradients of the scalar loss by each token's values, [N]."""

    divergence: Tensor
    nll: Tensor | None  # None: zero


def gradients(
    pair: Pair,
    sums: Sums,
    mean: Tensor,
    lse: Tensor,
    upstream: Upstream,
    *,
    hidden: bool,
    weight: WeightGrad | None,
    bias: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Computes the gradients by the student's tensors; the weight's is written.

    Returns: hidden's part of this shard, [N, D], and bias's, [V_local], in the accumulation dtype.
    """
    head, tokens, dtype = pair.head, pair.student, accumulate_dtype(pair.head.weight.dtype)
    new = head.weight.new_zeros
    of_hidden = new(len(tokens), head.weight.shape[1], dtype=dtype) if hidden else None
    of_bias = new(head.weight.shape[0], dtype=dtype) if bias else None
    columns, open_columns, scale = None, slice(0, 0), scale_of(pair, upstream)
    if weight is not None and not weight.accumulate and not len(tokens):
        # There is no tile that would store its columns.
        weight.rows.zero_()
    for tile in pair.tiles():
        if tile.columns != open_columns:
            _store(weight, open_columns, columns)
            open_columns = tile.columns
            columns = None
            if weight is not None:
                columns = new(tile.z.shape[1], head.weight.shape[1], dtype=dtype)
        grad = d_logits(pair, tile, (*sums[:2], mean, lse), upstream, scale, wide=bias)
        operand = grad.to(operand_dtype(head.weight))
        if of_hidden is not None:
            rows = head.weight[tile.columns].to(operand.dtype)
            add_product(of_hidden[tile.tokens], operand, rows, scale)
        if columns is not None:
            rows = tokens.take(tile.tokens.start, tile.tokens.stop).to(operand.dtype)
            add_product(columns, operand.T, rows, scale)
        if of_bias is not None:
            of_bias[tile.columns] += grad.sum(0) if scale is None else grad.sum(0) * scale
    _store(weight, open_columns, columns)
    return of_hidden, of_bias


def d_logits(
    pair: Pair,
    tile: Tile,
    sums: tuple[Tensor, Tensor, Tensor, Tensor],  # [N]: both lses, mean slope, lse at temperature 1
    upstream: Upstream,
    scale: Tensor | None,  # see `scale_of`
    *,
    wide: bool,  # a sum over tokens has the digits of a gradient that is not rounded
) -> Tensor:
    """Returns the gradient by E . C + bias over `scale`, [n, columns], in memory of the tile."""
    weight, at, nll = pair.head.weight, tile.tokens, upstream.nll
    dtype = accumulate_dtype(weight.dtype) if wide else operand_dtype(weight)
    student, teacher, mean, lse = sums
    if pair.kernels is None:
        grad = _grad_logits(pair, tile, Sums(student, teacher, mean), mean, lse, upstream)
        return (grad if scale is None else grad / scale).to(dtype)
    return pair.kernels.gradient(
        *(tile.z, tile.y, tile.slope, tile.columns.start, pair.student.local_targets[at]),
        tuple(x[at] for x in sums),
        (upstream.divergence[at], None if nll is None else nll[at]),
        *(pair.head.logit_scale, scale, dtype),
    )


def _store(weight: WeightGrad | None, at: slice, columns: Tensor | None) -> None:
    if weight is None or columns is None:
        return
    if weight.accumulate:
        weight.rows[at] += columns
    else:
        weight.rows[at] = columns.to(weight.rows.dtype)


def _grad_logits(
    pair: Pair, tile: Tile, sums: Sums, mean: Tensor, lse: Tensor, upstream: Upstream
) -> Tensor:
    """Returns the gradient by E . C + bias, [n, columns]."""
    at, T = tile.tokens, pair.temperature
    some = Sums(*(x[at] for x in sums))
    grad = pair.divergences.derivative(tile.z / T, tile.y, some, mean[at])
    grad *= (upstream.divergence[at] / T)[:, None]
    if upstream.nll is not None:
        factor = upstream.nll[at]
        grad += log_softmax(tile.z, lse[at]).exp_() * factor[:, None]
        rows, columns = find_targets(pair.student.local_targets[at], tile.columns)
        grad[rows, columns] -= factor[rows]
    if tile.slope is not None:
        grad *= tile.slope
    return grad * pair.head.logit_scale


def scale_of(pair: Pair, upstream: Upstream) -> Tensor | None:
    """Returns a power of two near the largest upstream gradient, by which fp16 operands are
    divided: a mean over tokens is below fp16's smallest number. None: there are none."""
    weight = pair.head.weight
    if operand_dtype(weight) != torch.float16 or not len(pair.student):
        return None
    parts = [x for x in upstream if x is not None]
    largest = torch.stack([x.abs().amax() for x in parts]).amax()
    largest *= abs(pair.head.logit_scale) / largest_operand(weight.dtype)
    return largest.clamp_min(torch.finfo(largest.dtype).tiny).log2().floor().exp2()
