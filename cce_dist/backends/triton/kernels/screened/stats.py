"""Statistics of a screened forward: exact logits of the kept columns, 8-bit ones of the tail.

docs/design/screened.md#statistics
"""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import LOG2E, exp2_of, log2_of

# Rows of what a token has over its kept columns: the largest logit, log2, and the sum of w = exp2
# relative to it are the first two, and the only ones without statistics.
PLAIN_SUMS = tl.constexpr(2)
# The sums of w log2 w and of w^2.
SURPLUS = tl.constexpr(2)
SQUARES = tl.constexpr(3)
# The largest logit as its product gave it, log2, and its column.
LARGEST = tl.constexpr(4)
COLUMN = tl.constexpr(5)
ALL_SUMS = tl.constexpr(6)
# Larger than any column.
NO_COLUMN = tl.constexpr(2147483647)


@triton.jit
def store_largest(z, column, part_ptrs, size):
    """Stores the largest logit, log2, and the lowest column that has it. Args: z: [COLUMNS, TOKENS]
    of kept columns, -inf of others."""
    top = tl.max(z, 0)
    has_it = (z == top[None, :]) & (z > float("-inf"))
    lowest = tl.min(tl.where(has_it, column[:, None], NO_COLUMN), 0)
    tl.store(part_ptrs + LARGEST * size, top)
    tl.store(part_ptrs + COLUMN * size, lowest.to(tl.float32))


@triton.jit
def store_no_stats(
    part_ptrs, size, TOKENS: tl.constexpr, HAS_SUMS: tl.constexpr, HAS_LARGEST: tl.constexpr
):
    """Stores the statistics of no column."""
    nothing = tl.zeros((TOKENS,), tl.float32)
    if HAS_SUMS:
        tl.store(part_ptrs + SURPLUS * size, nothing)
        tl.store(part_ptrs + SQUARES * size, nothing)
    if HAS_LARGEST:
        tl.store(part_ptrs + LARGEST * size, nothing - float("inf"))
        tl.store(part_ptrs + COLUMN * size, nothing)


@triton.jit
def merge_sums(
    sum_ptrs,  # [TOKENS] in the first of ALL_SUMS: in place
    size,
    part_ptrs,  # the same of another part
    part_size,
    top,  # [TOKENS] the first two sums of both
    total,
    part_top,
    part,
    base,  # the larger one of the largest logits; 0 for -inf
):
    """Merges the sums for statistics of a part of the kept columns."""
    shrink, part_shrink = exp2_of(top - base), exp2_of(part_top - base)
    surplus = tl.load(sum_ptrs + SURPLUS * size)
    part_surplus = tl.load(part_ptrs + SURPLUS * part_size)
    surplus += tl.where(total > 0, (top - base) * total, 0.0)
    part_surplus += tl.where(part > 0, (part_top - base) * part, 0.0)
    surplus = tl.where(total > 0, shrink * surplus, 0.0)
    surplus += tl.where(part > 0, part_shrink * part_surplus, 0.0)
    tl.store(sum_ptrs + SURPLUS * size, surplus)
    squares = shrink * shrink * tl.load(sum_ptrs + SQUARES * size)
    squares += part_shrink * part_shrink * tl.load(part_ptrs + SQUARES * part_size)
    tl.store(sum_ptrs + SQUARES * size, squares)


@triton.jit
def merge_largest(sum_ptrs, size, part_ptrs, part_size):
    """Merges the largest logit of a part of the kept columns."""
    best, column = tl.load(sum_ptrs + LARGEST * size), tl.load(sum_ptrs + COLUMN * size)
    other = tl.load(part_ptrs + LARGEST * part_size)
    other_column = tl.load(part_ptrs + COLUMN * part_size)
    # Nothing is larger than NaN, nor equal to it: it stays.
    better = (other != other) | (other > best) | ((other == best) & (other_column < column))
    tl.store(sum_ptrs + LARGEST * size, tl.where(better, other, best))
    tl.store(sum_ptrs + COLUMN * size, tl.where(better, other_column, column))


