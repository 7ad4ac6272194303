"""The backward's lists of columns: marks, from column masses; tiles of ordered columns; chunks."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.forward.shares import launch_of
from cce_dist.backends.triton.kernels.numbers import LOG2E, ones_in
from cce_dist.backends.triton.kernels.teacher.divergence import score_of


@triton.jit
def draw_level_of(column, seed):
    """Draws a column's level j >= 1, with probability 2^-j; every kernel draws the same."""
    x = (column.to(tl.uint32) * 2654435761) ^ seed.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 16)) * 2246822507
    x = (x ^ (x >> 13)) * 3266489909
    x = x ^ (x >> 16)
    # Leading zeros of 24 bits, by the exponent of a float that holds them exactly.
    bits = ((x >> 8) | 1).to(tl.float32).to(tl.int32, bitcast=True)
    return 24 - ((bits >> 23) - 127)


@triton.jit(do_not_specialize=["num_blocks", "words", "blocks_per_group"])
def marks_kernel(
    mass_ptr,  # [num_blocks, V], negative where kept
    factor_ptr,  # [num_blocks, LAUNCHES] fp32: see `factors_kernel`
    shape_ptr,  # [3] int32: see `forward_kernel`
    count_ptr,  # [1] int32: blocks of no token that counts have no masses
    seed_ptr,  # [1] int32
    kept_ptr,  # [V, words] int64: bit n of word w set where block 64 w + n keeps the column: out
    drawn_ptr,  # [V, words] int64: such bits of blocks where it was drawn, to stand for others: out
    share_ptr,  # [groups, V] mass of the column in each group's blocks that drop it: out
    # [num_blocks, V] a teacher's masses, negative where `mass_ptr` is; if IS_REVERSE a column's sum
    # of the student's probabilities times their log ratios to the teacher's, log2
    teacher_mass_ptr,
    teacher_factor_ptr,  # [num_blocks, LAUNCHES]
    teacher_share_ptr,  # [groups, V] the same of the teacher's; or see `Marks.share`: out
    V,
    num_blocks,
    words,
    blocks_per_group,
    top,
    of_ratio,  # of `score_of`
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    AT_ONCE: tl.constexpr,  # blocks whose masses are read ahead of their use: 2, 4, 8 or 16
    HAS_DRAWN: tl.constexpr,
    WIDTH: tl.constexpr,  # these three as of `launch_of`
    LAUNCHES: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    IS_REVERSE: tl.constexpr,  # as of `score_of`
):
    """Marks BLOCK_V columns of all token blocks, block by block. A thread has the same columns of
    every block, and waits for no other thread.

    A mass in (top / 2^j, top / 2^(j-1)] has draw level j. Each column draws one level, level j with
    probability 2^-j, and counts 2^j times in the hidden gradient of the blocks where its mass has
    that level. docs/design/filter.md#drawn-columns. With a teacher the score of both masses has it.
    """
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = columns < V
    count = tl.load(count_ptr)
    end = tl.minimum(num_blocks, tl.cdiv(count, TOKENS))
    draw_level = draw_level_of(columns, tl.load(seed_ptr)).to(tl.float32)
    # A power of two: to multiply by it is as exact as to divide a bound by it.
    times = tl.exp2(draw_level - 1.0)
    splits = tl.load(shape_ptr + 1) // GROUPS
    launch = launch_of(columns, V, splits, WIDTH, LAUNCHES)
    factor_ptrs = factor_ptr + launch
    mass_ptrs = mass_ptr + columns
    share_ptrs = share_ptr + columns
    teacher_factor_ptrs = teacher_factor_ptr + launch
    teacher_mass_ptrs = teacher_mass_ptr + columns
    teacher_share_ptrs = teacher_share_ptr + columns
    at = columns.to(tl.int64) * words
    kept = tl.zeros((BLOCK_V,), tl.int64)
    drawn = tl.zeros((BLOCK_V,), tl.int64)
    share = tl.zeros((BLOCK_V,), tl.float32)
    teacher_share = share
    stop = blocks_per_group
    for first in range(0, num_blocks, AT_ONCE):
        masses = ()
        for i in tl.static_range(AT_ONCE):
            mass = tl.load(mass_ptrs + i * V, mask=inside & (first + i < end), other=0.0)
            masses = masses + (mass.to(tl.float32),)  # noqa: RUF005
        teacher_masses = masses
        if HAS_TEACHER:
            teacher_masses = ()
            for i in tl.static_range(AT_ONCE):
                mass = tl.load(
                    teacher_mass_ptrs + i * V, mask=inside & (first + i < end), other=0.0
                )
                teacher_masses = teacher_masses + (mass.to(tl.float32),)  # noqa: RUF005
            teacher_mass_ptrs += AT_ONCE * V
        mass_ptrs += AT_ONCE * V
        kept_here = tl.zeros((BLOCK_V,), tl.int32)
        drawn_here = tl.zeros((BLOCK_V,), tl.int32)
        for i in tl.static_range(AT_ONCE):
            mass = masses[i]
            # A mass is NaN where one of the block's tokens is: kept, as in `upstream_kernel`.
            kept_here |= tl.where(mass >= 0, 0, 1 << i)
            if HAS_DRAWN:
                # Masses of the column's level: at most `most`, but all above it at level 1.
                num_tokens = tl.maximum(tl.minimum(count - (first + i) * TOKENS, TOKENS), 0)
                most = top / TOKENS * num_tokens
                score = mass
                if HAS_TEACHER:
                    score = score_of(mass, teacher_masses[i], of_ratio, IS_REVERSE)
                drawn_by = score * times
                draws = (drawn_by > most * 0.5) & ((drawn_by <= most) | (draw_level == 1))
                drawn_here |= tl.where(draws, 1 << i, 0)
            factor = tl.load(factor_ptrs + (first + i) * LAUNCHES, mask=first + i < end, other=0.0)
            share += tl.maximum(mass, 0.0) * factor
            if HAS_TEACHER:
                factor = tl.load(
                    teacher_factor_ptrs + (first + i) * LAUNCHES, mask=first + i < end, other=0.0
                )
                if IS_REVERSE:
                    factor = factor / LOG2E
                    teacher_share += tl.where(mass >= 0, teacher_masses[i], 0.0) * factor
                else:
                    teacher_share += tl.maximum(teacher_masses[i], 0.0) * factor
            if first + i + 1 == stop:
                tl.store(share_ptrs, share.to(share_ptr.dtype.element_ty), mask=inside)
                if HAS_TEACHER:
                    value = teacher_share.to(share_ptr.dtype.element_ty)
                    tl.store(teacher_share_ptrs, value, mask=inside)
                    teacher_share = tl.zeros((BLOCK_V,), tl.float32)
                    teacher_share_ptrs += V
                share = tl.zeros((BLOCK_V,), tl.float32)
                share_ptrs += V
                stop = tl.minimum(stop + blocks_per_group, num_blocks)
        kept |= kept_here.to(tl.int64) << (first % 64)
        drawn |= drawn_here.to(tl.int64) << (first % 64)
        if (first % 64 == 64 - AT_ONCE) | (first + AT_ONCE >= num_blocks):
            tl.store(kept_ptr + at + first // 64, kept, mask=inside)
            if HAS_DRAWN:
                tl.store(drawn_ptr + at + first // 64, drawn, mask=inside)
            kept = tl.zeros((BLOCK_V,), tl.int64)
            drawn = tl.zeros((BLOCK_V,), tl.int64)


@triton.jit
def bits_of_blocks(words, TILE: tl.constexpr):
    """Turns a bit of 64 token blocks for each column, [TILE] int64, into a bit of 32 columns for
    each block, [TILE // 32, 64] int32."""
    block = tl.arange(0, 64).to(tl.int64)
    place = tl.arange(0, TILE) % 32
    bits = ((words[:, None] >> block[None, :]) & 1).to(tl.int32) << place[:, None]
    return tl.sum(tl.reshape(bits, (TILE // 32, 32, 64)), 1)


@triton.jit(do_not_specialize=["num_blocks", "words"])
def tiles_kernel(
    kept_ptr,  # [V, words] int64
    drawn_ptr,  # [V, words] int64
    order_ptr,  # [num_tiles * TILE] int32: columns by `key_kernel`; any column beyond V
    counts_ptr,  # [num_blocks + 2, num_tiles + 1] int32: entries of each block's list, of all
    # blocks', and of blocks that keep a column, in column tile + 1; zeros: out
    bits_ptr,  # [num_tiles, 1 + HAS_DRAWN, TILE // 32, num_blocks] int32, a bit for each of 32
    # columns: 1 where the block keeps it; then, with HAS_DRAWN, where it keeps or draws it: out
    blocks_ptr,  # [num_tiles, num_blocks] int32: blocks that keep a column: out
    position_ptr,  # [num_tiles, num_blocks] int16: its inverse, -1 elsewhere: out
    num_blocks_ptr,  # [num_tiles] int32: their number: out
    num_active_ptr,  # [1] int32, 0: tiles up to the last one that a block keeps: out
    V,
    num_tiles,
    num_blocks,
    words,
    TILE: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
):
    """Counts the entries of TILE consecutive columns of the order, and lists the blocks that keep
    any; a program a tile."""
    tile = tl.program_id(0)
    at = tile * TILE + tl.arange(0, TILE)
    column = tl.load(order_ptr + at)
    word_ptrs = column.to(tl.int64) * words
    list_ptr = blocks_ptr + tile.to(tl.int64) * num_blocks
    inverse_ptr = position_ptr + tile.to(tl.int64) * num_blocks
    part = tl.arange(0, TILE // 32)
    size = TILE // 32 * num_blocks
    bits_ptr += tile.to(tl.int64) * ((1 + HAS_DRAWN) * size)
    column_of_counts = counts_ptr + tile + 1
    stride = num_tiles + 1
    lane = tl.arange(0, 64)
    num_keeping = 0
    total = 0
    for word in range(words):
        block = word * 64 + lane
        bits_ptrs = bits_ptr + part[:, None] * num_blocks + block[None, :]
        inside = (block < num_blocks)[None, :]
        kept = tl.load(kept_ptr + word_ptrs + word, mask=at < V, other=0)
        bits = bits_of_blocks(kept, TILE)
        tl.store(bits_ptrs, bits, mask=inside)
        has = tl.max((bits != 0).to(tl.int32), 0)
        place = num_keeping + tl.cumsum(has, 0) - has
        tl.store(list_ptr + place, block, mask=has > 0)
        place = tl.where(has > 0, place, -1).to(tl.int16)
        tl.store(inverse_ptr + block, place, mask=block < num_blocks)
        num_keeping += tl.sum(has, 0)
        if HAS_DRAWN:
            kept |= tl.load(drawn_ptr + word_ptrs + word, mask=at < V, other=0)
            bits = bits_of_blocks(kept, TILE)
            tl.store(bits_ptrs + size, bits, mask=inside)
        number = tl.sum(ones_in(bits), 0)
        tl.store(column_of_counts + block * stride, number, mask=number > 0)
        total += tl.sum(number, 0)
    tl.store(num_blocks_ptr + tile, num_keeping)
    if total > 0:
        tl.store(column_of_counts + num_blocks * stride, total)
        tl.store(column_of_counts + (num_blocks + 1) * stride, num_keeping)
    if num_keeping > 0:
        tl.atomic_max(num_active_ptr, tile + 1)


@triton.jit
def running_sums_kernel(
    counts_ptr,  # [num_blocks + 2, num_tiles + 1] int32; in place
    num_tiles,
    BLOCK: tl.constexpr,
):
    """Sums a row of `tiles_kernel`'s counts up to each tile; a program a row. torch's cumsum takes
    the host as long as five launches."""
    row_ptr = counts_ptr + tl.program_id(0) * (num_tiles + 1)
    before = 0
    for start in range(0, num_tiles + 1, BLOCK):
        at = start + tl.arange(0, BLOCK)
        counts = tl.load(row_ptr + at, mask=at <= num_tiles, other=0)
        tl.store(row_ptr + at, before + tl.cumsum(counts, 0), mask=at <= num_tiles)
        before += tl.sum(counts, 0)


@triton.jit(do_not_specialize=["num_blocks", "rows_window", "pairs_window"])
def chunks_kernel(
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32: see `running_sums_kernel`
    first_ptr,  # [max_chunks + 1] int32: the first tile of each chunk, and where the last ends: out
    num_chunks_ptr,  # [1] int32: -1 where lists are too long: out
    base_ptr,  # [max_chunks, num_blocks + 1] int32: first row of each block's list: out
    segment_ptr,  # [max_chunks, num_blocks + 1] int32: first SDD task of each block: out
    count_ptr,  # [1] int32: tokens that count
    num_columns,
    num_tiles,
    num_blocks,
    rows_window,
    pairs_window,
    long,  # share of all pairs of a block and a column above which lists are too long; 0: never
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # a power of two above num_blocks
    ROWS: tl.constexpr,  # a list starts at a multiple of it
    SEGMENT: tl.constexpr,  # entries of an SDD task
    TOKENS: tl.constexpr,  # of a block
):
    """Cuts the tiles into chunks, and computes each block's first row and first SDD task of a
    chunk; a program a chunk. Each program cuts all of them, and the first one writes the cuts.

    A chunk ends where the running sum of list entries, or of pairs of a tile and a block that keeps
    it, passes a multiple of its window. So a chunk holds at most a window and one tile of either.
    The last chunk ends with the last tile that has an entry.
    """
    chunk = tl.program_id(0)
    writes = chunk == 0
    total_ptr = starts_ptr + num_blocks * (num_tiles + 1)
    pairs_ptr = total_ptr + num_tiles + 1
    grand = tl.load(total_ptr + num_tiles)
    number = 0
    stop = 0
    first = 0
    last = 0
    for start in range(0, num_tiles, BLOCK):
        tile = start + tl.arange(0, BLOCK)
        inside = tile < num_tiles
        total = tl.load(total_ptr + tile, mask=inside, other=0)
        window = total // rows_window
        window += tl.load(pairs_ptr + tile, mask=inside, other=0) // pairs_window
        has_before = inside & (tile > 0)
        before = tl.load(total_ptr + tile - 1, mask=has_before, other=0) // rows_window
        before += tl.load(pairs_ptr + tile - 1, mask=has_before, other=0) // pairs_window
        used = inside & (total < grand)
        is_first = (used & ((tile == 0) | (window != before))).to(tl.int32)
        place = number + tl.cumsum(is_first, 0) - is_first
        tl.store(first_ptr + place, tile, mask=(is_first > 0) & writes)
        first += tl.sum(tl.where(place == chunk, is_first * tile, 0), 0)
        last += tl.sum(tl.where(place == chunk + 1, is_first * tile, 0), 0)
        number += tl.sum(is_first, 0)
        stop += tl.sum(used.to(tl.int32), 0)
    pairs = tl.cdiv(tl.load(count_ptr), TOKENS).to(tl.float32) * num_columns
    is_long = (long > 0) & (grand.to(tl.float32) > long * pairs)
    tl.store(num_chunks_ptr, tl.where(is_long, -1, number), mask=writes)
    tl.store(first_ptr + number, stop, mask=writes)
    if chunk >= number:
        return
    last = tl.where(chunk + 1 == number, stop, last)
    block = tl.arange(0, BLOCKS)
    row_ptr = starts_ptr + block * (num_tiles + 1)
    length = tl.load(row_ptr + last, mask=block < num_blocks, other=0)
    length -= tl.load(row_ptr + first, mask=block < num_blocks, other=0)
    rows = tl.cdiv(length, ROWS) * ROWS
    tasks = tl.cdiv(length, SEGMENT)
    out = chunk * (num_blocks + 1) + block
    tl.store(base_ptr + out, tl.cumsum(rows, 0) - rows, mask=block <= num_blocks)
    tl.store(segment_ptr + out, tl.cumsum(tasks, 0) - tasks, mask=block <= num_blocks)


@triton.jit
def blocks_of(
    task,
    first_tile,  # of the chunk
    bits_ptr,  # [num_tiles, 1 + HAS_DRAWN, TILE // 32, num_blocks] int32: see `tiles_kernel`
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    base_ptr,  # [num_blocks + 1] int32, of the chunk
    num_tiles,
    num_blocks,
    words,
    TILE: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
):
    """Returns the task's tile, its 64 token blocks, pointers to their bits of the tile's first 32
    columns, and the row of each block's first entry in the tile."""
    tile = first_tile + task // words
    block = task % words * 64 + tl.arange(0, 64)
    inside = block < num_blocks
    of_block = starts_ptr + block * (num_tiles + 1)
    row = tl.load(base_ptr + block, mask=inside, other=0)
    row += tl.load(of_block + tile, mask=inside, other=0)
    row -= tl.load(of_block + first_tile, mask=inside, other=0)
    size = (1 + HAS_DRAWN) * (TILE // 32) * num_blocks
    return tile, block, bits_ptr + tile.to(tl.int64) * size + block, row


@triton.jit
def entries_of(bits_ptrs, inside, row, num_blocks, TILE: tl.constexpr, HAS_DRAWN: tl.constexpr):
    """Computes the entries of 64 token blocks in 32 columns.

    Returns, [64, 32] int32 each: 1 where a block keeps a column; 1 where it lists the column; the
    row of that entry. Then the row of each block's next entry, [64].
    """
    kept = tl.load(bits_ptrs, mask=inside, other=0)
    either = kept
    if HAS_DRAWN:
        either = tl.load(bits_ptrs + TILE // 32 * num_blocks, mask=inside, other=0)
    place = tl.arange(0, 32)[None, :]
    keeps = (kept[:, None] >> place) & 1
    listed = (either[:, None] >> place) & 1
    before = ones_in(either[:, None] & ((1 << place) - 1))
    return keeps, listed, row[:, None] + before, row + ones_in(either)


@triton.jit
def list_task(
    task,
    is_of_pairs,  # a tile's rows of pairs; else its entries
    first_tile,  # of the chunk
    bits_ptr,  # [num_tiles, 1 + HAS_DRAWN, TILE // 32, num_blocks] int32: see `tiles_kernel`
    order_ptr,  # [num_tiles * TILE] int32
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    base_ptr,  # [num_blocks + 1] int32, of the chunk
    entries_ptr,  # [rows] int32: the blocks' lists, one after the other; an entry is twice the
    # column, plus 1 where it was drawn: out
    position_ptr,  # [num_tiles, num_blocks] int16
    pair_rows_ptr,  # [pairs, TILE] int32: the workspace's row of each of a tile's columns; a row
    # of zeros where the block doesn't keep the column: out
    zeros_at,  # the first of TILE rows of zeros in the workspace
    num_tiles,
    num_blocks,
    words,
    TILE: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
):
    """Lists a tile's entries in 64 token blocks' lists of columns; or writes the rows from which
    DDS of the tile reads the blocks' d_logits."""
    # One copy of the code for both: the compiler takes as long as the code is.
    tile, block, bits_ptrs, row = blocks_of(
        task, first_tile, bits_ptr, starts_ptr, base_ptr, num_tiles, num_blocks, words, TILE,
        HAS_DRAWN,
    )  # fmt: skip
    inside = block < num_blocks
    position_ptrs = position_ptr + tile.to(tl.int64) * num_blocks + block
    position = tl.load(position_ptrs, mask=inside & is_of_pairs, other=-1).to(tl.int32)
    pairs_ptr = starts_ptr + (num_blocks + 1) * (num_tiles + 1)
    pair = tl.load(pairs_ptr + tile) - tl.load(pairs_ptr + first_tile) + position
    out_ptr = pair_rows_ptr if is_of_pairs else entries_ptr
    place = tl.arange(0, 32)[None, :]
    order_ptrs = order_ptr + tile * TILE + place
    # A loop, not a wider tensor, for the same reason.
    for part in range(TILE // 32):
        keeps, listed, at, row = entries_of(bits_ptrs, inside, row, num_blocks, TILE, HAS_DRAWN)
        entry = 2 * tl.load(order_ptrs + part * 32) + listed - keeps
        in_tile = part * 32 + place
        value = tl.where(is_of_pairs, tl.where(keeps > 0, at, zeros_at + in_tile), entry)
        place_of_value = tl.where(is_of_pairs, pair[:, None] * TILE + in_tile, at)
        written = tl.where(is_of_pairs, (position >= 0)[:, None], listed > 0)
        tl.store(out_ptr + place_of_value, value, mask=written)
        bits_ptrs += num_blocks
