"""After the forward: the targets' logits, and their columns kept whatever their mass."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import LOG2E, scale_across, scale_of, softcapped


@triton.jit
def target_products_kernel(
    packed_ptr,  # [N, stride_pn]: the tokens that count first; N a multiple of TOKENS
    weight_ptr,  # [V, D]
    bias_ptr,  # [V]
    target_ptr,  # [N] int32, -1: none here
    count_ptr,  # [1] int32
    product_ptr,  # [num_blocks, target TOKENS, token TOKENS] fp32: out, of blocks that count
    D,
    stride_pn,
    stride_wv,
    TOKENS: tl.constexpr,
    TARGETS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Multiplies TARGETS of a block's target columns by its tokens, in the forward's arithmetic, so
    that nll is a difference of two numbers that share their rounding."""
    block = tl.program_id(1)
    if block * TOKENS >= tl.load(count_ptr):
        return
    token = block * TOKENS + tl.arange(0, TOKENS)
    lane = tl.program_id(0) * TARGETS + tl.arange(0, TARGETS)
    target = tl.load(target_ptr + block * TOKENS + lane)
    column = tl.maximum(target, 0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    c_ptrs = weight_ptr + column[:, None] * stride_wv + dims[None, :]
    e_ptrs = packed_ptr + token.to(tl.int64)[:, None] * stride_pn + dims[None, :]
    x = tl.zeros((TARGETS, TOKENS), tl.float32)
    for k in range(0, D, BLOCK_D):
        inside = (k + dims < D)[None, :]
        c = tl.load(c_ptrs + k, mask=inside, other=0.0)
        e = tl.load(e_ptrs + k, mask=inside, other=0.0)
        x = tl.dot(c, e.T, x, input_precision=PRECISION)
    if HAS_BIAS:
        x += tl.load(bias_ptr + column).to(tl.float32)[:, None]
    row = block.to(tl.int64) * TOKENS + lane
    tl.store(product_ptr + row[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :], x)


@triton.jit
def taken_from(log_ptrs, mass, lse, mask):
    """Subtracts `mass` times exp(lse) from a sum whose logarithm is stored; in place."""
    whole = tl.load(log_ptrs)
    left = tl.maximum(tl.exp2((whole - lse) * LOG2E) - mass, 0.0)
    left = tl.where(mask, lse + tl.log2(left) / LOG2E, whole)
    tl.store(log_ptrs, left)
    return left


@triton.jit
def take_from_tail(
    entropy_ptrs,  # [TOKENS] of a tail's softmax, nats: in place
    sum_p2_ptrs,  # [TOKENS] log of the sum of its squared probabilities: in place
    before,  # [TOKENS] natural log of the tail's sum, and what is left of it
    left,
    lse,
    p,  # [TARGETS, TOKENS] what leaves the tail: exp(z - lse)
    V,
    counts,
    HAS_ENTROPY: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
):
    """Subtracts columns from the statistics of a tail. These columns' exact logits stand for the
    8-bit ones that are in the sums; the error of a small rest stays within what a softmax can
    have."""
    whole, rest = before - lse, left - lse
    has_rest = counts & (left > float("-inf"))
    if HAS_ENTROPY:
        entropy = tl.load(entropy_ptrs)
        sums = tl.exp(whole) * (whole - entropy) - tl.sum(tl.where(p > 0, p * tl.log(p), 0.0), 0)
        value = tl.clamp(rest - sums / tl.exp(rest), 0.0, tl.log(V.to(tl.float32)))
        tl.store(entropy_ptrs, tl.where(has_rest, value, tl.where(counts, 0.0, entropy)))
    if HAS_SQUARES:
        sum_p2 = tl.load(sum_p2_ptrs)
        squares = tl.exp(sum_p2 + 2.0 * whole) - tl.sum(p * p, 0)
        value = tl.log(tl.maximum(squares, 0.0)) - 2.0 * rest
        tl.store(sum_p2_ptrs, tl.where(has_rest, tl.minimum(value, 0.0), sum_p2))


@triton.jit(do_not_specialize=["N"])
def targets_kernel(
    product_ptr,  # [num_blocks, BLOCK, BLOCK]: see `target_products_kernel`
    target_ptr,  # [N_padded] int32, -1: none here
    lse_ptr,  # [N_padded] natural log, of this shard; 0 for tokens that don't count
    mass_ptr,  # [num_blocks, V]: made negative where a target's column was not kept; in place
    dropped_ptr,  # [N_padded] log of the dropped sum: reduced by these columns, in place
    unkept_ptr,  # [N_padded] log of the sum of exp(z) over dropped columns: too, if HAS_UNKEPT
    entropy_ptr,  # [N_padded] these two of 8-bit logits: see `take_from_tail`; in place
    sum_p2_ptr,
    full_ptr,  # [1] int32, if HAS_ENTROPY or HAS_SQUARES: 0: logits are 8-bit
    logit_ptr,  # [N_padded] z of the target, 0 without one: out
    count_ptr,  # [1] int32
    order_ptr,  # [N] int64: the caller's place of each token, if HAS_ORDER; else it is its own
    # In the caller's order:
    placed_lse_ptr,  # [N]: out
    placed_logit_ptr,  # [N]: out
    placed_dropped_ptr,  # [N]: out, if HAS_SCORE
    # And what the marks keep, if HAS_SCORE:
    seed_ptr,  # [1] int32 of the data, the bits of the first lse: out
    short_order_ptr,  # [N] int16 or int32, the order: out, if HAS_ORDER
    student_product_ptr,  # `product_ptr` of the student, if HAS_STUDENT
    N,
    V,
    scale,  # a number, or [N_padded] of each token
    softcap,
    student_softcap,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,  # fp32 inputs
    HAS_SOFTCAP: tl.constexpr,
    HAS_SCORE: tl.constexpr,
    HAS_UNKEPT: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_STUDENT: tl.constexpr,  # these are a teacher's: dropped sums have the student's softcap'
    STUDENT_HAS_SOFTCAP: tl.constexpr,
):
    """Computes a block's target logits, keeps the targets' columns, and writes each token's results
    in the caller's order."""
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    token = block * BLOCK + lane
    count = tl.load(count_ptr)
    lse = tl.load(lse_ptr + token)
    logit = tl.zeros((BLOCK,), tl.float32)
    dropped = tl.full((BLOCK,), float("-inf"), tl.float32)
    if block * BLOCK < count:
        target = tl.load(target_ptr + token)
        here = target >= 0
        row = block.to(tl.int64) * BLOCK + lane
        x = tl.load(product_ptr + row[:, None] * BLOCK + lane[None, :])
        if HAS_SOFTCAP:
            x, slope = softcapped(x, softcap, WIDE)
        is_diagonal = lane[:, None] == lane[None, :]
        logit = tl.where(
            here, tl.sum(tl.where(is_diagonal, x, 0.0), 0) * scale_of(scale, token), 0.0
        )
        if HAS_SCORE:
            column = tl.maximum(target, 0).to(tl.int64)
            mass_ptrs = mass_ptr + block.to(tl.int64) * V + column
            mass = tl.load(mass_ptrs, mask=here, other=-1.0).to(tl.float32)
            # Of several tokens with the same target, the first removes its column for all.
            across = tl.load(target_ptr + token)
            again = (target[:, None] == across[None, :]) & (lane[None, :] < lane[:, None])
            is_first = tl.max(again.to(tl.int32), 1) == 0
            is_new = here & is_first & (mass >= 0)
            finite = tl.where(lse == float("-inf"), 0.0, lse)
            log2_scale = scale_across(scale, token) * LOG2E
            p = tl.exp2(x * log2_scale - (finite * LOG2E)[None, :])
            p = tl.where(is_new[:, None], p, 0.0)
            before = tl.load((unkept_ptr if HAS_UNKEPT else dropped_ptr) + token)
            q = p
            if HAS_SOFTCAP and not HAS_STUDENT:
                q *= slope
            if STUDENT_HAS_SOFTCAP:
                x = tl.load(student_product_ptr + row[:, None] * BLOCK + lane[None, :])
                _, slope = softcapped(x, student_softcap, WIDE)
                q *= slope
            dropped = taken_from(dropped_ptr + token, tl.sum(q, 0), finite, token < count)
            left = dropped
            if HAS_UNKEPT:
                left = taken_from(unkept_ptr + token, tl.sum(p, 0), finite, token < count)
            if HAS_ENTROPY or HAS_SQUARES:
                take_from_tail(
                    entropy_ptr + token, sum_p2_ptr + token, before, left, finite, p, V,
                    (token < count) & (tl.load(full_ptr) == 0), HAS_ENTROPY, HAS_SQUARES,
                )  # fmt: skip
            mark = -tl.maximum(mass, 1e-30)
            tl.store(mass_ptrs, mark.to(mass_ptr.dtype.element_ty), mask=here & (mass >= 0))
    tl.store(logit_ptr + token, logit)
    real = token < N
    place = token
    if HAS_ORDER:
        place = tl.load(order_ptr + token, mask=real, other=0)
    tl.store(placed_lse_ptr + place, lse, mask=real)
    tl.store(placed_logit_ptr + place, logit, mask=real)
    if HAS_SCORE:
        tl.store(placed_dropped_ptr + place, dropped, mask=real)
        seed = lse.to(tl.int32, bitcast=True)
        tl.store(seed_ptr + place, seed, mask=real & (place == 0))
        if HAS_ORDER:
            short = place.to(short_order_ptr.dtype.element_ty)
            tl.store(short_order_ptr + token, short, mask=real)
