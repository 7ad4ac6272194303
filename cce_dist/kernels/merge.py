"""The ranks' statistics of every token, merged; and whether their shards tile the vocabulary."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportGeneralTypeIssues=false

import triton
import triton.language as tl

from cce_dist.kernels.numbers import LOG2E, exp2_of, log2_of

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def bounds_of(shard_ptr, DIGIT: tl.constexpr):
    """start, stop, vocab_size of the shard, int64, from two fp32 digits each; stop cut off at
    vocab_size."""
    start = tl.load(shard_ptr).to(tl.int64) * DIGIT + tl.load(shard_ptr + 1).to(tl.int64)
    stop = tl.load(shard_ptr + 2).to(tl.int64) * DIGIT + tl.load(shard_ptr + 3).to(tl.int64)
    size = tl.load(shard_ptr + 4).to(tl.int64) * DIGIT + tl.load(shard_ptr + 5).to(tl.int64)
    return start, tl.maximum(tl.minimum(stop, size), start), size


@triton.jit(do_not_specialize=["N"])
def pack_stats_kernel(
    lse_ptr,  # [N]
    logit_ptr,  # [N]
    out_ptr,  # [2 N + 6]: both, and the numbers: out
    N,
    start_high,  # fp32, as all of these
    start_low,
    stop_high,
    stop_low,
    size_high,
    size_low,
    BLOCK_N: tl.constexpr,
):
    """What a rank sends. The numbers come with the launch: a copy of them would have to wait."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    tl.store(out_ptr + rows, tl.load(lse_ptr + rows, mask=inside), mask=inside)
    tl.store(out_ptr + N + rows, tl.load(logit_ptr + rows, mask=inside), mask=inside)
    if tl.program_id(0) == 0:
        shard_ptr = out_ptr + 2 * N
        tl.store(shard_ptr, start_high)
        tl.store(shard_ptr + 1, start_low)
        tl.store(shard_ptr + 2, stop_high)
        tl.store(shard_ptr + 3, stop_low)
        tl.store(shard_ptr + 4, size_high)
        tl.store(shard_ptr + 5, size_low)


@triton.jit(do_not_specialize=["ranks", "N", "stride"])
def merge_kernel(
    parts_ptr,  # [ranks, stride] fp32: lse [N], target logit [N], and a shard's bounds [6], of each
    count_ptr,  # [1] int32: tokens that count, if HAS_COUNT
    out_ptr,  # [2, N] lse (natural log) and target logit: out, 0 for tokens that don't count
    tiles_ptr,  # [1] int32: 1 if the shards tile the vocabulary: out
    ranks,
    N,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,  # not below `ranks`
    DIGIT: tl.constexpr,
    HAS_COUNT: tl.constexpr,
):
    """In rank order, so that all ranks get the same bits. The last program looks at the shards."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    if tl.program_id(0) == tl.num_programs(0) - 1:
        rank = tl.arange(0, BLOCK_RANKS)
        others = parts_ptr + tl.minimum(rank, ranks - 1).to(tl.int64) * stride + 2 * N
        start, stop, size = bounds_of(others, DIGIT)
        whole = tl.load(parts_ptr + 2 * N + 4).to(tl.int64) * DIGIT
        whole += tl.load(parts_ptr + 2 * N + 5).to(tl.int64)
        real = rank < ranks
        fine = tl.sum(tl.where(real, stop - start, 0), 0) == whole
        fine = fine & (tl.sum(tl.where(real & (size != whole), 1, 0), 0) == 0)
        shard_ptr = parts_ptr + 2 * N
        for this in range(ranks):
            first, end, _ = bounds_of(shard_ptr, DIGIT)
            overlap = tl.minimum(end, stop) - tl.maximum(first, start)
            fine = fine & (tl.sum(tl.where(real & (rank != this) & (overlap > 0), 1, 0), 0) == 0)
            shard_ptr += stride
        tl.store(tiles_ptr, fine.to(tl.int32))
        return
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    part_ptr = parts_ptr
    for _ in range(ranks):
        top = tl.maximum(top, tl.load(part_ptr + rows, mask=inside, other=0.0))
        part_ptr += stride
    # Of no column at all: -inf, rather than the difference of two of them.
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.zeros((BLOCK_N,), tl.float32)
    logit = tl.zeros((BLOCK_N,), tl.float32)
    part_ptr = parts_ptr
    for _ in range(ranks):
        part = tl.load(part_ptr + rows, mask=inside, other=0.0)
        total += exp2_of((part - base) * LOG2E)
        logit += tl.load(part_ptr + N + rows, mask=inside, other=0.0)
        part_ptr += stride
    lse = base + log2_of(total) * LN2
    if HAS_COUNT:
        counts = rows < tl.load(count_ptr)
        lse = tl.where(counts, lse, 0.0)
        logit = tl.where(counts, logit, 0.0)
    tl.store(out_ptr + rows, lse, mask=inside)
    tl.store(out_ptr + N + rows, logit, mask=inside)
