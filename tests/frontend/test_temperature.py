"""token_logprobs with a temperature of each token: values, gradients, ranks, what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import Filter, VocabShard, token_logprobs
from cce_dist.reference import linear_cross_entropy_reference
from cce_dist.testing import (
    DTYPES,
    TORCH_CPU,
    TRITON_PLACES,
    Inputs,
    Place,
    check_close64,
    check_gate,
    gaussian_inputs,
    grid,
    shared_pool,
    zipf_inputs,
)
from tests.support.grids import paired_grid
from tests.support.loss_cases import generator

TOKENS, CLASSES, DIM = 150, 600, 24
# Room for a few columns at a time: several chunks.
WORKSPACE = 2**16
LEAVES = ("hidden", "weight", "bias", "temperature")
# Hopper's own kernel runs for the first.
ASKS = ("nothing", "gradient", "entropy")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0, "logit_scale": 1.3},
    "negative": {"logit_scale": -0.7},
}


def temperatures(shape: tuple[int, ...]) -> Tensor:
    """From 0.25 to 4, so that tokens of a block differ by much."""
    return 4 ** (2 * torch.rand(shape, generator=generator(2), dtype=torch.float64) - 1)


def leaves_of(inputs: Inputs, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    wide = torch.promote_types(dtype, torch.float32)
    given = {
        "hidden": inputs.hidden.to(dtype),
        "weight": inputs.weight.to(dtype),
        "bias": inputs.bias if inputs.bias is None else inputs.bias.to(wide),
        # Of that dtype on both sides: its own rounding is not ours.
        "temperature": temperatures(tuple(inputs.targets.shape)).float().to(wide),
    }
    return {
        name: x.to(device, copy=True).requires_grad_() for name, x in given.items() if x is not None
    }


def objective(logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """Of both signs, and 0 for some; as large for every dtype."""
    ramp = torch.linspace(-2, 2, logprobs.numel(), dtype=torch.float64).round()
    total = (logprobs * ramp.view(logprobs.shape).to(logprobs)).sum()
    return total if entropy is None else total + 0.1 * entropy.sum()


def dense(
    inputs: Inputs, dtype: torch.dtype, entropy: bool, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Outputs, and gradients by name."""
    leaves = leaves_of(inputs, dtype)
    found = linear_cross_entropy_reference(
        targets=inputs.targets, reduction="none", **leaves, **options
    )
    total = objective(-found.loss, found.entropy if entropy else None)
    grads = torch.autograd.grad(total, [*leaves.values()])
    outputs = {"logprobs": -found.loss.detach(), "entropy": found.entropy.detach()}
    return outputs, dict(zip(leaves, grads, strict=True))


