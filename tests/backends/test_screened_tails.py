"""Tails of screened logits: kernels as torch, errors that are known and corrected."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, Screen
from cce_dist.core.types import Head, Tokens
from cce_dist.testing import (
    CPU_PLACES,
    Case,
    Inputs,
    gaussian_inputs,
    golden_outputs,
    run_case,
    zipf_inputs,
)
from tests.backends.screened_cases import EIGHT_BITS, SCREENED, WIDE, error_of
from tests.support.loss_cases import generator


@pytest.mark.interpreter
@pytest.mark.parametrize("bits", EIGHT_BITS)
@pytest.mark.parametrize("capped", [False, True], ids=["linear", "softcap"])
def test_kernels_and_torch_screen_alike(
    monkeypatch: pytest.MonkeyPatch, capped: bool, bits: str
) -> None:
    """Where both must keep the same columns: five hold two thirds of the mass, others next to
    nothing each. A block of tokens, whose order is then no matter. What is known of the tail's
    error is left out: kernels know that by their bounds of masses (the next test)."""
    monkeypatch.setattr("cce_dist.backends.triton.stats.correct_tail", lambda *_: lambda: None)
    nothing = lambda eight, *_: torch.zeros_like(eight.variance)  # noqa: E731
    for name in ("tail_error", "selection_error"):
        monkeypatch.setattr(f"cce_dist.backends.torch.screened.EightBit.{name}", nothing)
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


@pytest.mark.usefixtures("unextended")
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
    from cce_dist.backends.eight_bits import MOST_LOST_SHARE
    from cce_dist.backends.torch.screened import EightBit
    from cce_dist.backends.torch.tiles import TileSize
    from cce_dist.backends.triton import stats as triton_stats
    from cce_dist.backends.triton.screened.selection_error import selection_error

    corrected, samples = [], 16 if softcap is None else 64

    def correct(state: Any, made: Any, extension: Any, full: Tensor, threshold: float) -> Any:
        before = made.unkept.clone(), made.dropped.clone()
        wait = correct_tail(state, made, extension, full, threshold)
        wait()
        head = replace(state.head, quantized=extension.rows)
        eight = EightBit.of(state.tokens, head, Screen(dtype=bits))
        mass = state.buffers.mass.float().clamp_min(0)
        mass[int(state.shape[0]) :] = 0
        share = mass.view(len(mass) // per_group, per_group, -1).sum(1)
        share[:, torch.arange(share.shape[1]) // 16 % every != 0] = 0
        of_blocks = (share / share.sum(1, keepdim=True)).repeat_interleave(per_group, 0)
        expected = eight.tail_error(of_blocks, TileSize(128, 500))
        count = int(state.count)
        assert float(expected[:count].abs().max()) > 5e-4
        slope = (before[1] - before[0]).exp()[:count]
        off = expected[:count] * slope
        if bits == "e4m3":
            counting = EightBit.of(state.tokens.slice(0, count), head, Screen(dtype=bits))
            near_threshold = near_columns(state.buffers.mass, threshold, count)
            assert bool((near_threshold.sum(1) > samples).any())
            assert softcap is None or bool((near_threshold.sum(1) < samples).any())
            lost_mass = counting.selection_error(near_threshold, made.lse[:count])
            of_kernels, launch = selection_error(state, made, full, threshold)
            launch()
            size = float(lost_mass.square().mean().sqrt())
            torch.testing.assert_close(of_kernels[:count], lost_mass, atol=0.01 * size, rtol=0.01)
            tail = (before[0][:count] - off - made.lse[:count]).exp()
            off -= (lost_mass / tail).clamp(-MOST_LOST_SHARE, MOST_LOST_SHARE).log1p()
        for old, new in zip(before, (made.unkept, made.dropped), strict=True):
            found = (old - new)[:count]
            torch.testing.assert_close(found, off, atol=3e-6, rtol=2e-3)
        corrected.append(float(slope.mean()))
        return wait

    correct_tail = triton_stats.correct_tail
    monkeypatch.setattr("cce_dist.backends.triton.stats.correct_tail", correct)
    for module in ("triton.screened.selection_error", "torch.screened"):
        monkeypatch.setattr(f"cce_dist.backends.{module}.NEAR_THRESHOLD_COLUMNS", samples)
    tail_error = "cce_dist.backends.triton.screened.tail_error"
    monkeypatch.setattr(f"{tail_error}.MOST_GROUPS", 4 // per_group)
    monkeypatch.setattr(f"{tail_error}.every_for_centre", lambda _: every)
    inputs = zipf_inputs(450, 2000, 72, generator=generator(), dtype=torch.float16)
    inputs = replace(inputs, targets=inputs.targets.clone().index_fill_(0, IGNORED, -100))
    screen = Screen(dtype=bits, max_kept=1.0, max_error=1.0)
    options = {**SCREENED, "screen": screen, "softcap": softcap, "logit_scale": 1.2}
    outputs = run_case(None, Case(inputs, options).at(CPU_PLACES[1]))
    assert bool(outputs["screened"][inputs.targets >= 0].all())
    assert len(corrected) == 1 and (corrected[0] == 1) == (softcap is None)


def near_columns(mass: Tensor, threshold: float, count: int) -> Tensor:
    """By the kernels' masses of blocks with tokens that count."""
    from cce_dist.backends.eight_bits import NEAR_THRESHOLD_NATS

    tokens = (count - 128 * torch.arange(-(-count // 128))).clamp_max(128)
    least = (threshold * tokens / 128)[:, None]
    mass, reach = mass[: len(tokens)].float().abs(), math.exp(NEAR_THRESHOLD_NATS)
    return (mass * reach >= least) & (mass < least * reach)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_the_choice_of_columns_costs_a_tail_is_known(seed: int) -> None:
    """Beside a tail that is chosen by exact masses, in the mean over tokens: some of a block are
    alike, so that a column's error is that of several, and of its mass."""
    from cce_dist.backends.eight_bits import NEAR_THRESHOLD_NATS
    from cce_dist.backends.torch.screened import EightBit

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
    reach = math.exp(NEAR_THRESHOLD_NATS)
    near_threshold = (masses[1] * reach >= keep) & (masses[1] < keep * reach)
    found = eight.selection_error(near_threshold, lse[:, 0].float()).mean()
    lost_mass = off[0] - off[1]
    assert float(lost_mass) > 1e-4
    assert abs(float(found - lost_mass)) < 0.25 * float(lost_mass)


@pytest.mark.parametrize("bits", EIGHT_BITS)
def test_error_of_a_tail_is_known(bits: Literal["int8", "e4m3"]) -> None:
    """log sum_v s_v exp(z8_v - z_v) of a tail's shares s. Channels of both sides differ by up to
    some hundred times, where e4m3's errors are several times those of lengths alone."""
    from cce_dist.backends.torch.screened import EightBit
    from cce_dist.backends.torch.tiles import TileSize

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
    from cce_dist.backends.torch.screened import EightBit

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
