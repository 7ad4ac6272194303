"""Sums of a student's and a teacher's softmax in one pass over the vocabulary."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.forward.forward import add_to, dequantized, has_overflowed
from cce_dist.backends.triton.kernels.forward.launches import (
    ALONE,
    FIRST,
    SLOTS,
    end_turn,
    first_turn,
    place_of,
    raise_reference,
    slot_of,
    start_state,
    turns_before,
)
from cce_dist.backends.triton.kernels.numbers import (
    LOG2E,
    exp2_in,
    exp2_of,
    load_tile,
    log2_above,
    log2_probability,
    partial_sums,
    softcapped,
    whole_sum,
)
from cce_dist.backends.triton.kernels.teacher.divergence import over_mixture, score_of


@triton.jit
def logits_of(
    hidden,
    weight,
    bias_ptr,
    column_ptr,
    token_ptr,
    first_column,
    first_token,
    N,
    V,
    D,
    stride_hn,
    stride_wv,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
    IS_SCREENED: tl.constexpr,
):
    """Computes E . C + bias, [BLOCK_V, BLOCK_N] fp32."""
    x = tl.zeros((BLOCK_V, BLOCK_N), ACCUMULATOR)
    for k in range(0, tl.cdiv(D, BLOCK_D)):
        c = load_tile(weight, first_column, k * BLOCK_D, V, D, stride_wv, BLOCK_V, BLOCK_D, USE_TMA)
        e = load_tile(hidden, first_token, k * BLOCK_D, N, D, stride_hn, BLOCK_N, BLOCK_D, USE_TMA)
        x = tl.dot(c, e.T, x, input_precision=PRECISION, out_dtype=ACCUMULATOR)
    columns = first_column + tl.arange(0, BLOCK_V)
    if IS_SCREENED:
        tokens = first_token + tl.arange(0, BLOCK_N)
        x = dequantized(x, columns, V, column_ptr, token_ptr + tokens, N)
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)[:, None]
    return x


@triton.jit
def store_mass(mass, keeps, mass_ptrs, inside):
    """Stores a model's masses of columns, negative where they are kept."""
    tl.store(mass_ptrs, tl.where(keeps, -tl.maximum(mass, 1e-30), mass), mask=inside)


@triton.jit
def store_masses(
    mass,
    teacher_mass,
    threshold,
    of_ratio,  # of `score_of`
    mass_ptrs,
    teacher_mass_ptrs,
    inside,
    IS_REVERSE: tl.constexpr,
):
    """Stores both models' masses of a block's columns, negative where they are kept. If IS_REVERSE
    the first ones are sums of exp2(y - ref of y) times the log ratio, log2. Returns which columns
    are kept."""
    if IS_REVERSE:
        keeps = score_of(teacher_mass, mass, of_ratio, True) >= threshold
        tl.store(mass_ptrs, mass, mask=inside)
    else:
        keeps = score_of(mass, teacher_mass, of_ratio, False) >= threshold
        store_mass(mass, keeps, mass_ptrs, inside)
    store_mass(teacher_mass, keeps, teacher_mass_ptrs, inside)
    return keeps


@triton.jit
def start_ratios(
    state_ptrs,  # of this launch, as `start_state` has left them
    teacher_ptrs,
    before_ptrs,  # of the launch before
    teacher_before_ptrs,
    size,
    goes_on,  # [BLOCK_N] its sums are taken over
    IS_REVERSE: tl.constexpr,
):
    """Makes the sums of log ratios relative to both references: `start_state` knows one."""
    gain = tl.load(state_ptrs) - tl.load(before_ptrs, mask=goes_on, other=0.0)
    whole = tl.load(teacher_ptrs + size)
    add_to(teacher_ptrs + 3 * size, tl.where(goes_on, gain * whole, 0.0))
    if IS_REVERSE:
        # Without a sum PROBE was the launch before, whose sums were for references alone.
        goes_on = goes_on & (whole > 0)
        teacher_gain = tl.load(teacher_ptrs)
        teacher_gain -= tl.load(teacher_before_ptrs, mask=goes_on, other=0.0)
        of_dropped = tl.load(before_ptrs + 3 * size, mask=goes_on, other=0.0)
        of_dropped *= exp2_of(tl.where(goes_on, -teacher_gain, 0.0))
        of_dropped += (gain - teacher_gain) * tl.load(teacher_ptrs + 2 * size)
        add_to(state_ptrs + 3 * size, tl.where(goes_on, of_dropped, 0.0))


