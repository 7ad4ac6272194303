"""Tiles of two models' logits: sums of each token, and the gradient by the student's logits.

A program has one token's columns, some at a time. Numbers are natural logarithms, as eager torch's.
A token's sums are fp32; float64 if a model has fp32 inputs.
"""

import triton
import triton.language as tl

FORWARD_KL = tl.constexpr(0)
REVERSE_KL = tl.constexpr(1)
JSD = tl.constexpr(2)
TVD = tl.constexpr(3)


@triton.jit
def finite(lse):
    return tl.where(lse == float("-inf"), 0.0, lse)


@triton.jit
def log_add(a, b):
    top = finite(tl.maximum(a, b))
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def log_probability(x, lse):
    """Computes x - lse in fp32, with the digits that lse has beyond it in float64."""
    if lse.dtype == tl.float64:
        near = lse.to(tl.float32)
        # An infinite lse has no rest.
        rest = tl.where(tl.abs(near) < float("inf"), lse - near, 0.0)
        return (x - near) - rest.to(tl.float32)
    else:
        return x - lse


@triton.jit
def mixture_terms(log_ratio, log_odds):
    """Computes log(m / p) - log(beta) and log(m / q) - log(1 - beta) of the mixture m = beta p +
    (1 - beta) q, finite for every finite log_ratio = log(q / p); log_odds is log((1 - beta) /
    beta)."""
    rest = log_ratio + log_odds
    shared = tl.log(1.0 + tl.exp(-tl.abs(rest)))
    return tl.maximum(rest, 0.0) + shared, tl.maximum(-rest, 0.0) + shared


@triton.jit
def at_temperature(x, over_temperature):
    """Computes a logit over the temperature, rounded. If a compiler fused the product with a
    difference, in some kernels only, probabilities would not sum to 1."""
    return tl.fma(x, over_temperature, 0.0)


@triton.jit
def load_columns(z_ptr, y_ptr, columns, num_columns, stride_z, stride_y):
    row, inside = tl.program_id(0).to(tl.int64), columns < num_columns
    z = tl.load(z_ptr + row * stride_z + columns, mask=inside, other=float("-inf"))
    y = tl.load(y_ptr + row * stride_y + columns, mask=inside, other=float("-inf"))
    return z, y


# Below every finite logit: what a lane has seen before its first column.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def raised(top, total, x):
    """Adds a column to each lane's sum of exponentials.

    Returns: the lane's largest logit so far, the sum relative to it, the new exponential, how much
        the largest rose, and what that multiplies older exponentials by.
    """
    new = tl.maximum(top, x)
    rise = new - top
    decay, exponential = tl.exp(-rise), tl.exp(x - new)
    return new, total * decay + exponential, exponential, rise, decay


@triton.jit
def moved(ratios, rise, total, decay):
    """Moves sums of exponentials times log ratios to the new largest logits. A sum of infinite
    ratios whose exponentials underflow is 0."""
    return tl.where(decay == 0, 0.0, decay * (ratios - rise * total))


@triton.jit
def over_lanes(top, total):
    """Merges the lanes' sums. Returns: the largest logit, the sum relative to it, and each lane's
    factor."""
    largest = tl.max(top, 0)
    factor = tl.exp(top - largest)
    return largest, tl.sum(total * factor, 0), factor


@triton.jit
def part_of_kl(part, near, far, whole_near, whole_far):
    """Computes a part's share of the merged KL: see `Divergences.merge`."""
    share = tl.exp(near - finite(whole_near)).to(tl.float32)
    ratio = part + (near - finite(far)) - (whole_near - finite(whole_far))
    return tl.where(share == 0, 0.0, share * ratio)


