"""Statistics of the logits that few callers ask for, in Hopper's forward.

Its sums of exponentials leave a thread few registers. So the largest product goes to memory, by
atomics that few columns need after the first tiles, and sums go to shared memory.
docs/design/forward.md#statistics
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.forward import launches
from cce_dist.backends.triton.kernels.forward.hopper_sums import (
    APART,
    PARTS,
    forget_sum,
    join_tokens,
    joined_sums,
    log2_scale_across,
    rows_of_thread,
    split_tokens,
    take_sum,
    with_rows_of,
    with_sum,
)
from cce_dist.backends.triton.kernels.hopper_products import GROUPS

# A column is stored as what it lacks to this number: of equal products the lowest column wins.
NO_COLUMN = gl.constexpr(2**31 - 1)
# Parts of a tile's tokens, computed one after the other: before each the warps wait for each other.
DROPPED_PARTS = gl.constexpr(2)
# Smaller probabilities add nothing to a sum of p log p.
LEAST = gl.constexpr(1e-37)

near_tanh = gluon.jit(numbers.near_tanh.fn)
fast_log2 = gluon.jit(numbers.fast_log2.fn)


@gluon.jit
def start_stats(
    sum_tiles,  # see `allocate_sums`
    of_token,  # in shared memory: see `hopper.sum_tiles`
    group,
    key_ptrs,  # [BLOCK_N] of the first split: see `key_of`
    extras_ptrs,  # [BLOCK_N] in the first field of [8, size]: see `add_extras`
    split_offset,  # this split's place from the first
    splits,
    stride,  # of two splits
    size,
    lower,  # [BLOCK_N] a bound of lse, log2
    counts,  # [BLOCK_N]
    launch,
    HAS_ARGMAX: gl.constexpr,
    HAS_MOMENTS: gl.constexpr,
):
    """Starts a launch's statistics."""
    SUMS: gl.constexpr = sum_tiles.shape[0] // GROUPS
    for i in gl.static_range(SUMS):
        forget_sum(sum_tiles.index(SUMS * group + i))
    if HAS_MOMENTS:
        of_token.index(5 * group + 4).store(start_moments(extras_ptrs, size, lower, launch))
    if HAS_ARGMAX:
        begins = (launch == launches.PROBE) | (launch >= launches.ALONE)
        best = start_largest(key_ptrs, split_offset, splits, stride, counts, begins)
        of_token.index(5 * group + 3).store(best)


@gluon.jit
def update_stats(
    sum_tiles,
    of_token,
    group,
    key_ptrs,  # [BLOCK_N] of this split
    extras_ptrs,
    size,
    counts,
    number,  # of the stretch's columns
    HAS_ARGMAX: gl.constexpr,
    HAS_MOMENTS: gl.constexpr,
):
    """Ends a stretch: merges its moments, and looks up the largest products so far."""
    layout: gl.constexpr = extras_ptrs.type.layout
    if HAS_MOMENTS:
        first = sum_tiles.shape[0] // GROUPS * group
        sums = take_sum(sum_tiles.index(first), layout)
        squares = take_sum(sum_tiles.index(first + 1), layout)
        tile = of_token.index(5 * group + 4)
        tile.store(merge_moments(sums, squares, extras_ptrs, size, tile.load(layout), number))
    if HAS_ARGMAX:
        # Past the first-level cache, which atomics do not write.
        largest = product_of(gl.load(key_ptrs, cache_modifier=".cg"))
        tile = of_token.index(5 * group + 3)
        tile.store(gl.maximum(tile.load(layout), gl.where(counts, largest, float("inf"))))


