"""The backward's inputs of each token, in the order in which blocks hold tokens."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import HIGHEST, LOG2E


@triton.jit
def largest_of(so_far, g_ptr, at, N):
    """Returns the larger of `so_far` and the finite sizes of g. NaN and infinity are skipped: they
    reach the gradient anyway."""
    size = tl.abs(tl.load(g_ptr + at, mask=at < N, other=0.0))
    return tl.maximum(so_far, tl.where(size < float("inf"), size, 0.0))


# Vectors that start at other alignments with other numbers of tokens: one binary for all.
VECTORS = [
    "lse_ptr",
    "target_logit_ptr",
    "nll_grad_ptr",
    "lse_grad_ptr",
    "entropy_grad_ptr",
    "smooth_grad_ptr",
    "entropy_ptr",
    "dropped_ptr",
    "teacher_lse_ptr",
    "difference_ptr",
]


@triton.jit
def power_of_largest(
    nll_ptr,  # [N] upstream gradients
    lse_ptr,
    entropy_ptr,
    smooth_ptr,
    N,
    scale,
    BLOCK: tl.constexpr,
    HAS_NLL: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
):
    """Returns a power of two close to the largest finite upstream gradient times `scale`. Without
    it a mean over tokens puts d_logits below fp16's smallest number."""
    largest = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        if HAS_NLL:
            largest = largest_of(largest, nll_ptr, at, N)
        if HAS_LSE:
            largest = largest_of(largest, lse_ptr, at, N)
        if HAS_ENTROPY:
            largest = largest_of(largest, entropy_ptr, at, N)
        if HAS_SMOOTH:
            largest = largest_of(largest, smooth_ptr, at, N)
    # Clamped to normal numbers, whose exponent bits alone are that power of two.
    size = tl.minimum(tl.maximum(largest * scale, 7.9e-31), 1e38)
    power = (tl.max(size, 0).to(tl.int32, bitcast=True) >> 23) << 23
    return power.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=VECTORS)
