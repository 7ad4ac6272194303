"""The part of the weight's gradient that is left after the hidden gradient, while ranks sum that.

Its programs are short and wait for nobody. So the kernels of collectives, on a stream of higher
priority, find free multiprocessors whenever they start.
"""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.backward.dds import dds_kept_task, unkept_task


@triton.jit(do_not_specialize=["num_blocks", "groups", "at_once"])
def after_hidden_kernel(
    hidden_ptr,  # arguments as of `filtered_kernel`, which has filled the memory behind them
    rows_ptr,
    class_weight_ptr,
    grad_scale_ptr,
    order_ptr,
    starts_ptr,
    blocks_ptr,
    num_blocks_ptr,
    num_active_ptr,
    first_ptr,
    num_chunks_ptr,
    share_ptr,
    tail_ptr,
    tail_bias_ptr,
    pair_rows_ptr,
    workspace_ptr,
    grad_weight_ptr,
    grad_bias_ptr,
    num_blocks,
    V,
    D,
    num_tiles,
    groups,
    at_once,
    stride_hn,
    stride_gv,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LIST_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TAIL_PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UNKEPT: tl.constexpr,
    UNKEPT_SLICE: tl.constexpr,
):
    """Computes DDS of the first chunk, which comes last, and stores columns that no block keeps.

    A program takes every num_programs-th task of each kind. The longest tasks start first; while
    some programs multiply, others store.
    """
    grad_scale = tl.load(grad_scale_ptr)
    num_active = tl.load(num_active_ptr)
    dds_slices = tl.cdiv(D, SLICE) if HAS_GRAD_WEIGHT else 1
    dds_tiles = 0
    num_chunks = tl.load(num_chunks_ptr)
    if num_chunks > 0:
        dds_tiles = tl.minimum(tl.load(first_ptr + 1), num_active)
    for task in range(tl.program_id(0), dds_tiles * dds_slices, tl.num_programs(0)):
        dds_kept_task(
            task, 0, hidden_ptr, rows_ptr, order_ptr, starts_ptr, blocks_ptr, num_blocks_ptr,
            pair_rows_ptr, share_ptr, class_weight_ptr, tail_ptr, tail_bias_ptr, workspace_ptr,
            grad_weight_ptr, grad_bias_ptr, grad_scale, dds_tiles, num_tiles, num_blocks, V, D,
            groups, dds_slices, at_once, stride_hn, stride_gv, TOKENS, TILE, SLICE, BLOCK_K,
            LIST_STAGES, PRECISION, TAIL_PRECISION, WIDE, GROUPS, HAS_TAIL, HAS_MEAN,
            HAS_CLASS_WEIGHT, HAS_GRAD_WEIGHT, HAS_GRAD_BIAS, ACCUMULATE,
        )  # fmt: skip
    num_unkept = tl.where(num_chunks < 0, 0, (num_tiles - num_active) * (TILE // UNKEPT))
    slices = tl.cdiv(D, UNKEPT_SLICE) if HAS_GRAD_WEIGHT else 1
    for task in range(tl.program_id(0), num_unkept, tl.num_programs(0)):
        unkept_task(
            task, num_active * TILE, order_ptr, share_ptr, class_weight_ptr, tail_ptr,
            tail_bias_ptr, grad_weight_ptr, grad_bias_ptr, V, D, groups, slices, stride_gv, UNKEPT,
            UNKEPT_SLICE, TAIL_PRECISION, GROUPS, HAS_TAIL, HAS_MEAN, HAS_CLASS_WEIGHT,
            HAS_GRAD_WEIGHT, HAS_GRAD_BIAS, ACCUMULATE,
        )  # fmt: skip
