"""Log-sum-exp of every token over the vocabulary; logits live in registers only."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.forward.extras import add_extras
from cce_dist.backends.triton.kernels.forward.launches import (
    ALONE,
    LAST,
    SQUARES,
    UNKEPT,
    end_turn,
    fields_at,
    first_turn,
    place_of,
    put_back,
    raise_reference,
    segment_of,
    slot_of,
    start_state,
    turns_before,
)
from cce_dist.backends.triton.kernels.numbers import (
    exp2_in,
    load_tile,
    log2_above,
    log2_scale_across,
    log2_scale_of,
    partial_sums,
    scale_across,
    softcapped,
    whole_sum,
)


@triton.jit
def dequantized(
    x,  # [BLOCK_V, BLOCK_N] products of 8-bit numbers
    columns,
    V,
    column_ptr,  # [2, V]
    token_ptrs,  # [BLOCK_N] in the first row of [2, N]
    N,
):
    """Returns the logits of 8-bit products, in fp32. docs/design/screened.md"""
    scale = tl.load(column_ptr + columns, mask=columns < V, other=0.0)
    shift = tl.load(column_ptr + V + columns, mask=columns < V, other=0.0)
    x = x.to(tl.float32) * scale[:, None] * tl.load(token_ptrs)[None, :]
    return x + shift[:, None] + tl.load(token_ptrs + N)[None, :]


@triton.jit
def above_reference(x, factor, scale, rows, ref, WIDE: tl.constexpr):
    """Returns logits minus `ref`, log2. `factor`: the scale times log2(e)."""
    if WIDE:
        return log2_above(x * scale_across(scale, rows), ref[None, :])
    else:
        return x * factor - ref[None, :]


@triton.jit
def overflowed(x):
    return (x != x) | (x == float("inf"))


@triton.jit
def has_overflowed(
    state_ptrs, extras_ptrs, size, HAS_SURPLUS: tl.constexpr, HAS_SQUARES: tl.constexpr
):
    failed = overflowed(tl.load(state_ptrs + size))
    if HAS_SURPLUS:
        # A sum of products with logarithms overflows some logits before the sum that weighs them.
        failed = failed | overflowed(tl.abs(tl.load(state_ptrs + 3 * size)))
    if HAS_SQUARES:
        # A square overflows from half that logit on.
        failed = failed | overflowed(tl.load(extras_ptrs + SQUARES * size))
    return failed


@triton.jit
def store_logits(
    log_p,  # [BLOCK_V, BLOCK_N]
    logits,
    logit_ptr,
    first,  # row and token of the tile
    N,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    values = log_p.to(logit_ptr.dtype.element_ty)
    if USE_TMA:
        logits.store([first[0], first[1]], values)
    else:
        at = first[0].to(tl.int64) + tl.arange(0, BLOCK_V)
        tokens = first[1] + tl.arange(0, BLOCK_N)
        tl.store(logit_ptr + at[:, None] * N + tokens[None, :], values)


@triton.jit
def add_to(ptrs, x):
    tl.store(ptrs, tl.load(ptrs) + x)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["launch", "start_tile", "end_tile"])
def forward_kernel(
    hidden,  # [N, D] packed: the tokens that count first; N a multiple of BLOCK_N below
    weight,  # [V, D]
    bias_ptr,  # [V]
    class_weight_ptr,  # [V]
    column_ptr,  # [2, V] fp32: scale of an 8-bit row; shift of its products
    token_ptr,  # [2, N] fp32: the same of tokens
    count_ptr,  # [1] int32: tokens that count
    shape_ptr,  # [3] int32: blocks of them, splits of the vocabulary, blocks at a time
    lower_ptr,  # [N] a lower bound of the token's lse over all ranks, log2
    state_ptr,  # [SLOTS, 4, size], size not below (splits + 1) * blocks * BLOCK_N. Of a split and
    # token: a reference `ref`, about lse or below, log2; the sum of exp2(z - ref) over its columns;
    # of exp2(z - ref) softcap'(z) over dropped columns; of exp2(z - ref) (z - ref), log2, over all
    # columns, or over dropped ones if IS_SCREENED. Behind the splits' references stand those of
    # `merged_reference`. A launch reads the slot that the launch before wrote, and writes the next
    # one: out
    mass_ptr,  # [num_blocks, V] a column's mass in a block, negative where kept: out
    extras_ptr,  # [8, size]: see `add_extras`
    logits,  # [columns, N] z - ref, log2, of tiles from `start_tile`, if HAS_LOGITS: out;
    # descriptor of BLOCK_V x BLOCK_N. In such a launch all splits have the same `ref`
    logit_ptr,  # pointer to the same
    kept_ref_ptr,  # [N] the `ref` of kept logits: out
    launch,  # PROBE, FIRST to LAST, ...; or ALONE
    start_tile,  # of a launch that keeps logits
    end_tile,  # of such a launch, or of all launches before the first such one
    size,
    N,
    V,
    D,
    stride_hn,
    stride_wv,
    scale,  # a number, or [N] of each token
    softcap,
    keep,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,  # fp32 inputs
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCORE: tl.constexpr,
    BY_LARGEST: tl.constexpr,
    HAS_SURPLUS: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
    HAS_UNKEPT: tl.constexpr,
    IS_ROBUST: tl.constexpr,
    IS_SCREENED: tl.constexpr,  # hidden and weight are of 8 bits
    ACCUMULATOR: tl.constexpr,
    NUM_EXTRAS: tl.constexpr,  # rows of `extras_ptr`
    SEGMENT: tl.constexpr,  # columns of a segment, whose splits sum its columns alone; 0: all
):
    """Sums a block of tokens over every `splits`-th vocabulary tile; a program a block and split.
    The number of splits follows the number of blocks that count: ignored tokens leave no
    multiprocessor idle.

    Tiles are strided over the programs: programs that run at the same time read the same few rows
    of the weight, and no more token blocks than fit the cache beside them.
    docs/design/forward.md#the-two-forward-kernels.

    exp2(z - ref) stands for the probability; its sum over the block's tokens decides whether the
    backward keeps the column. `ref` follows the program's sum: after each of the first tiles, then
    ever less often. It starts from the sums of all splits in the launch before; in LAST and the
    launch before it from what these sums are expected to become. PROBE computes one tile of each
    split. FIRST computes a 64th of the vocabulary, where a tokenizer's frequent tokens are; each
    later launch goes four times as far, LAST to the end.
    docs/design/filter.md#column-masses.

    A logit 127 (log2) above `ref` overflows the sum. A last launch, with IS_ROBUST, repeats such a
    program's tiles, and raises `ref` to each tile's maximum first.
    """
    num_blocks = tl.load(shape_ptr)
    splits = tl.load(shape_ptr + 1)
    if tl.program_id(0) >= num_blocks * splits:
        return
    block, split = place_of(tl.program_id(0), num_blocks, splits, tl.load(shape_ptr + 2))
    count = tl.load(count_ptr)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    stride = num_blocks * BLOCK_N
    state_ptrs = state_ptr + slot_of(launch) * 4 * size + split * stride + rows
    extras_ptrs = extras_ptr + split * stride + rows
    begin, end, turn_split, turn_splits = segment_of(split, splits, V, SEGMENT)
    if SEGMENT > 0:
        lower_ptr += begin // SEGMENT * N
        end_tile = tl.cdiv(end - begin, BLOCK_V)
    num_turns = turns_before(end_tile, turn_split, turn_splits)
    num_turns = tl.where(block * BLOCK_N < count, num_turns, 0)
    all_turns = num_turns
    turn = first_turn(launch, num_turns)
    num_turns = end_turn(launch, num_turns, splits)
    keeps_logits = (launch > LAST) & (launch < ALONE)
    turn = tl.where(keeps_logits, turns_before(start_tile, split, splits), turn)
    total = tl.zeros((8, 8, BLOCK_N), tl.float32)
    dropped = tl.zeros((8, 8, BLOCK_N), tl.float32)
    if IS_ROBUST:
        failed = has_overflowed(state_ptrs, extras_ptrs, size, HAS_SURPLUS, HAS_SQUARES)
        turn = 0
        num_turns = tl.where(tl.max(failed.to(tl.int32), 0) > 0, num_turns, 0)
        if num_turns == 0:
            return
        if SEGMENT > 0:
            # Of the other tokens nothing may change: whether one fails depends on its block.
            state = fields_at(state_ptrs, size, 4)
            extras = fields_at(extras_ptrs, size, NUM_EXTRAS)
    start_state(
        lower_ptr + rows, state_ptr + rows, extras_ptrs, split * stride, splits, stride, size,
        rows < count, launch, all_turns, BLOCK_N, HAS_SCORE, HAS_SURPLUS, HAS_SQUARES, HAS_UNKEPT,
        IS_SCREENED, HAS_LOGITS, IS_ROBUST,
    )  # fmt: skip
    threshold = keep
    if not BY_LARGEST:
        threshold = keep * (tl.minimum(count - block * BLOCK_N, BLOCK_N) / BLOCK_N)
    log2_scale = log2_scale_of(scale)
    start_turn = turn
    if HAS_LOGITS:
        tl.store(kept_ref_ptr + rows, tl.load(state_ptrs), mask=(split == 0) & (rows < N))
    while turn < num_turns:
        first = turn
        turn = tl.minimum(turn + tl.maximum(turn - start_turn, 1), num_turns)
        if HAS_LOGITS:
            turn = num_turns
        first_tile = turn_split + first * turn_splits
        for tile in range(first_tile, turn_split + turn * turn_splits, turn_splits):
            first_column = begin + tile * BLOCK_V
            x = tl.zeros((BLOCK_V, BLOCK_N), ACCUMULATOR)
            for k in range(0, tl.cdiv(D, BLOCK_D)):
                c = load_tile(
                    weight, first_column, k * BLOCK_D, V, D, stride_wv, BLOCK_V, BLOCK_D, USE_TMA
                )
                e = load_tile(
                    hidden, block * BLOCK_N, k * BLOCK_D, N, D, stride_hn, BLOCK_N, BLOCK_D, USE_TMA
                )
                x = tl.dot(c, e.T, x, input_precision=PRECISION, out_dtype=ACCUMULATOR)
            columns = first_column + tl.arange(0, BLOCK_V)
            if IS_SCREENED:
                x = dequantized(x, columns, V, column_ptr, token_ptr + rows, N)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + columns, mask=columns < V, other=0.0)
                x += bias.to(tl.float32)[:, None]
            if HAS_SOFTCAP:
                x, slope = softcapped(x, softcap, WIDE)
            if HAS_ARGMAX or HAS_MOMENTS or HAS_SMOOTH:
                add_extras(
                    x * scale_across(scale, rows), columns, tile == turn_split, end,
                    class_weight_ptr, extras_ptrs, size, BLOCK_V, HAS_ARGMAX, HAS_MOMENTS,
                    HAS_SMOOTH, HAS_CLASS_WEIGHT,
                )  # fmt: skip
            factor = log2_scale_across(log2_scale, rows)
            if first_column + BLOCK_V > end:
                x = tl.where((columns < end)[:, None], x, float("-inf") * factor)
            ref = tl.load(state_ptrs)
            if IS_ROBUST:
                ref = tl.maximum(tl.max(x * factor, 0), ref)
                total, dropped = raise_reference(
                    total, dropped, ref, state_ptrs, extras_ptrs, size, HAS_SCORE, HAS_SURPLUS,
                    HAS_SQUARES, HAS_UNKEPT, IS_SCREENED,
                )  # fmt: skip
            log_p = above_reference(x, factor, scale, rows, ref, WIDE)
            if HAS_LOGITS:
                at = ((tile - start_tile) * BLOCK_V, block * BLOCK_N)
                store_logits(log_p, logits, logit_ptr, at, N, BLOCK_V, BLOCK_N, USE_TMA)
            p = exp2_in(log_p, WIDE)
            total += partial_sums(p, BLOCK_V, BLOCK_N)
            if HAS_SCORE:
                q = p * slope if HAS_SOFTCAP else p
                mass = tl.sum(q, 1)
                keeps = (tl.max(p, 1) if BY_LARGEST else mass) >= threshold
                mark = tl.where(keeps, -tl.maximum(mass, 1e-30), mass)
                tl.store(mass_ptr + block.to(tl.int64) * V + columns, mark, mask=columns < V)
                drops = tl.where(keeps, 0.0, 1.0)[:, None]
                dropped += partial_sums(q * drops, BLOCK_V, BLOCK_N)
                # Kept columns have exact logits, of which their statistics are.
                p = p * drops if IS_SCREENED else p
                if HAS_UNKEPT:
                    add_to(extras_ptrs + UNKEPT * size, tl.sum(p, 0))
            if HAS_SURPLUS:
                add_to(state_ptrs + 3 * size, tl.sum(tl.where(p > 0, p * log_p, 0.0), 0))
            if HAS_SQUARES:
                add_to(extras_ptrs + SQUARES * size, tl.sum(p * p, 0))
        whole_total = whole_sum(total) + tl.load(state_ptrs + size)
        ref = tl.load(state_ptrs) + tl.maximum(tl.log2(whole_total), 0.0)
        total, dropped = raise_reference(
            total, dropped, ref, state_ptrs, extras_ptrs, size, HAS_SCORE, HAS_SURPLUS,
            HAS_SQUARES, HAS_UNKEPT, IS_SCREENED,
        )  # fmt: skip
    add_to(state_ptrs + size, whole_sum(total))
    if HAS_SCORE:
        add_to(state_ptrs + 2 * size, whole_sum(dropped))
    if IS_ROBUST and SEGMENT > 0:
        put_back(state_ptrs, size, state, ~failed, 4)
        put_back(extras_ptrs, size, extras, ~failed, NUM_EXTRAS)
