"""The order of the columns in the backward's tiles: a key of each column, and a sort by it."""

import triton
import triton.language as tl


@triton.jit
def place_in_gray_code(bits):
    """Returns the place of a number of up to 16 bits in Gray code."""
    bits ^= bits >> 1
    bits ^= bits >> 2
    bits ^= bits >> 4
    return bits ^ (bits >> 8)


@triton.jit(do_not_specialize=["num_blocks", "words"])
def key_kernel(
    kept_ptr,  # [V, words] int64
    drawn_ptr,  # [V, words] int64
    key_ptr,  # [size] int32: sorting by it puts columns of many blocks first: out
    tally_ptr,  # [parts, DIGITS] int32 of each PART columns' lowest digits, from zeros: out
    V,
    num_blocks,
    words,
    BLOCK_V: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
    PART: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Computes 16-bit keys, in whose order the columns of a tile mostly share token blocks.

    All blocks are split into 8 runs, and into 16 half runs. The key holds, from its highest digit:
    - the number of runs with a block that keeps the column, most first;
    - which runs these are, as a place in a Gray code, whose neighbours differ in one run;
    - which halves of the first two of these runs; or, in a single run, whether one 64th of all
      blocks holds all, and which.

    Columns that are only drawn come next, then all others, both in their own order.
    docs/design/backward.md#the-order-of-columns.
    """
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = columns < V
    of16 = tl.zeros((BLOCK_V,), tl.int32)
    first = tl.full((BLOCK_V,), 64, tl.int32)
    last = tl.zeros((BLOCK_V,), tl.int32)
    any_drawn = tl.zeros((BLOCK_V,), tl.int64)
    for word in range(words):
        at = columns.to(tl.int64) * words + word
        kept = tl.load(kept_ptr + at, mask=inside, other=0)
        if HAS_DRAWN:
            any_drawn |= tl.load(drawn_ptr + at, mask=inside, other=0)
        # No block keeps most columns, nor their neighbours.
        any_kept = tl.max((kept != 0).to(tl.int32), 0)
        for lane in range(any_kept * tl.minimum(num_blocks - word * 64, 64)):
            place = (word * 64 + lane) * 64 // num_blocks
            has = ((kept >> lane) & 1).to(tl.int32)
            of16 |= has << (15 - place // 4)
            first = tl.where(has > 0, tl.minimum(first, place), first)
            last = tl.where(has > 0, place, last)
    of8 = tl.zeros((BLOCK_V,), tl.int32)
    number = tl.zeros((BLOCK_V,), tl.int32)
    halves = tl.zeros((BLOCK_V,), tl.int32)
    for i in tl.static_range(8):
        two = (of16 >> (14 - 2 * i)) & 3
        halves = tl.where((two > 0) & (number < 2), (halves << 2) | two, halves)
        of8 |= (two > 0).to(tl.int32) << (7 - i)
        number += (two > 0).to(tl.int32)
    detail = tl.where(number > 1, halves, first % 8 + tl.where(first == last, 0, 8))
    key = ((8 - number) << 12) | (place_in_gray_code(of8) << 4) | detail
    key = tl.where(number > 0, key, tl.where(any_drawn != 0, 8, 9) << 12)
    key = tl.where(inside, key, DIGITS * DIGITS - 1)
    tl.store(key_ptr + columns, key)
    digit = tl.arange(0, DIGITS)
    part = tl.program_id(0) * BLOCK_V // PART
    tl.atomic_add(tally_ptr + part * DIGITS + digit, tl.histogram(key % DIGITS, DIGITS))


@triton.jit(do_not_specialize=["size", "parts"])
def sort_kernel(
    key_ptr,  # [size] int32 keys of two digits; for HIGHEST `out_ptr` of the first pass
    tally_ptr,  # [parts, DIGITS] int32: how many of each PART keys have each digit
    out_ptr,  # [size]: out. int64: a key's highest digit, then its column in 32 bits; for HIGHEST
    # int32: the column, 0 beyond V
    next_tally_ptr,  # [parts, DIGITS] int32 of the next pass, from zeros: out, unless HIGHEST
    V,
    size,
    parts,
    PART: tl.constexpr,
    DIGITS: tl.constexpr,
    AT_ONCE: tl.constexpr,  # parts whose digits a program adds up at a time
    HIGHEST: tl.constexpr,  # the second pass, by the highest digit
):
    """One pass of a stable sort of PART columns by a digit of their keys; a program a part."""
    part = tl.program_id(0)
    digit = tl.arange(0, DIGITS)
    total = tl.zeros((DIGITS,), tl.int32)
    before = tl.zeros((DIGITS,), tl.int32)
    for start in range(0, parts, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)[:, None]
        tally_ptrs = tally_ptr + other * DIGITS + digit[None, :]
        tally = tl.load(tally_ptrs, mask=other < parts, other=0)
        total += tl.sum(tally, 0)
        before += tl.sum(tl.where(other < part, tally, 0), 0)
    lane = tl.arange(0, PART)
    inside = part * PART + lane < size
    key = tl.load(key_ptr + part * PART + lane, mask=inside, other=0)
    mine = (key >> 32).to(tl.int32) if HIGHEST else key % DIGITS
    # Equal digits keep their order: the lane is part of what is sorted.
    ordered = tl.sort(tl.where(inside, mine, DIGITS) * PART + lane)
    mine, at = ordered // PART, part * PART + ordered % PART
    key = tl.load(key_ptr + at, mask=inside, other=0)
    # Place 0 of the part's keys of each digit, were the part's first key at 0.
    others = total - tl.load(tally_ptr + part * DIGITS + digit)
    base = tl.cumsum(others, 0) - others + before
    place = tl.gather(base, tl.minimum(mine, DIGITS - 1), 0) + lane
    if HIGHEST:
        column = key.to(tl.int32)
        tl.store(out_ptr + place, tl.where(column < V, column, 0), mask=inside)
    else:
        highest = key // DIGITS
        tl.store(out_ptr + place, (highest.to(tl.int64) << 32) | at, mask=inside)
        tl.atomic_add(next_tally_ptr + place // PART * DIGITS + highest, 1, mask=inside)