@triton.jit
def raise_both(total, dropped, ref, sums, state_ptrs, teacher_ptrs, size, IS_REVERSE: tl.constexpr):
    """Changes both models' references, which are not lower. Args: sums: the teacher's total,
    dropped and ref. Returns the sums in registers in the same order."""
    gain = ref - tl.load(state_ptrs)
    teacher_gain = sums[2] - tl.load(teacher_ptrs)
    of_dropped = 0.0
    if IS_REVERSE:
        mass = whole_sum(sums[1]) + tl.load(teacher_ptrs + 2 * size)
        of_dropped = tl.load(state_ptrs + 3 * size)
        of_dropped -= tl.where(mass > 0, (teacher_gain - gain) * mass, 0.0)
    total, dropped = raise_reference(
        total, dropped, ref, state_ptrs, state_ptrs, size, True, False, False, False,
        False,
    )  # fmt: skip
    teacher_total, teacher_dropped = raise_reference(
        sums[0], sums[1], sums[2], teacher_ptrs, teacher_ptrs, size, True, True, False,
        False, False,
    )  # fmt: skip
    if IS_REVERSE:
        shrink = exp2_of(-teacher_gain)
        tl.store(state_ptrs + 3 * size, tl.where(shrink > 0, shrink * of_dropped, 0.0))
        tl.debug_barrier()
    # The log ratios are relative to both references; `raise_reference` knows the teacher's alone.
    whole = whole_sum(teacher_total) + tl.load(teacher_ptrs + size)
    add_to(teacher_ptrs + 3 * size, tl.where(whole > 0, gain * whole, 0.0))
    return total, dropped, teacher_total, teacher_dropped


@triton.jit
def above_reference(x, ref, lse_ptrs, N, WIDE: tl.constexpr, IS_JSD: tl.constexpr):
    """Returns logits minus `ref`, log2. Args: x: in log2, or natural if WIDE; lse_ptrs: of
    `teacher_forward_kernel`'s lower_ptr, behind the references."""
    if not WIDE:
        return x - ref[None, :]
    elif IS_JSD:
        # With the backward's bits: a difference of the mean log ratio would be in all gradients.
        lse, rest = tl.load(lse_ptrs), tl.load(lse_ptrs + N)
        return log2_probability(x, lse[None, :], rest[None, :], WIDE)
    else:
        return log2_above(x, ref[None, :])


@triton.jit
def raised_to(x, ref, WIDE: tl.constexpr):
    """Returns the larger of `ref` and a tile's largest logits, log2. Args: x: natural if WIDE."""
    top = tl.max(x, 0)
    return tl.maximum(top * LOG2E if WIDE else top, ref)


@triton.jit
def reference_of(total, state_ptrs, size):
    """Returns log2 of a model's sum so far, not below its reference."""
    whole = whole_sum(total) + tl.load(state_ptrs + size)
    return tl.load(state_ptrs) + tl.maximum(tl.log2(whole), 0.0)


@triton.jit
def ratios_of(x, y, q, p, beta, WIDE: tl.constexpr, IS_JSD: tl.constexpr):
    """Returns the second model's exponentials p times their log ratios to the first model's, and
    these, q; if IS_JSD both times their log ratios to the mixture."""
    if IS_JSD:
        of_first, of_second = over_mixture(x, y, q, p, beta, WIDE)
        return tl.where(p > 0, p * of_second, 0.0), tl.where(q > 0, q * of_first, 0.0)
    else:
        return tl.where(p > 0, p * (y - x), 0.0), q


