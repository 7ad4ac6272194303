"""DSD: the hidden gradient of a token block, from the columns of one chunk."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import add_product, slice_of


@triton.jit
def add_rows(
    acc,  # [TOKENS, SLICE]
    row,  # [TOKENS] int64
    written,  # [TOKENS]
    dims,  # [SLICE]
    is_first,  # the first chunk stores, and the others add
    grad_hidden_ptr,  # [num_rows, D] fp32
    D,
):
    inside = written[:, None] & (dims < D)[None, :]
    out = grad_hidden_ptr + row[:, None] * D + dims[None, :]
    # A mask, not a branch around the sum: LLVM takes long over so many values of two branches.
    acc += tl.load(out, mask=inside & (is_first == 0), other=0.0)
    tl.store(out, acc, mask=inside)


@triton.jit
def piece_of(piece, pieces, length, BLOCK_K: tl.constexpr):
    """Returns [start, end) of a piece of a list; all but the last end at a multiple of BLOCK_K."""
    each = tl.cdiv(tl.cdiv(length, pieces), BLOCK_K) * BLOCK_K
    start = tl.minimum(piece * each, length)
    return start, tl.minimum(start + each, length)


@triton.jit
def dsd_kept_task(
    task,
    pieces,  # of a block's columns, each summed into a separate hidden gradient
    turn,  # 0 for the chunk that is computed first: it stores, and the others add
    first_tile,
    last_tile,
    weight_ptr,  # [V, D]
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    base_ptr,  # [num_blocks + 1] int32, of the chunk
    segment_ptr,  # [num_blocks + 1] int32, of the chunk
    entries_ptr,  # [rows] int32
    workspace_ptr,  # [rows, TOKENS]
    workspace_rows,  # descriptor of the same, BLOCK_K x TOKENS
    drawn_sum_ptr,  # [tasks, TOKENS] fp32
    rows_ptr,  # [N_padded] int64: row of each token in the hidden gradient
    grad_hidden_ptr,  # [pieces, num_rows, D] fp32
    num_rows,
    drawn_ptr,  # [N_padded] fp32: sum of the drawn entries' d_logits: out, over the chunks
    count,
    grad_scale,
    num_tiles,
    D,
    stride_wv,
    at_once,  # slices, see `slice_of`
    TOKENS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    WIDE: tl.constexpr,
    BRANCHES: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
):
    """Computes DSD of a token block x SLICE dims over a piece of the block's entries."""
    num_slices = tl.cdiv(D, SLICE)
    piece = task % pieces
    number = tl.cdiv(count, TOKENS)
    block, slice_ = slice_of(task // pieces, number, num_slices, at_once)
    dims = slice_ * SLICE + tl.arange(0, SLICE)
    inside = (dims < D)[None, :]
    row_ptr = starts_ptr + block * (num_tiles + 1)
    length = tl.load(row_ptr + last_tile) - tl.load(row_ptr + first_tile)
    base = tl.load(base_ptr + block)
    lane = tl.arange(0, BLOCK_K)
    acc = tl.zeros((TOKENS, SLICE), tl.float32)
    start, end = piece_of(piece, pieces, length, BLOCK_K)
    for k in tl.range(start, end, BLOCK_K, num_stages=STAGES):
        # Past the list's end there is some valid column, whose d_logits are 0.
        column = (tl.load(entries_ptr + base + k + lane) >> 1).to(tl.int64)
        if USE_TMA:
            p = workspace_rows.load([base + k, 0])
        else:
            at = (base + k + lane).to(tl.int64)
            p = tl.load(workspace_ptr + at[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :])
        c = tl.load(
            weight_ptr + column[:, None] * stride_wv + dims[None, :], mask=inside, other=0.0
        )
        if WIDE:
            acc = add_product(acc, p.T, c, grad_scale - grad_scale, PRECISION)
        else:
            acc = tl.dot(p.T, c, acc, input_precision=PRECISION)
    # A list without entries has nothing to add.
    wanted = (turn == 0) | (length > 0)
    piece_ptr = grad_hidden_ptr + piece.to(tl.int64) * num_rows * D
    token = block * TOKENS + tl.arange(0, TOKENS)
    if BRANCHES:
        if wanted:
            row = tl.load(rows_ptr + token)
            add_rows(acc * grad_scale, row, token < count, dims, turn == 0, piece_ptr, D)
    else:
        row = tl.load(rows_ptr + token)
        add_rows(acc * grad_scale, row, (token < count) & wanted, dims, turn == 0, piece_ptr, D)
    if HAS_DRAWN:  # noqa: SIM102
        if (slice_ == 0) & (piece == 0):
            token = tl.arange(0, TOKENS)
            total = tl.zeros((TOKENS,), tl.float32)
            for i in range(tl.load(segment_ptr + block), tl.load(segment_ptr + block + 1)):
                total += tl.load(drawn_sum_ptr + i * TOKENS + token)
            out = drawn_ptr + block * TOKENS + token
            if turn > 0:
                total += tl.load(out)
            tl.store(out, total)
