"""Rows in 8 bits, the same in both backends: formats, moments, the quantised weight's vectors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist.core.types import QuantizedRows
from cce_dist.options import Screen

# The largest number of each format: a row's largest element is scaled to it.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# The mean row, which is subtracted from each, is the mean of at least so many rows. Any row would
# do, but its distance from the true mean shows in a flat softmax.
CENTRE_ROWS = 16384
# The mass that the choice of columns costs a tail is estimated from so many columns, whose masses
# are at most so many nats from the block's threshold.
NEAR_THRESHOLD_NATS, NEAR_THRESHOLD_COLUMNS = 0.5, 128
# The largest share of a tail by which it is corrected: for a tail of next to nothing the estimate
# can exceed the tail.
MOST_LOST_SHARE = 0.5
# Takes centre, channel and across, [D] fp32 each; returns as `backends.torch.quantize.quantize`.
Quantize = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def screen_dtype(screen: Screen, weight: Tensor) -> torch.dtype:
    """Returns the 8-bit dtype that `screen` asks for.

    "auto" is int8, whose steps relative to a row's scale are finer than e4m3's, and whose products
    are summed exactly; but e4m3 on compute capability 10 and 11, where Triton computes int8
    products as on Ampere. docs/design/screened.md#int8-or-e4m3
    """
    if screen.dtype == "auto" and weight.is_cuda:
        major, _ = torch.cuda.get_device_capability(weight.device)
        return torch.float8_e4m3fn if major in (10, 11) else torch.int8
    return torch.float8_e4m3fn if screen.dtype == "e4m3" else torch.int8


@dataclass(frozen=True)
class Moments:
    """Mean and variance of a matrix's rows, [D] fp32 each."""

    mean: Tensor
    variance: Tensor

    @classmethod
    def of_sums(cls, sums: Tensor, count: Tensor | int) -> Moments:
        """Divides sums of rows, and of their squares, [2, D], by the number of rows."""
        mean, square = sums / count
        return cls(mean, torch.addcmul(square, mean, mean, value=-1).clamp_min_(1e-30))

    def for_others(self) -> Moments:
        """Returns moments for other rows like these. A few rows may hardly vary in a dim where the
        others do; a least variance then keeps that dim's scale from swamping the rest."""
        return replace(self, variance=self.variance.maximum(2.0**-8 * self.variance.mean()))


def every_for_centre(weight: Tensor) -> int:
    """Returns k such that every k-th row is enough for the weight's moments."""
    return max(1, weight.shape[0] // CENTRE_ROWS)


def quantized_rows(
    of_weight: Moments, hidden: Moments | None, into: QuantizedRows | None, quantize: Quantize
) -> QuantizedRows:
    """Makes a weight's rows in 8 bits.

    Args:
        of_weight: moments of the weight.
        hidden: moments of hidden states; None: those that `into` was made for, or without `into` a
            mean of 0 and unscaled channels.
        into: written and returned, in place of new memory.
        quantize: quantises the rows; it may write to `into.values` and `into.of_rows` itself.
    """
    if hidden is None and into is None:
        channel, hidden_centre = torch.ones_like(of_weight.mean), torch.zeros_like(of_weight.mean)
    elif hidden is not None:
        # A dim in which one side varies more than the other is scaled on both, halfway each.
        ratio = torch.log2(hidden.variance / of_weight.variance)
        channel = torch.exp2(((ratio - ratio.mean()) / 4).round_())
        hidden_centre = hidden.mean
    else:
        assert into is not None
        channel, hidden_centre = into.channel, into.hidden_centre
    values, of_rows, size = quantize(of_weight.mean, channel, hidden_centre)
    # The tokens' shifts and the columns' shifts both contain the means' product.
    mean = torch.cat([_mean_of_long(size), (of_weight.mean * hidden_centre).sum()[None]])
    inverse = 1 / channel
    for_hidden = torch.stack([inverse, -hidden_centre * inverse])
    rows = QuantizedRows(values, of_rows, of_weight.mean, channel, hidden_centre, for_hidden, mean)
    if into is None:
        return rows
    for name, tensor in vars(rows).items():
        kept = getattr(into, name)
        if kept is not tensor:
            kept.copy_(tensor)
    return into


def _mean_of_long(rows: Tensor) -> Tensor:
    """Returns the mean of [K, R] over R, in two steps: for few rows torch's kernel starts few
    programs."""
    num_rows, length = rows.shape
    padded = F.pad(rows, (0, -length % 256))
    return padded.view(num_rows, -1, 256).sum(2).sum(1) / length


@dataclass(frozen=True)
class Rounding:
    """The error of a call's 8-bit logits."""

    rows: QuantizedRows  # of the weight
    variance: Tensor  # [N] fp32 of a token's logit


def selects_by_errors(dtype: torch.dtype) -> bool:
    """Tells whether rounding errors change the choice of columns enough to be corrected for. int8's
    cost a sixteenth of e4m3's, less than the error of fp32 sums."""
    return dtype != torch.int8


def correct_for_rounding(
    of_tokens: Tensor,  # [2, N]: the second is shifted, in place
    size: Tensor,  # [2, N] of the tokens, as `quantize` gives them
    rows: QuantizedRows,
    logit_scale: float,
) -> Tensor:
    """Removes the bias of a sum of exponentials from the tokens' shifts, in place.

    Returns: [N] the variance of an 8-bit logit's error.
    Source: docs/design/screened.md.
    """
    mean_norm, mean_remainder, of_means = rows.mean
    # The two sides' rounding errors are nearly independent. Divided by D this is the variance.
    summed = torch.addcmul(size[1] * mean_norm, size[0], mean_remainder)
    dim = rows.centre.shape[0]
    # An error of that variance raises the mean of exp by half of the variance.
    of_tokens[1].sub_(of_means).sub_(summed, alpha=0.5 * logit_scale / dim)
    return summed * (logit_scale**2 / dim)
