"""listed_distillation against dense softmaxes in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import (
    TeacherLogprobs,
    linear_distillation,
    listed_distillation,
    teacher_topk,
)
from cce_dist.core.allocations import track_allocations
from cce_dist.distillation import columns
from cce_dist.testing import DTYPES, Place, grid
from tests.distillation.listed.listed_teachers import (
    BETA,
    CLASSES,
    DIM,
    DIVERGENCES,
    LISTED,
    OPTIONS,
    RESTS,
    TOKENS,
    Student,
    error,
    upstream_of,
)
from tests.support.head_cases import check_reduction

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
    for name in computed._fields[:3]:
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


@pytest.mark.parametrize("dtype", ["fp32", "float64"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("rest", RESTS)
def test_of_all_ids_it_is_linear_distillation(divergence: Any, rest: Any, dtype: str) -> None:
    student = Student.make(DTYPES[dtype])
    generator = torch.Generator().manual_seed(1)
    teacher_hidden = torch.randn(*TOKENS, 8, generator=generator, dtype=torch.float64)
    teacher_weight = torch.randn(CLASSES, 8, generator=generator, dtype=torch.float64)
    logprobs = (teacher_hidden @ teacher_weight.T / OPTIONS["temperature"]).log_softmax(-1)
    ids = torch.arange(CLASSES).expand(*TOKENS, CLASSES)
    listed = replace(student, teacher=TeacherLogprobs(ids, logprobs.to(DTYPES[dtype])))
    leaves, others = student.leaves(), student.leaves(torch.float64)
    computed = listed.run(leaves, divergence=divergence, rest=rest, reduction="mean").loss
    expected = linear_distillation(
        **others,
        teacher_hidden=teacher_hidden,
        teacher_weight=teacher_weight,
        targets=student.targets,
        divergence=divergence,
        beta=BETA if divergence == "jsd" else 0.5,
        **OPTIONS,
    )
    assert isinstance(expected, Tensor)
    assert error(computed, expected) < ERRORS[dtype]
    computed.backward()
    expected.backward()
    for name, leaf in leaves.items():
        right = others[name].grad
        assert leaf.grad is not None and right is not None
        assert error(leaf.grad, right) < ERRORS[dtype], name


def test_soft_labels() -> None:
    """Forward KL of labels that sum to 1 is their cross-entropy less their entropy."""
    student = Student.make(torch.float32)
    given = (student.hidden, student.weight)
    z = (student.hidden.double() @ student.weight.double().T).log_softmax(-1)
    one = TeacherLogprobs(student.targets.clamp_min(0)[..., None], torch.zeros(*TOKENS, 1))
    loss = listed_distillation(*given, one, reduction="none", gradient="exact")
    assert isinstance(loss, Tensor)
    torch.testing.assert_close(loss.double(), -z.gather(-1, one.ids)[..., 0], rtol=1e-6, atol=1e-6)
    logprobs = student.teacher.logprobs.log_softmax(-1)
    loss = listed_distillation(*given, TeacherLogprobs(student.teacher.ids, logprobs))
    assert isinstance(loss, Tensor)
    p = logprobs.double().exp()
    terms = p * (logprobs.double() - z.gather(-1, student.teacher.ids))
    expected = terms.masked_fill(p == 0, 0).sum(-1).mean()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("width", [2, 3])
def test_no_mass_outside(divergence: Any, rest: Any, width: int) -> None:
    """Softmaxes that fp32 rounds to 0 and 1: the ids outside, or all but one, or all others."""
    weight = torch.eye(3)
    hidden = torch.tensor([[0.0, 500.0, 1.0], [90.0, 0.0, 0.0], [0.0, 0.0, 200.0], [0.0, 0.0, 0.0]])
    ids = torch.arange(width).expand(4, width)
    for of_teacher in ([0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 1e-6, 0.0], [0.0, 1e-30, 0.0]):
        logprobs = torch.tensor(of_teacher).log()[:width].expand(4, width)
        student = hidden.clone().requires_grad_()
        loss = listed_distillation(
            student,
            weight,
            TeacherLogprobs(ids, logprobs),
            divergence=divergence,
            rest=rest,
            reduction="none",
        )
        assert isinstance(loss, Tensor)
        (grad,) = torch.autograd.grad(loss.sum(), student)
        at_least = torch.zeros(4) if rest == "left_out" else torch.full((4,), -1e-5)
        assert bool((loss.isfinite() & (loss >= at_least - 1e-6)).all()), of_teacher
        assert bool(grad.isfinite().all()), of_teacher


def test_a_student_without_mass_outside_is_drawn_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient by the mass outside is cut: without, rounding leaves several times what is
    right."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(512, 64, generator=generator).bfloat16()
    hidden = torch.randn(200, 64, generator=generator).bfloat16()
    ids = (hidden.double() @ weight.double().T).topk(16).indices
    p = torch.rand(200, 16, generator=generator, dtype=torch.float64) + 0.1
    p = 0.95 * p / p.sum(1, keepdim=True)
    wide = [x.double().requires_grad_() for x in (hidden, weight)]
    log_q = (wide[0] @ wide[1].T).log_softmax(-1)
    outside = log_q.scatter(1, ids, -torch.inf).logsumexp(1)
    value = (p * (p.log() - log_q.gather(1, ids))).sum(1) + 0.05 * (math.log(0.05) - outside)
    assert float(outside.median().detach()) < -7
    expected = torch.autograd.grad(value.mean(), wide)

    def gradients(gradient: Any) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        given = (leaves[0], leaves[1], TeacherLogprobs(ids, p.log()))
        loss = listed_distillation(*given, gradient=gradient)
        assert isinstance(loss, Tensor)
        torch.testing.assert_close(loss.double(), value.mean(), rtol=5e-3, atol=0)
        return list(torch.autograd.grad(loss, leaves))

    def errors(grads: list[Tensor]) -> list[float]:
        return [error(x, y) for x, y in zip(grads, expected, strict=True)]

    for gradient in ("exact", "filtered"):
        grads = gradients(gradient)
        assert max(errors(grads)) < 0.1
        # Up, outside of the list.
        along = (grads[0].double() * expected[0]).sum(1)
        assert bool((along > 0).all())
    monkeypatch.setitem(columns.LARGEST_PER_MASS, torch.bfloat16, 2.0**20)
    assert min(errors(gradients("exact"))) > 3


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("rest", RESTS)
def test_padding_and_order_change_nothing(divergence: str, rest: str) -> None:
    student = Student.make(torch.float64, 3)
    ids, logprobs = student.teacher
    padding = torch.full((*TOKENS, 4), 7)
    nothing = torch.full((*TOKENS, 4), -torch.inf, dtype=torch.float64)
    longer = TeacherLogprobs(torch.cat([padding, ids], -1), torch.cat([nothing, logprobs], -1))
    results = []
    for teacher in (student.teacher, longer, TeacherLogprobs(ids.flip(-1), logprobs.flip(-1))):
        leaves = student.leaves()
        computed = replace(student, teacher=teacher).run(leaves, divergence=divergence, rest=rest)
        total = (computed.loss * upstream_of(computed.loss)).sum()
        results.append((computed, torch.autograd.grad(total, list(leaves.values()))))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_and_weights(reduction: Any) -> None:
    check_reduction(Student.make(torch.float64), reduction)


def test_rows_of_tokens_that_are_left_out_are_not_read() -> None:
    student = Student.make(torch.float64)
    targets = student.targets.masked_fill(student.targets < 0, 3)
    targets[0, 5:9], targets[1, :] = 17, 17
    # Rows belong to hidden's tokens: each predicts the next target.
    unread = torch.cat([targets[:, 1:] == 17, torch.ones(3, 1, dtype=torch.bool)], 1)
    student = replace(student, targets=targets)
    ids, logprobs = student.teacher
    bad = TeacherLogprobs(
        ids.masked_fill(unread[..., None], -5), logprobs.masked_fill(unread[..., None], torch.nan)
    )
    results = []
    for teacher in (student.teacher, bad):
        leaves = student.leaves()
        computed = replace(student, teacher=teacher).run(leaves, ignore_index=17)
        computed.loss.sum().backward()
        results.append((computed, [leaf.grad for leaf in leaves.values()]))
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)
    assert not results[0][0].loss[unread[:, :-1]].any()


def test_without_targets_all_tokens_count() -> None:
    student = Student.make(torch.float64)
    given = (student.hidden, student.weight, student.teacher)
    loss = listed_distillation(*given, reduction="none")
    all_count = listed_distillation(
        *given, torch.zeros(TOKENS, dtype=torch.int64), reduction="none"
    )
    assert isinstance(loss, Tensor) and loss.shape == TOKENS and bool((loss > 0).all())
    torch.testing.assert_close(loss, all_count)
    # A pad id that no target has.
    assert torch.equal(listed_distillation(*given, reduction="none", ignore_index=0), loss)  # pyright: ignore
    none = listed_distillation(*given, torch.full(TOKENS, -100))
    assert isinstance(none, Tensor) and not none.any()
    empty = TeacherLogprobs(*(x[:0] for x in student.teacher))
    assert not listed_distillation(student.hidden[:0], student.weight, empty).any()  # pyright: ignore


def test_autocast_casts_the_student() -> None:
    student, half = Student.make(torch.float32), Student.make(torch.bfloat16)
    leaves = student.leaves()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        computed = student.run(leaves)
    expected = half.run({**half.leaves(), "bias": student.bias})
    torch.testing.assert_close(computed.loss, expected.loss, rtol=1e-5, atol=1e-5)
    computed.loss.sum().backward()
    assert leaves["weight"].grad is not None and leaves["weight"].grad.dtype == torch.float32


def test_no_logits_are_allocated() -> None:
    tokens, classes = 512, 8192
    hidden = torch.randn(tokens, 16).requires_grad_()
    weight = torch.randn(classes, 16).requires_grad_()
    teacher_hidden, teacher_weight = torch.randn(tokens, 8), torch.randn(classes, 8)
    with track_allocations() as allocations:
        teacher = teacher_topk(teacher_hidden, teacher_weight, 8, workspace_bytes=2**20)
        loss = listed_distillation(hidden, weight, teacher, workspace_bytes=2**20)
        loss.backward()  # pyright: ignore[reportAttributeAccessIssue]
    assert allocations.largest_numel < tokens * classes / 8


# -- what is refused ----------------------------------------------------------------------------

IDS, LOGPROBS = Student.make(torch.float32).teacher
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rest": ({"rest": "ghost"}, "^rest must be one of 'class', 'left_out', got 'ghost'"),
    "divergence": ({"divergence": "kl"}, "^divergence must be one of 'forward_kl', .* got 'kl'"),
    "gradient": ({"gradient": "in_forward"}, "^gradient must be one of 'filtered', 'exact', got"),
    "temperature": ({"temperature": 0}, "^temperature must be > 0, got 0"),
    "alpha": ({"alpha": 1.5}, r"^alpha must lie in \[0, 1\], got 1.5"),
    "targets": ({"targets": None}, "^targets must be given with alpha=0.25, got None"),
    "nll": ({"alpha": 0.0}, '^stats "nll" needs alpha > 0, got alpha=0'),
    "stats": ({"stats": ("lse",)}, "^every entry of stats must be one of 'divergence', 'nll'"),
    "pair": (
        {"teacher": (IDS, LOGPROBS)},
        r"^teacher must be a TeacherLogprobs\(.*got <class 'tup",
    ),
    "int32": ({"ids": IDS.int()}, "^teacher.ids must be int64, got torch.int32"),
    "list": ({"ids": [[1]]}, "^teacher.ids must be a torch.Tensor, got <class 'list'>"),
    "tokens": (
        {"ids": IDS[:, 1:]},
        r"^teacher.ids must have targets' shape \[3, 23\] and a last dim K, got \[3, 22, 6\]",
    ),
    "none": (
        {"ids": IDS[..., :0]},
        "^teacher.ids must list at least one id at each token, got K=0",
    ),
    "range": (
        {"ids": IDS.masked_fill(IDS == 4, CLASSES)},
        r"^teacher.ids must lie in \[0, vocab_size=90\), got values from 0 to 90",
    ),
    "twice": (
        {"ids": torch.full_like(IDS, 11), "logprobs": LOGPROBS - 3},
        "^teacher.ids must differ from one another at each token, but for padding, got 11 more",
    ),
    "shape": (
        {"logprobs": LOGPROBS[..., 1:]},
        r"^teacher.logprobs must have teacher.ids' shape \[3, 23, 6\], got \[3, 23, 5\]",
    ),
    "dtype": ({"logprobs": IDS}, "^teacher.logprobs must be fp32, float64, .* got torch.int64"),
    "nan": (
        {"logprobs": LOGPROBS * torch.nan},
        "^teacher.logprobs must be natural logarithms of probabilities, at most 0, got .* nan",
    ),
    "logits": (
        {"logprobs": LOGPROBS + 9},
        "^teacher.logprobs must be natural logarithms of .* at most 0, got values up to [6-9]",
    ),
    "sum": (
        {"logprobs": LOGPROBS.where(LOGPROBS.isinf(), -0.5)},
        "^teacher.logprobs must be of probabilities that sum to at most 1 at each token, got .* 3",
    ),
    "no_mass": (
        {"logprobs": LOGPROBS - torch.inf, "rest": "left_out"},
        '^teacher.logprobs must have a value above -inf at each token with rest="left_out", got 64',
    ),
    "grad": (
        {"logprobs": LOGPROBS.clone().requires_grad_()},
        "^teacher.logprobs must not require grad: listed_distillation has",
    ),
    "weights": (
        {"token_weight": torch.ones(3)},
        r"^token_weight must have shape \[3, 23\] \(that of targets\), got \[3\]",
    ),
}


@pytest.mark.parametrize("name", list(REFUSED))
def test_refused(name: str) -> None:
    changes, rule = REFUSED[name]
    changes, student = dict(changes), Student.make(torch.float32)
    fields = {key: changes.pop(key) for key in ("ids", "logprobs") if key in changes}
    tensors = {key: changes.pop(key) for key in ("targets", "teacher") if key in changes}
    student = replace(student, **{"teacher": student.teacher._replace(**fields), **tensors})
    with pytest.raises(ValueError, match=rule):
        student.run(student.leaves(), **changes)


def test_rounding_is_not_refused() -> None:
    """Sums a little above 1 are divided out."""
    student = Student.make(torch.float32)
    ids, logprobs = student.teacher
    whole = logprobs.log_softmax(-1)
    losses = [
        replace(student, teacher=TeacherLogprobs(ids, x)).run(student.leaves()).loss
        for x in (whole, whole + 5e-4, whole.bfloat16())
    ]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses[2], losses[0], rtol=2e-2, atol=2e-2)


def test_scalars_have_no_shift() -> None:
    teacher = TeacherLogprobs(torch.tensor([1, 2]), torch.tensor([-1.0, -2.0]))
    given = (torch.ones(DIM), torch.ones(9, DIM), teacher, torch.tensor(3))
    assert listed_distillation(*given).shape == ()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"^shift=1 goes along the last dim of targets"):
        listed_distillation(*given, shift=1)
