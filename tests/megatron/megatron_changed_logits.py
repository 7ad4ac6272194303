"""Checks of logits that someone reads or changes: the value and gradients without the patch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megatron_patch
from megatron_patch import PatchError
from megatron_patch.deferred import DeferredLogits
from tests.megatron.megatron_head import SETUP, Checks, head_loss, inputs, make_model
from tests.megatron.megatron_setup import CLASSES, SEQUENCE, Setup

EXACT = {"gradient": "exact", "backend": "torch"}
CHECKS = check = Checks()


def softcapped(z: Tensor, cap: float = 0.1) -> Tensor:
    return cap * torch.tanh(z / cap)


def without_recording(z: Tensor) -> None:
    with torch.no_grad():
        z.mul_(2)


def through_a_view(z: Tensor) -> None:
    z.view(-1)[::3] = 1.0


def a_copy_before(z: Tensor) -> Tensor:
    half = z * 0.5
    z.div_(0.25)
    return half


def a_name_of_its_own(z: Tensor) -> Tensor:
    other = z
    other *= 3.0
    return z


def a_column(z: Tensor) -> None:
    z[..., 3] = z[..., 4] * 2


def change_data(z: Tensor) -> None:
    z.data.mul_(2)


def set_data(z: Tensor) -> None:
    z.data = z.detach() * 2


def only_read(z: Tensor) -> None:
    with torch.no_grad():
        assert torch.is_tensor(z) and z.float().mean().isfinite()
    assert bool((z == z).all()) and not bool((z != z).any())


# A function of the logits: it changes them in place, or returns others.
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "div_": lambda z: z.div_(0.5),
    "mul_": lambda z: z.mul_(2),
    "divided": lambda z: z / 0.5,
    "negative": lambda z: -1 * z,
    "nothing left": lambda z: z * 0,
    "a tensor's": lambda z: torch.full((), 2.0) * z,
    "copy_": lambda z: z.copy_(z * 2 + 1),
    "a slice": lambda z: z[1:].mul_(2),
    "masked_fill_": lambda z: z.masked_fill_(z > 0.2, 0.2),
    "relu_": lambda z: nn.functional.relu(z, inplace=True),
    "of the class": lambda z: Tensor.mul_(z, 2),
    "a hook": lambda z: z.register_hook(lambda grad: grad * 3) and None,
    **{
        each.__name__: each
        for each in (softcapped, without_recording, through_a_view, a_copy_before)
    },
    **{
        each.__name__: each
        for each in (a_name_of_its_own, a_column, change_data, set_data, only_read)
    },
}


def values(model: Any, setup: Setup, change: Callable[[Tensor], Any]) -> dict[str, Tensor]:
    hidden, labels = inputs(setup)
    labels = labels.clamp(0, CLASSES - 1)
    weight = model.output_layer.weight
    weight.grad = None
    logits, _ = model.output_layer(hidden)
    found = change(logits)
    logits = found if isinstance(found, Tensor) and found.shape == logits.shape else logits
    loss = model.compute_language_model_loss(labels, logits)
    loss.mean().backward()
    assert hidden.grad is not None
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad.clone()}


@check
def changed_logits_are_those_that_count() -> None:
    for setup in (SETUP, Setup(tp=2, sequence_parallel=True), Setup(tp=2, bf16=True)):
        model = make_model(setup)
        plain = values(model, setup, lambda z: None)["loss"]
        near = {"rtol": 2e-2, "atol": 2e-5} if setup.bf16 else {"rtol": 1e-5, "atol": 1e-8}
        for name, change in CHANGES.items():
            if name == "relu_" and not setup.bf16:
                continue  # in fp32 Megatron's loss writes into what relu keeps
            expected = values(model, setup, change)
            with megatron_patch.patched(model, **EXACT):
                found = values(model, setup, change)
            for key, right in expected.items():
                torch.testing.assert_close(
                    found[key],
                    right,
                    **near,
                    msg=lambda text: f"{name}: {text}",  # noqa: B023
                )
            same = name in ("only_read", "a hook")
            assert torch.allclose(plain, expected["loss"], atol=1e-3) == same, name


@check
def the_known_numbers() -> None:
    """Of logits divided by 0.5, by hand: their loss and gradient, not those of a copy."""
    model, (hidden, labels) = make_model(), inputs()
    megatron_patch.apply(model, **EXACT)
    logits, _ = model.output_layer(hidden)
    doubled, _ = model.output_layer(hidden)
    doubled.div_(0.5)
    plain, found = (model.compute_language_model_loss(labels, z) for z in (logits, doubled))
    right = head_loss(model, hidden, labels, scale=2.0)
    counts = (labels >= 0) & (labels < CLASSES)
    torch.testing.assert_close(found[counts], right[counts])
    assert float((found - plain)[counts].abs().max()) > 0.05


@check
def logits_are_a_tensor_for_whoever_looks() -> None:
    model, (hidden, _) = make_model(), inputs()
    expected = model.output_layer(hidden)[0].detach()
    megatron_patch.apply(model, **EXACT)

    def made() -> Any:
        return model.output_layer(hidden)[0]

    assert isinstance(made(), DeferredLogits) and isinstance(made(), Tensor)
    with torch.no_grad():
        copied = copy.copy(made())
        assert type(copied) is Tensor and torch.equal(copied, expected)
        assert torch.equal(copy.deepcopy(made().detach()), expected)
        file = io.BytesIO()
        torch.save({"logits": made()}, file)
        file.seek(0)
        assert torch.equal(torch.load(file)["logits"], expected)
        other = torch.empty_like(expected)
        other[:] = made()
        assert torch.equal(other.copy_(made()), expected)
        assert torch.equal(torch.mul(made(), 2, out=other), expected * 2)
        assert torch.equal(made() // 1, expected // 1) and made()[0, 0, 0] in made()
        assert made().gather(-1, torch.zeros(SEQUENCE, 1, 1, dtype=torch.long)).shape[-1] == 1
    with pytest.raises(RuntimeError, match="ambiguous"):
        bool(made())
    squeezed = made()
    squeezed.unsqueeze_(0)
    assert squeezed.shape == squeezed.size() == (1, *expected.shape)
    assert (made() * 2)._logits is None


@check
def autograd_records_as_where_the_head_was_called() -> None:
    model, (hidden, labels) = make_model(), inputs()
    for patched in (False, True):
        if patched:
            megatron_patch.apply(model, **EXACT)
        with torch.no_grad():
            frozen, _ = model.output_layer(hidden)
        assert not model.compute_language_model_loss(labels, frozen).requires_grad
        assert not frozen.requires_grad
        logits, _ = model.output_layer(hidden)
        with torch.no_grad():
            assert not model.compute_language_model_loss(labels, logits).requires_grad
            logits, _ = model.output_layer(hidden), None
            scaled = logits[0] * 0.5
        assert not scaled.requires_grad
        with torch.enable_grad():
            logits, _ = model.output_layer(hidden)
        with torch.inference_mode():
            logits.argmax()
        model.compute_language_model_loss(labels, logits).mean().backward()
        with torch.inference_mode():
            logits, _ = model.output_layer(hidden)
        assert logits.is_inference()


class Own(torch.autograd.Function):
    """A loss of one's own, as Megatron's."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.float().logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError


