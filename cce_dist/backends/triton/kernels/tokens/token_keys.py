"""Keys that put tokens with similar hidden states side by side: a block's tokens then need mostly
the same columns."""

import triton
import triton.language as tl

# Seeds are tokens, one a cluster. A token's key is its cluster's place in a line, or UNCOUNTED.
SEEDS = tl.constexpr(64)
UNCOUNTED = tl.constexpr(255)
POWER_STEPS = tl.constexpr(6)
# The number of times that the seeds are halved before each part is sorted.
HALVINGS = tl.constexpr(1)


@triton.jit
def as_row(column):
    """Moves a value for each row, [SEEDS], to the layout of columns. No bit changes."""
    lane = tl.arange(0, SEEDS)
    return tl.sum(tl.where(lane[:, None] == lane[None, :], column[:, None], 0), 0)


@triton.jit
def places_in_line(gram):
    """Computes each seed's place in a line, [SEEDS] int32, from the seeds' inner products.

    The seeds are halved along the direction in which they differ most, HALVINGS times; then each
    part is sorted along its direction.
    """
    lane = tl.arange(0, SEEDS)
    part = tl.zeros((SEEDS,), tl.int32)
    v = tl.zeros((SEEDS,), tl.float32)
    for halving in range(HALVINGS + 1):
        same = part[:, None] == as_row(part)[None, :]
        number = tl.sum(same.to(tl.float32), 1)
        # Inner products of differences to the part's mean; 0 between parts, so that all parts'
        # directions are computed at once.
        mean = tl.sum(tl.where(same, gram, 0.0), 1) / number
        row = as_row(mean)
        of_part = tl.sum(tl.where(same, row[None, :], 0.0), 1) / number
        centred = gram - mean[:, None] - row[None, :] + of_part[:, None]
        centred = tl.where(same, centred, 0.0)
        # Divided by the part's trace, powers neither overflow nor vanish.
        size = tl.sum(tl.where(lane[:, None] == lane[None, :], centred, 0.0), 0)
        trace = tl.sum(tl.where(same, size[None, :], 0.0), 1)
        centred = centred / tl.where(trace > 0, trace, 1.0)[:, None]
        v = ((lane * 37) % 64).to(tl.float32) - 31.5
        for _ in range(POWER_STEPS // 2):
            # The matrix is symmetric: multiplying by it twice needs no transposition.
            v = tl.sum(centred * tl.sum(centred * v[:, None], 0)[None, :], 1)
        if halving < HALVINGS:
            part = 2 * part + (v > 0).to(tl.int32)
    # By part, then along the direction; ties keep their order.
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
    """Finds, for each of BLOCK_N tokens, the seed with the largest cosine, after subtracting the
    seeds' mean from both. The seeds are SEEDS of the tokens that count.

    Any key is valid, whatever hidden holds: keys change which columns blocks keep, and no value.
    """
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    count = tl.load(count_ptr)
    counts = tokens < count
    lane = tl.arange(0, SEEDS)
    row = tl.load(rows_ptr + tokens, mask=counts, other=0)
    # One seed from each SEEDS-th of the tokens, at varying places: sequences may alternate.
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
    # Subtracts the seeds' mean on both sides, by linearity.
    mean = tl.sum(gram, 0) / SEEDS
    by_row = tl.sum(gram, 1) / SEEDS
    # A single number, once for each seed: for Blackwell, Triton cannot sum a product's result to a
    # scalar.
    of_mean = (tl.sum(tl.zeros((SEEDS, SEEDS), tl.float32) + by_row[:, None], 0) / SEEDS)[None, :]
    centred = gram - mean[None, :] - by_row[:, None] + of_mean
    dots = dots - (tl.sum(dots, 1) / SEEDS)[:, None] - mean[None, :] + of_mean
    size = tl.sum(tl.where(lane[:, None] == lane[None, :], centred, 0.0), 0)
    dots *= tl.rsqrt(tl.maximum(size, 1e-30))[None, :]
    # A row of NaN equals no maximum, and takes the last seed.
    best = tl.max(dots, 1)
    nearest = tl.min(tl.where(dots == best[:, None], lane[None, :], SEEDS - 1), 1)
    place = places_in_line(gram)
    is_nearest = nearest[:, None] == lane[None, :]
    key = tl.sum(tl.where(is_nearest, as_row(place)[None, :], 0), 1)
    key = tl.where(counts, key, UNCOUNTED)
    tl.store(key_ptr + tokens, key.to(tl.uint8), mask=tokens < N)
    tally = tl.sum((key[:, None] == lane[None, :]).to(tl.int32), 0)
    tl.store(tally_ptr + tl.program_id(0) * SEEDS + lane, tally.to(tl.int16))
