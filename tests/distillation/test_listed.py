"""listed_distillation and teacher_topk against dense softmaxes in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import TeacherLogprobs, linear_distillation, listed_distillation, teacher_topk
from cce_dist.testing import DTYPES, Place, grid
from tests.distillation.listed_teachers import (
    CLASSES,
    DIM,
    DIVERGENCES,
    LEAVES,
    LISTED,
    OPTIONS,
    RESTS,
    TOKENS,
    Student,
    error,
    upstream_of,
)

# Relative, in the Frobenius norm.
ERRORS = {"float64": 1e-12, "fp32": 1e-5, "bf16": 4e-3, "fp16": 1e-3}


@pytest.mark.parametrize(
    **grid(divergence=DIVERGENCES, rest=RESTS, width=(1, LISTED), dtype=tuple(ERRORS))
)
def test_values_and_gradients_are_those_of_dense_logits(
    place: Place, divergence: str, rest: str, width: int, dtype: str
) -> None:
    if width == 1 and rest == "left_out":
        # One class alone has no divergence: only the gradient of nll is left.
        divergence = "forward_kl"
    student = Student.make(DTYPES[dtype], width)
    there, wide = student.on(place.device), student.leaves(torch.float64)
    leaves = there.leaves()
    options = {"divergence": divergence, "rest": rest, **place.options}
    computed, expected = there.run(leaves, **options), student.dense(wide, rest, divergence)
    for name in computed._fields:
        one = width == 1 and rest == "left_out" and name == "divergence"
        ours, right = getattr(computed, name), getattr(expected, name)
        if one:
            assert not ours.any()
        else:
            # Logits of 16-bit operands are not rounded.
            assert error(ours, right) < min(ERRORS[dtype], 1e-5), name
    (computed.loss * upstream_of(computed.loss)).sum().backward()
    (expected.loss * upstream_of(expected.loss)).sum().backward()
    for name, leaf in leaves.items():
        right = wide[name].grad
        assert leaf.grad is not None and right is not None
        assert error(leaf.grad, right) < ERRORS[dtype], name