@triton.jit
def screened_stats_kernel(
    count_ptr,  # [1] int32
    full_ptr,  # [1] int32: 1: nothing to do
    sum_ptr,  # [ALL_SUMS, N] of the kept columns
    unkept_ptr,  # [N] log of the tail's sum of exp(z), corrected
    # Of 8-bit logits, [N]: of the tail's softmax alone, its entropy and the log of the sum of its
    # squared probabilities; of all columns, the largest logit and its column
    entropy_ptr,
    sum_p2_ptr,
    largest_ptr,
    column_ptr,
    mass_ptr,  # [num_blocks, V] negative where kept
    variance_ptr,  # [N] of an 8-bit logit's error, half of which has been subtracted
    target_ptr,  # [N] int32, -1: none here
    order_ptr,  # int64: the caller's place of each token that counts, if HAS_ORDER
    # [N] of all columns, in the caller's order: out
    placed_mean_ptr,  # both of 8-bit logits as they are: in place
    placed_m2_ptr,
    placed_entropy_ptr,
    placed_sum_p2_ptr,
    placed_largest_ptr,
    placed_hit_ptr,  # 1 where the largest logit is the target's
    N,
    V,
    TOKENS: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_LARGEST: tl.constexpr,
    HAS_HIT: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """Merges the statistics of kept columns and of the tail, which are two shards."""
    block = tl.program_id(0)
    token = block * TOKENS + tl.arange(0, TOKENS)
    counts = token < tl.load(count_ptr)
    top, total = tl.load(sum_ptr + token), tl.load(sum_ptr + N + token)
    unkept = tl.load(unkept_ptr + token) * LOG2E
    base = tl.where(unkept < top, top, unkept)
    base = tl.where(base == float("-inf"), 0.0, base)
    kept_part, tail_part = total * exp2_of(top - base), exp2_of(unkept - base)
    whole = kept_part + tail_part
    screened = counts & (tl.load(full_ptr) == 0)
    place = token
    if HAS_ORDER:
        place = tl.load(order_ptr + token, mask=counts, other=0)
    # Rounding errors make 8-bit logits of the tail differ more than exact ones do.
    variance = tl.load(variance_ptr + token)
    if HAS_ENTROPY:
        surplus = tl.load(sum_ptr + SURPLUS * N + token)
        of_kept = log2_of(total) - surplus / total
        of_tail = (tl.load(entropy_ptr + token) + 0.5 * variance) * LOG2E
        kept_share, tail_share = kept_part / whole, tail_part / whole
        entropy = tl.where(kept_share > 0, kept_share * (of_kept - log2_of(kept_share)), 0.0)
        entropy += tl.where(tail_share > 0, tail_share * (of_tail - log2_of(tail_share)), 0.0)
        entropy = tl.where(entropy < 0, 0.0, entropy) / LOG2E
        tl.store(placed_entropy_ptr + place, entropy, mask=screened)
    if HAS_SQUARES:
        of_tail = exp2_of((tl.load(sum_p2_ptr + token) - variance) * LOG2E)
        of_tail *= tail_part * tail_part
        shrink = exp2_of(top - base)
        squares = shrink * shrink * tl.load(sum_ptr + SQUARES * N + token) + of_tail
        sum_p2 = (log2_of(squares) - 2.0 * log2_of(whole)) / LOG2E
        sum_p2 = tl.where(whole == 0, float("-inf"), sum_p2)
        tl.store(placed_sum_p2_ptr + place, sum_p2, mask=screened)
    if HAS_MOMENTS:
        mean = tl.load(placed_mean_ptr + place, mask=screened) + 0.5 * variance
        m2 = tl.load(placed_m2_ptr + place, mask=screened) - V * variance
        tl.store(placed_mean_ptr + place, mean, mask=screened)
        tl.store(placed_m2_ptr + place, tl.where(m2 < 0, 0.0, m2), mask=screened)
    if HAS_LARGEST:
        best = tl.load(sum_ptr + LARGEST * N + token) / LOG2E
        column = tl.load(sum_ptr + COLUMN * N + token)
        other = tl.load(largest_ptr + token)
        other_column = tl.load(column_ptr + token)
        at = block.to(tl.int64) * V + other_column.to(tl.int32)
        in_tail = tl.load(mass_ptr + at, mask=counts, other=0.0) >= 0
        better = (other > best) | ((other == best) & (other_column < column))
        better = better & in_tail
        best = tl.where(better, other, best)
        column = tl.where(better, other_column, column)
        tl.store(placed_largest_ptr + place, best, mask=screened)
        if HAS_HIT:
            hit = (column == tl.load(target_ptr + token).to(tl.float32)) & (best > float("-inf"))
            tl.store(placed_hit_ptr + place, hit.to(tl.float32), mask=screened)
