"""What tests/test_megatron.py checks of one head, on ranks that share it. Each raises if not so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_jobs import CLASSES, HIDDEN, SEQUENCE, Setup, build, make_config, megatron
from torch import Tensor

import megatron_patch
from cce_dist.testing import check_gate, check_promise
from megatron_patch import PatchError
from megatron_patch.deferred import DeferredLogits

# Megatron's own loss is off by a rounding: of few tokens, how much is the luck of a CPU.
BATCH = 48
SETUP = Setup(tp=2)
Check = Callable[[], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    CHECKS[function.__name__] = function
    return function


def run_check(_: Any, name: str, checks: dict[str, Check] = CHECKS) -> None:
    with megatron(SETUP):
        try:
            checks[name]()
        finally:
            megatron_patch.remove()


def make_model(setup: Setup = SETUP) -> Any:
    return build(setup, make_config(setup))[0]


def inputs(setup: Setup = SETUP) -> tuple[Tensor, Tensor]:
    """A leaf: this rank's hidden [s or s / tp, b, h]; labels [b, s] of which some are no class."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
    labels = torch.randint(0, CLASSES, (BATCH, SEQUENCE), generator=generator)
    labels[:, ::4], labels[0, 1] = -100, CLASSES + 7
    if setup.sequence_parallel:
        hidden = hidden.chunk(2)[dist.get_rank()]
    return hidden.to(setup.dtype).clone().requires_grad_(), labels


def head_loss(model: Any, hidden: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """As GPTModel._postprocess calls both."""
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else None
    logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=None)
    if scale != 1:
        logits = logits * scale
    return model.compute_language_model_loss(labels, logits)


def whole(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor.detach().contiguous())
    return torch.cat(parts)


