"""Statistics beside the loss: ties, moments, entropy, their gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from cce_dist import LinearCrossEntropy, linear_cross_entropy
from cce_dist.testing import (
    DTYPES,
    Case,
    Inputs,
    Place,
    check_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    run_case,
)
from tests.support.loss_cases import NARROW, classes, generator

# Ids of tied columns, the target, whether it wins. Both backends' tiles lie between 128 and 2048.
TIES = {
    "same_tile_first": ((3, 7), 3, True),
    "same_tile_second": ((3, 7), 7, False),
    "two_tiles_first": ((5, 3000), 5, True),
    "two_tiles_second": ((5, 3000), 3000, False),
    "neither": ((4000, 4001), 9, False),
    "alone": ((4400,), 4400, True),
}


@pytest.mark.parametrize(**grid(tie=TIES))
def test_correct_breaks_ties_by_the_lowest_id(
    place: Place, tie: tuple[tuple[int, ...], int, bool]
) -> None:
    tied, target, expected = tie
    shrink = 10 if place.interprets else 1
    weight = torch.zeros(4500 // shrink, 4)
    weight[[column // shrink if column > 9 else column for column in tied]] = 1.0
    weight[4001 // shrink + 1] = 1.0 if expected is False and 4001 in tied else weight[-1, 0]
    target = target // shrink if target > 9 else target
    targets = torch.full((3,), target)
    case = Case(Inputs(torch.ones(3, 4), weight, targets), {"stats": ("correct",)}, backward=False)
    assert run_case(None, case.at(place))["correct"].tolist() == [expected] * 3


@pytest.mark.parametrize(**grid(offset={"centred": 0.0, "far_from_zero": 1000.0}, dtype=NARROW))
def test_logit_moments_are_stable(place: Place, offset: float, dtype: str) -> None:
    # E[z^2] - E[z]^2 in fp32 loses every digit of a variance of 1 around a mean of 1000.
    num_classes = classes(place, 4500)
    inputs = gaussian_inputs(33, num_classes, 24, generator=generator(), dtype=DTYPES[dtype])
    inputs = replace(inputs, bias=torch.full((num_classes,), offset, dtype=DTYPES[dtype]))
    case = Case(inputs, {"stats": ("logit_moments",)}, backward=False).at(place)
    outputs, golden = run_case(None, case), golden_outputs(case)
    torch.testing.assert_close(
        outputs["variance_logit"].double(), golden["variance_logit"], rtol=1e-3, atol=0
    )
    torch.testing.assert_close(
        outputs["mean_logit"].double(), golden["mean_logit"], rtol=1e-6, atol=1e-6
    )
    check_outputs(case, outputs)


@pytest.mark.parametrize(**grid())
def test_entropy_of_known_distributions(place: Place) -> None:
    num_classes = classes(place, 4500)
    weight = torch.randn(num_classes, 4, generator=generator())
    inputs = Inputs(torch.zeros(2, 4), weight, torch.tensor([1, 2]))
    uniform = Case(inputs, {"stats": ("entropy", "lse", "sum_p2")}, backward=False).at(place)
    outputs = run_case(None, uniform)
    for name in ("entropy", "lse"):
        torch.testing.assert_close(outputs[name], torch.full((2,), math.log(num_classes)))
    torch.testing.assert_close(outputs["sum_p2"], torch.full((2,), -math.log(num_classes)))
    bias = torch.zeros(num_classes)
    # Its square overflows relative to another logit.
    bias[7] = 100.0
    outputs = run_case(None, replace(uniform, inputs=replace(inputs, bias=bias)))
    single = outputs["entropy"]
    assert float(single.abs().max()) < 1e-4 and float(single.min()) >= 0
    assert float(outputs["sum_p2"].abs().max()) < 1e-6


NAMES = {"lse": ("lse",), "entropy": ("entropy",), "lse_entropy": ("lse", "entropy")}


@pytest.mark.parametrize(
    **grid(names=NAMES, gradient=("filtered", "exact"), softcap={"plain": None, "softcap": 2.0})
)
def test_stats_are_differentiable_without_the_loss(
    place: Place, softcap: float | None, names: tuple[str, ...], gradient: str
) -> None:
    dtype, num_classes = place.widest, classes(place, 4500)
    inputs = gaussian_inputs((3, 43), num_classes, 16, generator=generator(), dtype=dtype)
    inputs = inputs.ignoring(generator(), 0.3)
    ramp = torch.linspace(-1, 1, 129, dtype=dtype).reshape(3, 43)
    case = Case(
        inputs,
        {"gradient": gradient, "stats": names, "softcap": softcap},
        upstream={"loss": 0.0, **dict.fromkeys(names, ramp)},
    ).at(place)
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    hidden = inputs.hidden.to(place.device, copy=True).requires_grad_()
    weight, targets = inputs.weight.to(place.device), inputs.targets.to(place.device)
    result = linear_cross_entropy(hidden, weight, targets, **case.options)
    ramp = ramp.to(place.device)
    torch.autograd.backward([getattr(result, name) for name in names], [ramp] * len(names))
    found = {"grad_hidden": hidden.grad.cpu(), "loss": outputs["loss"]}
    found |= {name: outputs[name] for name in names}
    check_outputs(replace(case, trainable=("hidden",)), found)


@pytest.mark.parametrize(**grid(name=("correct", "tail_mass", "logit_moments", "sum_p2")))
def test_other_stats_are_not_differentiable(place: Place, name: str) -> None:
    inputs = gaussian_inputs(9, 30, 8, generator=generator())
    weight = inputs.weight.to(place.device, copy=True).requires_grad_()
    hidden, targets = inputs.hidden.to(place.device), inputs.targets.to(place.device)
    result = linear_cross_entropy(hidden, weight, targets, stats=(name,), **place.options)
    value = getattr(result, name)
    for tensor in value if name == "logit_moments" else (value,):
        assert not tensor.requires_grad
    assert result.loss.requires_grad


@pytest.mark.parametrize(**grid(name=("lse", "entropy")))
def test_stats_refuse_a_backward_in_forward(place: Place, name: str) -> None:
    inputs = gaussian_inputs(9, 30, 8, generator=generator())
    weight = inputs.weight.to(place.device, copy=True).requires_grad_()
    hidden, targets = inputs.hidden.to(place.device), inputs.targets.to(place.device)
    options = {"gradient": "in_forward", "stats": ("lse", "entropy"), **place.options}
    function = LinearCrossEntropy(**options)
    result = function(hidden, weight, targets)
    with pytest.raises(RuntimeError, match=name):
        (result.loss + getattr(result, name).sum()).backward()
    result = function(hidden, weight, targets)
    result.loss.backward()
    assert weight.grad is not None
