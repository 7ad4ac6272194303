"""Log-sum-exp of every token over the vocabulary; logits live in registers only."""

import triton
import triton.language as tl

from cce_dist.kernels.extras import add_extras
from cce_dist.kernels.numbers import (
    HIGHEST,
    LOG2E,
    LOWEST,
    load_tile,
    partial_sums,
    softcapped,
    whole_sum,
)


@triton.jit
def raise_reference(total, dropped, ref, at, ref_ptr, surplus_ptr, HAS_SURPLUS: tl.constexpr):
    """Sums relative to what `ref_ptr` holds -> relative to `ref`, which is not below it."""
    gain = ref - tl.load(ref_ptr + at)
    shrink = tl.exp2(-gain)
    if HAS_SURPLUS:
        # Of nothing yet, the first time: the gain is then without end, and 0 times it is no number.
        before = whole_sum(total)
        surplus = tl.load(surplus_ptr + at) - tl.where(before > 0, gain * before, 0.0)
        tl.store(surplus_ptr + at, shrink * surplus)
    tl.store(ref_ptr + at, ref)
    # The next tile reads it with other threads.
    tl.debug_barrier()
    return total * shrink[None, None, :], dropped * shrink[None, None, :]


@triton.jit
def forward_kernel(
    hidden,  # [N, D] packed: the tokens that count first; N a multiple of BLOCK_N below
    weight,  # [V, D]
    bias_ptr,  # [V]
    class_weight_ptr,  # [V]
    count_ptr,  # [1] int32: tokens that count
    shape_ptr,  # [2] int32: blocks of them, and splits of the vocabulary
    ref_ptr,  # [splits, blocks * BLOCK_N] a lower bound of the token's lse, log2: in and out
    sum_ptr,  # sum of exp2(z - ref): out
    dropped_ptr,  # over the columns not kept, exp2(z - ref) softcap'(z): out
    mass_ptr,  # [num_blocks, V] a column's mass in a block, negative where kept: out
    surplus_ptr,  # sum of exp2(z - ref) (z - ref), log2: zeros in, out
    extras_ptr,  # [7, programs * BLOCK_N]: see `add_extras`
    N,
    V,
    D,
    stride_hn,
    stride_wv,
    scale,
    softcap,
    keep,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCORE: tl.constexpr,
    BY_LARGEST: tl.constexpr,
    HAS_SURPLUS: tl.constexpr,
    HAS_ARGMAX: tl.constexpr,
    HAS_MOMENTS: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    IS_ROBUST: tl.constexpr,
):
    """One program: a block of tokens against every `splits`-th vocabulary tile. How many splits
    there are follows how many blocks count: ignored tokens leave no multiprocessor idle.

    Tiles are strided over the programs: all blocks read the same few rows of the weight at a
    time, and every split meets the frequent tokens early, so that its running sum is a tight
    lower bound of lse. exp2(z - ref) with that bound is an upper bound of the probability; its
    sum over the block's tokens decides whether the backward keeps the column.
    docs/numerics.md#column-masses.

    `ref` follows the sum: after each of the first tiles, then ever more seldom. A logit 127 (log2)
    above it overflows the sum; a program that finds its sum overflowed in a second launch, the
    one with IS_ROBUST, starts again and raises `ref` to each tile's maximum first.
    """
    num_blocks = tl.load(shape_ptr)
    splits = tl.load(shape_ptr + 1)
    if tl.program_id(0) >= num_blocks * splits:
        return
    block = tl.program_id(0) % num_blocks
    split = tl.program_id(0) // num_blocks
    count = tl.load(count_ptr)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    at = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    num_turns = tl.cdiv(tl.cdiv(V, BLOCK_V) - split, splits)
    num_turns = tl.where(block * BLOCK_N < count, num_turns, 0)
    if IS_ROBUST:
        before = tl.load(sum_ptr + at)
        failed = (before != before) | (before == float("inf"))
        num_turns = tl.where(tl.max(failed.to(tl.int32), 0) > 0, num_turns, 0)
        if num_turns == 0:
            return
        tl.store(ref_ptr + at, tl.where(rows < count, LOWEST, HIGHEST))
        if HAS_SURPLUS:
            tl.store(surplus_ptr + at, tl.zeros((BLOCK_N,), tl.float32))
        tl.debug_barrier()
    threshold = keep
    if not BY_LARGEST:
        threshold = keep * (tl.minimum(count - block * BLOCK_N, BLOCK_N) / BLOCK_N)
    unit = LOG2E * scale
    total = tl.zeros((8, 8, BLOCK_N), tl.float32)
    dropped = tl.zeros((8, 8, BLOCK_N), tl.float32)
    turn = 0
    while turn < num_turns:
        first = turn
        turn = tl.minimum(tl.where(turn < 8, turn + 1, 2 * turn), num_turns)
        for tile in range(split + first * splits, split + turn * splits, splits):
            x = tl.zeros((BLOCK_V, BLOCK_N), tl.float32)
            for k in range(0, tl.cdiv(D, BLOCK_D)):
                c = load_tile(
                    weight, tile * BLOCK_V, k * BLOCK_D, V, D, stride_wv, BLOCK_V, BLOCK_D, USE_TMA
                )
                e = load_tile(
                    hidden, block * BLOCK_N, k * BLOCK_D, N, D, stride_hn, BLOCK_N, BLOCK_D, USE_TMA
                )
                x = tl.dot(c, e.T, x, input_precision=PRECISION)
            columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
            if HAS_BIAS:
                bias = tl.load(bias_ptr + columns, mask=columns < V, other=0.0)
                x += bias.to(tl.float32)[:, None]
            if HAS_SOFTCAP:
                x, slope = softcapped(x, softcap)
            if HAS_ARGMAX or HAS_MOMENTS or HAS_SMOOTH:
                add_extras(
                    x * scale, columns, tile == split, V, class_weight_ptr, extras_ptr + at,
                    tl.num_programs(0) * BLOCK_N, BLOCK_V, HAS_ARGMAX, HAS_MOMENTS, HAS_SMOOTH,
                    HAS_CLASS_WEIGHT,
                )  # fmt: skip
            if tile * BLOCK_V + BLOCK_V > V:
                x = tl.where((columns < V)[:, None], x, float("-inf") * unit)
            ref = tl.load(ref_ptr + at)
            if IS_ROBUST:
                ref = tl.maximum(tl.max(x * unit, 0), ref)
                total, dropped = raise_reference(
                    total, dropped, ref, at, ref_ptr, surplus_ptr, HAS_SURPLUS
                )
            p = tl.exp2(x * unit - ref[None, :])
            total += partial_sums(p, BLOCK_V, BLOCK_N)
            if HAS_SURPLUS:
                excess = tl.sum(tl.where(p > 0, p * (x * unit - ref[None, :]), 0.0), 0)
                tl.store(surplus_ptr + at, tl.load(surplus_ptr + at) + excess)
                tl.debug_barrier()
            if HAS_SCORE:
                q = p * slope if HAS_SOFTCAP else p
                mass = tl.sum(q, 1)
                score = tl.max(p, 1) if BY_LARGEST else mass
                keeps = score >= threshold
                mark = tl.where(keeps, -tl.maximum(mass, 1e-30), mass)
                tl.store(mass_ptr + block.to(tl.int64) * V + columns, mark, mask=columns < V)
                drops = tl.where(keeps, 0.0, 1.0)
                dropped += partial_sums(q * drops[:, None], BLOCK_V, BLOCK_N)
        ref = tl.load(ref_ptr + at) + tl.maximum(tl.log2(whole_sum(total)), 0.0)
        total, dropped = raise_reference(total, dropped, ref, at, ref_ptr, surplus_ptr, HAS_SURPLUS)
    tl.store(sum_ptr + at, whole_sum(total))
    if HAS_SCORE:
        tl.store(dropped_ptr + at, whole_sum(dropped))
