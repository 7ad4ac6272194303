"""SDD: d_logits of some columns and a block of tokens, recomputed into the workspace."""

import triton
import triton.language as tl

from cce_dist.kernels.numbers import LOG2E, exp2_of, softcapped
from cce_dist.kernels.plan import level_of


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


@triton.jit
def slope_at(z, scale, softcap):
    """softcap'(z) of a logit in log2."""
    t = z / (softcap * scale * LOG2E)
    return 1.0 - t * t


@triton.jit
def logits_of(
    c_ptrs,  # [COLUMNS, BLOCK_K] the columns' first dims
    weight_tile,  # descriptor of the weight, COLUMNS x BLOCK_K, of columns side by side
    first_column,
    block,  # of tokens
    hidden_ptr,  # [num_rows, D]
    hidden_rows,  # descriptor of the same, TOKENS x BLOCK_K
    rows_ptr,  # [N] int64, of a token that counts for those that don't
    straight_ptr,  # [words] int64: bit n: the block's tokens are rows one after the other
    D,
    stride_hn,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # D is a multiple of it
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,  # through the descriptors where the block's tokens are side by side
):
    """[COLUMNS, TOKENS] fp32."""
    dims = tl.arange(0, BLOCK_K)
    x = tl.zeros((COLUMNS, TOKENS), tl.float32)
    by_pointer = True
    if USE_TMA:
        first_row = tl.load(rows_ptr + block * TOKENS).to(tl.int32)
        straight = tl.load(straight_ptr + block // 64) >> (block % 64).to(tl.int64)
        by_pointer = (straight & 1) == 0
        if (straight & 1) == 1:
            for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
                c = weight_tile.load([first_column, k])
                x = tl.dot(c, hidden_rows.load([first_row, k]).T, x, input_precision=PRECISION)
    if by_pointer:
        row = tl.load(rows_ptr + block * TOKENS + tl.arange(0, TOKENS))
        e_ptrs = hidden_ptr + row[:, None] * stride_hn + dims[None, :]
        for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            if EVEN_K:
                c = tl.load(c_ptrs + k)
                e = tl.load(e_ptrs + k)
            else:
                inside = (k + dims < D)[None, :]
                c = tl.load(c_ptrs + k, mask=inside, other=0.0)
                e = tl.load(e_ptrs + k, mask=inside, other=0.0)
            x = tl.dot(c, e.T, x, input_precision=PRECISION)
    return x


# Token blocks whose hidden states and a chunk's columns stay in the L2 cache together.
BLOCKS_AT_ONCE = tl.constexpr(16)


@triton.jit
def sdd_task(
    task,
    first_tile,  # of the chunk
    num_tiles,  # of the chunk
    hidden_ptr,
    hidden_rows,
    rows_ptr,
    straight_ptr,
    weight_ptr,  # [V, D]
    weight_tile,  # descriptor of the same, PAIR * TILE x BLOCK_K
    bias_ptr,
    class_weight_ptr,
    target_ptr,  # [N] int32, -1: none here
    count,
    pull_ptr,  # [7, N]: probability, target, entropy; entropy; mean; lse and target's z in log2
    workspace_ptr,  # [tiles_per_chunk, num_blocks, TILE, TOKENS]: out
    num_blocks,
    V,
    D,
    stride_hn,
    stride_wv,
    scale,
    softcap,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PAIR: tl.constexpr,  # tiles a task
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """Every column: PAIR tiles x one token block. Tasks near each other share both: of few blocks
    and all tiles of the chunk."""
    per_group = tl.cdiv(num_tiles, PAIR) * BLOCKS_AT_ONCE
    first_block = task // per_group * BLOCKS_AT_ONCE
    at_once = tl.minimum(num_blocks - first_block, BLOCKS_AT_ONCE)
    block = first_block + task % per_group % at_once
    local_tile = task % per_group // at_once * PAIR
    if block * TOKENS < count:
        COLUMNS: tl.constexpr = PAIR * TILE
        N = num_blocks * TOKENS
        tile = first_tile + local_tile
        at = tile * TILE + tl.arange(0, COLUMNS)
        column = tl.minimum(at, V - 1)
        dims = tl.arange(0, BLOCK_K)
        c_ptrs = weight_ptr + column.to(tl.int64)[:, None] * stride_wv + dims[None, :]
        x = logits_of(
            c_ptrs, weight_tile, tile * TILE, block, hidden_ptr, hidden_rows, rows_ptr,
            straight_ptr, D, stride_hn, COLUMNS, TOKENS, BLOCK_K, EVEN_K, STAGES, PRECISION,
            USE_TMA,
        )  # fmt: skip
        if HAS_BIAS:
            x += tl.load(bias_ptr + column).to(tl.float32)[:, None]
        slope = 1.0
        if HAS_SOFTCAP:
            x, slope = softcapped(x, softcap)
        token = block * TOKENS + tl.arange(0, TOKENS)
        pull_ptrs = pull_ptr + token
        of_class = 1.0
        if HAS_CLASS_WEIGHT:
            of_class = tl.load(class_weight_ptr + column)[:, None]
        of_entropy = 0.0
        entropy = 0.0
        of_mean = 0.0
        if HAS_ENTROPY:
            of_entropy = tl.load(pull_ptrs + 2 * N)[None, :]
            entropy = tl.load(pull_ptrs + 3 * N)[None, :]
        if HAS_SMOOTH:
            of_mean = tl.load(pull_ptrs + 4 * N)[None, :]
        # The target's element is the forward's own logit.
        own = at[:, None] == tl.load(target_ptr + token)[None, :]
        z = tl.load(pull_ptrs + 6 * N)[None, :]
        if HAS_SOFTCAP:
            slope = tl.where(own, slope_at(z, scale, softcap), slope)
        log_p = tl.where(own, z, x * (scale * LOG2E)) - tl.load(pull_ptrs + 5 * N)[None, :]
        grad = d_logits(
            log_p, slope, tl.load(pull_ptrs)[None, :], of_entropy, entropy, of_mean, of_class,
            WIDE, HAS_ENTROPY, HAS_SMOOTH,
        )  # fmt: skip
        grad -= tl.where(own, tl.load(pull_ptrs + N)[None, :] * slope, 0.0)
        grad = tl.where((at < V)[:, None], grad, 0.0)
        local = tl.arange(0, COLUMNS)
        places = ((local_tile + local // TILE) * num_blocks + block) * TILE + local % TILE
        out = workspace_ptr + places.to(tl.int64)[:, None] * TOKENS
        out += tl.arange(0, TOKENS)[None, :]
        tl.store(out, grad.to(workspace_ptr.dtype.element_ty))


@triton.jit
def sdd_kept_task(
    task,
    seed,
    first_tile,  # of the chunk
    last_tile,
    hidden_ptr,
    rows_ptr,
    weight_ptr,  # [V, D]
    bias_ptr,
    target_ptr,  # [N] int32, -1: none here
    pull_ptr,  # [7, N]: see `sdd_task`
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    base_ptr,  # [num_blocks + 1] int32, of the chunk
    segment_ptr,  # [num_blocks + 1] int32, of the chunk
    entries_ptr,  # [rows] int32
    workspace_ptr,  # [rows, TOKENS] d_logits of each entry: out
    drawn_sum_ptr,  # [tasks, TOKENS] fp32 sum of those of drawn entries: out
    num_tiles,
    num_blocks,
    D,
    stride_hn,
    stride_wv,
    scale,
    softcap,
    TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # lists start at a multiple of it
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
):
    """SEGMENT entries of one token block's list of columns."""
    lane = tl.arange(0, BLOCKS)
    first_task = tl.load(segment_ptr + lane, mask=lane <= num_blocks, other=2147483647)
    block = tl.sum((first_task <= task).to(tl.int32), 0) - 1
    N = num_blocks * TOKENS
    row_ptr = starts_ptr + block * (num_tiles + 1)
    length = tl.load(row_ptr + last_tile) - tl.load(row_ptr + first_tile)
    place = (task - tl.load(segment_ptr + block)) * SEGMENT + tl.arange(0, SEGMENT)
    row = tl.load(base_ptr + block) + place
    listed = place < length
    entry = tl.load(entries_ptr + row, mask=listed, other=0)
    drawn = (entry & 1) > 0
    column = entry >> 1
    c_ptrs = weight_ptr + column.to(tl.int64)[:, None] * stride_wv + tl.arange(0, BLOCK_K)[None, :]
    x = logits_of(
        c_ptrs, hidden_ptr, 0, block, hidden_ptr, hidden_ptr, rows_ptr, rows_ptr, D, stride_hn,
        SEGMENT, TOKENS, BLOCK_K, EVEN_K, STAGES, PRECISION, False,
    )  # fmt: skip
    if HAS_BIAS:
        x += tl.load(bias_ptr + column).to(tl.float32)[:, None]
    slope = 1.0
    if HAS_SOFTCAP:
        x, slope = softcapped(x, softcap)
    token = block * TOKENS + tl.arange(0, TOKENS)
    pull_ptrs = pull_ptr + token
    # The target's element is the forward's own logit; it is kept, wherever it is.
    own = tl.where(listed, column, -2)[:, None] == tl.load(target_ptr + token)[None, :]
    z = tl.load(pull_ptrs + 6 * N)[None, :]
    if HAS_SOFTCAP:
        slope = tl.where(own, slope_at(z, scale, softcap), slope)
    log_p = tl.where(own, z, x * (scale * LOG2E)) - tl.load(pull_ptrs + 5 * N)[None, :]
    if HAS_DRAWN:
        # A drawn column stands for 2^level of its kind.
        log_p += tl.where(drawn, level_of(column, seed), 0).to(tl.float32)[:, None]
    p = exp2_of(log_p) if WIDE else tl.exp2(log_p)
    grad = p * tl.load(pull_ptrs)[None, :]
    grad -= tl.where(own, tl.load(pull_ptrs + N)[None, :], 0.0)
    grad = tl.where(listed[:, None], grad * slope, 0.0)
    out = workspace_ptr + row.to(tl.int64)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
    # The products read whole steps of the list.
    written = (place < tl.cdiv(length, BLOCK_K) * BLOCK_K)[:, None]
    tl.store(out, grad.to(workspace_ptr.dtype.element_ty), mask=written)
    if HAS_DRAWN:
        total = tl.sum(tl.where(drawn[:, None], grad, 0.0), 0)
        tl.store(drawn_sum_ptr + task.to(tl.int64) * TOKENS + tl.arange(0, TOKENS), total)