def upstream_kernel(
    rows_ptr,  # [N] int64: row of each token in hidden
    local_target_ptr,  # [N] int32 or int64, -1: none here
    order_ptr,  # [N]: token i of the blocks is token order[i] of the vectors above and below
    count_ptr,  # [1] int32
    lse_ptr,  # [N]; behind it [N] `Stats.lse_rest` if WIDE
    target_logit_ptr,  # [N]
    nll_grad_ptr,  # [N] upstream gradients
    lse_grad_ptr,
    entropy_grad_ptr,
    smooth_grad_ptr,
    entropy_ptr,  # [N] nats
    dropped_ptr,  # [N] log of the sum over columns not kept: see `Marks.log_dropped`
    teacher_lse_ptr,  # [N] of the model that the entropy is relative to
    difference_ptr,  # [N] see `Marks.of_dropped`
    grad_scale_ptr,  # [1] the power of two by which gradients below are divided: out
    upstream_ptr,  # [7 or 8, N_padded]: see `exact_logits_kernel`: out
    row_ptr,  # [N_padded] int64: row of each token: out
    read_row_ptr,  # [N_padded] int64: as above, but never an ignored token's row: out
    target_ptr,  # [N_padded] int32: out
    tail_mass_ptr,  # [N_padded] upstream of the probabilities times the dropped mass: out
    entropy_tail_ptr,  # [2, N_padded]: see `TokenUpstream`: out
    mean_ptr,  # [N_padded] upstream of the mean logit: out
    N,
    scale,
    mean_scale,  # scale over the size of the vocabulary
    largest_scale,  # of `power_of_largest`
    TOKENS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_NLL: tl.constexpr,
    HAS_LSE: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,  # the mean of softcapped logits: adds to every element of d_logits
    HAS_MEAN: tl.constexpr,  # the mean of linear logits: added separately
    HAS_TAIL: tl.constexpr,
    HAS_TEACHER: tl.constexpr,  # the entropy is minus a KL
    BY_BLOCK: tl.constexpr,  # a block's tokens have chosen its columns
    DIVIDES: tl.constexpr,  # by `power_of_largest`; else by 1
    WIDE: tl.constexpr,  # fp32 inputs
):
    """Writes the upstream gradients of a block of tokens. Tokens that don't count get gradients 0,
    and an lse above any logit."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    size = tl.num_programs(0) * TOKENS
    inside = token < N
    count = tl.load(count_ptr)
    counts = token < count
    place = token
    first = 0
    if HAS_ORDER:
        place = tl.load(order_ptr + token, mask=inside, other=0).to(tl.int32)
        first = tl.load(order_ptr).to(tl.int32)
    grad_scale = 1.0
    if DIVIDES:
        # Each program finds it: the gradients are few, and a launch costs as much as reading them.
        grad_scale = power_of_largest(
            nll_grad_ptr, lse_grad_ptr, entropy_grad_ptr, smooth_grad_ptr, N, largest_scale, 1024,
            HAS_NLL, HAS_LSE, HAS_ENTROPY, HAS_SMOOTH,
        )  # fmt: skip
    tl.store(grad_scale_ptr, grad_scale, mask=tl.program_id(0) == 0)
    zero = tl.zeros((TOKENS,), tl.float32)
    probability = zero
    of_target = zero
    of_entropy = zero
    entropy = zero
    of_mean = zero
    if HAS_NLL:
        of_target = tl.load(nll_grad_ptr + place, mask=counts, other=0.0)
        probability += of_target
    if HAS_LSE:
        probability += tl.load(lse_grad_ptr + place, mask=counts, other=0.0)
    if HAS_ENTROPY:
        of_entropy = tl.load(entropy_grad_ptr + place, mask=counts, other=0.0)
        entropy = tl.load(entropy_ptr + place, mask=counts, other=0.0)
    if HAS_SMOOTH or HAS_MEAN:
        of_mean = tl.load(smooth_grad_ptr + place, mask=counts, other=0.0) * mean_scale
    lse = tl.load(lse_ptr + place, mask=counts, other=0.0)
    logit = tl.load(target_logit_ptr + place, mask=counts, other=0.0)
    if BY_BLOCK:
        is_finite = tl.abs(lse) < float("inf")
        if HAS_TEACHER:
            other_lse = tl.load(teacher_lse_ptr + place, mask=counts, other=0.0)
            is_finite &= tl.abs(other_lse) < float("inf")
        # A block's masses are NaN with one token's, and its tail is not known. The gradients of the
        # other tokens, too, become NaN, and not finite and wrong.
        all_finite = tl.min(is_finite.to(tl.int32), 0)
        probability = tl.where(counts & (all_finite == 0), float("nan"), probability)
    # A division by a power of two is exact; the hardware's reciprocal need not be.
    factor = tl.div_rn(zero + scale, zero + grad_scale)
    out = upstream_ptr + token
    tl.store(out, probability * factor)
    tl.store(out + size, of_target * factor)
    tl.store(out + 2 * size, of_entropy * factor)
    tl.store(out + 3 * size, entropy)
    tl.store(out + 4 * size, tl.div_rn(of_mean, zero + grad_scale) if HAS_SMOOTH else zero)
    tl.store(out + 5 * size, tl.where(counts, lse if WIDE else lse * LOG2E, HIGHEST))
    tl.store(out + 6 * size, logit if WIDE else logit * LOG2E)
    if WIDE:
        rest = tl.load(lse_ptr + N + place, mask=counts, other=0.0)
        tl.store(out + 7 * size, rest)
    row = tl.load(rows_ptr + place, mask=inside, other=0).to(tl.int64)
    tl.store(row_ptr + token, row)
    # An ignored row may hold NaN, which 0 times does not remove.
    tl.store(read_row_ptr + token, tl.where(counts, row, tl.load(rows_ptr + first).to(tl.int64)))
    target = tl.load(local_target_ptr + place, mask=counts, other=-1).to(tl.int32)
    tl.store(target_ptr + token, target)
    if HAS_TAIL:
        log_dropped = tl.load(dropped_ptr + place, mask=counts, other=float("-inf"))
        if WIDE:
            log_dropped -= rest
        dropped = tl.exp2((log_dropped - lse) * LOG2E)
        tail_mass = probability * scale * dropped
        if HAS_ENTROPY:
            of_spread = -of_entropy * scale * dropped
            if HAS_TEACHER:
                difference = tl.load(difference_ptr + place, mask=counts, other=0.0)
                teacher_lse = tl.load(teacher_lse_ptr + place, mask=counts, other=0.0)
                tail_mass += of_spread * (difference - (lse - teacher_lse) + entropy)
                known = 0.0
            else:
                known = tl.where(dropped > 0, log_dropped - lse, 0.0) + entropy
            tl.store(entropy_tail_ptr + token, tail_mass + of_spread * known)
            tl.store(entropy_tail_ptr + size + token, of_spread)
        tl.store(tail_mass_ptr + token, tail_mass)
    if HAS_MEAN:
        tl.store(mean_ptr + token, of_mean)