@triton.jit(do_not_specialize=["first", "stride_sums"])
def tile_sums_kernel(
    z_ptr,  # [n, columns] fp32, the student's logits at temperature 1
    y_ptr,  # [n, columns] fp32, the teacher's
    target_ptr,  # [n] int64, within the shard; below 0: of another shard
    sums_ptr,  # [3 or 5, n] over the tiles so far, rows as of `FirstPass`: in and out
    first,  # column of the shard; 0: there are no tiles before
    num_columns,
    stride_z,
    stride_y,
    stride_sums,
    over_temperature,  # 1 / temperature
    KIND: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a tile's sums to those of the tiles before it."""
    row, is_later = tl.program_id(0).to(tl.int64), first > 0
    student_ptr = sums_ptr + row
    teacher_ptr, kl_ptr = student_ptr + stride_sums, student_ptr + 2 * stride_sums
    lanes = tl.arange(0, BLOCK)
    nothing, lowest = tl.zeros((BLOCK,), tl.float32), tl.full((BLOCK,), LOWEST, tl.float32)
    # Each lane has sums of its own, so that the loop exchanges nothing between threads.
    top_a, sum_a, top_y, sum_y, top_z, sum_z = lowest, nothing, lowest, nothing, lowest, nothing
    ratios = nothing
    for start in range(0, num_columns, BLOCK):
        z, y = load_columns(z_ptr, y_ptr, start + lanes, num_columns, stride_z, stride_y)
        a, y = at_temperature(z, over_temperature), at_temperature(y, over_temperature)
        before_a, before_y = sum_a, sum_y
        top_a, sum_a, exp_a, rise_a, decay_a = raised(top_a, sum_a, a)
        top_y, sum_y, exp_y, rise_y, decay_y = raised(top_y, sum_y, y)
        if KIND == FORWARD_KL:
            ratio = (y - top_y) - (a - top_a)
            ratios = moved(ratios, rise_y - rise_a, before_y, decay_y)
            ratios += tl.where(exp_y == 0, 0.0, exp_y * ratio)
        elif KIND == REVERSE_KL:
            ratio = (a - top_a) - (y - top_y)
            ratios = moved(ratios, rise_a - rise_y, before_a, decay_a)
            ratios += tl.where(exp_a == 0, 0.0, exp_a * ratio)
        if HAS_TARGETS:
            top_z, sum_z, _, _, _ = raised(top_z, sum_z, z)
    largest_a, total_a, factor_a = over_lanes(top_a, sum_a)
    largest_y, total_y, factor_y = over_lanes(top_y, sum_y)
    whole = sums_ptr.dtype.element_ty
    total_a, total_y = total_a.to(whole), total_y.to(whole)
    student, teacher = largest_a + tl.log(total_a), largest_y + tl.log(total_y)
    student_before = tl.load(student_ptr, mask=is_later, other=float("-inf"))
    teacher_before = tl.load(teacher_ptr, mask=is_later, other=float("-inf"))
    all_student, all_teacher = log_add(student_before, student), log_add(teacher_before, teacher)
    if (KIND == FORWARD_KL) | (KIND == REVERSE_KL):
        # What a lane's largest logits are above those of all lanes, of the near model over the far.
        apart = (top_y - largest_y) - (top_a - largest_a)
        if KIND == FORWARD_KL:
            sums, factor, total, total_far = sum_y, factor_y, total_y, total_a
            of_near, of_far = teacher, student
            near_before, far_before = teacher_before, student_before
            all_near, all_far = all_teacher, all_student
        else:
            apart = -apart
            sums, factor, total, total_far = sum_a, factor_a, total_a, total_y
            of_near, of_far = student, teacher
            near_before, far_before = student_before, teacher_before
            all_near, all_far = all_student, all_teacher
        ratios = tl.where(sums * factor == 0, 0.0, factor * (ratios + sums * apart))
        part = tl.sum(ratios, 0) / total - tl.log(total) + finite(tl.log(total_far))
        part = tl.where(total == 0, 0.0, part)
        kl_before = tl.load(kl_ptr, mask=is_later, other=0.0)
        kl = part_of_kl(kl_before, near_before, far_before, all_near, all_far)
        kl += part_of_kl(part, of_near, of_far, all_near, all_far)
        tl.store(kl_ptr, kl)
    else:
        tl.store(kl_ptr, 0.0)
    tl.store(student_ptr, all_student)
    tl.store(teacher_ptr, all_teacher)
    if HAS_TARGETS:
        lse_ptr, target_logit_ptr = kl_ptr + stride_sums, kl_ptr + 2 * stride_sums
        largest, total_z, _ = over_lanes(top_z, sum_z)
        before = tl.load(lse_ptr, mask=is_later, other=float("-inf"))
        tl.store(lse_ptr, log_add(before, largest + tl.log(total_z.to(whole))))
        target = tl.load(target_ptr + row) - first
        is_here = (target >= 0) & (target < num_columns)
        logit = tl.load(z_ptr + row * stride_z + target, mask=is_here, other=0.0)
        tl.store(target_logit_ptr, logit, mask=is_here | (first == 0))


@triton.jit
def slope_of(log_q, log_p, beta, log_rest, log_odds, KIND: tl.constexpr):
    """Computes `Divergences.slopes`; log_rest is log(1 - beta)."""
    difference = log_q - log_p
    if KIND == REVERSE_KL:
        slope = difference
    elif KIND == TVD:
        slope = tl.where(difference > 0, 0.5, tl.where(difference < 0, -0.5, 0.0))
    else:
        _, over_q = mixture_terms(difference, log_odds)
        slope = (beta - 1.0) * (log_rest + over_q)
    return slope


@triton.jit(do_not_specialize=["first", "stride_terms"])
def tile_terms_kernel(
    z_ptr,
    y_ptr,
    student_ptr,  # [n] over all columns
    teacher_ptr,
    terms_ptr,  # [2, n] fp32 over the tiles so far: in and out
    first,  # column of the shard; 0: there are no tiles before
    num_columns,
    stride_z,
    stride_y,
    stride_terms,
    over_temperature,
    beta,
    log_beta,
    log_rest,
    log_odds,  # log((1 - beta) / beta)
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a tile's `Divergences.terms`."""
    row = tl.program_id(0).to(tl.int64)
    student, teacher = tl.load(student_ptr + row), tl.load(teacher_ptr + row)
    lanes = tl.arange(0, BLOCK)
    of_teacher, means = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        z, y = load_columns(z_ptr, y_ptr, start + lanes, num_columns, stride_z, stride_y)
        log_q = log_probability(at_temperature(z, over_temperature), student)
        log_p = log_probability(at_temperature(y, over_temperature), teacher)
        q, p = tl.exp(log_q), tl.exp(log_p)
        if KIND == TVD:
            slope = slope_of(log_q, log_p, beta, log_rest, log_odds, KIND)
            means += tl.where(q == 0, 0.0, q * slope)
            of_teacher += tl.abs(p - q)
        else:
            over_p, over_q = mixture_terms(log_q - log_p, log_odds)
            means -= tl.where(q == 0, 0.0, (1.0 - beta) * q * (log_rest + over_q))
            of_teacher -= tl.where(p == 0, 0.0, p * (log_beta + over_p))
    mean = tl.sum(means, 0)
    value = tl.sum(of_teacher, 0) / 2 if KIND == TVD else beta * tl.sum(of_teacher, 0) + mean
    value_ptr, mean_ptr = terms_ptr + row, terms_ptr + stride_terms + row
    tl.store(value_ptr, tl.load(value_ptr, mask=first > 0, other=0.0) + value)
    tl.store(mean_ptr, tl.load(mean_ptr, mask=first > 0, other=0.0) + mean)


@triton.jit
def tile_gradient_kernel(
    z_ptr,
    y_ptr,
    slope_ptr,  # [n, columns] fp32, of the student's softcap
    target_ptr,  # [n] int64
    student_ptr,  # [n] over all columns; so are the next three
    teacher_ptr,
    mean_ptr,
    lse_ptr,
    upstream_ptr,  # [n] by the divergence
    nll_ptr,  # [n] by the target's cross-entropy
    scale_ptr,  # [] what the gradient is divided by
    out_ptr,  # [n, columns]: out; its rows may begin where z's do
    first,
    num_columns,
    stride_z,
    stride_y,
    stride_slope,
    stride_out,
    over_temperature,
    logit_scale,
    beta,
    log_rest,
    log_odds,
    KIND: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    HAS_NLL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes the gradient by E . C + bias."""
    row = tl.program_id(0).to(tl.int64)
    student, teacher = tl.load(student_ptr + row), tl.load(teacher_ptr + row)
    mean = tl.load(mean_ptr + row)
    upstream = tl.load(upstream_ptr + row) * over_temperature
    factor, lse, target, scale = 0.0, 0.0, 0, logit_scale
    if HAS_NLL:
        factor, lse = tl.load(nll_ptr + row), tl.load(lse_ptr + row)
        target = (tl.load(target_ptr + row) - first).to(tl.int32)
    if HAS_SCALE:
        scale /= tl.load(scale_ptr)
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z, y = load_columns(z_ptr, y_ptr, columns, num_columns, stride_z, stride_y)
        log_q = log_probability(at_temperature(z, over_temperature), student)
        log_p = log_probability(at_temperature(y, over_temperature), teacher)
        q = tl.exp(log_q)
        if KIND == FORWARD_KL:
            grad = q - tl.exp(log_p)
        else:
            slope = slope_of(log_q, log_p, beta, log_rest, log_odds, KIND)
            grad = tl.where(q == 0, 0.0, q * (slope - mean))
        grad *= upstream
        if HAS_NLL:
            p = tl.exp(log_probability(z, lse))
            grad += p * factor - tl.where(columns == target, factor, 0.0)
        inside = columns < num_columns
        if HAS_SLOPE:
            grad *= tl.load(slope_ptr + row * stride_slope + columns, mask=inside, other=0.0)
        grad *= scale
        # `out` may be z's memory: no thread may write before all have read their columns.
        tl.debug_barrier()
        tl.store(
            out_ptr + row * stride_out + columns, grad.to(out_ptr.dtype.element_ty), mask=inside
        )
