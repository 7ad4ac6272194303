"""The loss under whatever looks at its operators: checkpointing, fake tensors, tracers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from cce_dist import (
    Filter,
    LossOutput,
    Screen,
    StepQuantizer,
    VocabShard,
    largest_logits,
    linear_cross_entropy,
    quantize_weight,
    token_logprobs,
)
from cce_dist.algorithm import sharded
from cce_dist.core.allocations import track_allocations
from cce_dist.ranks.mpi import MPIGroup
from cce_dist.testing import (
    CPU_PLACES,
    PLACES,
    TORCH_CPU,
    Place,
    grid,
    shared_pool,
)
from tests.support.grids import value_grid

TOKENS, CLASSES, DIM = 130, 600, 16
SOME = Filter(keep=0.01)
OPTIONS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": SOME},
    "exact": {"gradient": "exact"},
    "in_forward": {"gradient": "in_forward", "filter": SOME},
    "terms": {"gradient": "in_forward", "z_loss": 0.1, "label_smoothing": 0.1},
    "softcap": {"filter": SOME, "softcap": 5.0, "stats": ("entropy", "correct", "tail_mass")},
    "screened": {"filter": SOME, "logits": "screened", "screen": Screen(max_kept=1.0)},
}
SAVE, AGAIN = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE


class Policy:
    """A policy of selective checkpointing; it lists the operators of the forward.

    PyTorch before 2.13 asks it again while the region is recomputed, and must hear the same.
    """

    def __init__(self, saves: Callable[[Any, int], bool]) -> None:
        self.saves = saves
        self.seen: list[Any] = []
        self.recomputed: list[Any] = []

    def __call__(self, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        operators = self.recomputed if ctx.is_recompute else self.seen
        operators.append(op)
        return SAVE if self.saves(op, operators.count(op)) else AGAIN


MM = torch.ops.aten.mm.default
POLICIES: dict[str, Callable[[Any, int], bool]] = {
    "products": lambda op, count: op is MM,
    # As torchtitan's: every second product.
    "some_products": lambda op, count: op is MM and count % 2 == 1,
    # Whatever can be kept: what writes into its arguments cannot.
    "everything": lambda op, count: not op._schema.is_mutable,
}


def tensors_for(place: Place, options: dict[str, Any], device: str | None = None) -> list[Tensor]:
    """Hidden states of fewer dims, a product, a head, targets."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32
    if "logits" in options:
        dtype = torch.float16 if place.interprets else torch.bfloat16
    shapes = ((TOKENS, DIM), (DIM, DIM), (CLASSES, DIM))
    floats = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    targets = torch.randint(CLASSES, (TOKENS,), generator=generator)
    targets[::7] = -100
    return [x.to(device or place.device) for x in (*floats, targets)]


def region(options: dict[str, Any], hidden: Tensor, square: Tensor, *head: Tensor) -> Tensor:
    """What is checkpointed: one product of the caller's, an activation, the loss."""
    result = linear_cross_entropy((hidden @ square).tanh(), *head, **options)
    if isinstance(result, Tensor):
        return result
    return result.loss + (0 if result.entropy is None else result.entropy.sum())


def gradients(run: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in tensors]
    loss = run(*leaves)
    loss.backward()
    found = [loss.detach(), *(x.grad for x in leaves if x.requires_grad)]
    assert all(x is not None for x in found)
    return found  # pyright: ignore[reportReturnType]


# -- activation checkpointing -------------------------------------------------------------------


@pytest.mark.parametrize(**value_grid(options=OPTIONS, saves=POLICIES))
def test_selective_checkpointing(
    place: Place, options: dict[str, Any], saves: Callable[[Any, int], bool]
) -> None:
    tensors, policy = tensors_for(place, options), Policy(saves)
    run = functools.partial(region, {**options, **place.options})
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    again = functools.partial(checkpoint, run, use_reentrant=False, context_fn=contexts)
    for plain, kept in zip(gradients(run, tensors), gradients(again, tensors), strict=True):
        assert torch.equal(plain, kept)
    # Neither kept nor counted: none of the loss's.
    assert policy.seen.count(MM) == 1


