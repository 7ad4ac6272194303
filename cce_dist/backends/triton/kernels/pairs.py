"""Logits of listed pairs of a token and an id, and their gradients."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["P"])
def pair_logits_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    weight_ptr,  # [V, D], inner stride 1
    bias_ptr,  # [V]
    rows_ptr,  # [P] int64
    columns_ptr,  # [P] int64; -1: not of this shard
    out_ptr,  # [P] fp32: out, 0 for pairs that are not of this shard
    P,
    D,
    stride_hn,
    stride_wv,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    column = tl.load(columns_ptr + pair, mask=pair < P, other=-1)
    listed = column >= 0
    row = tl.load(rows_ptr + pair, mask=listed, other=0)
    dims = tl.arange(0, BLOCK_D)
    e_ptrs = hidden_ptr + row[:, None] * stride_hn + dims[None, :]
    c_ptrs = weight_ptr + column[:, None] * stride_wv + dims[None, :]
    # A sum of nearly 300 loses digits of fp32 inputs with every number that is added.
    IS_WIDE: tl.constexpr = weight_ptr.dtype.element_ty == tl.float32
    wide: tl.constexpr = tl.float64 if IS_WIDE else tl.float32
    products = tl.zeros((BLOCK_P, BLOCK_D), wide)
    for k in range(0, D, BLOCK_D):
        inside = listed[:, None] & (k + dims < D)[None, :]
        e = tl.load(e_ptrs + k, mask=inside, other=0.0).to(wide)
        c = tl.load(c_ptrs + k, mask=inside, other=0.0).to(wide)
        products += e * c
    value = tl.sum(products, 1)
    if HAS_BIAS:
        value += tl.load(bias_ptr + column, mask=listed, other=0.0).to(wide)
    tl.store(out_ptr + pair, value, mask=pair < P)


@triton.jit
def pair_hidden_kernel(
    weight_ptr,  # [V, D], inner stride 1
    rows_ptr,  # [P] int64; -1: left out
    columns_ptr,  # [P] int64; -1: not of this shard
    offsets_ptr,  # [T + 1] int64: pairs of each token
    grad_ptr,  # [P] fp32
    out_ptr,  # [num_rows, D]: out, of the tokens that have pairs
    D,
    stride_wv,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Sums one token's pairs: grad times the id's row of weight."""
    begin = tl.load(offsets_ptr + tl.program_id(0))
    end = tl.load(offsets_ptr + tl.program_id(0) + 1)
    dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for start in range(begin, end, BLOCK_P):
        pair = start + tl.arange(0, BLOCK_P)
        column = tl.load(columns_ptr + pair, mask=pair < end, other=-1)
        grad = tl.load(grad_ptr + pair, mask=column >= 0, other=0.0)
        inside = (column >= 0)[:, None] & (dims < D)[None, :]
        c_ptrs = weight_ptr + column[:, None] * stride_wv + dims[None, :]
        total += grad[:, None] * tl.load(c_ptrs, mask=inside, other=0.0).to(tl.float32)
    row = tl.load(rows_ptr + begin, mask=begin < end, other=-1)
    value = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * D + dims, value, mask=dims < tl.where(row >= 0, D, 0))


