"""Rows in 8 bits, as both backends make them: formats, moments, a weight's common part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist.core.types import QuantizedRows
from cce_dist.options import Screen

# Of a row's largest element: the largest of the format.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# So many rows at least make the mean row that is subtracted: any row would do, but a flat softmax
# shows how far off the mean it is.
CENTRE_ROWS = 16384
# Of the columns with a mass so many nats or less from a block's threshold so many say what the
# choice of columns costs a tail.
NEAR_THRESHOLD_NATS, NEAR_THRESHOLD_COLUMNS = 0.5, 128
# At most so much of a tail is given back to it: of one that is next to nothing the estimate may be
# more than that.
MOST_LOST_SHARE = 0.5
# centre, channel, across, [D] fp32 each -> see `torch_quantize.quantize`.
Quantize = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def screen_dtype(screen: Screen, weight: Tensor) -> torch.dtype:
    """ "auto": int8, whose steps in a row's own scale are finer than e4m3's, and whose products are
    summed exactly; e4m3 on compute capability 10 and 11, where Triton makes int8's as Ampere did.
    docs/numerics.md#int8-or-e4m3"""
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
        """Args: sums: [2, D] of the rows, and of their squares."""
        mean, square = sums / count
        return cls(mean, torch.addcmul(square, mean, mean, value=-1).clamp_min_(1e-30))

    def for_others(self) -> Moments:
        """For rows like these, which may vary in a dim in which these hardly do, as few rows may
        not: they would be rounded by its scale alone."""
        return replace(self, variance=self.variance.maximum(2.0**-8 * self.variance.mean()))


def every_for_centre(weight: Tensor) -> int:
    """Returns k: each k-th row is enough for the weight's moments."""
    return max(1, weight.shape[0] // CENTRE_ROWS)


def quantized_rows(
    of_weight: Moments, hidden: Moments | None, into: QuantizedRows | None, quantize: Quantize
) -> QuantizedRows:
    """Makes a weight's rows in 8 bits.

    Args:
        of_weight: its moments.
        hidden: None: those of `into`, or else a mean of 0 and channels as they are.
        into: written, in place of new memory.
        quantize: the rows; it may write into `into.values` and `into.of_rows` by itself.
    """
    if hidden is None and into is None:
        channel, hidden_centre = torch.ones_like(of_weight.mean), torch.zeros_like(of_weight.mean)
    elif hidden is not None:
        # What sticks out of either side is shared between the two.
        ratio = torch.log2(hidden.variance / of_weight.variance)
        channel = torch.exp2(((ratio - ratio.mean()) / 4).round_())
        hidden_centre = hidden.mean
    else:
        assert into is not None
        channel, hidden_centre = into.channel, into.hidden_centre
    values, of_rows, size = quantize(of_weight.mean, channel, hidden_centre)
    # Both the tokens' shifts and the columns' have the means' product.
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
    """Takes the mean of [K, R] over R, in two steps: of a few rows torch's kernel has few
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
    """Tells whether errors are so large that their part in the choice of columns counts: int8's
    cost a sixteenth of e4m3's, less than fp32 sums are off by."""
    return dtype != torch.int8


def correct_for_rounding(
    of_tokens: Tensor,  # [2, N]: the second is shifted, in place
    size: Tensor,  # [2, N] of the tokens, as `quantize` gives them
    rows: QuantizedRows,
    logit_scale: float,
) -> Tensor:
    """The tokens' shifts, without the bias of a sum of exponentials; [N] the variance of an 8-bit
    logit's error. Source: docs/numerics.md#screened-logits."""
    mean_norm, mean_remainder, of_means = rows.mean
    # Roundings on one side are as good as independent of the other. The variance is this over D.
    summed = torch.addcmul(size[1] * mean_norm, size[0], mean_remainder)
    dim = rows.centre.shape[0]
    # The mean of exp over an error of that variance is too large by half of it.
    of_tokens[1].sub_(of_means).sub_(summed, alpha=0.5 * logit_scale / dim)
    return summed * (logit_scale**2 / dim)
