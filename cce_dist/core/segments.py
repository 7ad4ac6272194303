"""Sums and maxima over consecutive segments of a vector, in one order: the same bits each time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

LEAST = {"sum": 0.0, "max": -torch.inf}

# torch's compiler does not know segment_reduce, and index_select's gradient adds in any order on a
# GPU: so both directions are operators of ours.


@torch.library.custom_op(
    "cce_dist::reduce_segments",
    mutates_args=(),
    schema="(Tensor values, Tensor offsets, Tensor segment_of, str kind) -> Tensor",
)
def reduce_segments(values: Tensor, offsets: Tensor, segment_of: Tensor, kind: str) -> Tensor:
    """Reduces each segment of values. The sum is differentiable, once.

    Args:
        values: [P] fp32 | float64.
        offsets: [S + 1] int64, where segments start and the last one ends.
        segment_of: [P] int64, the segment of each value.
        kind: "sum" or "max"; of no values 0 and -inf.
    Returns: [S]; NaN for a segment that holds NaN.
    """
    return torch.segment_reduce(values, kind, offsets=offsets, initial=LEAST[kind], unsafe=True)


@torch.library.custom_op(
    "cce_dist::spread_segments",
    mutates_args=(),
    schema="(Tensor values, Tensor offsets, Tensor segment_of) -> Tensor",
)
def spread_segments(values: Tensor, offsets: Tensor, segment_of: Tensor) -> Tensor:
    """Gives each place of a segment the segment's value: [S] -> [P]. Differentiable, once."""
    return values.index_select(0, segment_of)


@reduce_segments.register_fake
def _(values: Tensor, offsets: Tensor, segment_of: Tensor, kind: str) -> Tensor:
    return values.new_empty(offsets.shape[0] - 1)


@spread_segments.register_fake
def _(values: Tensor, offsets: Tensor, segment_of: Tensor) -> Tensor:
    return values.new_empty(segment_of.shape[0])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, offsets, segment_of, *kind = inputs
    assert kind in ([], ["sum"])
    ctx.save_for_backward(offsets, segment_of)


def _spread_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return spread_segments(grad, *ctx.saved_tensors), None, None, None


def _sum_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    return reduce_segments(grad.contiguous(), *ctx.saved_tensors, "sum"), None, None


reduce_segments.register_autograd(_spread_back, setup_context=_setup)
spread_segments.register_autograd(_sum_back, setup_context=_setup)
