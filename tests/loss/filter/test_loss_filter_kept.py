"""What the filter keeps, exactly, on inputs whose masses are far from the threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, LossOutput, linear_cross_entropy
from cce_dist.testing import (
    TRITON_PLACES,
    Case,
    Inputs,
    Place,
    check_close64,
    check_outputs,
    golden_outputs,
    grid,
    run_case,
    zipf_inputs,
)
from tests.loss.filter.filter_cases import (
    BLOCK,
    GRADIENTS,
    HOT,
    bimodal_inputs,
    check_near,
    emulate,
    rms,
    skewed_inputs,
    wide,
)
from tests.support.loss_cases import generator

forward_state = pytest.importorskip("cce_dist.backends.triton.forward.state")


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


@pytest.mark.parametrize(**grid())
def test_filter_and_upstream_of_lse(place: Place) -> None:
    # d lse keeps its mass; the entropy's has test_loss_entropy.py.
    num_classes, dtype, rounding = wide(place, 2500)
    inputs = skewed_inputs(300, num_classes, 16, dtype)
    upstream = {"loss": 0.0, "lse": torch.linspace(-1, 1, 300, dtype=torch.float64)}
    case = Case(inputs, {"stats": ("lse",)}, upstream=upstream).at(place)
    golden = golden_outputs(case)
    options = {**place.options, "stats": ("lse", "tail_mass"), "filter": Filter(keep=0.5)}
    outputs = run_case(None, replace(case, options=options))
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


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, flat=(True, False)))
def test_a_flat_softmax_keeps_what_reaches_the_threshold(
    place: Place, flat: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the last launch a quarter of a flat softmax's sum is known: masses by it would be four
    times too large."""
    if place.interprets:
        # One program would make one split in one launch.
        monkeypatch.setattr(forward_state, "num_programs", lambda weight: 2)
    tokens, num_classes = (130, 8192) if place.interprets else (8192, 32768)
    scale = 0.01 if flat else 1.0
    made = generator()
    hidden, weight = (
        (scale * torch.randn(size, 16, generator=made)).half() for size in (tokens, num_classes)
    )
    targets = torch.randint(num_classes, (tokens,), generator=made)
    inputs = Inputs(hidden, weight, targets)
    # Half as large again as the mass of each column of a flat softmax in a whole block.
    keep = 1.5 * BLOCK / num_classes
    case = Case(inputs, {"stats": ("lse", "tail_mass"), "filter": Filter(keep=keep)}).at(place)
    outputs = run_case(None, case)
    golden = golden_outputs(case)
    torch.testing.assert_close(outputs["lse"].double(), golden["lse"], rtol=1e-5, atol=1e-5)
    # The first 16th of the columns is decided by bounds.
    kept = 1 - outputs["tail_mass"][:BLOCK].double().mean()
    masses = (hidden[:BLOCK].double() @ weight.double().T).softmax(-1).sum(0)
    reach = float((masses * (masses >= keep)).sum()) / BLOCK
    assert reach - 0.02 < kept < reach + 0.15


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, entropy=(False, True)))
def test_a_dropped_mass_that_is_subnormal(place: Place, entropy: bool) -> None:
    """1 over it is infinite in fp32."""
    hidden, weight = torch.zeros(130, 16), torch.zeros(300, 16)
    hidden[:, 0], weight[0, 0] = 100.0, 1.0
    hidden[:, 1], weight[:, 1] = 1.0, torch.linspace(0, 1, 300)
    leaves = [x.to(place.device).requires_grad_() for x in (hidden, weight)]
    targets = torch.zeros(130, dtype=torch.int64, device=place.device)
    options: dict[str, Any] = {"stats": ("entropy",), "filter": Filter(keep=1e-30)}
    output = linear_cross_entropy(*leaves, targets, **options, **place.options)
    assert isinstance(output, LossOutput) and output.entropy is not None
    loss = output.loss + output.entropy.sum() if entropy else output.loss
    for grad in torch.autograd.grad(loss, leaves):
        assert grad.isfinite().all()
