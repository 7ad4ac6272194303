"""Sums over the columns and the tokens of a tile whose threads have tokens; a model's state."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.forward import launches
from cce_dist.backends.triton.kernels.forward.hopper_state import start_state
from cce_dist.backends.triton.kernels.forward.hopper_sums import split_tokens
from cce_dist.backends.triton.kernels.teacher import divergence

exp2_of = gluon.jit(numbers.exp2_of.fn)
score_of = gluon.jit(divergence.score_of.fn)
log_mixture = gluon.jit(divergence.log_mixture.fn)

# Parts of a tile's columns; twice as many where a column takes registers for a mixture too.
PARTS = gl.constexpr(4)


@gluon.jit
def lane_sums(x, TOKENS: gl.constexpr, COLUMNS: gl.constexpr):
    """Adds the columns that a thread of four warps holds: [TOKENS, COLUMNS] -> [TOKENS, 4]."""
    split = gl.reshape(x, (TOKENS, COLUMNS // 8, 4, 2))
    return gl.sum(gl.sum(split, 3), 1)


@gluon.jit
def with_lanes(sums, x, TOKENS: gl.constexpr, COLUMNS: gl.constexpr):
    """Adds `lane_sums` of x to sums."""
    new = lane_sums(x, TOKENS, COLUMNS)
    # The two layouts differ in name alone.
    return sums + gl.convert_layout(new, sums.type.layout, assert_trivial=True)


@gluon.jit
def sum_tokens(p, masses, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, NUM_PARTS: gl.constexpr):
    """Sums [TOKENS, COLUMNS] into `masses`, [COLUMNS] in shared memory. A column's tokens lie in 32
    threads: to exchange their sums between lanes takes longer than to move them to four threads by
    shared memory, a part at a time so that they fit."""
    few: gl.constexpr = COLUMNS // NUM_PARTS
    rows: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [1, 0])
    split = gl.reshape(p, (TOKENS // 64, 4, 2, 8, COLUMNS))
    sums = gl.reshape(gl.sum(gl.sum(split, 2), 0), (32, COLUMNS))
    parts = split_tokens(sums, 32, COLUMNS, NUM_PARTS)
    for i in gl.static_range(NUM_PARTS):
        masses.slice(i * few, few).store(gl.sum(gl.convert_layout(parts[i], rows), 0))


@gluon.jit
def masses_of(p, masses, TOKENS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Sums [TOKENS, COLUMNS] -> [COLUMNS] by `masses`: see `sum_tokens`."""
    sum_tokens(p, masses, TOKENS, COLUMNS, PARTS)
    return masses.load(LAYOUT)


@gluon.jit
def store_mass(mass, keeps, mass_ptrs, inside):
    """Stores a model's masses of columns, negative where they are kept."""
    mark = gl.where(keeps, -gl.maximum(mass, 1e-30), mass)
    gl.store(mass_ptrs, mark.to(mass_ptrs.dtype.element_ty), mask=inside)


@gluon.jit
def store_masses(
    mass, teacher_mass, threshold, of_ratio, mass_ptrs, inside, IS_REVERSE: gl.constexpr
):
    """Stores masses as `forward.store_masses`. Args: mass_ptrs: of both. Returns which columns are
    kept."""
    if IS_REVERSE:
        keeps = score_of(teacher_mass, mass, of_ratio, True) >= threshold
        gl.store(mass_ptrs[0], mass.to(mass_ptrs[0].dtype.element_ty), mask=inside)
    else:
        keeps = score_of(mass, teacher_mass, of_ratio, False) >= threshold
        store_mass(mass, keeps, mass_ptrs[0], inside)
    store_mass(teacher_mass, keeps, mass_ptrs[1], inside)
    return keeps


@gluon.jit
def end_model(state_ptrs, size, total, dropped):
    """Adds a stretch's `lane_sums` to a model's state. Returns its new reference, how much higher
    it is, and both sums so far relative to the reference before, [BLOCK_N] each."""
    layout: gl.constexpr = state_ptrs.type.layout
    whole = gl.load(state_ptrs + size) + gl.convert_layout(gl.sum(total, 1), layout)
    dropped = gl.load(state_ptrs + 2 * size) + gl.convert_layout(gl.sum(dropped, 1), layout)
    gain = gl.maximum(gl.log2(whole), 0.0)
    shrink = exp2_of(-gain)
    ref = gl.load(state_ptrs) + gain
    gl.store(state_ptrs, ref)
    gl.store(state_ptrs + size, whole * shrink)
    gl.store(state_ptrs + 2 * size, dropped * shrink)
    return ref, gain, whole, dropped


