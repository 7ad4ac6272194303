"""linear_cross_entropy where peers fail: infinities, saturation, confident tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, linear_cross_entropy
from cce_dist.testing import (
    DTYPES,
    Case,
    Inputs,
    Place,
    check_close64,
    check_gate,
    check_outputs,
    check_promise,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    large_logit_inputs,
    run_case,
)
from tests.support.grids import paired_grid
from tests.support.loss_cases import MODES, NARROW, SMALL_WORKSPACE, classes, generator

MASKED = {
    "first_tile": (slice(0, 2048), 4500),
    "middle_tile": (slice(2048, 4096), 4500),
    "last_ragged_tile": (slice(4096, 4500), 4500),
    "part_of_a_tile": (slice(100, 1000), 4500),
    "every_second_column": (slice(0, None, 2), 301),
    "all_but_one": (slice(1, None), 301),
}


# Triton's tiles: 256 columns in 16 bits, 128 in fp32 and in the backward.
INTERPRETED_MASKED = {
    "first_tile": (slice(0, 256), 560),
    "middle_tile": (slice(256, 512), 560),
    "last_ragged_tile": (slice(512, 560), 560),
    "part_of_a_tile": (slice(30, 220), 560),
}
WORKSPACES = {"chunks": SMALL_WORKSPACE, "one_chunk": 2**26}


@pytest.mark.parametrize(**paired_grid(masked=tuple(MASKED), gradient=MODES, workspace=WORKSPACES))
def test_linear_cross_entropy_minus_inf_bias(
    place: Place, masked: str, gradient: str, workspace: int
) -> None:
    where, num_classes = MASKED[masked]
    if place.interprets:
        where, num_classes = INTERPRETED_MASKED.get(masked, MASKED[masked])
    inputs = gaussian_inputs(130, num_classes, 24, generator=generator())
    bias = 0.1 * torch.randn(num_classes, generator=generator())
    bias[where] = -torch.inf
    allowed = bias.isfinite().nonzero()[:, 0]
    inputs = replace(inputs, bias=bias, targets=allowed[inputs.targets % len(allowed)])
    options = {"gradient": gradient, "workspace_bytes": workspace, "z_loss": 0.1}
    case = Case(inputs, {**options, "stats": ("lse", "entropy", "correct")}).at(place)
    outputs = run_case(None, case)
    if masked == "all_but_one":  # golden loss is z_loss alone: compare what does not cancel
        check_outputs(case, outputs, but=("loss", "entropy"))
        assert float(outputs["entropy"].abs().max()) < 1e-5
        check_gate(
            "loss",
            outputs["loss"],
            golden_outputs(case)["loss"],
            dense_outputs(case)["loss"],
            scale=golden_outputs(case)["lse"],
        )
        return
    check_outputs(case, outputs)
    assert not outputs["grad_weight"][where].any() and not outputs["grad_bias"][where].any()


UPSTREAM = {"half": 0.5, "three": 3.0, "large": -1e6}


@pytest.mark.parametrize(**grid(gradient=("exact", "filtered"), upstream=UPSTREAM))
def test_linear_cross_entropy_entropy_of_masked_classes(
    place: Place, gradient: Any, upstream: float
) -> None:
    inputs = gaussian_inputs(9, 40, 8, generator=generator())
    bias = torch.zeros(40)
    bias[3], bias[17:29] = -torch.inf, -torch.inf
    hidden, weight, bias = (
        x.to(place.device).requires_grad_() for x in (inputs.hidden, inputs.weight, bias)
    )
    targets = torch.zeros(9, dtype=torch.int64, device=place.device)
    leaves = (hidden, weight, bias)
    options: Any = {"bias": bias, "stats": ("entropy", "logit_moments"), **place.options}
    out: Any = linear_cross_entropy(hidden, weight, targets, gradient=gradient, **options)
    grads = torch.autograd.grad(upstream * out.entropy.sum(), leaves)
    logits = hidden.double() @ weight.double().T + bias
    log_p = logits.log_softmax(-1).masked_fill(bias == -torch.inf, -1e9)
    entropy = -(log_p.exp() * log_p).sum()
    for grad, expected in zip(grads, torch.autograd.grad(upstream * entropy, leaves), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=2e-6 * abs(upstream))
    assert bool((out.logit_moments.mean == -torch.inf).all())


SOFTCAPS = {"plain": None, "softcap": 30.0}


@pytest.mark.parametrize(**grid(softcap=SOFTCAPS, dtype=NARROW, gradient=MODES))
def test_linear_cross_entropy_large_logits(
    place: Place, gradient: str, dtype: str, softcap: float | None
) -> None:
    num_classes = classes(place, 2500)
    inputs = large_logit_inputs(129, num_classes, 24, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {"gradient": gradient, "softcap": softcap, "stats": ("lse",)}).at(place)
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_all_logits_far_below_zero(place: Place, gradient: str) -> None:
    # A running maximum that starts at 0 gives log(0) here.
    num_classes = classes(place, 2100)
    inputs = gaussian_inputs(33, num_classes, 24, generator=generator())
    inputs = replace(inputs, bias=torch.full((num_classes,), -5000.0))
    case = Case(inputs, {"gradient": gradient, "stats": ("lse", "entropy")}).at(place)
    check_outputs(case, run_case(None, case))


RISING = {
    "later_tiles_huge": (0.0, 1e4),
    "from_far_below": (-1e4, 0.0),
    "across_zero": (-1e4, 1e4),
}


@pytest.mark.parametrize(**grid(rising=RISING, dtype=NARROW, gradient=MODES))
def test_linear_cross_entropy_logits_that_rise_late(
    place: Place, rising: tuple[float, float], dtype: str, gradient: str
) -> None:
    # The first tile is a bad bound of lse: exp(z - bound) overflows in the later ones.
    num_classes = 600
    inputs = gaussian_inputs(130, num_classes, 24, generator=generator(), dtype=DTYPES[dtype])
    bias = torch.full((num_classes,), rising[0])
    bias[300:] = rising[1]
    # Half of the targets bound lse from far below, too.
    inputs = replace(inputs, bias=bias.to(DTYPES[dtype]))
    case = Case(inputs, {"gradient": gradient, "stats": ("lse", "entropy")}).at(place)
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_impossible_targets(place: Place, gradient: str) -> None:
    # A target of logit -inf has loss inf; the other tokens, and the statistics, are as ever.
    inputs = gaussian_inputs(130, 300, 24, generator=generator())
    bias = torch.zeros(300)
    bias[:150] = -torch.inf
    targets = inputs.targets % 150 + 150
    targets[::3] -= 150
    inputs = replace(inputs, bias=bias, targets=targets)
    reduction = "sum" if gradient == "in_forward" else "none"
    options = {"gradient": gradient, "reduction": reduction, "stats": ("lse",)}
    case = Case(inputs, options, upstream={"loss": 1.0}).at(place)
    outputs, golden = run_case(None, case), golden_outputs(case)
    torch.testing.assert_close(outputs["lse"].double(), golden["lse"], rtol=1e-6, atol=1e-6)
    if reduction == "sum":
        assert float(outputs["loss"]) == math.inf
    else:
        assert bool((outputs["loss"][::3] == math.inf).all())
        possible = golden["loss"].isfinite()
        found = outputs["loss"][possible].double()
        torch.testing.assert_close(found, golden["loss"][possible], rtol=1e-5, atol=1e-5)
    # softmax - onehot is finite, whatever the loss is.
    p = (inputs.hidden.double() @ inputs.weight.double().T + bias.double()).softmax(-1)
    p[torch.arange(130), targets] -= 1
    expected = p @ inputs.weight.double()
    torch.testing.assert_close(outputs["grad_hidden"].double(), expected, rtol=1e-4, atol=1e-5)


RAGGED = {"1": 1, "300": 300, "2049": 2049}


@pytest.mark.parametrize(**grid(num_classes=RAGGED, softcap=(0.5, 1.0, 5.0), gradient=MODES))
def test_linear_cross_entropy_softcap_of_a_ragged_vocabulary(
    place: Place, num_classes: int, softcap: float, gradient: str
) -> None:
    # Padding columns of a tile would add exp(-softcap) each.
    num_classes = min(num_classes, 513) if place.interprets else num_classes
    inputs = gaussian_inputs(20, num_classes, 24, generator=generator(), dtype=place.widest)
    inputs = replace(inputs, bias=torch.full((num_classes,), -4.0, dtype=place.widest))
    options = {"gradient": gradient, "softcap": softcap, "stats": ("lse", "logit_moments")}
    case = Case(inputs, options).at(place)
    outputs = run_case(None, case)
    if num_classes == 1:
        exact = place.widest == torch.float64
        but = ("loss",) if exact else ("loss", "grad_hidden", "grad_weight", "variance_logit")
        check_outputs(case, outputs, but=but)
        for name in but:
            assert float(outputs[name].abs().max()) < (1e-14 if exact else 1e-6), name
        return
    check_outputs(case, outputs)


def confident_inputs(dtype: torch.dtype, num_classes: int = 5000) -> Inputs:
    """Every token has p(target) ~ 1 - 1e-5: the cross-entropy's own gradient nearly vanishes."""
    inputs = gaussian_inputs(130, num_classes, 64, generator=generator(), dtype=torch.float64)
    weight = inputs.weight.to(dtype)
    rows = weight[inputs.targets].double()
    hidden = 22 * rows / rows.square().sum(-1, keepdim=True)
    return Inputs(hidden.to(dtype), weight, inputs.targets)


