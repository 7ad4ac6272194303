"""linear_cross_entropy where peers fail: infinities, saturation, nothing to do, odd targets."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, LinearCrossEntropy, linear_cross_entropy
from cce_dist.testing import (
    Case,
    Inputs,
    check_close64,
    check_gate,
    check_outputs,
    check_promise,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    large_logit_inputs,
    run_case,
    zipf_inputs,
)

MODES = ("filtered", "exact", "in_forward")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL_WORKSPACE = 2**16


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


# -- infinities and large logits ----------------------------------------------------------------

MASKED = {
    "first_tile": (slice(0, 2048), 4500),
    "middle_tile": (slice(2048, 4096), 4500),
    "last_ragged_tile": (slice(4096, 4500), 4500),
    "part_of_a_tile": (slice(100, 1000), 4500),
    "every_second_column": (slice(0, None, 2), 301),
    "all_but_one": (slice(1, None), 301),
}


@pytest.mark.parametrize("workspace_bytes", [SMALL_WORKSPACE, 2**26], ids=["chunks", "one_chunk"])
@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("masked", MASKED)
def test_linear_cross_entropy_minus_inf_bias(
    masked: str, gradient: str, workspace_bytes: int
) -> None:
    where, num_classes = MASKED[masked]
    inputs = gaussian_inputs(130, num_classes, 24, generator=generator())
    bias = 0.1 * torch.randn(num_classes, generator=generator())
    bias[where] = -torch.inf
    allowed = bias.isfinite().nonzero()[:, 0]
    inputs = replace(inputs, bias=bias, targets=allowed[inputs.targets % len(allowed)])
    options = {"gradient": gradient, "workspace_bytes": workspace_bytes, "z_loss": 0.1}
    case = Case(inputs, {**options, "stats": ("lse", "entropy", "correct")})
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


@pytest.mark.parametrize("softcap", [None, 30.0], ids=["plain", "softcap"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_large_logits(
    gradient: str, dtype: str, softcap: float | None
) -> None:
    inputs = large_logit_inputs(129, 2500, 24, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {"gradient": gradient, "softcap": softcap, "stats": ("lse",)})
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_all_logits_far_below_zero(gradient: str) -> None:
    # A running maximum that starts at 0 gives log(0) here.
    inputs = gaussian_inputs(33, 2100, 24, generator=generator())
    inputs = replace(inputs, bias=torch.full((2100,), -5000.0))
    case = Case(inputs, {"gradient": gradient, "stats": ("lse", "entropy")})
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("softcap", [0.5, 1.0, 5.0], ids=str)
@pytest.mark.parametrize("num_classes", [1, 300, 2049], ids=str)
def test_linear_cross_entropy_softcap_of_a_ragged_vocabulary(
    num_classes: int, softcap: float, gradient: str
) -> None:
    # Padding columns of a tile would add exp(-softcap) each.
    inputs = gaussian_inputs(20, num_classes, 24, generator=generator(), dtype=torch.float64)
    inputs = replace(inputs, bias=torch.full((num_classes,), -4.0, dtype=torch.float64))
    options = {"gradient": gradient, "softcap": softcap, "stats": ("lse", "logit_moments")}
    case = Case(inputs, options)
    outputs = run_case(None, case)
    if num_classes == 1:
        check_outputs(case, outputs, but=("loss",))
        assert abs(float(outputs["loss"])) < 1e-14
        return
    check_outputs(case, outputs)


def confident_inputs(dtype: torch.dtype, num_classes: int = 5000) -> Inputs:
    """Every token has p(target) ~ 1 - 1e-5: the cross-entropy's own gradient nearly vanishes."""
    inputs = gaussian_inputs(130, num_classes, 64, generator=generator(), dtype=torch.float64)
    weight = inputs.weight.to(dtype)
    rows = weight[inputs.targets].double()
    hidden = 22 * rows / rows.square().sum(-1, keepdim=True)
    return Inputs(hidden.to(dtype), weight, inputs.targets)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient": "exact"}, id="exact"),
        pytest.param({"gradient": "in_forward"}, id="in_forward"),
        pytest.param({"gradient": "filtered"}, id="filtered"),
        pytest.param({"filter": Filter(keep=2**-6)}, id="keep"),
        pytest.param({"filter": Filter(eps=2**-12, tail=False)}, id="eps_without_tail"),
    ],
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_linear_cross_entropy_z_loss_of_confident_tokens(
    dtype: str, options: dict[str, Any]
) -> None:
    # Apple's filter looks at p - onehot, about 0 here, and drops the gradient of z_loss.
    inputs = confident_inputs(DTYPES[dtype])
    case = Case(inputs, {**options, "z_loss": 0.1})
    golden = golden_outputs(case)
    without = golden_outputs(replace(case, options={}))
    for name in ("grad_hidden", "grad_weight"):
        assert without[name].norm() < 0.01 * golden[name].norm()
        found = run_case(None, case)[name].double()
        relative = float((found - golden[name]).norm() / golden[name].norm())
        assert relative < 0.01, f"{name}: relative error {relative}"


