"""`exact`, DDS and DSD: both gradients of a chunk of the vocabulary from its d_logits."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.backward.dds import store_columns
from cce_dist.backends.triton.kernels.backward.dsd import add_rows, piece_of
from cce_dist.backends.triton.kernels.numbers import add_product, load_tile


@triton.jit
def exact_dds_task(
    task,
    first_column,  # of the chunk
    hidden,
    workspace_columns,
    workspace_ptr,
    class_weight_ptr,
    tail_ptr,
    tail_bias_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    count,
    grad_scale,
    rows,
    N,
    V,
    D,
    num_slices,
    stride_hn,
    stride_gv,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TAIL_PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Computes DDS of a tile of columns x SLICE dims over all tokens: fp32 sums, one store."""
    first_row = task // num_slices * TILE
    first_dim = task % num_slices * SLICE
    acc = tl.zeros((TILE, SLICE), tl.float32)
    bias = tl.zeros((TILE,), tl.float32)
    if HAS_GRAD_WEIGHT:
        for k in range(0, tl.cdiv(count, BLOCK_K)):
            p = load_tile(
                workspace_columns, first_row, k * BLOCK_K, rows, N, N, TILE, BLOCK_K, USE_TMA
            )
            e = load_tile(hidden, k * BLOCK_K, first_dim, N, D, stride_hn, BLOCK_K, SLICE, USE_TMA)
            if WIDE:
                acc = add_product(acc, p, e, grad_scale - grad_scale, PRECISION)
            else:
                acc = tl.dot(p, e, acc, input_precision=PRECISION)
    local = first_row + tl.arange(0, TILE)
    if HAS_GRAD_BIAS:  # noqa: SIM102
        if task % num_slices == 0:
            # Not in the loop of products, whose operand then stays where the tensor cores read it.
            for block in range(tl.cdiv(count, TOKENS)):
                token = block * TOKENS + tl.arange(0, TOKENS)
                p_ptrs = workspace_ptr + local.to(tl.int64)[:, None] * N + token[None, :]
                bias += tl.sum(tl.load(p_ptrs).to(tl.float32), 1)
    column = first_column + local
    store_columns(
        acc * grad_scale, bias * grad_scale, tl.minimum(column, V - 1), column < V,
        first_dim + tl.arange(0, SLICE), task % num_slices == 0, tail_ptr, class_weight_ptr,
        tail_ptr, tail_bias_ptr, grad_weight_ptr, grad_bias_ptr, V, D, 0, stride_gv, TILE,
        TAIL_PRECISION, GROUPS, False, HAS_MEAN, HAS_CLASS_WEIGHT, HAS_GRAD_WEIGHT, HAS_GRAD_BIAS,
        ACCUMULATE,
    )  # fmt: skip


@triton.jit
def exact_dsd_task(
    task,
    pieces,
    first_column,
    num_columns,
    weight,
    workspace_tokens,
    row_ptr,
    grad_hidden_ptr,
    num_rows,
    count,
    grad_scale,
    rows,
    N,
    V,
    D,
    num_slices,
    stride_wv,
    TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    IS_FIRST: tl.constexpr,
):
    """Computes DSD of a token block x SLICE dims over a piece of the chunk's columns."""
    piece = task % pieces
    task //= pieces
    first_token = task // num_slices * TOKENS
    first_dim = task % num_slices * SLICE
    acc = tl.zeros((TOKENS, SLICE), tl.float32)
    start, end = piece_of(piece, pieces, num_columns, BLOCK_K)
    for k in range(start, end, BLOCK_K):
        p = load_tile(workspace_tokens, k, first_token, rows, N, N, BLOCK_K, TOKENS, USE_TMA)
        c = load_tile(weight, first_column + k, first_dim, V, D, stride_wv, BLOCK_K, SLICE, USE_TMA)
        if WIDE:
            acc = add_product(acc, p.T, c, grad_scale - grad_scale, PRECISION)
        else:
            acc = tl.dot(p.T, c, acc, input_precision=PRECISION)
    token = first_token + tl.arange(0, TOKENS)
    row = tl.load(row_ptr + token)
    dims = first_dim + tl.arange(0, SLICE)
    piece_ptr = grad_hidden_ptr + piece.to(tl.int64) * num_rows * D
    add_rows(acc * grad_scale, row, token < count, dims, IS_FIRST, piece_ptr, D)


