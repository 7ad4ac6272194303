"""A teacher's logits in 8 bits: when they are refused, and what exact logits of the columns with
much mass correct. docs/design/distillation.md#a-teacher-in-8-bits"""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.forward.forward import dequantized
from cce_dist.backends.triton.kernels.numbers import LOG2E, exp2_of, log2_of, softcapped

# Of 1 plus a correction: the exact probabilities of columns whose 8-bit ones add up to more than 1.
LEAST = tl.constexpr(2.0**-20)


@triton.jit
def refuse_kernel(
    variance_ptr,  # [N] of the error of a token's 8-bit logits, nats^2
    count_ptr,  # [1] int32: tokens that count
    shape_ptr,  # [3] int32: of a forward in full precision; its blocks become 0 if 8 bits will do
    eight_ptr,  # [3] int32: of a forward in 8 bits: out
    full_ptr,  # [1] int32: 1 if 8 bits are refused: out
    max_mean,  # of the variance
    max_variance,  # of a token
    BLOCK: tl.constexpr,
):
    """Decides whether 8 bits will do; a single program."""
    count = tl.load(count_ptr)
    total = tl.zeros((BLOCK,), tl.float32)
    largest = total
    for first in range(0, count, BLOCK):
        token = first + tl.arange(0, BLOCK)
        variance = tl.load(variance_ptr + token, mask=token < count, other=0.0)
        total += variance
        largest = tl.maximum(largest, variance)
    # A NaN is refused too.
    fits = (tl.sum(total, 0) <= max_mean * count) & (tl.max(largest, 0) <= max_variance)
    blocks = tl.load(shape_ptr)
    tl.store(eight_ptr, tl.where(fits, blocks, 0))
    for i in tl.static_range(1, 3):
        tl.store(eight_ptr + i, tl.load(shape_ptr + i))
    tl.debug_barrier()
    tl.store(shape_ptr, tl.where(fits, 0, blocks))
    tl.store(full_ptr, 1 - fits.to(tl.int32))


@triton.jit
def large_columns_kernel(
    mass_ptr,  # [num_blocks, V] the teacher's mass of a column in a block, or more; its sign does
    # not count
    count_ptr,  # [1] int32
    eight_ptr,  # [3] int32: of a forward in 8 bits
    column_ptr,  # [num_blocks, MOST] int32 the first columns of that mass, in ascending order: out
    number_ptr,  # [num_blocks] int32, at most MOST: out
    V,
    least,  # in a block of BLOCK_N tokens
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    MOST: tl.constexpr,
):
    """Lists the columns of much mass; a program a block."""
    block = tl.program_id(0)
    number = 0
    if block < tl.load(eight_ptr):
        tokens = tl.minimum(tl.load(count_ptr) - block * BLOCK_N, BLOCK_N)
        threshold = least * (tokens / BLOCK_N)
        row = mass_ptr + block.to(tl.int64) * V
        for first in range(0, V, BLOCK_V):
            column = first + tl.arange(0, BLOCK_V)
            mass = tl.abs(tl.load(row + column, mask=column < V, other=0.0).to(tl.float32))
            is_large = (mass >= threshold) & (column < V)
            place = number + tl.cumsum(is_large.to(tl.int32), 0) - 1
            tl.store(column_ptr + block * MOST + place, column, mask=is_large & (place < MOST))
            number += tl.sum(is_large.to(tl.int32), 0)
    tl.store(number_ptr + block, tl.minimum(number, MOST))


