"""The mass that a tail loses because 8-bit masses choose its columns.

Of the columns near the threshold, the tail gets those that errors made smaller. The exact logits of
a sample of these columns tell how much mass that costs.
docs/design/screened.md#the-bias-of-the-tail
"""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.forward.forward import dequantized
from cce_dist.backends.triton.kernels.numbers import LOG2E, softcapped


@triton.jit
def is_near_threshold(mass_ptr, count_ptr, block, column, V, keep, reach, TOKENS: tl.constexpr):
    """Returns a mask of columns with a mass within a factor `reach` of the block's threshold."""
    tokens = tl.minimum(tl.load(count_ptr) - block * TOKENS, TOKENS)
    threshold = keep * (tokens / TOKENS)
    at = block.to(tl.int64) * V + column
    # Negative where the column is kept.
    mass = tl.abs(tl.load(mass_ptr + at, mask=column < V, other=0.0).to(tl.float32))
    # A block without tokens has no such columns: its threshold is at most 0.
    return (mass * reach >= threshold) & (mass < threshold * reach)


@triton.jit
def num_near_threshold(near_threshold_ptr, block, chunks, CHUNKS: tl.constexpr):
    """Returns the number of a token block's columns near the threshold."""
    other = tl.arange(0, CHUNKS)
    return tl.sum(
        tl.load(near_threshold_ptr + block * chunks + other, mask=other < chunks, other=0), 0
    )


@triton.jit
def count_near_threshold_kernel(
    mass_ptr,  # [num_blocks, V] a column's mass over a block's tokens, negative where kept
    count_ptr,  # [1] int32: tokens that count
    near_threshold_ptr,  # [num_blocks, chunks] int32: columns of a chunk near the threshold: out
    V,
    keep,
    reach,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Counts, for a token block, the columns near the threshold among BLOCK_V columns."""
    block, chunk = tl.program_id(0), tl.program_id(1)
    column = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    near_threshold = is_near_threshold(mass_ptr, count_ptr, block, column, V, keep, reach, TOKENS)
    out = near_threshold_ptr + block * tl.num_programs(1) + chunk
    tl.store(out, tl.sum(near_threshold.to(tl.int32), 0))


@triton.jit
def pick_near_threshold_kernel(
    mass_ptr,
    count_ptr,
    near_threshold_ptr,  # [num_blocks, chunks]: see above
    picked_ptr,  # [num_blocks, SAMPLES] int32 columns near the threshold, at most SAMPLES: out
    V,
    keep,
    reach,
    TOKENS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNKS: tl.constexpr,  # at least as many as there are
    SAMPLES: tl.constexpr,
):
    """Picks at most SAMPLES of a block's columns near the threshold, evenly spaced; a program has
    BLOCK_V columns."""
    block, chunk, chunks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    other = tl.arange(0, CHUNKS)
    of_chunks = tl.load(near_threshold_ptr + block * chunks + other, mask=other < chunks, other=0)
    total = tl.sum(of_chunks, 0)
    before = tl.sum(tl.where(other < chunk, of_chunks, 0), 0)
    column = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    near_threshold = is_near_threshold(
        mass_ptr, count_ptr, block, column, V, keep, reach, TOKENS
    ).to(tl.int32)
    rank = before + tl.cumsum(near_threshold, 0) - near_threshold
    per_rank = tl.minimum(SAMPLES, tl.maximum(total, 1))
    place = rank * per_rank // tl.maximum(total, 1)
    # Of columns that share a place, the first.
    first = (rank == 0) | ((rank - 1) * per_rank // tl.maximum(total, 1) != place)
    tl.store(picked_ptr + block * SAMPLES + place, column, mask=(near_threshold > 0) & first)


@triton.jit
def near_threshold_logits_kernel(
    hidden_ptr,  # [N, D] packed
    weight_ptr,  # [V, D]
    bias_ptr,  # [V]
    hidden_values_ptr,  # [N, D] in 8 bits
    values_ptr,  # [V, D] in 8 bits
    column_ptr,  # [2, V] fp32: see `dequantized`
    token_ptr,  # [2, N] fp32
    near_threshold_ptr,  # [num_blocks, chunks] int32: see above
    picked_ptr,  # [num_blocks, SAMPLES] int32: see above
    full_ptr,  # [1] int32: 1: no logits are of 8 bits, nothing to do
    logit_ptr,  # [2, num_blocks, SAMPLES, TOKENS] fp32 of columns picked, exact and by 8 bits: out
    chunks,
    size,  # elements of either half of `logit_ptr`
    N,
    V,
    D,
    stride_hn,
    stride_wv,
    stride_hvn,
    stride_vv,
    scale,
    softcap,
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SAMPLES: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Computes the logits of COLUMNS picked columns and a token block."""
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    place = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    listed = place < num_near_threshold(near_threshold_ptr, block, chunks, CHUNKS)
    if (tl.load(full_ptr) == 0) & (tl.max(listed.to(tl.int32), 0) > 0):
        column = tl.load(picked_ptr + block * SAMPLES + place, mask=listed, other=0)
        x = tl.zeros((COLUMNS, TOKENS), tl.float32)
        y = tl.zeros((COLUMNS, TOKENS), ACCUMULATOR)
        of_column, of_token = column.to(tl.int64)[:, None], token.to(tl.int64)[:, None]
        for start in range(0, D, BLOCK_D):
            dims = (start + tl.arange(0, BLOCK_D))[None, :]
            inside = dims < D
            c = tl.load(weight_ptr + of_column * stride_wv + dims, mask=inside, other=0.0)
            e = tl.load(hidden_ptr + of_token * stride_hn + dims, mask=inside, other=0.0)
            x = tl.dot(c, e.T, x, input_precision="ieee")
            c = tl.load(values_ptr + of_column * stride_vv + dims, mask=inside, other=0.0)
            e = tl.load(hidden_values_ptr + of_token * stride_hvn + dims, mask=inside, other=0.0)
            y = tl.dot(c, e.T, y, out_dtype=ACCUMULATOR)
        y = dequantized(y, column, V, column_ptr, token_ptr + token, N)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + column).to(tl.float32)[:, None]
            x += bias
            y += bias
        if HAS_SOFTCAP:
            x, _ = softcapped(x, softcap, False)
            y, _ = softcapped(y, softcap, False)
        out = logit_ptr + (block * SAMPLES + place)[:, None] * TOKENS
        out += tl.arange(0, TOKENS)[None, :]
        tl.store(out, x * scale)
        tl.store(out + size, y * scale)