@triton.jit(do_not_specialize=["pieces", "num_rows", "stage", "first_column", "num_columns"])
def exact_products_kernel(
    hidden,  # [N, D] packed, a descriptor of BLOCK_K x SLICE or a pointer
    weight,  # [V, D], of BLOCK_K x SLICE
    workspace_columns,  # [rows, N] d_logits, of TILE x BLOCK_K
    workspace_tokens,  # the same, of BLOCK_K x TOKENS
    workspace_ptr,
    class_weight_ptr,  # [V]
    tail_ptr,  # [GROUPS, D]: of the mean logit
    tail_bias_ptr,  # [GROUPS]
    row_ptr,  # [N] int64: row of each token in the hidden gradient
    grad_hidden_ptr,  # [pieces, num_rows, D] fp32: their sum is the hidden gradient
    grad_weight_ptr,  # [V, D]
    grad_bias_ptr,  # [V] fp32
    count_ptr,  # [1] int32
    grad_scale_ptr,  # [1] fp32: power of two by which the workspace was divided
    queue_ptr,  # [1] int32: the next task
    pieces,  # of the columns, so that few tokens give all programs work
    num_rows,
    stage,  # 0: DDS and DSD; 1: DSD alone; 2: DDS alone
    first_column,
    num_columns,
    rows,
    N,
    V,
    D,
    stride_hn,
    stride_wv,
    stride_gv,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    TAIL_PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    WIDE: tl.constexpr,  # fp32 inputs
    IS_FIRST: tl.constexpr,  # the first chunk stores the hidden gradient, and the others add to it
    GROUPS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_HIDDEN: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Computes DDS and DSD of a chunk. Programs take tasks from a queue, longer tasks first. Which
    program takes a task changes no bit of the result."""
    count = tl.load(count_ptr)
    grad_scale = tl.load(grad_scale_ptr)
    num_slices = tl.cdiv(D, SLICE)
    dds_slices = num_slices if HAS_GRAD_WEIGHT else 1
    num_dds = 0
    num_dsd = 0
    if HAS_GRAD_WEIGHT or HAS_GRAD_BIAS:
        num_dds = tl.where(stage == 1, 0, tl.cdiv(num_columns, TILE) * dds_slices)
    if HAS_GRAD_HIDDEN:
        num_dsd = tl.where(stage == 2, 0, tl.cdiv(count, TOKENS) * num_slices * pieces)
    # The first task of each kind: a DSD sums over columns, a DDS over tokens.
    first_dsd = tl.where(num_columns > count, 0, num_dds)
    first_dds = tl.where(num_columns > count, num_dsd, 0)
    task = tl.atomic_add(queue_ptr, 1)
    while task < num_dds + num_dsd:
        if (task >= first_dds) & (task < first_dds + num_dds):
            if HAS_GRAD_WEIGHT or HAS_GRAD_BIAS:
                exact_dds_task(
                    task - first_dds, first_column, hidden, workspace_columns, workspace_ptr,
                    class_weight_ptr, tail_ptr, tail_bias_ptr, grad_weight_ptr, grad_bias_ptr,
                    count, grad_scale, rows, N, V, D, dds_slices, stride_hn, stride_gv, TOKENS,
                    TILE, SLICE, BLOCK_K, PRECISION, TAIL_PRECISION, USE_TMA, WIDE, GROUPS,
                    HAS_MEAN, HAS_CLASS_WEIGHT, HAS_GRAD_WEIGHT, HAS_GRAD_BIAS, ACCUMULATE,
                )  # fmt: skip
        else:
            if HAS_GRAD_HIDDEN:
                exact_dsd_task(
                    task - first_dsd, pieces, first_column, num_columns, weight, workspace_tokens,
                    row_ptr, grad_hidden_ptr, num_rows, count, grad_scale, rows, N, V, D,
                    num_slices, stride_wv, TOKENS, SLICE, BLOCK_K, PRECISION, USE_TMA, WIDE,
                    IS_FIRST,
                )  # fmt: skip
        task = tl.atomic_add(queue_ptr, 1)
