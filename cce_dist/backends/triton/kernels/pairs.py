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
    products = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for k in range(0, D, BLOCK_D):
        inside = listed[:, None] & (k + dims < D)[None, :]
        e = tl.load(e_ptrs + k, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(c_ptrs + k, mask=inside, other=0.0).to(tl.float32)
        products += e * c
    value = tl.sum(products, 1)
    if HAS_BIAS:
        value += tl.load(bias_ptr + column, mask=listed, other=0.0).to(tl.float32)
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


@triton.jit
def pair_weight_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    rows_ptr,  # [P] int64; -1: left out
    order_ptr,  # [P] int64: pairs by id
    starts_ptr,  # [V + 1] int64: where an id's pairs start in `order_ptr`
    grad_ptr,  # [P] fp32
    out_ptr,  # [V, D]: out
    bias_ptr,  # [V] fp32: out
    D,
    stride_hn,
    stride_ov,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,  # of a program
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Sums one id's pairs: grad times the token's row of hidden, and grad. Most ids have no pair: a
    program writes several blocks, or there would be as many programs as blocks of zeros."""
    column = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts_ptr + column)
    end = tl.load(starts_ptr + column + 1)
    if HAS_WEIGHT:
        for block in range(BLOCKS):
            dims = (tl.program_id(1) * BLOCKS + block) * BLOCK_D + tl.arange(0, BLOCK_D)
            total = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
            for start in range(begin, end, BLOCK_P):
                row, grad = load_pairs(start, end, rows_ptr, order_ptr, grad_ptr, BLOCK_P)
                inside = (row >= 0)[:, None] & (dims < D)[None, :]
                e_ptrs = hidden_ptr + row[:, None] * stride_hn + dims[None, :]
                total += grad[:, None] * tl.load(e_ptrs, mask=inside, other=0.0).to(tl.float32)
            value = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + column * stride_ov + dims, value, mask=dims < D)
    if HAS_BIAS:
        grads = tl.zeros((BLOCK_P,), tl.float32)
        for start in range(begin, end, BLOCK_P):
            _, grad = load_pairs(start, end, rows_ptr, order_ptr, grad_ptr, BLOCK_P)
            grads += grad
        tl.store(bias_ptr + column, tl.sum(grads, 0), mask=tl.program_id(1) == 0)


@triton.jit
def load_pairs(start, end, rows_ptr, order_ptr, grad_ptr, BLOCK_P: tl.constexpr):
    """Loads a block of pairs by id: rows of hidden, -1 where a pair is left out, and gradients."""
    at = start + tl.arange(0, BLOCK_P)
    pair = tl.load(order_ptr + at, mask=at < end, other=0)
    row = tl.load(rows_ptr + pair, mask=at < end, other=-1)
    return row, tl.load(grad_ptr + pair, mask=row >= 0, other=0.0)
