"""Columns that kernels of two heads drop: their sums, and their distance from the other model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter
from cce_dist.distillation.by_kernels import _Heads
from cce_dist.reference import divergence_reference, reference_logits
from tests.backends.triton.triton_cases import give_programs
from tests.distillation.test_by_kernels import (
    KLS,
    PLAIN,
    gradients,
    zipf,
)
from tests.distillation.test_distillation import Both, error

pytestmark = pytest.mark.usefixtures("unextended")


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The marks of each forward."""
    seen, whole = [], _Heads._of_heads

    def of_heads(heads: _Heads, *request: Any) -> Any:
        out = whole(heads, *request)
        seen.append(out.scores)
        return out

    monkeypatch.setattr(_Heads, "_of_heads", of_heads)
    return seen


def logits_of(both: Both, softcaps: tuple[float | None, float | None]) -> tuple[Tensor, Tensor]:
    """Returns the student's and the teacher's, float64."""
    heads = (
        (both.hidden, both.weight, both.bias),
        (both.teacher_hidden, both.teacher_weight, both.teacher_bias),
    )
    z, y = (
        reference_logits(*head, softcap=softcap).double()
        for head, softcap in zip(heads, softcaps, strict=True)
    )
    return z, y


@KLS
@pytest.mark.parametrize("softcaps", [(3.0, None), (None, 3.0)])
def test_targets_leave_the_dropped_mass(
    scores: list[Any], softcaps: tuple[float | None, float | None], kl: str
) -> None:
    """A target's column is kept: both models' dropped sums lose what they had of it."""
    targets = torch.arange(1000, 1100)
    both = replace(zipf(torch.float32, "cpu", 100, 2000), targets=targets)
    call = {**PLAIN, "softcap": softcaps[0], "teacher_softcap": softcaps[1], "divergence": kl}
    with torch.no_grad():
        both.run(both.leaves(), **call, backend="triton", filter=Filter(keep=0.1))
    z, y = (x.float() for x in logits_of(both, softcaps))
    slope = 1.0 if softcaps[0] is None else 1 - (z / softcaps[0]) ** 2
    dropped = (scores[0].kept[:, 0] & 1) == 0
    assert dropped.any() and not dropped[targets].any()
    of_student, of_teacher = (((x.exp() * slope)[:, dropped]).sum(1) for x in (z, y))
    torch.testing.assert_close(scores[0].log_dropped.exp(), of_student, rtol=1e-4, atol=0)
    if kl == "forward_kl":
        torch.testing.assert_close(scores[0].of_dropped.exp(), of_teacher, rtol=1e-4, atol=0)


@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("softcaps", [(3.0, None), (None, 3.0), (None, None)])
def test_how_far_dropped_logits_are_apart(
    monkeypatch: pytest.MonkeyPatch,
    scores: list[Any],
    softcaps: tuple[float | None, float | None],
    programs: int,
) -> None:
    """For reverse KL: in the mean, weighed by the student's exponentials times softcap'. A token of
    each model overflows, and is computed again."""
    give_programs(monkeypatch, programs)
    both = zipf(torch.float32, "cpu", 100, 2000)
    both.hidden[1] *= 30
    both.teacher_hidden[2] *= 30
    call = {**PLAIN, "softcap": softcaps[0], "teacher_softcap": softcaps[1], "alpha": 0.0}
    call["divergence"] = "reverse_kl"
    with torch.no_grad():
        loss = both.run(both.leaves(), **call, backend="triton", filter=Filter(keep=0.1))
    z, y = logits_of(both, softcaps)
    assert error(loss, divergence_reference(z, y, "reverse_kl").mean()) < 1e-5
    slope = 1.0 if softcaps[0] is None else 1 - (z / softcaps[0]) ** 2
    dropped = (scores[0].kept[:, 0] & 1) == 0
    weight = ((z - z.logsumexp(1, keepdim=True)).exp() * slope)[:, dropped]
    expected = (weight * (z - y)[:, dropped]).sum(1) / weight.sum(1)
    torch.testing.assert_close(scores[0].of_dropped.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beta", [0.001, 0.1])
def test_a_mixture_near_the_student_is_filtered_as_the_middle_one(beta: float) -> None:
    """All log ratios are at most -log(1 - beta), and a column's score has them in proportion."""
    both, errors = zipf(torch.float32, "cpu", 140, 1500), []
    for each in (beta, 0.5):
        call = {**PLAIN, "alpha": 0.0, "divergence": "jsd", "beta": each}
        leaves, exact = both.leaves(), both.leaves()
        ours = both.run(leaves, **call, backend="triton", filter=Filter(keep=0.01))
        right = gradients(both.run(exact, **call, gradient="exact"), exact)
        ours = gradients(ours, leaves)
        errors.append({name: error(ours[name], right[name]) for name in ("hidden", "weight")})
    of_beta, of_middle = errors
    for name, middle in of_middle.items():
        assert of_beta[name] < 1.2 * middle, (name, errors)


@pytest.mark.parametrize(
    ("softcaps", "beta"),
    [
        ((3.0, None), 0.1),
        ((3.0, None), 0.9),
        ((None, 3.0), 0.5),
        ((None, 3.0), 0.9),
        ((None, None), 0.1),
    ],
)
def test_how_far_dropped_columns_are_from_the_mixture(
    scores: list[Any], softcaps: tuple[float | None, float | None], beta: float
) -> None:
    """For Jensen-Shannon: the mean log ratio, weighed by the student's probabilities times
    softcap', beside how far both log-sum-exps are apart."""
    both = zipf(torch.float32, "cpu", 140, 1500)
    call = {**PLAIN, "softcap": softcaps[0], "teacher_softcap": softcaps[1], "alpha": 0.0}
    call |= {"divergence": "jsd", "beta": beta}
    with torch.no_grad():
        loss = both.run(both.leaves(), **call, backend="triton", filter=Filter(keep=0.1))
    z, y = logits_of(both, softcaps)
    assert error(loss, divergence_reference(z, y, "jsd", beta).mean()) < 1e-5
    leaves, exact = both.leaves(), both.leaves()
    ours: Any = both.run(leaves, **call, backend="triton", filter=Filter(keep=0.01))
    right: Any = both.run(exact, **call, gradient="exact")
    wanted = gradients(right, exact)
    for name, grad in gradients(ours, leaves).items():
        assert error(grad, wanted[name]) < 0.15, name
    slope = 1.0 if softcaps[0] is None else 1 - (z / softcaps[0]) ** 2
    log_q, log_p = z.log_softmax(1), y.log_softmax(1)
    ratios = log_q - (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    marks, place = scores[0], torch.empty(140, dtype=torch.int64)
    place[marks.order.long()] = torch.arange(140)
    dropped = ((marks.kept[:, 0][None, :] >> (place // 128)[:, None]) & 1) == 0
    weight = log_q.exp() * slope * dropped
    apart = z.logsumexp(1) - y.logsumexp(1)
    expected = (weight * ratios).sum(1) / weight.sum(1) + apart
    torch.testing.assert_close(marks.of_dropped.double(), expected, rtol=1e-4, atol=1e-4)
