"""Tiles of two models' logits: sums of each token, and the gradient by the student's logits.

A program has one token's columns. Numbers are natural logarithms, as eager torch's.
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
def row_lse(x):
    top = finite(tl.max(x, 0))
    return top + tl.log(tl.sum(tl.exp(x - top), 0))


@triton.jit
def log_add(a, b):
    top = finite(tl.maximum(a, b))
    return top + tl.log(tl.exp(a - top) + tl.exp(b - top))


@triton.jit
def log_mixture(log_ratio, log_share, log_odds):
    """Computes log(share + (1 - share) exp(log_ratio)); log_odds is log((1 - share) / share)."""
    rest = log_ratio + log_odds
    return log_share + tl.maximum(rest, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(rest)))


@triton.jit
def load_row(z_ptr, y_ptr, num_columns, stride_z, stride_y, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < num_columns
    z = tl.load(z_ptr + row * stride_z + columns, mask=inside, other=float("-inf"))
    y = tl.load(y_ptr + row * stride_y + columns, mask=inside, other=float("-inf"))
    return row, columns, inside, z, y


@triton.jit
def part_of_kl(part, near, far, whole_near, whole_far):
    """Computes a part's share of the merged KL: see `Divergences.merge`."""
    share = tl.exp(near - finite(whole_near))
    ratio = part + (near - finite(far)) - (whole_near - finite(whole_far))
    return tl.where(share == 0, 0.0, share * ratio)


@triton.jit
def tile_sums_kernel(
    z_ptr,  # [n, columns] fp32, the student's logits at temperature 1
    y_ptr,  # [n, columns] fp32, the teacher's
    target_ptr,  # [n] int64, within the shard; below 0: of another shard
    student_ptr,  # [n] fp32: over the tiles so far, in and out; so are the next four
    teacher_ptr,  # [n]
    kl_ptr,  # [n]
    lse_ptr,  # [n] the student's at temperature 1
    target_logit_ptr,  # [n]
    first,  # column of the shard
    num_columns,
    stride_z,
    stride_y,
    over_temperature,  # 1 / temperature
    KIND: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a tile's sums to those of the tiles before it."""
    row, columns, _, z, y = load_row(z_ptr, y_ptr, num_columns, stride_z, stride_y, BLOCK)
    a, y = z * over_temperature, y * over_temperature
    student, teacher = row_lse(a), row_lse(y)
    student_before, teacher_before = tl.load(student_ptr + row), tl.load(teacher_ptr + row)
    all_student, all_teacher = log_add(student_before, student), log_add(teacher_before, teacher)
    if (KIND == FORWARD_KL) | (KIND == REVERSE_KL):
        if KIND == FORWARD_KL:
            near, far, of_near, of_far = y, a, teacher, student
            near_before, far_before = teacher_before, student_before
            all_near, all_far = all_teacher, all_student
        else:
            near, far, of_near, of_far = a, y, student, teacher
            near_before, far_before = student_before, teacher_before
            all_near, all_far = all_student, all_teacher
        weight = tl.exp(near - finite(of_near))
        ratio = near - far - (of_near - finite(of_far))
        part = tl.sum(tl.where(weight == 0, 0.0, weight * ratio), 0)
        kl = part_of_kl(tl.load(kl_ptr + row), near_before, far_before, all_near, all_far)
        kl += part_of_kl(part, of_near, of_far, all_near, all_far)
        tl.store(kl_ptr + row, kl)
    tl.store(student_ptr + row, all_student)
    tl.store(teacher_ptr + row, all_teacher)
    if HAS_TARGETS:
        tl.store(lse_ptr + row, log_add(tl.load(lse_ptr + row), row_lse(z)))
        is_target = columns == tl.load(target_ptr + row) - first
        logit = tl.sum(tl.where(is_target, z, 0.0), 0)
        is_here = tl.sum(is_target.to(tl.int32), 0) > 0
        tl.store(target_logit_ptr + row, logit, mask=is_here)


@triton.jit
def slope_of(log_q, log_p, beta, log_rest, log_odds, KIND: tl.constexpr):
    """Computes `Divergences.slopes`; log_rest is log(1 - beta)."""
    difference = log_q - log_p
    if KIND == REVERSE_KL:
        slope = difference
    elif KIND == TVD:
        slope = tl.where(difference > 0, 0.5, tl.where(difference < 0, -0.5, 0.0))
    else:
        slope = (beta - 1.0) * log_mixture(-difference, log_rest, -log_odds)
    return slope


@triton.jit
def tile_terms_kernel(
    z_ptr,
    y_ptr,
    student_ptr,  # [n] over all columns
    teacher_ptr,
    value_ptr,  # [n] fp32: in and out
    mean_ptr,
    num_columns,
    stride_z,
    stride_y,
    over_temperature,
    beta,
    log_beta,
    log_rest,
    log_odds,  # log((1 - beta) / beta)
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds a tile's `Divergences.terms`."""
    row, _, _, z, y = load_row(z_ptr, y_ptr, num_columns, stride_z, stride_y, BLOCK)
    log_q = z * over_temperature - tl.load(student_ptr + row)
    log_p = y * over_temperature - tl.load(teacher_ptr + row)
    q, p = tl.exp(log_q), tl.exp(log_p)
    slope = slope_of(log_q, log_p, beta, log_rest, log_odds, KIND)
    mean = tl.sum(tl.where(q == 0, 0.0, q * slope), 0)
    if KIND == TVD:
        value = tl.sum(tl.abs(p - q), 0) / 2
    else:
        log_ratio = -log_mixture(log_q - log_p, log_beta, log_odds)
        value = beta * tl.sum(tl.where(p == 0, 0.0, p * log_ratio), 0) + mean
    tl.store(value_ptr + row, tl.load(value_ptr + row) + value)
    tl.store(mean_ptr + row, tl.load(mean_ptr + row) + mean)


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
    out_ptr,  # [n, columns], contiguous: out
    first,
    num_columns,
    stride_z,
    stride_y,
    stride_slope,
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
    row, columns, inside, z, y = load_row(z_ptr, y_ptr, num_columns, stride_z, stride_y, BLOCK)
    log_q = z * over_temperature - tl.load(student_ptr + row)
    log_p = y * over_temperature - tl.load(teacher_ptr + row)
    q = tl.exp(log_q)
    if KIND == FORWARD_KL:
        grad = q - tl.exp(log_p)
    else:
        slope = slope_of(log_q, log_p, beta, log_rest, log_odds, KIND)
        grad = tl.where(q == 0, 0.0, q * (slope - tl.load(mean_ptr + row)))
    grad *= tl.load(upstream_ptr + row) * over_temperature
    if HAS_NLL:
        factor = tl.load(nll_ptr + row)
        grad += tl.exp(z - tl.load(lse_ptr + row)) * factor
        grad -= tl.where(columns == tl.load(target_ptr + row) - first, factor, 0.0)
    if HAS_SLOPE:
        grad *= tl.load(slope_ptr + row * stride_slope + columns, mask=inside, other=0.0)
    grad *= logit_scale
    if HAS_SCALE:
        grad /= tl.load(scale_ptr)
    at = row * num_columns + columns
    tl.store(out_ptr + at, grad.to(out_ptr.dtype.element_ty), mask=inside)
