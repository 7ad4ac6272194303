"""The forward of two heads for Hopper, in 16 bits: one warp loads, two groups of four multiply.

Each group has half of the program's columns, as a separate split of the vocabulary: first the
student's product, then the teacher's in the same registers. The student's logits wait in fp16,
relative to a reference about lse: where a model has mass, they are off by 2^-12 of themselves. The
KL and the dropped mass read them. But for that rounding the results are those of
`teacher_forward_kernel`, which runs everywhere else.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.forward import launches
from cce_dist.backends.triton.kernels.forward.hopper_state import start_state
from cce_dist.backends.triton.kernels.forward.hopper_sums import join_tokens, split_tokens
from cce_dist.backends.triton.kernels.hopper_products import (
    GROUPS,
    load_product,
    product_of,
    start_stages,
)

slot_of = gluon.jit(launches.slot_of.fn)
turns_before = gluon.jit(launches.turns_before.fn)
place_of = gluon.jit(launches.place_of.fn)
first_turn = gluon.jit(launches.first_turn.fn)
end_turn = gluon.jit(launches.end_turn.fn)
exp2_of = gluon.jit(numbers.exp2_of.fn)

# Of a difference that fp16 holds, log2.
LEAST = gl.constexpr(-60000.0)
# Parts of a tile's columns.
PARTS = gl.constexpr(4)


@gluon.jit
def load_both(
    hidden,
    weight,
    teacher_hidden,
    teacher_weight,
    e_tiles,
    c_tiles,
    full,
    empty,
    block,
    split,
    splits,
    start_turn,
    stop_turn,
    D,
    D_TEACHER,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Loads the operands of `sum_both`, in its order."""
    step = 0
    for turn in range(start_turn, stop_turn):
        column = (split + turn * splits) * (GROUPS * ROWS)
        step = load_product(
            hidden, weight, e_tiles, c_tiles, full, empty, block * BLOCK_N, column, step, D,
            BLOCK_N, ROWS, BLOCK_D, STAGES,
        )  # fmt: skip
        step = load_product(
            teacher_hidden, teacher_weight, e_tiles, c_tiles, full, empty, block * BLOCK_N, column,
            step, D_TEACHER, BLOCK_N, ROWS, BLOCK_D, STAGES,
        )  # fmt: skip


@gluon.jit
def store_mass(mass, keeps, mass_ptrs, inside):
    """Stores a model's masses of columns, negative where they are kept."""
    mark = gl.where(keeps, -gl.maximum(mass, 1e-30), mass)
    gl.store(mass_ptrs, mark.to(mass_ptrs.dtype.element_ty), mask=inside)


@gluon.jit
def end_model(state_ptrs, size, total, dropped):
    """Adds a stretch's sums to a model's state. Returns its new reference, how much higher it is,
    and the total so far relative to the reference before, [BLOCK_N] each."""
    layout: gl.constexpr = state_ptrs.type.layout
    whole = gl.load(state_ptrs + size) + gl.convert_layout(total, layout)
    dropped = gl.load(state_ptrs + 2 * size) + gl.convert_layout(dropped, layout)
    gain = gl.maximum(gl.log2(whole), 0.0)
    shrink = exp2_of(-gain)
    ref = gl.load(state_ptrs) + gain
    gl.store(state_ptrs, ref)
    gl.store(state_ptrs + size, whole * shrink)
    gl.store(state_ptrs + 2 * size, dropped * shrink)
    return ref, gain, whole


