"""The columns that token blocks keep: marks of the forward, lists of the backward."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import ColumnFilter, Room, Scores
from cce_dist.backends.triton.filter.tail import TAIL_GROUPS
from cce_dist.backends.triton.kernels.filter.lists import (
    chunks_kernel,
    key_kernel,
    marks_kernel,
    segments_kernel,
    tiles_kernel,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted, tiles_for
from cce_dist.core.types import Head, Tokens
from cce_dist.options import DRAW_FACTOR, TOKEN_BLOCK

# Columns of one tile of the backward.
TILE = 128
# `marks_kernel`'s columns a program, blocks whose masses it waits for at once, and warps: threads
# of two columns each, and enough of them that their loads fill the memory's latency.
MARKS = (256, 16, 4)


@dataclass(frozen=True)
class MassFactors:
    """Factors of the masses of each token block, one for each of the forward's launches."""

    of_blocks: Tensor  # [num_blocks, launches] fp32
    shape: Tensor  # [3] int32, of the forward
    width: int  # columns of a tile
    groups: int  # splits that a program makes side by side

    @property
    def launches(self) -> int:
        return self.of_blocks.shape[1]


@dataclass(frozen=True)
class Marks:
    """Marks of the forward for the backward: 32 bytes a column at 8,192 tokens."""

    kept: Tensor  # [V_local, ceil(num_blocks / 64)] int64: bit n: block n keeps the column
    drawn: Tensor  # the same: the column stands for others in block n's hidden gradient
    share: Tensor  # [groups, V_local] mass of the column where it is not kept
    # [N], in the caller's order: log of the sum over columns not kept of exp(z) softcap'(z).
    log_dropped: Tensor
    # [N] int16 or int32: the blocks' i-th token is the caller's order[i]-th; None: the i-th.
    order: Tensor | None
    seed: Tensor  # [1] int32, of the data: the same for the same inputs, not for the next step's
    blocks_per_group: int
    blocks_padded: int  # a power of two above num_blocks

    def room(self, workspace_bytes: int, num_blocks: int) -> int:
        """Returns the bytes of the workspace for chunks: without these, vectors of tokens, nor the
        tail's sums."""
        return workspace_bytes - 160 * num_blocks * TOKEN_BLOCK - self.num_bytes

    @property
    def num_bytes(self) -> int:
        tensors = (self.kept, self.drawn, self.share, self.log_dropped, self.order)
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)

    @classmethod
    def like(cls, num_tokens: int, num_columns: int, weight: Tensor) -> Marks:
        """Makes marks of the shapes that a forward's have, uninitialised, on the weight's
        device."""
        num_blocks = triton.cdiv(num_tokens, TOKEN_BLOCK)
        per_group = triton.cdiv(num_blocks, TAIL_GROUPS)
        bits = (num_columns, triton.cdiv(num_blocks, 64))
        share = (triton.cdiv(num_blocks, per_group), num_columns)
        share_dtype = torch.float32 if weight.dtype == torch.float32 else torch.bfloat16
        order = None
        if num_tokens > TOKEN_BLOCK:
            order = weight.new_empty(num_tokens, dtype=order_dtype(num_tokens))
        return cls(
            weight.new_empty(bits, dtype=torch.int64),
            weight.new_empty(bits, dtype=torch.int64),
            weight.new_empty(share, dtype=share_dtype),
            weight.new_empty(num_tokens, dtype=torch.float32),
            order,
            weight.new_empty(1, dtype=torch.int32),
            per_group,
            blocks_padded(num_blocks),
        )


