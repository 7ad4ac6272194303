"""`exact`: every column, chunk by chunk of the vocabulary. SDD, then DDS and DSD of the same chunk.

d_logits of a chunk, and logits that the forward kept, lie as [columns, N_padded] in the workspace.
"""

import triton
import triton.language as tl

from cce_dist.kernels.dds import store_columns
from cce_dist.kernels.dsd import add_rows
from cce_dist.kernels.numbers import LOG2E, add_product, exp2_of, load_tile, softcapped
from cce_dist.kernels.sdd import slope_at


@triton.jit
def d_logits(
    log_p,  # log2 of the probability
    slope,  # softcap'(z), 1 without a softcap
    probability,  # upstream of the probability, times logit_scale: so are the next three
    of_entropy,
    entropy,
    of_mean,
    class_weight,
    WIDE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
):
    """Gradient of the loss by E . C + bias, but for the target's term."""
    p = exp2_of(log_p) if WIDE else tl.exp2(log_p)
    if HAS_ENTROPY:
        surprise = tl.where(p > 0, log_p / LOG2E, 0.0) + entropy
        grad = p * (probability - of_entropy * surprise)
    else:
        grad = p * probability
    if HAS_SMOOTH:
        grad += class_weight * of_mean
    return grad * slope


# One binary for every chunk.
@triton.jit(do_not_specialize=["first_column", "num_columns"])
def exact_logits_kernel(
    hidden,  # [N, D] packed, a descriptor of BLOCK_N x BLOCK_D or a pointer
    weight,  # [V, D], of BLOCK_V x BLOCK_D
    workspace,  # [columns, N], of BLOCK_V x BLOCK_N: out
    workspace_ptr,
    logit_ptr,  # [columns, N] the same memory: logits over `ref_ptr`, log2, if HAS_LOGITS
    ref_ptr,  # [N]
    bias_ptr,  # [V]
    class_weight_ptr,  # [V]
    count_ptr,  # [1] int32
    pull_ptr,  # [7, N]: probability, target, entropy; entropy; mean; lse and target's z in log2
    first_column,
    num_columns,
    cached_blocks,
    N,
    V,
    D,
    stride_hn,
    stride_wv,
    scale,
    softcap,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,  # fp32 inputs
    HAS_LOGITS: tl.constexpr,  # the forward has left them in the workspace
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """SDD: d_logits of a chunk but for the targets', all token blocks that count. Programs that run
    at a time share a few tiles of the weight, and no more token blocks than the cache holds."""
    num_blocks = tl.cdiv(tl.load(count_ptr), BLOCK_N)
    num_tiles = tl.cdiv(num_columns, BLOCK_V)
    at_once = tl.maximum(tl.cdiv(num_blocks, tl.maximum(tl.cdiv(num_blocks, cached_blocks), 1)), 1)
    per_group = num_tiles * at_once
    for task in range(tl.program_id(0), num_tiles * num_blocks, tl.num_programs(0)):
        first_block = task // per_group * at_once
        here = tl.minimum(num_blocks - first_block, at_once)
        block = first_block + task % per_group % here
        tile = task % per_group // here
        local = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        column = first_column + local
        token = block * BLOCK_N + tl.arange(0, BLOCK_N)
        place = local.to(tl.int64)[:, None] * N + token[None, :]
        pull_ptrs = pull_ptr + token
        slope = 1.0
        if HAS_LOGITS:
            x = tl.load(logit_ptr + place).to(tl.float32) + tl.load(ref_ptr + token)[None, :]
            # What replaces them is another thread's, maybe.
            tl.debug_barrier()
            if HAS_SOFTCAP:
                # Of a token that doesn't count the logits are -inf.
                slope = tl.where(x > float("-inf"), slope_at(x, scale, softcap), 0.0)
        else:
            x = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
            for k in range(0, tl.cdiv(D, BLOCK_D)):
                c = load_tile(
                    weight, first_column + tile * BLOCK_V, k * BLOCK_D, V, D, stride_wv, BLOCK_V,
                    BLOCK_D, USE_TMA,
                )  # fmt: skip
                e = load_tile(
                    hidden, block * BLOCK_N, k * BLOCK_D, N, D, stride_hn, BLOCK_N, BLOCK_D, USE_TMA
                )
                x = tl.dot(c, e.T, x, input_precision=PRECISION)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + column, mask=column < V, other=0.0)
                x += bias.to(tl.float32)[:, None]
            if HAS_SOFTCAP:
                x, slope = softcapped(x, softcap)
            x *= scale * LOG2E
        of_class = 1.0
        if HAS_CLASS_WEIGHT:
            of_class = tl.load(class_weight_ptr + column, mask=column < V, other=0.0)[:, None]
        of_entropy = 0.0
        entropy = 0.0
        of_mean = 0.0
        if HAS_ENTROPY:
            of_entropy = tl.load(pull_ptrs + 2 * N)[None, :]
            entropy = tl.load(pull_ptrs + 3 * N)[None, :]
        if HAS_SMOOTH:
            of_mean = tl.load(pull_ptrs + 4 * N)[None, :]
        grad = d_logits(
            x - tl.load(pull_ptrs + 5 * N)[None, :], slope, tl.load(pull_ptrs)[None, :], of_entropy,
            entropy, of_mean, of_class, WIDE, HAS_ENTROPY, HAS_SMOOTH,
        )  # fmt: skip
        if first_column + tile * BLOCK_V + BLOCK_V > V:
            grad = tl.where((column < V)[:, None], grad, 0.0)
        grad = grad.to(workspace_ptr.dtype.element_ty)
        if USE_TMA and not HAS_LOGITS:
            workspace.store([tile * BLOCK_V, block * BLOCK_N], grad)
        else:
            tl.store(workspace_ptr + place, grad)


