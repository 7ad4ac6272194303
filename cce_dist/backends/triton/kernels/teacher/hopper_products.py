"""Products of Hopper's forward of two heads: their loads, and their sums in registers."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from cce_dist.backends.triton.kernels.forward.hopper_stats import GROUPS
from cce_dist.backends.triton.kernels.gluon_names import async_load, thread_barrier


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
    """Loads the operands of a tile's product, as soon as both groups have released a stage."""
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
def product_of(
    e_tiles,
    c_tiles,
    full,
    empty,
    bias_ptr,
    group,
    columns,
    step,
    V,
    D,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Computes E . C + bias of the group's columns, [BLOCK_N, ROWS] fp32; returns the next step,
    too."""
    x = gl.zeros((BLOCK_N, ROWS), gl.float32, LAYOUT)
    for k in range(0, D, BLOCK_D):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        c = c_tiles.index(GROUPS * stage + group).permute((1, 0))
        x = warpgroup_mma(e_tiles.index(stage), c, x, use_acc=k > 0, is_async=True)
        x = warpgroup_mma_wait(1, deps=(x,))
        # One warp signals for all four that they have finished the product before.
        thread_barrier()
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=k > 0)
        step += 1
    x = warpgroup_mma_wait(0, deps=(x,))
    thread_barrier()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
    if HAS_BIAS:
        bias = gl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(gl.float32)
        x += bias[None, :]
    return x, step
