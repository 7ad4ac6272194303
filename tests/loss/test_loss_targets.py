"""linear_cross_entropy of targets that are ignored, out of range, impossible or at edges."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, linear_cross_entropy
from cce_dist.testing import (
    CPU_PLACES,
    Case,
    Place,
    check_outputs,
    gaussian_inputs,
    grid,
    run_case,
    zipf_inputs,
)
from tests.support.loss_cases import MODES, classes, generator

# -- nothing to do ------------------------------------------------------------------------------


@pytest.mark.parametrize(**grid(keep=(0.01, 1.0), gradient=("filtered",)))
def test_linear_cross_entropy_all_ignored_with_a_filter(
    place: Place, keep: float, gradient: str
) -> None:
    # No block of tokens is computed: what the filter would have recorded of them is nowhere.
    inputs = gaussian_inputs(260, 300, 24, generator=generator()).with_options(generator(), "bias")
    inputs = replace(inputs, targets=torch.full_like(inputs.targets, -100))
    case = Case(inputs, {"filter": Filter(keep=keep), "stats": ("lse", "tail_mass")}).at(place)
    for name, output in run_case(None, case).items():
        assert not output.any(), name


@pytest.mark.parametrize(**grid())
def test_linear_cross_entropy_zero_class_weights(place: Place) -> None:
    # The mean's denominator is 0 although no token is ignored.
    inputs = gaussian_inputs(9, 30, 8, generator=generator())
    case = Case(replace(inputs, class_weight=torch.zeros(30))).at(place)
    outputs = run_case(None, case)
    assert float(outputs["loss"]) == 0 and not outputs["grad_hidden"].any()


@pytest.mark.parametrize(**grid())
def test_linear_cross_entropy_stats_are_zero_at_ignored_tokens(place: Place) -> None:
    inputs = gaussian_inputs((3, 20), 300, 24, generator=generator())
    inputs = inputs.ignoring(generator(), 0.4)
    stats = ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2")
    options = {"stats": stats, "reduction": "none", "shift": 2}
    outputs = run_case(None, Case(inputs, options).at(place))
    ignored = inputs.targets[:, 2:] == -100
    assert bool(ignored.any())
    for name in ("loss", "lse", "entropy", "max_logit", "mean_logit", "variance_logit"):
        assert outputs[name].shape == (3, 18)
        assert not outputs[name][ignored].any() and bool(outputs[name][~ignored].all()), name
    assert not outputs["correct"][ignored].any() and not outputs["tail_mass"][ignored].any()


LEFT_OUT = {"exact": {"gradient": "exact"}, "filtered": {"filter": Filter(keep=0.1)}}


@pytest.mark.parametrize(**grid(fraction=(0.0, 0.5, 0.9), options=LEFT_OUT))
def test_linear_cross_entropy_ignored_tokens_are_as_good_as_absent(
    place: Place, fraction: float, options: dict[str, Any]
) -> None:
    num_classes = classes(place, 2500)
    inputs = zipf_inputs(500, num_classes, 16, generator=generator(), dtype=torch.float32)
    inputs = inputs.with_options(generator(), "bias", "token_weight")
    inputs = inputs.ignoring(generator(), fraction)
    counts = inputs.targets != -100
    rest = replace(
        inputs,
        hidden=inputs.hidden[counts],
        targets=inputs.targets[counts],
        token_weight=inputs.token_weight[counts],
    )
    stats = ("lse", "entropy", "tail_mass")
    found, expected = (
        run_case(None, Case(given, {**options, "stats": stats}).at(place))
        for given in (inputs, rest)
    )
    for name, wanted in expected.items():
        ours = found[name]
        if ours.ndim and len(ours) == 500:
            assert not ours[~counts].any(), name
            ours = ours[counts]
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: n + m)


# -- targets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize(
    ("bad", "options"),
    [
        pytest.param(300, {}, id="vocab_size"),
        pytest.param(10**12, {}, id="far_beyond"),
        pytest.param(-1, {}, id="minus_1"),
        pytest.param(-100, {"ignore_index": -1}, id="the_default_ignore_index"),
        pytest.param(300, {"reduction": "none", "gradient": "exact"}, id="none"),
    ],
)
@pytest.mark.parametrize("place", CPU_PLACES, ids=str)
def test_linear_cross_entropy_target_out_of_range(
    place: Place, bad: int, options: dict[str, Any], gradient: str
) -> None:
    # On a GPU the kernel asserts, and the context is lost.
    inputs = gaussian_inputs(9, 300, 8, generator=generator())
    targets = inputs.targets.clone()
    targets[4] = bad
    options = {"gradient": gradient, **options, **place.options}
    with pytest.raises(ValueError, match=rf"targets must lie in .*{bad}"):
        linear_cross_entropy(inputs.hidden, inputs.weight, targets, **options)


@pytest.mark.parametrize(**grid())
def test_linear_cross_entropy_bad_target_that_the_shift_leaves_out(place: Place) -> None:
    # The first `shift` targets of a row are never predicted, so they may hold anything.
    inputs = gaussian_inputs((2, 8), 300, 8, generator=generator())
    targets = inputs.targets.clone()
    targets[:, 0] = 10**6
    good = Case(inputs, {"shift": 1}, backward=False).at(place)
    bad = replace(good, inputs=replace(inputs, targets=targets))
    assert torch.equal(run_case(None, bad)["loss"], run_case(None, good)["loss"])


@pytest.mark.parametrize(**grid())
def test_linear_cross_entropy_hidden_without_a_target_gets_zero(place: Place) -> None:
    inputs = gaussian_inputs((2, 8), 300, 8, generator=generator())
    outputs = run_case(None, Case(inputs, {"shift": 3}).at(place))
    assert not outputs["grad_hidden"][:, 5:].any() and bool(outputs["grad_hidden"][:, :5].any())


@pytest.mark.parametrize(**grid(num_tokens=(20, 140), gradient=MODES))
def test_linear_cross_entropy_ignored_hidden_may_be_anything(
    place: Place, num_tokens: int, gradient: str
) -> None:
    # Rows of padding tokens are left out, not multiplied by 0.
    inputs = gaussian_inputs(num_tokens, 300, 24, generator=generator())
    inputs = inputs.ignoring(generator(), 0.4)
    ignored = inputs.targets == -100
    options = {"gradient": gradient, "stats": ("lse",), "label_smoothing": 0.1}
    if gradient == "filtered":
        options["filter"] = Filter(keep=0.1)
    clean = run_case(None, Case(inputs, options).at(place))
    for value in (torch.nan, torch.inf):
        hidden = inputs.hidden.masked_fill(ignored[:, None], value)
        outputs = run_case(None, Case(replace(inputs, hidden=hidden), options).at(place))
        for name in clean:
            assert torch.equal(outputs[name], clean[name]), name


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_nan_hidden_is_not_hidden(place: Place, gradient: str) -> None:
    inputs = gaussian_inputs(20, 300, 24, generator=generator())
    hidden = inputs.hidden.clone()
    hidden[3, 5] = torch.nan
    case = Case(replace(inputs, hidden=hidden), {"gradient": gradient}).at(place)
    outputs = run_case(None, case)
    assert math.isnan(float(outputs["loss"])) and bool(outputs["grad_hidden"][3].isnan().all())


@pytest.mark.parametrize(
    **grid(
        gradient=("filtered", "in_forward"),
        filter={"tail": Filter(keep=0.1), "no_tail": Filter(keep=0.1, tail=False)},
    )
)
def test_linear_cross_entropy_nan_hidden_makes_no_other_gradient_wrong(
    place: Place, gradient: str, filter: Filter
) -> None:
    """The tokens of a block choose its columns together. The others' gradients become NaN, or all
    of their columns are computed."""
    inputs = zipf_inputs(140, 600, 24, generator=generator())
    hidden = inputs.hidden.clone()
    hidden[3, 5] = torch.nan
    bad = replace(inputs, hidden=hidden)
    options = {"gradient": gradient, "filter": filter, "reduction": "sum"}
    of_exact = Case(inputs, {"gradient": "exact", "reduction": "sum"})
    cases = Case(bad, options), Case(inputs, options), of_exact
    found, clean, exact = (run_case(None, case.at(place))["grad_hidden"].cpu() for case in cases)
    is_nan = found.isnan().any(1)
    assert bool(is_nan[3]) and bool(found[is_nan].isnan().all()) and int(is_nan.sum()) <= 128
    off, usual = ((x - exact)[~is_nan].norm() for x in (found, clean))
    assert float(off) <= 2 * float(usual) + 1e-5 * float(exact.norm())


@pytest.mark.parametrize(
    **grid(target=(0, 127, 128, 255, 256, 2047, 2048, 4095, 4096, 4499), gradient=MODES)
)
def test_linear_cross_entropy_targets_on_tile_edges(
    place: Place, target: int, gradient: str
) -> None:
    num_classes = 4500
    if place.interprets and target > 256:
        pytest.skip("no edge of Triton's tiles that the smaller ones are not")
    if place.interprets:
        num_classes = 300
    inputs = gaussian_inputs(130, num_classes, 16, generator=generator(), dtype=place.widest)
    inputs = replace(inputs, targets=torch.full((130,), target))
    case = Case(inputs, {"gradient": gradient, "stats": ("correct",)}).at(place)
    check_outputs(case, run_case(None, case))