def ours(
    inputs: Inputs, dtype: torch.dtype, place: Place, asks: str, **options: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    leaves = leaves_of(inputs, dtype, place.device)
    leaves["temperature"].requires_grad_(asks == "gradient")
    found = token_logprobs(
        targets=inputs.targets.to(place.device),
        entropy=asks == "entropy",
        workspace_bytes=WORKSPACE,
        **leaves,
        **place.options,
        **options,
    )
    needing = {name: x for name, x in leaves.items() if x.requires_grad}
    grads = torch.autograd.grad(objective(found.logprobs, found.entropy), [*needing.values()])
    outputs = {"logprobs": found.logprobs.detach().cpu()}
    if found.entropy is not None:
        outputs["entropy"] = found.entropy.detach().cpu()
    return outputs, {name: x.cpu() for name, x in zip(needing, grads, strict=True)}


# -- one rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    **paired_grid(
        options=OPTIONS,
        asks=ASKS,
        gradient=("filtered", "exact"),
        dtype=("fp32", "fp16", "bf16", "float64"),
    )
)
def test_token_logprobs_temperature_of_each_token(
    place: Place, options: dict[str, Any], asks: str, gradient: Any, dtype: str
) -> None:
    inputs = gaussian_inputs(TOKENS, CLASSES, DIM, generator=generator(), dtype=DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias")
    outputs, grads = ours(inputs, DTYPES[dtype], place, asks, gradient=gradient, **options)
    entropy = asks == "entropy"
    golden, golden_grads = dense(inputs, torch.float64, entropy, **options)
    simple, simple_grads = dense(inputs, torch.float32, entropy, **options)
    for name, found in outputs.items():
        scale = golden["logprobs"].abs() + 40
        if dtype == "float64":
            check_close64(name, found, golden[name], scale=scale)
        else:
            check_gate(name, found, golden[name], simple[name], scale=scale)
    for name, found in grads.items():
        exact = golden_grads[name]
        if dtype == "float64":
            check_close64(name, found, exact)
            continue
        if dtype == "fp32":
            check_gate(name, found, exact, simple_grads[name])
        error, unit = float((found.double() - exact).norm()), float(exact.norm())
        assert error <= 8 * torch.finfo(DTYPES[dtype]).eps * unit, f"{name}: {error / unit:.2e}"


@pytest.mark.parametrize(
    **grid(
        softcap={"plain": None, "softcap": 20.0},
        draw={"drawn": True, "tail": False},
        asks=ASKS[:2],
        dtype=("fp32", "fp16", "bf16"),
    )
)
def test_token_logprobs_temperature_under_a_filter(
    place: Place, softcap: float | None, draw: bool, asks: str, dtype: str
) -> None:
    # What a block keeps are columns that matter at its tokens' own temperatures.
    inputs = zipf_inputs(300, CLASSES, DIM, generator=generator(), dtype=DTYPES[dtype])
    filter = Filter(keep=0.02, draw=draw)
    _, grads = ours(inputs, DTYPES[dtype], place, asks, filter=filter, softcap=softcap)
    _, golden = dense(inputs, torch.float64, False, softcap=softcap)
    for name, found in grads.items():
        exact = golden[name]
        error = float((found.double() - exact).norm() / exact.norm())
        # Other tokens' temperatures, or one for all, are off by more than their size's tenth.
        assert error <= (2e-2 if name != "temperature" else 1e-2), f"{name}: {error:.2e}"


@pytest.mark.parametrize("shift", (0, 2))
@pytest.mark.parametrize("gradient", ("filtered", "exact"))
def test_token_logprobs_temperature_gradcheck(gradient: Any, shift: int) -> None:
    inputs = gaussian_inputs((2, 6), 20, 4, generator=generator(), dtype=torch.float64)
    inputs = inputs.with_options(generator(), "bias")
    leaves = leaves_of(inputs, torch.float64)
    mask = torch.rand(2, 6, generator=generator()) < 0.7

    def function(hidden: Tensor, weight: Tensor, bias: Tensor, temperature: Tensor) -> Tensor:
        return token_logprobs(
            hidden,
            weight,
            inputs.targets,
            bias=bias,
            temperature=temperature,
            mask=mask,
            shift=shift,
            softcap=3.0,
            logit_scale=1.2,
            gradient=gradient,
        ).logprobs

    assert torch.autograd.gradcheck(function, tuple(leaves.values()))
    (grad,) = torch.autograd.grad(
        function(**leaves).sum(), leaves["temperature"], create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiable once"):
        torch.autograd.grad(grad.sum(), leaves["temperature"])


def test_token_logprobs_shift_and_mask_move_the_temperature() -> None:
    inputs = gaussian_inputs((4, 40), CLASSES, DIM, generator=generator(), dtype=torch.float64)
    hidden, ids, given = inputs.hidden, inputs.targets, temperatures((4, 40))
    mask = torch.rand(4, 40, generator=generator()) < 0.5
    # What is left out is not read: it may hold anything.
    holes = given.where(mask, torch.tensor([torch.nan, 0.0, -1.0, torch.inf]).double()[:, None])
    holes.requires_grad_()
    found = token_logprobs(hidden, inputs.weight, ids, mask=mask, shift=1, temperature=holes)
    expected = linear_cross_entropy_reference(
        hidden, inputs.weight, ids, reduction="none", shift=1, temperature=given
    )
    wanted = (-expected.loss).where(mask[:, 1:], 0)
    torch.testing.assert_close(found.logprobs, wanted, rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(found.logprobs.sum(), holes)
    assert not grad[~mask].any() and not grad[:, 0].any() and bool(grad[:, 1:][mask[:, 1:]].all())


@pytest.mark.parametrize(**grid(dtype=("fp32", "float64")))
def test_token_logprobs_temperature_alone_requires_grad(place: Place, dtype: str) -> None:
    inputs = gaussian_inputs(TOKENS, CLASSES, DIM, generator=generator(), dtype=DTYPES[dtype])
    # One of all tokens, as calibration learns it: in a tensor without a dim.
    given = torch.tensor(0.8, dtype=DTYPES[dtype], device=place.device, requires_grad=True)
    hidden, weight, targets = (
        x.to(place.device) for x in (inputs.hidden, inputs.weight, inputs.targets)
    )
    found = token_logprobs(hidden, weight, targets, temperature=given, **place.options)
    (grad,) = torch.autograd.grad(found.logprobs.sum(), given)
    golden = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    logits = inputs.hidden.double() @ inputs.weight.double().T / golden
    wanted = logits.log_softmax(-1).gather(-1, inputs.targets[:, None]).sum()
    (wanted_grad,) = torch.autograd.grad(wanted, golden)
    torch.testing.assert_close(found.logprobs.detach().sum().cpu().double(), wanted.detach())
    torch.testing.assert_close(grad.cpu().double(), wanted_grad, rtol=1e-5, atol=0)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, dtype=("fp32", "fp16")))
def test_token_logprobs_same_temperature_of_all_is_a_number(place: Place, dtype: str) -> None:
    inputs = zipf_inputs(TOKENS, CLASSES, DIM, generator=generator(), dtype=DTYPES[dtype])
    targets = inputs.targets.to(place.device)
    hidden, weight = inputs.hidden.to(place.device), inputs.weight.to(place.device)
    # A power of two: its reciprocal is exact, and every product with it.
    tensor = torch.full((TOKENS,), 0.5, device=place.device)
    results = [
        token_logprobs(hidden, weight, targets, temperature=t, softcap=8.0, **place.options)
        for t in (0.5, tensor)
    ]
    assert torch.equal(results[0].logprobs, results[1].logprobs)


# -- ranks --------------------------------------------------------------------------------------


def on_a_rank(
    group: dist.ProcessGroup, inputs: Inputs, bounds: list[tuple[int, int]], how: dict[str, Any]
) -> dict[str, Tensor]:
    rank = dist.get_rank(group)
    start, stop = bounds[rank]
    leaves = leaves_of(inputs, inputs.hidden.dtype)
    hidden = leaves["hidden"].detach()
    if how.get("sequence_parallel"):
        hidden = hidden.chunk(len(bounds))[rank]
    mine = {
        "hidden": hidden.clone(),
        "weight": leaves["weight"].detach()[start:stop].clone(),
        "bias": leaves["bias"].detach()[start:stop].clone(),
        "temperature": leaves["temperature"].detach(),
    }
    for leaf in mine.values():
        leaf.requires_grad_()
    found = token_logprobs(
        targets=inputs.targets,
        group=group,
        vocab_shard=VocabShard(start, stop, len(inputs.weight)),
        **mine,
        **how,
    )
    grads = torch.autograd.grad(objective(found.logprobs, found.entropy), [*mine.values()])
    return {"logprobs": found.logprobs.detach(), **dict(zip(mine, grads, strict=True))}


CUTS = {"even": (0, 300, 600), "empty": (0, 11, 11, 600)}
SHIFTED: dict[str, Any] = {"shift": 1, "softcap": 5.0, "logit_scale": 1.3}
RANKS: dict[str, dict[str, Any]] = {
    "all": SHIFTED,
    "sequence": {**SHIFTED, "sequence_parallel": True},
    "triton": {**SHIFTED, "backend": "triton", "filter": Filter(keep=2.0**-20)},
}


@pytest.mark.interpreter
@pytest.mark.parametrize("how", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_token_logprobs_temperature_over_ranks(cuts: tuple[int, ...], how: dict[str, Any]) -> None:
    dtype = torch.float32 if "backend" in how else torch.float64
    inputs = gaussian_inputs((6, 25), CLASSES, DIM, generator=generator(), dtype=dtype)
    inputs = inputs.with_options(generator(), "bias")
    bounds = list(itertools.pairwise(cuts))
    ranks = shared_pool().run(len(bounds), on_a_rank, inputs, bounds, how)
    golden, grads = dense(inputs, torch.float64, False, **SHIFTED)
    for found in ranks:
        assert torch.equal(found["logprobs"], ranks[0]["logprobs"])
        assert torch.equal(found["temperature"], ranks[0]["temperature"])
    whole = {"temperature": ranks[0]["temperature"], "hidden": ranks[0]["hidden"]}
    whole |= {n: torch.cat([found[n] for found in ranks]) for n in ("weight", "bias")}
    if how.get("sequence_parallel"):
        whole["hidden"] = torch.cat([found["hidden"] for found in ranks])
    close = {"rtol": 1e-9, "atol": 1e-9} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(ranks[0]["logprobs"].double(), golden["logprobs"], **close)
    for name, found in whole.items():
        torch.testing.assert_close(found.double(), grads[name], **close, msg=name)


def called_differently(group: dist.ProcessGroup, kind: str) -> str:
    rank = dist.get_rank(group)
    inputs = gaussian_inputs(8, 20, 4, generator=generator())
    temperature = temperatures((8,)).float()
    if kind == "values" and rank == 1:
        temperature[3] += 0.1
    if kind == "grad":
        temperature.requires_grad_(rank == 1)
    given: Any = None if kind == "given" and rank == 1 else temperature
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CCE_DIST_CHECK_RANKS", "1")
        with pytest.raises(ValueError) as error:
            token_logprobs(
                inputs.hidden,
                inputs.weight[rank * 10 : rank * 10 + 10],
                inputs.targets,
                temperature=1.0 if given is None else given,
                group=group,
            )
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("values", "values of temperature by rank: [0] | [1]"),
        ("given", "temperature by rank: [0] | [1]"),
        ("grad", "temperature.requires_grad by rank: [0] | [1]"),
    ],
    ids=lambda x: x.split(" ")[0],
)
def test_check_ranks_compares_temperatures(kind: str, named: str) -> None:
    for message in shared_pool().run(2, called_differently, kind):
        assert named in message


