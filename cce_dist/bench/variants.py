"""What is timed of a method: its loss, its gradient, or both; and the bare matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from .golden import LossFunction
from .inputs import IGNORE_INDEX, BenchInputs
from .machine import Variant

Part = Literal["loss", "forward", "gradient", "loss+grad"]
# Matrix products of [N, V, D] that each part needs at least.
NUM_PRODUCTS: dict[Part, int] = {"loss": 1, "forward": 1, "gradient": 2, "loss+grad": 3}
FLOORS: dict[str, Part] = {"one matmul": "loss", "three matmuls": "loss+grad"}


def check_parts(names: Sequence[str]) -> tuple[Part, ...]:
    """
    Raises:
        ValueError: a name is no part.
    """
    unknown = sorted(set(names) - set(get_args(Part)))
    if unknown:
        raise ValueError(f"passes must be among {list(get_args(Part))}, got {unknown}")
    return tuple(part for part in get_args(Part) if part in names)


def compacting(function: LossFunction) -> LossFunction:
    """`function` on the tokens that are not ignored."""

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        counted = targets != IGNORE_INDEX
        return function(hidden[counted], weight, targets[counted])

    return loss


def variant_of(function: LossFunction, inputs: BenchInputs, part: Part) -> Variant:
    """ "loss" runs without grad, "forward" keeps what a backward needs; "gradient" is the backward
    alone, after a forward."""
    hidden = inputs.hidden.detach().requires_grad_()
    weight = inputs.weight.detach().requires_grad_()

    def reset() -> None:
        hidden.grad = weight.grad = None

    def forward() -> Tensor:
        reset()
        return function(hidden, weight, inputs.targets)

    def loss(_: object) -> None:
        with torch.no_grad():
            function(hidden, weight, inputs.targets)

    def forward_only(_: object) -> None:
        function(hidden, weight, inputs.targets)

    def backward(made: Tensor) -> None:
        made.backward()

    def both(_: object) -> None:
        function(hidden, weight, inputs.targets).backward()

    if part == "loss":
        return Variant(loss)
    if part == "forward":
        return Variant(forward_only)
    if part == "gradient":
        return Variant(backward, forward, reset)
    return Variant(both, reset, reset)


def floor_variants(inputs: BenchInputs) -> dict[tuple[str, Part], Variant]:
    """One bare hidden @ weight.T of the tokens that count, and all three products."""
    rows, weight = inputs.without_ignored().hidden, inputs.weight
    logits = rows.new_empty(len(rows), len(weight))
    grad_hidden, grad_weight = torch.empty_like(rows), torch.empty_like(weight)

    def one(_: object) -> None:
        torch.mm(rows, weight.T, out=logits)

    def three(_: object) -> None:
        torch.mm(rows, weight.T, out=logits)
        torch.mm(logits, weight, out=grad_hidden)
        torch.mm(logits.T, rows, out=grad_weight)

    runs = {"one matmul": one, "three matmuls": three}
    return {(name, part): Variant(runs[name]) for name, part in FLOORS.items()}
