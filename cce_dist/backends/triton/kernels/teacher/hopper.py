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
from cce_dist.backends.triton.kernels.forward.hopper_sums import join_tokens, split_tokens
from cce_dist.backends.triton.kernels.gluon_names import memory_as
from cce_dist.backends.triton.kernels.hopper_products import (
    GROUPS,
    load_product,
    product_of,
    start_stages,
)
from cce_dist.backends.triton.kernels.teacher.hopper_sums import (
    PARTS,
    end_both,
    lane_sums,
    logits_of_8_bits,
    masses_of,
    start_both,
    store_masses,
    sum_tokens,
    with_dropped,
    with_lanes,
    with_ratios,
)

slot_of = gluon.jit(launches.slot_of.fn)
turns_before = gluon.jit(launches.turns_before.fn)
place_of = gluon.jit(launches.place_of.fn)
first_turn = gluon.jit(launches.first_turn.fn)
end_turn = gluon.jit(launches.end_turn.fn)

# Of a difference that fp16 holds, log2.
LEAST = gl.constexpr(-60000.0)


@gluon.jit
def load_both(
    hidden,
    weight,
    teacher_hidden,
    teacher_weight,
    tiles,
    teacher_tiles,
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
    STAGES: gl.constexpr,
):
    """Loads the operands of `sum_both`, in its order."""
    step = 0
    for turn in range(start_turn, stop_turn):
        column = (split + turn * splits) * (GROUPS * ROWS)
        step = load_product(
            hidden, weight, tiles[0], tiles[1], full, empty, block * BLOCK_N, column, step, D,
            BLOCK_N, ROWS, tiles[0].shape[2], STAGES,
        )  # fmt: skip
        step = load_product(
            teacher_hidden, teacher_weight, teacher_tiles[0], teacher_tiles[1], full, empty,
            block * BLOCK_N, column, step, D_TEACHER, BLOCK_N, ROWS, teacher_tiles[0].shape[2],
            STAGES,
        )  # fmt: skip


