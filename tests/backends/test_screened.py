"""logits="screened": 8-bit logits, exact where they count; closer to golden than dense 16-bit."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, Screen
from cce_dist.testing import (
    CPU_PLACES,
    DTYPES,
    PLACES,
    Case,
    Inputs,
    Place,
    check_outputs,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    join_ranks,
    run_case,
    shared_pool,
    zipf_inputs,
)
from tests.backends.screened_cases import (
    EIGHT_BITS,
    SCREENED,
    WIDE,
    Bounds,
    check_screened,
    dtype_of,
    error_of,
)
from tests.support.loss_cases import generator

pytest.importorskip("triton")
IN_16_BITS = ("bf16", "fp16")


# -- the loss -----------------------------------------------------------------------------------


@pytest.mark.parametrize(**grid(places=PLACES, dtype=IN_16_BITS, bits=EIGHT_BITS))
def test_screened_is_closer_than_dense_16_bit(place: Place, dtype: str, bits: str) -> None:
    inputs = zipf_inputs(300, 3000, 72, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {**SCREENED, "screen": replace(WIDE, dtype=bits)}).at(place)
    outputs, golden, dense = run_case(None, case), golden_outputs(case), dense_outputs(case)
    check_screened(case, outputs)
    assert error_of(outputs, golden) <= error_of(dense, golden) / (4 if bits == "int8" else 1)
    # Where the probabilities' mass is, nothing was rounded; elsewhere nothing is biased.
    bias = (outputs["lse"].double() - golden["lse"]).mean()
    assert abs(float(bias)) < (2e-5 if bits == "int8" else 2e-4)
    assert float(outputs["tail_mass"].mean()) > 0.01, "nothing was screened"


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_screened_gradients_are_those_of_full_logits(place: Place) -> None:
    """With everything that has mass kept, what is left of 8 bits is lse."""
    inputs = zipf_inputs(140, 1500, 40, generator=generator(), dtype=torch.float16)
    options = {**SCREENED, "filter": Filter(keep=2e-4)}
    case = Case(inputs, options, upstream={"loss": 1024.0}).at(place)
    outputs = run_case(None, case)
    check_screened(case, outputs)
    check_outputs(case, outputs, but=("loss", "lse"))


@pytest.mark.parametrize(**grid(places=PLACES, num_tokens=(40, 128, 129)))
def test_screened_hidden_gradients_are_as_close_as_filtered_ones(
    place: Place, num_tokens: int
) -> None:
    """Columns are drawn before the exact logits are there, and weighed after them."""
    inputs = zipf_inputs(num_tokens, 4000, 72, generator=generator(), dtype=dtype_of(place))
    options = {**SCREENED, "filter": Filter(keep=2.0**-8)}
    upstream = {"loss": 1024.0}
    screened = Case(inputs, options, upstream=upstream).at(place)
    of_full = {name: options[name] for name in ("filter", "stats")}
    filtered = Case(inputs, of_full, upstream=upstream).at(place)
    golden = golden_outputs(screened)
    outputs = run_case(None, screened)
    assert bool(outputs["screened"].all()) and float(outputs["tail_mass"].mean()) > 1e-3
    error, allowed = (
        error_of(found, golden, "grad_hidden") for found in (outputs, run_case(None, filtered))
    )
    assert error <= 1.2 * allowed


OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "bias": (("bias",), {}),
    "softcap": ((), {"softcap": 6.0}),
    "softcap_scale_bias": (("bias",), {"softcap": 8.0, "logit_scale": 1.3}),
    "negative_scale": ((), {"logit_scale": -0.9}),
    "label_smoothing": ((), {"label_smoothing": 0.1}),
    "z_loss_none": ((), {"z_loss": 0.01, "reduction": "none"}),
    "weights": (("token_weight", "class_weight"), {"label_smoothing": 0.1, "shift": 1}),
    "in_forward": ((), {"gradient": "in_forward"}),
    "by_largest": ((), {"filter": Filter(eps=2**-9)}),
    "by_largest_e4m3": ((), {"filter": Filter(eps=2**-9), "screen": Screen("e4m3", 1.0)}),
    "e4m3_bias_scale": (("bias",), {"logit_scale": 1.3, "screen": Screen("e4m3", 1.0)}),
    "no_tail": ((), {"filter": Filter(keep=0.05, tail=False)}),
}


def with_extras(inputs: Inputs, extras: tuple[str, ...]) -> Inputs:
    made = {
        "bias": 0.5 * torch.randn(len(inputs.weight), generator=generator(1)),
        "token_weight": torch.rand(len(inputs.hidden), generator=generator(2)),
        "class_weight": 0.5 + torch.rand(len(inputs.weight), generator=generator(3)),
    }
    found = {name: made[name] for name in extras}
    if "bias" in found:
        found["bias"] = found["bias"].to(inputs.hidden.dtype)
    return replace(inputs, **found)


@pytest.mark.parametrize(**grid(places=PLACES, options=OPTIONS))
def test_screened_with_other_options(
    place: Place, options: tuple[tuple[str, ...], dict[str, Any]]
) -> None:
    extras, given = options
    shape = (140, 1000, 40) if place.device == "cpu" else (150, 1500, 40)
    inputs = zipf_inputs(*shape, generator=generator(), dtype=dtype_of(place))
    inputs = with_extras(inputs, extras).ignoring(generator(4), 0.2)
    case = Case(inputs, {**SCREENED, **given}).at(place)
    outputs = run_case(None, case)
    check_screened(case, outputs)
    in_full = {**case.options, "logits": "full", "screen": Screen()}
    full = run_case(None, replace(case, options=in_full))
    # The filter's own error is no matter here; nor that other columns are drawn.
    for name in ("grad_hidden", "grad_weight", "grad_bias"):
        if name in full:
            difference = (outputs[name] - full[name]).double().norm()
            assert difference < 0.1 * full[name].double().norm(), name


SHAPES: dict[str, tuple[int, int, int]] = {
    "one_token": (1, 700, 24),
    "two_blocks_of_one_token": (129, 700, 24),
    "ragged": (7, 1283, 17),  # rows that no descriptor can read
    "few_columns": (40, 130, 8),
}


@pytest.mark.parametrize(**grid(places=PLACES, shape=SHAPES, bits=EIGHT_BITS))
def test_screened_at_odd_shapes(place: Place, shape: tuple[int, int, int], bits: str) -> None:
    inputs = gaussian_inputs(*shape, generator=generator(), dtype=dtype_of(place))
    case = Case(inputs, {**SCREENED, "screen": replace(WIDE, dtype=bits)}).at(place)
    check_screened(case, run_case(None, case))


@pytest.mark.parametrize(**grid(places=CPU_PLACES, ignored={"half": 0.5, "all": 1.0}))
def test_screened_with_ignored_tokens(place: Place, ignored: float) -> None:
    inputs = zipf_inputs(140, 700, 24, generator=generator(), dtype=torch.float16)
    case = Case(inputs.ignoring(generator(1), ignored), SCREENED).at(place)
    outputs = run_case(None, case)
    check_screened(case, outputs)
    assert not outputs["screened"][case.inputs.targets < 0].any()


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_screened_without_tokens(place: Place) -> None:
    inputs = zipf_inputs(3, 900, 24, generator=generator(), dtype=torch.float16)
    none = Inputs(inputs.hidden[:0], inputs.weight, inputs.targets[:0])
    outputs = run_case(None, Case(none, SCREENED).at(place))
    assert float(outputs["loss"]) == 0 and not outputs["grad_weight"].any()


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_screened_is_deterministic(place: Place) -> None:
    inputs = zipf_inputs(140, 700, 24, generator=generator(), dtype=torch.float16)
    case = Case(inputs, SCREENED).at(place)
    first, again = run_case(None, case), run_case(None, case)
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_screened_keeps_nan(place: Place) -> None:
    inputs = zipf_inputs(40, 700, 24, generator=generator(), dtype=torch.float16)
    for name in ("hidden", "weight"):
        broken = getattr(inputs, name).clone()
        broken[3, 5] = math.nan
        case = Case(replace(inputs, **{name: broken}), SCREENED, backward=False).at(place)
        lse = run_case(None, case)["lse"]
        assert bool(lse[3].isnan()) if name == "hidden" else bool(lse.isnan().all())


# -- what 8 bits are bad at ---------------------------------------------------------------------


def with_outliers(inputs: Inputs, kind: str) -> Inputs:
    """A 24th of hidden's channels 30 times as large as others: at all tokens alike, as a bias is;
    or not, with a weight that makes up for it."""
    hidden, weight = inputs.hidden.float(), inputs.weight.float()
    some = slice(0, hidden.shape[1] // 24)
    if kind == "alike":
        hidden[:, some] += 30 * hidden.std()
    else:
        hidden[:, some] *= 30
        weight[:, some] /= 30
    dtype = inputs.hidden.dtype
    return replace(inputs, hidden=hidden.to(dtype), weight=weight.to(dtype))


@pytest.mark.parametrize(**grid(places=CPU_PLACES, kind=("alike", "varying")))
def test_outlier_channels_cost_no_digits(place: Place, kind: str) -> None:
    plain = zipf_inputs(140, 1000, 96, generator=generator(), dtype=torch.float16)
    errors = []
    for inputs in (plain, with_outliers(plain, kind)):
        case = Case(inputs, SCREENED, backward=False).at(place)
        outputs = run_case(None, case)
        check_screened(case, outputs)
        errors.append(error_of(outputs, golden_outputs(case)))
    assert errors[1] < 3 * errors[0] + 1e-6, errors


GUARDS: dict[str, tuple[Screen, float]] = {
    "kept": (Screen(max_kept=1e-4), 1.0),
    "error": (Screen(max_error=1e-5), 1.0),
    "large_logits": (WIDE, 8.0),
}


@pytest.mark.parametrize(**grid(places=PLACES, guard=GUARDS))
def test_a_call_that_8_bits_are_not_enough_for_is_computed_in_full(
    place: Place, guard: tuple[Screen, float]
) -> None:
    screen, size = guard
    inputs = gaussian_inputs(150, 900, 40, generator=generator(), dtype=dtype_of(place))
    inputs = replace(inputs, hidden=(size * inputs.hidden.float()).to(dtype_of(place)))
    case = Case(inputs, {**SCREENED, "screen": screen}).at(place)
    outputs = run_case(None, case)
    if size > 1:
        # What has no mass matters to nobody, however large its error.
        check_screened(case, outputs, screened=bool(outputs["screened"].all()))
        return
    check_screened(case, outputs, screened=False)
    check_outputs(case, outputs, but=("grad_hidden", "grad_weight"))


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_a_small_vocabulary_is_computed_in_full(place: Place) -> None:
    inputs = zipf_inputs(20, 700, 24, generator=generator(), dtype=torch.float16)
    case = Case(inputs, {**SCREENED, "filter": Filter()}).at(place)
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    assert not outputs["screened"].any()


def test_full_logits_are_not_screened() -> None:
    inputs = zipf_inputs(20, 700, 24, generator=generator())
    for backend in ("torch", "triton"):
        outputs = run_case(None, Case(inputs, {"stats": ("screened",), "backend": backend}))
        assert outputs["screened"].dtype == torch.bool and not outputs["screened"].any()


# -- ranks --------------------------------------------------------------------------------------

RANKS: dict[str, Bounds] = {
    "two": ((0, 750), (750, 1500)),
    "uneven": ((0, 1100), (1100, 1207), (1207, 1500)),
    "an_empty_one": ((0, 900), (900, 900), (900, 1500)),
}


@pytest.mark.parametrize(**grid(places=CPU_PLACES, bounds=RANKS))
def test_screened_on_a_group(place: Place, bounds: Bounds) -> None:
    inputs = zipf_inputs(150, 1500, 40, generator=generator(), dtype=torch.float16)
    options = dict(SCREENED)
    if len(bounds) == 2:
        options["softcap"] = 20.0
    if any(start == stop for start, stop in bounds):
        options["gradient"] = "in_forward"
    elif len(bounds) == 3:
        options["screen"] = replace(WIDE, dtype="e4m3")
    case = Case(inputs, options, bounds=bounds).at(place)
    outputs = join_ranks(case, shared_pool().run(len(bounds), run_case, case))
    check_screened(case, outputs)


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_screened_says_no_where_one_rank_was_not(place: Place) -> None:
    """Frequent tokens on one rank: it keeps more than it may, the other one next to nothing."""
    inputs = zipf_inputs(150, 1500, 40, generator=generator(), dtype=torch.float16)
    options = {**SCREENED, "filter": Filter(keep=0.5), "screen": Screen(max_kept=0.004)}
    case = Case(inputs, options, bounds=((0, 300), (300, 1500))).at(place)
    outputs = join_ranks(case, shared_pool().run(2, run_case, case))
    check_screened(case, outputs, screened=False)
    alone = replace(case, options={**options, "screen": WIDE}).at(place)
    check_screened(alone, join_ranks(alone, shared_pool().run(2, run_case, alone)))


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_screened_where_a_rank_has_no_mass(place: Place) -> None:
    """Its columns' probabilities are 0 in fp32."""
    inputs = zipf_inputs(40, 600, 24, generator=generator(), dtype=torch.float16)
    bias = torch.where(torch.arange(600) < 300, 0.0, -300.0).half()
    inputs = replace(inputs, bias=bias, targets=inputs.targets % 300)
    case = Case(inputs, SCREENED, bounds=((0, 300), (300, 600))).at(place)
    check_screened(case, join_ranks(case, shared_pool().run(2, run_case, case)))


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_screened_where_a_rank_has_little_mass(place: Place) -> None:
    """It errs about what nobody sees; alone it would be refused."""
    inputs = gaussian_inputs(150, 600, 40, generator=generator(), dtype=torch.float16)
    little = torch.arange(600) >= 300
    bias = torch.where(little, -6.0, 0.0).half()
    inputs = replace(inputs, bias=bias, targets=inputs.targets % 300)
    options = {**SCREENED, "screen": Screen(max_kept=1.0, max_error=1e-3)}
    case = Case(inputs, options, bounds=((0, 300), (300, 600))).at(place)
    check_screened(case, join_ranks(case, shared_pool().run(2, run_case, case)))
    # As much of what it holds is dropped.
    options["filter"] = Filter(keep=4.0)
    rare = Inputs(inputs.hidden, inputs.weight[300:], inputs.targets, bias=bias[300:])
    alone = run_case(None, Case(rare, options, backward=False).at(place))
    assert not alone["screened"].any()
