"""listed_distillation within torch.compile(fullgraph=True): the numbers of an eager call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import TeacherLogprobs, teacher_topk
from tests.distillation.listed import listed_teachers
from tests.distillation.listed.listed_teachers import RESTS, Student, upstream_of
from tests.frontend.compile.compile_cases import WARNING, poison  # noqa: F401
from tests.support.graphs import AOT_CHECKED

pytestmark = pytest.mark.filterwarnings(f"ignore:{WARNING}:DeprecationWarning")


@pytest.mark.parametrize(
    ("rest", "divergence"),
    # Each rest, which `Columns` treats alike for all divergences; a divergence of one pass over the
    # tiles, and those of two.
    [(RESTS[0], "forward_kl"), (RESTS[0], "jsd"), (RESTS[1], "tvd")],
)
def test_compiled(divergence: str, rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two tiles of eager torch: torch.compile traces each.
    monkeypatch.setattr(listed_teachers, "CLASSES", 32)
    student = Student.make(torch.float64)

    def run(leaves: dict[str, Tensor], ids: Tensor, logprobs: Tensor) -> Any:
        there = replace(student, teacher=TeacherLogprobs(ids, logprobs))
        return there.run(leaves, divergence=divergence, rest=rest, backend="torch")

    results = []
    for each in (run, torch.compile(run, fullgraph=True, backend=AOT_CHECKED)):
        leaves = student.leaves()
        computed = each(leaves, *student.teacher)
        total = (computed.loss * upstream_of(computed.loss)).sum()
        results.append((computed, torch.autograd.grad(total, list(leaves.values()))))
    torch.testing.assert_close(results[1], results[0])


def test_teacher_topk_is_refused() -> None:
    student = Student.make(torch.float32)
    with pytest.raises(Exception, match=r"top_k must be None within torch\.compile"):
        torch.compile(teacher_topk, fullgraph=True, backend="eager")(
            student.hidden, student.weight, 3
        )
