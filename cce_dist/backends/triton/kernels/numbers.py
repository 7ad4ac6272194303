"""Functions that the kernels share: scales, the logit function, loads, sums within a thread."""

import os

import triton
import triton.language as tl

# Interpreted kernels take NumPy's exponentials: a substitute for the hardware's gains nothing.
IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
# Exponentials are in base 2, as the hardware's are: logits are multiplied by log2(e) once.
LOG2E = tl.constexpr(1.4426950408889634)
# The same as fp32 holds it.
LOG2E_FP32 = tl.constexpr(1.44269502162933349609375)
# The lower bound of an empty sum: finite, so that the difference of two is not NaN.
LOWEST = tl.constexpr(-1e30)
# A normal number of fp32, near its smallest.
LEAST_NORMAL = tl.constexpr(1e-37)
# The reference of a token that doesn't count: every exp2(logit - reference) is 0.
HIGHEST = tl.constexpr(1e30)


@triton.jit
def tanh(x):
    """Computes tanh, near 0 by a polynomial: there 1 - 2 / (exp(2x) + 1) cancels."""
    square = x * x
    odd = -0.0014558344 + square * 0.0005900274
    odd = -0.0088632355 + square * (0.0035921280 + square * odd)
    odd = -0.0539682540 + square * (0.0218694885 + square * odd)
    odd = 1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * odd))
    size = tl.minimum(tl.abs(x), 15.0)
    far = 1.0 - 2.0 / (tl.exp2(size * 2.8853900817779268) + 1.0)
    far = tl.where(x < 0, -far, far)
    return tl.where(size < 0.6, x * odd, tl.where(x == x, far, x))


