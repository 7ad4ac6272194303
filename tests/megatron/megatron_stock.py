"""What test_megatron.py checks of models whose code is not Megatron's own: their value and
gradients are those without the patch, or they are refused by name."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import megatron_patch
from megatron_patch import PatchError
from tests.megatron.megatron_changed_logits import CHECKS as OF_LOGITS
from tests.megatron.megatron_changed_logits import EXACT, softcapped
from tests.megatron.megatron_head import (
    SETUP,
    Checks,
    changed,
    head_loss,
    inputs,
    make_model,
    run_in,
)
from tests.megatron.megatron_setup import CLASSES, SEQUENCE, Setup

CHECKS = check = Checks(OF_LOGITS)


def run_check(_: Any, name: str) -> None:
    run_in(SETUP, CHECKS[name])


# -- classes ------------------------------------------------------------------------------------


def z_loss(self: Any, labels: Tensor, logits: Tensor) -> Tensor:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    made = logits.float().exp().sum(-1)
    torch.distributed.all_reduce(made.detach(), group=self.tp_group)
    loss = LanguageModule.compute_language_model_loss(self, labels, logits)
    return loss + 0.1 * made.log().T ** 2


class ZLoss:
    compute_language_model_loss = z_loss


@contextlib.contextmanager
def building(bases: tuple[type, ...], **members: Any) -> Iterator[type]:
    """Models are built of a subclass of GPTModel."""
    from megatron.core.models.gpt import gpt_model

    kind = type("Mine", (*bases, gpt_model.GPTModel), members)
    with mock.patch.object(gpt_model, "GPTModel", kind):
        yield kind


OVERRIDES = (
    {"bases": (), "compute_language_model_loss": z_loss},
    {"bases": (ZLoss,)},
    {"bases": (type("Further", (ZLoss,), {}),)},
    {"bases": (), "compute_language_model_loss": property(lambda self: z_loss)},
)


@check
def subclasses_with_a_loss_of_their_own() -> None:
    for given in OVERRIDES:
        with building(**given) as kind:
            mine = make_model()
            assert type(mine) is kind
            named = r"Mine cannot be patched: .*megatron_stock.ZLoss" if given["bases"] else "Mine"
            message = rf"{named}.* overrides compute_language_model_loss by .*without the patch"
            with pytest.raises(PatchError, match=message):
                megatron_patch.apply(mine, **EXACT)
            # Nothing is changed.
            assert "compute_language_model_loss" not in vars(mine)
            megatron_patch.apply(**EXACT)
            with pytest.raises(PatchError, match=message):
                make_model()
            megatron_patch.remove()
    # Once it is patched already.
    with building(()) as kind:
        mine, (hidden, labels) = make_model(), inputs()
        megatron_patch.apply(mine, **EXACT)
        head_loss(mine, hidden, labels)
        with (
            changed(kind, compute_language_model_loss=z_loss),
            pytest.raises(
                PatchError, match=r"Mine overrides .* by .*megatron_stock.z_loss \(.*\.py"
            ),
        ):
            head_loss(mine, hidden, labels)


def forward(self: Any, *args: Any, labels: Any = None, **more: Any) -> Tensor:
    """As a model for distillation: a loss of logits that it changes."""
    logits = super(type(self), self).forward(*args, **more)
    logits.div_(0.5)
    return self.compute_language_model_loss(labels, logits.transpose(0, 1).contiguous())


def postprocess(self: Any, hidden_states: Tensor, *_: Any, labels: Any = None, **__: Any) -> Tensor:
    logits, _ = self.output_layer(hidden_states)
    logits.div_(0.5)
    loss = self.compute_language_model_loss(labels, logits)
    return loss + 1e-2 * logits.float().logsumexp(-1).T ** 2


@check
def subclasses_with_another_forward() -> None:
    labels = inputs()[1].clamp(0, CLASSES - 1)
    position = torch.arange(SEQUENCE).expand_as(labels)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    for members in ({"forward": forward}, {"_postprocess": postprocess}):
        with building((), **members):
            found = []
            for how in (contextlib.nullcontext(), megatron_patch.patched(**EXACT)):
                with how:
                    model = make_model()
                    loss = model(labels.roll(1, 1), position, mask, labels=labels)
                    loss.mean().backward()
                    found.append((loss, [each.grad for each in model.parameters()]))
            torch.testing.assert_close(*found, rtol=1e-4, atol=1e-7)


@check
def heads_that_change_once_they_are_patched() -> None:
    model, (hidden, labels) = make_model(), inputs()
    layer = model.output_layer
    own = type(layer)

    class Softcapped(own):
        def forward(self, *args: Any, **how: Any) -> Any:
            logits, bias = super().forward(*args, **how)
            return softcapped(logits), bias

    def wrapped(*args: Any, **how: Any) -> Any:
        raise AssertionError

    class Adapter(nn.Module):
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base, self.weight = base, base.weight

        def forward(self, hidden: Tensor, **how: Any) -> Any:
            logits, bias = self.base(hidden, **how)
            return logits + 1, bias

    megatron_patch.apply(model, **EXACT)
    head_loss(model, hidden, labels)
    # As Megatron-Bridge extends an instance that is built.
    layer.__class__ = Softcapped
    with pytest.raises(PatchError, match=r"is a .*Softcapped, not Megatron's ColumnParallelLinear"):
        head_loss(model, hidden, labels)
    layer.__class__ = own
    for target, name, use in (
        (layer, "forward", layer),
        (layer, "_call_impl", layer.forward),
        (own, "forward", layer),
    ):
        with changed(target, **{name: wrapped}), pytest.raises(PatchError, match="replaced"):
            use(hidden)
    layer.bias = nn.Parameter(torch.zeros(CLASSES // 2))
    with pytest.raises(PatchError, match="has a bias"):
        head_loss(model, hidden, labels)
    layer.bias = None
    model.output_layer = Adapter(layer)
    with pytest.raises(PatchError, match=r"was replaced after apply\(\), by a .*Adapter"):
        head_loss(model, hidden, labels)
    model.output_layer = layer
    head_loss(model, hidden, labels)


@check
def hooks() -> None:
    def hook(*_: Any) -> None: ...

    every = nn.modules.module
    model, (hidden, labels) = make_model(), inputs()
    layer = model.output_layer
    for kind, register in (
        ("forward hook", layer.register_forward_hook),
        ("backward hook", layer.register_full_backward_hook),
        ("backward pre-hook", layer.register_full_backward_pre_hook),
        ("forward hook of every module", every.register_module_forward_hook),
        ("backward hook of every module", every.register_module_full_backward_hook),
        ("backward pre-hook of every module", every.register_module_full_backward_pre_hook),
    ):
        handle = register(hook)
        message = (
            rf"output_layer has the {kind} .*megatron_stock.hooks.<locals>.hook \(.*\.py:\d+\)"
        )
        with pytest.raises(PatchError, match=message):
            megatron_patch.apply(model, **EXACT)
        handle.remove()
        megatron_patch.apply(model, **EXACT)
        handle = register(functools.partial(hook))
        with pytest.raises(PatchError, match=message):
            head_loss(model, hidden, labels)
        handle.remove()
        megatron_patch.remove()
    # One 8-bit copy would serve two weights.
    model = make_model(Setup(tp=2, bf16=True))
    model.output_layer.register_forward_pre_hook(hook)
    with pytest.raises(PatchError, match=r"forward pre-hook .*: set quantize_once=False"):
        megatron_patch.apply(model, logits="screened")
    megatron_patch.apply(model, logits="screened", quantize_once=False)


# -- functions of Megatron that someone has replaced, or edited in a fork -----------------------


@check
def functions_that_are_not_megatrons() -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    model = make_model()
    for owner, name in (
        (LanguageModule, "compute_language_model_loss"),
        (ColumnParallelLinear, "forward"),
    ):
        own = getattr(owner, name)

        @functools.wraps(own)
        def wrapped(*args: Any, **how: Any) -> Any:
            raise AssertionError

        edited = types.FunctionType(own.__code__.replace(co_filename="fork.py"), own.__globals__)
        edited.__defaults__ = own.__defaults__
        for other in (wrapped, edited):
            for given in ((), (model,)):
                with (
                    mock.patch.object(owner, name, other),
                    pytest.raises(
                        PatchError,
                        match=rf"{owner.__name__}.{name} must be Megatron's own .* megatron.core",
                    ),
                ):
                    megatron_patch.apply(*given, **EXACT)
    assert megatron_patch.status().heads == () and megatron_patch.status().options is None


@check
def forks_with_another_value() -> None:
    """Of functions whose names and signatures are Megatron's, in files of Megatron's."""
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module import language_module
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    cross_entropy = tensor_parallel.vocab_parallel_cross_entropy
    fused = language_module.fused_vocab_parallel_cross_entropy
    linear = ColumnParallelLinear._forward_impl

    def squared(z: Tensor) -> Tensor:
        return 1e-5 * z.float().clone().logsumexp(-1) ** 2

    def ours(z: Tensor, labels: Tensor, *more: Any, **named: Any) -> Tensor:
        return squared(z) + cross_entropy(z, labels, *more, **named)

    def ours_fused(z: Tensor, labels: Tensor, *more: Any, **named: Any) -> Tensor:
        return squared(z) + fused(z, labels, *more, **named)

    def of_16_bits_alone(z: Tensor, labels: Tensor, *more: Any, **named: Any) -> Tensor:
        return z.float().logsumexp(-1) ** 2 + cross_entropy(z, labels, *more, **named)

    def of_another_gradient(z: Tensor, labels: Tensor, *more: Any, **named: Any) -> Tensor:
        loss = cross_entropy(z, labels, *more, **named)
        return loss + 0.1 * (loss - loss.detach())

    def without_gradient(z: Tensor, labels: Tensor, *more: Any, **named: Any) -> Tensor:
        return cross_entropy(z.detach(), labels, *more, **named)

    def capped(self: Any, **how: Any) -> Tensor:
        return softcapped(linear(self, **how), 30.0)

    loss, name = "is not the cross-entropy of its", "vocab_parallel_cross_entropy"
    for setup, owner, replaced, other, message in (
        (SETUP, tensor_parallel, name, ours, loss),
        (SETUP, tensor_parallel, name, of_16_bits_alone, "it raises RuntimeError: one of the"),
        (SETUP, tensor_parallel, name, of_another_gradient, loss),
        (SETUP, tensor_parallel, name, without_gradient, loss),
        (Setup(tp=2, native=True), language_module, f"fused_{name}", ours_fused, loss),
        (SETUP, ColumnParallelLinear, "_forward_impl", capped, "does not give its input times"),
        (
            Setup(tp=2, bf16=True, sequence_parallel=True),
            ColumnParallelLinear,
            "_forward_impl",
            capped,
            "does not give its input times",
        ),
    ):
        model, (hidden, labels) = make_model(setup), inputs(setup)
        megatron_patch.apply(model, **EXACT)
        with mock.patch.object(owner, replaced, other), pytest.raises(PatchError, match=message):
            head_loss(model, hidden, labels)
        assert hidden.grad is None
        # Megatron's own is looked at once.
        head_loss(model, hidden, labels)
        with mock.patch.object(owner, replaced, other):
            head_loss(model, hidden, labels)