# -- weighted tokens and the size of the upstream gradient ---------------------------------------


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("weight", [1e4, 1e-4], ids=str)
def test_linear_cross_entropy_weighted_token_keeps_its_accuracy(
    weight: float, gradient: str
) -> None:
    # The filter must look at p alone: a token's gradient scales with its weight, error and all.
    inputs = zipf_inputs(256, 5000, 64, generator=generator())
    plain = {"gradient": gradient, "reduction": "sum"}
    if gradient == "filtered":
        plain["filter"] = Filter(keep=0.05)
    token_weight = torch.ones(256)
    token_weight[::7] = weight
    unit = run_case(None, Case(replace(inputs, token_weight=torch.ones(256)), plain))
    heavy = run_case(None, Case(replace(inputs, token_weight=token_weight), plain))
    expected = token_weight[:, None] * unit["grad_hidden"]
    scale = expected.norm(dim=-1, keepdim=True).expand_as(expected)
    error = ((heavy["grad_hidden"] - expected) / scale).abs().max()
    assert float(error) < 1e-5


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("upstream", [1e-20, 1e20], ids=["tiny", "huge"])
@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_size_of_upstream(gradient: str, upstream: float, dtype: str) -> None:
    inputs = gaussian_inputs(129, 500, 24, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {"gradient": gradient}, upstream={"loss": upstream})
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_loss_scaling_in_fp16(gradient: str) -> None:
    # p / N is subnormal in fp16 unless the upstream gradient, a loss scaler's, comes first.
    inputs = gaussian_inputs(129, 2500, 24, generator=generator(), dtype=torch.float16)
    case = Case(inputs, {"gradient": gradient}, upstream={"loss": 2.0**13})
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize("maker", [gaussian_inputs, large_logit_inputs], ids=["gaussian", "large"])
@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_zero_upstream(gradient: str, maker: Any) -> None:
    inputs = maker(20, 300, 24, generator=generator(), dtype=torch.bfloat16)
    case = Case(inputs, {"gradient": gradient}, upstream={"loss": 0.0})
    outputs = run_case(None, case)
    assert not outputs["grad_hidden"].any() and not outputs["grad_weight"].any()


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_zero_token_weights(gradient: str) -> None:
    inputs = gaussian_inputs(20, 300, 24, generator=generator())
    token_weight = torch.zeros(20)
    token_weight[3] = 2.0
    case = Case(replace(inputs, token_weight=token_weight), {"gradient": gradient})
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    rest = torch.arange(20) != 3
    assert not outputs["grad_hidden"][rest].any() and bool(outputs["grad_hidden"][3].any())


# -- nothing to do ------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("tensors", [(), ("bias", "token_weight", "class_weight")], ids=["", "all"])
@pytest.mark.parametrize("tokens", [0, 9, (2, 6)], ids=["no_tokens", "ignored", "ignored_2d"])
def test_linear_cross_entropy_without_targets(
    tokens: Any, tensors: tuple[str, ...], gradient: str, reduction: str
) -> None:
    if gradient == "in_forward" and reduction == "none":
        pytest.skip("refused: test_loss_errors")
    inputs = gaussian_inputs(tokens, 300, 24, generator=generator())
    inputs = inputs.with_options(generator(), *tensors)
    inputs = replace(inputs, targets=torch.full_like(inputs.targets, -100))
    stats = ("lse", "entropy", "correct", "tail_mass", "logit_moments")
    options = {"gradient": gradient, "reduction": reduction, "stats": stats}
    options |= {"z_loss": 0.1, "label_smoothing": 0.1}
    case = Case(inputs, options)
    outputs = run_case(None, case)
    expected = inputs.targets.shape if reduction == "none" else ()
    assert outputs["loss"].shape == expected and not outputs["loss"].any()
    leaves = ("hidden", "weight", "bias") if tensors else ("hidden", "weight")
    for name in leaves:
        assert outputs[f"grad_{name}"].shape == getattr(inputs, name).shape
        assert not outputs[f"grad_{name}"].any(), name
    for name in ("lse", "entropy", "correct", "tail_mass", "max_logit", "variance_logit"):
        assert outputs[name].shape == inputs.targets.shape and not outputs[name].any(), name


