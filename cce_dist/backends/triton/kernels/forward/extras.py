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
    largest_ptr,  # [BLOCK_N] in the first field of [8, splits, N]: largest z, its column, origin,
    # mean and m2 of z - origin, weighted sum, number of columns; and the sum of exp2(z - ref)^2,
    # relative to the state's reference, which `forward_kernel` adds itself; of 8-bit logits it is
    # over dropped columns. Without a weighted sum that of exp2(z - ref) over dropped columns, of
    # 8-bit logits with a softcap, in its place
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


@triton.jit
def merge_extras_kernel(
    count_ptr,  # [1] int32
    shape_ptr,  # [3] int32: see `forward_kernel`
    extras_ptr,  # [8, size]: see `add_extras`
    target_ptr,  # [N]
    out_ptr,  # [S, 7, N], of each segment of splits: largest logit, its column, 1 where that is the
    # target; origin, mean, m2; weighted sum over all classes' number: out, 0 for tokens that don't
    # count
    num_classes,
    N,
    size,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
):
    """Merges the splits of the vocabulary: mean and m2 by Chan's update."""
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = tokens < N
    counts = tokens < tl.load(count_ptr)
    stride = tl.load(shape_ptr) * TOKENS
    splits = tl.load(shape_ptr + 1) // tl.num_programs(1)
    extras_ptr += tl.program_id(1) * splits * stride
    out_ptr += tl.program_id(1) * 7 * N
    nothing = tl.zeros((BLOCK_N,), tl.float32)
    top = nothing - float("inf")
    column = nothing
    origin = tl.load(extras_ptr + 2 * size + tokens, mask=counts, other=0.0)
    mean = nothing
    m2 = nothing
    seen = nothing
    weighted = nothing
    for split in range(splits):
        at = extras_ptr + split * stride + tokens
        if HAS_ARGMAX:
            other = tl.load(at, mask=counts, other=0.0)
            other_column = tl.load(at + size, mask=counts, other=0.0)
            better = (other > top) | ((other == top) & (other_column < column)) | (split == 0)
            top = tl.where(better, other, top)
            column = tl.where(better, other_column, column)
        if HAS_MOMENTS:
            shift = tl.load(at + 2 * size, mask=counts, other=0.0) - origin
            delta = shift + tl.load(at + 3 * size, mask=counts, other=0.0) - mean
            number = tl.load(at + 6 * size, mask=counts, other=0.0)
            share = number / tl.maximum(seen + number, 1.0)
            mean += delta * share
            m2 += tl.load(at + 4 * size, mask=counts, other=0.0) + delta * delta * (seen * share)
            seen += number
        if HAS_SMOOTH:
            weighted += tl.load(at + 5 * size, mask=counts, other=0.0)
    if HAS_ARGMAX:
        target = tl.load(target_ptr + tokens, mask=counts, other=-1).to(tl.float32)
        hit = (column == target) & (top > float("-inf"))
        tl.store(out_ptr + tokens, tl.where(counts, top, 0.0), mask=inside)
        tl.store(out_ptr + N + tokens, tl.where(counts, column, 0.0), mask=inside)
        tl.store(out_ptr + 2 * N + tokens, tl.where(counts & hit, 1.0, 0.0), mask=inside)
    if HAS_MOMENTS:
        tl.store(out_ptr + 3 * N + tokens, tl.where(counts, origin, 0.0), mask=inside)
        tl.store(out_ptr + 4 * N + tokens, tl.where(counts, mean, 0.0), mask=inside)
        tl.store(out_ptr + 5 * N + tokens, tl.where(counts, m2, 0.0), mask=inside)
    if HAS_SMOOTH:
        smooth = tl.where(counts, weighted / num_classes, 0.0)
        tl.store(out_ptr + 6 * N + tokens, smooth, mask=inside)