@gluon.jit
def add_stats(
    part,  # number of the part of the tile's tokens
    log_p,  # [ROWS, TOKENS] z - ref, log2
    p,  # exp2(log_p)
    x,  # products and bias; -inf in columns beyond V, if HAS_ARGMAX
    z,  # logits
    columns,  # [ROWS]
    V,
    key_ptr,  # [BLOCK_N]: see `key_of`
    of_token,  # in shared memory, from `base`: see `hopper.sum_tiles`
    base,
    sum_tiles,  # see `allocate_sums`
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
    HAS_ARGMAX: gl.constexpr,
    HAS_MOMENTS: gl.constexpr,
):
    """Adds a part of a tile to the statistics."""
    SUMS: gl.constexpr = sum_tiles.shape[0] // GROUPS
    first = base // 5 * SUMS + 2 * HAS_MOMENTS
    if HAS_ARGMAX:
        best_tile = of_token.index(base + 3).slice(part * TOKENS, TOKENS)
        add_largest(x, columns, best_tile, key_ptr + part * TOKENS, ROWS, TOKENS)
    # All loads come before all stores: between them the warps wait for each other.
    if HAS_SURPLUS:
        # 0 times -inf would be NaN.
        surplus_tile = sum_tiles.index(first).slice(part * TOKENS, TOKENS, 1)
        excess = with_sum(surplus_tile, p * gl.maximum(log_p, numbers.LOWEST), ROWS)
    if HAS_SQUARES:
        p2_tile = sum_tiles.index(first + HAS_SURPLUS).slice(part * TOKENS, TOKENS, 1)
        p2 = with_sum(p2_tile, p * p, ROWS)
    if HAS_MOMENTS:
        origin_tile = of_token.index(base + 4).slice(part * TOKENS, TOKENS)
        origin = origin_tile.load(gl.SliceLayout(0, z.type.layout))
        off = gl.where((columns < V)[:, None], z - origin[None, :], 0.0)
        sum_tile = sum_tiles.index(first - 2).slice(part * TOKENS, TOKENS, 1)
        square_tile = sum_tiles.index(first - 1).slice(part * TOKENS, TOKENS, 1)
        sums = with_sum(sum_tile, off, ROWS)
        squares = with_sum(square_tile, off * off, ROWS)
    if HAS_SURPLUS:
        surplus_tile.store(excess)
    if HAS_SQUARES:
        p2_tile.store(p2)
    if HAS_MOMENTS:
        sum_tile.store(sums)
        square_tile.store(squares)


@gluon.jit
def add_dropped(
    part,  # number of the part of the tile's tokens
    p,  # [ROWS, TOKENS] exp2(z - ref), 0 in kept columns
    q,  # the same, times softcap'(z)
    sum_tiles,  # see `allocate_sums`
    group,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
    HAS_UNKEPT: gl.constexpr,
):
    """Adds a part of a tile to the sums over dropped columns."""
    at = sum_tiles.shape[0] // GROUPS * (group + 1) - 1
    dropped_tile = sum_tiles.index(at).slice(part * TOKENS, TOKENS, 1)
    dropped = with_sum(dropped_tile, q, ROWS)
    if HAS_UNKEPT:
        unkept_tile = sum_tiles.index(at - 1).slice(part * TOKENS, TOKENS, 1)
        unkept = with_sum(unkept_tile, p, ROWS)
    at -= HAS_UNKEPT + HAS_SQUARES
    if HAS_SQUARES:
        p2_tile = sum_tiles.index(at).slice(part * TOKENS, TOKENS, 1)
        p2 = with_sum(p2_tile, p * p, ROWS)
    if HAS_SURPLUS:
        # 0 times -inf would be NaN.
        surplus_tile = sum_tiles.index(at - 1).slice(part * TOKENS, TOKENS, 1)
        excess = with_sum(surplus_tile, p * fast_log2(gl.maximum(p, LEAST)), ROWS)
    dropped_tile.store(dropped)
    if HAS_UNKEPT:
        unkept_tile.store(unkept)
    if HAS_SQUARES:
        p2_tile.store(p2)
    if HAS_SURPLUS:
        surplus_tile.store(excess)


@gluon.jit
def add_plain_dropped(
    p,  # [ROWS, BLOCK_N] exp2(z - ref)
    drops,  # [ROWS] 1 where the column is dropped, else 0
    sum_tiles,
    group,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
):
    """Adds a tile without softcap to the sums over dropped columns."""
    TOKENS: gl.constexpr = BLOCK_N // DROPPED_PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 8])
    drops = gl.convert_layout(drops, gl.SliceLayout(1, LAYOUT), assert_trivial=True)[:, None]
    parts = split_tokens(p, ROWS, BLOCK_N, DROPPED_PARTS)
    for i in gl.static_range(DROPPED_PARTS):
        q = gl.convert_layout(parts[i], LAYOUT, assert_trivial=True) * drops
        add_dropped(i, q, q, sum_tiles, group, ROWS, TOKENS, HAS_SURPLUS, HAS_SQUARES, False)


