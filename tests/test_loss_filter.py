"""gradient="filtered": no worse than dense 16-bit where it is meant for, bounded everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter
from cce_dist.testing import (
    Case,
    Inputs,
    check_close64,
    check_outputs,
    check_promise,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    large_logit_inputs,
    run_case,
    zipf_inputs,
)

BLOCK = 128
GRADIENTS = ("grad_hidden", "grad_weight")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


# -- the contract -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tokens", "num_classes", "dim"),
    [
        pytest.param(512, 8192, 64, id="four_blocks"),
        pytest.param(129, 4500, 64, id="block_of_one_token"),
        pytest.param(7, 8192, 64, id="block_of_seven_tokens"),
        pytest.param(256, 16384, 128, id="large_vocabulary"),
    ],
)
def test_filtered_is_no_worse_than_dense_16_bit(
    tokens: int, num_classes: int, dim: int, dtype: torch.dtype
) -> None:
    inputs = zipf_inputs(tokens, num_classes, dim, generator=generator(), dtype=dtype)
    # Times 1024, as a loss scaler does: fp16's smallest number is no part of the comparison.
    case = Case(inputs, {"stats": ("lse", "tail_mass")}, upstream={"loss": 1024.0})
    outputs, golden, dense = run_case(None, case), golden_outputs(case), dense_outputs(case)
    check_outputs(case, outputs)
    for name in GRADIENTS:
        ours, theirs = rms(outputs[name] - golden[name]), rms(dense[name] - golden[name])
        assert ours <= theirs, f"{name}: rms error {ours:.3e}, dense 16-bit {theirs:.3e}"
    if dtype == torch.bfloat16:
        assert float(outputs["tail_mass"].mean()) > 0.001, "nothing was filtered"


@pytest.mark.parametrize("maker", [zipf_inputs, gaussian_inputs], ids=["zipf", "gaussian"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_filtered_in_wide_dtypes_is_dense(dtype: torch.dtype, maker: Any) -> None:
    inputs = maker(300, 6000, 64, generator=generator(), dtype=dtype)
    case = Case(inputs, {"stats": ("lse", "tail_mass")})
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_filtered_each_option_on_a_skewed_head(option: str, dtype: torch.dtype) -> None:
    # 4096 classes and more: the default filter drops columns here in 16 bits.
    tensors, options = OPTIONS[option]
    inputs = zipf_inputs((2, 200), 4500, 64, generator=generator(), dtype=dtype)
    inputs = inputs.with_options(generator(), *tensors).ignoring(generator(), 0.2)
    case = Case(inputs, {**options, "stats": ("lse",)})
    check_outputs(case, run_case(None, case))


# -- the bound by the reported tail mass --------------------------------------------------------

FILTERS = {
    "keep_0.002": Filter(keep=0.002),
    "keep_0.1": Filter(keep=0.1),
    "keep_2": Filter(keep=2),
    "keep_128": Filter(keep=128),
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


@pytest.mark.parametrize("filter", FILTERS.values(), ids=FILTERS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"softcap": 4.0, "logit_scale": 1.5}, id="softcap"),
        pytest.param({"z_loss": 0.1, "label_smoothing": 0.1}, id="z_loss_smoothing"),
    ],
)
def test_filtered_error_is_bounded_by_the_tail_mass(
    options: dict[str, Any], family: str, filter: Filter
) -> None:
    inputs = FAMILIES[family](200, 2500, 16, generator=generator(), dtype=torch.float64)
    case = Case(inputs, {**options, "reduction": "sum", "filter": filter, "stats": ("tail_mass",)})
    outputs = run_case(None, case)
    golden = golden_outputs(replace(case, options={**options, "reduction": "sum"}))
    plain = {**options, "reduction": "sum", "stats": ("lse",)}
    lse = golden_outputs(replace(case, options=plain))["lse"]
    check_close64("loss", outputs["loss"], golden["loss"])

    # A token's p is multiplied by d loss / d lse in all; what replaces a tail has its mass.
    per_lse = 1 + 2 * options.get("z_loss", 0.0) * lse
    tail = per_lse * outputs["tail_mass"] * options.get("logit_scale", 1.0)
    times = 2 if filter.tail else 1
    longest = inputs.weight.norm(dim=-1).max()
    error = (outputs["grad_hidden"] - golden["grad_hidden"]).norm(dim=-1)
    assert bool((error <= times * tail * longest + 1e-9).all())
    error = (outputs["grad_weight"] - golden["grad_weight"]).norm(dim=-1).sum()
    bound = (times * tail * inputs.hidden.norm(dim=-1)).sum()
    assert float(error) <= float(bound) + 1e-9
    assert bool((outputs["tail_mass"] >= 0).all()) and float(outputs["tail_mass"].max()) <= 1


@pytest.mark.parametrize("gradient", ["exact", "in_forward"])
def test_tail_mass_is_zero_where_nothing_is_filtered(gradient: str) -> None:
    inputs = zipf_inputs(130, 5000, 16, generator=generator())
    outputs = run_case(None, Case(inputs, {"gradient": gradient, "stats": ("tail_mass",)}))
    assert outputs["tail_mass"].shape == (130,) and not outputs["tail_mass"].any()


# -- exactly what is kept, on inputs whose masses are far from the threshold --------------------

HOT = 10  # columns that hold mass in the tokens of one block


def bimodal_inputs(num_classes: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Two blocks of 128 tokens. Columns 0-9 are hot in both, 10-19 in the first, 20-29 in the
    second: mass of at least 1. All others have less than 0.1 in a block, and differ by token."""
    gen = generator()
    weight = 0.15 * torch.randn(num_classes, 16, generator=gen, dtype=torch.float64)
    hidden = torch.randn(2 * BLOCK, 16, generator=gen, dtype=torch.float64)
    hidden[:, :3] = 0
    weight[:, :3] = 0
    for place in range(3):
        weight[HOT * place : HOT * (place + 1), place] = 7.0
    hidden[:, 0] = 1
    hidden[:BLOCK, 1] = 1
    hidden[BLOCK:, 2] = 1
    targets = torch.randint(0, HOT, (2 * BLOCK,), generator=gen)
    return Inputs(hidden.to(dtype), weight.to(dtype), targets)


