"""The sum that a token is expected to have in the end: docs/design/filter.md#column-masses."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cce_dist.testing import TRITON_PLACES, Place, grid

pytest.importorskip("triton")
import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.forward import launches
from cce_dist.backends.triton.kernels.forward.launches import expected_reference

FIRST, LAST, SLOTS = (int(x.value) for x in (launches.FIRST, launches.LAST, launches.SLOTS))
TOKENS, FIELDS = 128, 4


@triton.jit(do_not_specialize=["launch"])
def expected_kernel(
    state_ptr,
    out_ptr,
    splits,
    stride,
    size,
    launch,
    turns,
    BLOCK: tl.constexpr,
):
    token = tl.arange(0, BLOCK)
    nothing = tl.zeros((BLOCK,), tl.float32)
    before_ptrs = state_ptr + (launch - 1) * 4 * size + token
    for split in range(splits):
        expected = expected_reference(
            before_ptrs, split * stride, splits, stride, size, launch, turns, nothing
        )
        tl.store(out_ptr + split * BLOCK + token, expected)


def turns_until(launch: int, turns: int) -> int:
    share = 4 ** (LAST - launch)
    return max(-(-turns // share), min(launch, turns))


def expected_sums(sums: Tensor, launch: int, turns: int) -> Tensor:
    """[SLOTS, tokens] sums after each launch -> [tokens], as the page has it."""
    n0, n1, n2, n3 = (turns_until(launch - i, turns) for i in (3, 2, 1, 0))
    s0, s1, s2 = sums[launch - 3], sums[launch - 2], sums[launch - 1]
    if launch == LAST - 1:
        n0, s0 = 0, torch.zeros_like(s1)
    if not n0 < n1 < n2 < turns:
        return s2
    rate_1, rate_2 = (s1 - s0) / (n1 - n0), (s2 - s1) / (n2 - n1)
    decay = (rate_2 / rate_1).clamp(max=1)
    ahead = torch.minimum(rate_1, rate_2) * (decay * (n3 - n2) + decay**2 * (turns - n3))
    return s2 + ahead


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, turns=(5, 37, 1000), splits=(1, 11)))
def test_expected_sum(place: Place, turns: int, splits: int) -> None:
    made = torch.Generator().manual_seed(turns)
    # Sums that grow from launch to launch, and references of their own in each.
    added = torch.rand(SLOTS, splits, TOKENS, generator=made, dtype=torch.float64)
    sums = added.cumsum(0)
    refs = 4 * torch.randn(SLOTS, splits, TOKENS, generator=made)
    state = torch.full((SLOTS, FIELDS, splits + 1, TOKENS), float("nan"))
    state[:, 0, :splits] = refs
    state[:, 1, :splits] = (sums / 2.0 ** refs.double()).float()
    state = state.to(place.device)
    out = torch.empty(splits, TOKENS, device=place.device)
    whole = sums.sum(1)
    # In order: a launch reads what the ones before it have left.
    for launch in range(FIRST, LAST + 1):
        size = (splits + 1) * TOKENS
        expected_kernel[(1,)](state, out, splits, TOKENS, size, launch, turns, TOKENS)
        expected = whole[launch - 1]
        if launch >= LAST - 1:
            expected = expected_sums(whole, launch, turns)
        actual = out.cpu().double()
        torch.testing.assert_close(actual, expected.log2().expand(splits, -1), rtol=0, atol=1e-5)
