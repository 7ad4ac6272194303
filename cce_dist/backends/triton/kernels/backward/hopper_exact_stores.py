"""The stores of `hopper_exact_kernel`: d_logits, the weight's gradient, the bias's and the hidden
one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.backward import exact_logits
from cce_dist.backends.triton.kernels.forward.hopper_sums import split_tokens
from cce_dist.backends.triton.kernels.gluon_names import async_store, thread_barrier

# Rows and columns of a group's product.
SIDE = gl.constexpr(128)
# Parts of a tile that are stored one after the other, so that few numbers are in registers.
PARTS = gl.constexpr(4)
PART_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))

d_logits = gluon.jit(exact_logits.d_logits.fn)
near_tanh = gluon.jit(numbers.near_tanh.fn)


@gluon.jit
def upstream_of(
    token,  # the first
    target_ptr,
    upstream_ptr,
    N,
    scale,
    LAYOUT: gl.constexpr,
    HAS_ENTROPY: gl.constexpr,
    HAS_SMOOTH: gl.constexpr,
):
    """Loads the numbers of SIDE tokens, [SIDE, 1] each, that `store_d_logits` takes."""
    tokens = token + gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
    inside = tokens < N
    ptrs = upstream_ptr + tokens
    target = gl.load(target_ptr + tokens, mask=inside, other=-1)[:, None]
    probability = gl.load(ptrs, mask=inside, other=0.0)[:, None]
    of_target = gl.load(ptrs + N, mask=inside, other=0.0)[:, None]
    lse = gl.load(ptrs + 5 * N, mask=inside, other=0.0)[:, None]
    z = gl.load(ptrs + 6 * N, mask=inside, other=0.0)[:, None]
    of_entropy, entropy, of_mean = 0.0, 0.0, 0.0
    if HAS_ENTROPY:
        of_entropy = gl.load(ptrs + 2 * N, mask=inside, other=0.0)[:, None]
        entropy = gl.load(ptrs + 3 * N, mask=inside, other=0.0)[:, None]
    if HAS_SMOOTH:
        of_mean = gl.load(ptrs + 4 * N, mask=inside, other=0.0)[:, None]
    if scale.dtype.is_ptr():
        factor = numbers.LOG2E * gl.load(scale + tokens, mask=inside, other=0.0)[:, None]
    else:
        factor = numbers.LOG2E * scale
    return target, probability, of_target, of_entropy, entropy, of_mean, lse, z, factor


@gluon.jit
def copy_part(x, matrix, row, column, part):
    """Starts to copy x to a descriptor's matrix, through a part of shared memory. Two parts take
    turns, so that all but the last copy have left theirs."""
    tma.store_wait(1)
    thread_barrier()
    part.store(x.to(matrix.dtype))
    fence_async_shared()
    thread_barrier()
    async_store(matrix, [row, column], part)


@gluon.jit
def store_d_logits(
    x,  # [SIDE, SIDE] products of tokens and columns
    upstream,  # of the tokens: see `upstream_of`
    token,  # the first
    local,  # column in the chunk, the first
    column,  # the first
    chunk_parts,
    parts,  # [GROUPS * 2, SIDE, SIDE / PARTS] in shared memory
    group,
    bias_ptr,
    class_weight_ptr,
    V,
    softcap,
    HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_ENTROPY: gl.constexpr,
    HAS_SMOOTH: gl.constexpr,
    HAS_CLASS_WEIGHT: gl.constexpr,
):
    """Stores d_logits of a tile: see `exact_logits.logits_task` and `exact_targets_kernel`."""
    WIDTH: gl.constexpr = SIDE // PARTS
    LAYOUT: gl.constexpr = PART_LAYOUT
    target, probability, of_target, of_entropy, entropy, of_mean, lse, z, factor = upstream
    of_class, slope = 1.0, 1.0
    products = split_tokens(x, SIDE, SIDE, PARTS)
    for i in gl.static_range(PARTS):
        part = gl.convert_layout(products[i], LAYOUT, assert_trivial=True)
        columns = column + i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        if HAS_BIAS:
            bias = gl.load(bias_ptr + columns, mask=columns < V, other=0.0)
            part += bias.to(gl.float32)[None, :]
        if HAS_SOFTCAP:
            part = near_tanh(part * (1.0 / softcap))
            slope = 1.0 - part * part
            part *= softcap
        if HAS_CLASS_WEIGHT:
            of_class = gl.load(class_weight_ptr + columns, mask=columns < V, other=0.0)[None, :]
        is_target = columns[None, :] == target
        # The forward has computed a target's logit with more digits.
        log_p = gl.where(is_target, z, part * factor) - lse
        grad = d_logits(
            log_p, slope, probability, of_entropy, entropy, of_mean, of_class, False, HAS_ENTROPY,
            HAS_SMOOTH,
        )  # fmt: skip
        grad -= gl.where(is_target, of_target * slope, 0.0)
        if column + SIDE > V:
            grad = gl.where((columns < V)[None, :], grad, 0.0)
        copy_part(grad, chunk_parts, token, local + i * WIDTH, parts.index(2 * group + i % 2))


@gluon.jit
def store_grad_weight(
    x,  # [SIDE, SIDE] sums of columns and dims
    column,  # the first
    dim,  # the first
    grad_parts,
    shared,  # see `store_d_logits`
    group,
    tail_ptr,
    class_weight_ptr,
    grad_weight_ptr,
    V,
    D,
    stride_gv,
    HAS_MEAN: gl.constexpr,
    HAS_CLASS_WEIGHT: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    COPIES_PARTS: gl.constexpr,
):
    """Stores a tile of the weight's gradient, with what the mean logit adds."""
    WIDTH: gl.constexpr = SIDE // PARTS
    LAYOUT: gl.constexpr = PART_LAYOUT
    columns = column + gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
    weight = 1.0
    if HAS_MEAN and HAS_CLASS_WEIGHT:
        weight = gl.load(class_weight_ptr + columns, mask=columns < V, other=0.0)[:, None]
    rows = grad_weight_ptr + columns.to(gl.int64)[:, None] * stride_gv
    parts = split_tokens(x, SIDE, SIDE, PARTS)
    for i in gl.static_range(PARTS):
        part = gl.convert_layout(parts[i], LAYOUT, assert_trivial=True)
        dims = dim + i * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
        written = (columns < V)[:, None] & (dims < D)[None, :]
        if HAS_MEAN:
            part += weight * gl.load(tail_ptr + dims, mask=dims < D, other=0.0)[None, :]
        if ACCUMULATE:
            part += gl.load(rows + dims[None, :], mask=written, other=0.0).to(gl.float32)
        if COPIES_PARTS:
            copy_part(part, grad_parts, column, dim + i * WIDTH, shared.index(2 * group + i % 2))
        else:
            gl.store(rows + dims[None, :], part.to(grad_weight_ptr.dtype.element_ty), mask=written)


