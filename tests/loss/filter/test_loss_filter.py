"""gradient="filtered": no worse than dense 16-bit where it is meant for, bounded everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter
from cce_dist.options import DRAW_FACTOR
from cce_dist.testing import (
    DTYPES,
    Case,
    Place,
    check_outputs,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    large_logit_inputs,
    run_case,
    zipf_inputs,
)
from tests.loss.filter.filter_cases import GRADIENTS, check_near, rms, skewed_inputs, wide
from tests.support.grids import paired_grid
from tests.support.loss_cases import generator

# -- the contract -------------------------------------------------------------------------------

SHAPES: dict[str, tuple[int, int, int]] = {
    "four_blocks": (512, 8192, 64),
    "block_of_one_token": (129, 4500, 64),
    "block_of_seven_tokens": (7, 8192, 64),
    "large_vocabulary": (256, 16384, 128),
}
# Below 4096 classes the default filter keeps everything. Torch's tiles have 2048 columns; dense
# 16-bit products on a CPU take most of the time.
INTERPRETED_SHAPES = {"four_blocks": (512, 4096, 16), "large_vocabulary": (256, 6000, 16)}
CPU_SHAPES = {
    "four_blocks": (512, 4100, 32),
    "block_of_seven_tokens": (7, 4100, 64),
    "large_vocabulary": (256, 8192, 32),
}


@pytest.mark.parametrize(**grid(shape=tuple(SHAPES), dtype=("bf16", "fp16")))
def test_filtered_is_no_worse_than_dense_16_bit(place: Place, shape: str, dtype: str) -> None:
    tokens, num_classes, dim = SHAPES[shape]
    if place.device == "cpu":
        smaller = INTERPRETED_SHAPES if place.interprets else CPU_SHAPES
        tokens, num_classes, dim = smaller.get(shape, SHAPES[shape])
    # How the d_logits of seven targets round is luck, for dense too: many draws of them.
    draws = 1 if tokens > 7 else 2 if place.interprets else 16
    errors = {name: ([], []) for name in GRADIENTS}
    tails: list[float] = []
    made = generator()
    for draw in range(draws):
        inputs = zipf_inputs(tokens, num_classes, dim, generator=made, dtype=DTYPES[dtype])
        # Times 1024, as a loss scaler does: fp16's smallest number is no part of the comparison.
        case = Case(inputs, {"stats": ("lse", "tail_mass")}, upstream={"loss": 1024.0}).at(place)
        outputs, golden, dense = run_case(None, case), golden_outputs(case), dense_outputs(case)
        # The rule of one call is one draw's; for the others' gradients all draws together.
        check_outputs(case, outputs, but=GRADIENTS if draw else ())
        for name, (ours, theirs) in errors.items():
            ours.append(rms(outputs[name] - golden[name]))
            theirs.append(rms(dense[name] - golden[name]))
        tails.append(float(outputs["tail_mass"].mean()))
    if dtype == "bf16":
        assert sum(tails) / draws > 1e-6, "nothing was filtered"
    for name, both in errors.items():
        ours, theirs = (rms(torch.tensor(found)) for found in both)
        assert ours <= theirs, f"{name}: rms error {ours:.3e}, dense 16-bit {theirs:.3e}"


MAKERS = {"zipf": zipf_inputs, "gaussian": gaussian_inputs}


@pytest.mark.parametrize(**grid(maker=MAKERS, dtype=("fp32", "float64")))
def test_filtered_in_wide_dtypes_is_dense(place: Place, maker: Any, dtype: str) -> None:
    shape = (130, 4500, 16) if place.interprets else (300, 6000, 64)
    inputs = maker(*shape, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {"stats": ("lse", "tail_mass")}).at(place)
    check_outputs(case, run_case(None, case))


OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "bias": (("bias",), {}),
    "softcap": ((), {"softcap": 6.0}),
    "logit_scale": ((), {"logit_scale": 0.9}),
    "label_smoothing": ((), {"label_smoothing": 0.1}),
    "z_loss": ((), {"z_loss": 0.01}),
    "token_weight": (("token_weight",), {}),
    "class_weight_smoothing": (("class_weight",), {"label_smoothing": 0.1}),
    "shift": ((), {"shift": 1}),
    "sum": ((), {"reduction": "sum"}),
    "none": ((), {"reduction": "none"}),
    "everything": (
        ("bias", "token_weight", "class_weight"),
        {"label_smoothing": 0.1, "z_loss": 0.01, "logit_scale": 1.1, "shift": 1},
    ),
}


@pytest.mark.parametrize(**paired_grid(option=tuple(OPTIONS), dtype=tuple(DTYPES)))
def test_filtered_each_option_on_a_skewed_head(place: Place, option: str, dtype: str) -> None:
    # 4096 classes and more: the default filter drops columns here in 16 bits.
    tensors, options = OPTIONS[option]
    tokens, num_classes, dim = (2, 70), 4100, 64
    if place.device == "cpu":
        tokens, dim = (2, 66), 16
    inputs = skewed_inputs(tokens, num_classes, dim, DTYPES[dtype])
    inputs = inputs.with_options(generator(), *tensors).ignoring(generator(), 0.2)
    # fp16's smallest number is no part of the comparison.
    upstream = {"loss": 1024.0} if dtype == "fp16" and options.get("reduction") != "none" else {}
    case = Case(inputs, {**options, "stats": ("lse",)}, upstream=upstream).at(place)
    check_outputs(case, run_case(None, case))


# -- the bound by the reported tail mass --------------------------------------------------------

FILTERS = {
    "keep_0.002": Filter(keep=0.002, draw=False),
    "keep_0.1": Filter(keep=0.1, draw=False),
    "keep_2": Filter(keep=2, draw=False),
    "keep_128": Filter(keep=128, draw=False),
    "keep_0.1_drawn": Filter(keep=0.1),
    "keep_2_drawn": Filter(keep=2),
    "keep_128_drawn": Filter(keep=128),
    "keep_0.1_no_tail": Filter(keep=0.1, tail=False),
    "keep_128_no_tail": Filter(keep=128, tail=False),
    "eps": Filter(eps=2**-8),
    "eps_no_tail": Filter(eps=2**-12, tail=False),
    "eps_1_no_tail": Filter(eps=1.0, tail=False),
}
FAMILIES = {
    "zipf": zipf_inputs,
    "gaussian": gaussian_inputs,
    "large": lambda *args, **more: large_logit_inputs(*args, largest=30.0, **more),
}


BOUNDED = {
    "plain": {},
    "softcap": {"softcap": 4.0, "logit_scale": 1.5},
    "z_loss_smoothing": {"z_loss": 0.1, "label_smoothing": 0.1},
}


@pytest.mark.parametrize(**paired_grid(options=BOUNDED, family=FAMILIES, filter=FILTERS))
def test_filtered_error_is_bounded_by_the_tail_mass(
    place: Place, options: dict[str, Any], family: Any, filter: Filter
) -> None:
    num_classes, dtype, rounding = wide(place, 2500)
    inputs = family(140, num_classes, 16, generator=generator(), dtype=dtype)
    given = {**options, "reduction": "sum", "filter": filter, "stats": ("tail_mass",)}
    case = Case(inputs, given).at(place)
    outputs = run_case(None, case)
    golden = golden_outputs(replace(case, options={**options, "reduction": "sum"}))
    plain = {**options, "reduction": "sum", "stats": ("lse",)}
    lse = golden_outputs(replace(case, options=plain))["lse"]
    check_near(place, "loss", outputs["loss"], golden["loss"])

    # A token's p is multiplied by d loss / d lse in all; what replaces a tail has its mass.
    per_lse = 1 + 2 * options.get("z_loss", 0.0) * lse
    tail = per_lse * outputs["tail_mass"] * options.get("logit_scale", 1.0)
    times = 2 if filter.tail else 1
    longest = inputs.weight.double().norm(dim=-1).max()
    slack = rounding * float(per_lse.max() * longest)
    error = (outputs["grad_hidden"] - golden["grad_hidden"]).norm(dim=-1)
    if filter.draw and filter.tail and filter.eps is None:
        # An average has a bound, here by the longest difference of two columns; see
        # tests/loss/filter/test_loss_drawn.py.
        assert filter.keep != "auto"
        pull = per_lse * options.get("logit_scale", 1.0)
        variance = 2 * DRAW_FACTOR * filter.keep * pull * tail * (2 * longest) ** 2
        assert float(error.square().mean()) <= float(variance.mean()) + slack
    else:
        assert bool((error <= times * tail * longest + slack).all())
    error = (outputs["grad_weight"] - golden["grad_weight"]).norm(dim=-1).sum()
    norms = inputs.hidden.double().norm(dim=-1)
    bound = (times * tail * norms).sum()
    assert float(error) <= float(bound + rounding * (per_lse * norms).sum())
    assert bool((outputs["tail_mass"] >= 0).all())
    assert float(outputs["tail_mass"].max()) <= 1 + rounding


@pytest.mark.parametrize(**grid(gradient=("exact", "in_forward")))
def test_tail_mass_is_zero_where_nothing_is_filtered(place: Place, gradient: str) -> None:
    inputs = zipf_inputs(130, 700 if place.interprets else 5000, 16, generator=generator())
    options = {"gradient": gradient, "stats": ("tail_mass",)}
    if place.backend == "triton" and gradient == "in_forward":
        options["filter"] = Filter(keep=0)  # by torch it filters nothing anyway
    outputs = run_case(None, Case(inputs, options).at(place))
    assert outputs["tail_mass"].shape == (130,) and not outputs["tail_mass"].any()


# -- in_forward ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    **grid(filter={"drawn": Filter(keep=0.1), "undrawn": Filter(keep=0.1, draw=False)},
           dtype=("fp32", "bf16", "fp16"))
)  # fmt: skip
def test_in_forward_filters_where_logits_are_not_kept(
    place: Place, filter: Filter, dtype: str
) -> None:
    num_classes = 700 if place.interprets else 2500
    inputs = skewed_inputs(140, num_classes, 16, DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias").ignoring(generator(), 0.2)
    # fp16's smallest number is no part of the comparison, nor is a second rounding.
    case = Case(inputs, {"stats": ("lse", "tail_mass")}, upstream={"loss": 1024.0}).at(place)

    def run(**options: Any) -> dict[str, Tensor]:
        return run_case(None, replace(case, options={**case.options, **options}))

    found = run(gradient="in_forward", filter=filter)
    if place.backend == "torch":
        assert not found["tail_mass"].any()
        expected = run(gradient="in_forward")
    else:
        expected = run(filter=filter)
        assert float(expected["tail_mass"].mean()) > 0.01
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


@pytest.mark.parametrize(**grid(dtype=("fp32", "bf16", "fp16")))
def test_in_forward_without_a_threshold_is_exact(place: Place, dtype: str) -> None:
    # From 4096 classes on the default filter drops columns.
    shape = (130, 4100, 16) if place.interprets else (200, 5000, 64)
    inputs = skewed_inputs(*shape, DTYPES[dtype])
    options = {"gradient": "in_forward", "filter": Filter(keep=0), "stats": ("lse", "tail_mass")}
    case = Case(inputs, options, upstream={"loss": 1024.0}).at(place)
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    assert not outputs["tail_mass"].any()
