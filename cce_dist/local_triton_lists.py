"""Which columns which token blocks keep: marks of the forward, lists of the backward."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.kernels.plan import lists_kernel, marks_kernel, tiles_kernel
from cce_dist.local_triton_inputs import pad_tokens, padded_dim
from cce_dist.local_triton_tail import TAIL_GROUPS
from cce_dist.local_triton_tiles import num_programs, takes_tma, tiles_for
from cce_dist.options import TOKEN_BLOCK
from cce_dist.partials import Head, Tokens

# Columns of one tile of the backward.
TILE = 128


@dataclass(frozen=True)
class Marks:
    """What the forward leaves for the backward: 25 bytes a column at 8,192 tokens."""

    bits: Tensor  # [V_local, ceil(num_blocks / 64)] int64: bit n: block n keeps the column
    share: Tensor  # [groups, V_local] mass of the column where it is dropped
    key: Tensor  # [V_local] int32: sorts columns of many blocks first
    log_dropped: Tensor  # [N] log of the sum over dropped columns of exp(z) softcap'(z)
    blocks_per_group: int

    @property
    def num_bytes(self) -> int:
        tensors = (self.bits, self.share, self.key, self.log_dropped)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def marks_of(mass: Tensor, count: Tensor, log_dropped: Tensor, dtype: torch.dtype) -> Marks:
    """Column masses -> which blocks keep which columns; the masses are not needed afterwards."""
    num_blocks, num_columns = mass.shape
    words = triton.cdiv(num_blocks, 64)
    blocks_per_group = triton.cdiv(num_blocks, TAIL_GROUPS)
    groups = triton.cdiv(num_blocks, blocks_per_group)
    share_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
    bits = torch.empty(num_columns, words, dtype=torch.int64, device=mass.device)
    share = torch.empty(groups, num_columns, dtype=share_dtype, device=mass.device)
    key = torch.empty(num_columns, dtype=torch.int32, device=mass.device)
    block = 256
    marks_kernel[(triton.cdiv(num_columns, block),)](
        mass,
        count,
        bits,
        share,
        key,
        num_columns,
        num_blocks,
        words,
        blocks_per_group,
        TOKENS=TOKEN_BLOCK,
        BLOCK_V=block,
    )
    return Marks(bits, share, key, log_dropped, blocks_per_group)


@dataclass(frozen=True)
class KeptColumns:
    """Marks, and the mass that they drop by the lse of all ranks."""

    marks: Marks
    dropped_mass: Tensor  # [N]
    tail: bool


def local_kept(
    tokens: Tokens,
    head: Head,
    scores: Marks,
    lse: Tensor,  # [N] over all ranks
    *,
    threshold: float,
    by_largest: bool,
    tail: bool,
    workspace_bytes: int,
) -> KeptColumns:
    """The marks were made in the forward, by the same threshold."""
    return KeptColumns(scores, (scores.log_dropped - lse).exp(), tail)


@dataclass(frozen=True)
class Layout:
    """Where the tokens of each block stand in hidden: side by side, or anywhere."""

    use_tma: bool
    rows: Tensor  # [num_blocks * 128] int64; of a token that counts for those that don't
    straight: Tensor  # [words] int64: bit n: block n's tokens are rows one after the other
    blocks: Tensor  # [num_blocks] int32: those that count, the straight ones first
    num_straight: Tensor  # [1] int32
    num_blocks: Tensor  # [1] int32

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, rows: Tensor, count: Tensor, num_blocks: int
    ) -> Layout:
        device, padded = hidden.device, num_blocks * TOKEN_BLOCK
        use_tma = takes_tma(hidden) and takes_tma(weight)
        place = torch.arange(padded, device=device)
        # A token that doesn't count stands at the first row of one that does: its d_logits are 0,
        # and 0 times what an ignored row holds might be NaN.
        rows = torch.where(place < count, pad_tokens(rows, padded, 0), rows[0])
        ends = rows.view(num_blocks, TOKEN_BLOCK)[:, :: TOKEN_BLOCK - 1]
        block = place[:num_blocks]
        full = (block + 1) * TOKEN_BLOCK <= count
        # Rows ascend: 128 of them that span 128 are side by side.
        straight = full & (ends[:, 1] - ends[:, 0] == TOKEN_BLOCK - 1) & use_tma
        bits = pad_tokens(straight.long(), triton.cdiv(num_blocks, 64) * 64, 0).view(-1, 64)
        number = (count + TOKEN_BLOCK - 1) // TOKEN_BLOCK
        before = straight.cumsum(0)
        at = torch.where(straight, before - 1, before[-1] + block - before)
        return cls(
            use_tma=use_tma,
            rows=rows,
            straight=(bits << torch.arange(64, device=device)).sum(1),
            blocks=torch.empty_like(block).scatter_(0, at, block).int(),
            num_straight=before[-1:].int(),
            num_blocks=number.int(),
        )


@dataclass(frozen=True)
class Lists:
    """Which tiles of sorted columns which token blocks keep; sizes known to the host are bounds."""

    order: Tensor  # [num_tiles * TILE] int32
    rank: Tensor  # [V_local] int32: its inverse
    bits: Tensor  # [num_tiles * TILE, words] int64
    tile_bits: Tensor  # [num_tiles, words] int64
    blocks: Tensor  # [num_tiles, num_blocks] int32, the straight ones first
    num_straight: Tensor  # [num_tiles] int32
    num_blocks: Tensor  # [num_tiles] int32
    num_active: Tensor  # [1] int32
    tiles: Tensor  # [num_blocks, num_tiles] int32
    start: Tensor  # [num_blocks, num_chunks + 1] int32

    @classmethod
    def of(
        cls,
        marks: Marks,
        layout: Layout,
        num_blocks: int,
        num_tiles: int,
        tiles_per_chunk: int,
    ) -> Lists:
        num_columns, words = marks.bits.shape
        device = marks.bits.device
        num_chunks = triton.cdiv(num_tiles, tiles_per_chunk)

        def int32(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=device)

        lists = cls(
            order=int32(num_tiles * TILE),
            rank=int32(num_columns),
            bits=torch.empty(num_tiles * TILE, words, dtype=torch.int64, device=device),
            tile_bits=torch.empty(num_tiles, words, dtype=torch.int64, device=device),
            blocks=int32(num_tiles, num_blocks),
            num_straight=int32(num_tiles),
            num_blocks=int32(num_tiles),
            num_active=torch.zeros(1, dtype=torch.int32, device=device),
            tiles=int32(num_blocks, num_tiles),
            start=int32(num_blocks, num_chunks + 1),
        )
        order = torch.sort(marks.key, stable=True).indices.int()
        tiles_kernel[(num_tiles,)](
            marks.bits,
            order,
            lists.bits,
            lists.order,
            lists.rank,
            lists.tile_bits,
            layout.straight,
            lists.blocks,
            lists.num_straight,
            lists.num_blocks,
            lists.num_active,
            num_columns,
            num_blocks,
            words,
            TILE=TILE,
        )
        lists_kernel[(num_blocks,)](
            lists.tile_bits,
            lists.tiles,
            lists.start,
            num_tiles,
            num_chunks,
            tiles_per_chunk,
            words,
            BLOCK=1024,
        )
        return lists


def choose_tiles_per_chunk(weight: Tensor, num_blocks: int, num_tiles: int, room: int) -> int:
    """Tiles whose d_logits and rows of the weight fit into `room` bytes; a multiple of `pair`.

    Of the larger half of what fits, the number whose SDD tasks fill whole waves best.
    """
    table, programs = tiles_for(weight), num_programs(weight)
    row = num_blocks * TOKEN_BLOCK + (padded_dim(weight) if takes_tma(weight) else 0)
    most = max(1, room // (TILE * row * weight.element_size()) // table.pair)
    whole = triton.cdiv(num_tiles, table.pair)
    if most >= whole:
        return whole * table.pair

    def waste(pairs: int) -> float:
        tasks = pairs * num_blocks
        return triton.cdiv(tasks, programs) * programs / tasks

    best = min(range(most, max(1, most // 2) - 1, -1), key=waste)
    return best * table.pair