@check
def what_has_no_gradient_is_refused() -> None:
    model, (hidden, labels) = make_model(), inputs()
    megatron_patch.apply(model, **EXACT)

    def logits() -> Any:
        return model.output_layer(hidden)[0]

    with pytest.raises(PatchError, match=r"argument of a torch.autograd.Function.*logits.clone"):
        Own.apply(logits())
    with pytest.raises(PatchError, match=r"argument of a torch.autograd.Function"):
        checkpoint(model.compute_language_model_loss, labels, logits(), use_reentrant=True)
    with torch.no_grad():
        Own.apply(logits())
    assert Own.apply(logits().clone()).requires_grad
    loss = checkpoint(model.compute_language_model_loss, labels, logits(), use_reentrant=False)
    assert isinstance(loss, Tensor) and loss.requires_grad
    later = logits()
    with torch.no_grad():
        hidden.mul_(2)
    for use in (lambda: model.compute_language_model_loss(labels, later), lambda: later + 1):
        with pytest.raises(PatchError, match="input must not change in place after"):
            use()


@check
def options_that_only_our_loss_knows() -> None:
    model, (hidden, labels) = make_model(), inputs()
    for name, value in (("softcap", 5.0), ("vocab_size", 90)):
        with megatron_patch.patched(model, **{name: value}):
            logits, _ = model.output_layer(hidden)
            for changed_logits in (logits / 2, logits.mul_(2)):
                with pytest.raises(PatchError, match=rf"{name}={value} needs a loss without"):
                    model.compute_language_model_loss(labels, changed_logits)