CONFIDENT = {
    "exact": {"gradient": "exact"},
    "in_forward": {"gradient": "in_forward"},
    "filtered": {"gradient": "filtered"},
    "keep": {"filter": Filter(keep=2**-6)},
    "eps_without_tail": {"filter": Filter(eps=2**-12, tail=False)},
}


@pytest.mark.parametrize(**grid(options=CONFIDENT, dtype=NARROW))
def test_linear_cross_entropy_z_loss_of_confident_tokens(
    place: Place, dtype: str, options: dict[str, Any]
) -> None:
    # Apple's filter looks at p - onehot, about 0 here, and drops the gradient of z_loss.
    # fp16 has an exponent too few for the mean of such gradients: a sum.
    reduction = "sum" if dtype == "fp16" else "mean"
    inputs = confident_inputs(DTYPES[dtype], 700 if place.interprets else 5000)
    case = Case(inputs, {**options, "z_loss": 0.1, "reduction": reduction}).at(place)
    golden = golden_outputs(case)
    without = golden_outputs(replace(case, options={"reduction": reduction}))
    outputs = run_case(None, case)
    for name in ("grad_hidden", "grad_weight"):
        assert without[name].norm() < 0.01 * golden[name].norm()
        found = outputs[name].double()
        relative = float((found - golden[name]).norm() / golden[name].norm())
        assert relative < 0.01, f"{name}: relative error {relative}"


