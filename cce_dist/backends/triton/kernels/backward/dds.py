"""DDS: a tile of the weight's gradient, from token blocks that keep its columns, and the tail."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import add_product, rounded, slice_of


@triton.jit
def store_columns(
    acc,  # [TILE, SLICE]
    bias,  # [TILE]
    column,  # [TILE]
    valid,  # [TILE]
    dims,  # [SLICE]
    is_first_slice,
    share_ptr,  # [groups, V]
    class_weight_ptr,  # [V]
    tail_ptr,  # [GROUPS, D] fp32: a share of 1 of a group adds this to a column
    tail_bias_ptr,  # [GROUPS] fp32
    grad_weight_ptr,  # [V, D]
    grad_bias_ptr,  # [V] fp32
    V,
    D,
    groups,
    stride_gv,
    TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Adds the tail, as GROUPS more rows of the product's sum, then stores each element once."""
    inside = (dims < D)[None, :]
    if HAS_TAIL or HAS_MEAN:
        group = tl.arange(0, GROUPS)
        share = tl.zeros((TILE, GROUPS), tl.float32)
        if HAS_TAIL:
            share = tl.load(
                share_ptr + group.to(tl.int64)[None, :] * V + column[:, None],
                mask=valid[:, None] & (group < groups)[None, :],
                other=0.0,
            ).to(tl.float32)
        if HAS_MEAN:
            weight = valid.to(tl.float32)
            if HAS_CLASS_WEIGHT:
                weight = tl.load(class_weight_ptr + column, mask=valid, other=0.0)
            share = tl.where((group == groups)[None, :], weight[:, None], share)
        if HAS_GRAD_WEIGHT:
            tail = tl.load(tail_ptr + group[:, None] * D + dims[None, :], mask=inside, other=0.0)
            acc = tl.dot(share, tail, acc, input_precision=PRECISION)
        if HAS_GRAD_BIAS:
            # Group by group, so that no last bit depends on the tile's shape.
            for i in range(groups + (1 if HAS_MEAN else 0)):
                share_of_group = tl.sum(tl.where((group == i)[None, :], share, 0.0), 1)
                bias += share_of_group * tl.load(tail_bias_ptr + i)
    if HAS_GRAD_WEIGHT:
        out = grad_weight_ptr + column.to(tl.int64)[:, None] * stride_gv + dims[None, :]
        written = valid[:, None] & inside
        if ACCUMULATE:
            acc += tl.load(out, mask=written, other=0.0)
        tl.store(out, rounded(acc, grad_weight_ptr.dtype.element_ty), mask=written)
    if HAS_GRAD_BIAS:
        tl.store(grad_bias_ptr + column, bias, mask=valid & is_first_slice)


@triton.jit
def dds_kept_task(
    task,
    first_tile,  # of the chunk
    hidden_ptr,
    rows_ptr,
    order_ptr,  # [num_tiles * TILE] int32
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    blocks_ptr,  # [num_tiles, num_blocks] int32: blocks that keep a column
    num_blocks_ptr,  # [num_tiles] int32: their number
    pair_rows_ptr,  # [pairs, TILE] int32
    share_ptr,
    class_weight_ptr,
    tail_ptr,
    tail_bias_ptr,
    workspace_ptr,  # [rows + TILE, TOKENS], the last rows 0
    grad_weight_ptr,
    grad_bias_ptr,
    grad_scale,
    number,  # of the chunk's tiles with a kept column
    num_tiles,
    num_blocks,
    V,
    D,
    groups,
    num_slices,
    at_once,  # slices, see `slice_of`
    stride_hn,
    stride_gv,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TAIL_PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Computes DDS of a tile of columns x SLICE dims over the token blocks that keep any, and the
    tail."""
    tile, slice_ = slice_of(task, number, num_slices, at_once)
    tile += first_tile
    dims = slice_ * SLICE + tl.arange(0, SLICE)
    inside = (dims < D)[None, :]
    PARTS: tl.constexpr = TOKENS // BLOCK_K
    local = tl.arange(0, TILE)
    length = tl.load(num_blocks_ptr + tile)
    list_ptr = blocks_ptr + tile.to(tl.int64) * num_blocks
    pairs_ptr = starts_ptr + (num_blocks + 1) * (num_tiles + 1)
    first_pair = tl.load(pairs_ptr + tile) - tl.load(pairs_ptr + first_tile)
    pair_rows_ptr += first_pair * TILE + local
    acc = tl.zeros((TILE, SLICE), tl.float32)
    bias = tl.zeros((TILE,), tl.float32)
    if HAS_GRAD_WEIGHT:
        for i in tl.range(0, length * PARTS, num_stages=STAGES):
            lanes = (i % PARTS) * BLOCK_K + tl.arange(0, BLOCK_K)
            at = tl.load(pair_rows_ptr + i // PARTS * TILE).to(tl.int64)
            p = tl.load(workspace_ptr + at[:, None] * TOKENS + lanes[None, :])
            block = tl.load(list_ptr + i // PARTS)
            row = tl.load(rows_ptr + block * TOKENS + lanes)
            e_ptrs = hidden_ptr + row[:, None] * stride_hn + dims[None, :]
            e = tl.load(e_ptrs, mask=inside, other=0.0)
            if WIDE:
                acc = add_product(acc, p, e, grad_scale - grad_scale, PRECISION)
            else:
                acc = tl.dot(p, e, acc, input_precision=PRECISION)
    if HAS_GRAD_BIAS:  # noqa: SIM102
        if slice_ == 0:
            for i in range(length):
                at = tl.load(pair_rows_ptr + i * TILE).to(tl.int64)
                p_ptrs = workspace_ptr + at[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
                bias += tl.sum(tl.load(p_ptrs).to(tl.float32), 1)
    at = tile * TILE + local
    store_columns(
        acc * grad_scale, bias * grad_scale, tl.load(order_ptr + at), at < V, dims, slice_ == 0,
        share_ptr, class_weight_ptr, tail_ptr, tail_bias_ptr, grad_weight_ptr, grad_bias_ptr, V, D,
        groups, stride_gv, TILE, TAIL_PRECISION, GROUPS, HAS_TAIL, HAS_MEAN, HAS_CLASS_WEIGHT,
        HAS_GRAD_WEIGHT, HAS_GRAD_BIAS, ACCUMULATE,
    )  # fmt: skip


@triton.jit
def unkept_task(
    task,
    first,  # place, in the order of columns, of the first column that no block keeps
    order_ptr,
    share_ptr,
    class_weight_ptr,
    tail_ptr,
    tail_bias_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    V,
    D,
    groups,
    num_slices,
    stride_gv,
    COLUMNS: tl.constexpr,
    SLICE: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Writes whole rows of the gradient, of COLUMNS columns that no block keeps: the tail, or
    zeros."""
    at = first + task * COLUMNS + tl.arange(0, COLUMNS)
    column = tl.load(order_ptr + at)
    for slice_ in range(num_slices):
        store_columns(
            tl.zeros((COLUMNS, SLICE), tl.float32), tl.zeros((COLUMNS,), tl.float32), column,
            at < V, slice_ * SLICE + tl.arange(0, SLICE), slice_ == 0, share_ptr,
            class_weight_ptr, tail_ptr, tail_bias_ptr, grad_weight_ptr, grad_bias_ptr, V, D,
            groups, stride_gv, COLUMNS, PRECISION, GROUPS, HAS_TAIL, HAS_MEAN,
            HAS_CLASS_WEIGHT, HAS_GRAD_WEIGHT, HAS_GRAD_BIAS, ACCUMULATE,
        )  # fmt: skip