@gluon.jit
def sum_both(
    group,
    bias_ptr,
    teacher_bias_ptr,
    lower_ptr,
    teacher_lower_ptr,
    state_ptr,
    teacher_ptr,
    mass_ptr,
    teacher_mass_ptr,
    waiting,  # [BLOCK_N, ROWS] fp16 in shared memory
    drops,  # [ROWS] in shared memory: 1 of a column that is not kept, else 0
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
    V,
    D,
    D_TEACHER,
    scale,
    teacher_scale,
    threshold,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    TEACHER_HAS_BIAS: gl.constexpr,
):
    """Sums the group's columns of every tile, of both models."""
    # Biases may be -inf: logits of ids that a model masks.
    HAS_MASKS: gl.constexpr = HAS_BIAS or TEACHER_HAS_BIAS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    by_token: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    down: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    # A column a thread: of p a thread has a quarter of the tile's columns, too many for pointers.
    by_column: gl.constexpr = by_token
    COLUMNS: gl.constexpr = ROWS // PARTS
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    token = block * BLOCK_N + gl.arange(0, BLOCK_N, by_token)
    stride = num_blocks * BLOCK_N
    state_offset = (GROUPS * split + group) * stride
    at = slot_of(launch) * 4 * size + token
    before = slot_of(launch + launches.SLOTS - 1) * 4 * size + token
    state_ptrs = state_ptr + at + state_offset
    teacher_ptrs = teacher_ptr + at + state_offset
    first_ref = start_state(
        lower_ptr + token, state_ptrs, state_ptrs, state_ptr + before, state_offset,
        GROUPS * splits, stride, size, token < count, launch, num_turns, True, False, False, False,
        False,
    )  # fmt: skip
    first_teacher_ref = start_state(
        teacher_lower_ptr + token, teacher_ptrs, teacher_ptrs, teacher_ptr + before, state_offset,
        GROUPS * splits, stride, size, token < count, launch, num_turns, True, True, False, False,
        False,
    )  # fmt: skip
    # The log ratios are relative to both references; `start_state` knows the teacher's alone.
    so_far = gl.load(teacher_ptrs + 3 * size)
    if (launch >= launches.FIRST) & (launch < launches.ALONE):
        goes_on = (launch > launches.FIRST) & (token < count)
        gain = first_ref - gl.load(state_ptr + before + state_offset, mask=goes_on, other=0.0)
        whole = gl.load(teacher_ptrs + size)
        so_far += gl.where(goes_on & (whole > 0), gain * whole, 0.0)
    gl.store(teacher_ptrs + 3 * size, so_far)
    ref = gl.convert_layout(first_ref, down)
    teacher_ref = gl.convert_layout(first_teacher_ref, down)
    nothing = ref * 0.0
    factor = scale * numbers.LOG2E
    teacher_factor = teacher_scale * numbers.LOG2E
    step = 0
    turn = start_turn
    while turn < stop_turn:
        first = turn
        turn = gl.minimum(turn + gl.maximum(turn - start_turn, 1), stop_turn)
        total, dropped, teacher_total, teacher_dropped = nothing, nothing, nothing, nothing
        of_ratios = nothing
        for number in range(first, turn):
            first_column = ((split + number * splits) * GROUPS + group) * ROWS
            columns = first_column + rows
            x, step = product_of(
                e_tiles, c_tiles, full, empty, group, step, D, BLOCK_D, STAGES, LAYOUT, True
            )
            if HAS_BIAS:
                bias = gl.load(bias_ptr + columns, mask=columns < V, other=0.0)
                x += bias.to(gl.float32)[None, :]
            x = x * factor - ref[:, None]
            if first_column + ROWS > V:
                x = gl.where((columns < V)[None, :], x, float("-inf"))
            waiting.store((x if HAS_MASKS else gl.maximum(x, LEAST)).to(gl.float16))
            q = gl.exp2(x)
            total += gl.sum(q, 1)
            mass = gl.convert_layout(gl.sum(q, 0), by_column)
            y, step = product_of(
                e_tiles, c_tiles, full, empty, group, step, D_TEACHER, BLOCK_D, STAGES, LAYOUT, True
            )
            if TEACHER_HAS_BIAS:
                bias = gl.load(teacher_bias_ptr + columns, mask=columns < V, other=0.0)
                y += bias.to(gl.float32)[None, :]
            y = y * teacher_factor - teacher_ref[:, None]
            if first_column + ROWS > V:
                y = gl.where((columns < V)[None, :], y, numbers.LOWEST)
            # A thread has registers for some columns of both models at a time.
            parts = split_tokens(y, BLOCK_N, ROWS, PARTS)
            exponentials = ()
            for i in gl.static_range(PARTS):
                y_part = gl.convert_layout(parts[i], PART, assert_trivial=True)
                x_part = waiting.slice(i * COLUMNS, COLUMNS, 1).load(PART).to(gl.float32)
                p_part = gl.exp2(y_part)
                ratios = p_part * (y_part - x_part)
                if HAS_MASKS:
                    # 0 times -inf would be NaN.
                    ratios = gl.where(p_part > 0, ratios, 0.0)
                of_ratios += gl.convert_layout(gl.sum(ratios, 1), down, assert_trivial=True)
                exponentials = exponentials + (p_part,)  # noqa: RUF005
            p = join_tokens(exponentials, 0, BLOCK_N, ROWS, PARTS)
            p = gl.convert_layout(p, LAYOUT, assert_trivial=True)
            teacher_total += gl.sum(p, 1)
            teacher_mass = gl.convert_layout(gl.sum(p, 0), by_column)
            keeps = mass + teacher_mass >= threshold
            at = first_column + gl.arange(0, ROWS, by_column)
            store_mass(mass, keeps, mass_ptr + at, at < V)
            store_mass(teacher_mass, keeps, teacher_mass_ptr + at, at < V)
            drops.store(gl.where(keeps, 0.0, 1.0))
            for i in gl.static_range(PARTS):
                drops_part = drops.slice(i * COLUMNS, COLUMNS).load(gl.SliceLayout(0, PART))
                x_part = waiting.slice(i * COLUMNS, COLUMNS, 1).load(PART).to(gl.float32)
                q_part = gl.exp2(x_part) * drops_part[None, :]
                p_part = exponentials[i] * drops_part[None, :]
                dropped += gl.convert_layout(gl.sum(q_part, 1), down, assert_trivial=True)
                teacher_dropped += gl.convert_layout(gl.sum(p_part, 1), down, assert_trivial=True)
        next_ref, gain, _ = end_model(state_ptrs, size, total, dropped)
        next_teacher_ref, teacher_gain, whole = end_model(
            teacher_ptrs, size, teacher_total, teacher_dropped
        )
        so_far = gl.load(teacher_ptrs + 3 * size) + gl.convert_layout(of_ratios, by_token)
        so_far -= gl.where(whole > 0, (teacher_gain - gain) * whole, 0.0)
        # See `launches.raise_reference`.
        shrink = exp2_of(-teacher_gain)
        so_far = gl.where(shrink > 0, so_far * shrink, 0.0)
        gl.store(teacher_ptrs + 3 * size, so_far)
        ref = gl.convert_layout(next_ref, down)
        teacher_ref = gl.convert_layout(next_teacher_ref, down)