def marks_of(
    mass: Tensor,  # [num_blocks, V_local], negative where kept
    factors: MassFactors,
    count: Tensor,
    log_dropped: Tensor,
    seed: Tensor,  # [1] int32
    dtype: torch.dtype,
    *,
    threshold: float,
    draws: bool,
    order: Tensor | None = None,  # [N] of `order_dtype`
) -> Marks:
    """Turns column masses into marks of the blocks that keep them; the masses are not needed
    afterwards."""
    num_blocks, num_columns = mass.shape
    words = triton.cdiv(num_blocks, 64)
    blocks_per_group = triton.cdiv(num_blocks, TAIL_GROUPS)
    groups = triton.cdiv(num_blocks, blocks_per_group)
    share_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    kept = torch.empty(num_columns, words, dtype=torch.int64, device=mass.device)
    # The kernel writes them where columns are drawn.
    drawn = torch.empty_like(kept) if draws else torch.zeros_like(kept)
    share = torch.empty(groups, num_columns, dtype=share_dtype, device=mass.device)
    block, at_once, warps = (4096, 4, 4) if interpreted() else MARKS
    start(marks_kernel, (triton.cdiv(num_columns, block),))(
        mass,
        factors.of_blocks,
        factors.shape,
        count,
        seed,
        kept,
        drawn,
        share,
        num_columns,
        num_blocks,
        words,
        blocks_per_group,
        threshold * DRAW_FACTOR,
        TOKENS=TOKEN_BLOCK,
        BLOCK_V=block,
        AT_ONCE=at_once,
        HAS_DRAWN=draws,
        WIDTH=factors.width,
        LAUNCHES=factors.launches,
        GROUPS=factors.groups,
        num_warps=warps,
    )
    padded = blocks_padded(num_blocks)
    return Marks(kept, drawn, share, log_dropped, order, seed, blocks_per_group, padded)


def order_dtype(num_tokens: int) -> torch.dtype:
    return torch.int16 if num_tokens <= 2**15 else torch.int32


def blocks_padded(num_blocks: int) -> int:
    """Returns a power of two above it, the same for up to 32,512 tokens: kernels are compiled for
    it."""
    return max(256, triton.next_power_of_2(num_blocks + 1))


@dataclass(frozen=True)
class KeptColumns:
    """Marks, and the mass that they drop by the lse of all ranks."""

    marks: Marks
    dropped_mass: Tensor  # [N]
    tail: bool
    draws: bool

    @property
    def scores(self) -> Marks:
        return self.marks


def keep(
    tokens: Tokens,
    head: Head,
    scores: Scores,
    lse: Tensor,  # [N] over all ranks
    rule: ColumnFilter,
    room: Room,
) -> KeptColumns:
    """Returns the marks of the forward, which were made by the same threshold."""
    assert isinstance(scores, Marks)
    return KeptColumns(scores, (scores.log_dropped - lse).exp(), rule.tail, rule.draws)


