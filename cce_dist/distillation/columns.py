"""The divergence of two models over the ids that a teacher lists, [N, K], by autograd.

docs/design/distillation.md#a-teacher-of-listed-ids has the derivation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cce_dist.distillation.divergences import Divergences

# A mass of 1 less a sum is uncertain by about this many rounding units of the sum.
LEAST_MASS_UNITS = 8
# The derivative by a mass is cut to this, by hidden's dtype: an eighth of the inverse of the
# products' rounding, 2^-7 in bf16; in fp32 and float64 of the logits', 128 units.
# docs/design/distillation.md#the-gradient-by-the-mass-outside.
LARGEST_PER_MASS = {
    torch.bfloat16: 2.0**4,
    torch.float16: 2.0**7,
    torch.float32: 2.0**13,
    torch.float64: 2.0**42,
}


@dataclass(frozen=True)
class Columns:
    """A divergence of two models over K listed ids, with or without a class of all other ids."""

    divergences: Divergences
    rest: bool  # the ids outside are one more class; else both models' p are divided by their sums
    operands: torch.dtype  # hidden's in the loss: the products of the backward round to it

    def compute(
        self,
        student: Tensor,  # [N, K] log-probabilities over the whole vocabulary
        teacher: Tensor,  # [N, K]; -inf: padding
    ) -> Tensor:
        """Computes each token's divergence, [N], differentiable by `student`."""
        student = student.masked_fill(teacher == -torch.inf, -torch.inf)
        with torch.no_grad():
            value, derivative = self._value_and_derivative(student, teacher)
        # The compiler warns of an autograd.Function. An id of log-probability -inf has no gradient:
        # its derivative is 0, or the value infinite.
        change = (student - student.detach()).masked_fill(student == -torch.inf, 0)
        return value + (derivative * change).sum(1)

    def _value_and_derivative(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the divergence, [N], and its derivative by `student`, [N, K]."""
        student, teacher = self.complete(student, teacher)
        sums = self.divergences.sums(student, teacher)
        value = mean = sums.kl.to(student.dtype)
        if self.divergences.passes == 2:
            value, mean = self.divergences.terms(student, teacher, sums)
        derivative = self.divergences.derivative(student, teacher, sums, mean)
        return value, self.by_listed(derivative, student)

    def complete(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the class of all other ids.

        A mass below `least_mass` counts as `least_mass`: the student's, and in reverse KL, which is
        infinite without, the teacher's.
        """
        if not self.rest:
            return student, teacher
        least = least_mass(student.dtype)
        least_of_teacher = least if self.divergences.name == "reverse_kl" else 0
        return _with_rest(student, least), _with_rest(teacher, least_of_teacher)

    def by_listed(self, derivative: Tensor, student: Tensor) -> Tensor:
        """Returns the derivative by the listed columns, [N, K], of that by all of `complete`.

        The mass outside is 1 - sum q: its derivative by the log of q_k is -q_k. The divergence's
        derivative by the mass is cut, since the loss's backward adds its multiple of q to every
        logit's gradient, rounded, and the listed ids' gradients take it away again: beyond the cut
        roundings would leave more than the cut takes.
        """
        if not self.rest:
            return derivative
        most = LARGEST_PER_MASS[self.operands]
        per_mass = (derivative[:, -1:] * (-student[:, -1:]).exp()).clamp(-most, most)
        return derivative[:, :-1] - student[:, :-1].exp() * per_mass


def least_mass(dtype: torch.dtype) -> float:
    return LEAST_MASS_UNITS * torch.finfo(dtype).eps


def _with_rest(logprobs: Tensor, least: float) -> Tensor:
    mass = (1 - logprobs.exp().sum(1, keepdim=True)).clamp_min(least)
    return torch.cat([logprobs, mass.log()], 1)
