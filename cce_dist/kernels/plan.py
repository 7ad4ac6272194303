"""From column masses to what the backward visits: marks, an order of columns, lists of tiles."""

import triton
import triton.language as tl


@triton.jit
def marks_kernel(
    mass_ptr,  # [num_blocks, V], negative where kept
    count_ptr,  # [1] int32: blocks of no token that counts have no masses
    bits_ptr,  # [V, words] int64: bit n of word w set where block 64 w + n keeps the column: out
    share_ptr,  # [groups, V] mass of the column where it is dropped, per group of blocks: out
    key_ptr,  # [V] int32: sorting by it puts columns of many blocks first: out
    V,
    num_blocks,
    words,
    blocks_per_group,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: BLOCK_V columns, all token blocks.

    The key is (kept by how many blocks, to the power of two; the first four of them): columns of
    a tile of the backward then share token blocks. docs/performance.md#the-order-of-columns.
    """
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = columns < V
    bits = tl.zeros((BLOCK_V,), tl.int64)
    number = tl.zeros((BLOCK_V,), tl.int32)
    pattern = tl.zeros((BLOCK_V,), tl.int32)
    share = tl.zeros((BLOCK_V,), tl.float32)
    mass_ptrs = mass_ptr + columns
    share_ptrs = share_ptr + columns
    count = tl.load(count_ptr)
    for block in range(num_blocks):
        live = inside & (block * TOKENS < count)
        mass = tl.load(mass_ptrs, mask=live, other=0.0).to(tl.float32)
        mass_ptrs += V
        keeps = mass < 0
        share += tl.where(keeps, 0.0, mass)
        bits |= keeps.to(tl.int64) << (block % 64)
        coarse = block if num_blocks <= 64 else block * 64 // num_blocks
        pattern = tl.where(keeps & (number < 4), pattern * 64 + coarse, pattern)
        number += keeps.to(tl.int32)
        if ((block % 64) == 63) | (block == num_blocks - 1):
            at = columns.to(tl.int64) * words + block // 64
            tl.store(bits_ptr + at, bits, mask=inside)
            bits = tl.zeros((BLOCK_V,), tl.int64)
        if ((block + 1) % blocks_per_group == 0) | (block == num_blocks - 1):
            tl.store(share_ptrs, share.to(share_ptr.dtype.element_ty), mask=inside)
            share_ptrs += V
            share = tl.zeros((BLOCK_V,), tl.float32)
    for place in range(1, 4):
        pattern = tl.where(number > place, pattern, pattern * 64)
    bucket = tl.ceil(tl.log2(tl.maximum(number, 1).to(tl.float32))).to(tl.int32)
    key = tl.where(number > 0, (30 - bucket) * (1 << 24) + pattern, 31 * (1 << 24))
    tl.store(key_ptr + columns, key, mask=inside)


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def tiles_kernel(
    bits_ptr,  # [V, words] int64
    order_ptr,  # [V] int32: columns, most kept first
    bits_sorted_ptr,  # [num_tiles * TILE, words] int64: bits in that order, 0 beyond V: out
    order_padded_ptr,  # [num_tiles * TILE] int32: order, 0 beyond V: out
    rank_ptr,  # [V] int32: where a column stands in the order: out
    tile_bits_ptr,  # [num_tiles, words] int64: blocks that keep any column of the tile: out
    straight_ptr,  # [words] int64: bit n: the block's tokens are rows one after the other
    blocks_ptr,  # [num_tiles, num_blocks] int32: those blocks, the straight ones first: out
    num_straight_ptr,  # [num_tiles] int32: how many of those: out
    num_blocks_ptr,  # [num_tiles] int32: how many in all: out
    num_active_ptr,  # [1] int32, 0: tiles up to the last one that a block keeps: out
    V,
    num_blocks,
    words,
    TILE: tl.constexpr,
):
    """One program: TILE consecutive columns of the order."""
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    column = tl.load(order_ptr + at, mask=at < V, other=0)
    tl.store(order_padded_ptr + at, column)
    tl.store(rank_ptr + column, at, mask=at < V)
    list_ptr = blocks_ptr + tile.to(tl.int64) * num_blocks
    lane = tl.arange(0, 64)
    found = 0
    for word in range(words):
        bits = tl.load(bits_ptr + column.to(tl.int64) * words + word, mask=at < V, other=0)
        tl.store(bits_sorted_ptr + at.to(tl.int64) * words + word, bits)
        any_bits = tl.reduce(bits, 0, _or)
        tl.store(tile_bits_ptr + tile * words + word, any_bits)
        listed = any_bits & tl.load(straight_ptr + word)
        has = ((listed >> lane.to(tl.int64)) & 1).to(tl.int32)
        tl.store(list_ptr + found + tl.cumsum(has, 0) - has, word * 64 + lane, mask=has > 0)
        found += tl.sum(has, 0)
    tl.store(num_straight_ptr + tile, found)
    tl.debug_barrier()
    for word in range(words):
        any_bits = tl.load(tile_bits_ptr + tile * words + word)
        listed = any_bits & ~tl.load(straight_ptr + word)
        has = ((listed >> lane.to(tl.int64)) & 1).to(tl.int32)
        tl.store(list_ptr + found + tl.cumsum(has, 0) - has, word * 64 + lane, mask=has > 0)
        found += tl.sum(has, 0)
    tl.store(num_blocks_ptr + tile, found)
    if found > 0:
        tl.atomic_max(num_active_ptr, tile + 1)


@triton.jit
def lists_kernel(
    tile_bits_ptr,  # [num_tiles, words] int64
    tiles_ptr,  # [num_blocks, num_tiles] int32: tiles of which the block keeps a column: out
    start_ptr,  # [num_blocks, num_chunks + 1] int32: where a chunk's tiles start in it: out
    num_tiles,
    num_chunks,
    tiles_per_chunk,
    words,
    BLOCK: tl.constexpr,
):
    """One program: one token block; the transpose of `tiles_kernel`'s lists."""
    block = tl.program_id(0)
    found = 0
    for first in range(0, num_tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        word = tl.load(tile_bits_ptr + tile * words + block // 64, mask=tile < num_tiles, other=0)
        has = ((word >> (block % 64).to(tl.int64)) & 1).to(tl.int32)
        place = found + tl.cumsum(has, 0) - has
        tl.store(tiles_ptr + block.to(tl.int64) * num_tiles + place, tile, mask=has > 0)
        begins = (tile % tiles_per_chunk == 0) & (tile < num_tiles)
        at = start_ptr + block * (num_chunks + 1) + tile // tiles_per_chunk
        tl.store(at, place, mask=begins)
        found += tl.sum(has, 0)
    tl.store(start_ptr + block * (num_chunks + 1) + num_chunks, found)
