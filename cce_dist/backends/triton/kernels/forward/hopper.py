"""The forward for Hopper in 16 and 8 bits: one warp loads, two groups of four warps multiply.

Each group has half of the program's columns, as a separate split of the vocabulary. While one group
takes exponentials, the other uses the tensor cores, and the next tile is loaded beside both. The
results are those of `forward_kernel`, which runs everywhere else, and in tests without a GPU:
Triton interprets no kernel with explicit layouts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.forward import launches
from cce_dist.backends.triton.kernels.forward.hopper_softcap import add_softcapped
from cce_dist.backends.triton.kernels.forward.hopper_state import end_stretch, start_state
from cce_dist.backends.triton.kernels.forward.hopper_stats import (
    add_plain,
    add_plain_dropped,
    end_largest,
    start_stats,
    update_stats,
)
from cce_dist.backends.triton.kernels.forward.hopper_sums import (
    allocate_sums,
    log2_scale_across,
    log2_scale_of,
    partial_sums,
    store_log2_scales,
)
from cce_dist.backends.triton.kernels.hopper_products import (
    GROUPS,
    load_product,
    product_of,
    start_stages,
)

slot_of = gluon.jit(launches.slot_of.fn)
turns_until = gluon.jit(launches.turns_until.fn)
turns_before = gluon.jit(launches.turns_before.fn)
segment_of = gluon.jit(launches.segment_of.fn)
place_of = gluon.jit(launches.place_of.fn)
first_turn = gluon.jit(launches.first_turn.fn)
end_turn = gluon.jit(launches.end_turn.fn)


@gluon.jit
def load_tiles(
    hidden,
    weight,
    e_tiles,
    c_tiles,
    full,
    empty,
    block,
    split,
    splits,
    start_turn,
    stop_turn,
    V,
    D,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    SEGMENT: gl.constexpr,
):
    """Loads the operands of `sum_tiles`, in its order, as soon as both groups have released a
    stage."""
    begin, _, split, splits = segment_of(split, splits, V, SEGMENT)
    step = 0
    for turn in range(start_turn, stop_turn):
        column = begin + (split + turn * splits) * (GROUPS * ROWS)
        step = load_product(
            hidden, weight, e_tiles, c_tiles, full, empty, block * BLOCK_N, column, step, D,
            BLOCK_N, ROWS, BLOCK_D, STAGES,
        )  # fmt: skip


@gluon.jit
def add_dropped_columns(
    p,  # [ROWS, BLOCK_N] exp2(z - ref)
    dropped,
    mass_ptr,
    columns,
    V,
    threshold,
    stat_tiles,  # see `allocate_sums`
    group,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BY_LARGEST: gl.constexpr,
    HAS_DROPPED: gl.constexpr,  # `stat_tiles` has their sum
    HAS_TAIL_SURPLUS: gl.constexpr,
    HAS_TAIL_SQUARES: gl.constexpr,
):
    """Stores the columns' masses, negative where kept; adds the others to dropped, and to the
    statistics of a tail."""
    mass = gl.sum(p, 1)
    keeps = (gl.max(p, 1) if BY_LARGEST else mass) >= threshold
    mark = gl.where(keeps, -gl.maximum(mass, 1e-30), mass)
    gl.store(mass_ptr + columns, mark.to(mass_ptr.dtype.element_ty), mask=columns < V)
    drops = gl.where(keeps, 0.0, 1.0)
    if HAS_DROPPED:
        add_plain_dropped(
            p, drops, stat_tiles, group, ROWS, BLOCK_N, HAS_TAIL_SURPLUS, HAS_TAIL_SQUARES
        )
        return dropped
    else:
        return dropped + partial_sums(p * drops[:, None], ROWS, BLOCK_N)


@gluon.jit
def sum_tiles(
    group,
    bias_ptr,
    column_ptr,
    token_ptr,
    lower_ptr,
    state_ptr,  # [SLOTS, 4, size]
    mass_ptr,  # [V] of the block
    extras_ptr,  # [8, size]
    key_ptr,  # [size]
    of_token,  # [5 GROUPS, BLOCK_N] in shared memory: reference; scale; shift of 8 bits; bound of
    # the largest product; the moments' origin
    stat_tiles,  # see `allocate_sums`
    e_tiles,
    c_tiles,
    full,
    empty,
    block,
    split,
    splits,
    num_turns,
    start_turn,
    stop_turn,
    launch,
    num_blocks,
    count,
    size,
    N,
    V,
    D,
    scale,
    softcap,
    threshold,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SCORE: gl.constexpr,
    BY_LARGEST: gl.constexpr,
    IS_SCREENED: gl.constexpr,
    FINE: gl.constexpr,
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
    HAS_ARGMAX: gl.constexpr,
    HAS_MOMENTS: gl.constexpr,
    SEGMENT: gl.constexpr,
):
    """Sums the group's columns of every tile, [ROWS, BLOCK_N] at a time in four warps'
    registers."""
    HAS_UNKEPT: gl.constexpr = HAS_SCORE and IS_SCREENED and HAS_SOFTCAP
    HAS_DROPPED: gl.constexpr = HAS_SCORE and (
        HAS_SOFTCAP or HAS_SURPLUS or HAS_SQUARES or HAS_ARGMAX
    )
    # Of 8-bit logits those of the tail alone: kept columns have exact logits.
    HAS_TAIL_SURPLUS: gl.constexpr = HAS_SURPLUS and IS_SCREENED
    HAS_TAIL_SQUARES: gl.constexpr = HAS_SQUARES and IS_SCREENED
    HAS_WHOLE_SURPLUS: gl.constexpr = HAS_SURPLUS and not IS_SCREENED
    HAS_WHOLE_SQUARES: gl.constexpr = HAS_SQUARES and not IS_SCREENED
    step_dims: gl.constexpr = 256 // c_tiles.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, step_dims])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    by_token: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    across: gl.constexpr = gl.SliceLayout(0, layout)
    log2_scale = log2_scale_of(scale)
    token = block * BLOCK_N + gl.arange(0, BLOCK_N, by_token)
    stride = num_blocks * BLOCK_N
    state_offset = (GROUPS * split + group) * stride
    state_ptrs = state_ptr + slot_of(launch) * 4 * size + state_offset + token
    before_ptrs = state_ptr + slot_of(launch + launches.SLOTS - 1) * 4 * size + token
    extras_ptrs = extras_ptr + state_offset + token
    begin, end, turn_split, turn_splits = segment_of(split, splits, V, SEGMENT)
    first_ref = start_state(
        lower_ptr + token, state_ptrs, extras_ptrs, before_ptrs, state_offset, GROUPS * splits,
        stride, size, token < count, launch, num_turns, HAS_SCORE, HAS_SURPLUS, HAS_SQUARES,
        HAS_UNKEPT, IS_SCREENED, False,
    )  # fmt: skip
    ref_tile = of_token.index(5 * group)
    ref_tile.store(first_ref)
    # Logits are scaled for `tanh_of_8_bits`, which saves a multiplication for each.
    to_tanh = 1.0
    if IS_SCREENED and HAS_SOFTCAP:
        to_tanh = 2.0 * numbers.LOG2E / softcap
    if IS_SCREENED:
        of_token.index(5 * group + 1).store(gl.load(token_ptr + token))
        of_token.index(5 * group + 2).store(gl.load(token_ptr + N + token) * to_tanh)
    store_log2_scales(log2_scale, token, of_token.index(5 * group + 1))
    keys = key_ptr + state_offset + block * BLOCK_N
    start_stats(
        stat_tiles, of_token, group, key_ptr + token, extras_ptrs, state_offset, GROUPS * splits,
        stride, size, first_ref, token < count, launch, HAS_ARGMAX, HAS_MOMENTS,
    )  # fmt: skip
    nothing = partial_sums(gl.zeros((ROWS, BLOCK_N), gl.float32, layout), ROWS, BLOCK_N)
    step = 0
    turn = start_turn
    while turn < stop_turn:
        first = turn
        turn = gl.minimum(turn + gl.maximum(turn - start_turn, 1), stop_turn)
        total, dropped = nothing, nothing
        number = 0
        for at in range(first, turn):
            x, step = product_of(
                e_tiles, c_tiles, full, empty, group, step, D, BLOCK_D, STAGES, layout, False
            )
            first_column = begin + ((turn_split + at * turn_splits) * GROUPS + group) * ROWS
            columns = first_column + rows
            inside = columns < end
            number += gl.minimum(gl.maximum(end - first_column, 0), ROWS)
            bias, times, shift = 0.0, 0.0, 0.0
            if IS_SCREENED:
                times = gl.load(column_ptr + columns, mask=inside, other=0.0)
                shift = gl.load(column_ptr + V + columns, mask=inside, other=0.0)
            if HAS_BIAS:
                bias = gl.load(bias_ptr + columns, mask=inside, other=0.0).to(gl.float32)
            if IS_SCREENED and HAS_SOFTCAP:
                times *= to_tanh
                shift *= to_tanh
                bias *= to_tanh
            if HAS_SOFTCAP:
                total = add_softcapped(
                    x, total, (bias, times, shift), of_token, 5 * group, stat_tiles, mass_ptr, keys,
                    columns, end, log2_scale, softcap, threshold, ROWS, BLOCK_N, HAS_BIAS,
                    HAS_SCORE, BY_LARGEST, IS_SCREENED, FINE, HAS_SURPLUS, HAS_SQUARES, HAS_ARGMAX,
                    HAS_MOMENTS,
                )  # fmt: skip
            else:
                if IS_SCREENED:
                    x = x.to(gl.float32) * times[:, None]
                    x = x * of_token.index(5 * group + 1).load(across)[None, :] + shift[:, None]
                    x += of_token.index(5 * group + 2).load(across)[None, :]
                if HAS_BIAS:
                    x += bias[:, None]
                factor = log2_scale_across(
                    log2_scale, of_token.index(5 * group + 1), 0, BLOCK_N, across
                )
                if first_column + ROWS > end:
                    x = gl.where(inside[:, None], x, float("-inf") * factor)
                if HAS_WHOLE_SURPLUS or HAS_WHOLE_SQUARES or HAS_ARGMAX:
                    total, p = add_plain(
                        x, total, columns, end, log2_scale, keys, of_token, 5 * group,
                        stat_tiles, ROWS, BLOCK_N, HAS_WHOLE_SURPLUS, HAS_WHOLE_SQUARES,
                        HAS_ARGMAX, HAS_MOMENTS,
                    )  # fmt: skip
                else:
                    p = gl.exp2(x * factor - ref_tile.load(across)[None, :])
                    total += partial_sums(p, ROWS, BLOCK_N)
                if HAS_SCORE:
                    dropped = add_dropped_columns(
                        p, dropped, mass_ptr, columns, end, threshold, stat_tiles, group, ROWS,
                        BLOCK_N, BY_LARGEST, HAS_DROPPED, HAS_TAIL_SURPLUS, HAS_TAIL_SQUARES,
                    )  # fmt: skip
        next_ref = end_stretch(
            state_ptrs, extras_ptrs, size, total, dropped, stat_tiles, group, HAS_SCORE,
            HAS_SURPLUS, HAS_SQUARES, HAS_UNKEPT, HAS_DROPPED, IS_SCREENED,
        )  # fmt: skip
        ref_tile.store(next_ref)
        update_stats(
            stat_tiles, of_token, group, key_ptr + state_offset + token, extras_ptrs, size,
            token < count, number, HAS_ARGMAX, HAS_MOMENTS,
        )  # fmt: skip
    if HAS_ARGMAX:
        end_largest(
            key_ptr + state_offset + token, extras_ptrs, size, token, scale, softcap, to_tanh,
            HAS_SOFTCAP,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["launch"])
def hopper_forward_kernel(
    hidden,  # [N, D] packed, a descriptor of BLOCK_N x BLOCK_D
    weight,  # [V, D], of ROWS x BLOCK_D
    bias_ptr,  # [V]
    column_ptr,  # [2, V] fp32: see `forward_kernel`
    token_ptr,  # [2, N] fp32
    count_ptr,  # [1] int32: tokens that count
    shape_ptr,  # [3] int32: blocks, GROUPS x splits, blocks at a time
    lower_ptr,  # [N]
    state_ptr,  # [SLOTS, 4, size]: see `forward_kernel`; out
    mass_ptr,  # [num_blocks, V]: out
    extras_ptr,  # [8, size]: see `add_extras`; out
    key_ptr,  # [size] int64 of a split and token, largest product: see `hopper_stats.key_of`; out
    launch,
    size,
    N,
    V,
    D,
    scale,
    softcap,
    keep,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,  # columns of a tile in a group
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_SCORE: gl.constexpr,
    BY_LARGEST: gl.constexpr,
    IS_SCREENED: gl.constexpr,
    FINE: gl.constexpr,
    HAS_SURPLUS: gl.constexpr,
    HAS_SQUARES: gl.constexpr,
    HAS_ARGMAX: gl.constexpr,
    HAS_MOMENTS: gl.constexpr,
    SEGMENT: gl.constexpr,
):
    """Sums a block of tokens over every `splits`-th tile of GROUPS x ROWS columns; a program a
    block and split.

    The arguments, the order of programs and tiles, and the launches are `forward_kernel`'s.
    """
    num_blocks = gl.load(shape_ptr)
    splits = gl.load(shape_ptr + 1) // GROUPS
    if gl.program_id(0) >= num_blocks * splits:
        return
    count = gl.load(count_ptr)
    block, split = place_of(gl.program_id(0), num_blocks, splits, gl.load(shape_ptr + 2))
    begin, end, turn_split, turn_splits = segment_of(split, splits, V, SEGMENT)
    if SEGMENT > 0:
        lower_ptr += begin // SEGMENT * N
    num_turns = turns_before(gl.cdiv(end - begin, GROUPS * ROWS), turn_split, turn_splits)
    num_turns = gl.where(block * BLOCK_N < count, num_turns, 0)
    start_turn = first_turn(launch, num_turns)
    stop_turn = end_turn(launch, num_turns, GROUPS * splits)
    threshold = keep
    if not BY_LARGEST:
        threshold = keep * (gl.minimum(count - block * BLOCK_N, BLOCK_N) / BLOCK_N)
    mass_ptr += block.to(gl.int64) * V

    e_tiles = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK_N, BLOCK_D], hidden.layout)
    c_tiles = gl.allocate_shared_memory(
        weight.dtype, [STAGES * GROUPS, ROWS, BLOCK_D], weight.layout
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    of_token = gl.allocate_shared_memory(gl.float32, [5 * GROUPS, BLOCK_N], plain)
    HAS_STATS: gl.constexpr = HAS_SURPLUS or HAS_SQUARES or HAS_ARGMAX
    stat_tiles = allocate_sums(
        BLOCK_N, HAS_SURPLUS, HAS_SQUARES, HAS_MOMENTS, HAS_SCORE and IS_SCREENED and HAS_SOFTCAP,
        HAS_SCORE and (HAS_SOFTCAP or HAS_STATS),
    )  # fmt: skip
    full, empty = start_stages(STAGES)
    gl.warp_specialize(
        [
            (
                sum_tiles,
                (
                    0, bias_ptr, column_ptr, token_ptr, lower_ptr, state_ptr, mass_ptr,
                    extras_ptr, key_ptr, of_token, stat_tiles, e_tiles, c_tiles, full, empty, block,
                    split, splits, num_turns, start_turn, stop_turn, launch, num_blocks, count,
                    size, N, V, D, scale, softcap, threshold, BLOCK_N, ROWS, BLOCK_D, STAGES,
                    HAS_BIAS, HAS_SOFTCAP, HAS_SCORE, BY_LARGEST, IS_SCREENED, FINE, HAS_SURPLUS,
                    HAS_SQUARES, HAS_ARGMAX, HAS_MOMENTS, SEGMENT,
                ),
            ),
            (
                sum_tiles,
                (
                    1, bias_ptr, column_ptr, token_ptr, lower_ptr, state_ptr, mass_ptr,
                    extras_ptr, key_ptr, of_token, stat_tiles, e_tiles, c_tiles, full, empty, block,
                    split, splits, num_turns, start_turn, stop_turn, launch, num_blocks, count,
                    size, N, V, D, scale, softcap, threshold, BLOCK_N, ROWS, BLOCK_D, STAGES,
                    HAS_BIAS, HAS_SOFTCAP, HAS_SCORE, BY_LARGEST, IS_SCREENED, FINE, HAS_SURPLUS,
                    HAS_SQUARES, HAS_ARGMAX, HAS_MOMENTS, SEGMENT,
                ),
            ),
            (
                load_tiles,
                (
                    hidden, weight, e_tiles, c_tiles, full, empty, block, split, splits, start_turn,
                    stop_turn, V, D, BLOCK_N, ROWS, BLOCK_D, STAGES, SEGMENT,
                ),
            ),
        ],
        # Warps and registers of the second group and of the loads; the first group has all others.
        [4, 1],
        [240, 24],
    )  # fmt: skip
