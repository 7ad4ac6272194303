"""Parts of a tile that Hopper's forward has in registers: sums over its rows, groups of tokens."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce_dist.backends.triton.kernels import numbers

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
def joined_sums(parts, like, TOKENS: gl.constexpr):
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