@gluon.jit
def add_grad_hidden(
    x,  # [SIDE, SIDE] sums of tokens and dims
    token,  # the first
    dim,  # the first
    is_first,  # the first chunk stores, and the others add
    row_ptr,
    grad_hidden_ptr,
    count,
    D,
):
    """Adds a tile of the hidden gradient to memory."""
    LAYOUT: gl.constexpr = x.type.layout
    tokens = token + gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
    dims = dim + gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))
    row = gl.load(row_ptr + tokens, mask=tokens < count, other=0)
    out = grad_hidden_ptr + row[:, None] * D + dims[None, :]
    written = (tokens < count)[:, None] & (dims < D)[None, :]
    if is_first:
        gl.store(out, x, mask=written)
    else:
        # Chunks add one after the other. Nothing waits for the sum.
        gl.atomic_add(out, x, mask=written, sem="relaxed")


@gluon.jit
def store_grad_bias(
    local,  # column in the chunk, the first
    column,  # the first
    chunk_ptr,
    class_weight_ptr,
    tail_bias_ptr,
    grad_bias_ptr,
    count,
    grad_scale,
    V,
    stride_chunk,
    HAS_MEAN: gl.constexpr,
    HAS_CLASS_WEIGHT: gl.constexpr,
):
    """Stores the gradient of SIDE columns' biases: sums of d_logits over tokens."""
    TOKENS: gl.constexpr = 32
    # A thread has a column.
    LAYOUT: gl.constexpr = gl.BlockedLayout([TOKENS, 1], [1, 32], [1, 4], [0, 1])
    across: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    tokens = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    at = tokens.to(gl.int64)[:, None] * stride_chunk + (local + gl.arange(0, SIDE, across))[None, :]
    sums = gl.zeros((TOKENS, SIDE), gl.float32, LAYOUT)
    for token in range(0, count, TOKENS):
        sums += gl.load(chunk_ptr + at + token.to(gl.int64) * stride_chunk).to(gl.float32)
    columns = column + gl.arange(0, SIDE, across)
    bias = gl.sum(sums, 0) * grad_scale
    if HAS_MEAN:
        weight = 1.0
        if HAS_CLASS_WEIGHT:
            weight = gl.load(class_weight_ptr + columns, mask=columns < V, other=0.0)
        bias += weight * gl.load(tail_bias_ptr)
    gl.store(grad_bias_ptr + columns, bias, mask=columns < V)
