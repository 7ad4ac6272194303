"""linear_cross_entropy where peers fail: infinities, saturation, nothing to do, odd targets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, LinearCrossEntropy, linear_cross_entropy
from cce_dist.testing import (
    CPU_PLACES,
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
    zipf_inputs,
)

MODES = ("filtered", "exact", "in_forward")
NARROW = ("fp32", "bf16", "fp16")
SMALL_WORKSPACE = 2**16


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def classes(place: Place, num_classes: int) -> int:
    """Fewer columns to interpret: Triton's tiles have 128 or 256, torch's 2048."""
    return max(num_classes // 8, min(num_classes, 301)) if place.interprets else num_classes


# -- infinities and large logits ----------------------------------------------------------------

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


@pytest.mark.parametrize(**grid(masked=tuple(MASKED), gradient=MODES, workspace=WORKSPACES))
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


# -- weighted tokens and the size of the upstream gradient ---------------------------------------


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


# -- nothing to do ------------------------------------------------------------------------------


def not_refused(row: dict[str, Any]) -> bool:
    return not (row["gradient"] == "in_forward" and row["reduction"] == "none")


@pytest.mark.parametrize(
    **grid(
        tokens={"no_tokens": 0, "ignored": 9, "ignored_2d": (2, 6), "ignored_blocks": 260},
        tensors={"": (), "all": ("bias", "token_weight", "class_weight")},
        gradient=MODES,
        reduction=("mean", "sum", "none"),
        allowed=not_refused,
    )
)
def test_linear_cross_entropy_without_targets(
    place: Place, tokens: Any, tensors: tuple[str, ...], gradient: str, reduction: str
) -> None:
    inputs = gaussian_inputs(tokens, 300, 24, generator=generator())
    inputs = inputs.with_options(generator(), *tensors)
    inputs = replace(inputs, targets=torch.full_like(inputs.targets, -100))
    stats = ("lse", "entropy", "correct", "tail_mass", "logit_moments")
    options = {"gradient": gradient, "reduction": reduction, "stats": stats}
    options |= {"z_loss": 0.1, "label_smoothing": 0.1}
    case = Case(inputs, options).at(place)
    outputs = run_case(None, case)
    expected = inputs.targets.shape if reduction == "none" else ()
    assert outputs["loss"].shape == expected and not outputs["loss"].any()
    leaves = ("hidden", "weight", "bias") if tensors else ("hidden", "weight")
    for name in leaves:
        assert outputs[f"grad_{name}"].shape == getattr(inputs, name).shape
        assert not outputs[f"grad_{name}"].any(), name
    for name in ("lse", "entropy", "correct", "tail_mass", "max_logit", "variance_logit"):
        assert outputs[name].shape == inputs.targets.shape and not outputs[name].any(), name


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
    stats = ("lse", "entropy", "correct", "tail_mass", "logit_moments")
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


# -- statistics ---------------------------------------------------------------------------------


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
    uniform = Case(inputs, {"stats": ("entropy", "lse")}, backward=False).at(place)
    outputs = run_case(None, uniform)
    for name in ("entropy", "lse"):
        torch.testing.assert_close(outputs[name], torch.full((2,), math.log(num_classes)))
    bias = torch.zeros(num_classes)
    bias[7] = 100.0
    single = run_case(None, replace(uniform, inputs=replace(inputs, bias=bias)))["entropy"]
    assert float(single.abs().max()) < 1e-4 and float(single.min()) >= 0


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


@pytest.mark.parametrize(**grid(name=("correct", "tail_mass", "logit_moments")))
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
