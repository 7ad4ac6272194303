"""A model beside itself without the patch: loss, gradients, outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist.integrations import transformers as integration
from tests.integrations.architectures import batch


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def step(model: Any, **inputs: Any) -> tuple[Any, dict[str, Tensor]]:
    """Runs forward and backward; returns the output and copies of all gradients."""
    model.zero_grad()
    torch.manual_seed(1)
    output = model(**(inputs or batch()))
    output.loss.backward()
    return output, {name: grad.clone() for name, grad in gradients(model).items()}


def check_same(
    model: Any, run: Callable[[Any], Any] = step, atol: float = 1e-6, **options: Any
) -> Any:
    """Checks loss and gradients of a model before and after the patch; returns both outputs."""
    before, expected = run(model)
    assert integration.patch(model, **options) is model
    after, found = run(model)
    torch.testing.assert_close(after.loss, before.loss, atol=atol, rtol=1e-6)
    assert found.keys() == expected.keys() and found
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=atol, rtol=1e-4, msg=name)
    return before, after


def run_loss(model: nn.Module, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    """Returns a loss of the model, and every gradient."""
    model.zero_grad()
    value = loss(model)
    value.backward()
    grads = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    return [value.detach(), *grads]


def check_loss(model: Any, loss: Callable[[Any], Tensor]) -> None:
    """Checks a loss of a model's output and every gradient, before and after the patch."""
    expected = run_loss(model, loss)
    integration.patch(model)
    result = run_loss(model, loss)
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-5)
    integration.remove(model)
