"""Sums over the rows of a tile, in registers and in shared memory, and groups of its tokens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.hopper_products import GROUPS

# Parts of a tile's tokens, which are computed one after the other.
PARTS = gl.constexpr(8)
# Rows that are left after summing over each thread's rows: no two lie in one thread.
APART = gl.constexpr(32)

log2_scale_of = gluon.jit(numbers.log2_scale_of.fn)


@gluon.jit
def partial_sums(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Adds the rows that a thread of four warps holds: [ROWS, COLUMNS] -> [4, 8, COLUMNS]."""
    split = gl.reshape(x, (ROWS // 64, 4, 2, 8, COLUMNS))
    return gl.sum(gl.sum(split, 2), 0)


@gluon.jit
def whole_sum(x, layout: gl.constexpr):
    """Sums [4, 8, COLUMNS] -> [COLUMNS], over lanes first: the sums of warps then fit little
    shared memory."""
    return gl.convert_layout(gl.sum(gl.sum(x, 1), 0), layout)


@gluon.jit
def split_tokens(x, ROWS: gl.constexpr, TOKENS: gl.constexpr, PARTS: gl.constexpr):
    """Splits [ROWS, TOKENS] into a tuple of PARTS, a power of two. No number changes its thread."""
    if PARTS == 1:
        return (x,)
    else:
        HALF: gl.constexpr = TOKENS // 2
        first, last = gl.split(gl.permute(gl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
        firsts = split_tokens(first, ROWS, HALF, PARTS // 2)
        return firsts + split_tokens(last, ROWS, HALF, PARTS // 2)


@gluon.jit
def join_tokens(
    parts, FIRST: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, PARTS: gl.constexpr
):
    """Reverses `split_tokens`: joins PARTS parts, from the FIRST on, to [ROWS, TOKENS]."""
    if PARTS == 1:
        return parts[FIRST]
    else:
        HALF: gl.constexpr = PARTS // 2
        first = join_tokens(parts, FIRST, ROWS, TOKENS // 2, HALF)
        last = join_tokens(parts, FIRST + HALF, ROWS, TOKENS // 2, HALF)
        return gl.reshape(gl.permute(gl.join(first, last), (0, 2, 1)), (ROWS, TOKENS))


@gluon.jit
def with_rows_of(sums, x, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    """Adds to sums [APART, TOKENS] the rows of x [ROWS, TOKENS] that a thread of 4 warps holds."""
    split = gl.reshape(x, (ROWS // 64, 4, 2, 8, TOKENS))
    row_sums = gl.reshape(gl.sum(gl.sum(split, 2), 0), (APART, TOKENS))
    # The two layouts differ in name alone.
    return gl.convert_layout(sums, row_sums.type.layout, assert_trivial=True) + row_sums


@gluon.jit
def joined_sums(parts, like, TOKENS: gl.constexpr, PARTS: gl.constexpr):
    """Joins the sums of all parts -> [4, 8, TOKENS] in the layout of `like`."""
    whole = gl.reshape(join_tokens(parts, 0, APART, TOKENS, PARTS), (4, 8, TOKENS))
    return gl.convert_layout(whole, like.type.layout, assert_trivial=True)


@gluon.jit
def store_log2_scales(log2_scale, token, of_tokens):
    """Copies each token's scale, times log2(e), to shared memory if `log2_scale` is a pointer."""
    if log2_scale.dtype.is_ptr():
        of_tokens.store(numbers.LOG2E * gl.load(log2_scale + token))


@gluon.jit
def log2_scale_across(
    log2_scale, of_tokens, FIRST: gl.constexpr, TOKENS: gl.constexpr, LAYOUT: gl.constexpr
):
    """Returns `numbers.log2_scale_across`, from the scales that `store_log2_scales` has stored."""
    if log2_scale.dtype.is_ptr():
        return of_tokens.slice(FIRST, TOKENS).load(LAYOUT)[None, :]
    else:
        return log2_scale


@gluon.jit
def allocate_sums(
    BLOCK_N: gl.constexpr,
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
    HAS_MOMENTS: gl.constexpr,
    HAS_UNKEPT: gl.constexpr,
    HAS_DROPPED: gl.constexpr,
):
    """Allocates the sums of all groups in shared memory, [SUMS GROUPS, LEFT, BLOCK_N]. A group's
    sums, of those that are wanted: of z - origin; of its square; of exp2(z - ref) (z - ref), log2;
    of exp2(z - ref)^2; over dropped columns of exp2(z - ref); of exp2(z - ref) softcap'(z). The
    last two would not fit the registers beside statistics or a softcap. LEFT rows are left of a
    tile: two of each warp, or one, as more than three sums with two do not fit."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums: gl.constexpr = HAS_SURPLUS + HAS_SQUARES + 2 * HAS_MOMENTS + HAS_UNKEPT + HAS_DROPPED
    left: gl.constexpr = 4 if sums > 3 else 8
    if sums == 0:
        # Nothing reads it.
        return gl.allocate_shared_memory(gl.float32, [1, 1, 1], layout)
    else:
        return gl.allocate_shared_memory(gl.float32, [sums * GROUPS, left, BLOCK_N], layout)


@gluon.jit
def rows_of_warps(x, ROWS: gl.constexpr, TOKENS: gl.constexpr, LEFT: gl.constexpr):
    """Sums [ROWS, TOKENS] -> [LEFT, TOKENS] within each warp."""
    split = gl.reshape(x, (ROWS // 64, 4, 2, 8, TOKENS))
    return gl.sum(gl.reshape(gl.sum(gl.sum(split, 2), 0), (LEFT, 32 // LEFT, TOKENS)), 1)


@gluon.jit
def with_sum(tile, x, ROWS: gl.constexpr):
    """Returns a sum in shared memory, [LEFT, TOKENS], with the rows of x [ROWS, TOKENS] added."""
    rows = rows_of_warps(x, ROWS, tile.shape[1], tile.shape[0])
    return rows + tile.load(rows.type.layout)


@gluon.jit
def forget_sum(tile):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    rows: gl.constexpr = tile.shape[0]
    tokens: gl.constexpr = tile.shape[1]
    tile.store(gl.zeros((rows, tokens), gl.float32, layout))


@gluon.jit
def take_sum(tile, LAYOUT: gl.constexpr):
    """Returns the sum of a tile's rows, [BLOCK_N], and forgets it."""
    # All rows of a token in one thread.
    by_token: gl.constexpr = gl.BlockedLayout([tile.shape[0], 1], [1, 32], [1, 4], [0, 1])
    total = gl.convert_layout(gl.sum(tile.load(by_token), 0), LAYOUT)
    forget_sum(tile)
    return total


@gluon.jit
def rows_of_thread(x, ROWS: gl.constexpr, TOKENS: gl.constexpr):
    """Splits [ROWS, TOKENS] into the four rows that a thread holds of each token, in ascending
    order: a tuple of four [4, 8, TOKENS]."""
    gl.static_assert(ROWS == 128)
    split = gl.permute(gl.reshape(x, (2, 4, 2, 8, TOKENS)), (1, 3, 4, 0, 2))
    lower, upper = gl.split(split)
    first, third = gl.split(lower)
    second, fourth = gl.split(upper)
    return (first, second, third, fourth)
