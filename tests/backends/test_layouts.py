"""Strides of an argument change no result, whatever the function and the argument."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import (
    Filter,
    TeacherLogprobs,
    TokenLogprobs,
    largest_logits,
    linear_cross_entropy,
    linear_distillation,
    listed_distillation,
    quantize_weight,
    teacher_topk,
    token_logprobs,
)
from cce_dist.rl import grpo_loss
from cce_dist.testing import CPU_PLACES, TRITON_PLACES, Place, grid

Arguments = dict[str, Tensor]
V, D, D_TEACHER, K = 300, 48, 32, 3
FILTER = Filter(keep=0.01)


def loss(x: Arguments, backend: Any, *named: str, **options: Any) -> Any:
    named_tensors = {name: x[name] for name in named}
    if options.get("gradient") != "exact":
        options["filter"] = FILTER
    options |= {"backend": backend, **named_tensors}
    return linear_cross_entropy(x["hidden"], x["weight"], x["targets"], **options)


def in_forward(x: Arguments, backend: Any) -> Any:
    return loss(x, backend, "bias", "token_weight", gradient="in_forward")


def exact(x: Arguments, backend: Any) -> Any:
    named = ("bias", "token_weight", "class_weight", "grad_weight_into")
    return loss(x, backend, *named, gradient="exact", reduction="none", stats=("lse",))


def kept(x: Arguments, backend: Any) -> Any:
    return loss(x, backend, "bias", gradient="exact", keep_logits=True)


def screened(x: Arguments, backend: Any) -> Any:
    return loss(x, backend, logits="screened", quantized_weight=quantize_weight(x["weight"]))


def logprobs(x: Arguments, backend: Any) -> Any:
    named = {name: x[name] for name in ("mask", "temperature", "candidates", "bias")}
    return token_logprobs(x["hidden"], x["weight"], x["targets"], backend=backend, **named)  # pyright: ignore


def distillation(x: Arguments, backend: Any, **options: Any) -> Any:
    named = {name: x[name] for name in ("bias", "teacher_bias", "token_weight")}
    teacher = (x["teacher_hidden"], x["teacher_weight"])
    options |= {"alpha": 0.3, "backend": backend, "filter": FILTER, **named}
    return linear_distillation(x["hidden"], x["weight"], *teacher, x["targets"], **options)


def screened_teacher(x: Arguments, backend: Any) -> Any:
    return distillation(x, backend, logits="screened")


def jensen_shannon(x: Arguments, backend: Any) -> Any:
    return distillation(x, backend, divergence="jsd")


def listed(x: Arguments, backend: Any) -> Any:
    teacher = TeacherLogprobs(x["ids"], x["teacher_logprobs"])
    named = {"bias": x["bias"], "token_weight": x["token_weight"]}
    return listed_distillation(x["hidden"], x["weight"], teacher, backend=backend, **named)  # pyright: ignore


def topk(x: Arguments, backend: Any) -> Any:
    return teacher_topk(x["hidden"], x["weight"], K, bias=x["bias"], backend=backend)


def largest(x: Arguments, backend: Any) -> Any:
    return largest_logits(x["hidden"], x["weight"], bias=x["bias"], backend=backend)


def grpo(x: Arguments, backend: Any) -> Any:
    del backend
    now = TokenLogprobs(x["now"], None)
    named = {"mask": x["mask"], "reference": x["reference"]}
    return grpo_loss(now, x["before"], x["advantages"], kl_weight=0.1, **named)  # pyright: ignore


FUNCTIONS = (
    *(loss, in_forward, exact, kept, screened, logprobs, listed, topk, largest, grpo),
    *(distillation, screened_teacher, jensen_shannon),
)
IN_16_BITS = (screened, screened_teacher)


def arguments(place: Place, function: Any, shape: tuple[int, ...]) -> Arguments:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def ids(*size: int) -> Tensor:
        return torch.randint(V, size, generator=generator)

    def positive() -> Tensor:
        return 0.5 + torch.rand(shape, generator=generator)

    made = {
        "hidden": normal(*shape, D),
        "weight": 0.3 * normal(V, D),
        "targets": ids(*shape),
        "bias": normal(V),
        "token_weight": positive(),
        "class_weight": normal(V).abs(),
        "grad_weight_into": torch.zeros(V, D),
        "mask": positive() < 1.2,
        "temperature": positive(),
        "candidates": ids(*shape, K),
        "teacher_hidden": normal(*shape, D_TEACHER),
        "teacher_weight": 0.3 * normal(V, D_TEACHER),
        "teacher_bias": normal(V),
        "ids": (ids(*shape, 1) + torch.arange(K)) % V,
        "teacher_logprobs": normal(*shape, K + 1).log_softmax(-1)[..., :K],
        **{name: -positive() for name in ("now", "before", "reference", "advantages")},
    }
    if function in IN_16_BITS:
        heads = ("hidden", "weight", "teacher_hidden", "teacher_weight")
        made |= {name: made[name].half() for name in heads}
    return {name: value.to(place.device) for name, value in made.items()}


def wider(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x)], -1)[..., : x.shape[-1]]


def unaligned(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def apart(x: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(x), x], -1)[..., 1]


def every_second(x: Tensor) -> Tensor:
    return torch.stack([torch.ones_like(x), x], 1).flatten(0, 1)[1::2]


def dims_reversed(x: Tensor) -> Tensor:
    back = tuple(range(x.dim()))[::-1]
    return x.permute(back).contiguous().permute(back)


LAYOUTS = (wider, unaligned, apart, every_second, dims_reversed)


def results(function: Any, x: Arguments, place: Place, lay: Any) -> Iterator[Tensor]:
    trainable = ("hidden", "weight", "bias", "now")
    leaves = {name: x[name].detach().requires_grad_() for name in trainable}
    x["grad_weight_into"].zero_()
    outputs = function({**x, **leaves}, place.backend)
    found = [y for y in (outputs if isinstance(outputs, tuple) else [outputs]) if y is not None]
    yield from (y.detach() for y in found)
    if found[0].requires_grad:
        ramp = torch.linspace(-1, 2, found[0].numel(), device=found[0].device)
        upstream = ramp.view(found[0].shape).to(found[0].dtype)
        found[0].backward(lay(upstream) if upstream.dim() else upstream)
        yield from (leaf.grad for leaf in leaves.values() if leaf.grad is not None)
        yield x["grad_weight_into"]


# A call of fewer than 16 tokens takes a view of one row.
SHAPES = ((15,), (2, 20))


@functools.cache
def expected(place: Place, function: Any, shape: tuple[int, ...]) -> list[Tensor]:
    plain = arguments(place, function, shape)
    return [y.clone() for y in results(function, plain, place, lambda y: y)]


@pytest.mark.parametrize(
    **grid(
        places=TRITON_PLACES,  # torch's operators read strides themselves
        function={function.__name__: function for function in FUNCTIONS},
        layout={layout.__name__: layout for layout in LAYOUTS},
    )
)
def test_strides_change_no_result(place: Place, function: Any, layout: Any) -> None:
    for shape in SHAPES:
        laid = {n: layout(x) for n, x in arguments(place, function, shape).items()}
        for _ in range(3 if shape == (15,) else 1):  # the third call of a kind is played
            ours = list(results(function, laid, place, layout))
            torch.testing.assert_close(ours, expected(place, function, shape), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("place", CPU_PLACES, ids=str)
def test_views_that_torch_negates(place: Place) -> None:
    """Their memory, which kernels read, has other signs than their values."""
    plain = arguments(place, exact, (20,))
    for name in ("hidden", "weight", "bias", "token_weight", "class_weight", "grad_weight_into"):
        negated = {**plain, name: torch._neg_view(-plain[name])}
        for tensors in (plain, plain, negated):  # its kind must not be that of a recording
            try:
                found = list(results(exact, tensors, place, lambda y: y))
            except ValueError as error:
                assert tensors is negated and f"{name}.resolve_neg()" in str(error)
            else:
                torch.testing.assert_close(found, expected(place, exact, (20,)))
