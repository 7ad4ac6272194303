"""A recipe's text, its tensors, and the reference's loss of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cce_dist.reference import Reference, linear_cross_entropy_reference

DOCS = Path(__file__).parents[2] / "docs"
BATCH, LENGTH, CLASSES, DIM = 8, 12, 60, 8
CAPPED: dict[str, Any] = {"softcap": 2.0, "logit_scale": 1.7}
# With every one but the first the head has a bias.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {},
    "capped": CAPPED,
    "shifted": {**CAPPED, "shift": 1},
}


def section(page: str, title: str) -> str:
    text = (DOCS / page).read_text(encoding="utf8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def recipes(page: str, title: str) -> list[str]:
    """The blocks of Python under a heading of the page."""
    return re.findall(r"```python\n(.*?)```", section(page, title), re.DOTALL)


def made() -> dict[str, Tensor]:
    """The same on every rank, float64."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(CLASSES, (BATCH, LENGTH), generator=generator)
    # Not as many count on each rank, in each microbatch, in each sequence.
    targets[torch.arange(LENGTH) < torch.arange(BATCH)[:, None]] = -100
    return {
        "hidden": randn(BATCH, LENGTH, DIM),
        "weight": randn(CLASSES, DIM),
        "bias": randn(CLASSES),
        "targets": targets,
        "advantage": randn(BATCH, LENGTH).round(),
        "temperature": 0.5 + torch.rand(BATCH, LENGTH, generator=generator).double(),
    }


def head_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    return head


def close(found: dict[str, Tensor | None], wanted: dict[str, Tensor], most: float = 1e-9) -> None:
    for name, value in wanted.items():
        got = found[name]
        assert got is not None, name
        error = float((got.double() - value).norm())
        assert error <= most * float(value.norm()), f"{name}: {error}"


def grads_of(head: nn.Linear) -> dict[str, Tensor | None]:
    return {name: x.grad for name, x in head.named_parameters()}


def dense(
    variant: str, by: Any = lambda found: found.loss, **more: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """A number that `by` makes of the reference, and its gradients."""
    given = made()
    leaves = {name: given[name].requires_grad_() for name in ("hidden", "weight", "bias")}
    if variant == "plain":
        del leaves["bias"]
    how = VARIANTS[variant] | more
    found: Reference = linear_cross_entropy_reference(targets=given["targets"], **leaves, **how)
    loss = by(found)
    grads = torch.autograd.grad(loss, [*leaves.values()])
    return loss.detach(), dict(zip(leaves, grads, strict=True))
