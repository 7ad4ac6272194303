"""`exact` on Hopper: SDD, DSD and DDS of every column by one launch.

One warp takes tasks from a queue, in the order of `exact_schedule`, and loads their operands; two
groups of four warps multiply SIDE x SIDE each. Which program takes a task changes no bit of the
result. A program that waits does so for tasks before its own, all of which run: no task waits for
ever.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.backward import dsd, exact_schedule
from cce_dist.backends.triton.kernels.backward.exact_schedule import (
    DDS_1,
    DSD,
    PHASES,
    ROWS,
    SIDE,
)
from cce_dist.backends.triton.kernels.backward.hopper_exact_stores import (
    PART_LAYOUT,
    PARTS,
    SUM_PARTS,
    add_grad_hidden,
    first_of_run,
    store_d_logits,
    store_grad_bias,
    store_grad_weight,
    upstream_of,
)
from cce_dist.backends.triton.kernels.gluon_names import memory_as, thread_barrier
from cce_dist.backends.triton.kernels.hopper_products import (
    GROUPS,
    load_step,
    start_stages,
    turned_product_of,
)

# Numbers that a step of a product's sum takes.
STEP = gl.constexpr(64)
# Tasks that the loading warp may have taken before the groups begin them.
AHEAD = gl.constexpr(2)

range_of = gluon.jit(exact_schedule.range_of.fn)
place_of = gluon.jit(exact_schedule.place_of.fn)
sdd_place = gluon.jit(exact_schedule.sdd_place.fn)
dds_place = gluon.jit(exact_schedule.dds_place.fn)
dsd_place = gluon.jit(exact_schedule.dsd_place.fn)
needs_of = gluon.jit(exact_schedule.needs_of.fn)
piece_of = gluon.jit(dsd.piece_of.fn)
proxy_fence = gluon.jit(numbers.proxy_fence.fn)


@gluon.jit
def wait_for_phases(done_ptr, needs):
    """Waits until `needs` tasks of each phase are done by both groups."""
    for phase in gl.static_range(PHASES):
        if needs[phase] > 0:
            while gl.atomic_add(done_ptr + phase, 0, sem="acquire") < GROUPS * needs[phase]:
                pass
    # What they have stored is loaded by descriptors.
    proxy_fence(False)


@gluon.jit
def tell(tasks, told, taken, number, task):
    """Tells both groups of a task, as soon as they have begun the one AHEAD before it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot = number % AHEAD
    mbarrier.wait(taken.index(slot), (number // AHEAD & 1) ^ 1)
    tasks.index(slot).store(gl.full((1,), task, gl.int32, layout))
    thread_barrier()
    mbarrier.arrive(told.index(slot))


@gluon.jit
def next_task(tasks, told, taken, number):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = number % AHEAD
    mbarrier.wait(told.index(slot), number // AHEAD & 1)
    task = gl.max(tasks.index(slot).load(layout), 0)
    thread_barrier()
    mbarrier.arrive(taken.index(slot))
    return task


@gluon.jit
def load_tasks(
    hidden_rows,
    hidden_steps,
    weight_rows,
    weight_steps,
    chunk_rows,
    chunk_steps,
    a_tiles,
    b_tiles,
    a_turned,
    b_turned,
    full,
    empty,
    tasks,
    told,
    taken,
    queue_ptr,
    stage,
    count,
    V,
    D,
    chunk,
    half,
    pairs,
    slices,
    pieces,
    STAGES: gl.constexpr,
    HAS_DSD: gl.constexpr,
    HAS_DDS: gl.constexpr,
):
    """Takes tasks, tells the groups of them, and loads their operands as soon as both groups have
    released a stage."""
    dds_slices = slices if HAS_DDS else 0
    dsd_tasks = pairs * slices * pieces if HAS_DSD else 0
    next_ptr = queue_ptr + gl.where(stage == 2, 1, 0)
    first, end = range_of(stage, V, chunk, half, pairs, dds_slices, dsd_tasks)
    step, number, waited_for = 0, 0, -1
    task = first + gl.atomic_add(next_ptr, 1, sem="relaxed")
    while task < end:
        tell(tasks, told, taken, number, task)
        number += 1
        chunk_number, phase, i = place_of(
            task, V, chunk, half, pairs, dds_slices, dsd_tasks, gl.num_programs(0)
        )
        if chunk_number * PHASES + phase != waited_for:
            needs = needs_of(chunk_number, phase, V, chunk, half, pairs, dds_slices, dsd_tasks)
            wait_for_phases(queue_ptr + 2, needs)
            waited_for = chunk_number * PHASES + phase
        first_column = chunk_number * chunk
        columns = gl.minimum(chunk, V - first_column)
        if phase < DDS_1:
            pair, column = sdd_place(i, columns, half, phase)
            row = pair * ROWS
            for k in range(0, D, STEP):
                step = load_step(
                    hidden_rows, weight_rows, a_tiles, b_tiles, full, empty, step,
                    [row, k], [row + SIDE, k], [first_column + column, k], STAGES,
                )  # fmt: skip
        elif phase == DSD:
            pair, dim, piece = dsd_place(i, pairs, slices, pieces)
            row = pair * ROWS
            start, stop = piece_of(piece, pieces, columns, STEP)
            for k in range(start, stop, STEP):
                step = load_step(
                    chunk_rows, weight_steps, a_tiles, b_turned, full, empty, step,
                    [row, k], [row + SIDE, k], [first_column + k, dim], STAGES,
                )  # fmt: skip
        else:
            column, dim = dds_place(i, columns, half, phase, slices)
            for k in range(0, count, STEP):
                step = load_step(
                    chunk_steps, hidden_steps, a_turned, b_turned, full, empty, step,
                    [k, column], [k, column + SIDE], [k, dim], STAGES,
                )  # fmt: skip
        task = first + gl.atomic_add(next_ptr, 1, sem="relaxed")
    tell(tasks, told, taken, number, end)


@gluon.jit
def stores_done():
    """Waits until this thread's copies from shared memory are written."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def tell_done(queue_ptr, phase):
    """Counts a task of the phase as done by this group; -1: there is none.

    A DSD of no columns has no step, and its group may end it while the loading warp still waits for
    the phases before. It is counted after `next_task`, hence after that wait: not before.
    """
    if phase >= 0:
        stores_done()
        thread_barrier()
        gl.atomic_add(queue_ptr + 2 + phase, 1, sem="release")


@gluon.jit
def multiply_tasks(group, operands, FLAGS: gl.constexpr):
    """Multiplies the group's half of each task's rows, and stores the result."""
    (
        a_tiles, b_tiles, a_turned, b_turned, full, empty, tasks, told, taken, parts, sums,
        chunk_parts, grad_parts, sum_parts, chunk_ptr, bias_ptr, class_weight_ptr, tail_ptr,
        tail_bias_ptr, target_ptr, upstream_ptr, row_ptr, grad_hidden_ptr, grad_weight_ptr,
        grad_bias_ptr, queue_ptr, grad_scale, stage, count, N, V, D, chunk, half, pairs, slices,
        pieces, num_rows, stride_gv, scale, softcap,
    ) = operands  # fmt: skip
    STAGES: gl.constexpr = FLAGS[0]
    HAS_BIAS: gl.constexpr = FLAGS[1]
    HAS_SOFTCAP: gl.constexpr = FLAGS[2]
    HAS_ENTROPY: gl.constexpr = FLAGS[3]
    HAS_SMOOTH: gl.constexpr = FLAGS[4]
    HAS_MEAN: gl.constexpr = FLAGS[5]
    HAS_CLASS_WEIGHT: gl.constexpr = FLAGS[6]
    HAS_DSD: gl.constexpr = FLAGS[7]
    HAS_DDS: gl.constexpr = FLAGS[8]
    HAS_GRAD_BIAS: gl.constexpr = FLAGS[9]
    ACCUMULATE: gl.constexpr = FLAGS[10]
    COPIES_PARTS: gl.constexpr = FLAGS[11]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    dds_slices = slices if HAS_DDS else 0
    dsd_tasks = pairs * slices * pieces if HAS_DSD else 0
    _, end = range_of(stage, V, chunk, half, pairs, dds_slices, dsd_tasks)
    step, number, stored, stored_in = 0, 0, -1, -1
    task = next_task(tasks, told, taken, number)
    while task < end:
        chunk_number, phase, i = place_of(
            task, V, chunk, half, pairs, dds_slices, dsd_tasks, gl.num_programs(0)
        )
        first_column = chunk_number * chunk
        columns = gl.minimum(chunk, V - first_column)
        # A task's stores are over by the end of the next one's product. But the next one may wait
        # for them, unless it is of the same phase.
        if chunk_number * PHASES + phase != stored_in:
            tell_done(queue_ptr, stored)
            stored = -1
        if phase < DDS_1:
            pair, local = sdd_place(i, columns, half, phase)
            token = pair * ROWS + group * SIDE
            upstream = upstream_of(
                token, target_ptr, upstream_ptr, N, scale, PART_LAYOUT, HAS_ENTROPY, HAS_SMOOTH
            )
            x, step = turned_product_of(
                a_tiles, b_tiles, full, empty, group, step, gl.cdiv(D, STEP), False, False, STAGES,
                layout,
            )  # fmt: skip
            tell_done(queue_ptr, stored)
            store_d_logits(
                x, upstream, token, local, first_column + local, chunk_parts, parts, group,
                bias_ptr, class_weight_ptr, V, softcap, HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY,
                HAS_SMOOTH, HAS_CLASS_WEIGHT,
            )  # fmt: skip
        elif phase == DSD:
            pair, dim, piece = dsd_place(i, pairs, slices, pieces)
            token = pair * ROWS + group * SIDE
            run = first_of_run(token, row_ptr, count)
            begin, stop = piece_of(piece, pieces, columns, STEP)
            x, step = turned_product_of(
                a_tiles, b_turned, full, empty, group, step, gl.cdiv(stop - begin, STEP), False,
                True, STAGES, layout,
            )  # fmt: skip
            tell_done(queue_ptr, stored)
            add_grad_hidden(
                x * grad_scale, run, token, dim, chunk_number == 0, sum_parts, sums, group, row_ptr,
                grad_hidden_ptr, piece * num_rows, count, D,
            )  # fmt: skip
        else:
            local, dim = dds_place(i, columns, half, phase, slices)
            local += group * SIDE
            x, step = turned_product_of(
                a_turned, b_turned, full, empty, group, step, gl.cdiv(count, STEP), True, True,
                STAGES, layout,
            )  # fmt: skip
            tell_done(queue_ptr, stored)
            store_grad_weight(
                x * grad_scale, first_column + local, dim, grad_parts, parts, group, tail_ptr,
                class_weight_ptr, grad_weight_ptr, V, D, stride_gv, HAS_MEAN, HAS_CLASS_WEIGHT,
                ACCUMULATE, COPIES_PARTS,
            )  # fmt: skip
            if HAS_GRAD_BIAS:  # noqa: SIM102
                if dim == 0:
                    store_grad_bias(
                        local, first_column + local, chunk_ptr, class_weight_ptr, tail_bias_ptr,
                        grad_bias_ptr, count, grad_scale, V, chunk, HAS_MEAN, HAS_CLASS_WEIGHT,
                    )  # fmt: skip
        stored, stored_in = phase, chunk_number * PHASES + phase
        number += 1
        task = next_task(tasks, told, taken, number)
    tell_done(queue_ptr, stored)


@gluon.jit(
    do_not_specialize=["stage", "pieces", "num_rows", "chunk", "half"],
    # They start behind a filter's tail, whose groups are more with more tokens.
    do_not_specialize_on_alignment=["tail_ptr", "tail_bias_ptr"],
)
def hopper_exact_kernel(
    hidden_rows,  # [N, D] packed, a descriptor of SIDE x STEP
    hidden_steps,  # of STEP x SIDE
    weight_rows,  # [V, D], of SIDE x STEP
    weight_steps,  # of STEP x SIDE
    chunk_rows,  # [tokens, chunk] d_logits, of SIDE x STEP
    chunk_steps,  # of STEP x SIDE
    chunk_parts,  # of SIDE x (SIDE / PARTS): out
    grad_parts,  # of the weight's gradient, of the same tile, or a pointer
    sum_parts,  # of the hidden gradient, [pieces * num_rows, D], of SIDE x (SIDE / SUM_PARTS)
    chunk_ptr,  # whole pairs of token blocks
    bias_ptr,  # [V]
    class_weight_ptr,  # [V] fp32
    tail_ptr,  # [1, D] fp32: of the mean logit
    tail_bias_ptr,  # [1] fp32
    target_ptr,  # [N] int32, -1: none here
    upstream_ptr,  # [7, N]: see `exact_logits_kernel`
    row_ptr,  # [N] int64: row of each token in the hidden gradient
    grad_hidden_ptr,  # [pieces, num_rows, D] fp32: their sum is the hidden gradient: out
    grad_weight_ptr,  # [V, D]: out
    grad_bias_ptr,  # [V] fp32: out
    count_ptr,  # [1] int32: tokens that count; -1: nothing is computed
    grad_scale_ptr,  # [1] fp32: power of two by which d_logits were divided
    queue_ptr,  # [7] int32 zeros: next task; of AFTER_HIDDEN; tasks of each phase that are done
    stage,  # see `launch/tiles.py`
    pieces,  # of a chunk's columns, so that few tokens give all programs work
    num_rows,
    N,
    V,
    D,
    chunk,  # columns, a multiple of ROWS
    half,  # columns of a chunk's first half, a multiple of ROWS
    stride_gv,
    scale,  # a number, or [N] of each token
    softcap,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    HAS_ENTROPY: gl.constexpr,
    HAS_SMOOTH: gl.constexpr,
    HAS_MEAN: gl.constexpr,
    HAS_CLASS_WEIGHT: gl.constexpr,
    HAS_DSD: gl.constexpr,
    HAS_DDS: gl.constexpr,
    HAS_GRAD_BIAS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    COPIES_PARTS: gl.constexpr,  # `grad_parts` stores the weight's gradient
):
    """Computes both gradients of every column: results and options are those of `exact_logits` and
    `exact_products`, whose kernels run everywhere else, a chunk at a time."""
    count = gl.load(count_ptr)
    grad_scale = gl.load(grad_scale_ptr)
    pairs = gl.cdiv(count, ROWS)
    slices = gl.where(count < 0, 0, gl.cdiv(D, SIDE))
    a_tiles = gl.allocate_shared_memory(
        hidden_rows.dtype, [GROUPS * STAGES, SIDE, STEP], hidden_rows.layout
    )
    b_tiles = gl.allocate_shared_memory(weight_rows.dtype, [STAGES, SIDE, STEP], weight_rows.layout)
    # The same memory, for operands whose rows the sum runs over.
    a_turned = memory_as(
        a_tiles, chunk_steps.dtype, [GROUPS * STAGES, STEP, SIDE], chunk_steps.layout
    )
    b_turned = memory_as(b_tiles, weight_steps.dtype, [STAGES, STEP, SIDE], weight_steps.layout)
    parts = gl.allocate_shared_memory(
        chunk_parts.dtype, [GROUPS * 2, SIDE, SIDE // PARTS], chunk_parts.layout
    )
    sums = memory_as(
        parts, sum_parts.dtype, [GROUPS * 2, SIDE, SIDE // SUM_PARTS], sum_parts.layout
    )
    full, empty = start_stages(STAGES)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    tasks = gl.allocate_shared_memory(gl.int32, [AHEAD, 1], plain)
    told = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [AHEAD, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(AHEAD):
        mbarrier.init(told.index(slot), count=1)
        mbarrier.init(taken.index(slot), count=GROUPS)
    common = (
        a_tiles, b_tiles, a_turned, b_turned, full, empty, tasks, told, taken, parts, sums,
        chunk_parts, grad_parts, sum_parts, chunk_ptr, bias_ptr, class_weight_ptr, tail_ptr,
        tail_bias_ptr, target_ptr, upstream_ptr, row_ptr, grad_hidden_ptr, grad_weight_ptr,
        grad_bias_ptr, queue_ptr, grad_scale, stage, count, N, V, D, chunk, half, pairs, slices,
        pieces, num_rows, stride_gv, scale, softcap,
    )  # fmt: skip
    flags: gl.constexpr = (
        STAGES, HAS_BIAS, HAS_SOFTCAP, HAS_ENTROPY, HAS_SMOOTH, HAS_MEAN, HAS_CLASS_WEIGHT,
        HAS_DSD, HAS_DDS, HAS_GRAD_BIAS, ACCUMULATE, COPIES_PARTS,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (multiply_tasks, (0, common, flags)),
            (multiply_tasks, (1, common, flags)),
            (
                load_tasks,
                (
                    hidden_rows, hidden_steps, weight_rows, weight_steps, chunk_rows, chunk_steps,
                    a_tiles, b_tiles, a_turned, b_turned, full, empty, tasks, told, taken,
                    queue_ptr, stage, count, V, D, chunk, half, pairs, slices, pieces, STAGES,
                    HAS_DSD, HAS_DDS,
                ),
            ),
        ],
        # Warps and registers of the second group and of the loads; the first group has all others.
        [4, 1],
        [232, 40],
    )  # fmt: skip
