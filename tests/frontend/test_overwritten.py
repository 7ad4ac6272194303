"""A caller's memory that is filled anew between forward and backward, as a loader's buffers are.

The gradients are those of the forward, or autograd refuses them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import (
    TeacherLogprobs,
    TokenSupport,
    linear_cross_entropy,
    linear_distillation,
    listed_distillation,
    token_logprobs,
)

TOKENS, CLASSES, DIM = 7, 30, 8


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "hidden": (TOKENS, DIM),
        "weight": (CLASSES, DIM),
        "bias": (CLASSES,),
        "teacher_hidden": (TOKENS, 5),
        "teacher_weight": (CLASSES, 5),
    }
    named = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    ids = torch.stack([torch.randperm(CLASSES, generator=generator)[:4] for _ in range(TOKENS)])
    return named | {
        "targets": torch.randint(CLASSES, (TOKENS,), generator=generator),
        "token_weight": torch.rand(TOKENS, generator=generator),
        "class_weight": torch.rand(CLASSES, generator=generator),
        "mask": torch.ones(TOKENS, dtype=torch.bool),
        "temperature": torch.rand(TOKENS, generator=generator) + 0.5,
        "ids": ids,
        "logprobs": torch.full(ids.shape, 0.2).log(),
    }


def names(function: Callable[..., Any], *others: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    return function, ("hidden", "weight", "bias", *others)


def of_support(ids: Tensor, **rest: Any) -> Tensor:
    offsets = torch.arange(TOKENS + 1) * ids.shape[1]
    return -token_logprobs(**rest, support=TokenSupport(offsets, ids.reshape(-1))).logprobs.sum()


CALLS = {
    "loss": names(linear_cross_entropy, "targets", "token_weight", "class_weight"),
    "in_forward": names(
        lambda **given: linear_cross_entropy(**given, gradient="in_forward"),
        *("targets", "token_weight", "class_weight"),
    ),
    "logprobs": names(
        lambda **given: token_logprobs(**given).logprobs.sum(), "targets", "mask", "temperature"
    ),
    "candidates": names(
        lambda ids, **given: token_logprobs(**given, candidates=ids).candidates.sum(),
        *("targets", "ids"),
    ),
    "support": names(of_support, "targets", "ids"),
    "distillation": names(
        lambda **given: linear_distillation(**given, alpha=0.5),
        *("targets", "token_weight", "teacher_hidden", "teacher_weight"),
    ),
    "listed": names(
        lambda ids, logprobs, **given: listed_distillation(
            teacher=TeacherLogprobs(ids, logprobs), **given, alpha=0.5
        ),
        *("targets", "token_weight", "ids", "logprobs"),
    ),
}


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, (_, named) in CALLS.items() for name in named]
)
def test_gradients_are_the_forwards_or_refused(call: str, name: str) -> None:
    function, named = CALLS[call]

    def run(overwrite: bool) -> list[Tensor]:
        inputs = {each: x for each, x in tensors().items() if each in named}
        leaves = [inputs[each].requires_grad_() for each in ("hidden", "weight", "bias")]
        loss = function(**inputs)
        if overwrite:
            with torch.no_grad():
                # Each value is valid.
                inputs[name].copy_(inputs[name].flip(0))
                if name == "mask":
                    inputs[name][::2] = False
        return list(torch.autograd.grad(loss, leaves))

    expected = run(overwrite=False)
    try:
        grads = run(overwrite=True)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return
    for grad, other in zip(grads, expected, strict=True):
        assert torch.equal(grad, other)