def kept_columns(p: Tensor, targets: Tensor, filter: Filter) -> Tensor:
    """[N, V] bool, by the definition in Filter's docstring."""
    kept = torch.zeros_like(p, dtype=torch.bool)
    for start in range(0, len(p), BLOCK):
        block = slice(start, start + BLOCK)
        if filter.eps is not None:
            score, threshold = p[block].amax(0), filter.eps
        else:
            score, threshold = p[block].sum(0), filter.keep
        margin = (score / threshold).log().abs().min()
        assert margin > 0.5, f"a score is too near to the threshold for this test: {margin}"
        kept[block] = score >= threshold
        kept[block, targets[block]] = True
    return kept


def emulate(inputs: Inputs, filter: Filter) -> dict[str, Tensor]:
    """Dense gradients of the summed loss under `filter`, and the mass that it drops."""
    p = (inputs.hidden @ inputs.weight.T).softmax(-1)
    kept = kept_columns(p, inputs.targets, filter)
    tail = torch.where(kept, 0, p)
    d_logits = torch.where(kept, p, 0)
    if filter.tail:
        for start in range(0, len(p), BLOCK):
            block = slice(start, start + BLOCK)
            column, row = tail[block].sum(0), tail[block].sum(1)
            d_logits[block] += row[:, None] * column / column.sum()
    d_logits[torch.arange(len(p)), inputs.targets] -= 1
    return {
        "grad_hidden": d_logits @ inputs.weight,
        "grad_weight": d_logits.T @ inputs.hidden,
        "tail_mass": tail.sum(-1),
        "kept": kept,
    }


