"""The backward's three products, chunk by chunk of the vocabulary, in one persistent kernel.

How many chunks hold a kept column is known on the device only. So the kernel loops over them
itself, with a barrier between the phases, and the host never waits.
"""

import triton
import triton.language as tl

from cce_dist.kernels.dds import dds_task
from cce_dist.kernels.dsd import dsd_task
from cce_dist.kernels.numbers import proxy_fence
from cce_dist.kernels.sdd import gather_task, sdd_task


@triton.jit
def grid_barrier(arrived_ptr, number, USE_TMA: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    """Waits until all programs have come here `number` times; all of them are resident."""
    if USE_TMA:
        proxy_fence(IS_INTERPRETED)
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr, 1, sem="release")
    while tl.atomic_add(arrived_ptr, 0, sem="acquire") < number * tl.num_programs(0):
        pass
    tl.debug_barrier()
    if USE_TMA:
        proxy_fence(IS_INTERPRETED)


@triton.jit
def backward_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    hidden_rows,  # descriptors of the same: TOKENS x BLOCK_K
    hidden_slices,  # BLOCK_K x SLICE
    rows_ptr,  # [num_blocks * TOKENS] int64, of a token that counts for those that don't
    straight_ptr,  # [words] int64: bit n: the block's tokens are rows one after the other
    weight_ptr,  # [V, D], inner stride 1
    bias_ptr,  # [V]
    class_weight_ptr,  # [V]
    place_ptr,  # [num_blocks * TOKENS] int32: where in the order the target stands, -1: none here
    count_ptr,  # [1] int32
    pull_ptr,  # [7, num_blocks * TOKENS]: see `sdd_task`
    unit_ptr,  # [1] fp32: power of two by which `pull_ptr` was divided
    order_ptr,  # [num_tiles * TILE] int32
    bits_ptr,  # [num_tiles * TILE, words] int64
    tile_bits_ptr,  # [num_tiles, words] int64
    blocks_ptr,  # [num_tiles, stride_bt] int32, blocks of consecutive rows first
    num_straight_ptr,  # [num_tiles] int32: how many of those
    num_blocks_ptr,  # [num_tiles] int32
    num_active_ptr,  # [1] int32
    tiles_ptr,  # [num_blocks, num_tiles] int32
    start_ptr,  # [num_blocks, num_chunks + 1] int32
    share_ptr,  # [groups, V]
    tail_ptr,  # [GROUPS, D]
    tail_bias_ptr,  # [GROUPS]
    workspace_ptr,  # [tiles_per_chunk, num_blocks, TILE, TOKENS]
    gathered_ptr,  # [tiles_per_chunk * TILE, stride_cd] the chunk's rows of the weight
    weight_tile,  # descriptors: of the weight, PAIR * TILE x BLOCK_K
    columns_rows,  # of `gathered_ptr`, or with EVERY of the weight, BLOCK_K x SLICE
    workspace_rows,  # of the workspace as rows of TOKENS, BLOCK_K x TOKENS
    workspace_columns,  # of the same, TILE x BLOCK_K
    grad_hidden_ptr,  # [N_padded, D] fp32
    grad_weight_ptr,  # [V, D]
    grad_bias_ptr,  # [V] fp32
    queue_ptr,  # [2 * num_chunks + 2] int32, zeros: the next task of each phase; then arrivals
    num_blocks,
    V,
    D,
    num_tiles,
    num_chunks,
    tiles_per_chunk,
    words,
    groups,
    stride_hn,
    stride_wv,
    stride_gv,
    stride_bt,
    stride_cd,
    scale,
    softcap,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    PAIR: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TAIL_PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    GROUPS: tl.constexpr,
    EVERY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_HIDDEN: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):
    """Tasks of a phase are taken from a queue; who computes one changes no bit of it."""
    count = tl.load(count_ptr)
    unit = tl.load(unit_ptr)
    num_slices = tl.cdiv(D, SLICE)
    dds_slices = num_slices if HAS_GRAD_WEIGHT else 1
    GATHERS: tl.constexpr = HAS_GRAD_HIDDEN and USE_TMA and not EVERY
    arrived_ptr = queue_ptr + 2 * num_chunks + 1
    stop = num_tiles
    if not EVERY:
        stop = tl.load(num_active_ptr)
    for chunk in range(tl.cdiv(stop, tiles_per_chunk)):
        first_tile = chunk * tiles_per_chunk
        tiles = tl.minimum(tiles_per_chunk, num_tiles - first_tile)
        num_gathers = tiles * num_slices if GATHERS else 0
        num_tasks = num_gathers + tl.cdiv(tiles, PAIR) * num_blocks
        task = tl.atomic_add(queue_ptr + 2 * chunk, 1)
        while task < num_tasks:
            if task < num_gathers:
                if GATHERS:
                    gather_task(
                        task, first_tile, weight_ptr, order_ptr, gathered_ptr, D, stride_wv,
                        stride_cd, TILE, SLICE,
                    )  # fmt: skip
            else:
                sdd_task(
                    task - num_gathers, first_tile, hidden_ptr, hidden_rows, rows_ptr,
                    straight_ptr, weight_ptr, weight_tile, bias_ptr, class_weight_ptr, place_ptr,
                    count, pull_ptr, order_ptr, bits_ptr, tile_bits_ptr, workspace_ptr, num_blocks,
                    V, D, num_tiles, words, stride_hn, stride_wv, scale, softcap, TOKENS, TILE,
                    PAIR, BLOCK_K, EVEN_K, STAGES, PRECISION, USE_TMA, EVERY, HAS_BIAS,
                    HAS_SOFTCAP, HAS_ENTROPY, HAS_SMOOTH, HAS_CLASS_WEIGHT,
                )  # fmt: skip
            task = tl.atomic_add(queue_ptr + 2 * chunk, 1)
        grid_barrier(arrived_ptr, 2 * chunk + 1, USE_TMA, IS_INTERPRETED)
        num_dsd = tl.cdiv(count, TOKENS) * num_slices if HAS_GRAD_HIDDEN else 0
        num_dds = tiles * dds_slices if HAS_GRAD_WEIGHT or HAS_GRAD_BIAS else 0
        task = tl.atomic_add(queue_ptr + 2 * chunk + 1, 1)
        while task < num_dds + num_dsd:
            # The longest tasks first: tiles of columns that most token blocks keep.
            if task < num_dds:
                if HAS_GRAD_WEIGHT or HAS_GRAD_BIAS:
                    dds_task(
                        task, first_tile, hidden_ptr, hidden_slices, rows_ptr, order_ptr,
                        blocks_ptr, num_straight_ptr, num_blocks_ptr, share_ptr, class_weight_ptr,
                        tail_ptr, tail_bias_ptr, workspace_ptr, workspace_columns, grad_weight_ptr,
                        grad_bias_ptr, unit, num_blocks, V, D, groups, dds_slices, stride_hn,
                        stride_gv, stride_bt, TOKENS, TILE, SLICE, BLOCK_K, STAGES, PRECISION,
                        TAIL_PRECISION, USE_TMA, GROUPS, EVERY, HAS_TAIL, HAS_MEAN,
                        HAS_CLASS_WEIGHT, HAS_GRAD_WEIGHT, HAS_GRAD_BIAS, ACCUMULATE,
                    )  # fmt: skip
            else:
                if HAS_GRAD_HIDDEN:
                    dsd_task(
                        task - num_dds, chunk, first_tile, weight_ptr, columns_rows, order_ptr,
                        tiles_ptr, start_ptr, workspace_ptr, workspace_rows, grad_hidden_ptr, unit,
                        num_blocks, V, D, num_tiles, num_chunks, tiles_per_chunk, stride_wv,
                        TOKENS, TILE, SLICE, BLOCK_K, STAGES, PRECISION, USE_TMA, EVERY,
                    )  # fmt: skip
            task = tl.atomic_add(queue_ptr + 2 * chunk + 1, 1)
        grid_barrier(arrived_ptr, 2 * chunk + 2, USE_TMA, IS_INTERPRETED)
