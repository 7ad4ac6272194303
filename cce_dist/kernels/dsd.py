"""DSD: hidden gradient of a token block from the kept columns of one chunk."""

import triton
import triton.language as tl


@triton.jit
def dsd_task(
    task,
    chunk,
    first_tile,
    weight_ptr,  # [V, D]
    columns_rows,  # descriptor of the chunk's rows of the weight, BLOCK_K x SLICE
    order_ptr,  # [num_tiles * TILE] int32
    tiles_ptr,  # [num_blocks, num_tiles] int32
    start_ptr,  # [num_blocks, num_chunks + 1] int32
    workspace_ptr,  # [tiles_per_chunk, num_blocks, TILE, TOKENS]
    workspace_rows,  # descriptor of the same as a matrix of rows of TOKENS, BLOCK_K x TOKENS
    grad_hidden_ptr,  # [N_padded, D] fp32: stored by the first chunk, added to by the others
    unit,  # power of two by which the workspace was divided
    num_blocks,
    V,
    D,
    num_tiles,
    num_chunks,
    tiles_per_chunk,
    stride_wv,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    EVERY: tl.constexpr,
):
    """One token block x SLICE dims: fp32 in registers over the chunk, one store."""
    num_slices = tl.cdiv(D, SLICE)
    block = task // num_slices
    first_dim = (task % num_slices) * SLICE
    dims = first_dim + tl.arange(0, SLICE)
    inside = (dims < D)[None, :]
    PARTS: tl.constexpr = TILE // BLOCK_K
    if EVERY:
        begin = first_tile
        end = tl.minimum(first_tile + tiles_per_chunk, num_tiles)
    else:
        begin = tl.load(start_ptr + block * (num_chunks + 1) + chunk)
        end = tl.load(start_ptr + block * (num_chunks + 1) + chunk + 1)
    list_ptr = tiles_ptr + block.to(tl.int64) * num_tiles
    acc = tl.zeros((TOKENS, SLICE), tl.float32)
    for i in tl.range(begin * PARTS, end * PARTS, num_stages=STAGES):
        tile = i // PARTS
        if not EVERY:
            tile = tl.load(list_ptr + i // PARTS)
        part = (i % PARTS) * BLOCK_K
        place = ((tile - first_tile) * num_blocks + block) * TILE + part
        if USE_TMA:
            p = workspace_rows.load([place, 0])
            row = tile if EVERY else tile - first_tile
            c = columns_rows.load([row * TILE + part, first_dim])
        else:
            at = place.to(tl.int64) + tl.arange(0, BLOCK_K)
            p = tl.load(workspace_ptr + at[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :])
            column = tile * TILE + part + tl.arange(0, BLOCK_K)
            column = tl.minimum(column, V - 1) if EVERY else tl.load(order_ptr + column)
            c = tl.load(
                weight_ptr + column.to(tl.int64)[:, None] * stride_wv + dims[None, :],
                mask=inside,
                other=0.0,
            )
        acc = tl.dot(p.T, c, acc, input_precision=PRECISION)
    acc *= unit
    token = block * TOKENS + tl.arange(0, TOKENS)
    out = grad_hidden_ptr + token.to(tl.int64)[:, None] * D + dims[None, :]
    if chunk > 0:
        acc += tl.load(out, mask=inside, other=0.0)
    if (chunk == 0) | (end > begin):
        tl.store(out, acc, mask=inside)