@triton.jit
def products(
    column,  # [COLUMNS]
    rows,  # [TOKENS]
    weight_ptr,  # [V, D]
    hidden_ptr,  # [N, D]
    stride_wv,
    stride_hn,
    D,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes E . C, [COLUMNS, TOKENS]."""
    dims = tl.arange(0, BLOCK_K)
    x = tl.zeros((COLUMNS, TOKENS), ACCUMULATOR)
    c_ptrs = weight_ptr + column.to(tl.int64)[:, None] * stride_wv + dims[None, :]
    e_ptrs = hidden_ptr + rows.to(tl.int64)[:, None] * stride_hn + dims[None, :]
    for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        inside = (k + dims < D)[None, :]
        c = tl.load(c_ptrs + k, mask=inside, other=0.0)
        e = tl.load(e_ptrs + k, mask=inside, other=0.0)
        x = tl.dot(c, e.T, x, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    return x


@triton.jit
def finished_logits(
    x,  # [COLUMNS, TOKENS]
    column,
    bias_ptr,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Returns logits of products without a bias, log2."""
    if HAS_BIAS:
        x += tl.load(bias_ptr + column).to(tl.float32)[:, None]
    if HAS_SOFTCAP:
        x, _ = softcapped(x, softcap, False)
    return x * (scale * LOG2E)


@triton.jit
def large_parts_kernel(
    hidden_ptr,  # [N, D] packed
    weight_ptr,  # [V, D]
    bias_ptr,  # [V]
    teacher_hidden_ptr,  # [N, D_TEACHER] packed
    teacher_weight_ptr,  # [V, D_TEACHER]
    teacher_bias_ptr,  # [V]
    eight_hidden_ptr,  # [N, stride] of 8 bits
    eight_weight_ptr,  # [V, stride]
    of_column_ptr,  # [2, V] fp32: see `forward_kernel`
    of_token_ptr,  # [2, N] fp32
    column_ptr,  # [num_blocks, MOST] int32
    number_ptr,  # [num_blocks] int32
    lse_ptr,  # [N] the student's, natural
    teacher_lse_ptr,  # [N] of 8-bit logits
    part_ptr,  # [3, PARTS, N]: see `correct_kernel`: out
    N,
    V,
    D,
    D_TEACHER,
    stride_hn,
    stride_wv,
    stride_teacher_hn,
    stride_teacher_wv,
    stride_eight_hn,
    stride_eight_wv,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    MOST: tl.constexpr,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEACHER_HAS_BIAS: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
):
    """Computes logits of listed columns and a block of tokens, COLUMNS of every PARTS x COLUMNS:
    the student's, the teacher's, and the teacher's of 8 bits; and sums how far the last are off."""
    part, block = tl.program_id(0), tl.program_id(1)
    number = tl.load(number_ptr + block)
    rows = block * TOKENS + tl.arange(0, TOKENS)
    lse = tl.load(lse_ptr + rows) * LOG2E
    # See `divergence_kernel`.
    lse = tl.where(lse == float("-inf"), 0.0, lse)[None, :]
    teacher_lse = (tl.load(teacher_lse_ptr + rows) * LOG2E)[None, :]
    of_mass = tl.zeros((TOKENS,), tl.float32)
    of_ratio = tl.zeros((TOKENS,), tl.float32)
    exact_mass = tl.zeros((TOKENS,), tl.float32)
    for first in range(part * COLUMNS, number, PARTS * COLUMNS):
        place = first + tl.arange(0, COLUMNS)
        listed = (place < number)[:, None]
        column = tl.load(column_ptr + block * MOST + place, mask=place < number, other=0)
        x = products(
            column, rows, eight_weight_ptr, eight_hidden_ptr, stride_eight_wv, stride_eight_hn,
            D_TEACHER, COLUMNS, TOKENS, BLOCK_K, STAGES, ACCUMULATOR, PRECISION,
        )  # fmt: skip
        x = dequantized(x, column, V, of_column_ptr, of_token_ptr + rows, N)
        rough = finished_logits(
            x, column, teacher_bias_ptr, teacher_scale, teacher_softcap, TEACHER_HAS_BIAS,
            TEACHER_HAS_SOFTCAP,
        )  # fmt: skip
        rough -= teacher_lse
        y = products(
            column, rows, teacher_weight_ptr, teacher_hidden_ptr, stride_teacher_wv,
            stride_teacher_hn, D_TEACHER, COLUMNS, TOKENS, BLOCK_K, STAGES, tl.float32, PRECISION,
        )  # fmt: skip
        y = finished_logits(
            y, column, teacher_bias_ptr, teacher_scale, teacher_softcap, TEACHER_HAS_BIAS,
            TEACHER_HAS_SOFTCAP,
        )  # fmt: skip
        y -= teacher_lse
        z = products(
            column, rows, weight_ptr, hidden_ptr, stride_wv, stride_hn, D, COLUMNS, TOKENS, BLOCK_K,
            STAGES, tl.float32, PRECISION,
        )  # fmt: skip
        z = finished_logits(z, column, bias_ptr, scale, softcap, HAS_BIAS, HAS_SOFTCAP) - lse
        p = tl.where(listed, exp2_of(y), 0.0)
        rough_p = tl.where(listed, exp2_of(rough), 0.0)
        exact_mass += tl.sum(p, 0)
        of_mass += tl.sum(p - rough_p, 0)
        # 0 times infinity would be NaN, and so would be infinity less infinity: of an id that the
        # student masks the 8-bit KL is infinite by itself.
        ratio = tl.where(p > 0, p * (y - z), 0.0)
        rough_counts = (rough_p > 0) & (z > float("-inf"))
        of_ratio += tl.sum(ratio - tl.where(rough_counts, rough_p * (rough - z), 0.0), 0)
    out = part_ptr + part * N + rows
    tl.store(out, of_mass)
    tl.store(out + PARTS * N, of_ratio)
    tl.store(out + 2 * PARTS * N, exact_mass)


@triton.jit
def correct_kernel(
    count_ptr,  # [1] int32
    eight_ptr,  # [3] int32: of a forward in 8 bits
    variance_ptr,  # [N] of the error of a token's 8-bit logits, nats^2
    part_ptr,  # [3, PARTS, N] sums over listed columns, with p of 8 bits subtracted: of p, of p
    # log2 (p / q); of p alone
    teacher_lse_ptr,  # [N] natural: in, out
    divergence_ptr,  # [N] nats: in, out
    N,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Corrects the teacher's log-sum-exp and the KL of 8-bit logits; a program a block."""
    block = tl.program_id(0)
    if block < tl.load(eight_ptr):
        rows = block * TOKENS + tl.arange(0, TOKENS)
        counts = rows < tl.load(count_ptr)
        of_mass = tl.zeros((TOKENS,), tl.float32)
        of_ratio = tl.zeros((TOKENS,), tl.float32)
        exact_mass = tl.zeros((TOKENS,), tl.float32)
        for part in tl.static_range(PARTS):
            at = part_ptr + part * N + rows
            of_mass += tl.load(at)
            of_ratio += tl.load(at + PARTS * N)
            exact_mass += tl.load(at + 2 * PARTS * N)
        share = tl.maximum(1 + of_mass, LEAST)
        rise = log2_of(share) / LOG2E
        kl = (tl.load(divergence_ptr + rows) + of_ratio / LOG2E) / share - rise
        # Half the variance is subtracted from 8-bit logits, so that exp of them is right on
        # average. Times exp they are then too large by that half.
        rest = tl.maximum(1 - exact_mass / share, 0.0)
        kl -= 0.5 * tl.load(variance_ptr + rows) * rest
        tl.store(divergence_ptr + rows, kl, mask=counts)
        tl.store(teacher_lse_ptr + rows, tl.load(teacher_lse_ptr + rows) + rise, mask=counts)
