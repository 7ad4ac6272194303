"""`exact`, SDD: d_logits of every column of a chunk of the vocabulary.

Both the d_logits and the logits that the forward kept lie as [columns, N_padded] in the workspace.
"""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.backward.sdd import slope_at
from cce_dist.backends.triton.kernels.numbers import (
    LOG2E,
    exp2_in,
    load_tile,
    log2_above,
    log2_probability,
    scale_across,
    scale_of,
    softcapped,
)


@triton.jit
def d_logits(
    log_p,  # log2 of the probability
    slope,  # softcap'(z), 1 without a softcap
    probability,  # upstream of the probability; like `of_entropy` and `of_mean` times logit_scale
    of_entropy,
    entropy,
    of_mean,
    class_weight,
    WIDE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
):
    """Returns the gradient of the loss by E . C + bias, but for the target's term."""
    p = exp2_in(log_p, WIDE)
    if HAS_ENTROPY:
        surprise = tl.where(p > 0, log_p / LOG2E, 0.0) + entropy
        grad = p * (probability - of_entropy * surprise)
    else:
        grad = p * probability
    if HAS_SMOOTH:
        grad += class_weight * of_mean
    return grad * slope


@triton.jit
def logits_task(
    block,  # of tokens
    tile,  # of the chunk's columns
    hidden,
    weight,
    workspace,
    workspace_ptr,
    logit_ptr,
    ref_ptr,
    bias_ptr,
    class_weight_ptr,
    upstream_ptr,
    first_column,
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
    WIDE: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """Computes d_logits of a tile of columns and a token block."""
    local = tile * BLOCK_V + tl.arange(0, BLOCK_V)
    column = first_column + local
    token = block * BLOCK_N + tl.arange(0, BLOCK_N)
    place = local.to(tl.int64)[:, None] * N + token[None, :]
    upstream_ptrs = upstream_ptr + token
    slope = 1.0
    if HAS_LOGITS:
        above = tl.load(logit_ptr + place).to(tl.float32)
        ref = tl.load(ref_ptr + token)[None, :]
        x = above + ref
        # All threads must have read the logits before any of them writes d_logits there.
        tl.debug_barrier()
        if HAS_SOFTCAP:
            # The logits of a token that doesn't count are -inf.
            slope = slope_at(x, scale_across(scale, token), softcap, False)
            slope = tl.where(x > float("-inf"), slope, 0.0)
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
            x, slope = softcapped(x, softcap, WIDE)
        factor = scale_across(scale, token)
        x *= factor if WIDE else factor * LOG2E
    of_class = 1.0
    if HAS_CLASS_WEIGHT:
        of_class = tl.load(class_weight_ptr + column, mask=column < V, other=0.0)[:, None]
    of_entropy = 0.0
    entropy = 0.0
    of_mean = 0.0
    if HAS_ENTROPY:
        of_entropy = tl.load(upstream_ptrs + 2 * N)[None, :]
        entropy = tl.load(upstream_ptrs + 3 * N)[None, :]
    if HAS_SMOOTH:
        of_mean = tl.load(upstream_ptrs + 4 * N)[None, :]
    lse = tl.load(upstream_ptrs + 5 * N)[None, :]
    rest = tl.load(upstream_ptrs + 7 * N)[None, :] if WIDE else 0.0
    if WIDE and HAS_LOGITS:
        log_p = above - (log2_above(lse, ref) + rest * LOG2E)
    else:
        log_p = log2_probability(x, lse, rest, WIDE)
    grad = d_logits(
        log_p, slope, tl.load(upstream_ptrs)[None, :], of_entropy, entropy, of_mean, of_class, WIDE,
        HAS_ENTROPY, HAS_SMOOTH,
    )  # fmt: skip
    if first_column + tile * BLOCK_V + BLOCK_V > V:
        grad = tl.where((column < V)[:, None], grad, 0.0)
    grad = grad.to(workspace_ptr.dtype.element_ty)
    if USE_TMA and not HAS_LOGITS:
        workspace.store([tile * BLOCK_V, block * BLOCK_N], grad)
    else:
        tl.store(workspace_ptr + place, grad)


@triton.jit(do_not_specialize=["num_blocks"])
def bad_ref_kernel(
    upstream_ptr,  # [7 or 8, num_blocks * TOKENS]: see `exact_logits_kernel`
    ref_ptr,  # [num_blocks * TOKENS]
    count_ptr,  # [1] int32
    bad_ref_ptr,  # [num_blocks + 1] int32: see `exact_logits_kernel`; out
    num_blocks,
    furthest,  # of a reference from lse, log2
    TOKENS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,  # fp32 inputs
):
    """Finds the blocks whose kept logits are not usable; NaN is not. One program has all blocks."""
    count = tl.load(count_ptr)
    lse_ptr = upstream_ptr + 5 * num_blocks * TOKENS
    any_bad = 0
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        token = block[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        counts = token < count
        lse = tl.load(lse_ptr + token, mask=counts, other=0.0)
        if WIDE:
            lse *= LOG2E
        ref = tl.load(ref_ptr + token, mask=counts, other=0.0)
        is_near = tl.abs(lse - ref) <= furthest
        bad_ref = tl.max(tl.where(counts & (is_near == 0), 1, 0), 1)
        tl.store(bad_ref_ptr + block, bad_ref, mask=block < num_blocks)
        any_bad = tl.maximum(any_bad, tl.max(bad_ref, 0))
    tl.store(bad_ref_ptr + num_blocks, any_bad)


# One binary for every chunk, and for every GPU of an architecture.
@triton.jit(do_not_specialize=["first_column", "num_columns", "cached_blocks"])
def exact_logits_kernel(
    hidden,  # [N, D] packed, a descriptor of BLOCK_N x BLOCK_D or a pointer
    weight,  # [V, D], of BLOCK_V x BLOCK_D
    workspace,  # [columns, N], of BLOCK_V x BLOCK_N: out
    workspace_ptr,
    logit_ptr,  # [columns, N] the same memory: logits minus `ref_ptr`, log2, if HAS_LOGITS
    ref_ptr,  # [N]
    bad_ref_ptr,  # [N / BLOCK_N + 1] int32: 1 where a block's kept logits are not usable; last, 1
    # if there is such a block
    bias_ptr,  # [V]
    class_weight_ptr,  # [V]
    count_ptr,  # [1] int32
    upstream_ptr,  # [7, N]: probability, target, entropy; entropy; mean; lse and target's z in
    # log2. If WIDE both are natural, and `Stats.lse_rest` is the eighth row
    first_column,
    num_columns,
    cached_blocks,
    N,
    V,
    D,
    stride_hn,
    stride_wv,
    scale,  # a number, or [N] of each token
    softcap,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,  # fp32 inputs
    HAS_LOGITS: tl.constexpr,  # the forward has left the logits in the workspace
    ONLY_BAD_REF: tl.constexpr,  # computes only the blocks that a launch with HAS_LOGITS leaves out
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    EVERY_BLOCK: tl.constexpr,  # blocks that don't count get d_logits of 0
):
    """Computes SDD: d_logits of a chunk, except the targets', for all token blocks that count.

    Programs that run at the same time share a few tiles of the weight, and no more token blocks
    than the cache holds.
    """
    if ONLY_BAD_REF:  # noqa: SIM102
        if tl.load(bad_ref_ptr + N // BLOCK_N) == 0:
            return
    num_blocks = tl.cdiv(tl.load(count_ptr), BLOCK_N)
    num_tiles = tl.cdiv(num_columns, BLOCK_V)
    at_once = tl.maximum(tl.cdiv(num_blocks, tl.maximum(tl.cdiv(num_blocks, cached_blocks), 1)), 1)
    per_group = num_tiles * at_once
    for task in range(tl.program_id(0), num_tiles * num_blocks, tl.num_programs(0)):
        first_block = task // per_group * at_once
        here = tl.minimum(num_blocks - first_block, at_once)
        block = first_block + task % per_group % here
        tile = task % per_group // here
        if HAS_LOGITS or ONLY_BAD_REF:
            if (tl.load(bad_ref_ptr + block) != 0) == ONLY_BAD_REF:
                logits_task(
                    block, tile, hidden, weight, workspace, workspace_ptr, logit_ptr, ref_ptr,
                    bias_ptr, class_weight_ptr, upstream_ptr, first_column, N, V, D, stride_hn,
                    stride_wv, scale, softcap, BLOCK_N, BLOCK_V, BLOCK_D, USE_TMA, PRECISION, WIDE,
                    HAS_LOGITS, HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY, HAS_SMOOTH, HAS_CLASS_WEIGHT,
                )  # fmt: skip
        else:
            logits_task(
                block, tile, hidden, weight, workspace, workspace_ptr, logit_ptr, ref_ptr, bias_ptr,
                class_weight_ptr, upstream_ptr, first_column, N, V, D, stride_hn, stride_wv, scale,
                softcap, BLOCK_N, BLOCK_V, BLOCK_D, USE_TMA, PRECISION, WIDE, HAS_LOGITS, HAS_BIAS,
                HAS_SOFTCAP, HAS_ENTROPY, HAS_SMOOTH, HAS_CLASS_WEIGHT,
            )  # fmt: skip
    if EVERY_BLOCK:
        others = N // BLOCK_N - num_blocks
        for task in range(tl.program_id(0), num_tiles * others, tl.num_programs(0)):
            local = task // others * BLOCK_V + tl.arange(0, BLOCK_V)
            token = (num_blocks + task % others) * BLOCK_N + tl.arange(0, BLOCK_N)
            place = workspace_ptr + local.to(tl.int64)[:, None] * N + token[None, :]
            nothing = tl.zeros((BLOCK_V, BLOCK_N), workspace_ptr.dtype.element_ty)
            tl.store(place, nothing, mask=(local < num_columns)[:, None])


@triton.jit(do_not_specialize=["num_rows", "first_column", "num_columns"])
def exact_targets_kernel(
    workspace_ptr,  # [columns, N]: out
    class_weight_ptr,  # [V]
    target_ptr,  # [N] int32, -1: none here
    upstream_ptr,  # [7 or 8, N]: see `exact_logits_kernel`
    rows_ptr,  # [N] int64
    late_ptr,  # [num_rows] fp32, in the order of `rows_ptr`: see `LateTargets`; out
    sums_ptr,  # [V] fp32: see `LateTargets`
    late_below,  # above a late target's log2 probability
    late_sum,  # a late id's |sum| is below this times the target's |term|
    num_rows,
    first_column,
    num_columns,
    N,
    scale,
    softcap,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    LEAVES_OUT: tl.constexpr,  # takes late targets' terms out of complete d_logits
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
):
    """Computes d_logits of the targets among the chunk's columns, from the forward's logits; with
    LEAVES_OUT those of late targets without their terms, which it stores apart."""
    token = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    target = tl.load(target_ptr + token)
    local = target - first_column
    here = (target >= 0) & (local >= 0) & (local < num_columns)
    upstream_ptrs = upstream_ptr + token
    z = tl.load(upstream_ptrs + 6 * N)
    slope = 1.0
    if HAS_SOFTCAP:
        slope = slope_at(z, scale_of(scale, token), softcap, WIDE)
    of_class = 1.0
    if HAS_CLASS_WEIGHT:
        of_class = tl.load(class_weight_ptr + target, mask=here, other=0.0)
    rest = tl.load(upstream_ptrs + 7 * N) if WIDE else 0.0
    log_p = log2_probability(z, tl.load(upstream_ptrs + 5 * N), rest, WIDE)
    probability = tl.load(upstream_ptrs)
    of_target = tl.load(upstream_ptrs + N)
    if WIDE and not LEAVES_OUT:
        probability -= of_target
    grad = d_logits(
        log_p, slope, probability, tl.load(upstream_ptrs + 2 * N), tl.load(upstream_ptrs + 3 * N),
        tl.load(upstream_ptrs + 4 * N), of_class, WIDE, HAS_ENTROPY, HAS_SMOOTH,
    )  # fmt: skip
    if LEAVES_OUT:
        row_sum = tl.abs(tl.load(sums_ptr + target, mask=here, other=0.0))
        here = here & (log_p < late_below) & (row_sum < late_sum * tl.abs(of_target))
        row = tl.load(rows_ptr + token)
        late = tl.where(here, -of_target * slope, 0.0)
        tl.store(late_ptr + row, late, mask=token < num_rows)
    elif WIDE:
        # p - 1 is exact near 1, where p times a large weight would be rounded first.
        grad += (exp2_in(log_p, WIDE) - 1.0) * of_target * slope
    else:
        grad -= of_target * slope
    place = workspace_ptr + local.to(tl.int64) * N + token
    tl.store(place, grad.to(workspace_ptr.dtype.element_ty), mask=here)