@gluon.jit
def add_plain(
    x,  # [ROWS, BLOCK_N] logits without scale; -inf in columns beyond V
    total,  # [4, 8, BLOCK_N] sums over a thread's rows of exp2(z - ref)
    columns,  # [ROWS]
    V,
    log2_scale,
    key_ptr,
    of_token,
    base,
    sum_tiles,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
    HAS_ARGMAX: gl.constexpr,
    HAS_MOMENTS: gl.constexpr,
):
    """Adds a tile without softcap to the statistics and to total; returns it, and exp2(z - ref).

    With all tokens of a tile at once, a thread would hold more numbers than it has registers.
    """
    TOKENS: gl.constexpr = BLOCK_N // PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 8])
    across: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    columns = gl.convert_layout(columns, gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    products = split_tokens(x, ROWS, BLOCK_N, PARTS)
    before = split_tokens(total, APART, BLOCK_N, PARTS)
    totals = ()
    exponentials = ()
    for i in gl.static_range(PARTS):
        y = gl.convert_layout(products[i], LAYOUT, assert_trivial=True)
        ref = of_token.index(base).slice(i * TOKENS, TOKENS).load(across)
        factor = log2_scale_across(log2_scale, of_token.index(base + 1), i * TOKENS, TOKENS, across)
        log_p = y * factor - ref[None, :]
        p = gl.exp2(log_p)
        totals = totals + (with_rows_of(before[i], p, ROWS, TOKENS),)  # noqa: RUF005
        z = y * (factor * (1.0 / numbers.LOG2E))
        add_stats(
            i, log_p, p, y, z, columns, V, key_ptr, of_token, base, sum_tiles, ROWS, TOKENS,
            HAS_SURPLUS, HAS_SQUARES, HAS_ARGMAX, HAS_MOMENTS,
        )  # fmt: skip
        exponentials = exponentials + (p,)  # noqa: RUF005
    total = joined_sums(totals, total, BLOCK_N, PARTS)
    p = join_tokens(exponentials, 0, ROWS, BLOCK_N, PARTS)
    return total, gl.convert_layout(p, x.type.layout, assert_trivial=True)


@gluon.jit
def add_largest(
    x,  # [ROWS, TOKENS] products and bias; -inf in columns beyond V
    columns,  # [ROWS]
    best_tile,  # [TOKENS] in shared memory: larger products count
    key_ptr,  # [TOKENS]
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """Raises each token's key to that of its largest product."""
    values = rows_of_thread(x, ROWS, TOKENS)
    lacks = NO_COLUMN - columns[:, None] + gl.zeros_like(x).to(gl.int32)
    lacks = rows_of_thread(lacks, ROWS, TOKENS)
    top = values[0]
    lack = lacks[0]
    for i in gl.static_range(1, 4):
        better = values[i] > top
        top = gl.where(better, values[i], top)
        lack = gl.where(better, lacks[i], lack)
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, top.type.layout))
    best = gl.expand_dims(best_tile.load(layout)[None, :], 1)
    ptrs = gl.expand_dims((key_ptr + gl.arange(0, TOKENS, layout))[None, :], 1)
    ptrs += gl.zeros_like(lack)
    gl.atomic_max(ptrs, key_of(top, lack), mask=top > best, sem="relaxed")


@gluon.jit
def key_of(x, lack):
    """Returns an int64 that ascends with x, and among equal x with what a column lacks."""
    bits = x.to(gl.int32, bitcast=True)
    return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(gl.int64) << 32) | lack.to(gl.int64)