def selective_on(group: Any, options: dict[str, Any]) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensors = tensors_for(TORCH_CPU, options)
    tensors[2] = tensors[2].chunk(size)[rank]
    run = functools.partial(region, {**options, "group": group})
    contexts = functools.partial(
        create_selective_checkpoint_contexts, Policy(POLICIES["everything"])
    )
    again = functools.partial(checkpoint, run, use_reentrant=False, context_fn=contexts)
    for plain, kept in zip(gradients(run, tensors), gradients(again, tensors), strict=True):
        assert torch.equal(plain, kept)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_selective_checkpointing_over_ranks(options: dict[str, Any]) -> None:
    shared_pool().run(2, selective_on, options)


def test_selective_checkpointing_leaves_other_modes_alone() -> None:
    """They see the loss's operators, and after an error each is where it was."""
    tensors = tensors_for(TORCH_CPU, {})
    first, _ = create_selective_checkpoint_contexts([MM])
    with first, track_allocations() as allocations, torch.no_grad():
        stack = _get_current_dispatch_mode_stack()
        region({}, *tensors)
        seen = allocations.largest_numel
        assert _get_current_dispatch_mode_stack() == stack
        with pytest.raises(ValueError, match="targets must lie in"):
            region({}, *tensors[:3], tensors[3] + CLASSES)
        assert _get_current_dispatch_mode_stack() == stack
    with track_allocations() as alone, torch.no_grad():
        region({}, *tensors)
    assert seen == alone.largest_numel


@pytest.mark.parametrize(
    **value_grid(
        places=CPU_PLACES, options=OPTIONS, early_stop={"early_stop": True, "to_the_end": False}
    )
)
def test_full_checkpointing_computes_twice(
    place: Place,
    options: dict[str, Any],
    early_stop: bool,
    monkeypatch: pytest.MonkeyPatch,
    prepared: None,
) -> None:
    """And not again for what the loss differentiates within itself."""
    tensors, calls = tensors_for(place, options), 0
    forward = sharded.forward

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(sharded, "forward", counting)
    run = functools.partial(region, {**options, **place.options})
    plain = gradients(run, tensors)
    once, calls = calls, 0
    for reentrant in (False, True):
        again = functools.partial(checkpoint, run, use_reentrant=reentrant)
        with set_checkpoint_early_stop(early_stop):
            for one, other in zip(plain, gradients(again, tensors), strict=True):
                assert torch.equal(one, other)
        assert calls == 2 * once
        calls = 0


@pytest.mark.parametrize(**grid(places=CPU_PLACES, options=OPTIONS))
def test_offloading_of_saved_tensors(place: Place, options: dict[str, Any]) -> None:
    tensors = tensors_for(place, options)
    run = functools.partial(region, {**options, **place.options})
    plain = gradients(run, tensors)
    with save_on_cpu():
        offloaded = gradients(run, tensors)
    for one, other in zip(plain, offloaded, strict=True):
        assert torch.equal(one, other)


# -- fake tensors -------------------------------------------------------------------------------

EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments", "screened", "sum_p2")
CALLS: dict[str, dict[str, Any]] = {
    **{name: OPTIONS[name] for name in ("filtered", "exact", "in_forward", "screened")},
    "stats": {"stats": EVERY_STAT, "filter": SOME, "z_loss": 0.1},
    "none": {"reduction": "none", "shift": 2, "gradient": "exact"},
    "more": {"bias": True, "token_weight": True, "class_weight": True, "label_smoothing": 0.1},
    "main_grad": {"grad_weight_into": True},
    "quantizer": {**OPTIONS["screened"], "quantized_weight": StepQuantizer},
    "padded": {"vocab_shard": VocabShard(0, CLASSES, CLASSES - 7)},
    "check_ranks": {"check_ranks": True},
}


