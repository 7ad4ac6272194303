"""The oracle itself, against PyTorch's cross-entropy and formulas written out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist.reference import linear_cross_entropy_reference, reference_logits
from cce_dist.testing import gaussian_inputs
from tests.support.loss_cases import generator


def made(*tokens: int) -> Any:
    shape = tokens or (12,)
    inputs = gaussian_inputs(shape, 30, 6, generator=generator(), dtype=torch.float64)
    return inputs.with_options(generator(), "bias", "token_weight", "class_weight").ignoring(
        generator(), 0.25
    )


def logits_of(inputs: Any) -> Tensor:
    return F.linear(inputs.hidden, inputs.weight, inputs.bias)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3], ids=["", "smoothing"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "class_weight"])
def test_reference_is_torch_cross_entropy(weighted: bool, smoothing: float, reduction: str) -> None:
    inputs = made()
    class_weight = inputs.class_weight.double() if weighted else None
    found = linear_cross_entropy_reference(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        bias=inputs.bias,
        reduction=reduction,
        label_smoothing=smoothing,
        class_weight=class_weight,
    )
    expected = F.cross_entropy(
        logits_of(inputs),
        inputs.targets,
        weight=class_weight,
        reduction=reduction,
        label_smoothing=smoothing,
    )
    torch.testing.assert_close(found.loss, expected)


def test_reference_by_hand() -> None:
    # Two classes at logits 0 and ln 3: p = (1/4, 3/4).
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    found = linear_cross_entropy_reference(hidden, weight, torch.tensor([0]), z_loss=0.5)
    nll, lse = math.log(4), math.log(4)
    torch.testing.assert_close(found.nll, torch.tensor([nll]))
    torch.testing.assert_close(found.lse, torch.tensor([lse]))
    torch.testing.assert_close(found.loss, torch.tensor(nll + 0.5 * lse**2))
    entropy = 0.25 * math.log(4) + 0.75 * math.log(4 / 3)
    torch.testing.assert_close(found.entropy, torch.tensor([entropy]))
    torch.testing.assert_close(found.mean_logit, torch.tensor([math.log(3) / 2]))
    torch.testing.assert_close(found.variance_logit, torch.tensor([math.log(3) ** 2 / 4]))
    assert found.correct.tolist() == [False] and found.max_logit.item() == pytest.approx(
        math.log(3)
    )


def test_reference_weights_tokens_and_divides_by_their_count() -> None:
    inputs = made()
    args = (inputs.hidden, inputs.weight, inputs.targets)
    valid = inputs.targets != -100
    each = linear_cross_entropy_reference(*args, reduction="none").loss
    found = linear_cross_entropy_reference(*args, token_weight=inputs.token_weight)
    expected = (each * inputs.token_weight)[valid].sum() / valid.sum()
    torch.testing.assert_close(found.loss, expected.double())


def test_reference_shift() -> None:
    inputs = made(2, 9)
    args = (inputs.hidden[:, :-2], inputs.weight, inputs.targets[:, 2:])
    ids = inputs.targets.clamp_min(0)[..., None]
    expected = linear_cross_entropy_reference(*args, candidates=ids[:, 2:], reduction="none")
    found = linear_cross_entropy_reference(
        inputs.hidden, inputs.weight, inputs.targets, candidates=ids, shift=2, reduction="none"
    )
    for name, value in expected._asdict().items():
        assert torch.equal(getattr(found, name), value), name


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reference_without_targets_is_zero(reduction: str) -> None:
    inputs = made()
    hidden = inputs.hidden.requires_grad_()
    targets = torch.full_like(inputs.targets, -100)
    found = linear_cross_entropy_reference(hidden, inputs.weight, targets, reduction=reduction)
    found.loss.backward()
    assert float(found.loss.detach()) == 0 and not hidden.grad.any()
    assert not found.lse.any() and not found.correct.any()


def test_reference_logits_softcap_and_scale() -> None:
    inputs = made()
    found = reference_logits(
        inputs.hidden, inputs.weight, inputs.bias, softcap=2.0, logit_scale=3.0
    )
    torch.testing.assert_close(found, 6 * torch.tanh(logits_of(inputs) / 2))


def test_reference_entropy_of_impossible_classes() -> None:
    hidden, weight = torch.zeros(1, 2), torch.zeros(4, 2, requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -torch.inf, -torch.inf])
    found = linear_cross_entropy_reference(hidden, weight, torch.tensor([1]), bias=bias)
    found.entropy.sum().backward()
    torch.testing.assert_close(found.entropy, torch.tensor([math.log(2)]))
    assert bool(weight.grad.isfinite().all())