@gluon.jit
def logits_of_8_bits(products, factors, shifts, token_scale, token_shift, LAYOUT: gl.constexpr):
    """Returns logits of a part of a tile, relative to a reference, log2."""
    down: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    across: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    token_scale = gl.convert_layout(token_scale, down, assert_trivial=True)
    token_shift = gl.convert_layout(token_shift, down, assert_trivial=True)
    y = products.to(gl.float32) * factors.load(across)[None, :] * token_scale[:, None]
    return y + shifts.load(across)[None, :] + token_shift[:, None]


@gluon.jit
def start_both(
    lower_ptrs,
    teacher_lower_ptrs,
    state_ptr,
    teacher_ptr,
    at,  # of this launch's slot
    before,  # of the slot of the launch before
    state_offset,
    splits,
    stride,
    size,
    counts,
    launch,
    num_turns,
    IS_REVERSE: gl.constexpr,
):
    """Starts both models' states. Returns their references."""
    state_ptrs, teacher_ptrs = state_ptr + at + state_offset, teacher_ptr + at + state_offset
    ref = start_state(
        lower_ptrs, state_ptrs, state_ptrs, state_ptr + before, state_offset, splits, stride, size,
        counts, launch, num_turns, True, False, False, False, False, False,
    )  # fmt: skip
    teacher_ref = start_state(
        teacher_lower_ptrs, teacher_ptrs, teacher_ptrs, teacher_ptr + before, state_offset, splits,
        stride, size, counts, launch, num_turns, True, True, False, False, False, False,
    )  # fmt: skip
    # The log ratios are relative to both references; `start_state` knows the teacher's alone.
    so_far = gl.load(teacher_ptrs + 3 * size)
    of_dropped = so_far * 0.0
    if (launch >= launches.FIRST) & (launch < launches.ALONE):
        whole = gl.load(teacher_ptrs + size)
        goes_on = (launch > launches.FIRST) & counts & (whole > 0)
        before_ptrs = state_ptr + before + state_offset
        gain = ref - gl.load(before_ptrs, mask=goes_on, other=0.0)
        so_far += gl.where(goes_on, gain * whole, 0.0)
        if IS_REVERSE:
            teacher_before_ptrs = teacher_ptr + before + state_offset
            teacher_gain = teacher_ref - gl.load(teacher_before_ptrs, mask=goes_on, other=0.0)
            of_dropped = gl.load(before_ptrs + 3 * size, mask=goes_on, other=0.0)
            of_dropped *= exp2_of(gl.where(goes_on, -teacher_gain, 0.0))
            of_dropped += (gain - teacher_gain) * gl.load(teacher_ptrs + 2 * size)
            of_dropped = gl.where(goes_on, of_dropped, 0.0)
    gl.store(teacher_ptrs + 3 * size, so_far)
    if IS_REVERSE:
        gl.store(state_ptrs + 3 * size, of_dropped)
    return ref, teacher_ref


@gluon.jit
def end_ratios(ptrs, of_ratios, whole, gain, teacher_gain):
    """Adds a stretch's sum of log ratios to the sum at `ptrs`, relative to raised references. Args:
    whole: the teacher's exponentials that weigh them, summed, relative to the one before."""
    so_far = gl.load(ptrs) + gl.convert_layout(gl.sum(of_ratios, 1), ptrs.type.layout)
    so_far -= gl.where(whole > 0, (teacher_gain - gain) * whole, 0.0)
    # See `launches.raise_reference`.
    shrink = exp2_of(-teacher_gain)
    gl.store(ptrs, gl.where(shrink > 0, so_far * shrink, 0.0))


@gluon.jit
def add_to(ptrs, sums):
    """Adds `lane_sums` to a sum at `ptrs`."""
    gl.store(ptrs, gl.load(ptrs) + gl.convert_layout(gl.sum(sums, 1), ptrs.type.layout))


