"""Reductions of per-token vectors to the results: the tokens that count, and the weight of each.

They are plain torch on [N] vectors. Within the compiler autograd differentiates them; elsewhere
`TokenLoss.upstream` is their derivative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.core.gathers import permuted
from cce_dist.core.types import Picked, Upstream, accumulate_dtype
from cce_dist.options import LossOptions


@dataclass(frozen=True)
class PickedTokens:
    """The tokens that count: each has a target after the shift, and it is not ignored."""

    targets: Tensor  # [N]
    rows: Tensor | None  # [N] int64 among all tokens; None: every token
    # [1] int32, counted on the device. Only the first `count` of all tokens count; the other
    # tokens come after them, with target 0.
    count: Tensor | None = None
    counts: Tensor | None = None  # [N] bool: True for a token that counts; None: all tokens count
    # None: the backend has not computed them. See `Picked`.
    local_targets: Tensor | None = None
    in_range: Tensor | bool | None = None
    number_on_device: Tensor | None = None
    places: Tensor | None = None

    def number(self) -> Tensor | float:
        """Returns the number of tokens that count, at least 1."""
        if self.count is None:
            return float(max(self.targets.shape[0], 1))
        on_device = self.number_on_device
        return self.count.clamp_min(1) if on_device is None else on_device

    def scatter_to_shape(self, values: Tensor, shape: torch.Size, shift: int) -> Tensor:
        """Scatters values [N] to targets' (shifted) shape, with 0 elsewhere."""
        if self.places is not None and self.rows is not None:
            values = permuted(values, self.places, self.rows)
        elif self.rows is not None:
            # With a count on the device every token has a value, 0 where it does not count.
            new = values.new_zeros if self.count is None else values.new_empty
            # In place: index_copy would first copy the tensor without values, a launch more.
            values = new(shape.numel()).index_copy_(0, self.rows, values)
        values = values.view(shape)
        return values[..., : max(shape[-1] - shift, 0)] if shift else values

    def take(self, values: Tensor, shift: int) -> Tensor:
        """Takes values [N] of the tokens that count out of targets' unshifted shape."""
        values = shifted(values, shift, 0).reshape(-1)
        if self.places is not None and self.rows is not None:
            return permuted(values, self.rows, self.places)
        return values if self.rows is None else values.index_select(0, self.rows)


def shifted(values: Tensor, shift: int, fill: int) -> Tensor:
    """Moves values by `shift` towards the front of the last dim; `fill` follows them."""
    if not shift:
        return values
    pad = values.new_full((*values.shape[:-1], min(shift, values.shape[-1])), fill)
    return torch.cat([values[..., shift:], pad], -1)


def gathered(values: Tensor, rows: Tensor | None, shape: torch.Size, shift: int) -> Tensor:
    """Takes values [N] out of the shape to which `PickedTokens.scatter_to_shape` scatters them."""
    if shift:
        pad = values.new_zeros(*shape[:-1], min(shift, shape[-1]))
        values = torch.cat([values, pad], -1)
    values = values.reshape(-1)
    return values if rows is None else values.index_select(0, rows)


def grad_of_taken(
    grad: Tensor,  # [N]
    like: Tensor,  # the argument of `PickedTokens.take`: targets' shape, unshifted
    rows: Tensor | None,
    counts: Tensor | None,  # False: a constant replaced the value, which gets gradient 0
    shift: int,
) -> Tensor:
    """Backward of `PickedTokens.take`: returns the gradient of its argument, in like's shape."""
    if counts is not None:
        grad = grad.where(counts, 0)
    if rows is not None:
        grad = grad.new_zeros(like.numel()).index_copy_(0, rows, grad)
    grad = grad.view(like.shape)
    if shift:
        size = like.shape[-1]
        pad = grad.new_zeros(*like.shape[:-1], min(shift, size))
        grad = torch.cat([pad, grad[..., : max(size - shift, 0)]], -1)
    return grad.to(like.dtype)


