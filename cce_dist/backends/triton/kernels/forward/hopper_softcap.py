"""Softcapping of a tile of products in Hopper's forward: few tokens at a time.

With all tokens of a tile at once, a thread would hold probabilities and slopes beside the logits:
more numbers than it has registers. docs/design/forward.md#a-softcap
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.forward.hopper_stats import (
    DROPPED_PARTS,
    add_dropped,
    add_stats,
)
from cce_dist.backends.triton.kernels.forward.hopper_sums import (
    APART,
    PARTS,
    join_tokens,
    joined_sums,
    log2_scale_across,
    split_tokens,
    with_rows_of,
)

near_tanh = gluon.jit(numbers.near_tanh.fn)
reciprocal = gluon.jit(numbers.reciprocal.fn)


@gluon.jit
def for_each_token(x, LAYOUT: gl.constexpr):
    """Returns [ROWS] as [ROWS, 1]."""
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)[:, None]


@gluon.jit
def pair_of(x, y):
    """Packs two numbers as bf16 into 32 bits, rounded to nearest, as thousands are summed."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def first_of(pair):
    return (pair & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def second_of(pair):
    return (pair << 16).to(gl.float32, bitcast=True)


@gluon.jit
def tanh_of_8_bits(u, FINE: gl.constexpr):
    """Computes tanh x of u = 2 log2(e) x, to 2^-22; if FINE, to 2^-19 of itself."""
    if FINE:
        return near_tanh(u * (0.5 / numbers.LOG2E))
    else:
        return 1.0 - 2.0 * reciprocal(gl.exp2(u) + 1.0)


@gluon.jit
def add_softcapped(
    x,  # [ROWS, BLOCK_N] products
    total,  # [4, 8, BLOCK_N] sums over a thread's rows of exp2(z - ref)
    of_columns,  # [ROWS] each: bias; factor and shift of 8-bit products. If IS_SCREENED all three,
    # and the tokens' shifts, are multiplied by 2 log2(e) / softcap
    of_token,  # in shared memory, from `base`: see `hopper.sum_tiles`
    base,
    sum_tiles,  # see `allocate_sums`
    mass_ptr,
    key_ptr,
    columns,  # [ROWS]
    V,
    log2_scale,
    softcap,
    threshold,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SCORE: gl.constexpr,
    BY_LARGEST: gl.constexpr,
    IS_SCREENED: gl.constexpr,
    FINE: gl.constexpr,  # see `tanh_of_8_bits`
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
    HAS_ARGMAX: gl.constexpr,
    HAS_MOMENTS: gl.constexpr,
):
    """Adds a tile of `hopper.sum_tiles` to total, which it returns, and to the sums in shared
    memory."""
    HAS_WHOLE_SURPLUS: gl.constexpr = HAS_SURPLUS and not IS_SCREENED
    HAS_WHOLE_SQUARES: gl.constexpr = HAS_SQUARES and not IS_SCREENED
    TOKENS: gl.constexpr = BLOCK_N // PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 8])
    across: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    columns = gl.convert_layout(columns, rows, assert_trivial=True)
    inside = columns < V
    products = split_tokens(x, ROWS, BLOCK_N, PARTS)
    before = split_tokens(total, APART, BLOCK_N, PARTS)
    totals = ()
    kept = ()
    mass = None
    largest = None
    for i in gl.static_range(PARTS):
        y = gl.convert_layout(products[i], LAYOUT, assert_trivial=True)
        if IS_SCREENED:
            times = of_token.index(base + 1).slice(i * TOKENS, TOKENS).load(across)
            shift = of_token.index(base + 2).slice(i * TOKENS, TOKENS).load(across)
            y = y.to(gl.float32) * for_each_token(of_columns[1], rows)
            y = y * times[None, :] + for_each_token(of_columns[2], rows)
            y += shift[None, :]
        if HAS_BIAS:
            y += for_each_token(of_columns[0], rows)
        t = tanh_of_8_bits(y, FINE) if IS_SCREENED else near_tanh(y * (1.0 / softcap))
        ref = of_token.index(base).slice(i * TOKENS, TOKENS).load(across)
        factor = log2_scale_across(log2_scale, of_token.index(base + 1), i * TOKENS, TOKENS, across)
        log_p = t * (factor * softcap) - ref[None, :]
        # A branch would move the parts' registers to memory.
        p = gl.where(inside[:, None], gl.exp2(log_p), 0.0)
        totals = totals + (with_rows_of(before[i], p, ROWS, TOKENS),)  # noqa: RUF005
        if HAS_SCORE:
            q = p * (1.0 - t * t)
            # Leaves eight sums, each over tokens that one thread holds.
            row_mass = gl.sum(gl.reshape(q, (ROWS, TOKENS // 8, 8)), 1)
            mass = row_mass if i == 0 else mass + row_mass
            if BY_LARGEST:
                top = gl.max(p, 1)
                largest = top if i == 0 else gl.maximum(largest, top)
            kept = kept + (pair_of(p, q) if IS_SCREENED else q,)  # noqa: RUF005
        if HAS_WHOLE_SURPLUS or HAS_WHOLE_SQUARES or HAS_ARGMAX:
            if HAS_ARGMAX:
                y = gl.where(inside[:, None], y, float("-inf"))
            z = t * (factor * softcap * (1.0 / numbers.LOG2E))
            add_stats(
                i, log_p, p, y, z, columns, V, key_ptr, of_token, base, sum_tiles, ROWS, TOKENS,
                HAS_WHOLE_SURPLUS, HAS_WHOLE_SQUARES, HAS_ARGMAX, HAS_MOMENTS,
            )  # fmt: skip
    total = joined_sums(totals, total, BLOCK_N, PARTS)
    if HAS_SCORE:
        mass = gl.convert_layout(gl.sum(mass, 1), rows)
        keeps = (largest if BY_LARGEST else mass) >= threshold
        mark = gl.where(keeps, -gl.maximum(mass, 1e-30), mass)
        gl.store(mass_ptr + columns, mark.to(mass_ptr.dtype.element_ty), mask=inside)
        drops = gl.where(keeps, 0.0, 1.0)
        TOGETHER: gl.constexpr = PARTS // DROPPED_PARTS
        WIDE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOGETHER * TOKENS, 8])
        drops = gl.convert_layout(drops, gl.SliceLayout(1, WIDE), assert_trivial=True)[:, None]
        for i in gl.static_range(DROPPED_PARTS):
            part = join_tokens(kept, i * TOGETHER, ROWS, TOGETHER * TOKENS, TOGETHER)
            part = gl.convert_layout(part, WIDE, assert_trivial=True)
            p = first_of(part) * drops if IS_SCREENED else part
            q = (second_of(part) if IS_SCREENED else part) * drops
            add_dropped(
                i, p, q, sum_tiles, base // 5, ROWS, TOGETHER * TOKENS,
                HAS_SURPLUS and IS_SCREENED, HAS_SQUARES and IS_SCREENED, IS_SCREENED,
            )  # fmt: skip
    return total
