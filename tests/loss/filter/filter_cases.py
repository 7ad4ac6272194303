"""Inputs for the filter, and what it keeps of them, computed from dense logits."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from cce_dist import Filter
from cce_dist.testing import Inputs, Place, check_close64, zipf_inputs
from tests.support.loss_cases import generator

BLOCK = 128
GRADIENTS = ("grad_hidden", "grad_weight")


@functools.cache
def skewed_inputs(
    tokens: int | tuple[int, ...], num_classes: int, dim: int, dtype: torch.dtype
) -> Inputs:
    """Once for all tests of such a shape: to draw them takes as long as the loss. A case takes
    copies of them."""
    return zipf_inputs(tokens, num_classes, dim, generator=generator(), dtype=dtype)


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def wide(place: Place, num_classes: int) -> tuple[int, torch.dtype, float]:
    """Columns to use instead of `num_classes`, the widest dtype, and how far it rounds."""
    if "float64" in place.dtypes:
        return num_classes, torch.float64, 1e-10
    return 700 if place.interprets else num_classes, torch.float32, 2e-5


def check_near(place: Place, name: str, ours: Tensor, expected: Tensor) -> None:
    """check_close64, or as close as sums of thousands of fp32 terms are."""
    if "float64" in place.dtypes:
        check_close64(name, ours, expected)
    else:
        size = float(expected.abs().max())
        torch.testing.assert_close(ours.double(), expected.double(), rtol=0, atol=1e-5 * size)


HOT = 10  # columns that hold mass in the tokens of one block


def bimodal_inputs(num_classes: int, dtype: torch.dtype = torch.float64) -> Inputs:
    """Two blocks of 128 tokens. Columns 0-9 are hot in both, 10-19 in the first, 20-29 in the
    second: mass of at least 1. All others have less than 0.1 in a block, and differ by token."""
    gen = generator()
    weight = 0.15 * torch.randn(num_classes, 16, generator=gen, dtype=torch.float64)
    hidden = torch.randn(2 * BLOCK, 16, generator=gen, dtype=torch.float64)
    hidden[:, :3] = 0
    weight[:, :3] = 0
    for place in range(3):
        weight[HOT * place : HOT * (place + 1), place] = 7.0
    hidden[:, 0] = 1
    hidden[:BLOCK, 1] = 1
    hidden[BLOCK:, 2] = 1
    targets = torch.randint(0, HOT, (2 * BLOCK,), generator=gen)
    return Inputs(hidden.to(dtype), weight.to(dtype), targets)


def kept_columns(p: Tensor, targets: Tensor, filter: Filter) -> Tensor:
    """[N, V] bool, by the definition in Filter's docstring."""
    kept = torch.zeros_like(p, dtype=torch.bool)
    for start in range(0, len(p), BLOCK):
        block = slice(start, start + BLOCK)
        if filter.eps is not None:
            score, threshold = p[block].amax(0), filter.eps
        else:
            score, threshold = p[block].sum(0), filter.keep
        margin = (score / threshold).log().abs().min()
        assert margin > 0.5, f"a score is too near to the threshold for this test: {margin}"
        kept[block] = score >= threshold
        kept[block, targets[block]] = True
    return kept


def emulate(inputs: Inputs, filter: Filter) -> dict[str, Tensor]:
    """Dense gradients of the summed loss under `filter`, and the mass that it drops."""
    p = (inputs.hidden @ inputs.weight.T).softmax(-1)
    kept = kept_columns(p, inputs.targets, filter)
    tail = torch.where(kept, 0, p)
    d_logits = torch.where(kept, p, 0)
    if filter.tail:
        for start in range(0, len(p), BLOCK):
            block = slice(start, start + BLOCK)
            column, row = tail[block].sum(0), tail[block].sum(1)
            d_logits[block] += row[:, None] * column / column.sum()
    d_logits[torch.arange(len(p)), inputs.targets] -= 1
    return {
        "grad_hidden": d_logits @ inputs.weight,
        "grad_weight": d_logits.T @ inputs.hidden,
        "tail_mass": tail.sum(-1),
        "kept": kept,
    }
