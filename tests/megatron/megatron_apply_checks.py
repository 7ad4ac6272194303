"""Checks of applying the patch to one head, and of removing it. Each raises if not so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_patch
from megatron_patch import PatchError
from megatron_patch.deferred import DeferredLogits
from tests.megatron.megatron_head import Checks, changed, head_loss, inputs, make_model
from tests.megatron.megatron_setup import CLASSES

CHECKS = check = Checks()


@check
def remove_leaves_no_trace() -> None:
    model = make_model()
    owner, layer = type(model).__mro__[1], model.output_layer
    before = [dict(vars(x)) for x in (owner, type(layer), model, layer)]
    megatron_patch.apply()
    built = make_model()
    megatron_patch.apply(model)
    assert len(megatron_patch.status().heads) == 2
    assert isinstance(built.output_layer(inputs()[0])[0], DeferredLogits)
    assert model.state_dict().keys() == built.state_dict().keys()
    megatron_patch.remove()
    assert [dict(vars(x)) for x in (owner, type(layer), model, layer)] == before
    assert vars(built).keys() == vars(model).keys()
    assert vars(built.output_layer).keys() == vars(layer).keys()
    assert megatron_patch.status() == megatron_patch.Status(None, (), None, None)
    assert isinstance(layer(inputs()[0])[0], Tensor)


@check
def what_others_have_wrapped_stays_wrapped() -> None:
    owner, name = type(make_model()).__mro__[1], "setup_embeddings_and_output_layer"
    original = getattr(owner, name)
    megatron_patch.apply()
    ours, calls = getattr(owner, name), []

    def theirs(self: Any) -> Any:
        calls.append(self)
        return ours(self)

    setattr(owner, name, theirs)
    try:
        megatron_patch.remove()
        assert getattr(owner, name) is theirs
        assert isinstance(make_model().output_layer(inputs()[0])[0], Tensor) and len(calls) == 1
    finally:
        setattr(owner, name, original)


@check
def one_model_of_two() -> None:
    mine, theirs = make_model(), make_model()
    with megatron_patch.patched(mine, gradient="exact"):
        assert isinstance(mine.output_layer(inputs()[0])[0], DeferredLogits)
        assert isinstance(theirs.output_layer(inputs()[0])[0], Tensor)
    assert isinstance(mine.output_layer(inputs()[0])[0], Tensor)
    assert megatron_patch.status() == megatron_patch.Status(None, (), None, None)


@check
def a_head_that_somebody_has_wrapped_since() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

    model = make_model()
    layer, before = model.output_layer, dict(vars(model))
    for model_or_all in (model, None):
        megatron_patch.apply(model)
        model.output_layer = Wrapper(layer)
        megatron_patch.remove(model_or_all)
        model.output_layer = layer
        assert dict(vars(model)).keys() == before.keys()
        assert not vars(layer).keys() & {"forward", "_call_impl", "megatron_patch"}
        assert isinstance(layer(inputs()[0])[0], Tensor)
    assert megatron_patch.status() == megatron_patch.Status(None, (), None, None)


@check
def a_context_leaves_what_was_applied_before() -> None:
    def kinds(*models: Any) -> list[type]:
        return [type(model.output_layer(inputs()[0])[0]) for model in models]

    first, second = make_model(), make_model()
    megatron_patch.apply(first, gradient="exact")
    with megatron_patch.patched([first, second], gradient="exact"):
        assert kinds(first, second) == [DeferredLogits] * 2
    assert kinds(first, second) == [DeferredLogits, Tensor]
    with megatron_patch.patched(gradient="exact"):
        third = make_model()
        assert kinds(third) == [DeferredLogits]
    assert kinds(first, third, make_model()) == [DeferredLogits, Tensor, Tensor]
    megatron_patch.apply(gradient="exact")
    with megatron_patch.patched(gradient="exact"), megatron_patch.patched(second, gradient="exact"):
        fourth = make_model()
    assert kinds(first, second, fourth) == [DeferredLogits, Tensor, DeferredLogits]
    assert kinds(make_model()) == [DeferredLogits]


@check
def applying_twice() -> None:
    megatron_patch.apply(gradient="exact")
    megatron_patch.apply(gradient="exact")
    with pytest.raises(PatchError, match=r"has been called with .*'exact'.*now with .*'filtered'"):
        megatron_patch.apply()
    model = make_model()
    megatron_patch.apply(model, gradient="exact")
    with pytest.raises(PatchError, match=r"is patched with .*'exact'.*call remove\(\) between"):
        megatron_patch.apply(model)
    megatron_patch.remove()
    megatron_patch.apply(model)


@check
def an_exception_leaves_the_model_usable() -> None:
    model, (hidden, labels) = make_model(), inputs()
    megatron_patch.apply(model, backend="torch")
    with pytest.raises(ValueError, match="targets"):
        head_loss(model, hidden, labels[:, 1:])
    head_loss(model, hidden, labels).sum().backward()
    with pytest.raises(ZeroDivisionError), megatron_patch.patched(make_model()):
        raise ZeroDivisionError


@check
def hooks_that_bring_the_weight_run_before_the_loss() -> None:
    # As DDP's, which gathers parameters late: the loss reads what the last hook left.
    model, (hidden, labels) = make_model(), inputs()
    megatron_patch.apply(model, backend="torch")
    weight = model.output_layer.weight
    right = weight.detach().clone()
    expected = head_loss(model, hidden, labels)

    calls = []

    def gather(*_: Any) -> None:
        calls.append(weight.data.copy_(right))

    model.output_layer.register_forward_pre_hook(gather)
    weight.data.zero_()
    # As a compiled module calls it.
    assert isinstance(model.output_layer.forward(hidden)[0], DeferredLogits)
    logits, _ = model.output_layer(hidden)
    assert torch.equal(model.compute_language_model_loss(labels, logits), expected)
    # Once: FSDP's would reduce the gradient as often.
    assert len(calls) == 1
    weight.data.zero_()
    assert torch.equal(logits + 0, type(model.output_layer).forward(model.output_layer, hidden)[0])
    assert len(calls) == 2


@check
def refusals() -> None:
    model = make_model()
    layer, config = model.output_layer, model.config

    class Other(type(layer)):
        pass

    te = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
    wrong: list[tuple[str, Any, dict[str, Any]]] = [
        ("drop --defer-embedding-wgrad", config, {"defer_embedding_wgrad_compute": True}),
        ("gtp_remat_size", config, {"gtp_remat_size": 2}),
        ("drop --cross-entropy-loss-fusion", config, te),
        ("disable_grad_reduce", layer, {"disable_grad_reduce": True}),
        ("is a .*Other, not Megatron's ColumnParallelLinear", layer, {"__class__": Other}),
        ("distillation", model, {"compute_language_model_loss": lambda *_: None}),
        ("forward of this output_layer is replaced", layer, {"forward": lambda *_: None}),
    ]
    for message, target, values in wrong:
        if "__class__" in values:
            target.__class__ = Other
        with (
            changed(target, **{k: v for k, v in values.items() if k != "__class__"}),
            pytest.raises(PatchError, match=message),
        ):
            megatron_patch.apply(model)
        if "__class__" in values:
            target.__class__ = Other.__mro__[1]
    layer.bias = torch.nn.Parameter(torch.zeros(CLASSES // 2))
    with pytest.raises(PatchError, match="has a bias, as T5's"):
        megatron_patch.apply(model)
    layer.bias = None
    with pytest.raises(PatchError, match="must be a module or a list"):
        megatron_patch.apply("model")
    with pytest.raises(PatchError, match="must be, or wrap, a Megatron LanguageModule, got Linear"):
        megatron_patch.apply(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match='use gradient="filtered" or "exact"'):
        megatron_patch.apply(model, gradient="in_forward")
    for name in ("vocab_over_pipeline", "quantize_once"):
        with pytest.raises(ValueError, match=f"{name} must be True or False, got 'no'"):
            megatron_patch.apply(model, **{name: "no"})
    with pytest.raises(ValueError, match="vocab_size must be an int of at least 1, got 'abc'"):
        megatron_patch.apply(model, vocab_size="abc")
    assert not vars(layer).keys() & {"forward", "megatron_patch"}
    assert megatron_patch.status().heads == ()


@check
def hooks_that_read_logits() -> None:
    model, (hidden, labels) = make_model(), inputs()

    def read(module: Any, args: Any, output: Any) -> None:
        output[0].sum()

    handle = model.output_layer.register_forward_hook(read)
    with pytest.raises(PatchError, match=r"forward hook .*read.* distillation"):
        megatron_patch.apply(model)
    handle.remove()
    megatron_patch.apply(model, backend="torch")
    model.output_layer.register_forward_hook(read)
    with pytest.raises(PatchError, match=r"forward hook .*read.* distillation"):
        head_loss(model, hidden, labels)


@check
def another_release() -> None:
    owner = type(make_model().output_layer)

    def forward(self: Any, input_: Any, weight: Any = None, *, more: Any = None) -> None: ...

    with (
        changed(owner, forward=forward),
        pytest.raises(
            PatchError,
            match=r"ColumnParallelLinear.forward must take \(self, input_, weight, "
            r"runtime_gather_output\), got \(self, input_, weight, more\) in megatron.core \d",
        ),
    ):
        megatron_patch.apply()
    assert megatron_patch.status().options is None