@triton.jit
def log2_of(x):
    """Computes log2 of x >= 0 to fp32's last digits. The hardware's log2 is off by 2^-22 near 1,
    and an error of lse is an error of every probability."""
    bits = x.to(tl.int32, bitcast=True)
    # x = 2^exponent m with m in [0.75, 1.5), so that m - 1 over m + 1 is small.
    exponent = (bits - 0x3F400000) >> 23
    m = (bits - (exponent << 23)).to(tl.float32, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    square = s * s
    series = 0.3205988980 + square * (0.2623081893 + square * 0.2219530832)
    series = 0.9617966939 + square * (0.5770780164 + square * (0.4121985831 + square * series))
    log2 = exponent.to(tl.float32) + (s * 2.8853900817779268 + s * square * series)
    return tl.where((x > 1e-37) & (x < 1e38), log2, tl.log2(x))


@triton.jit
def fast_log2(x):
    """Computes the hardware's log2 of normal numbers and 0. `tl.log2` has four instructions more,
    for subnormal ones: registers, and a second of a large kernel's compilation."""
    if IS_INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def exp2_of(x):
    """Computes 2^x to fp32's last digits. The hardware's exp2 is off by up to 2^-22, with bias, and
    0 below 2^-126: a sum of nearly 2^128 has such factors, and their product counts."""
    whole = tl.floor(x + 0.5)
    f = x - whole
    odd = 0.0013333558 + f * (0.0001540353 + f * 0.0000152527)
    odd = 0.2402265070 + f * (0.0555041087 + f * (0.0096181291 + f * odd))
    near = 1.0 + (f * 0.6931471806 + f * f * odd)
    inside = (x > -126.0) & (x < 127.0)
    power = (tl.where(inside, whole, 0.0).to(tl.int32) + 127) << 23
    root = tl.exp2(0.5 * x)
    return tl.where(inside, near * power.to(tl.float32, bitcast=True), root * root)


@triton.jit
def exp2_in(x, WIDE: tl.constexpr):
    """Computes 2^x, to fp32's last digits if WIDE. NumPy's function has them."""
    return exp2_of(x) if WIDE and not IS_INTERPRETED else tl.exp2(x)


@triton.jit
def log2_above(z, ref):
    """Returns z log2(e) - ref, rounded once: a rounded product near 400 has few digits below 1."""
    if IS_INTERPRETED:
        return (z.to(tl.float64) * LOG2E_FP32 - ref.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(z, LOG2E, -ref)


@triton.jit
def log2_probability(z, lse, rest, WIDE: tl.constexpr):
    """Returns log2 of a probability. z and lse are in log2; or if WIDE natural, whose difference is
    as exact as they are, and `rest` is `Stats.lse_rest`."""
    if WIDE:
        # z may be a product with a scale, which the forward has rounded: unrounded, probabilities
        # would not sum to 1. So is the result, which the compiler would fuse in some binaries.
        return tl.fma(tl.fma(z, 1.0, 0.0) - lse - rest, LOG2E, 0.0)
    else:
        return z - lse


@triton.jit
def near_tanh(x):
    """Computes tanh to 2^-19 of itself, at a third of `tanh`'s price: for logits of 16-bit
    inputs."""
    square = x * x
    near = x + x * square * (-0.3333333333 + square * 0.1333333333)
    far = 1.0 - 2.0 * reciprocal(tl.exp2(x * 2.8853900817779268) + 1.0)
    return tl.where(square < 0.01, near, far)


@triton.jit
def reciprocal(x):
    """Computes 1 / x by the hardware's function, to its last digit but one. A division takes four
    instructions, as it scales very large and very small numbers."""
    if IS_INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Rounds fp32 to `dtype`, two numbers of 16 bits by one instruction. LLVM chooses the same one,
    but its vectorizer looks for it in all that the numbers come from, which takes long."""
    if IS_INTERPRETED or (dtype != tl.bfloat16 and dtype != tl.float16):
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def apart(x):
    """Returns x. LLVM's vectorizer does not look behind it: it takes long over many numbers of two
    branches. No instruction is left of it."""
    if IS_INTERPRETED:
        return x
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def ones_in(bits):
    """Counts the ones among 32 bits."""
    if IS_INTERPRETED:
        x = bits.to(tl.uint32, bitcast=True)
        x -= (x >> 1) & 0x55555555
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)
    else:
        return tl.inline_asm_elementwise(
            "popc.b32 $0, $1;", "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def softcapped(x, softcap, WIDE: tl.constexpr):
    """Turns x = E . C + bias into (z over logit_scale, softcap'(z))."""
    t = tanh(x / softcap) if WIDE or IS_INTERPRETED else near_tanh(x * (1.0 / softcap))
    return t * softcap, 1.0 - t * t


@triton.jit
def scale_of(scale, token):
    """Returns the factor of the tokens' logits. `scale`: a number, or a pointer to each token's."""
    # The compiler passes a tensor, the interpreter a plain number.
    if tl.core.to_tensor(scale).dtype.is_ptr():
        return tl.load(scale + token)
    else:
        return scale


@triton.jit
def scale_across(scale, token):
    """Returns the factor of logits [.., TOKENS]. Call it where the factor is used: keeping it would
    take registers from products."""
    if tl.core.to_tensor(scale).dtype.is_ptr():
        return tl.load(scale + token)[None, :]
    else:
        return scale


@triton.jit
def log2_scale_of(scale):
    """Returns scale times log2(e), or a pointer unchanged, for `log2_scale_across`."""
    if tl.core.to_tensor(scale).dtype.is_ptr():
        return scale
    else:
        return LOG2E * scale


@triton.jit
def log2_scale_across(log2_scale, token):
    """Returns the factor of logits [.., TOKENS] that turns them to base 2."""
    if tl.core.to_tensor(log2_scale).dtype.is_ptr():
        return LOG2E * tl.load(log2_scale + token)[None, :]
    else:
        return log2_scale


@triton.jit
def load_tile(
    source,  # descriptor, or pointer to a row-major matrix
    row,
    column,
    num_rows,
    num_columns,
    stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """Loads [ROWS, COLUMNS] at (row, column), 0 outside the matrix."""
    if USE_TMA:
        return source.load([row, column])
    else:
        rows = row + tl.arange(0, ROWS)
        columns = column + tl.arange(0, COLUMNS)
        inside = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        at = rows.to(tl.int64)[:, None] * stride + columns[None, :]
        return tl.load(source + at, mask=inside, other=0.0)


@triton.jit
def add_product(acc, a, b, zero, PRECISION: tl.constexpr):
    """Adds a product of fp32, a b, to acc. The product is summed separately first: thousands of
    terms added to acc one by one would lose digits that the inputs have."""
    # The compiler does not know that `zero` is 0: a constant would be folded into acc.
    return acc + tl.dot(a, b, tl.zeros_like(acc) + zero, input_precision=PRECISION)


@triton.jit
def proxy_fence(IS_INTERPRETED: tl.constexpr):
    """Orders this thread's ordinary writes to memory before later loads through a descriptor."""
    if not IS_INTERPRETED:
        tl.inline_asm_elementwise(
            "fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def partial_sums(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds the rows that a thread holds: [ROWS, COLUMNS] -> [8, 8, COLUMNS].

    In the accumulator layout of eight warps a thread's rows are 8 apart, then 128. These sums need
    no shuffle, so a running sum over many tiles is reduced over threads only at its end.
    """
    split = tl.reshape(x, (ROWS // 128, 8, 2, 8, COLUMNS))
    return tl.sum(tl.sum(split, 2), 0)


@triton.jit
def whole_sum(x):
    """Sums [8, 8, COLUMNS] -> [COLUMNS]."""
    return tl.sum(tl.sum(x, 0), 0)


@triton.jit
def slice_of(task, number, num_slices, at_once):
    """Splits a task of `number` x `num_slices` into its number and its slice.

    All numbers finish `at_once` slices before the next slices start, so that the columns of a
    matrix that those slices read stay in the cache.
    """
    first_slice = task // (number * at_once) * at_once
    width = tl.minimum(num_slices - first_slice, at_once)
    inside = task - first_slice * number
    return inside // width, first_slice + inside % width
