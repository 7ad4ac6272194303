"""Hopper's forward of a chunk whose logits stay: each tile is stored, and its sum is kept.

The groups of warps are those of `hopper_forward_kernel`. A tile's tokens are stored and summed in
parts, so that a thread never holds logits and probabilities of all of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cce_dist.backends.triton.kernels import numbers
from cce_dist.backends.triton.kernels.forward import launches
from cce_dist.backends.triton.kernels.forward.hopper import (
    load_tiles,
    place_of,
    slot_of,
    turns_before,
)
from cce_dist.backends.triton.kernels.forward.hopper_softcap import for_each_token, near_tanh
from cce_dist.backends.triton.kernels.forward.hopper_state import start_state
from cce_dist.backends.triton.kernels.forward.hopper_sums import (
    APART,
    PARTS,
    joined_sums,
    partial_sums,
    split_tokens,
    whole_sum,
    with_rows_of,
)
from cce_dist.backends.triton.kernels.hopper_products import GROUPS, product_of, start_stages


@gluon.jit
def keep_tile(
    x,  # [ROWS, BLOCK_N] products
    total,  # [4, 8, BLOCK_N] sums over a thread's rows of exp2(z - ref)
    bias,  # [ROWS]
    ref_tile,  # [BLOCK_N] in shared memory
    logit_ptr,  # [columns, N]: out
    columns,  # [ROWS]
    block,
    N,
    V,
    scale,
    softcap,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """Stores z - ref, log2, of a tile, and adds its exponentials to total."""
    TOKENS: gl.constexpr = BLOCK_N // PARTS
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TOKENS, 8])
    across: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    rows: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    columns = gl.convert_layout(columns, rows, assert_trivial=True)
    inside = columns < V
    token = block * BLOCK_N + gl.arange(0, TOKENS, across)
    logit_ptrs = logit_ptr + columns.to(gl.int64)[:, None] * N + token[None, :]
    products = split_tokens(x, ROWS, BLOCK_N, PARTS)
    before = split_tokens(total, APART, BLOCK_N, PARTS)
    totals = ()
    for i in gl.static_range(PARTS):
        z = gl.convert_layout(products[i], LAYOUT, assert_trivial=True)
        if HAS_BIAS:
            z += for_each_token(bias, rows)
        if HAS_SOFTCAP:
            z = near_tanh(z * (1.0 / softcap)) * softcap
        ref = ref_tile.slice(i * TOKENS, TOKENS).load(across)
        log_p = z * (numbers.LOG2E * scale) - ref[None, :]
        # The memory has whole tiles, and nobody reads columns beyond V.
        gl.store(logit_ptrs + i * TOKENS, log_p.to(logit_ptr.dtype.element_ty))
        p = gl.where(inside[:, None], gl.exp2(log_p), 0.0)
        totals = totals + (with_rows_of(before[i], p, ROWS, TOKENS),)  # noqa: RUF005
    return joined_sums(totals, total, BLOCK_N, PARTS)


@gluon.jit
def keep_tiles(
    group,
    bias_ptr,
    lower_ptr,
    state_ptr,  # [SLOTS, 4, size]
    logit_ptr,
    kept_ref_ptr,
    ref_tiles,  # [GROUPS, BLOCK_N] in shared memory
    e_tiles,
    c_tiles,
    full,
    empty,
    block,
    split,
    splits,
    num_turns,
    launch,
    num_blocks,
    count,
    size,
    N,
    V,
    D,
    scale,
    softcap,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """Keeps the group's columns of every tile, [ROWS, BLOCK_N] at a time in four warps'
    registers."""
    step_dims: gl.constexpr = 256 // c_tiles.dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, step_dims])
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    by_token: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    token = block * BLOCK_N + gl.arange(0, BLOCK_N, by_token)
    stride = num_blocks * BLOCK_N
    state_ptrs = state_ptr + slot_of(launch) * 4 * size + (GROUPS * split + group) * stride + token
    before_ptrs = state_ptr + slot_of(launch + launches.SLOTS - 1) * 4 * size + token
    # All splits start as the first one does, so that they have the same reference.
    ref = start_state(
        lower_ptr + token, state_ptrs, state_ptrs, before_ptrs, 0, GROUPS * splits, stride, size,
        token < count, launch, num_turns, False, False, False, False, False, True,
    )  # fmt: skip
    gl.store(kept_ref_ptr + token, ref, mask=(token < N) & (split + group == 0))
    ref_tile = ref_tiles.index(group)
    ref_tile.store(ref)
    total = partial_sums(gl.zeros((ROWS, BLOCK_N), gl.float32, layout), ROWS, BLOCK_N)
    step = 0
    for turn in range(0, num_turns):
        x, step = product_of(
            e_tiles, c_tiles, full, empty, group, step, D, BLOCK_D, STAGES, layout, False
        )
        columns = ((split + turn * splits) * GROUPS + group) * ROWS + rows
        bias = 0.0
        if HAS_BIAS:
            bias = gl.load(bias_ptr + columns, mask=columns < V, other=0.0).to(gl.float32)
        total = keep_tile(
            x, total, bias, ref_tile, logit_ptr, columns, block, N, V, scale, softcap, ROWS,
            BLOCK_N, HAS_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
    gl.store(state_ptrs + size, whole_sum(total, by_token))


@gluon.jit(do_not_specialize=["launch"])
def hopper_logits_kernel(
    hidden,  # [N, D] packed, a descriptor of BLOCK_N x BLOCK_D
    weight,  # [V, D], of ROWS x BLOCK_D
    bias_ptr,  # [V]
    count_ptr,  # [1] int32: tokens that count
    shape_ptr,  # [3] int32: blocks, GROUPS x splits, blocks at a time
    lower_ptr,  # [N]
    state_ptr,  # [SLOTS, 4, size]: see `forward_kernel`; out
    logit_ptr,  # [columns, N] fp16, whole tiles of GROUPS x ROWS columns, z - ref, log2: out
    kept_ref_ptr,  # [N] the `ref` of kept logits: out
    launch,  # AFTER_PROBE
    size,
    N,
    V,
    D,
    scale,
    softcap,
    BLOCK_N: gl.constexpr,
    ROWS: gl.constexpr,  # columns of a tile in a group
    BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """Keeps the logits of a block of tokens and every `splits`-th tile of GROUPS x ROWS columns; a
    program a block and split. `forward_kernel` does the same with HAS_LOGITS."""
    num_blocks = gl.load(shape_ptr)
    splits = gl.load(shape_ptr + 1) // GROUPS
    if gl.program_id(0) >= num_blocks * splits:
        return
    count = gl.load(count_ptr)
    block, split = place_of(gl.program_id(0), num_blocks, splits, gl.load(shape_ptr + 2))
    num_turns = turns_before(gl.cdiv(V, GROUPS * ROWS), split, splits)
    num_turns = gl.where(block * BLOCK_N < count, num_turns, 0)

    e_tiles = gl.allocate_shared_memory(hidden.dtype, [STAGES, BLOCK_N, BLOCK_D], hidden.layout)
    c_tiles = gl.allocate_shared_memory(
        weight.dtype, [STAGES * GROUPS, ROWS, BLOCK_D], weight.layout
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ref_tiles = gl.allocate_shared_memory(gl.float32, [GROUPS, BLOCK_N], plain)
    full, empty = start_stages(STAGES)
    gl.warp_specialize(
        [
            (
                keep_tiles,
                (
                    0, bias_ptr, lower_ptr, state_ptr, logit_ptr, kept_ref_ptr, ref_tiles, e_tiles,
                    c_tiles, full, empty, block, split, splits, num_turns, launch, num_blocks,
                    count, size, N, V, D, scale, softcap, BLOCK_N, ROWS, BLOCK_D, STAGES, HAS_BIAS,
                    HAS_SOFTCAP,
                ),
            ),
            (
                keep_tiles,
                (
                    1, bias_ptr, lower_ptr, state_ptr, logit_ptr, kept_ref_ptr, ref_tiles, e_tiles,
                    c_tiles, full, empty, block, split, splits, num_turns, launch, num_blocks,
                    count, size, N, V, D, scale, softcap, BLOCK_N, ROWS, BLOCK_D, STAGES, HAS_BIAS,
                    HAS_SOFTCAP,
                ),
            ),
            (
                load_tiles,
                (
                    hidden, weight, e_tiles, c_tiles, full, empty, block, split, splits, 0,
                    num_turns, V, D, BLOCK_N, ROWS, BLOCK_D, STAGES, 0,
                ),
            ),
        ],
        # As in `hopper_forward_kernel`.
        [4, 1],
        [240, 24],
    )  # fmt: skip
