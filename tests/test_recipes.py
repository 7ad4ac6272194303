"""The recipes of docs/parallelism.md run as they stand there."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cce_dist import linear_cross_entropy, token_logprobs
from cce_dist.testing import shared_pool

DOCS = Path(__file__).parent.parent / "docs" / "parallelism.md"
TOKENS, CLASSES, DIM = 32, 60, 8


def recipes() -> list[str]:
    text = DOCS.read_text(encoding="utf8")
    section = text[text.index("## Recipes") : text.index("## DTensor")]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


class Model(nn.Module):
    """On each data-parallel rank, with tokens of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(CLASSES, DIM))

    def forward(self, inputs: Tensor, ids: Tensor) -> Any:
        return linear_cross_entropy(inputs, self.weight, ids)


def run(group: Any, recipe: str) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=generator).requires_grad_()
    whole = torch.randn(CLASSES, DIM, generator=generator)
    head = nn.Linear(DIM, CLASSES // size, bias=False)
    with torch.no_grad():
        head.weight.copy_(whole.chunk(size)[rank])
    targets = torch.randint(CLASSES, (TOKENS,), generator=generator)
    torch.manual_seed(0)
    model = Model()
    names: dict[str, Any] = {
        "torch": torch,
        "linear_cross_entropy": linear_cross_entropy,
        "token_logprobs": token_logprobs,
        "DistributedDataParallel": DistributedDataParallel,
        "nullcontext": nullcontext,
        "checkpoint": checkpoint,
        "tp_group": group,
        "dp_group": group,
        "head": head,
        "norm": nn.Identity(),
        "model": model,
        "hidden": hidden,
        "targets": targets,
        "ids": targets,
        "microbatches": [(torch.randn(8, DIM), targets[:8] + 0) for _ in range(3)],
        "response": torch.arange(TOKENS) >= 5,
        "old_logprobs": torch.full((TOKENS,), -4.0),
        "advantage": torch.randn(TOKENS, generator=generator),
    }
    exec(recipe, names)
    if "replica" in names:
        assert model.weight.grad is not None and bool(model.weight.grad.abs().sum() > 0)
        return
    loss = names["loss"]
    loss.backward()
    assert head.weight.grad is not None and bool(head.weight.grad.abs().sum() > 0)
    if "token_logprobs" not in recipe:
        dense = nn.functional.cross_entropy(hidden.detach() @ whole.T, targets)
        exact = "autocast" not in recipe
        torch.testing.assert_close(loss.detach(), dense, rtol=1e-5 if exact else 2e-2, atol=1e-5)


@pytest.mark.parametrize("number", range(5))
def test_recipe(number: int) -> None:
    assert len(recipes()) == 5
    shared_pool().run(2, run, recipes()[number])
