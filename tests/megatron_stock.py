"""What tests/test_megatron.py checks of models whose code is not Megatron's own: their value and
gradients are those without the patch, or they are refused by name."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from megatron_checks import SETUP, changed, head_loss, inputs, make_model
from megatron_checks import run_check as run_any_check
from megatron_jobs import CLASSES, SEQUENCE, Setup
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megatron_patch
from megatron_patch import PatchError
from megatron_patch.deferred import DeferredLogits

EXACT = {"gradient": "exact", "backend": "torch"}
Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def run_check(_: Any, name: str) -> None:
    run_any_check(None, name, CHECKS)


# -- logits that someone reads or changes ---------------------------------------------------------


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
        with pytest.raises(PatchError, match="input was changed in place after"):
            use()


@check
def options_that_only_our_loss_knows() -> None:
    model, (hidden, labels) = make_model(), inputs()
    for name, value in (("softcap", 5.0), ("vocab_size", 90)):
        with megatron_patch.patched(model, **{name: value}):
            logits, _ = model.output_layer(hidden)
            for changed_logits in (logits / 2, logits.mul_(2)):
                with pytest.raises(PatchError, match=rf"{name}={value} is of a loss without"):
                    model.compute_language_model_loss(labels, changed_logits)


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
            named = r"Mine cannot be patched: megatron_stock.ZLoss" if given["bases"] else "Mine"
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
            pytest.raises(PatchError, match=r"Mine overrides .* by megatron_stock.z_loss \(.*\.py"),
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
    with pytest.raises(PatchError, match=r"has been replaced since, by a .*Adapter"):
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
        message = rf"output_layer has the {kind} megatron_stock.hooks.<locals>.hook \(.*\.py:\d+\)"
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
                        match=rf"{owner.__name__}.{name} is megatron.core.*not Megatron's own in",
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
