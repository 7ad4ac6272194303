"""The k largest logits of each token: products of the library's, and a kernel that reads a tile."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import Room
from cce_dist.backends.torch.tiles import TILES_ALIVE, TileSize, exact_tiles, spans
from cce_dist.backends.triton.kernels.teacher.top import top_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.core.types import Head, Tokens

# Columns that one warp has at once.
WARP_COLUMNS = 1024
# Column c has the digits LAST_COLUMN - c in a key.
LAST_COLUMN = 2**31 - 1


def top(tokens: Tokens, head: Head, room: Room, k: int) -> tuple[Tensor, Tensor]:
    """Returns the same as `backends.torch.top.top`."""
    weight = head.weight
    # Of a tile nothing but its logits is in memory.
    size = TileSize.choose(weight, room.workspace_bytes * TILES_ALIVE)
    keys = torch.empty(len(tokens), k, dtype=torch.int64, device=weight.device)
    if not len(weight):
        keys.fill_(torch.iinfo(torch.int64).min)
    tokens = Tokens(tokens.hidden, tokens.rows, tokens.local_targets)
    tiles = exact_tiles(tokens, head, wants_slope=False)
    for first, last in spans(len(weight), size.columns):
        of_columns = tiles(first, last)
        for begin, end in spans(len(tokens), size.tokens):
            z, _ = of_columns(begin, end)
            add_tile(z, keys[begin:end], first)
    return values_and_columns(keys)


def add_tile(
    z: Tensor,  # [n, columns] fp32
    keys: Tensor,  # [n, k] int64, contiguous: written by the first tile, then in and out
    first: int,  # column of the shard; 0 in the first tile
) -> None:
    """Merges a tile's largest logits with those of the tiles before it."""
    k, block = keys.shape[1], max(16, triton.next_power_of_2(z.shape[1]))
    start(top_kernel, (len(z),))(
        z,
        keys,
        first,
        z.shape[1],
        k,
        z.stride(0),
        IS_FIRST=first == 0,
        K=triton.next_power_of_2(k),
        BLOCK=block,
        num_warps=min(16, max(1, block // WARP_COLUMNS)),
    )


def values_and_columns(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits, falling, and their columns of keys in any order, [n, k] each."""
    keys = keys.sort(dim=1, descending=True).values
    high, columns = keys >> 32, LAST_COLUMN - (keys & 0xFFFFFFFF)
    bits = torch.where(high < 0, high ^ 0x7FFFFFFF, high).to(torch.int32)
    # The smallest int32 belongs to no number: there are fewer than k columns.
    missing = high == torch.iinfo(torch.int32).min
    values = bits.view(torch.float32).masked_fill(missing, -torch.inf)
    return values, columns.masked_fill(values == -torch.inf, -1)