def described(tensor: Tensor | None) -> Any:
    if tensor is None:
        return None
    return (list(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride())


def outcome(place: Place, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What a call and its backward give, by shapes, dtypes, devices."""
    dtype = torch.float32
    if "logits" in options:
        dtype = torch.float16 if place.interprets else torch.bfloat16
    how: dict[str, Any] = {"device": place.device}
    hidden = torch.randn(3, 50, DIM, dtype=dtype, requires_grad=True, **how)
    weight = torch.randn(CLASSES, DIM, dtype=dtype, requires_grad=True, **how)
    given: dict[str, Any] = {**options, **place.options, **more}
    shapes = {"bias": (CLASSES,), "token_weight": (3, 50), "class_weight": (CLASSES,)}
    for name in options.keys() & shapes.keys():
        wants = name == "bias"
        given[name] = torch.ones(shapes[name], requires_grad=wants, **how)
    if "grad_weight_into" in options:
        given["grad_weight_into"] = torch.zeros(CLASSES, DIM, **how)
    if "quantized_weight" in options:
        given["quantized_weight"] = options["quantized_weight"]()
    targets = torch.zeros(3, 50, dtype=torch.int64, **how)
    result = linear_cross_entropy(hidden, weight, targets, **given)
    result = result if isinstance(result, LossOutput) else LossOutput(result)
    result.loss.sum().backward()
    moments = result.logit_moments
    found: dict[str, Any] = {**result._asdict(), "logit_moments": None}
    found |= {} if moments is None else moments._asdict()
    found |= {"grad_hidden": hidden.grad, "grad_weight": weight.grad}
    if "bias" in options:
        found["grad_bias"] = given["bias"].grad
    return {name: described(tensor) for name, tensor in found.items()}


@pytest.mark.parametrize(**grid(places=PLACES, options=CALLS))
def test_fake_tensors(place: Place, options: dict[str, Any]) -> None:
    expected = outcome(place, options)
    with FakeTensorMode():
        assert outcome(place, options) == expected


@pytest.mark.parametrize("keep", [None, True, False])
def test_fake_tensors_keep_no_logits(keep: bool | None) -> None:
    options = {"gradient": "exact"}
    expected = outcome(TORCH_CPU, options)
    with FakeTensorMode():
        assert outcome(TORCH_CPU, options, keep_logits=keep) == expected


def on_fake_ranks(group: Any) -> None:
    """By one rank alone: nothing is said to the others. As a plain call's, and a DTensor's."""
    size = dist.get_world_size(group)
    if dist.get_rank(group) != 0:
        return
    with FakeTensorMode():
        hidden = torch.randn(8 // size, DIM, requires_grad=True)
        weight = torch.randn(300, DIM, requires_grad=True)
        targets = torch.zeros(8, dtype=torch.int64)
        how: dict[str, Any] = {"group": group, "sequence_parallel": True, "reduction": "none"}
        loss = linear_cross_entropy(hidden, weight, targets, **how)
        assert isinstance(loss, Tensor) and loss.shape == (8,)
        loss.sum().backward()
        assert hidden.grad is not None and hidden.grad.shape == hidden.shape
        assert weight.grad is not None and weight.grad.shape == weight.shape


def test_fake_tensors_over_ranks() -> None:
    shared_pool().run(2, on_fake_ranks)


def test_fake_tensors_of_other_functions() -> None:
    with FakeTensorMode():
        hidden, weight = torch.randn(2, 5, DIM), torch.randn(CLASSES, DIM)
        targets = torch.zeros(2, 5, dtype=torch.int64)
        found = token_logprobs(hidden, weight, targets, entropy=True, shift=1)
        assert found.logprobs.shape == (2, 4)
        assert found.entropy is not None and found.entropy.shape == (2, 4)
        largest = largest_logits(hidden, weight)
        assert largest.value.shape == largest.index.shape == (2, 5)
        assert largest.value.dtype == torch.float32 and largest.index.dtype == torch.int64
        with pytest.raises(ValueError, match="weight must hold values, got a fake tensor"):
            quantize_weight(weight.bfloat16())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "shape": ({"vocab_shard": VocabShard(0, 10, 10)}, "weight must have vocab_shard's 10 rows"),
    "mode": ({"gradient": "in_forward", "reduction": "none"}, "reduction"),
    "mpi": (
        {"group": object.__new__(MPIGroup)},
        "ProcessGroup .* of fake tensors, got an MPIGroup",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED)
def test_fake_tensors_are_refused_what_others_are(options: dict[str, Any], message: str) -> None:
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        outcome(TORCH_CPU, options)


# -- tracers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize(**grid(places=CPU_PLACES, name=("filtered", "exact", "terms")))
def test_make_fx(place: Place, name: str, mode: str) -> None:
    """The graph has the loss's operators, so that it computes of other inputs what a call does."""

    def step(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
        loss = linear_cross_entropy(*leaves, targets, **OPTIONS[name], **place.options)
        assert isinstance(loss, Tensor)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    hidden, _, weight, targets = tensors_for(place, {})
    graph = make_fx(step, tracing_mode=mode)(hidden, weight, targets)
    others = (2 * hidden, weight.flip(0), targets.roll(1))
    for found, expected in zip(graph(*others), step(*others), strict=True):
        torch.testing.assert_close(found, expected)