def test_linear_cross_entropy_zero_class_weights() -> None:
    # The mean's denominator is 0 although no token is ignored.
    inputs = gaussian_inputs(9, 30, 8, generator=generator())
    case = Case(replace(inputs, class_weight=torch.zeros(30)))
    outputs = run_case(None, case)
    assert float(outputs["loss"]) == 0 and not outputs["grad_hidden"].any()


def test_linear_cross_entropy_stats_are_zero_at_ignored_tokens() -> None:
    inputs = gaussian_inputs((3, 20), 300, 24, generator=generator())
    inputs = inputs.ignoring(generator(), 0.4)
    stats = ("lse", "entropy", "correct", "tail_mass", "logit_moments")
    outputs = run_case(None, Case(inputs, {"stats": stats, "reduction": "none", "shift": 2}))
    ignored = inputs.targets[:, 2:] == -100
    assert bool(ignored.any())
    for name in ("loss", "lse", "entropy", "max_logit", "mean_logit", "variance_logit"):
        assert outputs[name].shape == (3, 18)
        assert not outputs[name][ignored].any() and bool(outputs[name][~ignored].all()), name
    assert not outputs["correct"][ignored].any() and not outputs["tail_mass"][ignored].any()


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
def test_linear_cross_entropy_target_out_of_range(
    bad: int, options: dict[str, Any], gradient: str
) -> None:
    inputs = gaussian_inputs(9, 300, 8, generator=generator())
    targets = inputs.targets.clone()
    targets[4] = bad
    options = {"gradient": gradient, **options}
    with pytest.raises(ValueError, match=rf"targets must lie in .*{bad}"):
        linear_cross_entropy(inputs.hidden, inputs.weight, targets, **options)


def test_linear_cross_entropy_bad_target_that_the_shift_leaves_out() -> None:
    # The first `shift` targets of a row are never predicted, so they may hold anything.
    inputs = gaussian_inputs((2, 8), 300, 8, generator=generator())
    targets = inputs.targets.clone()
    targets[:, 0] = 10**6
    found = linear_cross_entropy(inputs.hidden, inputs.weight, targets, shift=1)
    assert torch.equal(
        found, linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, shift=1)
    )


def test_linear_cross_entropy_hidden_without_a_target_gets_zero() -> None:
    inputs = gaussian_inputs((2, 8), 300, 8, generator=generator())
    outputs = run_case(None, Case(inputs, {"shift": 3}))
    assert not outputs["grad_hidden"][:, 5:].any() and bool(outputs["grad_hidden"][:, :5].any())


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_ignored_hidden_may_be_anything(gradient: str) -> None:
    # Rows of padding tokens are left out, not multiplied by 0.
    inputs = gaussian_inputs(20, 300, 24, generator=generator()).ignoring(generator(), 0.4)
    ignored = inputs.targets == -100
    hidden = inputs.hidden.masked_fill(ignored[:, None], torch.nan)
    clean = run_case(None, Case(inputs, {"gradient": gradient}))
    outputs = run_case(None, Case(replace(inputs, hidden=hidden), {"gradient": gradient}))
    for name in clean:
        assert torch.equal(outputs[name], clean[name]), name


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_nan_hidden_is_not_hidden(gradient: str) -> None:
    inputs = gaussian_inputs(20, 300, 24, generator=generator())
    hidden = inputs.hidden.clone()
    hidden[3, 5] = torch.nan
    outputs = run_case(None, Case(replace(inputs, hidden=hidden), {"gradient": gradient}))
    assert math.isnan(float(outputs["loss"])) and bool(outputs["grad_hidden"][3].isnan().all())


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize(
    "target", [0, 2047, 2048, 4095, 4096, 4499], ids=lambda target: f"target_{target}"
)
def test_linear_cross_entropy_targets_on_tile_edges(target: int, gradient: str) -> None:
    inputs = gaussian_inputs(130, 4500, 16, generator=generator(), dtype=torch.float64)
    inputs = replace(inputs, targets=torch.full((130,), target))
    case = Case(inputs, {"gradient": gradient, "stats": ("correct",)})
    check_outputs(case, run_case(None, case))


