"""Gradients of the loss whatever the weights of tokens and the size of the upstream gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter
from cce_dist.testing import (
    DTYPES,
    Case,
    Place,
    check_outputs,
    check_promise,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    large_logit_inputs,
    run_case,
    zipf_inputs,
)
from tests.support.loss_cases import MODES, classes, generator


@pytest.mark.parametrize(**grid(weight=(1e4, 1e-4), gradient=MODES))
def test_linear_cross_entropy_weighted_token_keeps_its_accuracy(
    place: Place, weight: float, gradient: str
) -> None:
    # The filter must look at p alone: a token's gradient scales with its weight, error and all.
    inputs = zipf_inputs(256, 700 if place.interprets else 5000, 64, generator=generator())
    plain = {"gradient": gradient, "reduction": "sum"}
    if gradient == "filtered":
        plain["filter"] = Filter(keep=0.05)
    token_weight = torch.ones(256)
    token_weight[::7] = weight
    unit = run_case(None, Case(replace(inputs, token_weight=torch.ones(256)), plain).at(place))
    heavy = run_case(None, Case(replace(inputs, token_weight=token_weight), plain).at(place))
    expected = token_weight[:, None] * unit["grad_hidden"]
    scale = expected.norm(dim=-1, keepdim=True).expand_as(expected)
    error = ((heavy["grad_hidden"] - expected) / scale).abs().max()
    assert float(error) < 1e-5


@pytest.mark.parametrize(**grid(upstream=(1e-20, 1e20), dtype=("fp32", "bf16"), gradient=MODES))
def test_linear_cross_entropy_size_of_upstream(
    place: Place, gradient: str, upstream: float, dtype: str
) -> None:
    num_classes = classes(place, 500)
    inputs = gaussian_inputs(129, num_classes, 24, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {"gradient": gradient}, upstream={"loss": upstream}).at(place)
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_loss_scaling_in_fp16(place: Place, gradient: str) -> None:
    # p / N is subnormal in fp16 unless the upstream gradient, a loss scaler's, comes first.
    num_classes = classes(place, 2500)
    inputs = gaussian_inputs(129, num_classes, 24, generator=generator(), dtype=torch.float16)
    case = Case(inputs, {"gradient": gradient}, upstream={"loss": 2.0**13}).at(place)
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_mean_over_many_tokens_in_fp16(place: Place, gradient: str) -> None:
    # p / N is 2e-9 and less, no fp16 number; the sums over tokens and the buffer hold it anyway.
    inputs = gaussian_inputs(1000, 200, 24, generator=generator(), dtype=torch.float16)
    upstream = {"loss": 2.0**-10}
    case = Case(inputs, {"gradient": gradient}, main_grad=True, upstream=upstream).at(place)
    found, golden = (
        run_case(None, case)["grad_weight"].double(),
        golden_outputs(case)["grad_weight"],
    )
    relative = float((found - golden).norm() / golden.norm())
    assert relative < 2e-3, f"relative error {relative}"


ZEROED = {"gaussian": gaussian_inputs, "large": large_logit_inputs}


@pytest.mark.parametrize(**grid(maker=ZEROED, gradient=MODES, dtype=("bf16", "fp16")))
def test_linear_cross_entropy_zero_upstream(
    place: Place, gradient: str, maker: Any, dtype: str
) -> None:
    inputs = maker(20, 300, 24, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {"gradient": gradient}, upstream={"loss": 0.0}).at(place)
    outputs = run_case(None, case)
    assert not outputs["grad_hidden"].any() and not outputs["grad_weight"].any()


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_zero_token_weights(place: Place, gradient: str) -> None:
    inputs = gaussian_inputs(20, 300, 24, generator=generator())
    token_weight = torch.zeros(20)
    token_weight[3] = 2.0
    case = Case(replace(inputs, token_weight=token_weight), {"gradient": gradient}).at(place)
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    rest = torch.arange(20) != 3
    assert not outputs["grad_hidden"][rest].any() and bool(outputs["grad_hidden"][3].any())


@pytest.mark.parametrize(**grid(dtype=("bf16", "fp16"), gradient=MODES))
def test_linear_cross_entropy_light_tokens_beside_heavy_ones(
    place: Place, gradient: str, dtype: str
) -> None:
    # One scale near the heavy tokens' d_logits would push p of the light ones below fp16's
    # smallest number.
    num_classes = classes(place, 2500)
    inputs = gaussian_inputs(130, num_classes, 24, generator=generator(), dtype=DTYPES[dtype])
    token_weight = torch.ones(130)
    token_weight[::7] = 5000.0
    inputs = replace(inputs, token_weight=token_weight)
    case = Case(inputs, {"gradient": gradient, "reduction": "sum"}).at(place)
    outputs, golden, dense = run_case(None, case), golden_outputs(case), dense_outputs(case)
    light = token_weight == 1
    for rows in (light, ~light):
        check_promise(
            "grad_hidden",
            outputs["grad_hidden"][rows],
            golden["grad_hidden"][rows],
            dense["grad_hidden"][rows],
            DTYPES[dtype],
        )
