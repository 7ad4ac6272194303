"""After an 8-bit forward: exact logits of the kept columns, and their sums."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.backward.filtered import arrive, go_on
from cce_dist.backends.triton.kernels.backward.sdd import (
    STORED_FURTHEST,
    STORED_MOST,
    STORED_SCALE,
    fresh_logits,
    segment_of,
)
from cce_dist.backends.triton.kernels.filter.column_lists import list_task
from cce_dist.backends.triton.kernels.numbers import LOG2E, exp2_of, log2_of
from cce_dist.backends.triton.kernels.screened.stats import (
    ALL_SUMS,
    LARGEST,
    PLAIN_SUMS,
    SQUARES,
    SURPLUS,
    merge_largest,
    merge_sums,
    store_largest,
    store_no_stats,
)


@triton.jit
def exact_task(
    task,
    stores,  # True: stores the logits for the backward
    first_tile,  # of the chunk
    last_tile,
    hidden_ptr,  # [N, D] packed
    rows_ptr,  # [N] int64
    weight_ptr,  # [V, D]
    bias_ptr,
    target_ptr,  # [N] int32, -1: none here
    target_logit_ptr,  # [N]
    lse_ptr,  # [N] natural log, of the 8-bit logits
    stored_ptr,  # [rows, TOKENS] of each entry: see `stored_entries`: out
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    base_ptr,  # [num_blocks + 1] int32, of the chunk
    segment_ptr,  # [num_blocks + 1] int32, of the chunk
    entries_ptr,  # [rows] int32
    part_ptr,  # [SUMS, tasks, TOKENS] fp32: see `stats.ALL_SUMS`: out
    part_size,
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
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_STORED: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
):
    """Computes the logits of SEGMENT entries of a token block's list, and sums those not drawn."""
    block, place, length, row = segment_of(
        task, first_tile, last_tile, starts_ptr, base_ptr, segment_ptr, num_tiles, num_blocks,
        SEGMENT, BLOCKS,
    )  # fmt: skip
    listed = place < length
    entry = tl.load(entries_ptr + row, mask=listed, other=1)
    column = tl.where(listed, entry >> 1, 0)
    kept = (entry & 1) == 0
    token = block * TOKENS + tl.arange(0, TOKENS)
    part_ptrs = part_ptr + task * TOKENS + tl.arange(0, TOKENS)
    wanted = tl.max(kept.to(tl.int32), 0) > 0
    if HAS_STORED:
        wanted = wanted | stores
    if wanted:
        z, _ = fresh_logits(
            column, block, hidden_ptr, rows_ptr, weight_ptr, bias_ptr, D, stride_hn, stride_wv,
            scale, softcap, SEGMENT, TOKENS, BLOCK_K, EVEN_K, STAGES, PRECISION, False, HAS_BIAS,
            HAS_SOFTCAP,
        )  # fmt: skip
        if HAS_LARGEST:
            # Of equal products the lowest column wins, so all of them come from this product.
            store_largest(tl.where(kept[:, None], z, float("-inf")), column, part_ptrs, part_size)
        # From the target's logit itself, so that nll's two terms share it.
        is_target = tl.where(listed, column, -2)[:, None] == tl.load(target_ptr + token)[None, :]
        z = tl.where(is_target, tl.load(target_logit_ptr + token)[None, :] * LOG2E, z)
        if HAS_STORED:
            above = tl.exp2(z - tl.load(lse_ptr + token)[None, :] * LOG2E + STORED_SCALE)
            # A token that doesn't count has an lse of 0. tl.minimum would lose a NaN.
            above = tl.where(above > STORED_MOST, STORED_MOST, above)
            at = row.to(tl.int64)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
            out = above.to(stored_ptr.dtype.element_ty)
            tl.store(stored_ptr + at, out, mask=(listed & stores)[:, None])
        z = tl.where(kept[:, None], z, float("-inf"))
        top = tl.max(z, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp2(z - base[None, :])
        tl.store(part_ptrs, top)
        tl.store(part_ptrs + part_size, tl.sum(w, 0))
        if HAS_SUMS:
            excess = tl.where(w == 0, 0.0, w * (z - base[None, :]))
            tl.store(part_ptrs + SURPLUS * part_size, tl.sum(excess, 0))
            tl.store(part_ptrs + SQUARES * part_size, tl.sum(w * w, 0))
    else:
        tl.store(part_ptrs, tl.full((TOKENS,), float("-inf"), tl.float32))
        tl.store(part_ptrs + part_size, tl.zeros((TOKENS,), tl.float32))
        store_no_stats(part_ptrs, part_size, TOKENS, HAS_SUMS, HAS_LARGEST)


@triton.jit
def merge_task(
    block,
    segment_ptr,  # [num_blocks + 1] int32, of the chunk
    part_ptr,  # [SUMS, tasks, TOKENS]
    kept_ptr,  # [SUMS, N] fp32: the same, over all entries of the token's block so far; in place
    part_size,
    N,
    TOKENS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
):
    """Merges the parts of a token block's list in this chunk, in order."""
    lane = tl.arange(0, TOKENS)
    kept_ptrs = kept_ptr + block * TOKENS + lane
    top = tl.load(kept_ptrs)
    total = tl.load(kept_ptrs + N)
    for task in range(tl.load(segment_ptr + block), tl.load(segment_ptr + block + 1)):
        part_ptrs = part_ptr + task * TOKENS + lane
        other = tl.load(part_ptrs)
        part = tl.load(part_ptrs + part_size)
        # tl.maximum would lose a NaN.
        higher = tl.where(other < top, top, other)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        if HAS_SUMS:
            merge_sums(kept_ptrs, N, part_ptrs, part_size, top, total, other, part, base)
        if HAS_LARGEST:
            merge_largest(kept_ptrs, N, part_ptrs, part_size)
        total = total * exp2_of(top - base) + part * exp2_of(other - base)
        top = higher
    tl.store(kept_ptrs, top)
    tl.store(kept_ptrs + N, total)


@triton.jit
def no_columns_kernel(
    sum_ptr,  # [SUMS, N] fp32: see `stats.ALL_SUMS`: out
    rows_ptr,  # [N] int64: 0 to N - 1: out
    N,  # a multiple of BLOCK_N
    SUMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Writes the sums over no columns, and the tokens' rows, for `exact_columns_kernel`."""
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    nothing = tl.zeros((BLOCK_N,), tl.float32)
    for number in tl.static_range(1, SUMS):
        tl.store(sum_ptr + number * N + token, nothing)
    # Both largest logits, of which the second is a statistic.
    tl.store(sum_ptr + token, nothing - float("inf"))
    if SUMS > LARGEST:
        tl.store(sum_ptr + LARGEST * N + token, nothing - float("inf"))
    tl.store(rows_ptr + token, token.to(tl.int64))


@triton.jit(do_not_specialize=["num_blocks", "max_chunks", "words"])
def exact_columns_kernel(
    hidden_ptr,  # [N, D] packed, N = num_blocks * TOKENS
    rows_ptr,  # [N] int64: 0 to N - 1
    weight_ptr,  # [V, D], inner stride 1
    bias_ptr,  # [V]
    target_ptr,  # [N] int32, -1: none here
    target_logit_ptr,  # [N] fp32
    lse_ptr,  # [N] natural log, of the 8-bit logits
    stored_ptr,  # [max_rows, TOKENS] of the last chunk's entries: see `stored_entries`: out
    full_ptr,  # [1] int32: 1: nothing to do
    bits_ptr,  # [num_tiles, 1 + HAS_DRAWN, TILE // 32, num_blocks] int32: see `tiles_kernel`
    order_ptr,  # [num_tiles * TILE] int32
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    first_ptr,  # [max_chunks + 1] int32
    num_chunks_ptr,  # [1] int32
    base_ptr,  # [max_chunks, num_blocks + 1] int32
    segment_ptr,  # [max_chunks, num_blocks + 1] int32
    entries_ptr,  # [2, max_rows] int32: lists of this chunk and the next
    part_ptr,  # [2, SUMS, max_tasks, TOKENS] fp32: of this chunk and the next
    sum_ptr,  # [SUMS, N] fp32 of each token's kept columns: see `stats.ALL_SUMS`: out
    queue_ptr,  # [max_chunks + 3] int32, zeros: the next task of each phase; arrivals
    num_blocks,
    D,
    num_tiles,
    max_chunks,
    max_rows,
    part_size,  # max_tasks * TOKENS
    words,
    stride_hn,
    stride_wv,
    scale,
    softcap,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
    HAS_STORED: tl.constexpr,
    HAS_SUMS: tl.constexpr,  # for statistics
    HAS_LARGEST: tl.constexpr,
):
    """Sums exact logits over the backward's lists of columns, by persistent programs.

    A phase lists one chunk, computes the logits of the chunk before, and merges the sums of the
    chunk before that.
    """
    num_chunks = tl.where(tl.load(full_ptr) > 0, 0, tl.load(num_chunks_ptr))
    N = num_blocks * TOKENS
    SUMS: tl.constexpr = ALL_SUMS if HAS_SUMS or HAS_LARGEST else PLAIN_SUMS
    arrived_ptr = queue_ptr + max_chunks + 2
    for phase in range(num_chunks + 2):
        stride = num_blocks + 1
        slot = phase % 2
        other = 1 - slot
        num_exact = 0
        num_merge = 0
        num_lists = 0
        first = 0
        last = 0
        before = 0
        if phase < num_chunks:
            first = tl.load(first_ptr + phase)
            last = tl.load(first_ptr + phase + 1)
            num_lists = (last - first) * words
        if (phase > 0) & (phase <= num_chunks):
            before = tl.load(first_ptr + phase - 1)
            last = tl.load(first_ptr + phase)
            num_exact = tl.load(segment_ptr + (phase - 1) * stride + num_blocks)
        if phase > 1:
            num_merge = num_blocks
        task = tl.atomic_add(queue_ptr + phase, 1)
        while task < num_exact + num_merge + num_lists:
            if task < num_exact:
                at = (phase - 1) * stride
                exact_task(
                    task, phase == num_chunks, before, last, hidden_ptr, rows_ptr, weight_ptr,
                    bias_ptr, target_ptr, target_logit_ptr, lse_ptr, stored_ptr, starts_ptr,
                    base_ptr + at, segment_ptr + at, entries_ptr + other * max_rows,
                    part_ptr + slot * SUMS * part_size, part_size, num_tiles, num_blocks, D,
                    stride_hn, stride_wv, scale, softcap, TOKENS, SEGMENT, BLOCKS, BLOCK_K, EVEN_K,
                    STAGES, PRECISION, HAS_BIAS, HAS_SOFTCAP, HAS_STORED, HAS_SUMS, HAS_LARGEST,
                )  # fmt: skip
            elif task < num_exact + num_merge:
                merge_task(
                    task - num_exact, segment_ptr + (phase - 2) * stride,
                    part_ptr + other * SUMS * part_size, sum_ptr, part_size, N, TOKENS, HAS_SUMS,
                    HAS_LARGEST,
                )  # fmt: skip
            else:
                # No pairs: their three arguments are unused.
                list_task(
                    task - num_exact - num_merge, False, first, bits_ptr, order_ptr, starts_ptr,
                    base_ptr + phase * stride, entries_ptr + slot * max_rows, order_ptr,
                    entries_ptr, 0, num_tiles, num_blocks, words, TILE, HAS_DRAWN,
                )  # fmt: skip
            task = tl.atomic_add(queue_ptr + phase, 1)
        arrive(arrived_ptr, False, IS_INTERPRETED)
        arrived = 0
        while arrived < (phase + 1) * tl.num_programs(0):
            arrived = tl.atomic_add(arrived_ptr, 0, sem="acquire")
        go_on(False, IS_INTERPRETED)


@triton.jit
def screened_lse_kernel(
    count_ptr,  # [1] int32
    full_ptr,  # [1] int32
    unkept_ptr,  # [N] natural log
    dropped_ptr,  # [N] natural log
    sum_ptr,  # [2, N]
    lse_ptr,  # [N] natural log, of the 8-bit logits
    ref_ptr,  # [N] `lse_ptr` in log2: out
    bad_ref_ptr,  # [N / BLOCK_N] int32: 1 where a block's `stored_entries` are not usable: out
    order_ptr,  # int64: the caller's place of each token that counts, if HAS_ORDER
    # In the caller's order; written in place where logits were screened:
    placed_lse_ptr,  # natural log
    placed_dropped_ptr,
    N,
    BLOCK_N: tl.constexpr,
    HAS_STORED: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Computes lse from the exact logits of kept columns and the 8-bit logits of all others."""
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    counts = token < tl.load(count_ptr)
    top = tl.load(sum_ptr + token)
    total = tl.load(sum_ptr + N + token)
    unkept = tl.load(unkept_ptr + token) * LOG2E
    higher = tl.where(unkept < top, top, unkept)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    total = total * exp2_of(top - base) + exp2_of(unkept - base)
    lse = tl.div_rn(base + log2_of(total), tl.full((BLOCK_N,), LOG2E, tl.float32))
    full = tl.load(full_ptr)
    if HAS_STORED:
        ref = tl.load(lse_ptr + token) * LOG2E
        good = tl.abs(lse * LOG2E - ref) <= STORED_FURTHEST
        tl.store(ref_ptr + token, ref)
        tl.store(bad_ref_ptr + tl.program_id(0), tl.max((counts & ~good).to(tl.int32), 0) | full)
    screened = counts & (full == 0)
    place = token
    if HAS_ORDER:
        place = tl.load(order_ptr + token, mask=counts, other=0)
    tl.store(placed_lse_ptr + place, lse, mask=screened)
    tl.store(placed_dropped_ptr + place, tl.load(dropped_ptr + token), mask=screened)