@dataclass(frozen=True)
class Lists:
    """The columns that token blocks compute, chunk by chunk of an order of the columns.

    A chunk's d_logits, one row of 128 tokens for each entry of a block's list, fit the workspace.
    How many there are is known on the device only: sizes known to the host are bounds.
    """

    draws: bool
    order: Tensor  # [num_tiles * TILE] int32
    starts: Tensor  # [num_blocks + 2, num_tiles + 1] int32: entries before a tile, see tiles_kernel
    blocks: Tensor  # [num_tiles, num_blocks] int32: those that keep a column
    position: Tensor  # [num_tiles, num_blocks] int16: its inverse
    num_blocks: Tensor  # [num_tiles] int32
    num_active: Tensor  # [1] int32: tiles that a block keeps a column of
    first: Tensor  # [max_chunks + 1] int32: the first tile of a chunk
    num_chunks: Tensor  # [1] int32
    base: Tensor  # [max_chunks, num_blocks + 1] int32: a block's first row of the workspace
    segment: Tensor  # [max_chunks, num_blocks + 1] int32: a block's first SDD task
    max_chunks: int
    max_rows: int
    max_pairs: int

    @classmethod
    def of(cls, marks: Marks, weight: Tensor, num_blocks: int, room: int, *, draws: bool) -> Lists:
        """Args: room: bytes for a chunk's d_logits and lists."""
        num_columns, words = marks.kept.shape
        num_tiles = triton.cdiv(num_columns, TILE)
        step, segment = tiles_for(weight).backward_dims, tiles_for(weight).pair * TILE
        # What is made below.
        tables = 8 * (num_blocks + 2) * (num_tiles + 1) + (6 * num_blocks + 4 * TILE) * num_tiles
        tables += 64 * num_blocks * TOKEN_BLOCK
        max_rows, max_pairs = chunk_bounds(weight, num_blocks, num_tiles, room - tables)
        windows = max_rows - (TILE + step) * num_blocks, max_pairs - num_blocks
        max_chunks = num_tiles * TILE * num_blocks // windows[0] + 1
        max_chunks += num_tiles * num_blocks // windows[1]

        def int32(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=weight.device)

        order = _order_of(marks, num_blocks, draws)
        shape = num_blocks + 2, num_tiles + 1
        num_active, counts = int32_zeros(weight.device, (1,), shape)
        lists = cls(
            draws=draws,
            order=int32(num_tiles * TILE),
            starts=counts,
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
        )
        start(tiles_kernel, (num_tiles,))(
            marks.kept,
            marks.drawn,
            order,
            lists.order,
            counts,
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
        lists = replace(lists, starts=torch.cumsum(counts, 1, dtype=torch.int32))
        lists._cut(windows, step, segment, marks.blocks_padded)
        return lists

    def new_workspace(self, weight: Tensor) -> Tensor:
        """Makes [max_rows + TILE, 128]: a chunk's rows, uninitialised, then zeros."""
        workspace = weight.new_empty(self.max_rows + TILE, TOKEN_BLOCK)
        workspace[self.max_rows :] = 0
        return workspace

    def _cut(self, windows: tuple[int, int], step: int, segment: int, padded: int) -> None:
        """Finds where chunks end, and where blocks' lists stand in them."""
        num_tiles, num_blocks = self.blocks.shape
        start(chunks_kernel, (1,))(
            self.starts, self.first, self.num_chunks, num_tiles, num_blocks, *windows, BLOCK=1024
        )
        start(segments_kernel, (self.max_chunks,))(
            self.starts,
            self.first,
            self.num_chunks,
            self.base,
            self.segment,
            num_tiles,
            num_blocks,
            BLOCKS=padded,
            ROWS=step,
            SEGMENT=segment,
        )


@dataclass
class ListedLogits:
    """What a screened forward has made exactly of the last chunk, with which the backward begins:
    in the workspace, where d_logits then replace it. Filled once, used up once."""

    draws: bool  # the backward draws columns
    lists: Lists | None = None  # its lists
    workspace: Tensor | None = None  # see `entries_made`
    ref: Tensor | None = None  # [N_padded] fp32, log2
    bad_ref: Tensor | None = None  # [num_blocks] int32: 1 where it is not to be used

    def make_room(self, lists: Lists, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Makes the workspace, `ref` and `bad_ref`, and returns them, the first as fp16:
        uninitialised."""
        num_blocks = lists.blocks.shape[1]
        self.lists, self.workspace = lists, lists.new_workspace(weight)
        self.ref = weight.new_empty(num_blocks * TOKEN_BLOCK, dtype=torch.float32)
        self.bad_ref = weight.new_empty(num_blocks, dtype=torch.int32)
        return self.workspace.view(torch.float16), self.ref, self.bad_ref

    def take_workspace(self) -> Tensor | None:
        """Gives the workspace away, so that it is free once the products are done."""
        workspace, self.workspace = self.workspace, None
        return workspace


def _order_of(marks: Marks, num_blocks: int, draws: bool) -> Tensor:
    """Orders columns, those kept in many runs of blocks first, [V_local] int64."""
    num_columns, words = marks.kept.shape
    key = torch.empty(num_columns, dtype=torch.int16, device=marks.kept.device)
    block = 256
    start(key_kernel, (triton.cdiv(num_columns, block),))(
        marks.kept,
        marks.drawn,
        key,
        num_columns,
        num_blocks,
        words,
        BLOCK_V=block,
        HAS_DRAWN=draws,
    )
    return torch.sort(key, stable=True).indices


def int32_zeros(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Makes zeros of those shapes by one kernel; each begins where a kernel may read 16 bytes at
    once."""
    sizes = [triton.cdiv(math.prod(shape), 4) * 4 for shape in shapes]
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    return [x[: math.prod(shape)].view(shape) for x, shape in zip(zeros, shapes, strict=True)]


def chunk_bounds(weight: Tensor, num_blocks: int, num_tiles: int, room: int) -> tuple[int, int]:
    """Bounds rows of d_logits, and pairs of a tile and a block that keeps it, of a chunk of `room`
    bytes.

    At least what one tile and one window more take, at most what all of them do.
    """
    step = tiles_for(weight).backward_dims
    pairs_share = 32
    # Of each row: d_logits; an entry, twice; its part of a sum over drawn ones; of the pairs.
    row = TOKEN_BLOCK * weight.element_size() + 2 * 4 + 4 + 4 * TILE // pairs_share
    one_tile = (TILE + step) * num_blocks
    rows = max(room // row, 2 * one_tile)
    rows = min(rows, num_tiles * TILE * num_blocks + 2 * one_tile)
    rows = triton.cdiv(rows, step) * step
    return rows, max(rows // pairs_share, 2 * num_blocks)
