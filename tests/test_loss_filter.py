"""gradient="filtered": no worse than dense 16-bit where it is meant for, bounded everywhere."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter
from cce_dist.options import DRAW_FACTOR
from cce_dist.testing import (
    DTYPES,
    TRITON_PLACES,
    Case,
    Inputs,
    Place,
    check_close64,
    check_outputs,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    large_logit_inputs,
    run_case,
    zipf_inputs,
)

BLOCK = 128
GRADIENTS = ("grad_hidden", "grad_weight")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@functools.cache
def skewed_inputs(
    tokens: int | tuple[int, ...], num_classes: int, dim: int, dtype: torch.dtype
) -> Inputs:
    """Once for all tests of such a shape: to draw them takes as long as the loss. A case takes
    copies of them."""
    return zipf_inputs(tokens, num_classes, dim, generator=generator(), dtype=dtype)


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


# -- the contract -------------------------------------------------------------------------------


SHAPES: dict[str, tuple[int, int, int]] = {
    "four_blocks": (512, 8192, 64),
    "block_of_one_token": (129, 4500, 64),
    "block_of_seven_tokens": (7, 8192, 64),
    "large_vocabulary": (256, 16384, 128),
}
# Below 4096 classes the default filter keeps everything.
INTERPRETED_SHAPES = {"four_blocks": (512, 4096, 16), "large_vocabulary": (256, 6000, 16)}


@pytest.mark.parametrize(**grid(shape=tuple(SHAPES), dtype=("bf16", "fp16")))
def test_filtered_is_no_worse_than_dense_16_bit(place: Place, shape: str, dtype: str) -> None:
    tokens, num_classes, dim = SHAPES[shape]
    if place.interprets:
        tokens, num_classes, dim = INTERPRETED_SHAPES.get(shape, SHAPES[shape])
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


@pytest.mark.parametrize(**grid(option=tuple(OPTIONS), dtype=tuple(DTYPES)))
def test_filtered_each_option_on_a_skewed_head(place: Place, option: str, dtype: str) -> None:
    # 4096 classes and more: the default filter drops columns here in 16 bits.
    tensors, options = OPTIONS[option]
    tokens, num_classes, dim = ((2, 70), 4100, 16) if place.interprets else ((2, 200), 4500, 64)
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


@pytest.mark.parametrize(**grid(options=BOUNDED, family=FAMILIES, filter=FILTERS))
def test_filtered_error_is_bounded_by_the_tail_mass(
    place: Place, options: dict[str, Any], family: Any, filter: Filter
) -> None:
    num_classes, dtype, rounding = wide(place, 2500)
    inputs = family(200, num_classes, 16, generator=generator(), dtype=dtype)
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
        # tests/test_loss_drawn.py.
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


def wide(place: Place, num_classes: int) -> tuple[int, torch.dtype, float]:
    """Columns to use instead of `num_classes`, the widest dtype, and how far it rounds."""
    if "float64" in place.dtypes:
        return num_classes, torch.float64, 1e-10
    return 700 if place.interprets else num_classes, torch.float32, 2e-5


def check_near(place: Place, name: str, ours: Tensor, expected: Tensor) -> None:
    """check_close64, or as close as sums of thousands of fp32 terms are."""
    if "float64" in place.dtypes:
        check_close64(name, ours, expected)
    else:
        size = float(expected.abs().max())
        torch.testing.assert_close(ours.double(), expected.double(), rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize(**grid(gradient=("exact", "in_forward")))
def test_tail_mass_is_zero_where_nothing_is_filtered(place: Place, gradient: str) -> None:
    inputs = zipf_inputs(130, 700 if place.interprets else 5000, 16, generator=generator())
    options = {"gradient": gradient, "stats": ("tail_mass",)}
    if place.backend == "triton" and gradient == "in_forward":
        options["filter"] = Filter(keep=0)  # by torch it filters nothing anyway
    outputs = run_case(None, Case(inputs, options).at(place))
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


# Of torch, which tightens what the forward recorded once lse is known. Triton decides in the
# forward: test_filter_keeps_at_least_what_it_says.
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
    filter = Filter(keep=0.3, draw=False)
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


FAMILIES_TO_KEEP = {
    "zipf": lambda place: zipf_inputs(BLOCK, 700, 16, generator=generator(), dtype=place.widest),
    # The first tile seen knows least of lse, and here it holds the least mass.
    "mass_in_the_last_tile": lambda place: reversed_classes(bimodal_inputs(700, place.widest)),
    "bimodal": lambda place: bimodal_inputs(700, place.widest),
}
TO_KEEP = {
    "keep": Filter(keep=0.3, tail=False),
    "much": Filter(keep=2, tail=False),
    "eps": Filter(eps=0.02, tail=False),
    "eps_1": Filter(eps=1.0, tail=False),  # targets alone
}


def reversed_classes(inputs: Inputs) -> Inputs:
    return replace(
        inputs, weight=inputs.weight.flip(0), targets=len(inputs.weight) - 1 - inputs.targets
    )


@pytest.mark.parametrize(**grid(family=FAMILIES_TO_KEEP, filter=TO_KEEP))
def test_filter_keeps_at_least_what_it_says(place: Place, family: Any, filter: Filter) -> None:
    # The kept columns of one block of tokens: those in which the bias has a gradient.
    inputs = family(place)
    num_classes = len(inputs.weight)
    bias = torch.zeros(num_classes, dtype=inputs.weight.dtype)
    inputs = replace(
        inputs, bias=bias, hidden=inputs.hidden[:BLOCK], targets=inputs.targets[:BLOCK]
    )
    options = {"filter": filter, "reduction": "sum", "stats": ("tail_mass",)}
    outputs = run_case(None, Case(inputs, options).at(place))
    kept = outputs["grad_bias"] != 0

    hidden, weight = inputs.hidden.double(), inputs.weight.double()
    p = (hidden @ weight.T).softmax(-1)
    if filter.eps is None:
        must = p.sum(0) >= 1.001 * filter.keep
    else:
        must = p.amax(0) >= 1.001 * filter.eps
    must[inputs.targets] = True
    assert bool(kept[must].all())
    assert 0 < int(kept.sum()) < num_classes, "the filter kept everything"

    rounding = wide(place, 0)[2]
    dropped = torch.where(kept, 0, p).sum(-1)
    torch.testing.assert_close(outputs["tail_mass"].double(), dropped, rtol=1e-3, atol=rounding)
    d_logits = torch.where(kept, p, 0)
    d_logits[torch.arange(BLOCK), inputs.targets] -= 1
    check_near(place, "grad_hidden", outputs["grad_hidden"], d_logits @ weight)
    check_near(place, "grad_weight", outputs["grad_weight"], d_logits.T @ hidden)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, num_classes=(1500, 4500), keep=(0.07, 0.5)))
def test_filter_with_tail_comes_nearer_than_without(
    place: Place, num_classes: int, keep: float
) -> None:
    # Triton's counterpart of the two tests beside it: the masses that it records are looser.
    num_classes = num_classes // 3 if place.interprets else num_classes
    inputs = zipf_inputs(256, num_classes, 16, generator=generator())
    case = Case(inputs, {"reduction": "sum"}).at(place)
    golden = golden_outputs(case)
    found = {}
    for tail in (True, False):
        # At a threshold this far above the default the draw's spread is larger than the tail.
        filter = Filter(keep=keep, tail=tail, draw=keep < 0.1)
        options = {**case.options, "filter": filter, "stats": ("tail_mass",)}
        found[tail] = run_case(None, replace(case, options=options))
    assert torch.equal(found[True]["tail_mass"], found[False]["tail_mass"])
    assert float(found[True]["tail_mass"].mean()) > 0.01
    for name, times in (("grad_hidden", 0.5), ("grad_weight", 1.0)):
        near, far = (rms(found[tail][name] - golden[name]) for tail in (True, False))
        assert near < times * far, f"{name}: rms error {near:.3e} with the tail, {far:.3e} without"


SUMMED = {
    "plain": {},
    "z_loss": {"z_loss": 0.1},
    "scale_smoothing": {"logit_scale": 1.7, "label_smoothing": 0.1},
    "softcap": {"softcap": 5.0, "logit_scale": 1.3},
}


@pytest.mark.parametrize(**grid(options=SUMMED, tail=(True, False)))
def test_filter_tail_preserves_the_sum_over_the_vocabulary(
    place: Place, options: dict[str, Any], tail: bool
) -> None:
    num_classes, dtype, rounding = wide(place, 2500)
    inputs = skewed_inputs(300, num_classes, 16, dtype)
    inputs = inputs.with_options(generator(), "bias", "token_weight")
    case = Case(inputs, options).at(place)
    golden = golden_outputs(case)
    options = {**case.options, "filter": Filter(keep=0.5, tail=tail)}
    outputs = run_case(None, replace(case, options=options))
    for name in ("grad_weight", "grad_bias"):
        difference = float((outputs[name].sum(0) - golden[name].sum(0)).abs().max())
        size = float(golden[name].abs().sum(0).max())
        assert (difference < rounding * size) == tail, (name, difference, size)


@pytest.mark.parametrize("num_classes", [1500, 4500], ids=["one_tile", "several_tiles"])
def test_filter_tail_is_exact_where_tails_have_one_shape(num_classes: int) -> None:
    # Cold columns have the same relative probabilities in every token: the tail is of rank one.
    inputs = bimodal_inputs(num_classes)
    hidden = inputs.hidden.clone()
    hidden[:, 3:] = hidden[0, 3:]
    inputs = replace(inputs, hidden=hidden)
    case = Case(inputs, {"reduction": "sum"})
    golden = golden_outputs(case)
    filter = Filter(keep=0.3, draw=False)
    options = {"reduction": "sum", "filter": filter, "stats": ("tail_mass",)}
    outputs = run_case(None, replace(case, options=options))
    assert float(outputs["tail_mass"].mean()) > 0.03
    without = emulate(inputs, Filter(keep=0.3, tail=False))
    for name in GRADIENTS:
        assert rms(without[name] - golden[name]) > 0.001 * rms(golden[name])
        assert rms(outputs[name] - golden[name]) < 1e-9 * rms(golden[name])


@pytest.mark.parametrize(**grid(filter={"keep": Filter(keep=0), "eps": Filter(eps=0)}))
def test_filter_of_zero_keeps_everything(place: Place, filter: Filter) -> None:
    num_classes = 700 if place.interprets else 5000
    dtype = torch.bfloat16 if "bf16" in place.dtypes else torch.float16
    inputs = skewed_inputs(130, num_classes, 16, dtype)
    found = run_case(None, Case(inputs, {"filter": filter, "stats": ("tail_mass",)}).at(place))
    exact = run_case(None, Case(inputs, {"gradient": "exact"}).at(place))
    assert not found["tail_mass"].any()
    for name in GRADIENTS:
        assert torch.equal(found[name], exact[name])


@pytest.mark.parametrize(**grid())
def test_filter_of_zero_admits_softcap_with_label_smoothing(place: Place) -> None:
    num_classes, dtype, _ = wide(place, 2500)
    inputs = skewed_inputs(130, num_classes, 16, dtype)
    case = Case(inputs, {"softcap": 3.0, "label_smoothing": 0.1, "filter": Filter(keep=0)})
    check_outputs(case.at(place), run_case(None, case.at(place)))


@pytest.mark.parametrize(**grid(name=("lse", "entropy")))
def test_filter_and_upstream_of_stats(place: Place, name: str) -> None:
    # d lse keeps its mass; the entropy's gradient p (log p + H) is not small where p is.
    num_classes, dtype, rounding = wide(place, 2500)
    inputs = skewed_inputs(300, num_classes, 16, dtype)
    upstream = {"loss": 0.0, name: torch.linspace(-1, 1, 300, dtype=torch.float64)}
    case = Case(inputs, {"stats": (name,)}, upstream=upstream).at(place)
    golden = golden_outputs(case)
    options = {**place.options, "stats": (name, "tail_mass"), "filter": Filter(keep=0.5)}
    outputs = run_case(None, replace(case, options=options))
    if name == "entropy":
        for gradient in GRADIENTS:
            check_near(place, gradient, outputs[gradient], golden[gradient])
    total = golden["grad_weight"].sum(0)
    size = float(golden["grad_weight"].abs().sum(0).max())
    assert float((outputs["grad_weight"].sum(0) - total).abs().max()) < rounding * size


@pytest.mark.parametrize(**grid(frozen=("hidden", "weight")))
def test_filter_with_a_frozen_input(place: Place, frozen: str) -> None:
    num_classes, dtype, _ = wide(place, 2500)
    both = Case(bimodal_inputs(num_classes, dtype), {"filter": Filter(keep=0.3)}).at(place)
    one = replace(both, trainable=("weight",) if frozen == "hidden" else ("hidden",))
    expected, found = run_case(None, both), run_case(None, one)
    name = "grad_weight" if frozen == "hidden" else "grad_hidden"
    if place.backend == "triton":
        assert torch.equal(found[name], expected[name])
    else:
        check_close64(name, found[name], expected[name])


@pytest.mark.parametrize(**grid())
def test_filter_blocks_are_made_of_tokens_that_count(place: Place) -> None:
    # Ignored tokens are left out first: the blocks of 128 hold the others, in order.
    num_classes, dtype, _ = wide(place, 2500)
    inputs = bimodal_inputs(num_classes, dtype)
    hidden = torch.zeros(512, 16, dtype=dtype)
    targets = torch.full((512,), -100)
    hidden[::2], targets[::2] = inputs.hidden, inputs.targets
    options = {"filter": Filter(keep=0.3, tail=False), "stats": ("tail_mass",)}
    dense = run_case(None, Case(inputs, options).at(place))
    sparse = run_case(
        None, Case(replace(inputs, hidden=hidden, targets=targets), options).at(place)
    )
    check_near(place, "tail_mass", sparse["tail_mass"][::2], dense["tail_mass"])
    check_near(place, "grad_weight", sparse["grad_weight"], dense["grad_weight"])
    assert not sparse["tail_mass"][1::2].any() and not sparse["grad_hidden"][1::2].any()


# -- in_forward ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    **grid(filter={"drawn": Filter(keep=0.1), "undrawn": Filter(keep=0.1, draw=False)},
           dtype=("fp32", "bf16", "fp16"))
)  # fmt: skip
def test_in_forward_filters_where_logits_are_not_kept(
    place: Place, filter: Filter, dtype: str
) -> None:
    num_classes = 700 if place.interprets else 2500
    inputs = skewed_inputs(200, num_classes, 16, DTYPES[dtype])
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