@triton.jit(do_not_specialize=["first_column", "num_columns"])
def exact_targets_kernel(
    workspace_ptr,  # [columns, N]: out
    class_weight_ptr,  # [V]
    target_ptr,  # [N] int32, -1: none here
    pull_ptr,  # [7, N]: see `exact_logits_kernel`
    first_column,
    num_columns,
    N,
    scale,
    softcap,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """d_logits of those targets that are among the chunk's columns, by the forward's own logits."""
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    target = tl.load(target_ptr + token)
    local = target - first_column
    here = (target >= 0) & (local >= 0) & (local < num_columns)
    pull_ptrs = pull_ptr + token
    z = tl.load(pull_ptrs + 6 * N)
    slope = 1.0
    if HAS_SOFTCAP:
        slope = slope_at(z, scale, softcap)
    of_class = 1.0
    if HAS_CLASS_WEIGHT:
        of_class = tl.load(class_weight_ptr + target, mask=here, other=0.0)
    grad = d_logits(
        z - tl.load(pull_ptrs + 5 * N), slope, tl.load(pull_ptrs), tl.load(pull_ptrs + 2 * N),
        tl.load(pull_ptrs + 3 * N), tl.load(pull_ptrs + 4 * N), of_class, WIDE, HAS_ENTROPY,
        HAS_SMOOTH,
    )  # fmt: skip
    grad -= tl.load(pull_ptrs + N) * slope
    place = workspace_ptr + local.to(tl.int64) * N + token
    tl.store(place, grad.to(workspace_ptr.dtype.element_ty), mask=here)


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
    unit,
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
    """A tile of columns x SLICE dims over every token, fp32 in registers, one store."""
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
                acc = add_product(acc, p, e, unit - unit, PRECISION)
            else:
                acc = tl.dot(p, e, acc, input_precision=PRECISION)
    local = first_row + tl.arange(0, TILE)
    if HAS_GRAD_BIAS:  # noqa: SIM102
        if task % num_slices == 0:
            # Apart from the products: their operand then stays where the tensor cores read it.
            for block in range(tl.cdiv(count, TOKENS)):
                token = block * TOKENS + tl.arange(0, TOKENS)
                p_ptrs = workspace_ptr + local.to(tl.int64)[:, None] * N + token[None, :]
                bias += tl.sum(tl.load(p_ptrs).to(tl.float32), 1)
    column = first_column + local
    store_columns(
        acc * unit, bias * unit, tl.minimum(column, V - 1), column < V,
        first_dim + tl.arange(0, SLICE), task % num_slices == 0, tail_ptr, class_weight_ptr,
        tail_ptr, tail_bias_ptr, grad_weight_ptr, grad_bias_ptr, V, D, 0, stride_gv, TILE,
        TAIL_PRECISION, GROUPS, False, HAS_MEAN, HAS_CLASS_WEIGHT, HAS_GRAD_WEIGHT, HAS_GRAD_BIAS,
        ACCUMULATE,
    )  # fmt: skip


@triton.jit
def exact_dsd_task(
    task,
    first_column,
    num_columns,
    weight,
    workspace_tokens,
    grad_hidden_ptr,
    count,
    unit,
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
    """One token block x SLICE dims over the columns of the chunk."""
    first_token = task // num_slices * TOKENS
    first_dim = task % num_slices * SLICE
    acc = tl.zeros((TOKENS, SLICE), tl.float32)
    for k in range(0, tl.cdiv(num_columns, BLOCK_K)):
        p = load_tile(
            workspace_tokens, k * BLOCK_K, first_token, rows, N, N, BLOCK_K, TOKENS, USE_TMA
        )
        c = load_tile(
            weight, first_column + k * BLOCK_K, first_dim, V, D, stride_wv, BLOCK_K, SLICE, USE_TMA
        )
        if WIDE:
            acc = add_product(acc, p.T, c, unit - unit, PRECISION)
        else:
            acc = tl.dot(p.T, c, acc, input_precision=PRECISION)
    token = first_token + tl.arange(0, TOKENS)
    dims = first_dim + tl.arange(0, SLICE)
    add_rows(acc * unit, token, token < count, dims, IS_FIRST, grad_hidden_ptr, D)


@triton.jit(do_not_specialize=["first_column", "num_columns"])
def exact_products_kernel(
    hidden,  # [N, D] packed, a descriptor of BLOCK_K x SLICE or a pointer
    weight,  # [V, D], of BLOCK_K x SLICE
    workspace_columns,  # [rows, N] d_logits, of TILE x BLOCK_K
    workspace_tokens,  # the same, of BLOCK_K x TOKENS
    workspace_ptr,
    class_weight_ptr,  # [V]
    tail_ptr,  # [GROUPS, D]: of the mean logit
    tail_bias_ptr,  # [GROUPS]
    grad_hidden_ptr,  # [N, D] fp32
    grad_weight_ptr,  # [V, D]
    grad_bias_ptr,  # [V] fp32
    count_ptr,  # [1] int32
    unit_ptr,  # [1] fp32: power of two by which the workspace was divided
    queue_ptr,  # [1] int32: the next task
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
    IS_FIRST: tl.constexpr,  # chunk: it stores the hidden gradient where the others add
    GROUPS: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_HIDDEN: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """DDS and DSD of a chunk. Tasks are taken from a queue, the longer ones first; who computes
    one changes no bit."""
    count = tl.load(count_ptr)
    unit = tl.load(unit_ptr)
    num_slices = tl.cdiv(D, SLICE)
    dds_slices = num_slices if HAS_GRAD_WEIGHT else 1
    num_dds = 0
    num_dsd = 0
    if HAS_GRAD_WEIGHT or HAS_GRAD_BIAS:
        num_dds = tl.cdiv(num_columns, TILE) * dds_slices
    if HAS_GRAD_HIDDEN:
        num_dsd = tl.cdiv(count, TOKENS) * num_slices
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
                    count, unit, rows, N, V, D, dds_slices, stride_hn, stride_gv, TOKENS, TILE,
                    SLICE, BLOCK_K, PRECISION, TAIL_PRECISION, USE_TMA, WIDE, GROUPS, HAS_MEAN,
                    HAS_CLASS_WEIGHT, HAS_GRAD_WEIGHT, HAS_GRAD_BIAS, ACCUMULATE,
                )  # fmt: skip
        else:
            if HAS_GRAD_HIDDEN:
                exact_dsd_task(
                    task - first_dsd, first_column, num_columns, weight, workspace_tokens,
                    grad_hidden_ptr, count, unit, rows, N, V, D, num_slices, stride_wv, TOKENS,
                    SLICE, BLOCK_K, PRECISION, USE_TMA, WIDE, IS_FIRST,
                )  # fmt: skip
        task = tl.atomic_add(queue_ptr, 1)