@pytest.mark.parametrize("workspace_bytes", [2**16, 2**26], ids=["chunks", "one_chunk"])
@pytest.mark.parametrize("cold_target", [None, 1111], ids=["hot_targets", "a_cold_target"])
@pytest.mark.parametrize(
    "filter",
    [
        pytest.param(Filter(keep=0.3, tail=False), id="keep"),
        pytest.param(Filter(eps=0.02, tail=False), id="eps"),
    ],
)
def test_filter_without_tail_keeps_what_it_says(
    filter: Filter, cold_target: int | None, workspace_bytes: int
) -> None:
    inputs = bimodal_inputs(4500)
    if cold_target is not None:
        targets = inputs.targets.clone()
        targets[200] = cold_target
        inputs = replace(inputs, targets=targets)
    expected = emulate(inputs, filter)
    assert 0.002 < expected["kept"].double().mean() < 0.01
    options = {"filter": filter, "reduction": "sum", "stats": ("tail_mass",)}
    outputs = run_case(None, Case(inputs, {**options, "workspace_bytes": workspace_bytes}))
    for name in (*GRADIENTS, "tail_mass"):
        check_close64(name, outputs[name], expected[name])


@pytest.mark.parametrize("num_classes", [1500, 4500], ids=["one_tile", "several_tiles"])
def test_filter_with_tail_keeps_columns_exactly_and_all_mass(num_classes: int) -> None:
    inputs = bimodal_inputs(num_classes)
    filter = Filter(keep=0.3)
    expected = emulate(inputs, filter)
    assert float(expected["tail_mass"].mean()) > 0.03
    case = Case(inputs, {"reduction": "sum"})
    options = {"filter": filter, "reduction": "sum", "stats": ("tail_mass",)}
    outputs = run_case(None, replace(case, options=options))
    golden = golden_outputs(case)
    check_close64("tail_mass", outputs["tail_mass"], expected["tail_mass"])
    hot = slice(0, HOT)  # kept in both blocks: nothing about them is approximate
    check_close64("grad_weight", outputs["grad_weight"][hot], golden["grad_weight"][hot])
    assert float(outputs["grad_weight"].sum(0).abs().max()) < 1e-9
    # The column marginals that the forward records are bounds, and only nearly proportional.
    for name in GRADIENTS:
        dropped = rms(emulate(inputs, replace(filter, tail=False))[name] - golden[name])
        assert rms(outputs[name] - expected[name]) < 0.02 * dropped


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no_tail"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"z_loss": 0.1}, id="z_loss"),
        pytest.param({"logit_scale": 1.7, "label_smoothing": 0.1}, id="scale_smoothing"),
        pytest.param({"softcap": 5.0, "logit_scale": 1.3}, id="softcap"),
    ],
)
def test_filter_tail_preserves_the_sum_over_the_vocabulary(
    options: dict[str, Any], tail: bool
) -> None:
    inputs = zipf_inputs(300, 2500, 16, generator=generator(), dtype=torch.float64)
    inputs = inputs.with_options(generator(), "bias", "token_weight")
    case = Case(inputs, options)
    golden = golden_outputs(case)
    options = {**case.options, "filter": Filter(keep=0.5, tail=tail)}
    outputs = run_case(None, replace(case, options=options))
    for name in ("grad_weight", "grad_bias"):
        difference = float((outputs[name].sum(0) - golden[name].sum(0)).abs().max())
        size = float(golden[name].abs().sum(0).max())
        assert (difference < 1e-10 * size) == tail, (name, difference, size)


@pytest.mark.parametrize("num_classes", [1500, 4500], ids=["one_tile", "several_tiles"])
def test_filter_tail_is_exact_where_tails_have_one_shape(num_classes: int) -> None:
    # Cold columns have the same relative probabilities in every token: the tail is of rank one.
    inputs = bimodal_inputs(num_classes)
    hidden = inputs.hidden.clone()
    hidden[:, 3:] = hidden[0, 3:]
    inputs = replace(inputs, hidden=hidden)
    case = Case(inputs, {"reduction": "sum"})
    golden = golden_outputs(case)
    options = {"reduction": "sum", "filter": Filter(keep=0.3), "stats": ("tail_mass",)}
    outputs = run_case(None, replace(case, options=options))
    assert float(outputs["tail_mass"].mean()) > 0.03
    without = emulate(inputs, Filter(keep=0.3, tail=False))
    for name in GRADIENTS:
        assert rms(without[name] - golden[name]) > 0.001 * rms(golden[name])
        assert rms(outputs[name] - golden[name]) < 1e-9 * rms(golden[name])


