"""logits="screened": 8-bit logits, exact where they count; closer to golden than dense 16-bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from cce_dist import Filter, QuantizedWeight, Screen, linear_cross_entropy, quantize_weight
from cce_dist.partials import Head, Tokens
from cce_dist.testing import (
    CPU_PLACES,
    DTYPES,
    PLACES,
    TRITON_PLACES,
    Case,
    Inputs,
    Place,
    check_outputs,
    check_promise,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    join_ranks,
    run_case,
    shared_pool,
    zipf_inputs,
)
from cce_dist.vocab_shard import VocabShard

pytest.importorskip("triton")

# Half the dense mass of a token's d_logits is kept by none: what is dropped is what is screened.
KEEP = Filter(keep=0.05)
# A small vocabulary keeps many of its columns.
WIDE = Screen(max_kept=1.0)
SCREENED = {
    "logits": "screened",
    "filter": KEEP,
    "screen": WIDE,
    "stats": ("lse", "screened", "tail_mass"),
}
IN_16_BITS = ("bf16", "fp16")
Bounds = tuple[tuple[int, int], ...]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dtype_of(place: Place) -> torch.dtype:
    return torch.float16 if place.interprets else torch.bfloat16


def check_screened(case: Case, outputs: dict[str, Tensor], *, screened: bool = True) -> None:
    """The promise of 16 bits for the loss and lse, which `check_outputs` holds to fp32's."""
    golden, dense = golden_outputs(case), dense_outputs(case)
    check_promise("lse", outputs["lse"], golden["lse"], dense["lse"], torch.float32)
    if golden["loss"].ndim:
        check_promise("loss", outputs["loss"], golden["loss"], dense["loss"], torch.float32)
    else:
        # Dense's own error, a single number, may be 0 by luck: that of a token, then.
        of_a_token = float((dense["token_loss"].double() - golden["token_loss"]).abs().max())
        assert abs(float(outputs["loss"].double() - golden["loss"])) <= of_a_token
    counts = outputs["lse"] != 0
    assert bool((outputs["screened"][counts] == screened).all())


def error_of(outputs: dict[str, Tensor], golden: dict[str, Tensor], name: str = "lse") -> float:
    difference = outputs[name].double() - golden[name]
    return float(difference.square().mean().sqrt())


# -- the loss -----------------------------------------------------------------------------------

EIGHT_BITS = ("int8", "e4m3")


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
    inputs = zipf_inputs(300, 3000, 40, generator=generator(), dtype=torch.float16)
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


@pytest.mark.interpreter
@pytest.mark.parametrize("bits", EIGHT_BITS)
@pytest.mark.parametrize("capped", [False, True], ids=["linear", "softcap"])
def test_kernels_and_torch_screen_alike(
    monkeypatch: pytest.MonkeyPatch, capped: bool, bits: str
) -> None:
    """Where both must keep the same columns: five hold two thirds of the mass, others next to
    nothing each. A block of tokens, whose order is then no matter. What is known of the tail's
    error is left out: kernels know that by their bounds of masses (the next test)."""
    monkeypatch.setattr("cce_dist.local_triton.correct_tail", lambda *_: lambda: None)
    nothing = lambda eight, *_: torch.zeros_like(eight.variance)  # noqa: E731
    for name in ("tail_error", "selection_error"):
        monkeypatch.setattr(f"cce_dist.local_torch_screen.EightBit.{name}", nothing)
    inputs = gaussian_inputs(100, 1500, 40, generator=generator(), dtype=torch.float16)
    bias = torch.where(torch.arange(1500) < 5, 6.5, 0).half()
    inputs = replace(inputs, targets=inputs.targets % 5, bias=bias)
    options = {**SCREENED, "filter": Filter(keep=7.0, draw=False), "screen": WIDE}
    if capped:
        options |= {"softcap": 15.0, "logit_scale": 0.8}
    options["screen"] = Screen(dtype=bits, max_kept=1.0, max_error=1.0)  # type: ignore
    case = Case(inputs, options, upstream={"loss": 1024.0})
    torch_, kernels = (run_case(None, case.at(place)) for place in CPU_PLACES)
    assert bool(torch_["screened"].all() & kernels["screened"].all())
    for name in ("loss", "lse", "tail_mass"):
        torch.testing.assert_close(torch_[name], kernels[name], atol=5e-6, rtol=1e-6, msg=name)
    # What 8 bits are off by themselves is far more.
    assert error_of(torch_, golden_outputs(case)) > 5e-5


