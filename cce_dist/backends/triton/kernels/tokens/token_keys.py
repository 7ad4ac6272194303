"""Tokens with similar hidden states side by side: what matters to one of a block's tokens then
matters to the others."""

import triton
import triton.language as tl

# Tokens that stand for clusters; a token's key is its cluster's place in a line, or UNCOUNTED.
SEEDS = tl.constexpr(64)
UNCOUNTED = tl.constexpr(255)
POWER_STEPS = tl.constexpr(6)
# How often the seeds are halved before each part is put in line.
HALVINGS = tl.constexpr(1)


@triton.jit
def as_row(column):
    """[SEEDS] of a matrix's rows -> the same of its columns, in the same bits."""
    lane = tl.arange(0, SEEDS)
    return tl.sum(tl.where(lane[:, None] == lane[None, :], column[:, None], 0), 0)


@triton.jit
def places_in_line(gram):
    """[SEEDS, SEEDS] inner products of the seeds -> each one's place, [SEEDS] int32: they are
    halved along the direction in which they differ most, so are the halves, and the parts sorted.
    """
    lane = tl.arange(0, SEEDS)
    part = tl.zeros((SEEDS,), tl.int32)
    v = tl.zeros((SEEDS,), tl.float32)
    for halving in range(HALVINGS + 1):
        same = part[:, None] == as_row(part)[None, :]
        number = tl.sum(same.to(tl.float32), 1)
        # Inner products of differences from the part's mean; 0 between parts, so that each part's
        # direction is found beside the others'.
        mean = tl.sum(tl.where(same, gram, 0.0), 1) / number
        row = as_row(mean)
        of_part = tl.sum(tl.where(same, row[None, :], 0.0), 1) / number
        centred = gram - mean[:, None] - row[None, :] + of_part[:, None]
        centred = tl.where(same, centred, 0.0)
        # Over each part's trace: no power is too large then, nor vanishes.
        size = tl.sum(tl.where(lane[:, None] == lane[None, :], centred, 0.0), 0)
        trace = tl.sum(tl.where(same, size[None, :], 0.0), 1)
        centred = centred / tl.where(trace > 0, trace, 1.0)[:, None]
        v = ((lane * 37) % 64).to(tl.float32) - 31.5
        for _ in range(POWER_STEPS // 2):
            # Of a symmetric matrix rows and columns are the same, and need not change places.
            v = tl.sum(centred * tl.sum(centred * v[:, None], 0)[None, :], 1)
        if halving < HALVINGS:
            part = 2 * part + (v > 0).to(tl.int32)
    # Parts first, then along the direction, then as they come.
    of_part = as_row(part)[None, :]
    along = as_row(v)[None, :]
    ties = (along == v[:, None]) & (lane[None, :] < lane[:, None])
    before = (of_part < part[:, None]) | (
        (of_part == part[:, None]) & ((along < v[:, None]) | ties)
    )
    return tl.sum(before.to(tl.int32), 1)


@triton.jit(do_not_specialize=["N"])
def similar_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    rows_ptr,  # [N] int64: row of each token, those that count first
    count_ptr,  # [1] int32
    key_ptr,  # [N] uint8: sorting by it puts similar tokens side by side: out
    tally_ptr,  # [programs, SEEDS] int16: how many of a program's tokens have each key: out
    N,
    D,
    stride_hn,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Finds, for each of BLOCK_N tokens, the seed with the largest cosine, both less the seeds'
    mean; SEEDS tokens among those that count are the seeds.

    Any key is right, whatever hidden holds: it decides what is kept where, and no value.
    """
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = tl.load(count_ptr)
    counts = tokens < count
    lane = tl.arange(0, SEEDS)
    row = tl.load(rows_ptr + tokens, mask=counts, other=0)
    # One of each SEEDS-th of the tokens, not always its first: a batch's sequences may alternate.
    at = (lane * SEEDS + lane * 37 % SEEDS).to(tl.int64) * count // (SEEDS * SEEDS)
    seed = tl.load(rows_ptr + at, mask=count > 0, other=0)
    dims = tl.arange(0, BLOCK_D)
    e_ptrs = hidden_ptr + row[:, None] * stride_hn + dims[None, :]
    s_ptrs = hidden_ptr + seed[:, None] * stride_hn + dims[None, :]
    dots = tl.zeros((BLOCK_N, SEEDS), tl.float32)
    gram = tl.zeros((SEEDS, SEEDS), tl.float32)
    for k in tl.range(0, D, BLOCK_D, num_stages=3):
        inside = (k + dims < D)[None, :]
        e = tl.load(e_ptrs + k, mask=counts[:, None] & inside, other=0.0)
        s = tl.load(s_ptrs + k, mask=(count > 0) & inside, other=0.0)
        dots = tl.dot(e, s.T, dots, input_precision=PRECISION)
        gram = tl.dot(s, s.T, gram, input_precision=PRECISION)
    # Both less the seeds' mean, by linearity.
    mean = tl.sum(gram, 0) / SEEDS
    by_row = tl.sum(gram, 1) / SEEDS
    # The same for each seed: for Blackwell Triton compiles no sum to a single number of what comes
    # of a product.
    of_mean = (tl.sum(tl.zeros((SEEDS, SEEDS), tl.float32) + by_row[:, None], 0) / SEEDS)[None, :]
    centred = gram - mean[None, :] - by_row[:, None] + of_mean
    dots = dots - (tl.sum(dots, 1) / SEEDS)[:, None] - mean[None, :] + of_mean
    size = tl.sum(tl.where(lane[:, None] == lane[None, :], centred, 0.0), 0)
    dots *= tl.rsqrt(tl.maximum(size, 1e-30))[None, :]
    # Of no number none is the largest: the last seed then.
    best = tl.max(dots, 1)
    nearest = tl.min(tl.where(dots == best[:, None], lane[None, :], SEEDS - 1), 1)
    place = places_in_line(gram)
    is_nearest = nearest[:, None] == lane[None, :]
    key = tl.sum(tl.where(is_nearest, as_row(place)[None, :], 0), 1)
    key = tl.where(counts, key, UNCOUNTED)
    tl.store(key_ptr + tokens, key.to(tl.uint8), mask=tokens < N)
    tally = tl.sum((key[:, None] == lane[None, :]).to(tl.int32), 0)
    tl.store(tally_ptr + tl.program_id(0) * SEEDS + lane, tally.to(tl.int16))