def dense(
    dtype: torch.dtype,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    upstream: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    classes: int = CLASSES,
) -> dict[str, Tensor]:
    """Loss [b, s] and gradients by all of hidden and weight, from all logits in `dtype`."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight[:classes].T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    ids = labels.T.where((labels.T >= 0) & (classes > labels.T), torch.tensor(-100))
    nll = torch.nn.functional.cross_entropy(
        (scale * logits).flatten(0, 1), ids.flatten(), ignore_index=-100, reduction="none"
    )
    loss = nll.view(ids.shape).T
    (loss * upstream.to(dtype)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}


def compare_with_golden(
    setup: Setup, scale: float = 1.0, classes: int = CLASSES, **options: Any
) -> None:
    """Ours beside Megatron's own, both beside float64, with a mask as its upstream gradient."""
    model = make_model(setup)
    weight = model.shared_embedding_or_output_weight() if setup.tied else model.output_layer.weight
    found: list[dict[str, Tensor]] = []
    rank, labels = dist.get_rank(), inputs(setup)[1]
    mask = ((labels >= 0) & (labels < classes)).float()
    for ours in (False, True):
        hidden, _ = inputs(setup)
        if ours:
            megatron_patch.apply(model, backend="torch", **options)
        loss = head_loss(model, hidden, labels, scale)
        assert loss.dtype == torch.float32 and loss.is_contiguous() and loss.shape == labels.shape
        assert bool(loss.isfinite().all())
        weight.grad = None
        (loss * mask).sum().backward()
        assert hidden.grad is not None
        found.append({"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad.clone()})
    given = (whole(hidden) if setup.sequence_parallel else hidden, whole(weight), labels, mask)
    how = {"scale": scale, "softcap": options.get("softcap"), "classes": classes}
    expected, fp32 = (dense(dtype, *given, **how) for dtype in (torch.float64, torch.float32))
    for result in (expected, fp32):
        if setup.sequence_parallel:
            result["hidden"] = result["hidden"].chunk(2)[rank]
        result["weight"] = result["weight"].chunk(2)[rank]
    theirs, ours = found
    counts = mask.bool()
    assert not ours["loss"][~counts].any()
    if classes < CLASSES or options.get("softcap") is not None:
        theirs = fp32  # Megatron knows neither
    losses = [x["loss"][counts] for x in (ours, expected, theirs, fp32)]
    check_promise("loss", *losses[:3], torch.float32)
    check_gate("loss", losses[0], losses[1], losses[3])
    for name in ("hidden", "weight"):
        check_promise(name, ours[name], expected[name], theirs[name], hidden.dtype, noise=2e-8)


for _name, _given in {
    "loss": {},
    "loss_sequence_parallel": {"setup": Setup(tp=2, sequence_parallel=True)},
    "loss_tied": {"setup": Setup(tp=2, tied=True)},
    "loss_bf16": {"setup": Setup(tp=2, bf16=True)},
    "loss_bf16_sequence_parallel": {"setup": Setup(tp=2, bf16=True, sequence_parallel=True)},
    "loss_exact": {"gradient": "exact"},
    "loss_scaled_as_mup": {"scale": 0.25},
    "loss_softcap": {"softcap": 2.0},
    "loss_without_padding": {"vocab_size": 90, "classes": 90},
}.items():
    CHECKS[_name] = lambda given=_given: compare_with_golden(**{"setup": SETUP, **given})


@check
def labels_that_are_no_class_give_nothing() -> None:
    model = make_model()
    megatron_patch.apply(model, backend="torch")
    hidden, labels = inputs()
    labels = labels.clone().fill_(-100)
    loss = head_loss(model, hidden, labels)
    loss.sum().backward()
    assert hidden.grad is not None
    assert not loss.any() and not hidden.grad.any() and not model.output_layer.weight.grad.any()


@check
def logits_for_whoever_asks() -> None:
    model = make_model()
    layer, (hidden, _) = model.output_layer, inputs()
    expected = layer(hidden)[0]
    gathered = layer(hidden, runtime_gather_output=True)[0]
    megatron_patch.apply(model, backend="torch")
    deferred = layer(hidden)[0]
    assert isinstance(deferred, DeferredLogits)
    assert torch.equal(deferred.transpose(0, 1), expected.transpose(0, 1))
    assert deferred.shape == expected.shape and len(deferred) == len(expected)
    assert torch.equal(deferred[1:, 0], expected[1:, 0])
    assert torch.equal(torch.softmax(layer(hidden)[0], -1), torch.softmax(expected, -1))
    assert torch.equal((layer(hidden)[0] * 0.5 * 0.5) + 1, expected * 0.25 + 1)
    with torch.no_grad():
        assert torch.equal(layer(hidden, runtime_gather_output=True)[0], gathered)
    # In training as well, and differentiable.
    assert torch.equal(layer(hidden, runtime_gather_output=True)[0].float(), gathered)
    layer(hidden)[0].sum().backward()
    assert hidden.grad is not None and hidden.grad.any()


@check
def largest_logits_without_the_others() -> None:
    # As the metric of multi-token prediction asks for them, from 0.19 on.
    for setup in (SETUP, Setup(tp=2, sequence_parallel=True)):
        model, (hidden, _) = make_model(setup), inputs(setup)
        layer = model.output_layer
        expected = layer(hidden)[0].detach() * 0.5
        megatron_patch.apply(model)
        with torch.no_grad():
            deferred = layer(hidden)[0] * 0.5
            assert deferred.size(-1) == CLASSES // 2 and deferred.shape == expected.shape
            values, indices = deferred.max(dim=-1)
            torch.testing.assert_close(values, expected.max(dim=-1).values)
            assert torch.equal(indices, expected.argmax(-1))
            assert torch.equal(torch.argmax(deferred, dim=-1), indices)
            assert deferred._logits is None
            assert torch.equal(deferred.max(), expected.max())
        assert (layer(hidden)[0] * 0.5).max(dim=-1).values.requires_grad


@check
def gathered_logits_have_the_right_loss() -> None:
    # Megatron's own is too large by log(tp) here.
    model, (hidden, labels) = make_model(), inputs()
    megatron_patch.apply(model, backend="torch")
    expected = head_loss(model, hidden, labels)
    logits, _ = model.output_layer(hidden, runtime_gather_output=True)
    assert torch.equal(model.compute_language_model_loss(labels, logits), expected)


@check
def evaluation_and_determinism() -> None:
    model, (hidden, labels) = make_model(), inputs()
    megatron_patch.apply(model, backend="torch")
    trained = head_loss(model, hidden, labels)
    model.eval()
    with torch.no_grad():
        assert torch.equal(head_loss(model, hidden, labels), trained.detach())
    both = whole(trained.detach())
    assert torch.equal(both[:BATCH], both[BATCH:])


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
def every_gradient_of_a_model_in_float64() -> None:
    """Of the whole model, as of the same one in float64 with a dense loss of gathered logits."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    labels = inputs()[1]
    tokens = labels.clamp(0, CLASSES - 1).roll(1, 1)
    position = torch.arange(SEQUENCE).expand_as(tokens)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    for tied in (False, True):
        model, exact = (make_model(Setup(tp=2, tied=tied)) for _ in range(2))
        exact.double()
        logits = gather(exact(tokens, position, mask))
        ids = labels.where((labels >= 0) & (labels < CLASSES), torch.tensor(-100))
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids.flatten(), ignore_index=-100, reduction="sum"
        )
        expected.backward()
        with megatron_patch.patched(model, gradient="exact"):
            loss = model(tokens, position, mask, labels=labels).sum()
        loss.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        theirs = dict(exact.named_parameters())
        for name, parameter in model.named_parameters():
            off = (parameter.grad - theirs[name].grad).norm() / theirs[name].grad.norm()
            assert float(off) < 2e-6, (name, float(off))


@check
def one_model_of_two() -> None:
    mine, theirs = make_model(), make_model()
    with megatron_patch.patched(mine, gradient="exact"):
        assert isinstance(mine.output_layer(inputs()[0])[0], DeferredLogits)
        assert isinstance(theirs.output_layer(inputs()[0])[0], Tensor)
    assert isinstance(mine.output_layer(inputs()[0])[0], Tensor)
    assert megatron_patch.status() == megatron_patch.Status(None, (), None, None)


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


@contextmanager
def changed(target: Any, **values: Any) -> Iterator[None]:
    missing = object()
    before = {name: vars(target).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(target, name) if value is missing else setattr(target, name, value)


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
    with pytest.raises(ValueError, match="gradient must be one of 'filtered', 'exact'"):
        megatron_patch.apply(model, gradient="in_forward")
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
            r"runtime_gather_output\), found \(self, input_, weight, more\) in megatron.core \d",
        ),
    ):
        megatron_patch.apply()
    assert megatron_patch.status().options is None
