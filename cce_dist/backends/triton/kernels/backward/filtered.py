"""The filtered backward's three products, chunk by chunk, in one persistent kernel.

Only the device knows how many chunks hold a kept column. So the kernel itself loops over them, with
a barrier between its phases, and the host never waits.
"""

import triton
import triton.language as tl

from cce_dist.backends.triton.kernels.backward.dds import dds_kept_task, unkept_task
from cce_dist.backends.triton.kernels.backward.dsd import dsd_kept_task
from cce_dist.backends.triton.kernels.backward.sdd import sdd_kept_task
from cce_dist.backends.triton.kernels.filter.column_lists import list_task
from cce_dist.backends.triton.kernels.numbers import proxy_fence


@triton.jit
def arrive(arrived_ptr, USE_TMA: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    if USE_TMA:
        proxy_fence(IS_INTERPRETED)
    tl.debug_barrier()
    tl.atomic_add(arrived_ptr, 1, sem="release")


@triton.jit
def go_on(USE_TMA: tl.constexpr, IS_INTERPRETED: tl.constexpr):
    tl.debug_barrier()
    if USE_TMA:
        proxy_fence(IS_INTERPRETED)


@triton.jit(
    do_not_specialize=[
        "pieces",
        "stage",
        "num_rows",
        "num_blocks",
        "max_chunks",
        "words",
        "groups",
        "at_once",
    ]
)
def filtered_kernel(
    hidden_ptr,  # [num_rows, D], inner stride 1
    rows_ptr,  # [num_blocks * TOKENS] int64; tokens that don't count have a counting token's row
    weight_ptr,  # [V, D], inner stride 1
    bias_ptr,  # [V]
    class_weight_ptr,  # [V]
    target_ptr,  # [num_blocks * TOKENS] int32, -1: none here
    count_ptr,  # [1] int32
    upstream_ptr,  # [7 or 8, num_blocks * TOKENS]: see `exact_logits_kernel`
    grad_scale_ptr,  # [1] fp32: power of two by which `upstream_ptr` was divided
    seed_ptr,  # [1] int32
    bits_ptr,  # [num_tiles, 1 + HAS_DRAWN, TILE // 32, num_blocks] int32: see `tiles_kernel`
    order_ptr,  # [num_tiles * TILE] int32
    starts_ptr,  # [num_blocks + 2, num_tiles + 1] int32
    blocks_ptr,  # [num_tiles, num_blocks] int32
    position_ptr,  # [num_tiles, num_blocks] int16, -1 where the block keeps none
    num_blocks_ptr,  # [num_tiles] int32
    num_active_ptr,  # [1] int32
    first_ptr,  # [max_chunks + 1] int32
    num_chunks_ptr,  # [1] int32; if -1, there is nothing to do: see backward/long_lists.py
    base_ptr,  # [max_chunks, num_blocks + 1] int32
    segment_ptr,  # [max_chunks, num_blocks + 1] int32
    share_ptr,  # [groups, V]
    tail_ptr,  # [GROUPS, D]
    tail_bias_ptr,  # [GROUPS]
    entries_ptr,  # [2, max_rows] int32: lists of this chunk and the next
    pair_rows_ptr,  # [max_pairs, TILE] int32
    workspace_ptr,  # [max_rows + TILE, TOKENS], the last rows 0
    workspace_rows,  # descriptor of the same, BLOCK_K x TOKENS
    stored_ptr,  # the same memory: the last chunk's entries, if HAS_STORED: see `stored_entries`
    ref_ptr,  # [num_blocks * TOKENS] log2
    bad_ref_ptr,  # [num_blocks] int32: 1 where a block's stored entries are not usable
    drawn_sum_ptr,  # [max_tasks, TOKENS] fp32
    grad_hidden_ptr,  # [pieces, num_rows, D] fp32: their sum is the hidden gradient
    drawn_total_ptr,  # [N_padded] fp32: sum of the drawn entries' d_logits: out
    grad_weight_ptr,  # [V, D]
    grad_bias_ptr,  # [V] fp32
    queue_ptr,  # [2 * max_chunks + 3] int32, zeros: the next task of each phase; arrivals; the next
    # task of columns that no block keeps
    pieces,  # of each block's columns, so that few tokens give all programs work
    num_rows,
    stage,  # 0: all; 1: without the share of kernels/backward/after_hidden.py
    num_blocks,
    V,
    D,
    num_tiles,
    max_chunks,
    max_rows,
    words,
    groups,
    at_once,  # slices, see `slice_of`
    stride_hn,
    stride_wv,
    stride_gv,
    scale,
    softcap,
    teacher_hidden_ptr,  # [num_rows, TEACHER_D]
    teacher_weight_ptr,  # [V, TEACHER_D]
    teacher_bias_ptr,  # [V]
    teacher_upstream_ptr,  # [7 or 8, num_blocks * TOKENS], divided by the same power of two
    TEACHER_D,
    stride_teacher_hn,
    stride_teacher_wv,
    teacher_scale,
    teacher_softcap,
    beta,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    SEGMENT: tl.constexpr,
    BLOCKS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    STAGES: tl.constexpr,
    LIST_STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    TAIL_PRECISION: tl.constexpr,
    USE_TMA: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
    WIDE: tl.constexpr,  # fp32 inputs
    BRANCHES: tl.constexpr,  # around the uses of a product
    GROUPS: tl.constexpr,
    HAS_STORED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_DRAWN: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,  # relative to the teacher, if there is one; see IS_JSD
    HAS_TAIL: tl.constexpr,
    HAS_MEAN: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    HAS_GRAD_HIDDEN: tl.constexpr,
    HAS_GRAD_WEIGHT: tl.constexpr,
    HAS_GRAD_BIAS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    UNKEPT: tl.constexpr,  # columns of `unkept_task`
    UNKEPT_SLICE: tl.constexpr,
    HAS_TEACHER: tl.constexpr,
    TEACHER_EVEN_K: tl.constexpr,
    TEACHER_HAS_BIAS: tl.constexpr,
    TEACHER_HAS_SOFTCAP: tl.constexpr,
    IS_JSD: tl.constexpr,  # the entropy is relative to a mixture, with beta of the teacher
):
    """Computes the products of the columns that each block keeps or draws, from lists of columns.

    Chunks run from the last to the first, which leaves the longest DDS until the hidden gradient is
    done. A chunk's lists are computed beside the products of the chunk before. Programs that wait
    for others store the gradients of columns that no block keeps. Loops that load rows by a list
    have `LIST_STAGES` stages: more than others, since their first stages load the list.
    """
    count = tl.load(count_ptr)
    grad_scale = tl.load(grad_scale_ptr)
    seed = tl.load(seed_ptr)
    num_active = tl.load(num_active_ptr)
    num_chunks = tl.load(num_chunks_ptr)
    teacher = (
        teacher_hidden_ptr, teacher_weight_ptr, teacher_bias_ptr, teacher_upstream_ptr, TEACHER_D,
        stride_teacher_hn, stride_teacher_wv, teacher_scale, teacher_softcap, beta,
    )  # fmt: skip
    num_slices = tl.cdiv(D, SLICE)
    dds_slices = num_slices if HAS_GRAD_WEIGHT else 1
    arrived_ptr = queue_ptr + 2 * max_chunks + 1
    unkept_slices = tl.cdiv(D, UNKEPT_SLICE) if HAS_GRAD_WEIGHT else 1
    num_unkept = 0
    if HAS_GRAD_WEIGHT or HAS_GRAD_BIAS:
        num_unkept = tl.where(stage == 1, 0, (num_tiles - num_active) * (TILE // UNKEPT))
    # Phase 2 turn: lists of a chunk, and products of the chunk before; phase 2 turn + 1: its SDD.
    for phase in range(2 * num_chunks + 1):
        turn = phase // 2
        is_last = phase == 2 * num_chunks
        chunk = num_chunks - 1 - turn
        at = chunk * (num_blocks + 1)
        entries_of_turn = (turn + 1) % 2 * max_rows
        other = turn % 2 * max_rows
        # The chunk has tiles [first, middle); the chunk of the turn before has [middle, last).
        first = 0
        last = 0
        middle = tl.load(first_ptr + chunk + 1)
        if turn > 0:
            last = tl.load(first_ptr + chunk + 2)
        if turn < num_chunks:
            first = tl.load(first_ptr + chunk)
        is_sdd = phase % 2 > 0
        num_dds = 0
        num_dsd = 0
        num_sdd = 0
        if is_sdd:
            num_sdd = tl.load(segment_ptr + at + num_blocks)
            num_lists = tl.maximum(tl.minimum(middle, num_active) - first, 0) * words
        else:
            if turn > 0:
                if HAS_GRAD_WEIGHT or HAS_GRAD_BIAS:
                    num_dds = tl.maximum(tl.minimum(last, num_active) - middle, 0)
                    num_dds = tl.where(is_last & (stage == 1), 0, num_dds)
                if HAS_GRAD_HIDDEN:
                    num_dsd = tl.cdiv(count, TOKENS) * num_slices * pieces
            num_lists = tl.where(is_last, 0, (middle - first) * words)
        dds_tiles = num_dds
        num_dds *= dds_slices
        num_products = num_dds + num_dsd + num_sdd
        task = tl.atomic_add(queue_ptr + phase, 1)
        while task < num_products + num_lists:
            # The longest tasks first: tiles of columns that most token blocks keep.
            if task < num_dds:
                if HAS_GRAD_WEIGHT or HAS_GRAD_BIAS:
                    dds_kept_task(
                        task, middle, hidden_ptr, rows_ptr, order_ptr, starts_ptr, blocks_ptr,
                        num_blocks_ptr, pair_rows_ptr, share_ptr, class_weight_ptr, tail_ptr,
                        tail_bias_ptr, workspace_ptr, grad_weight_ptr, grad_bias_ptr,
                        grad_scale, dds_tiles, num_tiles, num_blocks, V, D, groups, dds_slices,
                        at_once, stride_hn, stride_gv, TOKENS, TILE, SLICE, BLOCK_K,
                        LIST_STAGES, PRECISION, TAIL_PRECISION, WIDE, GROUPS, HAS_TAIL,
                        HAS_MEAN, HAS_CLASS_WEIGHT, HAS_GRAD_WEIGHT, HAS_GRAD_BIAS, ACCUMULATE,
                    )  # fmt: skip
            elif task < num_dds + num_dsd:
                if HAS_GRAD_HIDDEN:
                    before = at + num_blocks + 1
                    dsd_kept_task(
                        task - num_dds, pieces, turn - 1, middle, last, weight_ptr, starts_ptr,
                        base_ptr + before, segment_ptr + before, entries_ptr + entries_of_turn,
                        workspace_ptr, workspace_rows, drawn_sum_ptr, rows_ptr, grad_hidden_ptr,
                        num_rows, drawn_total_ptr, count, grad_scale, num_tiles, D, stride_wv,
                        at_once, TOKENS, SLICE, BLOCK_K, LIST_STAGES, PRECISION, USE_TMA, WIDE,
                        BRANCHES, HAS_DRAWN,
                    )  # fmt: skip
            elif task < num_products:
                sdd_kept_task(
                    task, turn == 0, seed, first, middle, hidden_ptr, rows_ptr, weight_ptr,
                    bias_ptr, target_ptr, upstream_ptr, starts_ptr, base_ptr + at,
                    segment_ptr + at, entries_ptr + other, workspace_ptr, stored_ptr, ref_ptr,
                    bad_ref_ptr, drawn_sum_ptr, teacher, num_tiles,
                    num_blocks, D, stride_hn, stride_wv, scale, softcap, TOKENS, SEGMENT,
                    BLOCKS, BLOCK_K, EVEN_K, STAGES, PRECISION, WIDE, HAS_STORED, HAS_BIAS,
                    HAS_SOFTCAP, HAS_DRAWN, HAS_ENTROPY, HAS_TEACHER, TEACHER_EVEN_K,
                    TEACHER_HAS_BIAS, TEACHER_HAS_SOFTCAP, IS_JSD,
                )  # fmt: skip
            else:
                list_task(
                    task - num_products, is_sdd, first, bits_ptr, order_ptr, starts_ptr,
                    base_ptr + at, entries_ptr + other, position_ptr, pair_rows_ptr, max_rows,
                    num_tiles, num_blocks, words, TILE, HAS_DRAWN,
                )  # fmt: skip
            task = tl.atomic_add(queue_ptr + phase, 1)
        arrive(arrived_ptr, USE_TMA, IS_INTERPRETED)
        waits = True
        while waits:
            arrived = tl.atomic_add(arrived_ptr, 0, sem="acquire")
            waits = arrived < (phase + 1) * tl.num_programs(0)
            if (num_unkept > 0) & (waits | is_last):
                task = tl.atomic_add(arrived_ptr + 1, 1)
                if task < num_unkept:
                    unkept_task(
                        task, num_active * TILE, order_ptr, share_ptr, class_weight_ptr,
                        tail_ptr, tail_bias_ptr, grad_weight_ptr, grad_bias_ptr, V, D, groups,
                        unkept_slices, stride_gv, UNKEPT, UNKEPT_SLICE, TAIL_PRECISION, GROUPS,
                        HAS_TAIL, HAS_MEAN, HAS_CLASS_WEIGHT, HAS_GRAD_WEIGHT, HAS_GRAD_BIAS,
                        ACCUMULATE,
                    )  # fmt: skip
                else:
                    num_unkept = 0
            # No program waits at the end, except for its last stores.
            waits = tl.where(is_last, num_unkept > 0, waits)
        go_on(USE_TMA, IS_INTERPRETED)
