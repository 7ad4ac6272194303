"""The order of the columns in the backward's tiles: a stable sort by their keys."""

from __future__ import annotations

import pytest
import torch

from cce_dist.testing import TRITON_PLACES, Place, grid

triton = pytest.importorskip("triton")

from cce_dist.backends.triton.filter import lists  # noqa: E402
from cce_dist.backends.triton.filter.marks import Marks  # noqa: E402
from cce_dist.backends.triton.kernels.filter.column_order import key_kernel  # noqa: E402
from cce_dist.backends.triton.launch.start import start  # noqa: E402

# Columns: a part of one program; a whole one; several; several that end within a block of keys.
COLUMNS = (7, 1024, 3000, 5000)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, columns=COLUMNS, kept=(0.0, 0.001, 0.3)))
def test_columns_are_sorted_by_their_keys(place: Place, columns: int, kept: float) -> None:
    num_blocks = 70
    generator = torch.Generator().manual_seed(0)

    def bits(share: float) -> torch.Tensor:
        has = torch.rand(columns, 2, 64, generator=generator) < share
        has[:, 1, num_blocks - 64 :] = False
        return (has.long() << torch.arange(64)).sum(-1).to(place.device)

    marks = Marks.like(num_blocks * 128, columns, torch.empty(1, device=place.device))
    marks.kept.copy_(bits(kept))
    marks.drawn.copy_(bits(0.01))
    parts = triton.cdiv(columns, lists.PART)

    def tallies() -> torch.Tensor:
        shape = (2, parts, lists.DIGITS)
        return torch.zeros(shape, dtype=torch.int32, device=place.device)

    size = triton.cdiv(columns, 256) * 256
    key = torch.empty(size, dtype=torch.int32, device=place.device)
    start(key_kernel, (size // 256,))(
        *(marks.kept, marks.drawn, key, tallies(), columns, num_blocks, marks.kept.shape[1]),
        BLOCK_V=256,
        HAS_DRAWN=True,
        PART=lists.PART,
        DIGITS=lists.DIGITS,
    )
    order = lists._order_of(marks, num_blocks, tallies(), draws=True)
    expected = torch.sort(key, stable=True).indices
    assert torch.equal(order.long(), expected.where(expected < columns, 0))
    # Columns that many blocks keep come first.
    number = (marks.kept != 0).sum(1)[order[:columns].long()]
    assert bool((number[:-1] > 0).ge(number[1:] > 0).all())
