"""token_logprobs against a dense log-softmax: values, policy gradients, ranks, what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import VocabShard, token_logprobs
from cce_dist.reference import linear_cross_entropy_reference
from cce_dist.testing import (
    DTYPES,
    TORCH_CPU,
    Inputs,
    Place,
    check_close64,
    check_gate,
    gaussian_inputs,
    grid,
    shared_pool,
    zipf_inputs,
)
from tests.support.loss_cases import generator

TOKENS, CLASSES, DIM = 150, 600, 24
# Room for a few columns at a time: several chunks.
WORKSPACE = 2**16


def response(shape: tuple[int, ...]) -> Tensor:
    """A prompt and then a response, in each sequence of another length."""
    length = torch.arange(1, shape[0] + 1)[:, None] * 7 % shape[1]
    return torch.arange(shape[1])[None, :] >= length


def dense(
    inputs: Inputs, dtype: torch.dtype, *, temperature: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probabilities, entropy and the leaves that they are made of: logits in `dtype`, their
    softmax in fp32 at least."""
    leaves = {
        name: getattr(inputs, name).to(dtype).requires_grad_()
        for name in ("hidden", "weight", "bias")
        if getattr(inputs, name) is not None
    }
    logits = leaves["hidden"] @ leaves["weight"].T
    if "bias" in leaves:
        logits = logits + leaves["bias"]
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.to(torch.promote_types(dtype, torch.float32))
    log_p = (logits / temperature).log_softmax(-1)
    targets = inputs.targets.clamp_min(0)
    logprobs = log_p.gather(-1, targets[..., None])[..., 0]
    return logprobs, -(log_p.exp() * log_p).sum(-1), leaves


def on(place: Place, inputs: Inputs) -> dict[str, Tensor]:
    return {
        name: getattr(inputs, name).to(place.device, copy=True).requires_grad_()
        for name in ("hidden", "weight", "bias")
        if getattr(inputs, name) is not None
    }


# -- values -------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot_softcap": {"temperature": 1.7, "softcap": 5.0},
}