@gluon.jit
def sum_both(
    group,
    bias_ptr,
    teacher_bias_ptr,
    column_ptr,
    token_ptr,
    lower_ptr,
    teacher_lower_ptr,
    state_ptr,
    teacher_ptr,
    mass_ptr,
    teacher_mass_ptr,
    waiting,  # [BLOCK_N, ROWS] fp16 in shared memory
    of_columns,  # [4 GROUPS, ROWS] in shared memory: 1 of a column that is not kept, else 0; factor
    # and shift of the teacher's products of 8 bits; room for a model's masses
    tiles,  # the operands in shared memory
    teacher_tiles,  # the same memory
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
    D_TEACHER,
    scale,
    teacher_scale,
    threshold,
    beta,
    of_ratio,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    TEACHER_HAS_BIAS: gl.constexpr,
    IS_REVERSE: gl.constexpr,
    IS_JSD: gl.constexpr,
):
    """Sums the group's columns of every tile, of both models."""
    # Biases may be -inf: logits of ids that a model masks.
    HAS_MASKS: gl.constexpr = HAS_BIAS or TEACHER_HAS_BIAS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    # Its numbers lie in the same threads.
    IS_SCREENED: gl.constexpr = teacher_tiles[1].dtype.primitive_bitwidth == 8
    step_dims: gl.constexpr = 256 // teacher_tiles[1].dtype.primitive_bitwidth
    TEACHER_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, step_dims])
    by_token: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    down: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    # A column a thread: of p a thread has a quarter of the tile's columns, too many for pointers.
    by_column: gl.constexpr = by_token
    COLUMNS: gl.constexpr = ROWS // (2 * PARTS if IS_JSD else PARTS)
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, LAYOUT))
    token = block * BLOCK_N + gl.arange(0, BLOCK_N, by_token)
    stride = num_blocks * BLOCK_N
    state_offset = (GROUPS * split + group) * stride
    at = slot_of(launch) * 4 * size + token
    before = slot_of(launch + launches.SLOTS - 1) * 4 * size + token
    state_ptrs = state_ptr + at + state_offset
    teacher_ptrs = teacher_ptr + at + state_offset
    first_ref, first_teacher_ref = start_both(
        lower_ptr + token, teacher_lower_ptr + token, state_ptr, teacher_ptr, at, before,
        state_offset, GROUPS * splits, stride, size, token < count, launch, num_turns, IS_REVERSE,
    )  # fmt: skip
    ref = gl.convert_layout(first_ref, down)
    teacher_ref = gl.convert_layout(first_teacher_ref, down)
    nothing = lane_sums(gl.zeros((BLOCK_N, ROWS), gl.float32, LAYOUT), BLOCK_N, ROWS)
    drops, factors = of_columns.index(4 * group), of_columns.index(4 * group + 1)
    shifts, masses = of_columns.index(4 * group + 2), of_columns.index(4 * group + 3)
    factor, teacher_factor = scale * numbers.LOG2E, teacher_scale * numbers.LOG2E
    token_scale, token_shift = ref, ref
    if IS_SCREENED:
        row = block * BLOCK_N + gl.arange(0, BLOCK_N, down)
        token_scale = gl.load(token_ptr + row)
        token_shift = gl.load(token_ptr + N + row) * teacher_factor
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
                tiles[0], tiles[1], full, empty, group, step, D, tiles[0].shape[2], STAGES, LAYOUT,
                True,
            )  # fmt: skip
            if HAS_BIAS:
                bias = gl.load(bias_ptr + columns, mask=columns < V, other=0.0)
                x += bias.to(gl.float32)[None, :]
            x = x * factor - ref[:, None]
            if first_column + ROWS > V:
                x = gl.where((columns < V)[None, :], x, float("-inf"))
            waiting.store((x if HAS_MASKS else gl.maximum(x, LEAST)).to(gl.float16))
            if not IS_JSD:
                q = gl.exp2(x)
                total = with_lanes(total, q, BLOCK_N, ROWS)
            if not IS_REVERSE:
                mass = masses_of(q, masses, BLOCK_N, ROWS, by_column)
            at = first_column + gl.arange(0, ROWS, by_column)
            if IS_SCREENED:
                times = gl.load(column_ptr + at, mask=at < V, other=0.0) * teacher_factor
                shift = gl.load(column_ptr + V + at, mask=at < V, other=0.0)
                if TEACHER_HAS_BIAS:
                    bias = gl.load(teacher_bias_ptr + at, mask=at < V, other=0.0)
                    shift += bias.to(gl.float32)
                factors.store(times)
                shifts.store(gl.where(at < V, shift * teacher_factor, numbers.LOWEST))
            y, step = product_of(
                teacher_tiles[0], teacher_tiles[1], full, empty, group, step, D_TEACHER,
                teacher_tiles[0].shape[2], STAGES, TEACHER_LAYOUT, True,
            )  # fmt: skip
            if not IS_SCREENED:
                if TEACHER_HAS_BIAS:
                    bias = gl.load(teacher_bias_ptr + columns, mask=columns < V, other=0.0)
                    y += bias.to(gl.float32)[None, :]
                y = y * teacher_factor - teacher_ref[:, None]
                if first_column + ROWS > V:
                    y = gl.where((columns < V)[None, :], y, numbers.LOWEST)
            # A thread has registers for some columns of both models at a time.
            parts = split_tokens(y, BLOCK_N, ROWS, ROWS // COLUMNS)
            exponentials = ()
            for i in gl.static_range(ROWS // COLUMNS):
                y_part = gl.convert_layout(parts[i], PART, assert_trivial=True)
                if IS_SCREENED:
                    y_part = logits_of_8_bits(
                        y_part, factors.slice(i * COLUMNS, COLUMNS),
                        shifts.slice(i * COLUMNS, COLUMNS), token_scale, token_shift - teacher_ref,
                        PART,
                    )  # fmt: skip
                p_part, ratios, total = with_ratios(
                    total, y_part, waiting.slice(i * COLUMNS, COLUMNS, 1), beta, BLOCK_N, COLUMNS,
                    HAS_MASKS, IS_REVERSE, IS_JSD,
                )  # fmt: skip
                of_ratios = with_lanes(of_ratios, ratios, BLOCK_N, COLUMNS)
                if IS_REVERSE:
                    sum_tokens(ratios, masses.slice(i * COLUMNS, COLUMNS), BLOCK_N, COLUMNS, 1)
                exponentials = exponentials + (p_part,)  # noqa: RUF005
            p = join_tokens(exponentials, 0, BLOCK_N, ROWS, ROWS // COLUMNS)
            p = gl.convert_layout(p, LAYOUT, assert_trivial=True)
            teacher_total = with_lanes(teacher_total, p, BLOCK_N, ROWS)
            if IS_REVERSE:
                mass = masses.load(by_column)
            teacher_mass = masses_of(p, masses, BLOCK_N, ROWS, by_column)
            mass_ptrs = mass_ptr + at, teacher_mass_ptr + at
            keeps = store_masses(
                mass, teacher_mass, threshold, of_ratio, mass_ptrs, at < V, IS_REVERSE
            )
            drops.store(gl.where(keeps, 0.0, 1.0))
            dropped, teacher_dropped = with_dropped(
                dropped, teacher_dropped, exponentials, waiting, drops, BLOCK_N, COLUMNS, IS_REVERSE
            )
        ref, teacher_ref = end_both(
            state_ptrs, teacher_ptrs, size, (total, dropped), (teacher_total, teacher_dropped),
            of_ratios, IS_REVERSE, IS_JSD,
        )  # fmt: skip
        ref, teacher_ref = gl.convert_layout(ref, down), gl.convert_layout(teacher_ref, down)


@gluon.jit(do_not_specialize=["launch"])
def hopper_teacher_kernel(
    hidden,  # [N, D] packed, a descriptor of BLOCK_N x BLOCK_D
    weight,  # [V, D], of ROWS x BLOCK_D
    bias_ptr,  # [V]
    teacher_hidden,  # [N, D_TEACHER], of 16 bits as the student's or of 8, both operands alike
    teacher_weight,  # [V, D_TEACHER]
    teacher_bias_ptr,  # [V]
    column_ptr,  # [2, V] fp32: of a teacher of 8 bits, see `forward_kernel`
    token_ptr,  # [2, N] fp32
    count_ptr,  # [1] int32
    shape_ptr,  # [3] int32: blocks, GROUPS x splits, blocks at a time
    lower_ptr,  # [N]
    teacher_lower_ptr,  # [N]
    state_ptr,  # [SLOTS, 4, size]: see `teacher_forward_kernel`; out
    teacher_ptr,  # [SLOTS, 4, size]: out
    mass_ptr,  # [num_blocks, V]: see `teacher_forward_kernel`: out
    teacher_mass_ptr,  # [num_blocks, V]: out
    launch,
    size,
    N,
    V,
    D,
    D_TEACHER,
    scale,
    teacher_scale,
    keep,
    beta,
    of_ratio,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,  # columns of a tile in a group
    BLOCK_D: gl.constexpr,  # of the student
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    TEACHER_HAS_BIAS: gl.constexpr,
    IS_REVERSE: gl.constexpr,  # these two as of `teacher_forward_kernel`
    IS_JSD: gl.constexpr,
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
    of_columns = gl.allocate_shared_memory(gl.float32, [4 * GROUPS, ROWS], plain)
    # As many bytes of either model.
    DIMS: gl.constexpr = (
        BLOCK_D * weight.dtype.primitive_bitwidth // teacher_weight.dtype.primitive_bitwidth
    )
    e_shape: gl.constexpr = [STAGES, BLOCK_N, DIMS]
    c_shape: gl.constexpr = [STAGES * GROUPS, ROWS, DIMS]
    teacher_tiles = (
        memory_as(e_tiles, teacher_hidden.dtype, e_shape, teacher_hidden.layout),
        memory_as(c_tiles, teacher_weight.dtype, c_shape, teacher_weight.layout),
    )
    tiles = e_tiles, c_tiles
    full, empty = start_stages(STAGES)
    gl.warp_specialize(
        [
            (
                sum_both,
                (
                    0, bias_ptr, teacher_bias_ptr, column_ptr, token_ptr, lower_ptr,
                    teacher_lower_ptr, state_ptr, teacher_ptr, mass_ptr, teacher_mass_ptr,
                    waiting.index(0), of_columns, tiles, teacher_tiles, full, empty,
                    block, split, splits, num_turns, start_turn, stop_turn, launch, num_blocks,
                    count, size, N, V, D, D_TEACHER, scale, teacher_scale, threshold, beta,
                    of_ratio, BLOCK_N, ROWS, STAGES, HAS_BIAS, TEACHER_HAS_BIAS, IS_REVERSE, IS_JSD,
                ),
            ),
            (
                sum_both,
                (
                    1, bias_ptr, teacher_bias_ptr, column_ptr, token_ptr, lower_ptr,
                    teacher_lower_ptr, state_ptr, teacher_ptr, mass_ptr, teacher_mass_ptr,
                    waiting.index(1), of_columns, tiles, teacher_tiles, full, empty,
                    block, split, splits, num_turns, start_turn, stop_turn, launch, num_blocks,
                    count, size, N, V, D, D_TEACHER, scale, teacher_scale, threshold, beta,
                    of_ratio, BLOCK_N, ROWS, STAGES, HAS_BIAS, TEACHER_HAS_BIAS, IS_REVERSE, IS_JSD,
                ),
            ),
            (
                load_both,
                (
                    hidden, weight, teacher_hidden, teacher_weight, tiles, teacher_tiles, full,
                    empty, block, split, splits, start_turn, stop_turn, D, D_TEACHER, BLOCK_N, ROWS,
                    STAGES,
                ),
            ),
        ],
        # Warps and registers of the second group and of the loads; the first group has all others.
        [4, 1],
        [240, 24],
    )  # fmt: skip