IGNORED = torch.arange(0, 450, 4)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("bits", "softcap", "per_group", "every"),
    [("int8", None, 1, 1), ("e4m3", 4.0, 2, 3), ("e4m3", None, 1, 1)],
)
def test_kernels_correct_tails_as_torch_does(
    monkeypatch: pytest.MonkeyPatch,
    softcap: float | None,
    per_group: int,
    every: int,
    bits: Literal["int8", "e4m3"],
) -> None:
    """By the same masses; also of two blocks that are one group, the last with no token that
    counts, and by every third run of columns."""
    from cce_dist import local_triton
    from cce_dist.eight_bits import MOST_LOST
    from cce_dist.local_torch_screen import EightBit
    from cce_dist.local_triton_selection import selection_error
    from cce_dist.torch_tiles import TileSize

    corrected, samples = [], 16 if softcap is None else 64

    def correct(run: Any, made: Any, rounding: Any, full: Tensor, threshold: float) -> Any:
        before = made.unkept.clone(), made.dropped.clone()
        wait = correct_tail(run, made, rounding, full, threshold)
        wait()
        head = replace(run.head, quantized=rounding.rows)
        eight = EightBit.of(run.tokens, head, Screen(dtype=bits))
        mass = run.parts["mass"].float().clamp_min(0)
        mass[int(run.shape[0]) :] = 0
        share = mass.view(len(mass) // per_group, per_group, -1).sum(1)
        share[:, torch.arange(share.shape[1]) // 16 % every != 0] = 0
        of_blocks = (share / share.sum(1, keepdim=True)).repeat_interleave(per_group, 0)
        expected = eight.tail_error(of_blocks, TileSize(128, 500))
        count = int(run.count)
        assert float(expected[:count].abs().max()) > 5e-4
        slope = (before[1] - before[0]).exp()[:count]
        off = expected[:count] * slope
        if bits == "e4m3":
            counting = EightBit.of(run.tokens.slice(0, count), head, Screen(dtype=bits))
            near = near_columns(run.parts["mass"], threshold, count)
            assert bool((near.sum(1) > samples).any())
            assert softcap is None or bool((near.sum(1) < samples).any())
            lost = counting.selection_error(near, made.lse[:count])
            of_kernels, launch = selection_error(run, made, full, threshold)
            launch()
            size = float(lost.square().mean().sqrt())
            torch.testing.assert_close(of_kernels[:count], lost, atol=0.01 * size, rtol=0.01)
            tail = (before[0][:count] - off - made.lse[:count]).exp()
            off -= (lost / tail).clamp(-MOST_LOST, MOST_LOST).log1p()
        for old, new in zip(before, (made.unkept, made.dropped), strict=True):
            found = (old - new)[:count]
            torch.testing.assert_close(found, off, atol=3e-6, rtol=2e-3)
        corrected.append(float(slope.mean()))
        return wait

    correct_tail = local_triton.correct_tail
    monkeypatch.setattr("cce_dist.local_triton.correct_tail", correct)
    for module in ("local_triton_selection", "local_torch_screen"):
        monkeypatch.setattr(f"cce_dist.{module}.NEAR_COLUMNS", samples)
    monkeypatch.setattr("cce_dist.local_triton_tail_error.MOST_GROUPS", 4 // per_group)
    monkeypatch.setattr("cce_dist.local_triton_tail_error.every_for_centre", lambda _: every)
    inputs = zipf_inputs(450, 2000, 72, generator=generator(), dtype=torch.float16)
    inputs = replace(inputs, targets=inputs.targets.clone().index_fill_(0, IGNORED, -100))
    screen = Screen(dtype=bits, max_kept=1.0, max_error=1.0)
    options = {**SCREENED, "screen": screen, "softcap": softcap, "logit_scale": 1.2}
    outputs = run_case(None, Case(inputs, options).at(CPU_PLACES[1]))
    assert bool(outputs["screened"][inputs.targets >= 0].all())
    assert len(corrected) == 1 and (corrected[0] == 1) == (softcap is None)


def near_columns(mass: Tensor, threshold: float, count: int) -> Tensor:
    """By the kernels' masses of blocks with tokens that count."""
    from cce_dist.eight_bits import NEAR_NATS

    tokens = (count - 128 * torch.arange(-(-count // 128))).clamp_max(128)
    least = (threshold * tokens / 128)[:, None]
    mass, reach = mass[: len(tokens)].float().abs(), math.exp(NEAR_NATS)
    return (mass * reach >= least) & (mass < least * reach)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_the_choice_of_columns_costs_a_tail_is_known(seed: int) -> None:
    """Beside a tail that is chosen by exact masses, in the mean over tokens: some of a block are
    alike, so that a column's error is that of several, and of its mass."""
    from cce_dist.eight_bits import NEAR_NATS
    from cce_dist.local_torch_screen import EightBit

    made, num_columns, dim, keep = generator(seed), 20000, 32, 0.02
    hidden = torch.randn(4, dim, generator=made).repeat_interleave(64, 0)
    hidden = (hidden + 0.3 * torch.randn(256, dim, generator=made)).bfloat16()
    weight = (2 * dim**-0.5 * torch.randn(num_columns, dim, generator=made)).bfloat16()
    head = Head(weight, None, None, num_columns, None, 1.0)
    tokens = Tokens(hidden, None, torch.zeros(256, dtype=torch.int64))
    eight = EightBit.of(tokens, head, Screen(dtype="e4m3"))
    eight_bits = eight.tiles(0, num_columns)(0, 256)[0].double()
    lse = eight_bits.logsumexp(1, keepdim=True)
    exact = (hidden.double() @ weight.double().T - lse).exp()
    rounded = (eight_bits - lse).exp()
    masses = [x.view(2, 128, -1).sum(1) for x in (exact, rounded)]
    off = [
        ((rounded - exact) * (mass < keep).repeat_interleave(128, 0)).sum(1).mean()
        for mass in masses
    ]
    reach = math.exp(NEAR_NATS)
    near = (masses[1] * reach >= keep) & (masses[1] < keep * reach)
    found = eight.selection_error(near, lse[:, 0].float()).mean()
    lost = off[0] - off[1]
    assert float(lost) > 1e-4
    assert abs(float(found - lost)) < 0.25 * float(lost)


@pytest.mark.parametrize("bits", EIGHT_BITS)
def test_error_of_a_tail_is_known(bits: Literal["int8", "e4m3"]) -> None:
    """log sum_v s_v exp(z8_v - z_v) of a tail's shares s. Channels of both sides differ by up to
    some hundred times, where e4m3's errors are several times those of lengths alone."""
    from cce_dist.local_torch_screen import EightBit
    from cce_dist.torch_tiles import TileSize

    made, num_columns, dim, scale = generator(3), 6000, 64, 1.3
    size = torch.randn(dim, generator=made).exp()
    size *= 2 / size.pow(4).sum().pow(0.25)
    hidden = (torch.randn(256, dim, generator=made) * size).bfloat16()
    frequency = torch.rand(num_columns, generator=made) ** 4
    weight = torch.randn(num_columns, dim, generator=made) * size
    # What many have in common, but not the mean of all.
    weight = (weight + frequency[:, None] * torch.randn(dim, generator=made) * size).bfloat16()
    head = Head(weight, None, None, num_columns, None, scale)
    tokens = Tokens(hidden, None, torch.zeros(256, dtype=torch.int64))
    eight = EightBit.of(tokens, head, Screen(dtype=bits))
    share = (frequency / frequency.sum()).expand(2, -1)
    found = eight.tail_error(share, TileSize(128, 700)).double()

    eight_bits = eight.tiles(0, num_columns)(0, 256)[0].double()
    off = eight_bits - scale * hidden.double() @ weight.double().T
    expected = (share[:1].double() * off.exp()).sum(1).log()
    # Half the variance by lengths alone, a part of `off` by now, is off by this.
    second = (expected - (share[:1] * off).sum(1)).mean() - 0.5 * float(eight.variance.mean())
    if bits == "e4m3":
        assert float(second) > 0.5 * float(eight.variance.mean()) > 1e-3
    error = expected - found
    assert float(error.square().mean()) < 0.1 * float(expected.square().mean())
    assert abs(float(error.mean())) < 0.1 * float(eight.variance.mean())


@pytest.mark.parametrize("bits", EIGHT_BITS)
def test_what_a_tails_columns_share_is_no_error(
    monkeypatch: pytest.MonkeyPatch, bits: Literal["int8", "e4m3"]
) -> None:
    """Columns of frequencies as words have them."""
    from cce_dist.local_torch_screen import EightBit

    made, num_columns, dim = generator(3), 6000, 64
    common = torch.nn.functional.normalize(torch.randn(dim, generator=made), dim=0)
    hidden = torch.randn(1024, dim, generator=made) * 0.2 + 4 * common
    frequency = -(torch.arange(num_columns) + 10).log()
    weight = torch.randn(num_columns, dim, generator=made) * 0.2
    weight += (frequency - frequency.mean())[:, None] * common / 4
    targets = torch.randint(0, 50, (1024,), generator=made)
    inputs = Inputs(hidden.bfloat16(), weight.bfloat16(), targets)
    screen = Screen(dtype=bits, max_kept=1.0, max_error=1.0)
    case = Case(inputs, {**SCREENED, "filter": Filter(keep=0.5), "screen": screen})
    golden, found = golden_outputs(case), run_case(None, case.at(CPU_PLACES[0]))
    assert float(found["tail_mass"].mean()) > 0.1
    nothing = lambda eight, *_: torch.zeros_like(eight.variance)  # noqa: E731
    monkeypatch.setattr(EightBit, "tail_error", nothing)
    plain = run_case(None, case.at(CPU_PLACES[0]))
    assert error_of(found, golden) < error_of(plain, golden) / 2
    assert abs(float((found["lse"].double() - golden["lse"]).mean())) < 1e-4


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
    inputs = zipf_inputs(150, 1500, 40, generator=generator(), dtype=dtype_of(place))
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
    inputs = zipf_inputs(260, 900, 24, generator=generator(), dtype=torch.float16)
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
    inputs = zipf_inputs(300, 900, 24, generator=generator(), dtype=torch.float16)
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
    plain = zipf_inputs(300, 1500, 96, generator=generator(), dtype=torch.float16)
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


# -- the 8-bit copy of the weight ---------------------------------------------------------------


def rows_in_8_bits(rows: Tensor, bits: str) -> Tensor:
    """What the nearest numbers in a row's own scale stand for, by torch."""
    largest, dtype = (127, torch.int8) if bits == "int8" else (448, torch.float8_e4m3fn)
    step = rows.abs().amax(1, keepdim=True) / largest
    values = rows / step
    values = values.round() if bits == "int8" else values.to(dtype).float()
    return values * (rows.square().sum(1, keepdim=True) / (rows * values).sum(1, keepdim=True))


# The kernel interpreted takes 512 rows twice, above 2304 dims once, and goes on to the next.
ROWS = {
    "whole": (700, 24),
    "two_slices": (33, 300),
    "one_number": (1, 1),
    "several_groups": (2500, 24),
    "even_groups": (2048, 256),
    "groups_of_long_rows": (1100, 2400),
}


@pytest.mark.parametrize(**grid(places=CPU_PLACES, bits=EIGHT_BITS, shape=ROWS))
def test_quantize_weight_rounds_to_the_nearest(
    place: Place, bits: str, shape: tuple[int, int]
) -> None:
    weight = torch.randn(shape, generator=generator()).half()
    hidden = 3 + torch.randn(50, shape[1], generator=generator(1)).half()
    made = quantize_weight(weight, hidden, screen=Screen(dtype=bits), **place.options).rows  # type: ignore
    torch.testing.assert_close(made.centre, weight.float().mean(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(made.hidden_centre, hidden.float().mean(0), atol=1e-5, rtol=1e-5)
    assert bool((torch.log2(made.channel) % 1 == 0).all())
    rows = made.channel * (weight.float() - made.centre)
    values = made.values[:, : shape[1]].float()
    assert not made.values[:, shape[1] :].float().any()
    if shape[0] > 1:
        expected = rows_in_8_bits(rows, bits)
        # The last digit of a scale decides how a number in the middle of two rounds.
        off = (values * made.of_rows[0, :, None] - expected).abs() > 1e-2 * expected.abs()
        assert float(off.float().mean()) < 1e-3
    torch.testing.assert_close(
        made.of_rows[1], weight.float() @ made.hidden_centre, atol=1e-3, rtol=1e-4
    )


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, bits=EIGHT_BITS, dim=(40, 2304, 4096)))
def test_quantized_rows_are_those_of_torch(place: Place, bits: str, dim: int) -> None:
    # On 132 multiprocessors 15,840 programs begin, most of which go on to a second row.
    num_rows = 30_001 if place.compiles else 1500
    weight = torch.randn(num_rows, dim, generator=generator()).to(dtype_of(place)).to(place.device)
    hidden = 3 + torch.randn(50, dim, generator=generator(1)).to(weight.dtype).to(place.device)
    screen = Screen(dtype=bits)  # type: ignore
    made = quantize_weight(weight, hidden, screen=screen, **place.options).rows
    expected = quantize_weight(weight, hidden, screen=screen, backend="torch").rows
    # A step's last digit decides how a number in the middle of two rounds.
    off = made.values.float() != expected.values.float()
    assert float(off.float().mean()) < 1e-3
    torch.testing.assert_close(made.of_rows, expected.of_rows, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(made.mean, expected.mean, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_quantized_weight_saves_a_step(place: Place) -> None:
    inputs = zipf_inputs(150, 900, 40, generator=generator(), dtype=torch.float16)
    weight = inputs.weight.clone().requires_grad_()
    kept = quantize_weight(weight, inputs.hidden, screen=WIDE, **place.options)
    assert isinstance(kept, QuantizedWeight)
    assert 900 * 40 < kept.num_bytes < 900 * 70
    options: dict[str, Any] = {**SCREENED, **place.options}

    def lse(given: QuantizedWeight | None) -> Tensor:
        found: Any = linear_cross_entropy(
            inputs.hidden, weight, inputs.targets, quantized_weight=given, **options
        )
        return found.lse.detach()

    torch.testing.assert_close(lse(kept), lse(None), atol=1e-3, rtol=0)
    # A step of the optimiser.
    with torch.no_grad():
        weight.mul_(1.5)
    with pytest.raises(ValueError, match=r"earlier values of weight.*refresh"):
        lse(kept)
    address = kept.rows.values.data_ptr()
    kept.refresh(weight)
    assert kept.rows.values.data_ptr() == address
    torch.testing.assert_close(lse(kept), lse(None), atol=2e-3, rtol=0)
    kept.refresh(weight, inputs.hidden)
    torch.testing.assert_close(lse(kept), lse(None), atol=1e-3, rtol=0)


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_quantized_weight_of_a_padded_shard(place: Place) -> None:
    inputs = zipf_inputs(40, 700, 24, generator=generator(), dtype=torch.float16)
    padded = torch.cat([inputs.weight, torch.full((68, 24), math.nan).half()])
    shard = VocabShard(0, 768, 700)
    options: dict[str, Any] = {**SCREENED, **place.options, "vocab_shard": shard}
    how: dict[str, Any] = {"screen": WIDE, **place.options}
    kept = quantize_weight(padded, inputs.hidden, vocab_shard=shard, **how)
    found: Any = linear_cross_entropy(
        inputs.hidden, padded, inputs.targets, quantized_weight=kept, **options
    )
    golden = golden_outputs(Case(inputs, {"stats": ("lse",)}))["lse"]
    torch.testing.assert_close(found.lse.double(), golden, atol=2e-3, rtol=0)
    whole = quantize_weight(inputs.weight, **how)
    with pytest.raises(ValueError, match=r"700 rows.*has 600"):
        short = replace(inputs, weight=inputs.weight[:600], targets=inputs.targets % 600)
        linear_cross_entropy(
            short.hidden,
            short.weight,
            short.targets,
            quantized_weight=whole,
            **{**options, "vocab_shard": None},
        )


# -- refusals -----------------------------------------------------------------------------------


def call(**options: Any) -> None:
    inputs = zipf_inputs(9, 50, 8, generator=generator(), dtype=options.pop("dtype", torch.float16))
    given = {"logits": "screened", "filter": KEEP, "backend": "triton", **options}
    linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, **given)


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "exact": ({"gradient": "exact", "filter": Filter()}, r"keeps every column.*filtered"),
    "keep": ({"filter": Filter(keep=0)}, r"filter=Filter\(keep=0.*keeps every column.*above 0"),
    "eps": ({"filter": Filter(eps=0)}, r"filter=Filter\(.*eps=0.*keeps every column.*above 0"),
    "every_column": (
        {"softcap": 30.0, "label_smoothing": 0.1},
        r"softcap=30.0 with label_smoothing=0.1 gives every column.*gradient=\"exact\"",
    ),
    "fp32": ({"dtype": torch.float32}, r"hidden is torch.float32, whose digits"),
    "fp32_torch": (
        {"dtype": torch.float32, "backend": "torch"},
        r"cannot run here: hidden is torch.float32, whose digits",
    ),
    "entropy": ({"stats": ("lse", "entropy")}, r"stats=\('entropy',\) would be those of 8-bit"),
    "no_effect": ({"logits": "full", "screen": Screen(max_kept=0.5)}, r"has no effect"),
    "no_screen": ({"screen": "int8"}, r"screen must be a cce_dist.Screen, got 'int8'"),
    "no_copy": ({"quantized_weight": torch.ones(3)}, r"what quantize_weight returns"),
}


@pytest.mark.interpreter
@pytest.mark.parametrize(("options", "pattern"), REFUSALS.values(), ids=REFUSALS)
def test_screened_refuses(options: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        call(**options)


BAD_SCREENS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": ({"dtype": "fp8"}, r"Screen.dtype must be one of .*'e4m3', got 'fp8'"),
    "kept": ({"max_kept": 1.5}, r"Screen.max_kept must be a share in \[0, 1\], got 1.5"),
    "error": ({"max_error": -1.0}, r"Screen.max_error must be >= 0, got -1.0"),
}


@pytest.mark.parametrize(("given", "pattern"), BAD_SCREENS.values(), ids=BAD_SCREENS)
def test_screen_refuses(given: dict[str, Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        Screen(**given)


WEIGHTS: dict[str, tuple[Callable[[], Any], str]] = {
    "vector": (lambda: quantize_weight(torch.ones(3).half()), r"weight must have shape .*\[3\]"),
    "fp32": (lambda: quantize_weight(torch.ones(3, 4)), r"weight is torch.float32, whose digits"),
    "triton": (
        lambda: quantize_weight(torch.ones(3, 4).bfloat16(), backend="triton"),
        r"weight cannot be quantised here: Triton's interpreter has no bf16",
    ),
    "backend": (
        lambda: quantize_weight(torch.ones(3, 4).half(), backend="cuda"),  # type: ignore
        r"backend must be one of 'auto', 'triton', 'torch', got 'cuda'",
    ),
    "hidden": (
        lambda: quantize_weight(torch.ones(3, 4).half(), torch.ones(2, 5).half()),
        r"hidden must have shape \[..., D\] with D=4",
    ),
    "hidden_list": (
        lambda: quantize_weight(torch.ones(3, 4).half(), [[1.0] * 4]),  # type: ignore
        r"hidden must be a torch.Tensor, got .*list",
    ),
    "hidden_scalar": (
        lambda: quantize_weight(torch.ones(3, 4).half(), torch.tensor(1.0)),
        r"hidden must have shape \[..., D\] with D=4.*got \[\]",
    ),
    "hidden_int": (
        lambda: quantize_weight(torch.ones(3, 4).half(), torch.ones(2, 4, dtype=torch.int64)),
        r"hidden must be a floating-point tensor, got torch.int64",
    ),
    "sparse": (
        lambda: quantize_weight(torch.ones(3, 4).half().to_sparse()),
        r"weight must be a dense tensor",
    ),
    "meta": (lambda: quantize_weight(torch.ones(3, 4).half().to("meta")), r"weight .*values.*meta"),
    "shard": (
        lambda: quantize_weight(torch.ones(3, 4).half(), vocab_shard=(0, 3)),  # type: ignore
        r"vocab_shard must be a cce_dist.VocabShard",
    ),
    "shard_rows": (
        lambda: quantize_weight(torch.ones(3, 4).half(), vocab_shard=VocabShard(0, 2, 2)),
        r"weight must have vocab_shard's 2 rows \[0, 2\), got 3",
    ),
    "screen_name": (
        lambda: quantize_weight(torch.ones(3, 4).half(), screen="int8"),  # type: ignore
        r"screen must be a cce_dist.Screen, got 'int8'",
    ),
    "refresh_of_none": (
        lambda: quantize_weight(torch.ones(3, 4).half()).refresh(None),  # type: ignore
        r"weight must have shape \[V_local, D\], got .*NoneType",
    ),
    "refresh_of_a_row": (
        lambda: quantize_weight(torch.ones(3, 4).half()).refresh(torch.ones(4).half()),
        r"weight must have shape \[V_local, D\], got \[4\]",
    ),
    "other": (
        lambda: quantize_weight(torch.ones(3, 4).half()).refresh(torch.ones(3, 5).half()),
        r"\[3, 4\] \(without padding\) of torch.float16, got \[3, 5\]",
    ),
    "screen": (
        lambda: call(
            screen=Screen(dtype="e4m3"), quantized_weight=quantize_weight(torch.ones(50, 8).half())
        ),
        r"quantized_weight was made for screen=Screen\(dtype='auto'",
    ),
    "another_tensor": (
        lambda: call(quantized_weight=quantize_weight(torch.ones(50, 8).half())),
        r"quantized_weight is of another tensor",
    ),
    "full": (
        lambda: call(
            logits="full", quantized_weight=quantize_weight(torch.ones(50, 8).half())
        ),
        r'quantized_weight has no effect with logits="full"',
    ),
}  # fmt: skip


@pytest.mark.interpreter
def test_a_weight_in_the_memory_of_a_freed_one_is_another() -> None:
    memory = np.ones((50, 8), np.float16)
    first = torch.from_numpy(memory)
    kept = quantize_weight(first)
    hidden, targets = torch.ones(4, 8).half(), torch.zeros(4, dtype=torch.int64)
    how: dict[str, Any] = {"logits": "screened", "quantized_weight": kept}
    expected = linear_cross_entropy(hidden, first, targets, **how)
    # Whatever of the same memory the caller passes.
    assert torch.equal(linear_cross_entropy(hidden, first.detach()[:], targets, **how), expected)
    del first
    second = torch.from_numpy(memory)
    with pytest.raises(ValueError, match="quantized_weight is of another tensor"):
        linear_cross_entropy(hidden, second, targets, **how)
    kept.refresh(second)
    assert torch.equal(linear_cross_entropy(hidden, second, targets, **how), expected)


@pytest.mark.interpreter
@pytest.mark.parametrize(("wrong", "pattern"), WEIGHTS.values(), ids=WEIGHTS)
def test_quantize_weight_refuses(wrong: Callable[[], Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        wrong()