@pytest.mark.parametrize(
    **grid(options=OPTIONS, gradient=("filtered", "exact"), dtype=("fp32", "float64"))
)
def test_token_logprobs_are_those_of_dense_logits(
    place: Place, options: dict[str, Any], gradient: Any, dtype: str
) -> None:
    inputs = gaussian_inputs(TOKENS, CLASSES, DIM, generator=generator(), dtype=DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias")
    leaves = on(place, inputs)
    found = token_logprobs(
        leaves["hidden"],
        leaves["weight"],
        inputs.targets.to(place.device),
        bias=leaves["bias"],
        entropy=True,
        gradient=gradient,
        **place.options,
        **options,
    )
    golden, simple = (
        dense(inputs, torch.float64, **options),
        dense(inputs, DTYPES[dtype], **options),
    )
    scale = golden[0].detach().abs() + 10
    for name, ours, exact, plain in (
        ("logprobs", found.logprobs, golden[0], simple[0]),
        ("entropy", found.entropy, golden[1], simple[1]),
    ):
        assert ours is not None and ours.dtype == DTYPES[dtype]
        ours, exact, plain = (x.detach().cpu() for x in (ours, exact, plain))
        if dtype == "float64":
            check_close64(name, ours, exact, scale=scale)
        else:
            check_gate(name, ours, exact, plain, scale=scale)


def test_token_logprobs_of_the_response_alone() -> None:
    inputs = gaussian_inputs(4 * 40, CLASSES, DIM, generator=generator(), dtype=torch.float64)
    mask = response((4, 40))
    hidden, targets = inputs.hidden.view(4, 40, DIM), inputs.targets.view(4, 40)
    golden = dense(inputs, torch.float64)[0].detach().view(4, 40)
    # What is left out is not read: it may hold anything.
    hidden = hidden.where(mask[..., None], torch.nan).requires_grad_()
    stats = ("entropy", "sum_p2")
    found = token_logprobs(hidden, inputs.weight, targets, mask=mask, stats=stats)
    assert found.entropy is not None
    for values in (found.logprobs, found.entropy, found.sum_p2):
        assert values is not None and not values[~mask].any()
        assert not torch.signbit(values[~mask]).any()
    torch.testing.assert_close(found.logprobs[mask], golden[mask], rtol=1e-12, atol=1e-12)
    (grad,) = torch.autograd.grad(found.logprobs.sum(), hidden)
    assert bool(grad.isfinite().all()) and not grad[~mask].any() and bool(grad[mask].any())


def test_token_logprobs_shift_moves_mask_and_targets() -> None:
    inputs = gaussian_inputs(4 * 40, CLASSES, DIM, generator=generator(), dtype=torch.float64)
    hidden, ids = inputs.hidden.view(4, 40, DIM), inputs.targets.view(4, 40)
    mask = response((4, 40))
    found = token_logprobs(hidden, inputs.weight, ids, mask=mask, shift=1).logprobs
    expected = token_logprobs(hidden[:, :-1], inputs.weight, ids[:, 1:], mask=mask[:, 1:]).logprobs
    assert found.shape == (4, 39)
    assert torch.equal(found, expected)


# -- policy gradients ---------------------------------------------------------------------------


def policy_loss(logprobs: Tensor, entropy: Tensor | None, before: Tensor, mask: Tensor) -> Tensor:
    """PPO's clipped objective with advantages of both signs and of 0, and an entropy bonus."""
    advantage = torch.linspace(-2, 2, mask.numel(), dtype=logprobs.dtype, device=logprobs.device)
    advantage = advantage.round().view(mask.shape)
    ratio = (logprobs - before).exp()
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    if entropy is not None:
        gain = gain + 0.01 * entropy
    return -(gain * mask).sum() / mask.sum()


@pytest.mark.parametrize(
    **grid(
        entropy=(False, True),
        gradient=("filtered", "exact"),
        dtype=("fp32", "fp16", "bf16", "float64"),
    )
)
def test_token_logprobs_policy_gradient(
    place: Place, entropy: bool, gradient: Any, dtype: str
) -> None:
    inputs = zipf_inputs(TOKENS, CLASSES, DIM, generator=generator(), dtype=DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias")
    mask = (torch.arange(TOKENS) % 3 > 0) & (torch.arange(TOKENS) > 20)
    old = dense(inputs, torch.float64, temperature=0.8)[0].detach()
    old += 0.3 * torch.randn(TOKENS, generator=generator(1), dtype=torch.float64)
    leaves = on(place, inputs)
    found = token_logprobs(
        leaves["hidden"],
        leaves["weight"],
        inputs.targets.to(place.device),
        bias=leaves["bias"],
        mask=mask.to(place.device),
        temperature=0.8,
        entropy=entropy,
        gradient=gradient,
        workspace_bytes=WORKSPACE,
        **place.options,
    )
    before = old.to(found.logprobs)
    loss = policy_loss(found.logprobs, found.entropy, before, mask.to(place.device))
    grads = torch.autograd.grad(loss, list(leaves.values()))

    def by_dense(computed: torch.dtype) -> list[Tensor]:
        logprobs, of_softmax, dense_leaves = dense(inputs, computed, temperature=0.8)
        loss = policy_loss(logprobs, of_softmax if entropy else None, old.to(logprobs), mask)
        return [x.detach() for x in torch.autograd.grad(loss, list(dense_leaves.values()))]

    golden, simple = by_dense(torch.float64), by_dense(torch.float32)
    for name, ours, exact, plain in zip(leaves, grads, golden, simple, strict=True):
        ours = ours.cpu()
        if dtype == "float64":
            check_close64(name, ours, exact)
            continue
        if dtype == "fp32":
            check_gate(name, ours, exact, plain)
        unit = float(exact.norm())
        error = float((ours.double() - exact).norm())
        assert error <= 8 * torch.finfo(DTYPES[dtype]).eps * unit, f"{name}: {error / unit:.2e}"
    assert not grads[0].cpu()[~mask].any()


@pytest.mark.parametrize(**grid(dtype=("fp16", "bf16")))
def test_token_logprobs_filtered_policy_gradient_is_no_worse_than_dense_16_bit(
    place: Place, dtype: str
) -> None:
    # From 4,096 classes the default filter leaves columns out.
    shape = (384, 4096, 16) if place.interprets else (512, 8192, 64)
    inputs = zipf_inputs(*shape, generator=generator(), dtype=DTYPES[dtype])
    mask = torch.arange(shape[0]) % 4 > 0
    leaves = on(place, inputs)
    targets = inputs.targets.to(place.device)
    found = token_logprobs(
        leaves["hidden"], leaves["weight"], targets, mask=mask.to(place.device), **place.options
    )

    def gradients(logprobs: Tensor, leaves: dict[str, Tensor]) -> list[Tensor]:
        before = logprobs.detach() + 0.1
        # As a loss scaler does: fp16's smallest number is no part of the comparison.
        loss = 1024 * policy_loss(logprobs, None, before, mask.to(logprobs.device))
        return [x.double().cpu() for x in torch.autograd.grad(loss, list(leaves.values()))]

    def by_dense(computed: torch.dtype) -> list[Tensor]:
        logprobs, _, dense_leaves = dense(inputs, computed)
        return gradients(logprobs, dense_leaves)

    golden, rounded = by_dense(torch.float64), by_dense(DTYPES[dtype])
    for name, ours, exact, plain in zip(
        leaves, gradients(found.logprobs, leaves), golden, rounded, strict=True
    ):
        error, theirs = float((ours - exact).norm()), float((plain - exact).norm())
        assert error <= theirs, f"{name}: {error:.3e}, dense 16-bit {theirs:.3e}"


@pytest.mark.parametrize(**grid(gradient=("filtered", "exact"), dtype=("fp32", "fp16", "bf16")))
def test_token_logprobs_without_any_advantage(place: Place, gradient: Any, dtype: str) -> None:
    inputs = zipf_inputs(TOKENS, CLASSES, DIM, generator=generator(), dtype=DTYPES[dtype])
    leaves = on(place, inputs)
    targets = inputs.targets.to(place.device)
    found = token_logprobs(
        leaves["hidden"], leaves["weight"], targets, gradient=gradient, **place.options
    )
    upstream = torch.zeros_like(found.logprobs)
    for grad in torch.autograd.grad(found.logprobs, list(leaves.values()), upstream):
        assert not grad.any()


# -- ranks --------------------------------------------------------------------------------------


def on_a_rank(
    group: dist.ProcessGroup | None, inputs: Inputs, bounds: list[tuple[int, int]], mask: Tensor
) -> dict[str, Tensor]:
    start, stop = bounds[dist.get_rank(group)]
    hidden = inputs.hidden.clone().requires_grad_()
    weight = inputs.weight[start:stop].clone().requires_grad_()
    found = token_logprobs(
        hidden,
        weight,
        inputs.targets,
        mask=mask,
        temperature=0.7,
        stats=("entropy", "sum_p2"),
        group=group,
        vocab_shard=VocabShard(start, stop, len(inputs.weight)),
    )
    assert found.entropy is not None and found.sum_p2 is not None
    loss = policy_loss(found.logprobs, found.entropy, found.logprobs.detach() + 0.1, mask)
    grads = torch.autograd.grad(loss, (hidden, weight))
    names = ("logprobs", "entropy", "sum_p2", "grad_hidden", "grad_weight")
    values = (found.logprobs.detach(), found.entropy.detach(), found.sum_p2, *grads)
    return dict(zip(names, values, strict=True))


@pytest.mark.parametrize("cuts", [(0, 300, 600), (0, 11, 11, 600)], ids=["even", "ragged"])
def test_token_logprobs_over_ranks(cuts: tuple[int, ...]) -> None:
    inputs = gaussian_inputs(TOKENS, CLASSES, DIM, generator=generator(), dtype=torch.float64)
    mask = torch.arange(TOKENS) % 4 > 0
    bounds = list(itertools.pairwise(cuts))
    ranks = shared_pool().run(len(bounds), on_a_rank, inputs, bounds, mask)
    logprobs, entropy, leaves = dense(inputs, torch.float64, temperature=0.7)
    loss = policy_loss(logprobs, entropy, logprobs.detach() + 0.1, mask)
    grad_hidden, grad_weight = torch.autograd.grad(loss, list(leaves.values()))
    for found in ranks:
        for name in ("logprobs", "entropy", "sum_p2", "grad_hidden"):
            assert torch.equal(found[name], ranks[0][name]), name
    check_close64("logprobs", ranks[0]["logprobs"][mask], logprobs.detach()[mask])
    check_close64("entropy", ranks[0]["entropy"][mask], entropy.detach()[mask])
    golden = linear_cross_entropy_reference(
        inputs.hidden, inputs.weight, inputs.targets, temperature=0.7
    )
    check_close64("sum_p2", ranks[0]["sum_p2"][mask], golden.sum_p2.detach()[mask])
    check_close64("grad_hidden", ranks[0]["grad_hidden"], grad_hidden)
    check_close64("grad_weight", torch.cat([found["grad_weight"] for found in ranks]), grad_weight)


# -- what is refused ----------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "temperature_0": ({"temperature": 0.0}, r"temperature must be > 0, got 0\.0"),
    "temperature_nan": ({"temperature": float("nan")}, r"temperature must be a finite.*nan"),
    "temperature_small": (
        {"temperature": 1e-320},
        r"logit_scale=1.0 / temperature=1e-320 must lie between .*got inf",
    ),
    "temperature_large": (
        {"temperature": 1e31},
        r"logit_scale=1.0 / temperature=1e\+31 must lie between",
    ),
    "mask_sparse": ({"mask": torch.ones(8).bool().to_sparse()}, r"mask must be a dense tensor"),
    "temperature_bool": ({"temperature": True}, r"temperature must be a finite number.*True"),
    "stats": ({"stats": ("lse",)}, r"entry of stats must be one of 'entropy', 'sum_p2', 'correct'"),
    "entropy": ({"entropy": 1}, r"entropy must be True or False, got 1"),
    "in_forward": ({"gradient": "in_forward"}, r"gradient must be one of 'filtered', 'exact'"),
    "mask_int": ({"mask": torch.ones(8).long()}, r"mask must be a bool tensor.*int64"),
    "mask_list": ({"mask": [True] * 8}, r"mask must be a bool tensor.*list"),
    "mask_shape": (
        {"mask": torch.ones(7).bool()},
        r"mask must have targets' shape \[8\], got \[7\]",
    ),
    "mask_device": (
        {"mask": torch.ones(8, dtype=torch.bool, device="meta")},
        r"mask must be on targets' device cpu, got meta",
    ),
    "logit_scale": ({"logit_scale": "2"}, r"logit_scale must be a finite number, got '2'"),
    "targets": ({"targets": None, "mask": torch.ones(8).bool()}, r"targets must be a torch.Tensor"),
}


def test_token_logprobs_has_no_entropy_that_nobody_asked_for() -> None:
    """A temperature that requires grad computes it."""
    inputs = gaussian_inputs(8, 50, 4, generator=generator())
    temperature = torch.ones(8, requires_grad=True)
    found = token_logprobs(
        inputs.hidden,
        inputs.weight,
        inputs.targets,
        temperature=temperature,
        stats=("correct",),
        **TORCH_CPU.options,
    )
    assert found.correct is not None and found.entropy is None
    found.logprobs.sum().backward()
    assert temperature.grad is not None


@pytest.mark.parametrize("case", REFUSED)
def test_token_logprobs_refuses(case: str) -> None:
    changed, message = REFUSED[case]
    inputs = gaussian_inputs(8, 50, 4, generator=generator())
    given = {"hidden": inputs.hidden, "weight": inputs.weight, "targets": inputs.targets}
    with pytest.raises(ValueError, match=message):
        token_logprobs(**{**given, **TORCH_CPU.options, **changed})
