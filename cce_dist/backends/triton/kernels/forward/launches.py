"""The launches of the forward, and a token's state from one of them to the next."""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.numbers import HIGHEST, LOWEST, exp2_of, whole_sum

# The launches of `forward_kernel`, in order: PROBE, FIRST to LAST, and, if logits are kept, two
# that keep their logits. ALONE does the work of all of them, and writes LAST's slot. AFTER_PROBE
# keeps all logits, and writes FIRST's. SEGMENTS is ALONE with one slot, number 0: see `slot_of`.
PROBE = tl.constexpr(0)
FIRST = tl.constexpr(1)
LAST = tl.constexpr(4)
AFTER_PROBE = tl.constexpr(11)
ALONE = tl.constexpr(14)
SEGMENTS = tl.constexpr(15)
# States in memory: those of PROBE to LAST, which `shares.py` reads.
SLOTS = tl.constexpr(5)
# Fields of `add_extras` that are sums relative to a state's reference.
UNKEPT = tl.constexpr(5)
SQUARES = tl.constexpr(7)
# Splits whose sums a program reads at a time.
READ_AT_ONCE = tl.constexpr(8)


@triton.jit
def raise_reference(
    total,
    dropped,
    ref,
    state_ptrs,  # [BLOCK_N] in the first field of [4, size]: see `forward_kernel`
    extras_ptrs,  # [BLOCK_N] in the first field of [8, size]: see `add_extras`
    size,
    HAS_SCORE: tl.constexpr,
    HAS_SURPLUS: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_UNKEPT: tl.constexpr,
    OF_DROPPED: tl.constexpr,  # the surplus is over dropped columns, not over all
):
    """Changes the sums' reference from the state's to `ref`. It is not lower, but where kept logits
    follow launches that expected more: there it is some bits lower."""
    gain = ref - tl.load(state_ptrs)
    shrink = exp2_of(-gain)
    earlier = tl.load(state_ptrs + size)
    earlier_dropped = 0.0
    surplus = 0.0
    unkept = 0.0
    squares = 0.0
    if HAS_SCORE:
        earlier_dropped = tl.load(state_ptrs + 2 * size)
    if HAS_UNKEPT:
        unkept = tl.load(extras_ptrs + UNKEPT * size)
    if HAS_SURPLUS:
        if not OF_DROPPED:
            before = whole_sum(total) + earlier
        elif HAS_UNKEPT:
            before = unkept
        else:
            before = whole_sum(dropped) + earlier_dropped
        # At first the sum is 0 and the gain infinite, whose product would be NaN.
        surplus = tl.load(state_ptrs + 3 * size) - tl.where(before > 0, gain * before, 0.0)
    if HAS_SQUARES:
        squares = tl.load(extras_ptrs + SQUARES * size)
    # Two threads may hold a token: both have to read before one of them writes.
    tl.debug_barrier()
    tl.store(state_ptrs, ref)
    tl.store(state_ptrs + size, shrink * earlier)
    if HAS_SCORE:
        tl.store(state_ptrs + 2 * size, shrink * earlier_dropped)
    if HAS_SURPLUS:
        # A teacher's is infinite where it has mass that its student masks: 0 times it is NaN.
        tl.store(state_ptrs + 3 * size, tl.where(shrink > 0, shrink * surplus, 0.0))
    if HAS_UNKEPT:
        tl.store(extras_ptrs + UNKEPT * size, shrink * unkept)
    if HAS_SQUARES:
        tl.store(extras_ptrs + SQUARES * size, shrink * shrink * squares)
    tl.debug_barrier()
    return total * shrink[None, None, :], dropped * shrink[None, None, :]


@triton.jit
def fields_at(ptrs, size, FIELDS: tl.constexpr):
    """Loads the first FIELDS rows of a matrix, at ptrs in the first one."""
    values = ()
    for i in tl.static_range(FIELDS):
        values = values + (tl.load(ptrs + i * size),)  # noqa: RUF005
    tl.debug_barrier()
    return values


@triton.jit
def put_back(ptrs, size, values, where, FIELDS: tl.constexpr):
    """Stores the values of `fields_at` once more, of some tokens."""
    tl.debug_barrier()
    for i in tl.static_range(FIELDS):
        tl.store(ptrs + i * size, values[i], mask=where)


@triton.jit
def slot_of(launch):
    """Returns the slot of the state that a launch writes; it reads its predecessor's."""
    return launch % SLOTS


@triton.jit
def place_of(program, num_blocks, splits, at_once):
    """Returns a program's token block and split: `at_once` blocks share a split's tiles."""
    first_block = program // (at_once * splits) * at_once
    inner = program % (at_once * splits)
    at_once = tl.minimum(at_once, num_blocks - first_block)
    return first_block + inner % at_once, inner // at_once


