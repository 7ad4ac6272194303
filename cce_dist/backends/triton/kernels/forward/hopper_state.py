"""The state of a token in one split of Hopper's forward: a reference, and sums relative to it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.forward import launches
from cce_dist.backends.triton.kernels.forward.hopper_sums import take_sum, whole_sum
from cce_dist.backends.triton.kernels.hopper_products import GROUPS

exp2_of = gluon.jit(numbers.exp2_of.fn)
expected_reference = gluon.jit(launches.expected_reference.fn)


@gluon.jit
def start_state(
    lower_ptrs,  # [BLOCK_N], a token a thread
    state_ptrs,  # of this split
    extras_ptrs,  # of this split, in the first field of [8, size]: see `add_extras`
    before_ptrs,  # of the first split, as the launch before left it
    split_offset,  # this split's place from there
    splits,
    stride,
    size,
    counts,
    launch,
    num_turns,
    HAS_SCORE: gl.constexpr,
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
    HAS_UNKEPT: gl.constexpr,
    OF_DROPPED: gl.constexpr,  # see `launches.raise_reference`
    HAS_LOGITS: gl.constexpr,
):
    """Starts a state as `launches.start_state`; returns the reference, from all splits' sums,
    [BLOCK_N]."""
    ref = gl.load(lower_ptrs)
    total = ref * 0.0
    dropped = total
    surplus = total
    unkept = total
    squares = total
    if (launch >= launches.FIRST) & (launch < launches.ALONE):
        expected = expected_reference(
            before_ptrs, split_offset, splits, stride, size, launch, num_turns, total
        )
        before = gl.load(before_ptrs + split_offset)
        # Other ranks' sums may have raised the lower bound.
        ref = gl.maximum(ref, expected)
        # As there: kept logits have one reference, and a split's own may be infinite.
        if not HAS_LOGITS:
            ref = gl.maximum(ref, before)
        shrink = exp2_of(before - ref)
        # PROBE's sums were for references alone.
        goes_on = (launch > launches.FIRST) & counts
        earlier = gl.load(before_ptrs + split_offset + size, mask=goes_on, other=0.0)
        total = shrink * earlier
        if HAS_SCORE:
            dropped = shrink * gl.load(
                before_ptrs + split_offset + 2 * size, mask=goes_on, other=0.0
            )
        if HAS_UNKEPT:
            ptrs = extras_ptrs + launches.UNKEPT * size
            unkept = shrink * gl.load(ptrs, mask=goes_on, other=0.0)
        if HAS_SURPLUS:
            surplus = gl.load(before_ptrs + split_offset + 3 * size, mask=goes_on, other=0.0)
            summed = total
            if OF_DROPPED:
                summed = unkept if HAS_UNKEPT else dropped
            surplus = surplus * shrink - (ref - before) * summed
            # See `launches.raise_reference`.
            surplus = gl.where(shrink > 0, surplus, 0.0)
        if HAS_SQUARES:
            ptrs = extras_ptrs + launches.SQUARES * size
            squares = shrink * shrink * gl.load(ptrs, mask=goes_on, other=0.0)
    gl.store(state_ptrs, ref)
    gl.store(state_ptrs + size, total)
    if HAS_SCORE:
        gl.store(state_ptrs + 2 * size, dropped)
    if HAS_SURPLUS:
        gl.store(state_ptrs + 3 * size, surplus)
    if HAS_UNKEPT:
        gl.store(extras_ptrs + launches.UNKEPT * size, unkept)
    if HAS_SQUARES:
        gl.store(extras_ptrs + launches.SQUARES * size, squares)
    return ref


@gluon.jit
def end_stretch(
    state_ptrs,  # [BLOCK_N], a token a thread
    extras_ptrs,  # [BLOCK_N] in the first field of [8, size]: see `add_extras`
    size,
    total,  # [4, 8, BLOCK_N] sums of a stretch of tiles: see `hopper.sum_tiles`
    dropped,  # unless HAS_DROPPED: it is in `sum_tiles` then
    sum_tiles,  # see `allocate_sums`
    group,
    HAS_SCORE: gl.constexpr,
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
    HAS_UNKEPT: gl.constexpr,
    HAS_DROPPED: gl.constexpr,
    OF_DROPPED: gl.constexpr,
):
    """Adds a stretch's sums to the state; returns its new reference, not below log2 of their
    total, [BLOCK_N]."""
    layout: gl.constexpr = state_ptrs.type.layout
    whole = gl.load(state_ptrs + size) + whole_sum(total, layout)
    gain = gl.maximum(gl.log2(whole), 0.0)
    shrink = exp2_of(-gain)
    next_ref = gl.load(state_ptrs) + gain
    gl.store(state_ptrs, next_ref)
    gl.store(state_ptrs + size, whole * shrink)
    summed = whole
    at = sum_tiles.shape[0] // GROUPS * (group + 1) - HAS_DROPPED
    if HAS_SCORE:
        of_dropped = gl.load(state_ptrs + 2 * size)
        if HAS_DROPPED:
            of_dropped += take_sum(sum_tiles.index(at), layout)
        else:
            of_dropped += whole_sum(dropped, layout)
        gl.store(state_ptrs + 2 * size, of_dropped * shrink)
        if OF_DROPPED:
            summed = of_dropped
    at -= HAS_UNKEPT
    if HAS_UNKEPT:
        unkept_ptrs = extras_ptrs + launches.UNKEPT * size
        summed = gl.load(unkept_ptrs) + take_sum(sum_tiles.index(at), layout)
        gl.store(unkept_ptrs, summed * shrink)
    at -= HAS_SQUARES
    if HAS_SQUARES:
        squares = take_sum(sum_tiles.index(at), layout)
        squares_ptrs = extras_ptrs + launches.SQUARES * size
        gl.store(squares_ptrs, (gl.load(squares_ptrs) + squares) * (shrink * shrink))
    if HAS_SURPLUS:
        surplus = take_sum(sum_tiles.index(at - 1), layout)
        excess = gl.load(state_ptrs + 3 * size) + surplus
        gl.store(state_ptrs + 3 * size, (excess - gain * summed) * shrink)
    return next_ref
