"""Lists of the columns that each token block keeps, from which the backward works."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.filter.marks import Marks
from cce_dist.backends.triton.kernels.filter.column_lists import (
    chunks_kernel,
    running_sums_kernel,
    tiles_kernel,
)
from cce_dist.backends.triton.kernels.filter.column_order import key_kernel, sort_kernel
from cce_dist.backends.triton.launch.start import is_compiling_only, start
from cce_dist.backends.triton.launch.tiles import tiles_for
from cce_dist.options import TOKEN_BLOCK

# Columns of one tile of the backward.
TILE = 128
# Of `sort_kernel`: columns of a program, values of a digit, and parts that it adds up at a time.
PART, DIGITS, AT_ONCE = 1024, 256, 32
# Lists are too long if they hold more than this share of all pairs of a block and a column:
# docs/notebook/2026-11-30/long-lists.md.
LONG = 0.6


@dataclass(frozen=True)
class Lists:
    """The columns that each token block computes, listed chunk by chunk of the ordered columns.

    A chunk's d_logits, one row of 128 tokens for each entry of a block's list, fit the workspace.
    Only the device knows how many entries there are: the host's sizes are bounds.
    """

    draws: bool
    order: Tensor  # [at least num_tiles * TILE] int32, 0 beyond the columns
    starts: Tensor  # [num_blocks + 2, num_tiles + 1] int32: entries before a tile, see tiles_kernel
    bits: Tensor  # [num_tiles, 1 + draws, TILE // 32, num_blocks] int32: see tiles_kernel
    blocks: Tensor  # [num_tiles, num_blocks] int32: blocks that keep a column of the tile
    position: Tensor  # [num_tiles, num_blocks] int16: a block's place among these, or -1
    num_blocks: Tensor  # [num_tiles] int32: the number of these
    num_active: Tensor  # [1] int32: tiles up to the last one with a kept column
    first: Tensor  # [max_chunks + 1] int32: the first tile of a chunk
    num_chunks: Tensor  # [1] int32; -1: lists are too long, and all columns are computed instead
    base: Tensor  # [max_chunks, num_blocks + 1] int32: a block's first row of the workspace
    segment: Tensor  # [max_chunks, num_blocks + 1] int32: a block's first SDD task
    max_chunks: int
    max_rows: int
    max_pairs: int
    may_be_long: bool  # `num_chunks` may be -1

    @classmethod
    def of(
        cls,
        marks: Marks,
        weight: Tensor,
        num_blocks: int,
        room: int,
        *,
        draws: bool,
        every_column: tuple[Tensor, int] | None = None,
    ) -> Lists:
        """Lists the columns of each block.

        Args:
            room: bytes for a chunk's d_logits and lists.
            every_column: the number of tokens that count, [1] int32, and the bytes that computing
                every column takes; None: the lists must do.
        """
        num_columns, words = marks.kept.shape
        num_tiles = triton.cdiv(num_columns, TILE)
        step, segment = tiles_for(weight).backward_dims, tiles_for(weight).pair * TILE
        # Bytes of the tensors below.
        tables = 8 * (num_blocks + 2) * (num_tiles + 1) + (6 * num_blocks + 4 * TILE) * num_tiles
        tables += (1 + draws) * TILE // 8 * num_blocks * num_tiles
        tables += 64 * num_blocks * TOKEN_BLOCK
        max_rows, max_pairs = chunk_bounds(weight, num_blocks, num_tiles, room - tables)
        # While kernels are only compiled, the room may be that of a few tokens.
        most = math.inf if is_compiling_only() else max_rows * TOKEN_BLOCK * weight.element_size()
        count = every_column[0] if every_column is not None and every_column[1] <= most else None
        windows = max_rows - (TILE + step) * num_blocks, max_pairs - num_blocks
        max_chunks = num_tiles * TILE * num_blocks // windows[0] + 1
        max_chunks += num_tiles * num_blocks // windows[1]

        def int32(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=weight.device)

        parts = triton.cdiv(num_columns, PART)
        shapes = (1,), (num_blocks + 2, num_tiles + 1), (2, parts, DIGITS)
        num_active, counts, tallies = int32_zeros(weight.device, *shapes)
        lists = cls(
            draws=draws,
            order=_order_of(marks, num_blocks, tallies, draws),
            starts=counts,
            bits=int32(num_tiles, 1 + draws, TILE // 32, num_blocks),
            blocks=int32(num_tiles, num_blocks),
            position=torch.empty(num_tiles, num_blocks, dtype=torch.int16, device=weight.device),
            num_blocks=int32(num_tiles),
            num_active=num_active,
            first=int32(max_chunks + 1),
            num_chunks=int32(1),
            base=int32(max_chunks, num_blocks + 1),
            segment=int32(max_chunks, num_blocks + 1),
            max_chunks=max_chunks,
            max_rows=max_rows,
            max_pairs=max_pairs,
            may_be_long=count is not None,
        )
        start(tiles_kernel, (num_tiles,))(
            marks.kept,
            marks.drawn,
            lists.order,
            counts,
            lists.bits,
            lists.blocks,
            lists.position,
            lists.num_blocks,
            lists.num_active,
            num_columns,
            num_tiles,
            num_blocks,
            words,
            TILE=TILE,
            HAS_DRAWN=draws,
        )
        start(running_sums_kernel, (num_blocks + 2,))(counts, num_tiles, BLOCK=1024)
        lists._cut(windows, step, segment, marks.blocks_padded, num_columns, count)
        return lists

    def new_workspace(self, weight: Tensor) -> Tensor:
        """Makes [.., 128]: a chunk's max_rows rows, uninitialised; TILE rows of zeros; then the
        memory of `entries_in`, zeros too."""
        row_bytes = TOKEN_BLOCK * weight.element_size()
        rows = self.max_rows + TILE + triton.cdiv(2 * 4 * self.max_rows, row_bytes)
        workspace = weight.new_empty(rows, TOKEN_BLOCK)
        workspace[self.max_rows :].zero_()
        return workspace

    def entries_in(self, workspace: Tensor) -> Tensor:
        """Returns the lists of a chunk and the next, [2, max_rows] int32, at a workspace's end."""
        end = workspace[self.max_rows + TILE :].view(torch.int32)
        return end.flatten()[: 2 * self.max_rows].view(2, self.max_rows)

    def _cut(
        self,
        windows: tuple[int, int],
        step: int,
        segment: int,
        padded: int,
        num_columns: int,
        count: Tensor | None,
    ) -> None:
        """Cuts the tiles into chunks, and computes where each block's list stands in a chunk."""
        num_tiles, num_blocks = self.blocks.shape
        start(chunks_kernel, (self.max_chunks,))(
            self.starts,
            self.first,
            self.num_chunks,
            self.base,
            self.segment,
            self.num_chunks if count is None else count,
            num_columns,
            num_tiles,
            num_blocks,
            *windows,
            0.0 if count is None else LONG,
            BLOCK=1024,
            BLOCKS=padded,
            ROWS=step,
            SEGMENT=segment,
            TOKENS=TOKEN_BLOCK,
        )