@pytest.mark.parametrize(**grid(gradient=MODES, smoothing=(0.3, 1.0)))
def test_linear_cross_entropy_label_smoothing_with_everything(
    place: Place, gradient: str, smoothing: float
) -> None:
    # torch's own smoothing, class weights included, is the definition.
    dtype, num_classes = place.widest, classes(place, 2500)
    inputs = gaussian_inputs(129, num_classes, 24, generator=generator(), dtype=dtype)
    inputs = inputs.with_options(generator(), "bias", "class_weight")
    inputs = inputs.ignoring(generator(), 0.3)
    case = Case(inputs, {"gradient": gradient, "label_smoothing": smoothing}).at(place)
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    expected = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(
            inputs.hidden.double(), inputs.weight.double(), inputs.bias.double()
        ),
        inputs.targets,
        weight=inputs.class_weight.double(),
        label_smoothing=smoothing,
    )
    if dtype == torch.float64:
        check_close64("loss", outputs["loss"], expected)
    else:
        assert float(outputs["loss"]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize(**grid())
def test_linear_cross_entropy_float16_does_not_overflow(place: Place) -> None:
    # Logits of 3e5 are no fp16 numbers; they never have to be.
    inputs = large_logit_inputs(
        33, 300, 16, generator=generator(), dtype=torch.float16, largest=3e5
    )
    assert bool(inputs.hidden.isfinite().all())
    case = Case(inputs, {"stats": ("lse",)}).at(place)
    outputs, golden = run_case(None, case), golden_outputs(case)
    dense32 = dense_outputs(case, torch.float32)
    check_gate("lse", outputs["lse"], golden["lse"], dense32["lse"])
    for name in ("grad_hidden", "grad_weight"):
        rounded = dense32[name] * (1 + 2**-10)
        check_promise(name, outputs[name], golden[name], rounded, torch.float16)


@pytest.mark.parametrize(**grid(dtype=NARROW, gradient=MODES))
def test_linear_cross_entropy_nll_of_confident_tokens(
    place: Place, gradient: str, dtype: str
) -> None:
    # nll = lse - target logit is 1e-5 of either: both must carry the same rounding.
    inputs = confident_inputs(DTYPES[dtype], 700 if place.interprets else 5000)
    reduction = "sum" if gradient == "in_forward" else "none"
    options = {"gradient": gradient, "reduction": reduction}
    case = Case(inputs, options, backward=False).at(place)
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize(**grid(rows=(21, 300, 2100), gradient=MODES))
def test_linear_cross_entropy_padded_rows(place: Place, rows: int, gradient: str) -> None:
    # 20 classes: rows beyond them hold NaN, never enter, and get a gradient of exactly 0.
    inputs = gaussian_inputs(130, rows, 16, generator=generator(), dtype=place.widest)
    inputs = inputs.with_options(generator(), "bias")
    weight, bias = inputs.weight.clone(), inputs.bias.clone()
    weight[20:], bias[20:] = torch.nan, torch.nan
    inputs = replace(inputs, weight=weight, bias=bias, targets=inputs.targets % 20)
    options = {"gradient": gradient, "label_smoothing": 0.1, "stats": ("lse", "logit_moments")}
    for main_grad in (False, True):
        case = Case(inputs, options, bounds=((0, rows),), vocab_size=20, main_grad=main_grad)
        outputs = run_case(None, case.at(place))
        check_outputs(case, outputs)
        assert not outputs["grad_weight"][20:].any() and not outputs["grad_bias"][20:].any()