# -- statistics ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tied", "target", "expected"),
    [
        pytest.param((3, 7), 3, True, id="same_tile_first"),
        pytest.param((3, 7), 7, False, id="same_tile_second"),
        pytest.param((5, 3000), 5, True, id="two_tiles_first"),
        pytest.param((5, 3000), 3000, False, id="two_tiles_second"),
        pytest.param((4000, 4001), 9, False, id="neither"),
        pytest.param((4400,), 4400, True, id="alone"),
    ],
)
def test_correct_breaks_ties_by_the_lowest_id(
    tied: tuple[int, ...], target: int, expected: bool
) -> None:
    hidden = torch.ones(3, 4)
    weight = torch.zeros(4500, 4)
    weight[list(tied)] = 1.0
    result = linear_cross_entropy(hidden, weight, torch.full((3,), target), stats=("correct",))
    assert result.correct.tolist() == [expected] * 3


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("offset", [0.0, 1000.0], ids=["centred", "far_from_zero"])
def test_logit_moments_are_stable(offset: float, dtype: str) -> None:
    # E[z^2] - E[z]^2 in fp32 loses every digit of a variance of 1 around a mean of 1000.
    inputs = gaussian_inputs(33, 4500, 24, generator=generator(), dtype=DTYPES[dtype])
    inputs = replace(inputs, bias=torch.full((4500,), offset, dtype=DTYPES[dtype]))
    case = Case(inputs, {"stats": ("logit_moments",)}, backward=False)
    outputs, golden = run_case(None, case), golden_outputs(case)
    torch.testing.assert_close(
        outputs["variance_logit"].double(), golden["variance_logit"], rtol=1e-3, atol=0
    )
    torch.testing.assert_close(
        outputs["mean_logit"].double(), golden["mean_logit"], rtol=1e-6, atol=1e-6
    )
    check_outputs(case, outputs)


def test_entropy_of_known_distributions() -> None:
    hidden = torch.zeros(2, 4)
    weight = torch.randn(4500, 4, generator=generator())
    targets = torch.tensor([1, 2])
    uniform = linear_cross_entropy(hidden, weight, targets, stats=("entropy", "lse"))
    torch.testing.assert_close(uniform.entropy, torch.full((2,), math.log(4500)))
    torch.testing.assert_close(uniform.lse, torch.full((2,), math.log(4500)))
    bias = torch.zeros(4500)
    bias[7] = 100.0
    single = linear_cross_entropy(hidden, weight, targets, bias=bias, stats=("entropy",))
    assert float(single.entropy.abs().max()) < 1e-4 and float(single.entropy.min()) >= 0


@pytest.mark.parametrize("gradient", ["filtered", "exact"])
@pytest.mark.parametrize("names", [("lse",), ("entropy",), ("lse", "entropy")], ids="_".join)
@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "softcap"])
def test_stats_are_differentiable_without_the_loss(
    softcap: float | None, names: tuple[str, ...], gradient: str
) -> None:
    inputs = gaussian_inputs((3, 43), 4500, 16, generator=generator(), dtype=torch.float64)
    inputs = inputs.ignoring(generator(), 0.3)
    ramp = torch.linspace(-1, 1, 129, dtype=torch.float64).reshape(3, 43)
    case = Case(
        inputs,
        {"gradient": gradient, "stats": names, "softcap": softcap},
        upstream={"loss": 0.0, **dict.fromkeys(names, ramp)},
    )
    check_outputs(case, run_case(None, case))
    hidden = inputs.hidden.clone().requires_grad_()
    result = linear_cross_entropy(
        hidden, inputs.weight, inputs.targets, gradient=gradient, stats=names, softcap=softcap
    )
    torch.autograd.backward([getattr(result, name) for name in names], [ramp] * len(names))
    check_close64("grad_hidden", hidden.grad, golden_outputs(case)["grad_hidden"])


@pytest.mark.parametrize("name", ["correct", "tail_mass", "logit_moments"])
def test_other_stats_are_not_differentiable(name: str) -> None:
    inputs = gaussian_inputs(9, 30, 8, generator=generator())
    weight = inputs.weight.clone().requires_grad_()
    result = linear_cross_entropy(inputs.hidden, weight, inputs.targets, stats=(name,))
    value = getattr(result, name)
    for tensor in value if name == "logit_moments" else (value,):
        assert not tensor.requires_grad
    assert result.loss.requires_grad


