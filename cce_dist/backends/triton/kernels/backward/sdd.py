"""SDD: d_logits of some columns and a block of tokens, recomputed into the workspace."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.filter.column_lists import draw_level_of
from cce_dist.backends.triton.kernels.numbers import (
    LOG2E,
    apart,
    exp2_in,
    fast_log2,
    log2_probability,
    rounded,
    scale_across,
    softcapped,
)
from cce_dist.backends.triton.kernels.teacher.divergence import over_mixture

# A screened forward stores exp2(logit - reference + STORED_SCALE) of each entry in fp16, which has
# more digits of a probability than bf16, down to 2^-25.
STORED_SCALE = tl.constexpr(11.0)
# The furthest that a usable reference is from lse, log2: stored numbers are then below STORED_MOST.
STORED_FURTHEST = tl.constexpr(4.0)
# The largest number of fp16.
STORED_MOST = tl.constexpr(65504.0)


@triton.jit
def slope_at(z, scale, softcap, WIDE: tl.constexpr):
    """Computes softcap'(z) of a logit in log2, natural if WIDE."""
    t = z / (softcap * scale if WIDE else softcap * scale * LOG2E)
    return 1.0 - t * t


@triton.jit
def logits_of(
    c_ptrs,  # [COLUMNS, BLOCK_K] the columns' first dims
    block,  # of tokens
    hidden_ptr,  # [num_rows, D]
    rows_ptr,  # [N] int64; tokens that don't count have a counting token's row
    D,
    stride_hn,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # D is a multiple of it
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes logits, [COLUMNS, TOKENS] fp32."""
    dims = tl.arange(0, BLOCK_K)
    x = tl.zeros((COLUMNS, TOKENS), tl.float32)
    row = tl.load(rows_ptr + block * TOKENS + tl.arange(0, TOKENS))
    e_ptrs = hidden_ptr + row[:, None] * stride_hn + dims[None, :]
    for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
        if EVEN_K:
            c = tl.load(c_ptrs + k)
            e = tl.load(e_ptrs + k)
        else:
            inside = (k + dims < D)[None, :]
            c = tl.load(c_ptrs + k, mask=inside, other=0.0)
            e = tl.load(e_ptrs + k, mask=inside, other=0.0)
        x = tl.dot(c, e.T, x, input_precision=PRECISION)
    return x


@triton.jit
def fresh_logits(
    column,  # [COLUMNS]
    block,  # of tokens
    hidden_ptr,
    rows_ptr,
    weight_ptr,
    bias_ptr,
    D,
    stride_hn,
    stride_wv,
    scale,  # a number, or [N] of each token
    softcap,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Computes logits, [COLUMNS, TOKENS] fp32, in log2 or natural if WIDE; and softcap', or 1."""
    c_ptrs = weight_ptr + column.to(tl.int64)[:, None] * stride_wv + tl.arange(0, BLOCK_K)[None, :]
    x = logits_of(
        c_ptrs, block, hidden_ptr, rows_ptr, D, stride_hn, COLUMNS, TOKENS, BLOCK_K, EVEN_K, STAGES,
        PRECISION,
    )  # fmt: skip
    if HAS_BIAS:
        x += tl.load(bias_ptr + column).to(tl.float32)[:, None]
    slope = 1.0
    if HAS_SOFTCAP:
        x, slope = softcapped(x, softcap, WIDE)
    token = block * TOKENS + tl.arange(0, TOKENS)
    scale = scale_across(scale, token)
    return x * (scale if WIDE else scale * LOG2E), slope


@triton.jit
def segment_of(
    task,
    first_tile,  # of the chunk
    last_tile,
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    base_ptr,  # [num_blocks + 1] int32, of the chunk
    segment_ptr,  # [num_blocks + 1] int32, of the chunk
    num_tiles,
    num_blocks,
    SEGMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Finds the task's token block, its entries' places in the block's list, the list's length, and
    the entries' rows of the workspace."""
    lane = tl.arange(0, BLOCKS)
    first_task = tl.load(segment_ptr + lane, mask=lane <= num_blocks, other=2147483647)
    block = tl.sum((first_task <= task).to(tl.int32), 0) - 1
    row_ptr = starts_ptr + block * (num_tiles + 1)
    length = tl.load(row_ptr + last_tile) - tl.load(row_ptr + first_tile)
    place = (task - tl.load(segment_ptr + block)) * SEGMENT + tl.arange(0, SEGMENT)
    return block, place, length, tl.load(base_ptr + block) + place


@triton.jit
def stored_entries(
    at,  # [COLUMNS, TOKENS] int64
    listed,  # [COLUMNS] bool
    token,  # [TOKENS]
    stored_ptr,  # [rows, TOKENS] of the forward: exp2(z - ref + STORED_SCALE)
    ref_ptr,  # [N] log2
):
    """Returns the entries' logits, [COLUMNS, TOKENS] fp32, log2; -inf where 0 was stored."""
    above = tl.load(stored_ptr + at, mask=listed[:, None], other=0.0).to(tl.float32)
    # All threads must have read the entries before any of them writes d_logits there.
    tl.debug_barrier()
    return apart(fast_log2(above) + (tl.load(ref_ptr + token) - STORED_SCALE)[None, :])


# A power of two: it puts probabilities of 2^-22 among the normal numbers of fp16. Those of drawn
# columns, which count often, stay below its largest.
WAITING = tl.constexpr(256.0)


@triton.jit
def of_teacher(
    column,  # [COLUMNS]
    block,  # of tokens
    hidden_ptr,  # [num_rows, D]
    rows_ptr,
    weight_ptr,  # [V, D]
    bias_ptr,
    upstream_ptr,  # [7 or 8, N]: see `exact_logits_kernel`
    log2_times,  # [COLUMNS] log2 of how often a column counts
    N,
    D,
    stride_hn,
    stride_wv,
    scale,
    softcap,
    dtype: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IS_LOG: tl.constexpr,
):
    """Computes the teacher's probabilities times WAITING and how often a column counts, [COLUMNS,
    TOKENS], in fp16 unless `dtype` is fp32; or if IS_LOG the log2 of probabilities, in fp32: log
    ratios have its digits. They wait in registers for the student's product. Without the upstream
    gradient, so that a token of little weight has as many digits."""
    y, _ = fresh_logits(
        column, block, hidden_ptr, rows_ptr, weight_ptr, bias_ptr, D, stride_hn, stride_wv, scale,
        softcap, COLUMNS, TOKENS, BLOCK_K, EVEN_K, STAGES, PRECISION, WIDE, HAS_BIAS, HAS_SOFTCAP,
    )  # fmt: skip
    token = block * TOKENS + tl.arange(0, TOKENS)
    lse = tl.load(upstream_ptr + 5 * N + token)
    if IS_LOG:
        waiting = log2_probability(y, lse[None, :], 0.0, WIDE)
    else:
        if WIDE:
            log_p = log2_probability(y, lse[None, :], 0.0, WIDE) + log2_times[:, None]
        else:
            log_p = y + (log2_times[:, None] - lse[None, :])
        waiting = exp2_in(log_p, WIDE) * WAITING
    return waiting if (dtype == tl.float32) | IS_LOG else waiting.to(tl.float16)


@triton.jit
def sdd_kept_task(
    task,
    may_be_stored,  # not 0: the forward has stored the entries of all blocks without a bad_ref
    seed,
    first_tile,  # of the chunk
    last_tile,
    hidden_ptr,
    rows_ptr,
    weight_ptr,  # [V, D]
    bias_ptr,
    target_ptr,  # [N] int32, -1: none here
    upstream_ptr,  # [7 or 8, N]: see `exact_logits_kernel`
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    base_ptr,  # [num_blocks + 1] int32, of the chunk
    segment_ptr,  # [num_blocks + 1] int32, of the chunk
    entries_ptr,  # [rows] int32
    workspace_ptr,  # [rows, TOKENS] d_logits of each entry: out
    stored_ptr,  # the same memory
    ref_ptr,  # [N] log2
    bad_ref_ptr,  # [num_blocks] int32
    # [tasks, TOKENS] fp32: sum of drawn entries' d_logits; without the part of an entropy that is
    # not relative to a teacher: out
    drawn_sum_ptr,
    # The teacher's hidden states, weight, bias, upstream; D, two strides, scale, softcap, beta.
    teacher,
    num_tiles,
    num_blocks,
    D,
    stride_hn,
    stride_wv,
    scale,
    softcap,
    TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # lists start at a multiple of it
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_STORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    TEACHER_EVEN_K: tl.constexpr,
    TEACHER_HAS_BIAS: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    IS_JSD: tl.constexpr,
):
    """Computes d_logits of SEGMENT entries of a token block's list of columns."""
    block, place, length, row = segment_of(
        task, first_tile, last_tile, starts_ptr, base_ptr, segment_ptr, num_tiles, num_blocks,
        SEGMENT, BLOCKS,
    )  # fmt: skip
    N = num_blocks * TOKENS
    listed = place < length
    entry = tl.load(entries_ptr + row, mask=listed, other=0)
    drawn = (entry & 1) > 0
    column = entry >> 1
    at = row.to(tl.int64)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    token = block * TOKENS + tl.arange(0, TOKENS)
    slope = 1.0
    log2_times = tl.zeros((SEGMENT,), tl.float32)
    if HAS_DRAWN:
        # A drawn column counts 2^draw_level times.
        log2_times = tl.where(drawn, draw_level_of(column, seed), 0).to(tl.float32)
    if HAS_TEACHER:
        of_other = of_teacher(
            column, block, teacher[0], rows_ptr, teacher[1], teacher[2], teacher[3], log2_times, N,
            teacher[4], teacher[5], teacher[6], teacher[7], teacher[8],
            workspace_ptr.dtype.element_ty, SEGMENT, TOKENS, BLOCK_K, TEACHER_EVEN_K, STAGES,
            PRECISION, WIDE, TEACHER_HAS_BIAS, TEACHER_HAS_SOFTCAP, HAS_ENTROPY,
        )  # fmt: skip
    if HAS_STORED:
        if may_be_stored & (tl.load(bad_ref_ptr + block) == 0):
            of_entry = stored_entries(at, listed, token, stored_ptr, ref_ptr)
        else:
            of_entry, _ = fresh_logits(
                column, block, hidden_ptr, rows_ptr, weight_ptr, bias_ptr, D, stride_hn, stride_wv,
                scale, softcap, SEGMENT, TOKENS, BLOCK_K, EVEN_K, STAGES, PRECISION, WIDE, HAS_BIAS,
                HAS_SOFTCAP,
            )  # fmt: skip
            of_entry = apart(of_entry)
        if HAS_SOFTCAP:
            slope = slope_at(of_entry, scale_across(scale, token), softcap, WIDE)
            slope = tl.where(of_entry == float("-inf"), 0.0, slope)
    else:
        of_entry, slope = fresh_logits(
            column, block, hidden_ptr, rows_ptr, weight_ptr, bias_ptr, D, stride_hn, stride_wv,
            scale, softcap, SEGMENT, TOKENS, BLOCK_K, EVEN_K, STAGES, PRECISION, WIDE, HAS_BIAS,
            HAS_SOFTCAP,
        )  # fmt: skip
    upstream_ptrs = upstream_ptr + token
    # The target's element takes the forward's logit of the target; its column is always kept.
    is_target = tl.where(listed, column, -2)[:, None] == tl.load(target_ptr + token)[None, :]
    z = tl.load(upstream_ptrs + 6 * N)[None, :]
    if HAS_SOFTCAP:
        slope = tl.where(is_target, slope_at(z, scale_across(scale, token), softcap, WIDE), slope)
    rest = tl.load(upstream_ptrs + 7 * N)[None, :] if WIDE else 0.0
    log_p = log2_probability(
        tl.where(is_target, z, of_entry), tl.load(upstream_ptrs + 5 * N)[None, :], rest, WIDE
    )
    own_log_p = log_p
    if HAS_TEACHER and HAS_ENTROPY:
        # The entropy is relative to the teacher, or to a mixture with it.
        if IS_JSD:
            _, own_log_p = over_mixture(
                of_other, log_p, tl.exp2(of_other), tl.exp2(log_p), teacher[9], WIDE
            )
        else:
            own_log_p -= of_other
    if HAS_DRAWN:
        log_p += log2_times[:, None]
    p = exp2_in(log_p, WIDE)
    grad = p * tl.load(upstream_ptrs)[None, :]
    if HAS_TEACHER and not HAS_ENTROPY:
        grad += of_other.to(tl.float32) * (tl.load(teacher[3] + token) / WAITING)[None, :]
    grad -= tl.where(is_target, tl.load(upstream_ptrs + N)[None, :], 0.0)
    grad = tl.where(listed[:, None], grad * slope, 0.0)
    of_drawn = tl.where(drawn[:, None], grad, 0.0)
    if HAS_ENTROPY:
        entropy = tl.load(upstream_ptrs + 3 * N)[None, :]
        surprise = tl.where(p > 0, own_log_p / LOG2E, 0.0) + entropy
        of_entropy = p * surprise * tl.load(upstream_ptrs + 2 * N)[None, :]
        of_entropy = tl.where(listed[:, None], of_entropy * slope, 0.0)
        grad -= of_entropy
        if HAS_TEACHER:
            of_drawn -= tl.where(drawn[:, None], of_entropy, 0.0)
    if HAS_DRAWN:
        out = drawn_sum_ptr + task.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        tl.store(out, tl.sum(of_drawn, 0))
    # The products read whole steps of the list.
    written = (place < tl.cdiv(length, BLOCK_K) * BLOCK_K)[:, None]
    tl.store(workspace_ptr + at, rounded(grad, workspace_ptr.dtype.element_ty), mask=written)
