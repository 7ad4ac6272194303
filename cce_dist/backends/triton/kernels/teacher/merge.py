"""The message of a rank's sums of both models, the merge of all ranks' messages, and its check."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.teacher.tiles import FORWARD_KL, REVERSE_KL, part_of_kl
from cce_dist.backends.triton.kernels.tokens.merge import (
    HEADER,
    is_repeated,
    log_sum_of,
    store_header,
    sum_of,
    tiles_whole,
)

# Numbers of a message before the sums: the header's, and `FirstPass.full`.
BEFORE = tl.constexpr(HEADER.value + 1)


@triton.jit(do_not_specialize=["length"])
def pack_sums_kernel(
    sums_ptr,  # [length] fp32
    full_ptr,  # [1] fp32, if HAS_FULL; else 1
    out_ptr,  # [9 + length]: out
    length,
    length_high,  # fp32, as all of these: see `merge_header.digits_of`
    length_low,
    start_high,
    start_low,
    stop_high,
    stop_low,
    size_high,
    size_low,
    HAS_FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Packs the message of a rank. The header comes as arguments: a copy to the device would
    wait."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < length
    tl.store(out_ptr + BEFORE + at, tl.load(sums_ptr + at, mask=inside), mask=inside)
    if tl.program_id(0) == 0:
        full = 1.0
        if HAS_FULL:
            full = tl.load(full_ptr)
        store_header(
            out_ptr, length_high, length_low, start_high, start_low, stop_high, stop_low,
            size_high, size_low,
        )  # fmt: skip
        tl.store(out_ptr + HEADER, full)


@triton.jit(do_not_specialize=["ranks", "N", "stride"])
def merge_sums_kernel(
    parts_ptr,  # of each rank [3 or 5, N] fp32, rows as of `FirstPass`; if CHECKS its message
    out_ptr,  # [3 or 5, N]: out
    sound_ptr,  # [1] int32: 1 if the ranks' sums are those of one softmax: out, if CHECKS
    ranks,
    N,
    stride,  # numbers from one rank to the next
    KIND: tl.constexpr,  # of `kernels.teacher.tiles`
    HAS_TARGETS: tl.constexpr,
    CHECKS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,  # not below `ranks`
    DIGIT: tl.constexpr,
    LOOK_AT: tl.constexpr,
    LEAST_TOKENS: tl.constexpr,
    SAME: tl.constexpr,
    LEAST_SPREAD: tl.constexpr,
):
    """Merges the ranks' sums of BLOCK tokens, in the order of the ranks: all ranks get the same
    bits. One program more has no tokens and checks the messages as `merge_header.is_sound`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    if CHECKS:
        if tl.program_id(0) == tl.num_programs(0) - 1:
            length = (5 if HAS_TARGETS else 3) * N
            fine = tiles_whole(parts_ptr, ranks, length, stride, BLOCK_RANKS, DIGIT)
            if HAS_TARGETS:
                # `is_repeated` skips HEADER numbers before lse and target logits.
                before_ptr = parts_ptr + BEFORE + 3 * N - HEADER
                same = is_repeated(
                    before_ptr, N, ranks, N, stride, LOOK_AT, LEAST_TOKENS, SAME, LEAST_SPREAD
                )
                fine = fine & (same == 0)
            tl.store(sound_ptr, fine.to(tl.int32))
        parts_ptr += BEFORE
    parts_ptr += at
    student = log_sum_of(parts_ptr, ranks, stride, inside)
    teacher = log_sum_of(parts_ptr + N, ranks, stride, inside)
    kl = tl.zeros((BLOCK,), tl.float32)
    if (KIND == FORWARD_KL) | (KIND == REVERSE_KL):
        part_ptr = parts_ptr
        for _ in range(ranks):
            of_student = tl.load(part_ptr, mask=inside, other=0.0)
            of_teacher = tl.load(part_ptr + N, mask=inside, other=0.0)
            part = tl.load(part_ptr + 2 * N, mask=inside, other=0.0)
            if KIND == FORWARD_KL:
                kl += part_of_kl(part, of_teacher, of_student, teacher, student)
            else:
                kl += part_of_kl(part, of_student, of_teacher, student, teacher)
            part_ptr += stride
    out_ptr += at
    tl.store(out_ptr, student, mask=inside)
    tl.store(out_ptr + N, teacher, mask=inside)
    tl.store(out_ptr + 2 * N, kl, mask=inside)
    if HAS_TARGETS:
        lse = log_sum_of(parts_ptr + 3 * N, ranks, stride, inside)
        target_logit = sum_of(parts_ptr + 4 * N, ranks, stride, inside)
        tl.store(out_ptr + 3 * N, lse, mask=inside)
        tl.store(out_ptr + 4 * N, target_logit, mask=inside)
