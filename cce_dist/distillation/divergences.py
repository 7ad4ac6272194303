"""Divergences of two softmaxes: of a tile's columns, their merge, and their derivatives.

a and y are the student's and the teacher's logits over the temperature, A and Y their log-sum-exps.
docs/design/distillation.md has the derivation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from cce_dist.core.stats import logaddexp_parts

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tvd"]


class Sums(NamedTuple):
    """Sums of each token over some columns, [N] or, of several parts, [R, N].

    They are float64, but for kernels of 16-bit inputs, which have them in fp32: a log-sum-exp of
    some hundreds in fp32 errs by more than the log-probability of an id that is nearly sure.
    """

    student: Tensor  # A
    teacher: Tensor  # Y
    kl: Tensor  # of the softmaxes over these columns alone; 0 for divergences of two passes


@dataclass(frozen=True)
class Divergences:
    """A divergence of the teacher's softmax p and the student's softmax q."""

    name: Divergence
    beta: float  # of "jsd", in (0, 1)

    @property
    def passes(self) -> int:
        """Passes over the logits until the value is known."""
        return 1 if self.name in ("forward_kl", "reverse_kl") else 2

    @property
    def is_filtered(self) -> bool:
        """Kernels of both heads compute it, with filtered gradients."""
        return self.name != "tvd"

    @property
    def has_mean(self) -> bool:
        """Its derivative has a mean of log ratios, weighed by the student's probabilities."""
        return self.name != "forward_kl"

    @property
    def is_reverse(self) -> bool:
        return self.name == "reverse_kl"

    # -- the first pass ---------------------------------------------------------------------------

    def sums(self, a: Tensor, y: Tensor) -> Sums:
        """Sums a tile [n, columns]."""
        student, teacher = log_sum(a), log_sum(y)
        if self.passes == 2:
            return Sums(student, teacher, torch.zeros_like(student))
        log_q, log_p = log_softmax(a, _finite(student)), log_softmax(y, _finite(teacher))
        near, far = self._by_weight(log_q, log_p)
        weight = near.exp()
        kl = (weight * near.sub_(far)).masked_fill_(weight == 0, 0).sum(1)
        return Sums(student, teacher, kl.to(student.dtype))

    def merge(self, parts: Sums, dtype: torch.dtype) -> Sums:
        """Merges parts [R, N], in their order. A part whose far log-sum-exp is -inf has its kl
        relative to 0 in place of it.

        Args: dtype: of the logits. A part whose share is 0 in it adds 0, as a column does.
        """
        student, teacher = logaddexp_parts(parts.student), logaddexp_parts(parts.teacher)
        if self.passes == 2:
            return Sums(student, teacher, parts.kl[0])
        near, far = self._by_weight(parts.student, parts.teacher)
        whole_near, whole_far = self._by_weight(student, teacher)
        share = (near - _finite(whole_near)).exp().to(dtype)
        ratio = parts.kl + (near - _finite(far)) - (whole_near - _finite(whole_far))
        return Sums(student, teacher, (share * ratio).masked_fill(share == 0, 0).sum(0))

    def _by_weight(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Puts the one first whose probabilities weigh the logarithms of a KL."""
        return (teacher, student) if self.name == "forward_kl" else (student, teacher)

    # -- the second pass --------------------------------------------------------------------------

    def terms(self, a: Tensor, y: Tensor, sums: Sums) -> tuple[Tensor, Tensor]:
        """Returns a tile's part of the value and of the mean of `slopes`, [n] each: both add up."""
        log_q, log_p = log_softmax(a, sums.student), log_softmax(y, sums.teacher)
        q, p = log_q.exp(), log_p.exp()
        slope = self.slopes(log_q, log_p)
        mean = (q * slope).masked_fill(q == 0, 0).sum(1)
        if self.name == "tvd":
            return (p - q).abs().sum(1) / 2, mean
        log_ratio = -_log_mixture(log_q - log_p, self.beta)
        of_teacher = (p * log_ratio).masked_fill(p == 0, 0).sum(1)
        return self.beta * of_teacher + mean, mean

    # -- the backward -----------------------------------------------------------------------------

    def slopes(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        """Returns f of the derivative q (f - sum q f) by a, of all but forward KL; any number where
        q is 0."""
        if self.is_reverse:
            return log_q - log_p
        if self.name == "tvd":
            return torch.sign(log_q - log_p) / 2
        return (1 - self.beta) * -_log_mixture(log_p - log_q, 1 - self.beta)

    def derivative(self, a: Tensor, y: Tensor, sums: Sums, mean: Tensor) -> Tensor:
        """Returns the divergence's derivative by a, [n, columns].

        Args: mean: [n] sum over all columns of q f; for KLs the value.
        """
        log_q, log_p = log_softmax(a, sums.student), log_softmax(y, sums.teacher)
        q = log_q.exp()
        if not self.has_mean:
            return q - log_p.exp()
        centred = self.slopes(log_q, log_p) - mean[:, None]
        return (q * centred).masked_fill(q == 0, 0)


def log_sum(a: Tensor) -> Tensor:
    """Returns log sum exp of each row of a tile [n, columns], in float64; `a` in its own dtype."""
    top = a.amax(1)
    top = top.masked_fill(top.isinf(), 0)
    return top.double() + (a - top[:, None]).exp_().sum(1).double().log()


def log_softmax(a: Tensor, lse: Tensor) -> Tensor:
    """Returns a - lse, [n, columns] in a's dtype, with the digits that lse has beyond it."""
    near = lse.to(a.dtype)
    rest = (lse - near).to(a.dtype)
    # An infinite lse has no rest.
    return (a - near[:, None]).sub_(rest.nan_to_num_(0)[:, None])


def _finite(lse: Tensor) -> Tensor:
    """Puts 0 in place of -inf, the log-sum-exp of no columns."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _log_mixture(log_ratio: Tensor, share: float) -> Tensor:
    """Returns log(share + (1 - share) exp(log_ratio)), finite for every finite log_ratio."""
    rest = log_ratio + math.log((1 - share) / share)
    return math.log(share) + torch.logaddexp(rest, rest.new_zeros(()))