@gluon.jit
def end_both(
    state_ptrs,
    teacher_ptrs,
    size,
    sums,
    teacher_sums,
    of_ratios,
    IS_REVERSE: gl.constexpr,
    IS_JSD: gl.constexpr,
):
    """Adds a stretch's sums to both models' states. Args: sums: if IS_REVERSE the second one is of
    the log ratios of dropped columns. Returns their new references."""
    if IS_JSD:
        add_to(state_ptrs + size, sums[0])
        add_to(state_ptrs + 3 * size, sums[1])
        add_to(teacher_ptrs + size, teacher_sums[0])
        add_to(teacher_ptrs + 2 * size, teacher_sums[1])
        add_to(teacher_ptrs + 3 * size, of_ratios)
        return gl.load(state_ptrs), gl.load(teacher_ptrs)
    else:
        dropped = sums[1] * 0.0 if IS_REVERSE else sums[1]
        ref, gain, _, _ = end_model(state_ptrs, size, sums[0], dropped)
        teacher_ref, teacher_gain, whole, of_dropped = end_model(
            teacher_ptrs, size, teacher_sums[0], teacher_sums[1]
        )
        end_ratios(teacher_ptrs + 3 * size, of_ratios, whole, gain, teacher_gain)
        if IS_REVERSE:
            end_ratios(state_ptrs + 3 * size, sums[1], of_dropped, gain, teacher_gain)
        return ref, teacher_ref


@gluon.jit
def with_ratios(
    total,
    y,
    waiting,  # the first model's logits; if IS_REVERSE the log ratios then take their place
    beta,
    TOKENS: gl.constexpr,
    COLUMNS: gl.constexpr,
    HAS_MASKS: gl.constexpr,
    IS_REVERSE: gl.constexpr,
    IS_JSD: gl.constexpr,
):
    """Returns exp2(y), its product with the log ratio, and `total`; if IS_JSD the ratio is to the
    mixture, and the first model's exponentials times their own ratio are added to `total`."""
    p = gl.exp2(y)
    x = waiting.load(y.type.layout).to(gl.float32)
    if IS_JSD:
        q = gl.exp2(x)
        log_m = log_mixture(q, p, beta)
        of_first = q * (x - log_m)
        if HAS_MASKS:
            of_first = gl.where(q > 0, of_first, 0.0)
        total = with_lanes(total, of_first, TOKENS, COLUMNS)
        x = log_m
    ratio = y - x
    if HAS_MASKS:
        # 0 times -inf would be NaN.
        ratio = gl.where(p > 0, ratio, 0.0)
    if IS_REVERSE:
        waiting.store(ratio.to(gl.float16))
    return p, p * ratio, total


@gluon.jit
def with_dropped(
    dropped,
    teacher_dropped,
    exponentials,  # the teacher's, a part each
    waiting,  # the student's logits; if IS_REVERSE the log ratios
    drops,  # 1 of a column that is not kept, else 0
    TOKENS: gl.constexpr,
    COLUMNS: gl.constexpr,
    IS_REVERSE: gl.constexpr,
):
    """Adds the dropped columns of a tile to both models' sums; if IS_REVERSE their log ratios to
    the first one."""
    layout: gl.constexpr = exponentials[0].type.layout
    across: gl.constexpr = gl.SliceLayout(0, layout)
    for i in gl.static_range(len(exponentials)):
        are_dropped = drops.slice(i * COLUMNS, COLUMNS).load(across)[None, :]
        x = waiting.slice(i * COLUMNS, COLUMNS, 1).load(layout).to(gl.float32)
        p = exponentials[i] * are_dropped
        if IS_REVERSE:
            # A log ratio may be infinite, of a column that is kept.
            dropped = with_lanes(dropped, gl.where(p > 0, p * x, 0.0), TOKENS, COLUMNS)
        else:
            dropped = with_lanes(dropped, gl.exp2(x) * are_dropped, TOKENS, COLUMNS)
        teacher_dropped = with_lanes(teacher_dropped, p, TOKENS, COLUMNS)
    return dropped, teacher_dropped
