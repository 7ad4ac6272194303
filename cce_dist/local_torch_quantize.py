"""Rows in 8 bits, by the arithmetic of cce_dist/kernels/quantize.py, in eager torch.

`values` and what they stand for are those of the kernels, so that either backend reads either's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cce_dist.options import Screen
from cce_dist.partials import QuantizedRows, Tokens
from cce_dist.torch_tiles import spans

# Of a row's largest element: the largest of the format.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# So many rows at least make the mean row that is subtracted.
CENTRE_ROWS = 16384
# Numbers that are widened to fp32 at a time.
CHUNK_ELEMENTS = 2**18
# A row of values is this many long, or a multiple: the kernels' descriptors ask for 16 bytes.
ALIGNED = 16


def screen_dtype(screen: Screen, weight: Tensor) -> torch.dtype:
    """ "auto" is what the kernels take on the weight's device, and int8 on a CPU."""
    if screen.dtype == "auto" and weight.is_cuda:
        newest = torch.cuda.get_device_capability(weight.device) >= (10, 0)
        return torch.float8_e4m3fn if newest else torch.int8
    return torch.float8_e4m3fn if screen.dtype == "e4m3" else torch.int8


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a matrix's rows, [D] fp32 each."""

    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, matrix: Tensor, *, every: int = 1) -> Moments:
        """Args: every: only each so many-th row is read."""
        taken = matrix[::every]
        total = torch.zeros(2, matrix.shape[1], dtype=torch.float32, device=matrix.device)
        for _, rows in _in_fp32(taken):
            total[0] += rows.sum(0)
            total[1] += rows.square().sum(0)
        mean, square = total / max(1, taken.shape[0])
        return cls(mean, (square - mean * mean).clamp_min(1e-30))

    def for_others(self) -> Moments:
        """For rows like these, which may vary in a dim in which these hardly do, as few rows may
        not: they would be rounded by its scale alone."""
        return replace(self, variance=self.variance.maximum(2.0**-8 * self.variance.mean()))


def quantize_for(tokens: Tokens, weight: Tensor, screen: Screen) -> QuantizedRows:
    """The weight in 8 bits for several losses, for hidden states like these tokens'."""
    moments = Moments.of(tokens.take(0, len(tokens))).for_others()
    return quantize_weight(weight, moments, screen_dtype(screen, weight))


def quantize_weight(
    weight: Tensor,  # [V_local, D]
    hidden: Moments | None,
    dtype: torch.dtype,
    into: QuantizedRows | None = None,
) -> QuantizedRows:
    """The weight in 8 bits.

    Args:
        hidden: None: those of `into`, or else a mean of 0 and channels as they are.
        into: of the same shape and dtype: written, in place of new memory.
    """
    own = Moments.of(weight, every=max(1, weight.shape[0] // CENTRE_ROWS))
    channel, hidden_centre = torch.ones_like(own.mean), torch.zeros_like(own.mean)
    if hidden is not None:
        # What sticks out of either side is shared between the two.
        ratio = torch.log2(hidden.variance / own.variance)
        channel = torch.exp2(((ratio - ratio.mean()) / 4).round_())
        hidden_centre = hidden.mean
    elif into is not None:
        channel, hidden_centre = into.channel, into.hidden_centre
    values, of_rows, size = quantize(weight, own.mean, channel, hidden_centre, dtype)
    # Both the tokens' shifts and the columns' have the means' product.
    mean = torch.cat([size.mean(1), (own.mean * hidden_centre).sum()[None]])
    made = QuantizedRows(values, of_rows, own.mean, channel, hidden_centre, mean)
    if into is None:
        return made
    for name, tensor in vars(made).items():
        getattr(into, name).copy_(tensor)
    return into


def quantize(
    source: Tensor,  # [R, D]
    centre: Tensor,  # [D] fp32: subtracted from each row
    channel: Tensor,  # [D] fp32: by which each is then multiplied
    across: Tensor,  # [D] fp32
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """x = channel (row - centre) of each row as a scale times numbers of `dtype`.

    Returns:
        [R, stride] of `dtype`, 0 beyond D.
        [2, R] fp32: that scale; row . across.
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
        found = _rounded(x * (1 / step)[:, None], dtype)
        values[at, :dim] = found
        norm, along = x.square().sum(1), (x * found).sum(1)
        # With which the rounding has no part along the row itself.
        scale = torch.where(along > 0, norm / along, step)
        of_rows[0, at], of_rows[1, at] = scale, (rows * across).sum(1)
        size[0, at] = norm
        size[1, at] = (scale.square() * found.square().sum(1) - norm).clamp_min(0)
    return values, of_rows, size


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x over its row's scale -> the nearest number of 8 bits, in fp32; ties to even."""
    # The largest may have become larger than that by the division's rounding.
    x = x.clamp(-LARGEST[dtype], LARGEST[dtype])
    return x.round() if dtype == torch.int8 else x.to(dtype).float()


def _in_fp32(matrix: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start, stop in spans(matrix.shape[0], max(1, CHUNK_ELEMENTS // matrix.shape[1])):
        yield slice(start, stop), matrix[start:stop].float()