@pytest.mark.parametrize("filter", [Filter(keep=0), Filter(eps=0)], ids=["keep", "eps"])
def test_filter_of_zero_keeps_everything(filter: Filter) -> None:
    inputs = zipf_inputs(130, 5000, 16, generator=generator(), dtype=torch.bfloat16)
    found = run_case(None, Case(inputs, {"filter": filter, "stats": ("tail_mass",)}))
    exact = run_case(None, Case(inputs, {"gradient": "exact"}))
    assert not found["tail_mass"].any()
    for name in GRADIENTS:
        assert torch.equal(found[name], exact[name])


def test_filter_of_zero_admits_softcap_with_label_smoothing() -> None:
    inputs = zipf_inputs(130, 2500, 16, generator=generator(), dtype=torch.float64)
    case = Case(inputs, {"softcap": 3.0, "label_smoothing": 0.1, "filter": Filter(keep=0)})
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize("name", ["lse", "entropy"])
def test_filter_and_upstream_of_stats(name: str) -> None:
    # d lse keeps its mass; the entropy's gradient p (log p + H) is not small where p is.
    inputs = zipf_inputs(300, 2500, 16, generator=generator(), dtype=torch.float64)
    upstream = {"loss": 0.0, name: torch.linspace(-1, 1, 300, dtype=torch.float64)}
    case = Case(inputs, {"stats": (name,)}, upstream=upstream)
    golden = golden_outputs(case)
    options = {"stats": (name, "tail_mass"), "filter": Filter(keep=0.5)}
    outputs = run_case(None, replace(case, options=options))
    if name == "entropy":
        for gradient in GRADIENTS:
            check_close64(gradient, outputs[gradient], golden[gradient])
    total = golden["grad_weight"].sum(0)
    size = golden["grad_weight"].abs().sum(0)
    check_close64("sum", outputs["grad_weight"].sum(0), total, scale=size)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_filter_with_a_frozen_input(frozen: str) -> None:
    inputs = bimodal_inputs(2500)
    both = Case(inputs, {"filter": Filter(keep=0.3)})
    one = replace(both, trainable=("weight",) if frozen == "hidden" else ("hidden",))
    expected, found = run_case(None, both), run_case(None, one)
    name = "grad_weight" if frozen == "hidden" else "grad_hidden"
    check_close64(name, found[name], expected[name])


def test_filter_blocks_are_made_of_tokens_that_count() -> None:
    # Ignored tokens are left out first: the blocks of 128 hold the others, in order.
    inputs = bimodal_inputs(2500)
    hidden = torch.zeros(512, 16, dtype=torch.float64)
    targets = torch.full((512,), -100)
    hidden[::2], targets[::2] = inputs.hidden, inputs.targets
    options = {"filter": Filter(keep=0.3, tail=False), "stats": ("tail_mass",)}
    dense = run_case(None, Case(inputs, options))
    sparse = run_case(None, Case(replace(inputs, hidden=hidden, targets=targets), options))
    check_close64("tail_mass", sparse["tail_mass"][::2], dense["tail_mass"])
    check_close64("grad_weight", sparse["grad_weight"], dense["grad_weight"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_filtered_on_a_gpu(dtype: torch.dtype) -> None:
    inputs = zipf_inputs(512, 8192, 64, generator=generator(), dtype=dtype)
    options = {"stats": ("lse", "tail_mass"), "backend": "torch"}
    case = Case(inputs, options, device="cuda", upstream={"loss": 1024.0})
    outputs = run_case(None, case)
    golden, dense = golden_outputs(case), dense_outputs(case)
    check_outputs(case, outputs)
    if dtype != torch.float32:
        for name in GRADIENTS:
            check_promise(name, outputs[name], golden[name], dense[name], dtype)
