"""Tensors and options of a compiled loss, and a fixture that tests of the compiler import."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._dynamo import trace_rules

from cce_dist import Filter

WARNING = ".torch.jit.script_method"
# An odd number of tokens: parts of one allocation are aligned only if care is taken.
BATCH, LENGTH, CLASSES, DIM = 3, 67, 600, 16
SOME = Filter(keep=0.01)


@pytest.fixture(autouse=True)
def poison() -> None:
    """No poison where this is imported: the compiler knows torch.empty by its identity. What it has
    learnt of it in other tests is forgotten too."""
    trace_rules.clear_lru_cache()
    torch._dynamo.reset()


def made(
    dtype: torch.dtype, device: str = "cpu", ignored: float = 0.2, batch: int = BATCH
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()

    targets = torch.randint(CLASSES, (batch, LENGTH), generator=generator)
    targets[torch.rand(batch, LENGTH, generator=generator) < ignored] = -100
    token_weight = torch.rand(batch, LENGTH, generator=generator).to(device).requires_grad_()
    return {
        "hidden": randn(batch, LENGTH, DIM),
        "weight": randn(CLASSES, DIM),
        "bias": randn(CLASSES),
        "targets": targets.to(device),
        "token_weight": token_weight,
    }
