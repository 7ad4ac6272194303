"""Both sides of a screened product in 8 bits by kernels, as eager torch makes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cce_dist import Screen
from cce_dist.core.types import Head, Tokens
from cce_dist.testing import TRITON_PLACES, Place, grid

pytest.importorskip("triton")

NUM_TOKENS = 150
# Tokens that count; their rows, in no order, are some of those there are.
COUNTS = {"all": NUM_TOKENS, "some": 97, "none": 0}


def check_close(made: Tensor, expected: Tensor, rtol: float = 1e-3) -> None:
    """To the sums of fp32, whose terms are as large as the largest."""
    atol = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(made, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    **grid(places=TRITON_PLACES, count=COUNTS, shape=((700, 40), (20_003, 72), (1500, 1100)))
)
def test_both_sides_are_those_of_torch(place: Place, count: int, shape: tuple[int, int]) -> None:
    from cce_dist.backends.eight_bits import Moments, correct_for_rounding
    from cce_dist.backends.torch.quantize import quantize
    from cce_dist.backends.torch.quantize import quantize_weight as quantize_weight_by_torch
    from cce_dist.backends.triton.screened.quantize import quantize_both, start_sums

    num_rows, dim = shape
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float16 if place.interprets else torch.bfloat16

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    # Channels of all sizes, on either side.
    weight = (0.1 + normal(num_rows, dim)) * torch.exp2(2 * normal(dim))
    hidden = (3 + normal(200, dim)) * torch.exp2(2 * normal(dim))
    weight, hidden = (x.to(dtype).to(place.device) for x in (weight, hidden))
    rows = torch.randperm(200, generator=generator)[:NUM_TOKENS].to(place.device)
    of_count = torch.tensor([count], dtype=torch.int32, device=place.device)
    tokens = Tokens(hidden, rows, rows.int(), of_count)
    head = Head(weight, None, None, num_rows, None, 0.7)
    screen = Screen(dtype="int8")

    sums = start_sums(tokens, head, screen)
    assert sums is not None
    packed = hidden[rows].masked_fill(torch.arange(NUM_TOKENS)[:, None].to(rows) >= count, 0)
    made, values, of_tokens, variance = quantize_both(packed, weight, sums(), screen, 0.7)

    counted = hidden[rows[:count]].double()
    mean = counted.sum(0) / max(count, 1)
    second = counted.square().sum(0) / max(count, 1)
    moments = Moments(mean.float(), (second - mean.square()).clamp_min(1e-30).float())
    expected = quantize_weight_by_torch(weight, moments, torch.int8)
    for name in ("centre", "hidden_centre", "of_rows"):
        check_close(getattr(made, name), getattr(expected, name))
    check_close(made.mean, expected.mean, rtol=1e-2)
    # A number in the middle of two powers of two may be either's.
    assert float((made.channel != expected.channel).float().mean()) < 0.02
    assert bool((made.channel.log2() % 1 == 0).all())
    torch.testing.assert_close(made.for_hidden[0], 1 / made.channel, atol=0, rtol=0)
    torch.testing.assert_close(made.for_hidden[1], -made.hidden_centre / made.channel)
    same = quantize(weight, made.centre, made.channel, made.hidden_centre, torch.int8)
    assert float((made.values != same[0]).float().mean()) < 1e-3

    wanted, wanted_of_tokens, size = quantize(
        packed, made.hidden_centre, 1 / made.channel, made.centre, torch.int8
    )
    assert float((values != wanted).float().mean()) < 1e-3
    wanted_variance = correct_for_rounding(wanted_of_tokens, size, made, 0.7)
    check_close(of_tokens[0], wanted_of_tokens[0])
    check_close(of_tokens[1], wanted_of_tokens[1])
    # What is rounded is the difference of two squares some 10,000 times as large.
    check_close(variance, wanted_variance, rtol=1e-2)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_a_hidden_state_that_is_no_number_says_so(place: Place) -> None:
    """Whatever the channels are: the guard asks for full precision then."""
    from cce_dist.backends.triton.screened.quantize import quantize_both, start_sums

    dtype = torch.float16 if place.interprets else torch.bfloat16
    weight = torch.randn(300, 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    hidden = weight[:60].clone()
    hidden[7, 3] = float("nan")
    weight, hidden = weight.to(place.device), hidden.to(place.device)
    tokens = Tokens(hidden, None, torch.zeros(60, dtype=torch.int32, device=place.device))
    screen = Screen(dtype="int8")
    sums = start_sums(tokens, Head(weight, None, None, 300, None, 1.0), screen)
    assert sums is not None
    variance = quantize_both(hidden, weight, sums(), screen, 1.0)[-1]
    # Of a row that is none, and of all, by whose means the channels are.
    assert not bool(torch.isfinite(variance).all())
