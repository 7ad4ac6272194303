"""The divergence of two models over the ids that a teacher lists, [N, K], by autograd.

docs/design/distillation.md#a-teacher-of-listed-ids has the derivation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cce_dist.algorithm.once import once_differentiable
from cce_dist.distillation.divergences import Divergences, Sums

# Of the dtype's rounding unit: a mass of 1 less a sum is uncertain by about this.
LEAST_MASS_UNITS = 8


def divergence_of_columns(
    student: Tensor,  # [N, K] log-probabilities over the whole vocabulary
    teacher: Tensor,  # [N, K]; -inf: the id is not listed
    divergences: Divergences,
    *,
    rest: bool,
) -> Tensor:
    """Computes each token's divergence, [N], differentiable by `student`.

    Args: rest: the ids outside are one more class of both models; else both models' listed
        probabilities are divided by their sums.
    """
    student = student.masked_fill(teacher == -torch.inf, -torch.inf)
    if rest:
        reverse = divergences.name == "reverse_kl"
        of_student, of_teacher = _log_rest(student), _log_rest_of_teacher(teacher, reverse)
        student = torch.cat([student, of_student[:, None]], 1)
        teacher = torch.cat([teacher, of_teacher[:, None]], 1)
    return OfColumns.apply(student, teacher, divergences)  # pyright: ignore[reportReturnType]


def least_mass(dtype: torch.dtype) -> float:
    return LEAST_MASS_UNITS * torch.finfo(dtype).eps


def _log_rest(logprobs: Tensor) -> Tensor:
    """Computes log(1 - sum exp(logprobs)) of a student.

    Below `least_mass` the mass is taken for `least_mass`, in the value and as the derivative's
    denominator. The derivative is not cut to 0: a student that gives the ids outside no mass is
    still drawn towards a teacher that does.
    """
    total = logprobs.exp().sum(1)
    most = total.clamp_max(1 - least_mass(total.dtype))
    return torch.log1p(-(total + (most - total).detach()))


def _log_rest_of_teacher(logprobs: Tensor, reverse: bool) -> Tensor:
    """Computes log(1 - sum exp(logprobs)), -inf of no mass; for reverse KL, which that would make
    infinite, at least log(least_mass)."""
    least = least_mass(logprobs.dtype) if reverse else 0
    return (1 - logprobs.exp().sum(1)).clamp_min(least).log()


class OfColumns(torch.autograd.Function):
    """The divergence of two softmaxes over the columns, [N]; the teacher's has no gradient."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, divergences: Divergences) -> Tensor:
        sums = divergences.sums(student, teacher)
        value = mean = sums.kl
        if divergences.passes == 2:
            value, mean = divergences.terms(student, teacher, sums)
        ctx.divergences = divergences
        ctx.save_for_backward(student, teacher, sums.student, sums.teacher, mean)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None):
        student, teacher, student_lse, teacher_lse, mean = ctx.saved_tensors
        (grad,) = grads
        assert grad is not None
        sums = Sums(student_lse, teacher_lse, mean)
        return grad[:, None] * ctx.divergences.derivative(student, teacher, sums, mean), None, None
