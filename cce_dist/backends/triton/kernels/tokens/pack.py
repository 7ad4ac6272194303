"""The packing before a forward: hidden states of tokens that count, bounds of lse, the grid; and
before a backward of every column: hidden states alone."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import HIGHEST, LOG2E, LOWEST, scale_of, softcapped

# Time of a program in a forward's five launches: for its starts and ends, and for reading the sums
# of each split. The unit is a tile's time for one byte of a token's hidden states, 4.7 ns on an
# H200: docs/notebook/2026-11-29/few-tokens.md.
START_TIME, SPLIT_TIME = tl.constexpr(7500), tl.constexpr(300)


@triton.jit
def splits_of(blocks, num_tiles, programs, cached_blocks, grid, row_bytes):
    """Returns the number of splits of the vocabulary for which a forward takes the least time.

    A wave of programs has no more blocks than fit the cache. More splits have to save 1 %: with
    fewer, each split's sum is a tighter bound of lse.
    """
    least = tl.where(blocks <= cached_blocks, 1, tl.cdiv(programs, cached_blocks))
    most = tl.maximum(tl.cdiv(3 * least, 2), 2 * programs // blocks)
    most = tl.minimum(tl.minimum(most, grid // blocks), num_tiles)
    least = tl.maximum(tl.minimum(least, most), 1)
    best = least
    least_time = float("inf")
    for splits in range(least, most + 1):
        waves = tl.cdiv(blocks * splits, programs)
        of_program = tl.cdiv(num_tiles, splits) * row_bytes + START_TIME + SPLIT_TIME * splits
        time = waves.to(tl.float32) * of_program
        better = time < 0.99 * least_time
        best = tl.where(better, splits, best)
        least_time = tl.where(better, time, least_time)
    return best


@triton.jit
def shape_of(blocks, num_tiles, programs, cached_blocks, grid, row_bytes, GROUPS: tl.constexpr):
    """Returns the splits of the vocabulary, and the blocks at a time."""
    splits = splits_of(blocks, num_tiles, programs, cached_blocks, grid, row_bytes)
    return GROUPS * splits, tl.minimum(tl.cdiv(programs, splits), blocks)


@triton.jit
def first_products(
    hidden_ptr, rows, counts, first_ptr, D, stride_hn, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Returns the products of tokens with a row of the weight, [BLOCK_N]."""
    total = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, D, BLOCK_D):
        dims = start + tl.arange(0, BLOCK_D)
        inside = counts[:, None] & (dims < D)[None, :]
        e_ptrs = hidden_ptr + rows[:, None] * stride_hn + dims[None, :]
        e = tl.load(e_ptrs, mask=inside, other=0.0).to(tl.float32)
        first = tl.load(first_ptr + dims, mask=dims < D, other=0.0).to(tl.float32)
        total += tl.sum(e * first[None, :], 1)
    return total


