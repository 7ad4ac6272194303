"""Factors and rounding errors of two-sided quantisation: small vectors, each by one kernel, where
torch takes some forty."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "every"])
def moments_kernel(
    source_ptr,  # [num_rows, D], inner stride 1
    rows_ptr,  # [N] int64: which rows, if HAS_ROWS
    count_ptr,  # [1] int32: the number of rows, if HAS_ROWS
    part_ptr,  # [splits, 2, D] fp32 sum of rows, and of their squares: out
    num_rows,
    every,
    D,
    stride_sn,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_ROWS: tl.constexpr,
):
    """Sums moments of BLOCK_D dims over a share of each `every`-th row; the next rows are loaded
    while the last ones are added."""
    split, splits = tl.program_id(1), tl.num_programs(1)
    dims = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((ROWS, BLOCK_D), tl.float32)
    square = tl.zeros((ROWS, BLOCK_D), tl.float32)
    number = tl.cdiv(num_rows, every)
    if HAS_ROWS:
        number = tl.load(count_ptr)
    first = split * ROWS + tl.arange(0, ROWS)
    ahead = read_some(source_ptr, rows_ptr, first, number, dims, D, every, stride_sn, HAS_ROWS)
    for start in tl.range(split * ROWS, number, splits * ROWS, num_stages=1):
        x = ahead.to(tl.float32)
        following = start + splits * ROWS + tl.arange(0, ROWS)
        ahead = read_some(
            source_ptr, rows_ptr, following, number, dims, D, every, stride_sn, HAS_ROWS
        )
        total += x
        square += x * x
    part_ptrs = part_ptr + split * 2 * D + dims
    tl.store(part_ptrs, tl.sum(total, 0), mask=dims < D)
    tl.store(part_ptrs + D, tl.sum(square, 0), mask=dims < D)


@triton.jit(do_not_specialize=["splits"])
def sum_parts_kernel(
    part_ptr,  # [splits, size] fp32
    seen_ptr,  # [splits, GROUPS] fp32, if HAS_SEEN
    out_ptr,  # [size] fp32 sum of the parts, divided by that of the group's `seen_ptr`: out
    splits,
    size,
    D,  # numbers that follow each other and have one group
    GROUPS: tl.constexpr,
    HAS_SEEN: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds up the parts that programs of another kernel have computed."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    group = at // D % GROUPS
    total = tl.zeros((BLOCK,), tl.float32)
    seen = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, splits, SPLITS):
        split = start + tl.arange(0, SPLITS)
        inside = (split < splits)[:, None] & (at < size)[None, :]
        part_ptrs = part_ptr + split.to(tl.int64)[:, None] * size + at[None, :]
        total += tl.sum(tl.load(part_ptrs, mask=inside, other=0.0), 0)
        if HAS_SEEN:
            seen_ptrs = seen_ptr + split[:, None] * GROUPS + group[None, :]
            seen += tl.sum(tl.load(seen_ptrs, mask=(split < splits)[:, None], other=0.0), 0)
    if HAS_SEEN:
        total = total / seen
    tl.store(out_ptr + at, total, mask=at < size)


@triton.jit
def read_some(
    source_ptr, rows_ptr, index, number, dims, D, every, stride_sn, HAS_ROWS: tl.constexpr
):
    """Loads [ROWS, BLOCK_D] of the rows with these indices, 0 beyond the last."""
    if HAS_ROWS:
        row = tl.load(rows_ptr + index, mask=index < number, other=0)
    else:
        row = index.to(tl.int64) * every
    inside = (index < number)[:, None] & (dims < D)[None, :]
    return tl.load(source_ptr + row[:, None] * stride_sn + dims[None, :], mask=inside, other=0.0)


@triton.jit
def moments_of(sums_ptr, count, dims, D):
    """Returns mean and variance of the rows, dim by dim."""
    mean = tl.load(sums_ptr + dims, mask=dims < D, other=0.0) / count
    square = tl.load(sums_ptr + D + dims, mask=dims < D, other=0.0) / count
    return mean, tl.maximum(square - mean * mean, 1e-30)


@triton.jit
def log_ratio(weight_sums_ptr, hidden_sums_ptr, taken, count, dims, D):
    """Returns log2 of the hidden states' variance over the weight's; 0 beyond D."""
    _, of_weight = moments_of(weight_sums_ptr, taken, dims, D)
    _, of_hidden = moments_of(hidden_sums_ptr, count, dims, D)
    return tl.where(dims < D, tl.log2(of_hidden / of_weight), 0.0)


@triton.jit(do_not_specialize=["taken"])
def vectors_kernel(
    weight_sums_ptr,  # [2, D] fp32 sums of rows, and of their squares, of the weight
    hidden_sums_ptr,  # [2, D] the same of hidden states
    count_ptr,  # [1] int32 hidden states that count
    out_ptr,  # [6, D] fp32, see below: out
    mean_ptr,  # [3] fp32: the last: both centres' inner product: out
    taken,  # rows of the weight in its sums
    D,
    BLOCK_D: tl.constexpr,
):
    """Computes the vectors of both sides' quantisation; a single program.

    In order: the weight's centre; the channels, which multiply its rows; the shift added to the
    products; the hidden states' centre; 1 over the channels, which multiplies hidden states; the
    shift added to those products. A dim in which one side varies more than the other is scaled on
    both, halfway each, by powers of two. docs/design/screened.md
    """
    lane = tl.arange(0, BLOCK_D)
    count = tl.maximum(tl.load(count_ptr), 1).to(tl.float32)
    taken = taken * 1.0
    total = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, D, BLOCK_D):
        total += log_ratio(weight_sums_ptr, hidden_sums_ptr, taken, count, start + lane, D)
    mean_ratio = tl.sum(total, 0) / D
    dot = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, D, BLOCK_D):
        dims = start + lane
        ratio = log_ratio(weight_sums_ptr, hidden_sums_ptr, taken, count, dims, D)
        # The addition rounds, ties to even, to the number's last digits after it.
        power = ((ratio - mean_ratio) * 0.25 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        power = tl.minimum(tl.maximum(power, -126), 126)
        channel = ((power + 127) << 23).to(tl.float32, bitcast=True)
        centre, _ = moments_of(weight_sums_ptr, taken, dims, D)
        hidden_centre, _ = moments_of(hidden_sums_ptr, count, dims, D)
        out_ptrs, inside = out_ptr + dims, dims < D
        tl.store(out_ptrs, centre, mask=inside)
        tl.store(out_ptrs + D, channel, mask=inside)
        tl.store(out_ptrs + 2 * D, -centre * channel, mask=inside)
        tl.store(out_ptrs + 3 * D, hidden_centre, mask=inside)
        # As exact as its power of two.
        inverse = 1.0 / channel
        tl.store(out_ptrs + 4 * D, inverse, mask=inside)
        tl.store(out_ptrs + 5 * D, -hidden_centre * inverse, mask=inside)
        dot += tl.where(inside, centre * hidden_centre, 0.0)
    tl.store(mean_ptr + 2, tl.sum(dot, 0))


@triton.jit(do_not_specialize=["num_rows"])
def sizes_kernel(
    size_ptr,  # [2, num_rows] fp32 of a weight's rows: see `quantize_kernel`
    part_ptr,  # [2, programs] fp32 sums of a program's share of them: out
    num_rows,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    norm = tl.zeros((BLOCK,), tl.float32)
    remainder = tl.zeros((BLOCK,), tl.float32)
    for start in range(program * BLOCK, num_rows, programs * BLOCK):
        rows = start + tl.arange(0, BLOCK)
        norm += tl.load(size_ptr + rows, mask=rows < num_rows, other=0.0)
        remainder += tl.load(size_ptr + num_rows + rows, mask=rows < num_rows, other=0.0)
    tl.store(part_ptr + program, tl.sum(norm, 0))
    tl.store(part_ptr + programs + program, tl.sum(remainder, 0))


@triton.jit(do_not_specialize=["N", "num_rows", "parts"])
def shift_kernel(
    of_tokens_ptr,  # [2, N] fp32: the second is shifted, in place
    size_ptr,  # [2, N] fp32 of the tokens: see `quantize_kernel`
    part_ptr,  # [2, parts] fp32, of `sizes_kernel`, if HAS_PARTS
    mean_ptr,  # [3] fp32, of `QuantizedRows`; if HAS_PARTS the first two: out
    variance_ptr,  # [N] fp32 of a logit's error: out
    N,
    num_rows,  # of the weight
    parts,
    dim,
    scale,
    BLOCK_N: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    """Shifts BLOCK_N tokens as `eight_bits.correct_for_rounding` does; a program a block."""
    if HAS_PARTS:
        lane = tl.arange(0, PARTS)
        norm = tl.load(part_ptr + lane, mask=lane < parts, other=0.0)
        remainder = tl.load(part_ptr + parts + lane, mask=lane < parts, other=0.0)
        norm = tl.sum(norm, 0) / num_rows
        remainder = tl.sum(remainder, 0) / num_rows
        if tl.program_id(0) == 0:
            tl.store(mean_ptr, norm)
            tl.store(mean_ptr + 1, remainder)
    else:
        norm = tl.load(mean_ptr)
        remainder = tl.load(mean_ptr + 1)
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = token < N
    # The two sides' rounding errors are nearly independent.
    summed = tl.load(size_ptr + N + token, mask=inside, other=0.0) * norm
    summed = (summed + tl.load(size_ptr + token, mask=inside, other=0.0) * remainder) / dim
    shift = tl.load(of_tokens_ptr + N + token, mask=inside, other=0.0) - tl.load(mean_ptr + 2)
    # An error of that variance raises the mean of exp by half of the variance.
    tl.store(of_tokens_ptr + N + token, shift - 0.5 * scale * summed, mask=inside)
    tl.store(variance_ptr + token, scale * scale * summed, mask=inside)
