"""SDD: d_logits of a tile of kept columns and a block of tokens, recomputed into the workspace."""

import triton
import triton.language as tl

from cce_dist.kernels.numbers import LOG2E, softcapped


@triton.jit
def d_logits(
    log_p,  # log2 of the probability
    slope,  # softcap'(z), 1 without a softcap
    probability,  # upstream of the probability, times logit_scale: so are the next three
    of_entropy,
    entropy,
    of_mean,
    class_weight,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
):
    """Gradient of the loss by E . C + bias, but for the target's term."""
    p = tl.exp2(log_p)
    if HAS_ENTROPY:
        surprise = tl.where(p > 0, log_p / LOG2E, 0.0) + entropy
        grad = p * (probability - of_entropy * surprise)
    else:
        grad = p * probability
    if HAS_SMOOTH:
        grad += class_weight * of_mean
    return grad * slope


@triton.jit
def sdd_task(
    task,
    first_tile,  # of the chunk
    hidden_ptr,  # [num_rows, D]
    hidden_rows,  # descriptor of the same, TOKENS x BLOCK_K
    rows_ptr,  # [N] int64, of a token that counts for those that don't
    straight_ptr,  # [words] int64: bit n: the block's tokens are rows one after the other
    weight_ptr,  # [V, D]
    weight_tile,  # descriptor of the same, PAIR * TILE x BLOCK_K
    bias_ptr,
    class_weight_ptr,
    place_ptr,  # [N] int32: where in the order the token's target stands, -1: none here
    count,
    pull_ptr,  # [7, N]: probability, target, entropy; entropy; mean; lse and target's z in log2
    order_ptr,  # [num_tiles * TILE] int32
    bits_ptr,  # [num_tiles * TILE, words] int64
    tile_bits_ptr,  # [num_tiles, words] int64
    workspace_ptr,  # [tiles_per_chunk, num_blocks, TILE, TOKENS]: out
    num_blocks,
    V,
    D,
    num_tiles,
    words,
    stride_hn,
    stride_wv,
    scale,
    softcap,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PAIR: tl.constexpr,  # tiles a task
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,  # D is a multiple of it
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVERY: tl.constexpr,  # every column is kept, in the order of its id
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """PAIR tiles x one token block; nothing if none of the tiles has a column that it keeps."""
    block = task % num_blocks
    local_tile = task // num_blocks * PAIR
    tile = first_tile + local_tile
    active = block * TOKENS < count
    if not EVERY:
        word = tl.load(tile_bits_ptr + tile * words + block // 64)
        if PAIR == 2:
            next_ptr = tile_bits_ptr + (tile + 1) * words + block // 64
            word |= tl.load(next_ptr, mask=tile + 1 < num_tiles, other=0)
        active = active & (((word >> (block % 64).to(tl.int64)) & 1) > 0)
    if active:
        COLUMNS: tl.constexpr = PAIR * TILE
        N = num_blocks * TOKENS
        at = tile * TILE + tl.arange(0, COLUMNS)
        if EVERY:
            column = tl.minimum(at, V - 1)
            keeps = (at < V).to(tl.float32)
        else:
            listed = at < num_tiles * TILE
            column = tl.load(order_ptr + at, mask=listed, other=0)
            bits = tl.load(bits_ptr + at.to(tl.int64) * words + block // 64, mask=listed, other=0)
            keeps = ((bits >> (block % 64).to(tl.int64)) & 1).to(tl.float32)
        dims = tl.arange(0, BLOCK_K)
        row = tl.load(rows_ptr + block * TOKENS + tl.arange(0, TOKENS))
        c_ptrs = weight_ptr + column.to(tl.int64)[:, None] * stride_wv + dims[None, :]
        e_ptrs = hidden_ptr + row[:, None] * stride_hn + dims[None, :]
        x = tl.zeros((COLUMNS, TOKENS), tl.float32)
        by_pointer = True
        if USE_TMA:
            first_row = tl.load(rows_ptr + block * TOKENS).to(tl.int32)
            straight = tl.load(straight_ptr + block // 64) >> (block % 64).to(tl.int64)
            by_pointer = (straight & 1) == 0
            if (straight & 1) == 1:
                for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
                    if EVERY:
                        c = weight_tile.load([tile * TILE, k])
                    elif EVEN_K:
                        c = tl.load(c_ptrs + k)
                    else:
                        c = tl.load(c_ptrs + k, mask=(k + dims < D)[None, :], other=0.0)
                    x = tl.dot(c, hidden_rows.load([first_row, k]).T, x, input_precision=PRECISION)
        if by_pointer:
            for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
                inside = (k + dims < D)[None, :]
                c = tl.load(c_ptrs + k, mask=inside, other=0.0)
                e = tl.load(e_ptrs + k, mask=inside, other=0.0)
                x = tl.dot(c, e.T, x, input_precision=PRECISION)
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
        log_p = x * (scale * LOG2E) - tl.load(pull_ptrs + 5 * N)[None, :]
        grad = d_logits(
            log_p, slope, tl.load(pull_ptrs)[None, :], of_entropy, entropy, of_mean, of_class,
            HAS_ENTROPY, HAS_SMOOTH,
        )  # fmt: skip
        local = tl.arange(0, COLUMNS)
        places = ((local_tile + local // TILE) * num_blocks + block) * TILE + local % TILE
        out = workspace_ptr + places.to(tl.int64)[:, None] * TOKENS
        out += tl.arange(0, TOKENS)[None, :]
        tl.store(out, (grad * keeps[:, None]).to(workspace_ptr.dtype.element_ty))
        # The targets' elements, from the forward's own logits, are stored over it.
        tl.debug_barrier()
        place = tl.load(place_ptr + token)
        mine = (place >= tile * TILE) & (place < tile * TILE + COLUMNS)
        z = tl.load(pull_ptrs + 6 * N)
        slope = 1.0
        if HAS_SOFTCAP:
            t = z / (softcap * scale * LOG2E)
            slope = 1.0 - t * t
        of_class = 1.0
        if HAS_CLASS_WEIGHT:
            column = place
            if not EVERY:
                column = tl.load(order_ptr + place, mask=mine, other=0)
            of_class = tl.load(class_weight_ptr + column, mask=mine, other=0.0)
        if HAS_ENTROPY:
            of_entropy = tl.load(pull_ptrs + 2 * N)
            entropy = tl.load(pull_ptrs + 3 * N)
        if HAS_SMOOTH:
            of_mean = tl.load(pull_ptrs + 4 * N)
        grad = d_logits(
            z - tl.load(pull_ptrs + 5 * N), slope, tl.load(pull_ptrs), of_entropy, entropy,
            of_mean, of_class, HAS_ENTROPY, HAS_SMOOTH,
        )  # fmt: skip
        grad -= tl.load(pull_ptrs + N) * slope
        local = place - first_tile * TILE
        places = (local // TILE * num_blocks + block) * TILE + local % TILE
        out = workspace_ptr + places.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        tl.store(out, grad.to(workspace_ptr.dtype.element_ty), mask=mine)


@triton.jit
def gather_task(
    task,
    first_tile,
    weight_ptr,
    order_ptr,
    gathered_ptr,  # [tiles_per_chunk * TILE, stride_cd]: out
    D,
    stride_wv,
    stride_cd,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
):
    """The chunk's rows of the weight side by side, so that a descriptor can read them."""
    num_slices = tl.cdiv(D, SLICE)
    local = task // num_slices * TILE + tl.arange(0, TILE)
    dims = (task % num_slices) * SLICE + tl.arange(0, SLICE)
    inside = (dims < D)[None, :]
    column = tl.load(order_ptr + first_tile * TILE + local).to(tl.int64)
    c = tl.load(weight_ptr + column[:, None] * stride_wv + dims[None, :], mask=inside, other=0.0)
    tl.store(gathered_ptr + local.to(tl.int64)[:, None] * stride_cd + dims[None, :], c, mask=inside)
