"""The merge of the ranks' statistics, and the check that they belong together."""

# Triton types a kernel's arguments as its compiler sees them.

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import LOG2E, exp2_of, log2_of

LN2 = tl.constexpr(0.6931471805599453)


# Numbers before a rank's statistics: pairs of fp32 digits.
HEADER = tl.constexpr(8)


@triton.jit
def number_of(header_ptr, PLACE: tl.constexpr, DIGIT: tl.constexpr):
    """Reads the header's PLACE-th number from two fp32 digits, as int64."""
    high = tl.load(header_ptr + 2 * PLACE).to(tl.int64)
    return high * DIGIT + tl.load(header_ptr + 2 * PLACE + 1).to(tl.int64)


@triton.jit
def bounds_of(header_ptr, DIGIT: tl.constexpr):
    """Reads start, stop, vocab_size of the shard; stop is cut off at vocab_size."""
    start = number_of(header_ptr, 1, DIGIT)
    stop = number_of(header_ptr, 2, DIGIT)
    size = number_of(header_ptr, 3, DIGIT)
    return start, tl.maximum(tl.minimum(stop, size), start), size


@triton.jit
def tiles_whole(parts_ptr, ranks, length, stride, BLOCK_RANKS: tl.constexpr, DIGIT: tl.constexpr):
    """Checks that all ranks sent `length` numbers, and that their shards tile the vocabulary."""
    rank = tl.arange(0, BLOCK_RANKS)
    real = rank < ranks
    headers = parts_ptr + tl.minimum(rank, ranks - 1).to(tl.int64) * stride
    start, stop, size = bounds_of(headers, DIGIT)
    whole = number_of(parts_ptr, 3, DIGIT)
    fine = tl.sum(tl.where(number_of(headers, 0, DIGIT) != length, 1, 0), 0) == 0
    fine = fine & (tl.sum(tl.where(real, stop - start, 0), 0) == whole)
    fine = fine & (tl.sum(tl.where(size != whole, 1, 0), 0) == 0)
    header_ptr = parts_ptr
    for this in range(ranks):
        first, end, _ = bounds_of(header_ptr, DIGIT)
        overlap = tl.minimum(end, stop) - tl.maximum(first, start)
        fine = fine & (tl.sum(tl.where(real & (rank != this) & (overlap > 0), 1, 0), 0) == 0)
        header_ptr += stride
    return fine


@triton.jit
def is_repeated(
    parts_ptr,
    count,
    ranks,
    N,
    stride,
    LOOK_AT: tl.constexpr,
    LEAST_TOKENS: tl.constexpr,
    SAME: tl.constexpr,
    LEAST_SPREAD: tl.constexpr,
):
    """Checks if all ranks have the same rows, to all appearances: `merge_header._is_repeated`."""
    rows = tl.arange(0, LOOK_AT)
    counts = rows < tl.minimum(count, N)
    first = tl.load(parts_ptr + HEADER + rows, mask=counts, other=0.0)
    logit = tl.zeros((LOOK_AT,), tl.float32)
    differ = 0
    holding = 0
    part_ptr = parts_ptr + HEADER
    for _ in range(ranks):
        lse = tl.load(part_ptr + rows, mask=counts, other=0.0)
        target = tl.load(part_ptr + N + rows, mask=counts, other=0.0)
        # NaN, also of an empty shard's -inf, is not the same.
        same = tl.abs(lse - first) <= SAME * tl.maximum(tl.abs(first), 1.0)
        differ += tl.sum(tl.where(counts & (same == 0), 1, 0), 0)
        holding += tl.max(tl.where(counts & (target != 0.0), 1, 0), 0)
        logit += target
        part_ptr += stride
    spread = tl.max(tl.where(counts, logit, float("-inf")), 0)
    spread -= tl.min(tl.where(counts, logit, float("inf")), 0)
    enough = tl.sum(counts.to(tl.int32), 0) >= LEAST_TOKENS
    return enough & (spread >= LEAST_SPREAD) & (differ == 0) & (holding <= 1) & (ranks > 1)


@triton.jit
def store_header(
    out_ptr, length_high, length_low, start_high, start_low, stop_high, stop_low, size_high,
    size_low,
):  # fmt: skip
    """Stores the digits of `merge_header.digits_of`."""
    tl.store(out_ptr, length_high)
    tl.store(out_ptr + 1, length_low)
    tl.store(out_ptr + 2, start_high)
    tl.store(out_ptr + 3, start_low)
    tl.store(out_ptr + 4, stop_high)
    tl.store(out_ptr + 5, stop_low)
    tl.store(out_ptr + 6, size_high)
    tl.store(out_ptr + 7, size_low)