# -- what is refused ----------------------------------------------------------------------------

GOOD = torch.full((8,), 0.7)


def with_one(value: float) -> Tensor:
    return torch.cat([GOOD[1:], torch.tensor([value])])


VALUES = r"temperature must be finite and > 0 at every token that counts, and logit_scale=1\.0"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"temperature": with_one(0.0)}, VALUES + r".*from 0\.0 to 0\.69"),
    "negative": ({"temperature": with_one(-2.0)}, VALUES + r".*from -2\.0 to 0\.69"),
    "nan": ({"temperature": with_one(float("nan"))}, VALUES + ".*nan"),
    "inf": ({"temperature": with_one(float("inf"))}, VALUES + ".*to inf"),
    "small": ({"temperature": with_one(1e-31)}, VALUES + ".*lie between 1e-30 and 1e\\+30"),
    "large": ({"temperature": with_one(1e31)}, VALUES + ".*to 1"),
    "scaled": ({"temperature": GOOD, "logit_scale": 1e30}, r"logit_scale=1e\+30 / temperature"),
    "shape": (
        {"temperature": GOOD[:4]},
        r"temperature must have shape \[8\] \(that of targets\), got \[4\]",
    ),
    "dtype": ({"temperature": GOOD.long()}, "temperature must be a floating-point tensor.*int64"),
    "device": (
        {"temperature": GOOD.to("meta")},
        "temperature must be on hidden's device cpu, got meta",
    ),
    "sparse": ({"temperature": GOOD.to_sparse()}, "temperature must be a dense tensor"),
    "entropy": (
        {"temperature": GOOD.clone().requires_grad_(), "entropy": True},
        r"temperature must not require grad with entropy=True.*temperature\.detach\(\)",
    ),
    "list": ({"temperature": [0.7] * 8}, "temperature must be a finite number, got"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_token_logprobs_refuses_temperatures(case: str) -> None:
    changed, message = REFUSED[case]
    inputs = gaussian_inputs(8, 50, 4, generator=generator())
    given = {"hidden": inputs.hidden, "weight": inputs.weight, "targets": inputs.targets}
    with pytest.raises(ValueError, match=message):
        token_logprobs(**{**given, **TORCH_CPU.options, **changed})


def test_token_logprobs_entropy_beside_a_temperature_without_gradients() -> None:
    inputs = gaussian_inputs(8, 50, 4, generator=generator())
    given = GOOD.clone().requires_grad_()
    with torch.no_grad():
        found = token_logprobs(
            inputs.hidden, inputs.weight, inputs.targets, temperature=given, entropy=True
        )
    assert found.entropy is not None and bool(found.entropy.isfinite().all())
