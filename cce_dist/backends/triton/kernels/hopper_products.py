"""Products on Hopper: one warp loads, GROUPS of four warps multiply and release what it loaded."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cce_dist.backends.triton.kernels.gluon_names import async_load, thread_barrier

GROUPS = gl.constexpr(2)


@gluon.jit
def start_stages(STAGES: gl.constexpr):
    """Returns the barriers of the stages: loaded, and released by all groups."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    return full, empty


@gluon.jit
def load_product(
    hidden,
    weight,
    e_tiles,
    c_tiles,
    full,
    empty,
    row,
    column,
    step,
    D,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Loads the operands of a tile's product, as soon as both groups have released a stage; returns
    the next step."""
    num_bytes: gl.constexpr = (BLOCK_N + GROUPS * ROWS) * BLOCK_D * hidden.dtype.primitive_bitwidth
    for k in range(0, D, BLOCK_D):
        stage = step % STAGES
        loaded = full.index(stage)
        mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
        mbarrier.expect(loaded, num_bytes // 8)
        async_load(hidden, [row, k], loaded, e_tiles.index(stage))
        for group in gl.static_range(GROUPS):
            async_load(
                weight, [column + group * ROWS, k], loaded, c_tiles.index(GROUPS * stage + group)
            )
        step += 1
    return step


@gluon.jit
def release_before(empty, step, pred, STAGES: gl.constexpr):
    """Releases the stage of the step before, if `pred`: one warp signals for all four of the group
    that they have finished its product."""
    thread_barrier()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=pred)


@gluon.jit
def product_of(
    e_tiles,
    c_tiles,
    full,
    empty,
    group,
    step,
    D,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
    BY_TOKEN: gl.constexpr,
):
    """Computes E . C of the group's columns, in int32 for 8-bit integers, else in fp32: [BLOCK_N,
    ROWS] if BY_TOKEN, else [ROWS, BLOCK_N]. Returns it and the next step."""
    BLOCK_N: gl.constexpr = e_tiles.shape[1]
    ROWS: gl.constexpr = c_tiles.shape[1]
    ACCUMULATOR: gl.constexpr = gl.int32 if c_tiles.dtype.is_int() else gl.float32
    if BY_TOKEN:
        x = gl.zeros((BLOCK_N, ROWS), ACCUMULATOR, LAYOUT)
    else:
        x = gl.zeros((ROWS, BLOCK_N), ACCUMULATOR, LAYOUT)
    for k in range(0, D, BLOCK_D):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        c = c_tiles.index(GROUPS * stage + group)
        e = e_tiles.index(stage)
        if BY_TOKEN:
            x = warpgroup_mma(e, c.permute((1, 0)), x, use_acc=k > 0, is_async=True)
        else:
            x = warpgroup_mma(c, e.permute((1, 0)), x, use_acc=k > 0, is_async=True)
        x = warpgroup_mma_wait(1, deps=(x,))
        release_before(empty, step, k > 0, STAGES)
        step += 1
    x = warpgroup_mma_wait(0, deps=(x,))
    release_before(empty, step, True, STAGES)
    return x, step


@gluon.jit
def load_step(
    a,
    b,
    a_tiles,
    b_tiles,
    full,
    empty,
    step,
    a_at,  # of the first group
    a_next,  # of the second
    b_at,
    STAGES: gl.constexpr,
):
    """Loads the operands of a step of a product, A of each group and B of both, as soon as both
    groups have released the stage; returns the next step."""
    a_size: gl.constexpr = a_tiles.shape[1] * a_tiles.shape[2]
    b_size: gl.constexpr = b_tiles.shape[1] * b_tiles.shape[2]
    num_bytes: gl.constexpr = (GROUPS * a_size + b_size) * a.dtype.primitive_bitwidth // 8
    stage = step % STAGES
    loaded = full.index(stage)
    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(loaded, num_bytes)
    async_load(a, a_at, loaded, a_tiles.index(GROUPS * stage))
    async_load(a, a_next, loaded, a_tiles.index(GROUPS * stage + 1))
    async_load(b, b_at, loaded, b_tiles.index(stage))
    return step + 1


@gluon.jit
def turned_product_of(
    a_tiles,
    b_tiles,
    full,
    empty,
    group,
    step,
    steps,
    A_TURNED: gl.constexpr,
    B_TURNED: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Computes A . B in fp32, of as many steps; returns it and the next step. Tiles of an operand
    that is turned lie as [step, A's rows or B's columns], and others the other way round."""
    ROWS: gl.constexpr = a_tiles.shape[2] if A_TURNED else a_tiles.shape[1]
    COLUMNS: gl.constexpr = b_tiles.shape[2] if B_TURNED else b_tiles.shape[1]
    x = gl.zeros((ROWS, COLUMNS), gl.float32, LAYOUT)
    for k in range(0, steps):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        a = a_tiles.index(GROUPS * stage + group)
        b = b_tiles.index(stage)
        if A_TURNED:
            a = a.permute((1, 0))
        if not B_TURNED:
            b = b.permute((1, 0))
        x = warpgroup_mma(a, b, x, use_acc=k > 0, is_async=True)
        x = warpgroup_mma_wait(1, deps=(x,))
        release_before(empty, step, k > 0, STAGES)
        step += 1
    x = warpgroup_mma_wait(0, deps=(x,))
    release_before(empty, step, steps > 0, STAGES)
    return x, step