@triton.jit(do_not_specialize=["P", "first_id"])
def pair_parts_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    rows_ptr,  # [P] int64, sorted by id; -1: left out
    ids_ptr,  # [P] int64, sorted
    grad_ptr,  # [P] fp32, sorted by id
    parts_ptr,  # [P / PART, D] fp32: out
    of_bias_ptr,  # [P / PART] fp32: out
    P,
    first_id,
    V,
    D,
    stride_hn,
    PART: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Sums the first pairs of a part of the sorted pairs, if their id is the last one of the part
    before. So an id of many tokens has several programs."""
    part = tl.program_id(0).to(tl.int64)
    begin = part * PART
    column = tl.load(ids_ptr + begin)
    if (part > 0) & (column >= first_id) & (column < first_id + V):  # noqa: SIM102
        if tl.load(ids_ptr + begin - 1) == column:
            at = begin + tl.arange(0, PART)
            is_of_column = tl.load(ids_ptr + at, mask=at < P, other=-1) == column
            end = begin + tl.sum(is_of_column.to(tl.int32), 0)
            if HAS_WEIGHT:
                dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
                total = sum_rows(begin, end, hidden_ptr, rows_ptr, grad_ptr, dims, D, stride_hn)
                tl.store(parts_ptr + part * D + dims, total, mask=dims < D)
            if HAS_BIAS:
                total = sum_grads(begin, end, rows_ptr, grad_ptr, PART)
                tl.store(of_bias_ptr + part, total, mask=tl.program_id(1) == 0)


@triton.jit
def pair_weight_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    rows_ptr,  # [P] int64, sorted by id; -1: left out
    starts_ptr,  # [V + 1] int64: where an id's sorted pairs start
    grad_ptr,  # [P] fp32, sorted by id
    parts_ptr,  # [P / PART, D] fp32, of `pair_parts_kernel`
    of_bias_ptr,  # [P / PART] fp32, likewise
    out_ptr,  # [V, D]: out
    bias_ptr,  # [V] fp32: out
    D,
    stride_hn,
    stride_ov,
    PART: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Sums one id's pairs: grad times the token's row of hidden, and grad."""
    column = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts_ptr + column)
    end = tl.load(starts_ptr + column + 1)
    # Pairs before the first bound of parts; each later part has its sum.
    first = begin // PART + 1
    middle = tl.minimum(end, first * PART)
    last = tl.where(end > begin, (end - 1) // PART + 1, first)
    if HAS_WEIGHT:
        dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        total = sum_rows(begin, middle, hidden_ptr, rows_ptr, grad_ptr, dims, D, stride_hn)
        for part in range(first, last):
            total += tl.load(parts_ptr + part * D + dims, mask=dims < D, other=0.0)
        value = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + column * stride_ov + dims, value, mask=dims < D)
    if HAS_BIAS:
        total = sum_grads(begin, middle, rows_ptr, grad_ptr, PART)
        for part in range(first, last):
            total += tl.load(of_bias_ptr + part)
        tl.store(bias_ptr + column, total, mask=tl.program_id(1) == 0)


@triton.jit(do_not_specialize=["P"])
def add_pairs_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    rows_ptr,  # [N] int64: each token's row of hidden
    tokens_ptr,  # [P] int64: each pair's token, sorted by column
    columns_ptr,  # [P] int32 or int64, sorted; -1: left out
    grad_ptr,  # [N] fp32: each token's
    out_ptr,  # [V, D] contiguous: in and out
    P,
    D,
    stride_hn,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds grad times the row of hidden to the rows of some columns. The program of a column's
    first pair sums them all, and rounds once."""
    first = tl.program_id(0)
    column = tl.load(columns_ptr + first).to(tl.int64)
    if tl.load(columns_ptr + first - 1, mask=first > 0, other=-1) != column:
        dims = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
        pair = first + tl.arange(0, BLOCK_P)
        is_of_column = tl.load(columns_ptr + pair, mask=pair < P, other=-1) == column
        total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        while tl.max(is_of_column.to(tl.int32), 0) > 0:
            token = tl.load(tokens_ptr + pair, mask=is_of_column, other=0)
            grad = tl.load(grad_ptr + token, mask=is_of_column, other=0.0)
            row = tl.load(rows_ptr + token, mask=is_of_column, other=0)
            inside = is_of_column[:, None] & (dims < D)[None, :]
            e_ptrs = hidden_ptr + row[:, None] * stride_hn + dims[None, :]
            total += grad[:, None] * tl.load(e_ptrs, mask=inside, other=0.0).to(tl.float32)
            pair += BLOCK_P
            is_of_column = tl.load(columns_ptr + pair, mask=pair < P, other=-1) == column
        out_ptrs = out_ptr + column * D + dims
        value = tl.load(out_ptrs, mask=dims < D, other=0.0).to(tl.float32) + tl.sum(total, 0)
        tl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), mask=dims < D)


@triton.jit
def sum_rows(begin, end, hidden_ptr, rows_ptr, grad_ptr, dims, D, stride_hn):
    """Returns the sum of grad times the row of hidden of sorted pairs [begin, end), at `dims`."""
    total = tl.zeros(dims.shape, tl.float32)
    for pair in range(begin, end):
        row = tl.load(rows_ptr + pair)
        grad = tl.load(grad_ptr + pair)
        inside = dims < tl.where(row >= 0, D, 0)
        e = tl.load(hidden_ptr + row * stride_hn + dims, mask=inside, other=0.0)
        total += grad * e.to(tl.float32)
    return total


@triton.jit
def sum_grads(begin, end, rows_ptr, grad_ptr, PART: tl.constexpr):
    """Returns the sum of the gradients of sorted pairs [begin, end), at most PART."""
    pair = begin + tl.arange(0, PART)
    row = tl.load(rows_ptr + pair, mask=pair < end, other=-1)
    return tl.sum(tl.load(grad_ptr + pair, mask=row >= 0, other=0.0), 0)