@triton.jit
def segment_of(split, splits, V, SEGMENT: tl.constexpr):
    """Returns the first column of the split's segment and the end of its columns, then the split's
    number in the segment and the segment's splits. SEGMENT: columns of one; 0: there is but one."""
    if SEGMENT == 0:
        return V - V, V, split, splits
    else:
        per_segment = splits // tl.cdiv(V, SEGMENT)
        begin = split // per_segment * SEGMENT
        return begin, tl.minimum(begin + SEGMENT, V), split % per_segment, per_segment


@triton.jit
def turns_before(tile, split, splits):
    """Returns the number of a split's tiles before a tile."""
    return tl.maximum(tl.cdiv(tile - split, splits), 0)


@triton.jit
def turns_until(launch, num_turns):
    """Returns the turn where a launch ends: each of FIRST to LAST ends four times as far, and at
    least one turn further while there are any. Two launches that end at one turn would tell
    `expected_reference` nothing."""
    shift = tl.minimum(launch - LAST, 0) * -2
    turns = (num_turns + (1 << shift) - 1) >> shift
    return tl.maximum(turns, tl.minimum(launch, num_turns))


@triton.jit
def first_turn(launch, num_turns):
    """Returns a launch's first turn: the turn where the launch before ends."""
    goes_on = (launch > FIRST) & (launch <= LAST)
    return tl.where(goes_on, turns_until(launch - 1, num_turns), 0)


@triton.jit
def end_turn(launch, num_turns, splits):
    """Returns the turn where a launch ends. PROBE computes one tile of each split; none if there is
    only one split, which has no others to learn from."""
    probed = tl.minimum(tl.minimum(num_turns, splits - 1), 1)
    return tl.where(launch == PROBE, probed, turns_until(launch, num_turns))


@triton.jit
def merged_reference(
    before_ptrs,  # [BLOCK_N] in the first field of the first split
    splits,
    stride,
    size,
    nothing,  # [BLOCK_N] zeros: Gluon's tensors have a layout, which these tell
):
    """Returns [BLOCK_N] log2 of the sums of all splits; LOWEST where there is no sum."""
    top = nothing + LOWEST
    total = nothing
    for first in range(0, splits, READ_AT_ONCE):
        refs = ()
        parts = ()
        # Few tokens have hundreds of splits: one read at a time would wait for each.
        for i in tl.static_range(READ_AT_ONCE):
            ptrs = before_ptrs + (first + i) * stride
            refs = refs + (tl.load(ptrs, mask=first + i < splits, other=LOWEST),)  # noqa: RUF005
            parts = parts + (tl.load(ptrs + size, mask=first + i < splits, other=0.0),)  # noqa: RUF005
        higher = top
        for i in tl.static_range(READ_AT_ONCE):
            # An overflowed sum is computed again at the end, and skipped here.
            counts = (parts[i] > 0) & (parts[i] < float("inf"))
            higher = tl.maximum(higher, tl.where(counts, refs[i], LOWEST))
        total = total * exp2_of(top - higher)
        for i in tl.static_range(READ_AT_ONCE):
            counts = (parts[i] > 0) & (parts[i] < float("inf"))
            total += tl.where(counts, parts[i] * exp2_of(refs[i] - higher), 0.0)
        top = higher
    return tl.where(total > 0, top + tl.log2(total), LOWEST)


@triton.jit
def expected_reference(
    before_ptrs,  # [BLOCK_N] in the first field of the first split, after the launch before
    split_offset,  # of this split, from the first
    splits,
    stride,
    size,
    launch,
    num_turns,  # of a split, over the whole vocabulary
    nothing,  # [BLOCK_N] zeros
):
    """Returns log2 of a token's sum so far, [BLOCK_N]; in LAST and the launch before it log2 of the
    sum that it is expected to have at the end. docs/design/filter.md#column-masses."""
    merged = merged_reference(before_ptrs, splits, stride, size, nothing)
    # The first split leaves the sum behind those of the splits, for later launches.
    merged_ptrs = before_ptrs + splits * stride
    tl.store(merged_ptrs, merged, mask=(nothing == 0) & (split_offset == 0))
    num_earlier = tl.where(launch <= LAST, tl.maximum(launch - LAST + 2, 0), 0)
    # Their slots stand before the slot of the launch before.
    before = tl.load(merged_ptrs - 4 * size, mask=nothing + num_earlier > 0, other=LOWEST)
    earliest = tl.load(merged_ptrs - 8 * size, mask=nothing + num_earlier > 1, other=LOWEST)
    growth = expected_growth(
        exp2_of(earliest - merged),
        exp2_of(before - merged),
        tl.where(num_earlier == 2, turns_until(launch - 3, num_turns), 0),
        turns_until(launch - 2, num_turns),
        turns_until(launch - 1, num_turns),
        turns_until(launch, num_turns),
        num_turns,
    )
    return merged + tl.where(num_earlier > 0, tl.log2(growth), 0.0)