def scale_of_tokens(
    temperature: Tensor,  # targets' shape, unshifted
    picked: PickedTokens,
    shift: int,
    dtype: torch.dtype,
) -> Tensor:
    """Returns 1 / temperature of each token that counts, 1 for the others: [N] in `dtype`."""
    taken = picked.take(temperature.to(dtype), shift)
    return (taken if picked.counts is None else taken.where(picked.counts, 1)).reciprocal()


def pick_tokens(
    targets: Tensor,
    options: LossOptions,
    pick: Callable[[Tensor, int], Picked],  # a backend's function of ids [N] and ignore_index
) -> PickedTokens:
    """Picks the tokens that the loss computes; other tokens cost nothing."""
    ids = shifted(targets, options.shift, options.ignore_index).reshape(-1)
    return PickedTokens(*pick(ids, options.ignore_index))


@dataclass(frozen=True)
class TokenLoss:
    """A token's loss as a function of its nll, lse and mean logit."""

    smoothing: float
    z_loss: float
    target_weight: Tensor | None  # [N] the target's class weight
    mean_class_weight: Tensor | float
    token_weight: Tensor | None  # [N], 0 at tokens that do not count
    denominator: Tensor | float  # of the mean; 1 for other reductions

    @classmethod
    def of(
        cls,
        picked: PickedTokens,
        options: LossOptions,
        token_weight: Tensor | None,
        class_weight: Tensor | None,
        hidden: Tensor,
    ) -> TokenLoss:
        dtype = accumulate_dtype(hidden.dtype)
        target_weight, mean_class_weight, denominator = None, 1.0, 1.0
        counts = picked.counts
        if class_weight is not None:
            target_weight = class_weight.to(dtype).index_select(0, picked.targets)
            if counts is not None:
                target_weight = target_weight.where(counts, 0)
            mean_class_weight = class_weight.to(dtype).mean()
        if options.reduction == "mean":
            denominator = picked.number()
            if target_weight is not None:
                total = target_weight.sum()
                denominator = torch.where(total == 0, 1, total)
        if token_weight is not None:
            token_weight = picked.take(token_weight.to(dtype), options.shift)
            if counts is not None:
                token_weight = token_weight.where(counts, 0)
        return cls(
            options.label_smoothing,
            options.z_loss,
            target_weight,
            mean_class_weight,
            token_weight,
            denominator,
        )

    @property
    def is_nll(self) -> bool:
        """Tells whether a token's loss is its nll, but for the denominator."""
        weights = self.target_weight, self.token_weight
        return not self.smoothing and not self.z_loss and all(x is None for x in weights)

    def per_token(self, nll: Tensor, lse: Tensor, smooth: Tensor | None, at: slice) -> Tensor:
        """Returns the losses of tokens `at`, divided so that all tokens' losses sum to the loss."""
        loss = self._of_token(nll, lse, smooth, at)
        if self.token_weight is not None:
            loss = self.token_weight[at] * loss
        return self._divided(loss)

    def _of_token(self, nll: Tensor, lse: Tensor, smooth: Tensor | None, at: slice) -> Tensor:
        loss = nll if self.target_weight is None else self.target_weight[at] * nll
        if smooth is not None:
            even = self.mean_class_weight * lse - smooth
            loss = (1 - self.smoothing) * loss + self.smoothing * even
        if self.z_loss:
            loss = loss + self.z_loss * lse.square()
        return loss

    def _divided(self, losses: Tensor) -> Tensor:
        if isinstance(self.denominator, float) and self.denominator == 1:
            return losses
        return losses / self.denominator

    def upstream(
        self,
        lse: Tensor,
        smooth: Tensor | None,
        at: slice = slice(None),
        grad: Tensor | None = None,
    ) -> Upstream:
        """Returns the derivatives of the sum of tokens' losses by nll, lse and smooth.

        Args: grad: [] or [N] the gradient by `per_token`; None: 1.
        """
        scale = self._divided(torch.ones_like(lse) if grad is None else grad.expand_as(lse))
        if self.token_weight is not None:
            scale = scale * self.token_weight[at]
        by_nll, by_lse, by_smooth = scale, None, None
        if smooth is not None:
            by_nll = (1 - self.smoothing) * scale
            by_lse = self.smoothing * self.mean_class_weight * scale
            by_smooth = -self.smoothing * scale
        if self.target_weight is not None:
            by_nll = self.target_weight[at] * by_nll
        if self.z_loss:
            square = 2 * self.z_loss * scale * lse
            by_lse = square if by_lse is None else by_lse + square
        return Upstream(by_nll, by_lse, by_smooth)

    def grad_of_token_weight(
        self, nll: Tensor, lse: Tensor, smooth: Tensor | None, grad: Tensor
    ) -> Tensor:
        """Returns the gradient by `token_weight`, [N], from that by `per_token`, [] or [N]."""
        return self._divided(grad.expand_as(nll)) * self._of_token(nll, lse, smooth, slice(None))