@gluon.jit
def product_of(key):
    bits = (key >> 32).to(gl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def start_largest(
    key_ptrs,  # [BLOCK_N] of the first split
    split_offset,  # this split's place from there
    splits,
    stride,
    counts,  # [BLOCK_N]
    begins,  # whether no launch before has looked
):
    """Returns the products that larger ones must exceed, [BLOCK_N]: the largest of all splits."""
    nothing = counts.to(gl.float32) * 0.0 - float("inf")
    gl.store(key_ptrs + split_offset, key_of(nothing, counts.to(gl.int32) * 0), mask=begins)
    mine = nothing
    others = nothing
    if not begins:
        mine = product_of(gl.load(key_ptrs + split_offset))
        for split in range(splits):
            others = gl.maximum(others, product_of(gl.load(key_ptrs + split * stride)))
    # Of equal products in two splits both count, as the lower column wins.
    margin = gl.where(gl.abs(others) < float("inf"), gl.abs(others) * 1e-5 + 1e-30, 0.0)
    return gl.where(counts, gl.maximum(mine, others - margin), float("inf"))


@gluon.jit
def end_largest(
    key_ptrs,  # [BLOCK_N] of this split
    extras_ptrs,  # [BLOCK_N] in the first field of [8, size]: see `add_extras`
    size,
    token,
    scale,
    softcap,
    to_tanh,  # factor of the products in the keys
    HAS_SOFTCAP: gl.constexpr,
):
    """Stores the largest logit and its column."""
    key = gl.load(key_ptrs, cache_modifier=".cg")
    z = product_of(key) / to_tanh
    if HAS_SOFTCAP:
        z = near_tanh(z / softcap) * softcap
    if scale.dtype.is_ptr():
        z *= gl.load(scale + token)
    else:
        z *= scale
    gl.store(extras_ptrs, z)
    gl.store(extras_ptrs + size, (NO_COLUMN - (key & 0x7FFFFFFF)).to(gl.float32))


@gluon.jit
def start_moments(extras_ptrs, size, lower, launch):
    """Returns the origin of the first stretch, [BLOCK_N]: the mean so far. PROBE computes columns
    for this origin alone, as FIRST does them again."""
    if (launch == launches.PROBE) | (launch >= launches.ALONE):
        lower *= 1.0 / numbers.LOG2E
        origin = gl.where(gl.abs(lower) < -0.5 * numbers.LOWEST, lower, 0.0)
        gl.store(extras_ptrs + 2 * size, origin)
        gl.store(extras_ptrs + 3 * size, origin * 0.0)
    if (launch <= launches.FIRST) | (launch >= launches.ALONE):
        origin = mean_so_far(extras_ptrs, size)
        gl.store(extras_ptrs + 2 * size, origin)
        gl.store(extras_ptrs + 3 * size, origin * 0.0)
        gl.store(extras_ptrs + 4 * size, origin * 0.0)
        gl.store(extras_ptrs + 6 * size, origin * 0.0)
    return mean_so_far(extras_ptrs, size)


@gluon.jit
def mean_so_far(extras_ptrs, size):
    mean = gl.load(extras_ptrs + 2 * size) + gl.load(extras_ptrs + 3 * size)
    return gl.where(gl.abs(mean) < float("inf"), mean, 0.0)


@gluon.jit
def merge_moments(first, second, extras_ptrs, size, origin, number):
    """Merges a stretch of `number` columns into mean and m2 of `add_extras` by Chan's update, and
    returns the next stretch's origin, the mean so far. Without its origin at the mean, a sum of
    squares would lose the digits of the variance."""
    seen = gl.load(extras_ptrs + 6 * size)
    # The stretch's mean, from its origin.
    mean = first / gl.maximum(number, 1).to(gl.float32)
    m2 = second - first * mean
    # Rounding can make the difference negative; NaN stays.
    m2 = gl.where(m2 < 0, 0.0, m2)
    old_mean = gl.load(extras_ptrs + 3 * size)
    delta = origin - gl.load(extras_ptrs + 2 * size) - old_mean + mean
    share = number / gl.maximum(seen + number, 1.0)
    gl.store(extras_ptrs + 3 * size, old_mean + delta * share)
    old_m2 = gl.load(extras_ptrs + 4 * size)
    gl.store(extras_ptrs + 4 * size, old_m2 + m2 + delta * delta * (seen * share))
    gl.store(extras_ptrs + 6 * size, seen + number)
    return mean_so_far(extras_ptrs, size)
