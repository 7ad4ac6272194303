"""The stores of `hopper_exact_kernel`: d_logits, the weight's gradient, the bias's and the hidden
one."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.backward import exact_logits
from cce_dist.backends.triton.kernels.forward.hopper_sums import split_tokens
from cce_dist.backends.triton.kernels.gluon_names import async_add, async_store, thread_barrier

# Rows and columns of a group's product.
SIDE = gl.constexpr(128)
# Parts of a tile that are stored one after the other, so that few numbers are in registers.
PARTS = gl.constexpr(4)
PART_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
# Of a tile in fp32, which is twice as large.
SUM_PARTS = gl.constexpr(8)
SUM_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))

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
def copy_part(x, matrix, row, column, part, adds):
    """Starts to copy x to a descriptor's matrix, or to add it, through a part of shared memory. Two
    parts take turns, so that all but the last copy have left theirs."""
    tma.store_wait(1)
    thread_barrier()
    part.store(x.to(matrix.dtype))
    fence_async_shared()
    thread_barrier()
    if adds:
        async_add(matrix, [row, column], part)
    else:
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
        shared = parts.index(2 * group + i % 2)
        copy_part(grad, chunk_parts, token, local + i * WIDTH, shared, False)


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
            memory = shared.index(2 * group + i % 2)
            copy_part(part, grad_parts, column, dim + i * WIDTH, memory, False)
        else:
            gl.store(rows + dims[None, :], part.to(grad_weight_ptr.dtype.element_ty), mask=written)


@gluon.jit
def first_of_run(token, row_ptr, count):
    """Returns the row of the first of SIDE tokens if their rows follow each other; else -1."""
    # Each warp has all of them.
    i = gl.arange(0, SIDE, gl.BlockedLayout([SIDE // 32], [32], [4], [0]))
    start = gl.load(row_ptr + token + i, mask=token + i < count, other=0) - i
    first = gl.min(start, 0)
    return gl.where((first == gl.max(start, 0)) & (token + SIDE <= count), first, -1)


@gluon.jit
def add_grad_hidden(
    x,  # [SIDE, SIDE] sums of tokens and dims
    run,  # see `first_of_run`
    token,  # the first
    dim,  # the first
    is_first,  # the first chunk stores, and the others add
    sum_parts,  # a descriptor of [pieces * num_rows, D] fp32
    shared,  # [GROUPS * 2, SIDE, SIDE / SUM_PARTS] fp32 in shared memory
    group,
    row_ptr,
    grad_hidden_ptr,
    first_row,  # of the piece
    count,
    D,
):
    """Adds a tile of the hidden gradient to memory. A chunk adds after the one before it; nothing
    in the kernel reads the sum."""
    LAYOUT: gl.constexpr = x.type.layout
    WIDTH: gl.constexpr = SIDE // SUM_PARTS
    if run >= 0:
        row = first_row + run.to(gl.int32)
        parts = split_tokens(x, SIDE, SIDE, SUM_PARTS)
        for i in gl.static_range(SUM_PARTS):
            part = gl.convert_layout(parts[i], SUM_LAYOUT, assert_trivial=True)
            memory = shared.index(2 * group + i % 2)
            copy_part(part, sum_parts, row, dim + i * WIDTH, memory, not is_first)
    else:
        tokens = token + gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
        dims = dim + gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))
        rows = first_row + gl.load(row_ptr + tokens, mask=tokens < count, other=0)
        out = grad_hidden_ptr + rows[:, None] * D + dims[None, :]
        written = (tokens < count)[:, None] & (dims < D)[None, :]
        if is_first:
            gl.store(out, x, mask=written)
        else:
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