@triton.jit
def selection_error_kernel(
    near_threshold_ptr,  # [num_blocks, chunks] int32: see above
    logit_ptr,  # [2, num_blocks, SAMPLES, TOKENS] fp32: see above
    lse_ptr,  # [N] natural log, of 8-bit logits
    count_ptr,  # [1] int32
    full_ptr,  # [1] int32: 1: nothing to do
    lost_mass_ptr,  # [N] fp32: out
    chunks,
    size,
    width,  # nats of mass from the first column that is near the threshold to the last
    TOKENS: tl.constexpr,
    CHUNKS: tl.constexpr,
    SAMPLES: tl.constexpr,
):
    """Computes each token's lost tail mass, over exp(lse); a program a token block."""
    block = tl.program_id(0)
    lane = tl.arange(0, TOKENS)
    token = block * TOKENS + lane
    total = num_near_threshold(near_threshold_ptr, block, chunks, CHUNKS)
    lost_mass = tl.zeros((TOKENS,), tl.float32)
    if (tl.load(full_ptr) == 0) & (total > 0):
        place = tl.arange(0, SAMPLES)
        inside = (place < total)[:, None] & (token < tl.load(count_ptr))[None, :]
        at = logit_ptr + (block * SAMPLES + place)[:, None] * TOKENS + lane[None, :]
        x = tl.load(at, mask=inside, other=float("-inf"))
        off = tl.load(at + size, mask=inside, other=float("-inf"))
        off = tl.where(inside, off - x, 0.0)
        p = tl.where(inside, tl.exp2((x - tl.load(lse_ptr + token)[None, :]) * LOG2E), 0.0)
        mass, exact_mass = tl.sum(p, 1), tl.sum(p * tl.exp2(off * LOG2E), 1)
        # The error of a column's mass, in nats. An error that all columns or all of a token's
        # logits share moves the threshold, and chooses no column.
        moved = tl.where(mass > 0, tl.log(exact_mass / mass), 0.0)
        moved -= tl.sum(mass * moved, 0) / tl.maximum(tl.sum(mass, 0), 1e-30)
        off -= (tl.sum(p * off, 0) / tl.maximum(tl.sum(p, 0), 1e-30))[None, :]
        lost_mass = tl.sum(p * off * moved[:, None], 0)
        lost_mass *= total / tl.minimum(total, SAMPLES) / width
    tl.store(lost_mass_ptr + token, lost_mass)
