"""The splits of the vocabulary in a forward: docs/design/forward.md#splits-and-launches."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import pytest
import torch

from cce_dist.testing import TRITON_PLACES, Place, grid

pytest.importorskip("triton")
import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.tokens.pack import splits_of

PROGRAMS = 132


@triton.jit
def splits_kernel(out_ptr, blocks, num_tiles, programs, cached_blocks, grid, row_bytes):
    tl.store(out_ptr, splits_of(blocks, num_tiles, programs, cached_blocks, grid, row_bytes))


# Blocks of 128 tokens, tiles of 256 classes, blocks in the cache, bytes of a row: splits.
CASES = {
    # A single wave; two of 33 splits would start twice, each program reading twice as many sums.
    "1024 tokens, 49152 classes": ((8, 192, 140, 1152), 16),
    "1024 tokens, 256000 classes": ((8, 1000, 35, 4608), 16),
    "8192 tokens, 49152 classes": ((64, 192, 140, 1152), 2),
    # The hidden states of a wave fit the cache.
    "8192 tokens, 256000 classes": ((64, 1000, 35, 4608), 4),
    # A split for each multiprocessor would read more sums than it spares tiles.
    "one token, 49152 classes": ((1, 192, 140, 1152), 24),
    "one token, 128256 classes, 8192 dims": ((1, 501, 10, 16384), 126),
    "one tile": ((3, 1, 140, 1152), 1),
    "more blocks than programs": ((200, 192, 1000, 1152), 1),
}


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, case=CASES))
def test_splits(place: Place, case: tuple[tuple[int, int, int, int], int]) -> None:
    (blocks, num_tiles, cached, row_bytes), expected = case
    out = torch.zeros(1, dtype=torch.int32, device=place.device)
    rows = max(2 * PROGRAMS, 2 * blocks if blocks <= cached else 6 * blocks)
    splits_kernel[(1,)](out, blocks, num_tiles, PROGRAMS, cached, rows, row_bytes)
    assert out.item() == expected