@pytest.mark.parametrize("name", ["lse", "entropy"])
def test_stats_refuse_a_backward_in_forward(name: str) -> None:
    inputs = gaussian_inputs(9, 30, 8, generator=generator())
    weight = inputs.weight.clone().requires_grad_()
    function = LinearCrossEntropy(gradient="in_forward", stats=("lse", "entropy"))
    result = function(inputs.hidden, weight, inputs.targets)
    with pytest.raises(RuntimeError, match=name):
        (result.loss + getattr(result, name).sum()).backward()
    result = function(inputs.hidden, weight, inputs.targets)
    result.loss.backward()
    assert weight.grad is not None


@pytest.mark.parametrize("smoothing", [0.3, 1.0], ids=str)
@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_label_smoothing_with_everything(
    gradient: str, smoothing: float
) -> None:
    # torch's own smoothing, class weights included, is the definition.
    inputs = gaussian_inputs(129, 2500, 24, generator=generator(), dtype=torch.float64)
    inputs = inputs.with_options(generator(), "bias", "class_weight")
    inputs = inputs.ignoring(generator(), 0.3)
    case = Case(inputs, {"gradient": gradient, "label_smoothing": smoothing})
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    expected = torch.nn.functional.cross_entropy(
        torch.nn.functional.linear(inputs.hidden, inputs.weight, inputs.bias),
        inputs.targets,
        weight=inputs.class_weight.double(),
        label_smoothing=smoothing,
    )
    check_close64("loss", outputs["loss"], expected)


def test_linear_cross_entropy_float16_does_not_overflow() -> None:
    # Logits of 3e5 are no fp16 numbers; they never have to be.
    inputs = large_logit_inputs(
        33, 300, 16, generator=generator(), dtype=torch.float16, largest=3e5
    )
    assert bool(inputs.hidden.isfinite().all())
    case = Case(inputs, {"stats": ("lse",)})
    outputs, golden = run_case(None, case), golden_outputs(case)
    dense32 = dense_outputs(case, torch.float32)
    check_gate("lse", outputs["lse"], golden["lse"], dense32["lse"])
    for name in ("grad_hidden", "grad_weight"):
        rounded = dense32[name] * (1 + 2**-10)
        check_promise(name, outputs[name], golden[name], rounded, torch.float16)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_nll_of_confident_tokens(gradient: str, dtype: str) -> None:
    # nll = lse - target logit is 1e-5 of either: both must carry the same rounding.
    inputs = confident_inputs(DTYPES[dtype])
    reduction = "sum" if gradient == "in_forward" else "none"
    case = Case(inputs, {"gradient": gradient, "reduction": reduction}, backward=False)
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("rows", [21, 300, 2100], ids=lambda rows: f"{rows}_rows")
def test_linear_cross_entropy_padded_rows(rows: int, gradient: str) -> None:
    # 20 classes: rows beyond them hold NaN, never enter, and get a gradient of exactly 0.
    inputs = gaussian_inputs(130, rows, 16, generator=generator(), dtype=torch.float64)
    inputs = inputs.with_options(generator(), "bias")
    weight, bias = inputs.weight.clone(), inputs.bias.clone()
    weight[20:], bias[20:] = torch.nan, torch.nan
    inputs = replace(inputs, weight=weight, bias=bias, targets=inputs.targets % 20)
    options = {"gradient": gradient, "label_smoothing": 0.1, "stats": ("lse", "logit_moments")}
    for main_grad in (False, True):
        case = Case(inputs, options, bounds=((0, rows),), vocab_size=20, main_grad=main_grad)
        outputs = run_case(None, case)
        check_outputs(case, outputs)
        assert not outputs["grad_weight"][20:].any() and not outputs["grad_bias"][20:].any()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_light_tokens_beside_heavy_ones(gradient: str, dtype: str) -> None:
    # One scale for all d_logits would push p of the light tokens below fp16's smallest number.
    inputs = gaussian_inputs(130, 2500, 24, generator=generator(), dtype=DTYPES[dtype])
    token_weight = torch.ones(130)
    token_weight[::7] = 5000.0
    inputs = replace(inputs, token_weight=token_weight)
    case = Case(inputs, {"gradient": gradient, "reduction": "sum"})
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