@triton.jit
def expected_growth(earliest, before, n0, n1, n2, n3, n4):
    """Returns the sum after n4 turns over that after n2, from the sums after n0 and n1 turns, which
    are shares of it. A stage that ends at n3, and one that ends at n4, lie ahead.

    A turn of the next stage adds what one of the last stage did, times the ratio of the last stage
    to the one before. Neither ratio nor rate may grow: a frequent column in the last stage says
    nothing of those ahead.
    """
    known = (n0 < n1) & (n1 < n2) & (n2 < n4)
    rate = tl.maximum(before - earliest, 0.0) / tl.maximum(n1 - n0, 1)
    next_rate = tl.maximum(1.0 - before, 0.0) / tl.maximum(n2 - n1, 1)
    decay = tl.minimum(next_rate / tl.maximum(rate, 1e-30), 1.0)
    ahead = tl.minimum(rate, next_rate) * decay * ((n3 - n2) + decay * (n4 - n3))
    return tl.where(known, 1.0 + ahead, 1.0)


@triton.jit
def start_state(
    lower_ptrs,  # [BLOCK_N]
    first_ptrs,  # [BLOCK_N] in the first field of the first split of the first slot
    extras_ptrs,  # [BLOCK_N] of this split, in the first field of [8, size]: see `add_extras`
    split_offset,  # of this split, from the first
    splits,
    stride,  # of two splits
    size,
    counts,  # [BLOCK_N]
    launch,
    num_turns,  # of this split, over the whole vocabulary
    BLOCK_N: tl.constexpr,
    HAS_SCORE: tl.constexpr,
    HAS_SURPLUS: tl.constexpr,
    HAS_SQUARES: tl.constexpr,
    HAS_UNKEPT: tl.constexpr,
    OF_DROPPED: tl.constexpr,
    HAS_LOGITS: tl.constexpr,
    IS_ROBUST: tl.constexpr,
):
    """Starts a launch's state from that of the launch before, relative to all splits' sums."""
    state_ptrs = first_ptrs + slot_of(launch) * 4 * size + split_offset
    before_ptrs = first_ptrs + slot_of(launch + SLOTS - 1) * 4 * size
    ref = tl.load(lower_ptrs)
    highest = ref
    earlier = tl.zeros((BLOCK_N,), tl.float32)
    earlier_dropped = earlier
    surplus = earlier
    unkept = earlier
    squares = earlier
    if IS_ROBUST:
        ref = tl.where(counts, LOWEST, HIGHEST)
    elif (launch >= FIRST) & (launch < ALONE):
        ref = tl.load(before_ptrs + split_offset)
        nothing = tl.zeros((BLOCK_N,), tl.float32)
        expected = expected_reference(
            before_ptrs, split_offset, splits, stride, size, launch, num_turns, nothing
        )
        # Other ranks' sums may have raised the lower bound above it.
        highest = tl.maximum(highest, expected)
        # Kept logits take a reference that all splits share. The split's own one may be infinite,
        # where its sum overflowed.
        if not HAS_LOGITS:
            highest = tl.maximum(highest, ref)
        # PROBE's sums were for references alone.
        goes_on = (launch > FIRST) & (launch != AFTER_PROBE) & counts
        earlier = tl.load(before_ptrs + split_offset + size, mask=goes_on, other=0.0)
        if HAS_SCORE:
            earlier_dropped = tl.load(
                before_ptrs + split_offset + 2 * size, mask=goes_on, other=0.0
            )
        if HAS_SURPLUS:
            surplus = tl.load(before_ptrs + split_offset + 3 * size, mask=goes_on, other=0.0)
        if HAS_UNKEPT:
            unkept = tl.load(extras_ptrs + UNKEPT * size, mask=goes_on, other=0.0)
        if HAS_SQUARES:
            squares = tl.load(extras_ptrs + SQUARES * size, mask=goes_on, other=0.0)
    tl.store(state_ptrs, ref)
    tl.store(state_ptrs + size, earlier)
    tl.store(state_ptrs + 2 * size, earlier_dropped)
    tl.store(state_ptrs + 3 * size, surplus)
    if HAS_UNKEPT:
        tl.store(extras_ptrs + UNKEPT * size, unkept)
    if HAS_SQUARES:
        tl.store(extras_ptrs + SQUARES * size, squares)
    tl.debug_barrier()
    if not IS_ROBUST:
        nothing = tl.zeros((8, 8, BLOCK_N), tl.float32)
        raise_reference(
            nothing, nothing, highest, state_ptrs, extras_ptrs, size, HAS_SCORE, HAS_SURPLUS,
            HAS_SQUARES, HAS_UNKEPT, OF_DROPPED,
        )  # fmt: skip
