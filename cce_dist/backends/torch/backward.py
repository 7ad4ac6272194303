"""Backward over this rank's shard, in chunked eager torch.

d_logits of a tile are recomputed (or taken from in_forward's buffer), multiplied into grad_hidden
and grad_weight, and freed. For each block of 128 tokens, the product of its two marginals replaces
the part of d_logits that the filter drops: docs/design/tail.md#the-marginals.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from cce_dist.backends.protocol import BackwardRequest
from cce_dist.backends.torch.filter import ColumnMask, gathered_logits
from cce_dist.backends.torch.forward import weighted_column_sum
from cce_dist.backends.torch.tiles import (
    TileSize,
    add_product,
    find_targets,
    logits_tile,
    operand_dtype,
    product,
    spans,
    sum_over_blocks,
    whole_blocks,
)
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, Tokens, Upstream, accumulate_dtype, largest_operand
from cce_dist.options import TOKEN_BLOCK

# The share of kept columns from which a tile is computed whole and masked: gathering rows of the
# weight then costs more than the products that it saves.
MASK_FROM = 0.5
# exp of it is 0 in float64, too.
LEAST_LOG_P = -1e4


def gradients(
    tokens: Tokens, head: Head, request: BackwardRequest, size: TileSize | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Computes the gradients of this rank's shard (no communication). Deterministic.

    d_logits = p (g_nll + g_lse) - onehot g_nll - g_entropy p (z - lse + entropy); sums in fp32
    (float64 for float64 inputs), each element of the weight's gradient stored once. A store holds
    the logits of `forward.statistics`, and is overwritten.

    Returns:
        [N, D] in the accumulation dtype, this shard's part of the hidden gradient.
        [V_local] in the accumulation dtype, the bias's. None where not needed.
    """
    upstream, stats, kept, store = request.upstream, request.stats, request.kept, request.store
    assert kept is None or isinstance(kept, ColumnMask)
    assert store is None or isinstance(store, Tensor)
    factors, entropy = _Factors.of(upstream, stats, head), stats.entropy
    if entropy is not None and stats.lse_rest is not None:
        entropy = entropy - stats.lse_rest
    sums = _Sums.of(tokens, head, request)
    task = _Task(tokens, head, stats.lse, entropy, factors, sums)
    size = size or TileSize.choose(head.weight, request.room.workspace_bytes)
    tail = None
    if kept is not None and kept.share is not None:
        draws = kept.drawn is not None and task.sums.hidden is not None
        tail = _Tail.of(task, kept.share, kept.dropped_mass, size, draws=draws)
    mean = None
    if upstream.smooth_logit is not None and head.softcap is None:
        mean = _MeanLogit.of(task, upstream.smooth_logit, size)

    for v0, v1 in spans(head.weight.shape[0], size.columns):
        task.sums.open_columns(v0, v1)
        columns = head.weight[v0:v1].to(task.operands)
        for i0, i1 in spans(len(tokens), size.tokens):
            blocks = slice(i0 // TOKEN_BLOCK, -(-i1 // TOKEN_BLOCK))
            mask = None if kept is None else kept.mask[blocks, v0:v1]
            if mask is None or bool(mask.all()):
                stored = None if store is None else store[i0:i1, v0:v1]
                task.whole_tile(i0, i1, columns, None, stored)
            elif float(mask.float().mean()) >= MASK_FROM:
                task.whole_tile(i0, i1, columns, mask, None)
            else:
                task.gathered_blocks(i0, i1, mask)
            if tail and kept and kept.drawn is not None and kept.times is not None:
                drawn = task.drawn_blocks(i0, i1, kept.drawn[blocks, v0:v1], kept.times)
                tail.drawn_mass[i0:i1] += drawn
        for term in (tail, mean):
            if term is not None:
                term.add_columns(task.sums, columns)
        task.sums.close_columns()
    for term in (tail, mean):
        if term is not None and task.sums.hidden is not None:
            term.add_hidden(task.sums.hidden)
    return sums.hidden, sums.bias


def invariant_gradients(
    tokens: Tokens, head: Head, request: BackwardRequest
) -> tuple[Tensor | None, Tensor | None]:
    """Computes `gradients` in tiles of one size: see `BackwardRequest.invariant`."""
    num_tokens, tokens = len(tokens), whole_blocks(tokens)

    def padded(x: Tensor | None) -> Tensor | None:
        return None if x is None else torch.nn.functional.pad(x, (0, len(tokens) - num_tokens))

    stats, upstream = request.stats, request.upstream
    lse, target_logit = padded(stats.lse), padded(stats.target_logit)
    assert lse is not None and target_logit is not None
    others = {"entropy": padded(stats.entropy), "lse_rest": padded(stats.lse_rest)}
    request = replace(
        request,
        stats=Stats(lse, target_logit, **others),
        upstream=Upstream(*(padded(getattr(upstream, field.name)) for field in fields(upstream))),
    )
    hidden, bias = gradients(tokens, head, request, TileSize.invariant(len(head.weight)))
    return None if hidden is None else hidden[:num_tokens], bias


@dataclass
class _Factors:
    """The upstream gradients as d_logits needs them, [N]; 16-bit operands are divided by
    `grad_scale`. The factors of p contain exp(-lse_rest), which exp(z - lse) lacks."""

    probability: Tensor  # g_nll + g_lse, the factor of p
    target: Tensor | None  # g_nll
    smooth: Tensor | None
    entropy: Tensor | None  # a factor of p
    grad_scale: Tensor  # power of two; d_logits over it are at most about `largest_operand`

    @classmethod
    def of(cls, upstream: Upstream, stats: Stats, head: Head) -> _Factors:
        lse, entropy = stats.lse, upstream.entropy
        parts = [g for g in (upstream.nll, upstream.lse) if g is not None]
        probability = sum(parts[1:], parts[0]) if parts else torch.zeros_like(lse)
        if stats.lse_rest is not None:
            exact = (-stats.lse_rest).exp()
            probability, entropy = probability * exact, None if entropy is None else entropy * exact
        gradients = (probability, upstream.nll, upstream.smooth_logit, entropy)
        grad_scale = torch.ones((), dtype=lse.dtype, device=lse.device)
        if lse.shape[0]:
            largest = torch.stack([g.abs().amax() for g in gradients if g is not None]).amax()
            largest *= abs(head.logit_scale) / largest_operand(head.weight.dtype)
            exponent = largest.clamp_min(torch.finfo(lse.dtype).tiny).log2().floor()
            grad_scale = exponent.exp2()
        return cls(probability, upstream.nll, upstream.smooth_logit, entropy, grad_scale)


@dataclass
class _Sums:
    """The memory where gradients accumulate; `columns` is that of the open vocabulary tile."""

    hidden: Tensor | None
    bias: Tensor | None
    weight: Tensor | None
    accumulate: bool
    dtype: torch.dtype
    start: int = 0
    stop: int = 0
    columns: Tensor | None = None

    @classmethod
    def of(cls, tokens: Tokens, head: Head, request: BackwardRequest) -> _Sums:
        weight, dtype = head.weight, accumulate_dtype(head.weight.dtype)
        shape, into = (len(tokens), weight.shape[1]), request.weight
        return cls(
            hidden=None if request.hidden is None else weight.new_zeros(shape, dtype=dtype),
            bias=weight.new_zeros(weight.shape[0], dtype=dtype) if request.bias else None,
            weight=None if into is None else into.rows,
            accumulate=into is not None and into.accumulate,
            dtype=dtype,
        )

    def open_columns(self, v0: int, v1: int) -> None:
        self.start, self.stop = v0, v1
        if self.weight is None:
            return
        if self.weight.dtype == self.dtype:
            columns = self.weight[v0:v1]
            self.columns = columns if self.accumulate else columns.zero_()
        else:
            self.columns = self.weight.new_zeros((v1 - v0, self.weight.shape[1]), dtype=self.dtype)

    def close_columns(self) -> None:
        if self.weight is not None and self.columns is not None and self.weight.dtype != self.dtype:
            self.weight[self.start : self.stop] = self.columns
        self.columns = None


@dataclass
class _Task:
    """One backward: the inputs of every tile, and the sums that they add to."""

    tokens: Tokens
    head: Head
    lse: Tensor
    entropy: Tensor | None  # minus `Stats.lse_rest`
    factors: _Factors
    sums: _Sums

    @property
    def operands(self) -> torch.dtype:
        return operand_dtype(self.head.weight)

    def whole_tile(
        self, i0: int, i1: int, columns: Tensor, mask: Tensor | None, stored: Tensor | None
    ) -> None:
        """Computes all columns of the open vocabulary tile; columns outside `mask` count as
        dropped."""
        v0, v1 = self.sums.start, self.sums.stop
        hidden = self.tokens.take(i0, i1).to(self.operands)
        if stored is None:
            bias = None if self.head.bias is None else self.head.bias[v0:v1]
            z, slope = logits_tile(hidden, columns, bias, self.head, self.tokens.scale_of(i0, i1))
        else:
            z, slope = stored, _slope_of(stored, self.head)
        grad = self._grad_logits(z, slope, i0, i1, slice(v0, v1))
        if mask is not None:
            grad *= mask.repeat_interleave(TOKEN_BLOCK, 0)[: i1 - i0]
        operand, unscale = self._to_operand(grad)
        if self.sums.hidden is not None:
            add_product(self.sums.hidden[i0:i1], operand, columns, unscale)
        if self.sums.columns is not None:
            add_product(self.sums.columns, operand.T, hidden, unscale)
        if self.sums.bias is not None:
            self.sums.bias[v0:v1] += grad.sum(0)

    def gathered_blocks(self, i0: int, i1: int, mask: Tensor) -> None:
        """Computes only the kept columns of the open tile, one block of 128 tokens at a time."""
        for block, (j0, j1) in enumerate(spans(i1 - i0, TOKEN_BLOCK)):
            at = mask[block].nonzero()[:, 0]
            index, (b0, b1) = at + self.sums.start, (i0 + j0, i0 + j1)
            hidden = self.tokens.take(b0, b1).to(self.operands)
            scale = self.tokens.scale_of(b0, b1)
            z, slope = gathered_logits(hidden, self.head, index, scale)
            grad = self._grad_logits(z, slope, b0, b1, index)
            operand, unscale = self._to_operand(grad)
            if self.sums.hidden is not None:
                columns = self.head.weight.index_select(0, index).to(self.operands)
                add_product(self.sums.hidden[b0:b1], operand, columns, unscale)
            if self.sums.columns is not None:
                part = product(operand.T, hidden)
                self.sums.columns.index_add_(0, at, part if unscale is None else part * unscale)
            if self.sums.bias is not None:
                self.sums.bias.index_add_(0, index, grad.sum(0))

    def drawn_blocks(self, i0: int, i1: int, drawn: Tensor, times: Tensor) -> Tensor:
        """Adds the drawn columns' hidden gradient; returns the sum of their d_logits, without the
        entropy's part, [i1 - i0]."""
        total = torch.zeros_like(self.lse[i0:i1])
        if self.sums.hidden is None:
            return total
        for block, (j0, j1) in enumerate(spans(i1 - i0, TOKEN_BLOCK)):
            index, (b0, b1) = drawn[block].nonzero()[:, 0] + self.sums.start, (i0 + j0, i0 + j1)
            if len(index) == 0:
                continue
            hidden = self.tokens.take(b0, b1).to(self.operands)
            scale = self.tokens.scale_of(b0, b1)
            z, slope = gathered_logits(hidden, self.head, index, scale)
            if self.factors.entropy is not None:
                plain = self._grad_logits(z.clone(), slope, b0, b1, index, entropy=False)
                total[j0:j1] = plain.mul_(times[index]).sum(1)
            grad = self._grad_logits(z, slope, b0, b1, index).mul_(times[index])
            operand, unscale = self._to_operand(grad)
            columns = self.head.weight.index_select(0, index).to(self.operands)
            add_product(self.sums.hidden[b0:b1], operand, columns, unscale)
            if self.factors.entropy is None:
                total[j0:j1] = grad.sum(1)
        return total

    def _grad_logits(
        self,
        z: Tensor,
        slope: Tensor | None,
        i0: int,
        i1: int,
        columns: slice | Tensor,
        *,
        entropy: bool = True,
    ) -> Tensor:
        """Turns z [n, columns] into the gradient of the loss by E . C + bias, in place.

        Args: entropy: with the entropy's part.
        """
        factors, lse = self.factors, self.lse[i0:i1, None]
        factor = factors.probability[i0:i1, None]
        if entropy and factors.entropy is not None:
            assert self.entropy is not None
            # Of logits of -inf: p is 0 far above the bound, and the upstream gradient may be large.
            log_p = (z - lse).clamp_min_(LEAST_LOG_P)
            factor = factor - factors.entropy[i0:i1, None] * (log_p + self.entropy[i0:i1, None])
        grad = z.sub_(lse).exp_().mul_(factor)
        if factors.target is not None:
            rows, at = find_targets(self.tokens.local_targets[i0:i1], columns)
            grad[rows, at] -= factors.target[i0:i1][rows]
        if factors.smooth is not None and self.head.softcap is not None:
            share = factors.smooth[i0:i1, None] / self.head.vocab_size
            weights = self.head.class_weight
            grad += share if weights is None else share * weights[columns].to(grad.dtype)
        if slope is not None:
            grad *= slope
        return grad if self.head.logit_scale == 1 else grad.mul_(self.head.logit_scale)

    def _to_operand(self, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        # A mean over tokens puts d_logits below fp16's smallest number: the sum undoes this scale.
        if grad.dtype == self.operands:
            return grad, None
        return (grad / self.factors.grad_scale).to(self.operands), self.factors.grad_scale


def _slope_of(z: Tensor, head: Head) -> Tensor | None:
    """Computes softcap'(z) from z itself."""
    if head.softcap is None:
        return None
    return 1 - (z / (head.softcap * head.logit_scale)) ** 2


@dataclass
class _Tail:
    """The dropped part as the product of its marginals: each token's mass x each column's share."""

    share: Tensor  # [num_blocks, V_local]
    mass: Tensor  # [N] upstream times dropped mass, for the hidden gradient
    block_mass: Tensor  # [num_blocks]
    block_hidden: Tensor  # [num_blocks, D] sum of mass_i E_i
    centroid: Tensor  # [num_blocks, D] sum over columns of share_v C_v, filled tile by tile
    drawn_mass: Tensor  # [N] sum of d_logits of drawn columns, filled tile by tile

    @classmethod
    def of(
        cls, task: _Task, share: Tensor, dropped_mass: Tensor, size: TileSize, *, draws: bool
    ) -> _Tail:
        mass = task.factors.probability * dropped_mass * task.head.logit_scale
        dtype, dim = mass.dtype, task.head.weight.shape[1]
        of_hidden = mass
        if task.factors.entropy is not None:
            assert task.entropy is not None
            # The mean of log p over a block's dropped columns, if p is m_i s_v.
            spread = -torch.special.entr(share).sum(1).repeat_interleave(TOKEN_BLOCK)
            log_p = dropped_mass.clamp_min(torch.finfo(dtype).tiny).log() + spread[: len(mass)]
            surprise = dropped_mass * (log_p + task.entropy)
            mass = mass - task.factors.entropy * surprise * task.head.logit_scale
            # Drawn columns add the entropy's part by themselves.
            of_hidden = of_hidden if draws else mass
        block_hidden = mass.new_zeros(share.shape[0], dim)
        for i0, i1 in spans(len(task.tokens), size.tokens):
            blocks = slice(i0 // TOKEN_BLOCK, -(-i1 // TOKEN_BLOCK))
            hidden = task.tokens.take(i0, i1).to(dtype)
            block_hidden[blocks] = sum_over_blocks(mass[i0:i1], hidden)
        block_mass = sum_over_blocks(mass, mass.new_ones(mass.shape[0], 1))[:, 0]
        centroid, drawn_mass = torch.zeros_like(block_hidden), torch.zeros_like(mass)
        return cls(share, of_hidden, block_mass, block_hidden, centroid, drawn_mass)

    def add_columns(self, sums: _Sums, columns: Tensor) -> None:
        share = self.share[:, sums.start : sums.stop]
        self.centroid.addmm_(share, columns.to(share.dtype))
        if sums.columns is not None:
            sums.columns.addmm_(share.T, self.block_hidden)
        if sums.bias is not None:
            sums.bias[sums.start : sums.stop] += share.T @ self.block_mass

    def add_hidden(self, grad_hidden: Tensor) -> None:
        for block, (i0, i1) in enumerate(spans(grad_hidden.shape[0], TOKEN_BLOCK)):
            # The centroid takes the mass that drawn columns did not add: rows still sum to zero.
            undrawn_mass = self.mass[i0:i1] - self.drawn_mass[i0:i1]
            grad_hidden[i0:i1].addr_(undrawn_mass, self.centroid[block])


@dataclass
class _MeanLogit:
    """The gradient of label smoothing's mean logit, a rank-one term: without a softcap that mean is
    linear in hidden."""

    factors: Tensor  # [N] upstream times logit_scale / V
    column_sum: Tensor  # [D] sum_v class_weight_v C_v
    class_weight: Tensor | None
    hidden_sum: Tensor  # [D] sum_i factor_i E_i
    factor_sum: Tensor  # []

    @classmethod
    def of(cls, task: _Task, smooth: Tensor, size: TileSize) -> _MeanLogit:
        factors = smooth * (task.head.logit_scale / task.head.vocab_size)
        hidden_sum = factors.new_zeros(task.head.weight.shape[1])
        for i0, i1 in spans(len(task.tokens), size.tokens):
            hidden_sum += factors[i0:i1] @ task.tokens.take(i0, i1).to(factors.dtype)
        column_sum, _ = weighted_column_sum(task.head, size)
        return cls(factors, column_sum, task.head.class_weight, hidden_sum, factors.sum())

    def add_columns(self, sums: _Sums, columns: Tensor) -> None:
        v0, v1 = sums.start, sums.stop
        weights = self.factors.new_ones(v1 - v0)
        if self.class_weight is not None:
            weights = self.class_weight[v0:v1].to(weights.dtype)
        if sums.columns is not None:
            sums.columns.addr_(weights, self.hidden_sum)
        if sums.bias is not None:
            sums.bias[v0:v1] += weights * self.factor_sum

    def add_hidden(self, grad_hidden: Tensor) -> None:
        grad_hidden.addr_(self.factors, self.column_sum)