@triton.jit(do_not_specialize=["launch", "end_tile"])
def teacher_forward_kernel(
    hidden,  # [N, D] packed: the tokens that count first; N a multiple of BLOCK_N below
    weight,  # [V, D]
    bias_ptr,  # [V]
    teacher_hidden,  # [N, D_TEACHER] packed, the same tokens; of 8 bits if IS_SCREENED
    teacher_weight,  # [V, D_TEACHER]
    teacher_bias_ptr,  # [V]
    column_ptr,  # [2, V] fp32: of a teacher of 8 bits, see `forward_kernel`
    token_ptr,  # [2, N] fp32
    count_ptr,  # [1] int32: tokens that count
    shape_ptr,  # [3] int32: see `forward_kernel`
    lower_ptr,  # [N]; if IS_JSD and WIDE [3, N]: behind it the natural lse and its rest
    teacher_lower_ptr,  # the same of the teacher
    # [SLOTS, 4, size]: see `forward_kernel`; its last field is that of `teacher_ptr` over the
    # columns that are dropped, times softcap', if IS_REVERSE; if IS_JSD its second one is the first
    # model's KL to the mixture, log2: out
    state_ptr,
    teacher_ptr,  # [SLOTS, 4, size] the same of the teacher; last the sum of exp2(y - ref of y)
    # times (y - ref of y) - (z - ref of z), log2; if IS_JSD times that to the mixture: out
    mass_ptr,  # [num_blocks, V]: see `store_masses`; times softcap': out
    teacher_mass_ptr,  # [num_blocks, V]: out
    # [num_blocks, V] the teacher's masses without softcap', if IS_SCREENED and HAS_SOFTCAP: out
    plain_mass_ptr,
    launch,  # PROBE, FIRST to LAST; or ALONE
    end_tile,
    size,
    N,
    V,
    D,
    D_TEACHER,
    stride_hn,
    stride_wv,
    stride_teacher_hn,
    stride_teacher_wv,
    scale,
    softcap,
    teacher_scale,
    teacher_softcap,
    keep,
    beta,  # of Jensen-Shannon
    of_ratio,  # of `score_of`
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    USE_TMA: tl.constexpr,
    TEACHER_USE_TMA: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,  # a model has fp32 inputs
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TEACHER_HAS_BIAS: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    TEACHER_ACCUMULATOR: tl.constexpr,
    IS_SCREENED: tl.constexpr,
    IS_REVERSE: tl.constexpr,  # the models have changed places: the teacher comes first
    IS_JSD: tl.constexpr,  # IS_REVERSE too; references are log-sum-exps over all ranks' columns
    IS_ROBUST: tl.constexpr,
):
    """Sums a block of tokens over every `splits`-th vocabulary tile, for both models.

    Programs, tiles, launches and references are `forward_kernel`'s, for each model by itself. The
    masses of both models decide whether a column is kept. A dropped column counts softcap'(z) of
    the student's logit z for both: the gradient by E . C has this factor. Names are those of
    forward KL. docs/design/distillation.md.
    """
    num_blocks = tl.load(shape_ptr)
    splits = tl.load(shape_ptr + 1)
    if tl.program_id(0) >= num_blocks * splits:
        return
    block, split = place_of(tl.program_id(0), num_blocks, splits, tl.load(shape_ptr + 2))
    count = tl.load(count_ptr)
    rows = block * BLOCK_N + tl.arange(0, BLOCK_N)
    stride = num_blocks * BLOCK_N
    at = slot_of(launch) * 4 * size + split * stride + rows
    state_ptrs = state_ptr + at
    teacher_ptrs = teacher_ptr + at
    num_turns = tl.where(block * BLOCK_N < count, turns_before(end_tile, split, splits), 0)
    all_turns = num_turns
    turn = first_turn(launch, num_turns)
    num_turns = end_turn(launch, num_turns, splits)
    if IS_ROBUST:
        failed = has_overflowed(state_ptrs, state_ptrs, size, IS_REVERSE, False)
        failed = failed | has_overflowed(teacher_ptrs, teacher_ptrs, size, True, False)
        turn = 0
        num_turns = tl.where(tl.max(failed.to(tl.int32), 0) > 0, num_turns, 0)
        if num_turns == 0:
            return
    start_state(
        lower_ptr + rows, state_ptr + rows, state_ptrs, split * stride, splits, stride, size,
        rows < count, launch, all_turns, BLOCK_N, True, False, False, False, False, False,
        IS_ROBUST,
    )  # fmt: skip
    start_state(
        teacher_lower_ptr + rows, teacher_ptr + rows, teacher_ptrs, split * stride, splits, stride,
        size, rows < count, launch, all_turns, BLOCK_N, True, True, False, False, False, False,
        IS_ROBUST,
    )  # fmt: skip
    if not IS_ROBUST:
        goes_on = (launch > FIRST) & (launch < ALONE) & (rows < count)
        before = slot_of(launch + SLOTS - 1) * 4 * size + split * stride + rows
        start_ratios(
            state_ptrs, teacher_ptrs, state_ptr + before, teacher_ptr + before, size, goes_on,
            IS_REVERSE,
        )  # fmt: skip
    threshold = keep * (tl.minimum(count - block * BLOCK_N, BLOCK_N) / BLOCK_N)
    factor = scale if WIDE else scale * LOG2E
    teacher_factor = teacher_scale if WIDE else teacher_scale * LOG2E
    total = tl.zeros((8, 8, BLOCK_N), tl.float32)
    dropped = total
    teacher_total = total
    teacher_dropped = total
    mass_ptr += block.to(tl.int64) * V
    teacher_mass_ptr += block.to(tl.int64) * V
    start_turn = turn
    while turn < num_turns:
        first = turn
        turn = tl.minimum(turn + tl.maximum(turn - start_turn, 1), num_turns)
        for tile in range(split + first * splits, split + turn * splits, splits):
            first_column = tile * BLOCK_V
            columns = first_column + tl.arange(0, BLOCK_V)
            x = logits_of(
                hidden, weight, bias_ptr, column_ptr, token_ptr, first_column, block * BLOCK_N, N,
                V, D, stride_hn, stride_wv, BLOCK_N, BLOCK_V, BLOCK_D, USE_TMA, PRECISION, HAS_BIAS,
                tl.float32, False,
            )  # fmt: skip
            y = logits_of(
                teacher_hidden, teacher_weight, teacher_bias_ptr, column_ptr, token_ptr,
                first_column, block * BLOCK_N, N, V, D_TEACHER, stride_teacher_hn,
                stride_teacher_wv, BLOCK_N, BLOCK_V, BLOCK_D, TEACHER_USE_TMA, PRECISION,
                TEACHER_HAS_BIAS, TEACHER_ACCUMULATOR, IS_SCREENED,
            )  # fmt: skip
            slope = 1.0
            if HAS_SOFTCAP:
                x, of_x = softcapped(x, softcap, WIDE)
                slope = slope if IS_REVERSE else of_x
            if TEACHER_HAS_SOFTCAP:
                y, of_y = softcapped(y, teacher_softcap, WIDE)
                slope = of_y if IS_REVERSE else slope
            x = x * factor
            y = y * teacher_factor
            if first_column + BLOCK_V > V:
                x = tl.where((columns < V)[:, None], x, float("-inf"))
                y = tl.where((columns < V)[:, None], y, float("-inf"))
            ref = tl.load(state_ptrs)
            teacher_ref = tl.load(teacher_ptrs)
            if IS_ROBUST:
                ref = raised_to(x, ref, WIDE)
                teacher_ref = raised_to(y, teacher_ref, WIDE)
                total, dropped, teacher_total, teacher_dropped = raise_both(
                    total, dropped, ref, (teacher_total, teacher_dropped, teacher_ref), state_ptrs,
                    teacher_ptrs, size, IS_REVERSE,
                )  # fmt: skip
            x = above_reference(x, ref, lower_ptr + N + rows, N, WIDE, IS_JSD)
            y = above_reference(y, teacher_ref, teacher_lower_ptr + N + rows, N, WIDE, IS_JSD)
            q = exp2_in(x, WIDE)
            p = exp2_in(y, WIDE)
            ratios, of_first = ratios_of(x, y, q, p, beta, WIDE, IS_JSD)
            total += partial_sums(of_first, BLOCK_V, BLOCK_N)
            teacher_total += partial_sums(p, BLOCK_V, BLOCK_N)
            add_to(teacher_ptrs + 3 * size, tl.sum(ratios, 0))
            if IS_SCREENED and HAS_SOFTCAP:
                plain_ptrs = plain_mass_ptr + block.to(tl.int64) * V + columns
                tl.store(plain_ptrs, tl.sum(p, 1), mask=columns < V)
            q *= slope
            p *= slope
            keeps = store_masses(
                tl.sum(ratios * slope if IS_REVERSE else q, 1), tl.sum(p, 1), threshold,
                of_ratio, mass_ptr + columns, teacher_mass_ptr + columns, columns < V, IS_REVERSE,
            )  # fmt: skip
            drops = tl.where(keeps, 0.0, 1.0)[:, None]
            dropped += partial_sums(q * drops, BLOCK_V, BLOCK_N)
            teacher_dropped += partial_sums(p * drops, BLOCK_V, BLOCK_N)
            if IS_REVERSE:
                add_to(state_ptrs + 3 * size, tl.sum(ratios * (slope * drops), 0))
        if not IS_JSD:
            teacher_ref = reference_of(teacher_total, teacher_ptrs, size)
            total, dropped, teacher_total, teacher_dropped = raise_both(
                total, dropped, reference_of(total, state_ptrs, size),
                (teacher_total, teacher_dropped, teacher_ref), state_ptrs, teacher_ptrs, size,
                IS_REVERSE,
            )  # fmt: skip
    add_to(state_ptrs + size, whole_sum(total))
    add_to(state_ptrs + 2 * size, whole_sum(dropped))
    add_to(teacher_ptrs + size, whole_sum(teacher_total))
    add_to(teacher_ptrs + 2 * size, whole_sum(teacher_dropped))