# One binary for every GPU of an architecture, and for every number of segments.
@triton.jit(do_not_specialize=["N", "programs", "cached_blocks", "grid", "segments"])
def pack_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    weight_ptr,  # [V, D], inner stride 1
    bias_ptr,  # [V]
    rows_ptr,  # [N] int64: row of each token, those that count first
    target_ptr,  # [N] int32, -1: none here
    count_ptr,  # [1] int32
    packed_ptr,  # [N_padded, stride_pn]: out, 0 for tokens that don't count
    lower_ptr,  # [S, N_padded] lower bound of lse, log2, of each segment alone: out
    shape_ptr,  # [3] int32: blocks and splits of the forward, blocks at a time: out
    N,
    D,
    N_padded,
    num_tiles,
    programs,  # at a time
    cached_blocks,
    grid,
    row_bytes,  # of a token's hidden states, of both models in distillation
    segments,
    stride_hn,
    stride_wv,
    stride_pn,
    scale,  # a number, or [N_padded] of each token
    softcap,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,  # splits that one program of the forward computes side by side
    SEGMENT: tl.constexpr,  # columns of a segment; 0: there is but one
    SPLITS: tl.constexpr,  # of a segment; 0: `shape_of` chooses
):
    """Packs BLOCK_N tokens. Two logits, the target's and the first column's, bound lse before any
    tile is computed."""
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    counts = tokens < tl.load(count_ptr)
    rows = tl.load(rows_ptr + tokens, mask=counts, other=0)
    target = tl.load(target_ptr + tokens, mask=counts, other=-1)
    here = target >= 0
    of_target = tl.zeros((BLOCK_N,), tl.float32)
    of_first = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, stride_pn, BLOCK_D):
        dims = start + tl.arange(0, BLOCK_D)
        inside = dims < D
        e = tl.load(
            hidden_ptr + rows[:, None] * stride_hn + dims[None, :],
            mask=counts[:, None] & inside[None, :],
            other=0.0,
        )
        c = tl.load(
            weight_ptr + target.to(tl.int64)[:, None] * stride_wv + dims[None, :],
            mask=here[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        of_target += tl.sum(e.to(tl.float32) * c, 1)
        if SEGMENT == 0:
            first = tl.load(weight_ptr + dims, mask=inside, other=0.0).to(tl.float32)
            of_first += tl.sum(e.to(tl.float32) * first[None, :], 1)
        tl.store(
            packed_ptr + tokens.to(tl.int64)[:, None] * stride_pn + dims[None, :],
            e,
            mask=(tokens < N_padded)[:, None] & (dims < stride_pn)[None, :],
        )
    if HAS_BIAS:
        of_target += tl.load(bias_ptr + target, mask=here, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        of_target, _ = softcapped(of_target, softcap, False)
    scale = scale_of(scale, tokens)
    of_target *= scale * LOG2E
    for segment in range(segments):
        if SEGMENT > 0:
            first_ptr = weight_ptr + tl.cast(segment, tl.int64) * SEGMENT * stride_wv
            of_first = first_products(
                hidden_ptr, rows, counts, first_ptr, D, stride_hn, BLOCK_N, BLOCK_D
            )
        if HAS_BIAS:
            of_first += tl.load(bias_ptr + segment * SEGMENT).to(tl.float32)
        if HAS_SOFTCAP:
            of_first, _ = softcapped(of_first, softcap, False)
        of_first *= scale * LOG2E
        ref = tl.full((BLOCK_N,), LOWEST, tl.float32)
        # An infinite logit, or NaN, is no bound.
        ref = tl.where(tl.abs(of_first) < 1e30, of_first, ref)
        bounds = here & (tl.abs(of_target) < 1e30)
        if SEGMENT > 0:
            bounds = bounds & (target // SEGMENT == segment)
        ref = tl.where(bounds, tl.maximum(ref, of_target), ref)
        ref = tl.where(counts, ref, HIGHEST)
        tl.store(lower_ptr + segment * N_padded + tokens, ref, mask=tokens < N_padded)
    blocks = tl.maximum(tl.cdiv(tl.load(count_ptr), TOKENS), 1)
    if tl.program_id(0) == 0:
        if SPLITS > 0:
            # As many whatever the number of tokens is.
            splits = segments * SPLITS
            at_once = tl.minimum(blocks, cached_blocks)
        else:
            splits, at_once = shape_of(
                blocks, num_tiles, programs, cached_blocks, grid, row_bytes, GROUPS
            )
        tl.store(shape_ptr, blocks)
        tl.store(shape_ptr + 1, splits)
        tl.store(shape_ptr + 2, at_once)


@triton.jit
def gather_rows_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    rows_ptr,  # [N_padded] int64
    packed_ptr,  # [N_padded, D], inner stride 1: out
    num_chunks_ptr,  # [1] int32: of `chunks_kernel`
    count_ptr,  # [1] int32: tokens that count
    count_if_long_ptr,  # [1] int32: the same, or -1 where nothing is gathered: out
    D,
    stride_hn,
    stride_pn,
    BLOCK_N: tl.constexpr,  # divides N_padded
    BLOCK_D: tl.constexpr,
    IF_LONG: tl.constexpr,  # gathers only where lists are too long
):
    """Gathers BLOCK_N rows."""
    if IF_LONG:
        is_long = tl.load(num_chunks_ptr) < 0
        count = tl.where(is_long, tl.load(count_ptr), -1)
        tl.store(count_if_long_ptr, count, mask=tl.program_id(0) == 0)
        dims_end = tl.where(is_long, D, 0)
    else:
        dims_end = D
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.load(rows_ptr + tokens)[:, None]
    for start in range(0, dims_end, BLOCK_D):
        dims = start + tl.arange(0, BLOCK_D)
        inside = (dims < D)[None, :]
        e = tl.load(hidden_ptr + rows * stride_hn + dims[None, :], mask=inside, other=0.0)
        out_ptrs = packed_ptr + tokens.to(tl.int64)[:, None] * stride_pn + dims[None, :]
        tl.store(out_ptrs, e, mask=inside)