@triton.jit
def log_sum_of(part_ptr, ranks, stride, inside):
    """Computes `logaddexp_parts` of every rank's numbers at `part_ptr`, in the order of the ranks:
    all ranks get the same bits."""
    top = tl.full(inside.shape, float("-inf"), tl.float32)
    first_ptr = part_ptr
    for _ in range(ranks):
        top = tl.maximum(top, tl.load(part_ptr, mask=inside, other=0.0))
        part_ptr += stride
    # Of no column lse is -inf, of an infinite logit inf: infinity minus itself would be NaN.
    base = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    total = tl.zeros(inside.shape, tl.float32)
    part_ptr = first_ptr
    for _ in range(ranks):
        part = tl.load(part_ptr, mask=inside, other=0.0)
        total += exp2_of((part - base) * LOG2E)
        part_ptr += stride
    return base + log2_of(total) * LN2


@triton.jit
def sum_of(part_ptr, ranks, stride, inside):
    total = tl.zeros(inside.shape, tl.float32)
    for _ in range(ranks):
        total += tl.load(part_ptr, mask=inside, other=0.0)
        part_ptr += stride
    return total


@triton.jit(do_not_specialize=["N"])
def pack_stats_kernel(
    lse_ptr,  # [N]
    logit_ptr,  # [N]
    out_ptr,  # [8 + 2 N]: the header, and both: out
    N,
    length_high,  # fp32, as all of these
    length_low,
    start_high,
    start_low,
    stop_high,
    stop_low,
    size_high,
    size_low,
    BLOCK_N: tl.constexpr,
):
    """Packs the numbers that a rank sends. The header comes as arguments: a copy to the device
    would wait."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    stats_ptr = out_ptr + HEADER
    tl.store(stats_ptr + rows, tl.load(lse_ptr + rows, mask=inside), mask=inside)
    tl.store(stats_ptr + N + rows, tl.load(logit_ptr + rows, mask=inside), mask=inside)
    if tl.program_id(0) == 0:
        store_header(
            out_ptr, length_high, length_low, start_high, start_low, stop_high, stop_low,
            size_high, size_low,
        )  # fmt: skip


@triton.jit(do_not_specialize=["ranks", "N", "stride"])
def merge_ranks_kernel(
    parts_ptr,  # [ranks, stride] fp32: header [8], lse [N], target logit [N], of each
    count_ptr,  # [1] int32: tokens that count, if HAS_COUNT
    out_ptr,  # [2, N] lse (natural log) and target logit: out, 0 for tokens that don't count
    sound_ptr,  # [1] int32: 1 if the ranks' numbers belong together: out
    ranks,
    N,
    stride,
    BLOCK_N: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,  # not below `ranks`
    DIGIT: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    LOOK_AT: tl.constexpr,
    LEAST_TOKENS: tl.constexpr,
    SAME: tl.constexpr,
    LEAST_SPREAD: tl.constexpr,
):
    """Merges in rank order, so that all ranks get the same bits. The last program checks the
    headers, and that the ranks' rows differ."""
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = rows < N
    if tl.program_id(0) == tl.num_programs(0) - 1:
        fine = tiles_whole(parts_ptr, ranks, 2 * N, stride, BLOCK_RANKS, DIGIT)
        count = N
        if HAS_COUNT:
            count = tl.load(count_ptr)
        same = is_repeated(
            parts_ptr, count, ranks, N, stride, LOOK_AT, LEAST_TOKENS, SAME, LEAST_SPREAD
        )
        tl.store(sound_ptr, (fine & (same == 0)).to(tl.int32))
        return
    part_ptr = parts_ptr + HEADER + rows
    lse = log_sum_of(part_ptr, ranks, stride, inside)
    logit = sum_of(part_ptr + N, ranks, stride, inside)
    if HAS_COUNT:
        counts = rows < tl.load(count_ptr)
        lse = tl.where(counts, lse, 0.0)
        logit = tl.where(counts, logit, 0.0)
    tl.store(out_ptr + rows, lse, mask=inside)
    tl.store(out_ptr + N + rows, logit, mask=inside)
