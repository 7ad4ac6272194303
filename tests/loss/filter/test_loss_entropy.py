"""gradient="filtered" where the loss depends on the entropy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter
from cce_dist.testing import (
    DTYPES,
    Case,
    Inputs,
    Place,
    dense_outputs,
    golden_outputs,
    grid,
    run_case,
    zipf_inputs,
)
from tests.loss.filter.filter_cases import (
    BLOCK,
    GRADIENTS,
    bimodal_inputs,
    rms,
    skewed_inputs,
    wide,
)
from tests.support.loss_cases import generator

STATS = {"stats": ("entropy", "tail_mass")}
# Of the loss, and of each token's entropy: one weight for all tokens would let errors cancel.
UPSTREAM = {"loss": 0.3, "entropy": torch.linspace(-1, 2, 2 * BLOCK)}


def cold_inputs(*, flat: bool) -> Inputs:
    """Inputs in whose cold columns every token has one distribution, up to a factor."""
    inputs = bimodal_inputs(1500)
    hidden = inputs.hidden.clone()
    hidden[:, 3:] = 0 if flat else hidden[0, 3:]
    return replace(inputs, hidden=hidden, bias=torch.zeros(1500, dtype=torch.float64))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 20.0},
    "logit_scale": {"logit_scale": 0.9},
}


TOGETHER = {"plain": {}, "softcap_scale": {"softcap": 8.0, "logit_scale": 0.9}}


@pytest.mark.parametrize("draw", [True, False])
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_entropy_is_exact_where_the_dropped_columns_are_alike(
    option: dict[str, Any], draw: bool
) -> None:
    case = Case(cold_inputs(flat=True), {**option, **STATS, "reduction": "sum"}, upstream=UPSTREAM)
    golden = golden_outputs(case)
    found = {}
    for tail in (True, False):
        options = {**case.options, "filter": Filter(keep=0.3, draw=draw, tail=tail)}
        found[tail] = run_case(None, replace(case, options=options))
    assert float(found[True]["tail_mass"].mean()) > 0.03
    # Drawn columns stand for others at random, in the hidden gradient alone.
    for name in ("grad_weight", "grad_bias") if draw else (*GRADIENTS, "grad_bias"):
        near, far = (rms(found[tail][name] - golden[name]) for tail in (True, False))
        assert far > 1e-3 * rms(golden[name]), name
        assert near < 1e-9 * rms(golden[name]), name


def test_entropy_of_dropped_columns_adds_up_to_what_it_should() -> None:
    # The columns are not alike, but the same in every token: each token's sum is right.
    case = Case(cold_inputs(flat=False), {**STATS, "reduction": "sum"}, upstream=UPSTREAM)
    golden = golden_outputs(case)
    options = {**case.options, "filter": Filter(keep=0.3, draw=False)}
    outputs = run_case(None, replace(case, options=options))
    for name in ("grad_weight", "grad_bias"):
        size = float(golden[name].abs().sum(0).max())
        difference = float((outputs[name].sum(0) - golden[name].sum(0)).abs().max())
        assert difference < 1e-9 * size, (name, difference, size)


@pytest.mark.parametrize(**grid(options=TOGETHER))
def test_entropy_comes_nearer_with_the_tail(place: Place, options: dict[str, Any]) -> None:
    num_classes, _, _ = wide(place, 4500)
    inputs = zipf_inputs(2 * BLOCK, num_classes, 16, generator=generator())
    case = Case(inputs, {**options, **STATS, "reduction": "sum"}, upstream={**UPSTREAM, "loss": 0})
    case = case.at(place)
    golden, found = golden_outputs(case), {}
    for tail in (True, False):
        filter = Filter(keep=0.07, tail=tail)
        found[tail] = run_case(None, replace(case, options={**case.options, "filter": filter}))
    assert float(found[True]["tail_mass"].mean()) > 0.01
    for name, times in (("grad_hidden", 0.5), ("grad_weight", 1.0)):
        near, far = (rms(found[tail][name] - golden[name]) for tail in (True, False))
        assert near < times * far, f"{name}: rms error {near:.3e} with the tail, {far:.3e} without"


@pytest.mark.parametrize(**grid(dtype=("bf16", "fp16")))
def test_entropy_in_a_loss_is_no_worse_than_dense_16_bit(place: Place, dtype: str) -> None:
    tokens, num_classes, dim = (256, 4200, 16) if place.interprets else (512, 4200, 64)
    inputs = skewed_inputs(tokens, num_classes, dim, DTYPES[dtype])
    # A policy's gradient with a bonus of a tenth of the entropy; times 1024, as a loss scaler has.
    advantage = 1024 * torch.randn(tokens, generator=generator())
    upstream = {"loss": advantage, "entropy": -102.4}
    options = {**STATS, "reduction": "none"}
    case = Case(inputs, options, upstream=upstream).at(place)
    outputs, golden, dense = run_case(None, case), golden_outputs(case), dense_outputs(case)
    if dtype == "bf16":
        assert float(outputs["tail_mass"].mean()) > 1e-6, "nothing was filtered"
    for name in GRADIENTS:
        ours, theirs = rms(outputs[name] - golden[name]), rms(dense[name] - golden[name])
        assert ours <= theirs, f"{name}: rms error {ours:.3e}, dense 16-bit {theirs:.3e}"


@pytest.mark.parametrize(**grid())
def test_entropy_of_drawn_columns_is_right_on_average(place: Place) -> None:
    num_classes, _, _ = wide(place, 1200)
    num_seeds = 10
    inputs = zipf_inputs(2 * BLOCK, num_classes, 16, generator=generator())
    errors = []
    for seed in range(num_seeds):
        # The seed is of the data: a constant in the bias changes lse, and p not at all.
        bias = torch.full((num_classes,), 0.01 * seed)
        options = {**STATS, "filter": Filter(keep=0.1), "reduction": "sum"}
        case = Case(replace(inputs, bias=bias), options, trainable=("hidden",), upstream=UPSTREAM)
        case = case.at(place)
        outputs, golden = run_case(None, case), golden_outputs(case)
        errors.append(outputs["grad_hidden"].double() - golden["grad_hidden"].double())
    every = torch.stack(errors)
    single, mean = rms(every), rms(every.mean(0))
    assert single > 0
    assert mean <= 1.5 * single / num_seeds**0.5
    # No direction is off by more than chance allows.
    totals = every.sum(1)
    standard_error = totals.std(0) / num_seeds**0.5
    assert bool((totals.mean(0).abs() <= 6 * standard_error).all())