class LogitMoments(NamedTuple):
    """Moments of each token's logits z over the whole vocabulary; not differentiable.

    Fields have targets' (shifted) shape, fp32 (float64 for float64 inputs), 0 at ignored tokens.
    """

    max: Tensor
    mean: Tensor
    variance: Tensor  # population variance: divided by V


class LossOutput(NamedTuple):
    """The loss and the statistics of `stats`; other statistics are None.

    Statistics have targets' (shifted) shape, 0 or False at ignored tokens.
    """

    loss: Tensor
    lse: Tensor | None = None  # natural log-sum-exp of the logits; differentiable
    entropy: Tensor | None = None  # the softmax's entropy, nats; differentiable
    correct: Tensor | None = None  # bool: the target has the largest logit
    tail_mass: Tensor | None = None  # probability mass whose gradient is approximated
    logit_moments: LogitMoments | None = None
    # bool: logits were screened; the same at all tokens that count
    screened: Tensor | None = None
    sum_p2: Tensor | None = None  # log of the sum of squared probabilities


@dataclass(frozen=True)
class Finish:
    """The reductions that turn vectors [N] into the results of the loss."""

    terms: TokenLoss
    picked: PickedTokens
    shape: torch.Size  # targets' shape
    options: LossOptions
    vocab_size: int

    def result(
        self,
        nll: Tensor,
        lse: Tensor,
        smooth: Tensor | None,
        entropy: Tensor | None,
        plain: list[Tensor | None],
    ) -> Tensor | LossOutput:
        """Turns vectors [N] of the tokens that count into the results of the loss."""
        loss = self.terms.per_token(nll, lse, smooth, slice(None))
        loss = self._scatter(loss) if self.options.reduction == "none" else loss.sum()
        return self.with_stats(loss, lse, entropy, plain)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Takes values [N] of the tokens that count out of the shape of each target's loss."""
        return gathered(values, self.picked.rows, self.shape, self.options.shift)

    def with_stats(
        self, loss: Tensor, lse: Tensor, entropy: Tensor | None, plain: list[Tensor | None]
    ) -> Tensor | LossOutput:
        """Returns the loss; a LossOutput of loss and statistics if `stats` is not empty."""
        if not self.options.stats:
            return loss
        sum_p2, max_logit, is_argmax, mean, m2, screened, tail = plain
        # The gradient of a temperature takes the entropy, too.
        entropy = entropy if "entropy" in self.options.stats else None
        moments = None
        if max_logit is not None and mean is not None and m2 is not None:
            variance = m2 / self.vocab_size
            moments = LogitMoments(*(self._scatter(x) for x in (max_logit, mean, variance)))
        return LossOutput(
            loss=loss,
            lse=self._scatter(lse) if "lse" in self.options.stats else None,
            entropy=None if entropy is None else self._scatter(entropy),
            correct=None if is_argmax is None else self._scatter(is_argmax.bool()),
            tail_mass=None if tail is None else self._scatter(tail),
            logit_moments=moments,
            screened=None if screened is None else self._scatter(screened.bool()),
            sum_p2=None if sum_p2 is None else self._scatter(sum_p2),
        )

    def _scatter(self, values: Tensor) -> Tensor:
        """Scatters values [N] of the tokens that count to targets' (shifted) shape."""
        return self.picked.scatter_to_shape(values, self.shape, self.options.shift)
