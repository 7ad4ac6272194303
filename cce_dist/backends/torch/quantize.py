"""Rows in 8 bits, by the arithmetic of kernels/screened/quantize.py, in eager torch.

The rows are the kernels' rows, so that each backend can read the other's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from cce_dist.backends.eight_bits import (
    LARGEST,
    Moments,
    every_for_centre,
    quantized_rows,
    screen_dtype,
)
from cce_dist.backends.torch.tiles import spans
from cce_dist.core.types import QuantizedRows, Tokens
from cce_dist.options import Screen

# The most elements that are widened to fp32 at a time.
CHUNK_ELEMENTS = 2**18
# The length of a row of values is a multiple of this: the kernels' descriptors ask for 16 bytes.
ALIGNED = 16


def moments_of(matrix: Tensor, *, every: int = 1) -> Moments:
    """Computes the moments of a matrix's rows. Args: every: reads each `every`-th row alone."""
    taken = matrix[::every]
    sums = torch.zeros(2, matrix.shape[1], dtype=torch.float32, device=matrix.device)
    for _, rows in _in_fp32(taken):
        sums[0] += rows.sum(0)
        sums[1] += rows.square().sum(0)
    return Moments.of_sums(sums, max(1, taken.shape[0]))


def quantize_for(tokens: Tokens, weight: Tensor, screen: Screen) -> QuantizedRows:
    """Quantises the weight with channels that suit these tokens, for them and for others."""
    moments = moments_of(tokens.take(0, len(tokens))).for_others()
    return quantize_weight(weight, moments, screen_dtype(screen, weight))


def quantize_weight(
    weight: Tensor,  # [V_local, D]
    hidden: Moments | None,
    dtype: torch.dtype,
    into: QuantizedRows | None = None,
) -> QuantizedRows:
    """Quantises the weight. Args: as of `eight_bits.quantized_rows`."""
    of_weight = moments_of(weight, every=every_for_centre(weight))
    make = functools.partial(quantize, weight, dtype=dtype)
    return quantized_rows(of_weight, hidden, into, make)


def quantize(
    source: Tensor,  # [R, D]
    centre: Tensor,  # [D] fp32: subtracted from each row
    channel: Tensor,  # [D] fp32: multiplies each centred row
    across: Tensor,  # [D] fp32
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes x = channel (row - centre) of each row as a scale times numbers of `dtype`.

    Returns:
        [R, stride] of `dtype`, 0 beyond D.
        [2, R] fp32: the scale; row . across.
        [2, R] fp32: |x|^2; |x - scale times numbers|^2.
    """
    num_rows, dim = source.shape
    stride = -(-dim // ALIGNED) * ALIGNED
    values = torch.zeros(num_rows, stride, dtype=dtype, device=source.device)
    of_rows = torch.empty(2, num_rows, dtype=torch.float32, device=source.device)
    size = torch.empty_like(of_rows)
    for at, rows in _in_fp32(source):
        x = (rows - centre) * channel
        # A row of zeros has any scale; 1 over the smallest would be infinite.
        step = (x.abs().amax(1) / LARGEST[dtype]).clamp_min(1e-30)
        rounded = _rounded(x * (1 / step)[:, None], dtype)
        values[at, :dim] = rounded
        norm, along = x.square().sum(1), (x * rounded).sum(1)
        # This scale leaves the rounding error no component along the row itself.
        scale = torch.where(along > 0, norm / along, step)
        of_rows[0, at], of_rows[1, at] = scale, (rows * across).sum(1)
        size[0, at] = norm
        size[1, at] = (scale.square() * rounded.square().sum(1) - norm).clamp_min(0)
    return values, of_rows, size


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounds x, already divided by its row's scale, to 8-bit numbers, in fp32; ties to even."""
    # The division's rounding may have raised the largest element above the format's largest.
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return x.round() if dtype == torch.int8 else x.to(dtype).float()


def _in_fp32(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start, stop in spans(matrix.shape[0], max(1, CHUNK_ELEMENTS // matrix.shape[1])):
        yield slice(start, stop), matrix[start:stop].float()
