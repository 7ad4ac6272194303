"""Statistics of the logits that few callers ask for: largest, mean, variance, weighted sum."""

import triton
import triton.language as tl


@triton.jit
def add_extras(
    z,  # [BLOCK_V, BLOCK_N]
    columns,  # [BLOCK_V]
    is_first,  # whether this is the program's first tile
    V,
    class_weight_ptr,  # [V]
    largest_ptr,  # [BLOCK_N] in the first field of [7, splits, N]: largest z, its column, origin,
    # mean and m2 of z - origin, weighted sum, number of columns
    field,  # distance of two fields
    BLOCK_V: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """Adds one tile to the statistics, which stay in memory: they would not fit in registers.

    Chan's update merges the variance around the tile's mean, relative to the first logit: numbers
    near 1000 would else lose the digits of their variance.
    """
    valid = (columns < V)[:, None]
    if HAS_ARGMAX:
        values = tl.where(valid, z, float("-inf"))
        top, index = tl.max(values, 0, return_indices=True)
        index = (index + tl.min(columns, 0)).to(tl.float32)
        old = tl.load(largest_ptr)
        old_index = tl.load(largest_ptr + field)
        better = is_first | (top > old)
        tl.store(largest_ptr, tl.where(better, top, old))
        tl.store(largest_ptr + field, tl.where(better, index, old_index))
    if HAS_MOMENTS:
        origin = tl.load(largest_ptr + 2 * field)
        seen = tl.load(largest_ptr + 6 * field)
        if is_first:
            first = (tl.arange(0, BLOCK_V) == 0)[:, None]
            origin = tl.sum(tl.where(first, z, 0.0), 0)
            origin = tl.where(tl.abs(origin) == float("inf"), 0.0, origin)
            tl.store(largest_ptr + 2 * field, origin)
            seen = tl.zeros_like(seen)
        number = tl.sum((columns < V).to(tl.float32), 0)
        mean = tl.sum(tl.where(valid, z - origin[None, :], 0.0), 0) / number
        off = tl.where(valid, z - origin[None, :] - mean[None, :], 0.0)
        m2 = tl.sum(off * off, 0)
        old_mean = tl.load(largest_ptr + 3 * field)
        old_m2 = tl.load(largest_ptr + 4 * field)
        delta = mean - old_mean
        total = seen + number
        mean = tl.where(seen > 0, old_mean + delta * (number / total), mean)
        m2 = tl.where(seen > 0, old_m2 + m2 + delta * delta * (seen * number / total), m2)
        tl.store(largest_ptr + 3 * field, mean)
        tl.store(largest_ptr + 4 * field, m2)
        tl.store(largest_ptr + 6 * field, total)
    if HAS_SMOOTH:
        w = (columns < V).to(tl.float32)
        if HAS_CLASS_WEIGHT:
            w = tl.load(class_weight_ptr + columns, mask=columns < V, other=0.0)
        part = tl.sum(tl.where(valid, z * w[:, None], 0.0), 0)
        old = tl.load(largest_ptr + 5 * field)
        old = tl.where(is_first, tl.zeros_like(old), old)
        tl.store(largest_ptr + 5 * field, old + part)
    tl.debug_barrier()