@dataclass
class ListedLogits:
    """Exact logits of the last chunk, which a screened forward leaves to the backward.

    They lie in the workspace, where d_logits then overwrite them. One forward fills them, and one
    backward reads them.
    """

    draws: bool  # the backward draws columns
    lists: Lists | None = None  # the lists of both forward and backward
    workspace: Tensor | None = None  # see `stored_entries`
    ref: Tensor | None = None  # [N_padded] fp32, log2: the reference of a token's logits
    bad_ref: Tensor | None = None  # [num_blocks] int32: 1 where a block's logits are not usable

    def make_room(self, lists: Lists, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Makes the workspace, `ref` and `bad_ref`, uninitialised, and returns them; the workspace
        as fp16."""
        num_blocks = lists.blocks.shape[1]
        self.lists, self.workspace = lists, lists.new_workspace(weight)
        self.ref = weight.new_empty(num_blocks * TOKEN_BLOCK, dtype=torch.float32)
        self.bad_ref = weight.new_empty(num_blocks, dtype=torch.int32)
        return self.workspace.view(torch.float16), self.ref, self.bad_ref

    def take_workspace(self) -> Tensor | None:
        """Returns the workspace and drops it here, so that it is freed after the products."""
        workspace, self.workspace = self.workspace, None
        return workspace


def _order_of(marks: Marks, num_blocks: int, tallies: Tensor, draws: bool) -> Tensor:
    """Orders the columns by `key_kernel`: those kept by many blocks come first, [size] int32 with
    0 beyond the columns.

    Args: tallies: [2, parts, DIGITS] int32 zeros, written.
    """
    num_columns, words = marks.kept.shape
    block, int32 = 256, torch.int32
    size, parts = triton.cdiv(num_columns, block) * block, tallies.shape[1]
    key, half, order = (
        torch.empty(size, dtype=dtype, device=marks.kept.device)
        for dtype in (int32, torch.int64, int32)
    )
    start(key_kernel, (size // block,))(
        marks.kept,
        marks.drawn,
        key,
        tallies,
        num_columns,
        num_blocks,
        words,
        BLOCK_V=block,
        HAS_DRAWN=draws,
        PART=PART,
        DIGITS=DIGITS,
    )
    # torch's sort takes eight launches, which cost the host more than the device.
    for taken, tally, out, highest in (
        (key, tallies[0], half, False),
        (half, tallies[1], order, True),
    ):
        start(sort_kernel, (parts,))(
            taken,
            tally,
            out,
            tallies[1],
            num_columns,
            size,
            parts,
            PART=PART,
            DIGITS=DIGITS,
            AT_ONCE=AT_ONCE,
            HIGHEST=highest,
            num_warps=8,
        )
    return order


def int32_zeros(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Makes zeros of the given shapes by one launch; each tensor is aligned to 16 bytes."""
    sizes = [triton.cdiv(math.prod(shape), 4) * 4 for shape in shapes]
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    return [x[: math.prod(shape)].view(shape) for x, shape in zip(zeros, shapes, strict=True)]


def chunk_bounds(weight: Tensor, num_blocks: int, num_tiles: int, room: int) -> tuple[int, int]:
    """Returns the most rows of d_logits, and the most pairs of a tile and a block that keeps it, of
    a chunk that takes `room` bytes.

    They are at least enough for one tile and one window, and at most for all tiles.
    """
    step = tiles_for(weight).backward_dims
    pairs_share = 32
    # Bytes a row: d_logits, two entries, its share of a sum over drawn columns, and of the pairs.
    row = TOKEN_BLOCK * weight.element_size() + 2 * 4 + 4 + 4 * TILE // pairs_share
    one_tile = (TILE + step) * num_blocks
    rows = max(room // row, 2 * one_tile)
    rows = min(rows, num_tiles * TILE * num_blocks + 2 * one_tile)
    rows = triton.cdiv(rows, step) * step
    return rows, max(rows // pairs_share, 2 * num_blocks)
