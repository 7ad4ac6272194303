"""Rows in 8 bits: the scale and the rounding error of each row."""

import triton
import triton.language as tl


@triton.jit
def rounded_to_e4m3(x, largest):
    """Rounds x, already divided by its row's scale, to e4m3, in fp32; at most `largest`."""
    # The division's rounding may have raised the largest element above `largest`.
    x = tl.minimum(tl.maximum(x, -largest), largest)
    # Small numbers are multiples of 2^-9: adding a number without digits below that rounds to
    # them, ties to even.
    small = (x + 24576.0) - 24576.0
    # From 2^-6 on, numbers have three digits after the first. (Not a cast: the interpreter of
    # Triton 3.7 loses a carry to the next power of two.)
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF
    return tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))


@triton.jit
def read_rows(
    source_ptr,
    rows,
    num_rows,
    D,
    stride_sn,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Loads CHUNKS tiles of rows, [ROWS, BLOCK_D] each; 0 beyond the last row."""
    source_ptrs = source_ptr + rows.to(tl.int64)[:, None] * stride_sn
    tiles = ()
    for chunk in tl.static_range(CHUNKS):
        dims = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = (rows < num_rows)[:, None]
        if not EVEN:
            inside &= (dims < D)[None, :]
        tiles += (tl.load(source_ptrs + dims[None, :], mask=inside, other=0.0),)
    return tiles


@triton.jit
def sums_of(a, b, c, d):
    """Computes four sums along the rows, with one exchange between warps."""
    sums = tl.sum(tl.join(tl.join(a, b), tl.join(c, d)), 1)
    of_ab, of_cd = tl.split(sums)
    sum_a, sum_b = tl.split(of_ab)
    sum_c, sum_d = tl.split(of_cd)
    return sum_a, sum_b, sum_c, sum_d


@triton.jit(do_not_specialize=["num_rows"])
def quantize_kernel(
    source_ptr,  # [num_rows, D], inner stride 1
    channel_ptr,  # [D] fp32: each row is multiplied by it
    shift_ptr,  # [D] fp32: then added
    across_ptr,  # [D] fp32
    out_ptr,  # [num_rows, stride_on] 8 bits, 0 beyond D: out
    of_rows_ptr,  # [2, num_rows] fp32: scale of `out_ptr`; row . across: out
    size_ptr,  # [2, num_rows] fp32: |x|^2 of x = channel row + shift; |x - scale out|^2: out
    num_rows,
    D,
    stride_sn,
    stride_on,
    largest,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,  # tiles of BLOCK_D that hold stride_on dims
    EVEN: tl.constexpr,  # all tiles are full
    IS_INTEGER: tl.constexpr,
):
    """Quantises every num_programs-th group of rows.

    Rows stay in registers from read to write, so that their maximum costs no second read. The next
    rows are loaded meanwhile.
    """
    first = tl.program_id(0) * ROWS
    apart = tl.num_programs(0) * ROWS
    rows = first + tl.arange(0, ROWS)
    ahead = read_rows(source_ptr, rows, num_rows, D, stride_sn, BLOCK_D, CHUNKS, EVEN)
    for start in tl.range(first, num_rows, apart, num_stages=1):
        rows = start + tl.arange(0, ROWS)
        read = ahead
        ahead = read_rows(source_ptr, rows + apart, num_rows, D, stride_sn, BLOCK_D, CHUNKS, EVEN)
        top = tl.zeros((ROWS, BLOCK_D), tl.float32)
        norm = tl.zeros((ROWS, BLOCK_D), tl.float32)
        dot = tl.zeros((ROWS, BLOCK_D), tl.float32)
        tiles = ()
        for chunk in tl.static_range(CHUNKS):
            dims = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
            if EVEN:
                channel = tl.load(channel_ptr + dims)[None, :]
                shift = tl.load(shift_ptr + dims)[None, :]
                across = tl.load(across_ptr + dims)[None, :]
            else:
                channel = tl.load(channel_ptr + dims, mask=dims < D, other=0.0)[None, :]
                shift = tl.load(shift_ptr + dims, mask=dims < D, other=0.0)[None, :]
                across = tl.load(across_ptr + dims, mask=dims < D, other=0.0)[None, :]
            row = read[chunk].to(tl.float32)
            # channel is a power of two: as exact as (row - centre) channel.
            x = row * channel + shift
            top = tl.maximum(top, tl.abs(x))
            norm += x * x
            dot += row * across
            tiles += (x,)
        # A row of zeros has any scale; 1 over the smallest would be infinite.
        step = tl.maximum(tl.max(top, 1) / largest, 1e-30)
        inverse = 1.0 / step
        out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * stride_on
        cross = tl.zeros((ROWS, BLOCK_D), tl.float32)
        square = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for chunk in tl.static_range(CHUNKS):
            x = tiles[chunk]
            if IS_INTEGER:
                # The addition rounds, ties to even, to the number's last digits after it.
                shifted = x * inverse[:, None] + 12582912.0
                rounded = shifted - 12582912.0
                value = shifted.to(tl.int32, bitcast=True).to(tl.int8)
            else:
                rounded = rounded_to_e4m3(x * inverse[:, None], largest)
                value = rounded.to(out_ptr.dtype.element_ty)
            cross += x * rounded
            square += rounded * rounded
            dims = chunk * BLOCK_D + tl.arange(0, BLOCK_D)
            if EVEN:
                tl.store(out_ptrs + dims[None, :], value)
            else:
                inside = (rows < num_rows)[:, None] & (dims < stride_on)[None, :]
                tl.store(out_ptrs + dims[None, :], value, mask=inside)
        size, along, of_across, square_sum = sums_of(norm, cross, dot, square)
        # This scale leaves the rounding error no component along the row itself:
        # docs/design/screened.md.
        scale = tl.where(along > 0, size / along, step)
        remainder = scale * scale * square_sum - size
        inside = rows < num_rows
        tl.store(of_rows_ptr + rows, scale, mask=inside)
        tl.store(of_rows_ptr + num_rows + rows, of_across, mask=inside)
        tl.store(size_ptr + rows, size, mask=inside)
        # A NaN stays NaN.
        tl.store(size_ptr + num_rows + rows, tl.where(remainder < 0, 0.0, remainder), mask=inside)