@gluon.jit(do_not_specialize=["launch"])
def hopper_teacher_kernel(
    hidden,  # [N, D] packed, a descriptor of BLOCK_N x BLOCK_D
    weight,  # [V, D], of ROWS x BLOCK_D
    bias_ptr,  # [V]
    teacher_hidden,  # [N, D_TEACHER]
    teacher_weight,  # [V, D_TEACHER]
    teacher_bias_ptr,  # [V]
    count_ptr,  # [1] int32
    shape_ptr,  # [3] int32: blocks, GROUPS x splits, blocks at a time
    lower_ptr,  # [N]
    teacher_lower_ptr,  # [N]
    state_ptr,  # [SLOTS, 4, size]: see `teacher_forward_kernel`; out
    teacher_ptr,  # [SLOTS, 4, size]: out
    mass_ptr,  # [num_blocks, V]: out
    teacher_mass_ptr,  # [num_blocks, V]: out
    launch,
    size,
    V,
    D,
    D_TEACHER,
    scale,
    teacher_scale,
    keep,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,  # columns of a tile in a group
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    TEACHER_HAS_BIAS: gl.constexpr,
):
    """Sums a block of tokens over every `splits`-th tile of GROUPS x ROWS columns, of both models;
    a program a block and split."""
    num_blocks = gl.load(shape_ptr)
    splits = gl.load(shape_ptr + 1) // GROUPS
    if gl.program_id(0) >= num_blocks * splits:
        return
    count = gl.load(count_ptr)
    block, split = place_of(gl.program_id(0), num_blocks, splits, gl.load(shape_ptr + 2))
    num_turns = turns_before(gl.cdiv(V, GROUPS * ROWS), split, splits)
    num_turns = gl.where(block * BLOCK_N < count, num_turns, 0)
    start_turn = first_turn(launch, num_turns)
    stop_turn = end_turn(launch, num_turns, GROUPS * splits)
    threshold = keep * (gl.minimum(count - block * BLOCK_N, BLOCK_N) / BLOCK_N)
    mass_ptr += block.to(gl.int64) * V
    teacher_mass_ptr += block.to(gl.int64) * V
    e_tiles = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK_N, BLOCK_D], hidden.layout)
    c_tiles = gl.allocate_shared_memory(
        weight.dtype, [STAGES * GROUPS, ROWS, BLOCK_D], weight.layout
    )
    by_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, ROWS], gl.float16)
    waiting = gl.allocate_shared_memory(gl.float16, [GROUPS, BLOCK_N, ROWS], by_tile)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    drops = gl.allocate_shared_memory(gl.float32, [GROUPS, ROWS], plain)
    full, empty = start_stages(STAGES)
    gl.warp_specialize(
        [
            (
                sum_both,
                (
                    0, bias_ptr, teacher_bias_ptr, lower_ptr, teacher_lower_ptr, state_ptr,
                    teacher_ptr, mass_ptr, teacher_mass_ptr, waiting.index(0), drops.index(0),
                    e_tiles, c_tiles, full, empty, block, split, splits, num_turns, start_turn,
                    stop_turn, launch, num_blocks, count, size, V, D, D_TEACHER, scale,
                    teacher_scale, threshold, BLOCK_N, ROWS, BLOCK_D, STAGES, HAS_BIAS,
                    TEACHER_HAS_BIAS,
                ),
            ),
            (
                sum_both,
                (
                    1, bias_ptr, teacher_bias_ptr, lower_ptr, teacher_lower_ptr, state_ptr,
                    teacher_ptr, mass_ptr, teacher_mass_ptr, waiting.index(1), drops.index(1),
                    e_tiles, c_tiles, full, empty, block, split, splits, num_turns, start_turn,
                    stop_turn, launch, num_blocks, count, size, V, D, D_TEACHER, scale,
                    teacher_scale, threshold, BLOCK_N, ROWS, BLOCK_D, STAGES, HAS_BIAS,
                    TEACHER_HAS_BIAS,
                ),
            ),
            (
                load_both,
                (
                    hidden, weight, teacher_hidden, teacher_weight, e_tiles, c_tiles, full, empty,
                    block, split, splits, start_turn, stop_turn, D, D_TEACHER, BLOCK_N, ROWS,
                    BLOCK_D, STAGES,
                ),
            ),
        ],
        # Warps and registers of the second group and of the loads; the first group has all others.
        [4, 1],
        [240, 24],
    )  # fmt: skip
