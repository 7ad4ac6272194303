"""A divergence of two heads: what scores a column, and, after their forward, the splits merged."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import (
    LEAST_NORMAL,
    LOG2E,
    LOG2E_FP32,
    exp2_of,
    fast_log2,
)


@triton.jit
def score_of(student, other, of_ratio, IS_REVERSE: tl.constexpr):
    """Returns by what a block keeps or draws a column: the student's mass of it and the teacher's;
    if IS_REVERSE the student's and `of_ratio` times the size of its log ratios' sum, log2. Masses
    of kept columns are negative, and so is their score."""
    if IS_REVERSE:
        other = tl.where(student < 0, 0.0, tl.abs(other) * of_ratio)
    return student + other


@triton.jit
def log_mixture(p, q, beta):
    """Returns log2(beta p + (1 - beta) q); where that is subnormal, of a number above it."""
    return fast_log2(tl.maximum(beta * p + (1.0 - beta) * q, LEAST_NORMAL))


@triton.jit
def over_mixture(x, y, p, q, beta, WIDE: tl.constexpr):
    """Returns log2(p / m) and log2(q / m) of the mixture m = beta p + (1 - beta) q.

    Args: x, y: log2 of p and q. If WIDE the mixture is relative to the larger one: log2(m) itself
        errs by the digits of a number far below 0, and the hardware's log2 by more.
    """
    if WIDE:
        top = tl.maximum(x, y)
        larger = tl.where(x > y, beta, 1.0 - beta)
        log_m = tl.log2(larger + (1.0 - larger) * tl.exp2(tl.minimum(x, y) - top))
        return (x - top) - log_m, (y - top) - log_m
    else:
        log_m = log_mixture(p, q, beta)
        return x - log_m, y - log_m


@triton.jit
def divergence_kernel(
    count_ptr,  # [1] int32
    shape_ptr,  # [3] int32: blocks and splits
    state_ptr,  # [4, size]: see `teacher_forward_kernel`
    teacher_ptr,  # [4, size]
    lse_ptr,  # [N] natural log, over all splits; float64 of fp32 inputs
    teacher_lse_ptr,  # [N]
    divergence_ptr,  # [N] nats: out, 0 for tokens that don't count
    difference_ptr,  # [N] see `Marks.of_dropped`: out, if IS_REVERSE
    N,
    size,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_REVERSE: tl.constexpr,
):
    """Computes KL(teacher || student) of the softmaxes over these columns alone; the other KL of
    models that have changed places. Where the student has no mass here, its lse counts as 0: see
    `Divergences.merge`."""
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    counts = tokens < tl.load(count_ptr)
    stride = tl.load(shape_ptr) * TOKENS
    lse = tl.load(lse_ptr + tokens, mask=counts, other=0.0) * LOG2E_FP32
    teacher_lse = tl.load(teacher_lse_ptr + tokens, mask=counts, other=0.0) * LOG2E_FP32
    # Beside another rank's columns these may underflow: the log ratios, relative to a finite
    # reference, do not. Ids that the student masks have made their sum infinite.
    lse = tl.where(lse == float("-inf"), 0.0, lse)
    total = tl.zeros((BLOCK_N,), tl.float32)
    of_dropped = total
    dropped_mass = total
    for split in range(tl.load(shape_ptr + 1)):
        at = split * stride + tokens
        mass = tl.load(teacher_ptr + at + size, mask=counts, other=0.0)
        shift = tl.load(teacher_ptr + at, mask=counts, other=0.0) - teacher_lse
        log_shares = shift - (tl.load(state_ptr + at, mask=counts, other=0.0) - lse)
        shift, log_shares = shift.to(tl.float32), log_shares.to(tl.float32)
        part = tl.load(teacher_ptr + at + 3 * size, mask=counts, other=0.0) + mass * log_shares
        # A split where the teacher has no mass has a reference of no meaning. 0 times infinity
        # would be NaN; NaN of hidden states stays.
        share = exp2_of(shift)
        total += tl.where((mass == 0) | (share == 0), 0.0, share * part)
        if IS_REVERSE:
            mass = tl.load(teacher_ptr + at + 2 * size, mask=counts, other=0.0)
            part = tl.load(state_ptr + at + 3 * size, mask=counts, other=0.0) + mass * log_shares
            of_dropped += tl.where((mass == 0) | (share == 0), 0.0, share * part)
            dropped_mass += tl.where(share == 0, 0.0, share * mass)
    if IS_REVERSE:
        mean = tl.where(dropped_mass > 0, of_dropped / dropped_mass, 0.0)
        tl.store(difference_ptr + tokens, (mean + teacher_lse - lse) / LOG2E, mask=tokens < N)
    tl.store(divergence_ptr + tokens, total / LOG2E, mask=tokens < N)


@triton.jit
def jsd_kernel(
    count_ptr,  # [1] int32
    shape_ptr,  # [3] int32: blocks and splits
    teacher_ptr,  # [4, size]: see `teacher_forward_kernel`, of Jensen-Shannon
    student_ptr,  # [4, size]
    teacher_lse_ptr,  # [N] log2, over all columns
    lse_ptr,  # [N]
    out_ptr,  # [3, N] nats: these columns' part of the divergence, and of the student's mean log
    # ratio to the mixture; `Marks.of_dropped`: out, 0 for tokens that don't count
    N,
    size,
    beta,
    TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Sums the splits, which are relative to the same references."""
    tokens = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    counts = tokens < tl.load(count_ptr)
    stride = tl.load(shape_ptr) * TOKENS
    lse = tl.load(lse_ptr + tokens, mask=counts, other=0.0)
    teacher_lse = tl.load(teacher_lse_ptr + tokens, mask=counts, other=0.0)
    # 0, or NaN where an lse is not finite: Hopper's kernel may clamp what follows from it.
    mean = (lse - lse) + (teacher_lse - teacher_lse)
    of_teacher = mean
    of_dropped = mean
    dropped_mass = mean
    for split in range(tl.load(shape_ptr + 1)):
        at = split * stride + tokens
        of_teacher += tl.load(teacher_ptr + at + size, mask=counts, other=0.0)
        of_dropped += tl.load(teacher_ptr + at + 3 * size, mask=counts, other=0.0)
        dropped_mass += tl.load(student_ptr + at + 2 * size, mask=counts, other=0.0)
        mean += tl.load(student_ptr + at + 3 * size, mask=counts, other=0.0)
    of_dropped = tl.where(dropped_mass > 0, of_dropped / dropped_mass, 0.0)
    inside = tokens < N
    divergence = beta * of_teacher + (1.0 - beta) * mean
    tl.store(out_ptr + tokens, divergence / LOG2E, mask=inside)
    tl.store(out_ptr + N + tokens, mean / LOG2E, mask=inside)
    tl.store(out_ptr + 2 * N + tokens, (of_dropped + lse - teacher_lse) / LOG2E, mask=inside)
