"""After the forward: the splits of the vocabulary merged by log-add-exp."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.forward.launches import SQUARES, UNKEPT
from cce_dist.backends.triton.kernels.numbers import LOG2E, LOG2E_FP32, exp2_of, log2_of


@triton.jit
def finish_kernel(
    count_ptr,  # [1] int32
    shape_ptr,  # [3] int32: blocks and splits
    full_ptr,  # [1] int32, if IS_SCREENED: 0: logits are 8-bit
    state_ptr,  # [4, size]: see `forward_kernel`
    extras_ptr,  # [8, size]: see `add_extras`
    lse_ptr,  # [S, N] natural log: out, 0 for tokens that don't count; a segment of splits a row.
    # Behind it [S, N] `Stats.lse_rest` if WIDE: out
    dropped_ptr,  # [N] log of the sum over dropped columns of exp(z) softcap'(z): out
    # Over all columns; where logits are 8-bit, over the softmax of dropped columns alone:
    entropy_ptr,  # [S, N] nats: out
    sum_p2_ptr,  # [S, N] log of the sum of squared probabilities: out; -inf over no columns
    unkept_ptr,  # [N] log of the sum over dropped columns of exp(z): out
    N,
    size,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SCORE: tl.constexpr,
    HAS_SURPLUS: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_UNKEPT: tl.constexpr,
    IS_SCREENED: tl.constexpr,
    WIDE: tl.constexpr,  # fp32 inputs
):
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    counts = tokens < tl.load(count_ptr)
    stride = tl.load(shape_ptr) * TOKENS
    segment = tl.program_id(1)
    splits = tl.load(shape_ptr + 1) // tl.num_programs(1)
    state_ptr += segment * splits * stride
    extras_ptr += segment * splits * stride
    lse_ptr += segment * N
    entropy_ptr += segment * N
    sum_p2_ptr += segment * N
    of_dropped = False
    if IS_SCREENED:
        of_dropped = tl.load(full_ptr) == 0
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    for split in range(splits):
        top = tl.maximum(top, tl.load(state_ptr + split * stride + tokens, mask=counts, other=0.0))
    total = tl.zeros((BLOCK_N,), tl.float32)
    dropped = tl.zeros((BLOCK_N,), tl.float32)
    surplus = tl.zeros((BLOCK_N,), tl.float32)
    unkept = tl.zeros((BLOCK_N,), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for split in range(splits):
        at = state_ptr + split * stride + tokens
        shift = tl.load(at, mask=counts, other=0.0) - top
        share = exp2_of(shift)
        part_sum = tl.load(at + size, mask=counts, other=1.0)
        total += share * part_sum
        if HAS_SCORE:
            part_dropped = tl.load(at + 2 * size, mask=counts, other=0.0)
            dropped += share * part_dropped
            if IS_SCREENED and not HAS_UNKEPT:
                part_sum = tl.where(of_dropped, part_dropped, part_sum)
        if HAS_UNKEPT:
            of_unkept = extras_ptr + UNKEPT * size + split * stride + tokens
            part_unkept = tl.load(of_unkept, mask=counts, other=0.0)
            unkept += share * part_unkept
            if IS_SCREENED:
                part_sum = tl.where(of_dropped, part_unkept, part_sum)
        if HAS_SURPLUS:
            part = tl.load(at + 3 * size, mask=counts, other=0.0)
            # A split without columns has a reference of no meaning, which must not give 0 * inf.
            part = tl.where(part_sum > 0, part + shift * part_sum, 0.0)
            surplus += share * part
        if HAS_SQUARES:
            of_squares = extras_ptr + SQUARES * size + split * stride + tokens
            squares += share * share * tl.load(of_squares, mask=counts, other=0.0)
    if WIDE:
        whole = (top.to(tl.float64) + log2_of(total).to(tl.float64)) / LOG2E_FP32
        lse = whole.to(tl.float32)
        rest = (whole - lse.to(tl.float64)).to(tl.float32)
        # Neither infinity nor NaN has a rest.
        rest = tl.where(tl.abs(lse) < float("inf"), rest, 0.0)
        rest_ptr = lse_ptr + tl.num_programs(1) * N
        tl.store(rest_ptr + tokens, tl.where(counts, rest, 0.0), mask=tokens < N)
    else:
        # Rounded to nearest: an error of lse is one of every probability.
        lse = tl.div_rn(top + log2_of(total), tl.full((BLOCK_N,), LOG2E, tl.float32))
    tl.store(lse_ptr + tokens, tl.where(counts, lse, 0.0), mask=tokens < N)
    if HAS_SCORE:
        value = (top + tl.log2(dropped)) / LOG2E
        tl.store(dropped_ptr + tokens, tl.where(counts, value, float("-inf")), mask=tokens < N)
    if HAS_UNKEPT:
        value = (top + tl.log2(unkept)) / LOG2E
        tl.store(unkept_ptr + tokens, tl.where(counts, value, float("-inf")), mask=tokens < N)
    if IS_SCREENED:
        total = tl.where(of_dropped, unkept if HAS_UNKEPT else dropped, total)
    if HAS_SURPLUS:
        entropy = (log2_of(total) - surplus / total) / LOG2E
        # Where one column has all mass, rounding can make this difference negative.
        # NaN is not equal to 0 either, and stays.
        entropy = tl.where(counts & (total != 0), tl.where(entropy < 0, 0.0, entropy), 0.0)
        tl.store(entropy_ptr + tokens, entropy, mask=tokens < N)
    if HAS_SQUARES:
        sum_p2 = (log2_of(squares) - 2.0 * log2_of(total)) / LOG2E
        sum_p2 = tl.where(total == 0, float("-inf"), sum_p2)
        tl.store(sum_p2_ptr + tokens, tl.where(counts, sum_p2, 0.0), mask=tokens < N)
