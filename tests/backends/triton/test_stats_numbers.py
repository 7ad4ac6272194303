"""Numbers of the Triton backend: what is bitwise the same, accumulation, overflow, NaN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, LossOutput, linear_cross_entropy
from cce_dist.testing import (
    DTYPES,
    TRITON_PLACES,
    Case,
    Place,
    gaussian_inputs,
    golden_outputs,
    grid,
    run_case,
    zipf_inputs,
)
from tests.backends.triton.triton_cases import WAYS, give_programs
from tests.support.loss_cases import generator


def bitwise_case(place: Place, dtype: str, way: dict[str, Any]) -> Case:
    inputs = zipf_inputs(300, 600, 24, generator=generator(), dtype=DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias").ignoring(generator(), 0.3)
    return Case(inputs, {**way, "stats": ("lse",)}).at(place)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=WAYS, dtype=("fp32", "fp16", "bf16")))
def test_triton_frozen_inputs_change_no_bit(place: Place, way: dict[str, Any], dtype: str) -> None:
    every = bitwise_case(place, dtype, way)
    full = run_case(None, every)
    for trainable in (("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ()):
        some = run_case(None, replace(every, trainable=trainable))
        expected = {"loss", "lse", *(f"grad_{name}" for name in trainable)}
        assert set(some) == expected
        for name in some:
            if trainable or way.get("gradient") != "in_forward":
                assert torch.equal(some[name], full[name]), (trainable, name)
            else:
                # Without gradients no chunk's logits are kept: another kernel, in another order.
                torch.testing.assert_close(some[name], full[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, dtype=("fp32", "fp16", "bf16")))
def test_triton_losses_without_gradients_change_no_bit(
    place: Place, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Splits of many tiles: a launch starts from what the token's sum is expected to become.
    give_programs(monkeypatch, 6)
    inputs = zipf_inputs(300, 9000, 24, generator=generator(), dtype=DTYPES[dtype])
    case = Case(inputs, {**WAYS["filtered"], "stats": ("lse",)}).at(place)
    full, none = run_case(None, case), run_case(None, replace(case, trainable=()))
    for name in none:
        assert torch.equal(none[name], full[name]), name

    from cce_dist import token_logprobs

    # A policy's, and those that it trains on.
    hidden, weight = inputs.hidden.to(place.device), inputs.weight.to(place.device)
    targets = inputs.targets.to(place.device)
    for gradient in ("filtered", "exact"):
        old, new = (
            token_logprobs(
                hidden.clone().requires_grad_(trains), weight, targets, entropy=True,
                gradient=gradient, backend="triton",
            )
            for trains in (False, True)
        )  # fmt: skip
        assert new.logprobs.requires_grad
        assert torch.equal(old.logprobs, new.logprobs)
        assert torch.equal(old.entropy, new.entropy)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=WAYS, dtype=("fp32", "fp16", "bf16")))
def test_triton_memory_that_was_used_before(place: Place, way: dict[str, Any], dtype: str) -> None:
    # Buffers come from memory that an earlier call left; none of it may show.
    case = bitwise_case(place, dtype, way)
    other = replace(case, inputs=replace(case.inputs, targets=case.inputs.targets.roll(7)))
    first = run_case(None, case)
    run_case(None, other)
    second = run_case(None, case)
    for name in first:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=WAYS, dtype=("fp32", "fp16", "bf16")))
def test_triton_main_grad_accumulates_in_fp32(
    place: Place, way: dict[str, Any], dtype: str
) -> None:
    # Two microbatches, the second 2**-12 as heavy: 16 bits would lose it.
    if way == WAYS["filtered"]:
        way = {"filter": Filter(keep=1e-7)}
    case = bitwise_case(place, dtype, way)
    heavy = replace(case, main_grad=True)
    light = replace(heavy, upstream={"loss": 2.0**-12})
    one, two = (run_case(None, each)["grad_weight"].double() for each in (heavy, light))
    assert one.abs().max() > 0
    torch.testing.assert_close(two * 2**12, one, rtol=1e-5, atol=1e-7)

    from cce_dist import linear_cross_entropy

    inputs = case.inputs
    hidden, weight = inputs.hidden.to(place.device), inputs.weight.to(place.device, copy=True)
    targets, bias = inputs.targets.to(place.device), inputs.bias.to(place.device)
    weight.requires_grad_()
    # A row of padding each: not contiguous, as a slice of a larger buffer.
    buffer = torch.zeros(weight.shape[0], weight.shape[1] + 8, device=place.device)[:, :-8]
    for upstream in (1.0, 2.0**-12):
        loss = linear_cross_entropy(
            hidden, weight, targets, bias=bias, grad_weight_into=buffer, **place.options, **way
        )
        loss.backward(torch.tensor(upstream, device=place.device))
    assert weight.grad is None
    torch.testing.assert_close(buffer.cpu().double(), one + two, rtol=1e-5, atol=1e-7)


TINY_THEN_HUGE = {"rising": 1e4, "falling": -1e4}


@pytest.mark.parametrize(
    **grid(places=TRITON_PLACES, last=TINY_THEN_HUGE, way=tuple(WAYS), with_stats=(False, True))
)
def test_triton_sums_that_overflow_start_again(
    place: Place, last: float, way: str, with_stats: bool
) -> None:
    # Some tokens' logits are tiny in the first tile and huge later; the others' are ordinary.
    inputs = gaussian_inputs(200, 700, 16, generator=generator())
    hidden, weight = inputs.hidden.clone(), inputs.weight.clone()
    weight[:, 0] = 0
    weight[400:, 0] = 1
    hidden[:, 0] = 0
    hidden[5:9, 0] = last
    hidden[150, 0] = last
    options = {"filtered": {"filter": Filter(keep=1e-7)}}.get(way, {"gradient": way})
    stats = ("lse", "entropy", "sum_p2", "correct", "logit_moments") if with_stats else ("lse",)
    inputs = replace(inputs, hidden=hidden, weight=weight)
    case = Case(inputs, {**options, "reduction": "sum", "stats": stats}).at(place)
    outputs, golden = run_case(None, case), golden_outputs(case)
    for name in ("lse", "loss"):
        torch.testing.assert_close(outputs[name].double(), golden[name], rtol=1e-6, atol=1e-5)
    rows = torch.ones(200, dtype=torch.bool)
    rows[5:9], rows[150] = False, False
    found = outputs["grad_hidden"].double()
    # Logits of 1e4 are rounded to 1e-3: so are the probabilities.
    torch.testing.assert_close(found[rows], golden["grad_hidden"][rows], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[~rows], golden["grad_hidden"][~rows], rtol=0, atol=5e-3)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=WAYS, dtype=("fp16", "fp32")))
def test_triton_an_upstream_of_nan_stays_with_its_token(
    place: Place, way: dict[str, Any], dtype: str
) -> None:
    from cce_dist import linear_cross_entropy

    if way.get("gradient") == "in_forward":
        pytest.skip("one scalar for all tokens")
    inputs = bitwise_case(place, dtype, way).inputs
    found = {}
    for bad in (1.0, float("nan")):
        hidden = inputs.hidden.to(place.device, copy=True).requires_grad_()
        weight, targets = inputs.weight.to(place.device), inputs.targets.to(place.device)
        loss = linear_cross_entropy(
            hidden, weight, targets, reduction="none", **place.options, **way
        )
        upstream = torch.ones_like(loss)
        upstream.view(-1)[7] = bad
        loss.backward(upstream)
        assert hidden.grad is not None
        found[bad == bad] = hidden.grad.reshape(-1, hidden.shape[-1]).cpu()
    others = torch.arange(len(found[True])) != 7
    assert bool(found[False][7].isnan().all())
    torch.testing.assert_close(found[False][others], found[True][others])


@pytest.mark.parametrize(
    **grid(
        places=TRITON_PLACES,
        stats=(("entropy",), ("sum_p2",), ("logit_moments",), ("entropy", "sum_p2")),
        height=(43.0, 45.0, 84.0, 86.0, 88.0, 90.0),
    )
)
def test_products_overflow_before_exponentials(
    place: Place, stats: tuple[str, ...], height: float
) -> None:
    """One logit lies so far above the first reference that sums of exponentials, or of products
    with them alone, overflow."""
    hidden, weight = torch.zeros(2, 16), 0.1 * torch.randn(300, 16, generator=generator())
    hidden[:, 0] = height
    weight[0, 0], weight[5, 0], weight[7, 0] = 0.0, 1.0, 0.0
    targets = torch.tensor([7, 7], device=place.device)
    tensors = [x.to(place.device) for x in (hidden, weight)]
    call = {"stats": stats, "reduction": "none"}
    found = linear_cross_entropy(*tensors, targets, **call, **place.options)  # pyright: ignore
    wide = [x.double() for x in tensors]
    right = linear_cross_entropy(*wide, targets, **call, backend="torch", gradient="exact")  # pyright: ignore
    assert isinstance(found, LossOutput) and isinstance(right, LossOutput)
    for value, expected in zip(found, right, strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)


NEARLY: dict[str, dict[str, Any]] = {
    **WAYS,
    "logits kept": {"gradient": "exact", "keep_logits": True},
    "one pass": {"gradient": "in_forward", "filter": Filter(keep=0)},
    "invariant": {"gradient": "exact", "invariant": True},
    "statistics": {"stats": ("lse", "entropy", "sum_p2", "logit_moments")},
}


# Interpreted, a dtype has one number of columns.
@pytest.mark.parametrize(
    ("place", "dtype", "way", "num_columns"),
    [
        pytest.param(place, dtype, way, num_columns, id=f"{place}-{dtype}-{way}-{num_columns}")
        for place in TRITON_PLACES
        for dtype in ("fp16", "bf16", "fp32")
        for way in NEARLY
        for num_columns in (17, 2000)
        if not place.interprets or (dtype == "fp16") == (num_columns == 17)
    ],
)
def test_sums_that_nearly_overflow(
    place: Place, dtype: str, way: str, num_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One logit lies 80 to 96 above all others, in a tile that no launch has seen before. Within
    2^128 a sum is finite, but its inverse is below the hardware's least exponential."""
    options = dict(NEARLY[way])
    if dtype not in place.dtypes or (way == "invariant" and dtype == "fp16"):
        pytest.skip(f"{dtype} is refused there")
    give_programs(monkeypatch, 2)
    weight = 0.1 * torch.randn(num_columns, 16, generator=generator())
    weight[:, :2] = 0
    weight[-5, 0], weight[-5, 1] = 1, 1
    hidden = torch.zeros(256, 16)
    # To an eighth, which 16 bits hold as the sum of two numbers.
    height = 80 + torch.arange(256) / 16
    hidden[:, 0], hidden[:, 1] = height.floor(), height - height.floor()
    targets = torch.randint(num_columns - 5, (256,), generator=generator())
    tensors = [x.to(place.device, DTYPES[dtype]) for x in (hidden, weight)]
    leaves = [x.requires_grad_() for x in tensors]
    wide = [x.detach().double().requires_grad_() for x in tensors]
    stats = options.pop("stats", ())
    results = []
    for inputs, of_call in (
        (leaves, {**options, **place.options}),
        (wide, {"backend": "torch", "gradient": "exact"}),
    ):
        found = linear_cross_entropy(*inputs, targets.to(place.device), stats=stats, **of_call)  # pyright: ignore
        loss = found.loss if isinstance(found, LossOutput) else found
        values = [x for x in found if isinstance(x, torch.Tensor)] if stats else [loss]
        total = loss + (found.lse.mean() if stats else 0)  # pyright: ignore
        results.append((values, torch.autograd.grad(total, inputs)))
    for value, expected in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(value.double(), expected.double(), rtol=1e-5, atol=2e-5)
    for grad, expected in zip(results[0][1], results[1][1], strict=True):
        error = (grad.double() - expected).norm() / expected.norm()
        assert error < (2e-5 if dtype == "fp32" else 1e-2)
