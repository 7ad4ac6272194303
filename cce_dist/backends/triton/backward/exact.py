"""`exact`: the three products of every column, chunk by chunk of the vocabulary: chunks,
allocations, grids, launches.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import LateTargets
from cce_dist.backends.triton.backward.hopper_exact import (
    LEFT_TO_COLLECTIVES,
    HopperMemory,
    new_chunk,
    products_on_hopper,
)
from cce_dist.backends.triton.backward.hopper_fit import runs_on_hopper
from cce_dist.backends.triton.backward.late_targets import late_bounds
from cce_dist.backends.triton.backward.state import BackwardState, GradBuffers
from cce_dist.backends.triton.filter.kept_logits import Region, tiles_in
from cce_dist.backends.triton.filter.lists import TILE
from cce_dist.backends.triton.kernels.backward.exact_logits import (
    bad_ref_kernel,
    exact_logits_kernel,
    exact_targets_kernel,
)
from cce_dist.backends.triton.kernels.backward.exact_products import exact_products_kernel
from cce_dist.backends.triton.kernels.tokens.pack import gather_rows_kernel
from cce_dist.backends.triton.launch.arguments import descriptor_of, padded_dim
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import (
    AFTER_HIDDEN,
    ALL,
    cached_blocks,
    interpreted,
    is_wide,
    num_programs,
    takes_tma,
)
from cce_dist.options import TOKEN_BLOCK

# With invariant=True the tiles of a chunk must not depend on the number of tokens. Fewer: more
# passes over the hidden gradient. More: more memory, since a chunk holds all tokens' logits.
INVARIANT_TILES = 16


def products_of_every_column(state: BackwardState, grads: GradBuffers) -> Callable[[int], None]:
    """Prepares SDD, then DDS and DSD, of one chunk after the other.

    Returns: a function that launches a stage of them; `AFTER_HIDDEN` is the last chunk's DDS.
    """
    weight, padded = state.weight, state.num_blocks * TOKEN_BLOCK
    hidden = weight.new_empty(padded, padded_dim(weight))[:, : weight.shape[1]]
    gather_hidden(state, hidden)
    if state.logits is None and runs_on_hopper(
        weight,
        state.tiles,
        has_hidden=grads.hidden is not None,
        has_bias_alone=grads.bias is not None and grads.weight is None,
    ):
        chunk = new_chunk(state, INVARIANT_TILES if state.invariant else None)
        queue = torch.zeros(8, dtype=torch.int32, device=weight.device)
        memory = HopperMemory(hidden, chunk, queue, state.count)
        return products_on_hopper(state, grads, memory)
    regions = list(_chunks(state))
    # A row of 16 bytes for each launch: pointers are aligned alike, so one binary serves all.
    queues = torch.zeros(len(regions) + 1, 4, dtype=torch.int32, device=weight.device)
    last = len(regions) - 1

    def launch(stage: int) -> None:
        if stage == AFTER_HIDDEN:
            region, queue = regions[last], queues[last + 1]
            _dds_and_dsd(state, grads, hidden, region, queue, stage, is_first=last == 0)
            return
        for index, region in enumerate(regions):
            launch_d_logits(state, hidden, region)
            stage_of_chunk = stage if index == last else ALL
            is_first = index == 0
            _dds_and_dsd(
                state, grads, hidden, region, queues[index], stage_of_chunk, is_first=is_first
            )

    return launch


def gather_hidden(
    state: BackwardState, out: Tensor, if_long: tuple[Tensor, Tensor] | None = None
) -> None:
    """Packs the hidden states in the order of the blocks. Tokens that don't count get the hidden
    state of a token that counts; their d_logits are 0.

    Args:
        out: [N_padded, D], written.
        if_long: `Lists.num_chunks`, and [1] int32, written: packs only if lists are too long, and
            writes the number of tokens that count; else writes -1. None: always packs.
    """
    block = TOKEN_BLOCK if interpreted() else 16
    num_chunks, count_if_long = if_long or (state.count, state.count)
    start(gather_rows_kernel, (len(out) // block,))(
        state.hidden,
        state.per_token.read_rows,
        out,
        num_chunks,
        state.count,
        count_if_long,
        out.shape[1],
        state.hidden.stride(0),
        out.stride(0),
        BLOCK_N=block,
        BLOCK_D=256,
        IF_LONG=if_long is not None,
    )


def _dds_and_dsd(
    state: BackwardState,
    grads: GradBuffers,
    hidden: Tensor,
    region: Region,
    queue: Tensor,
    stage: int,
    *,
    is_first: bool,
) -> None:
    weight, tiles, head, memory = state.weight, state.tiles, state.head, region.memory
    use_tma, block_k, columns = takes_tma(weight), tiles.dims, tiles.columns
    left = LEFT_TO_COLLECTIVES if stage == AFTER_HIDDEN else 0
    start(exact_products_kernel, (max(1, num_programs(weight) - left),))(
        hidden=descriptor_of(hidden, block_k, columns, use_tma),
        weight=descriptor_of(weight, block_k, columns, use_tma),
        workspace_columns=descriptor_of(memory, TILE, block_k, use_tma),
        workspace_tokens=descriptor_of(memory, block_k, TOKEN_BLOCK, use_tma),
        workspace_ptr=memory, class_weight_ptr=state.or_dummy(head.class_weight),
        tail_ptr=state.or_dummy(state.sums), tail_bias_ptr=state.or_dummy(state.bias_sums),
        row_ptr=state.per_token.rows, grad_hidden_ptr=state.or_dummy(grads.hidden),
        grad_weight_ptr=state.or_dummy(grads.weight), grad_bias_ptr=state.or_dummy(grads.bias),
        count_ptr=state.count, grad_scale_ptr=state.per_token.grad_scale, queue_ptr=queue,
        pieces=state.pieces, num_rows=state.num_tokens, stage=stage,
        first_column=region.first_column, num_columns=region.num_columns, rows=memory.shape[0],
        N=state.num_blocks * TOKEN_BLOCK, V=weight.shape[0], D=weight.shape[1],
        stride_hn=hidden.stride(0), stride_wv=weight.stride(0), stride_gv=grads.weight_stride,
        TOKENS=TOKEN_BLOCK, TILE=TILE, SLICE=columns, BLOCK_K=block_k, PRECISION="ieee",
        TAIL_PRECISION=state.tail_precision, USE_TMA=use_tma, WIDE=is_wide(weight),
        IS_FIRST=is_first, GROUPS=state.padded_groups, HAS_MEAN=state.mean is not None,
        HAS_CLASS_WEIGHT=head.class_weight is not None, HAS_GRAD_HIDDEN=grads.hidden is not None,
        HAS_GRAD_WEIGHT=grads.weight is not None, HAS_GRAD_BIAS=grads.bias is not None,
        ACCUMULATE=grads.accumulate, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


# The furthest that a reference may be below lse, log2. Up to here fp16 holds a large logit's
# difference to the reference with an error of at most 2^-8, as bf16 holds p, and does not overflow.
FURTHEST = 16.0
# Of `bad_ref_kernel`.
BLOCKS_AT_ONCE = 16


def _blocks_of_bad_ref(state: BackwardState, ref: Tensor) -> Tensor:
    """Returns [num_blocks + 1] int32: 1 for each block with a token whose reference is a bad bound
    of lse (a sum had overflowed, or nothing was seen yet); last, 1 if there is such a block."""
    bad_ref = torch.empty(state.num_blocks + 1, dtype=torch.int32, device=ref.device)
    start(bad_ref_kernel, (1,))(
        state.per_token.factors,
        ref,
        state.count,
        bad_ref,
        state.num_blocks,
        FURTHEST,
        TOKENS=TOKEN_BLOCK,
        BLOCKS=BLOCKS_AT_ONCE,
        WIDE=is_wide(state.weight),
    )
    return bad_ref


def launch_d_logits(state: BackwardState, hidden: Tensor, region: Region) -> None:
    """Puts d_logits of the region's columns into its memory.

    Args: hidden: [N_padded, D] packed, in the order of the blocks.
    """
    launch_logits(state, hidden, region)
    launch_targets(state, region, None)


def launch_logits(state: BackwardState, hidden: Tensor, region: Region) -> None:
    """Puts d_logits of the region's columns into its memory, but for the targets' terms."""
    bad_ref = None if region.ref is None else _blocks_of_bad_ref(state, region.ref)
    if bad_ref is not None:
        _launch_logits(state, hidden, region, bad_ref, has_logits=True)
    _launch_logits(state, hidden, region, bad_ref)


def launch_targets(state: BackwardState, region: Region, late: LateTargets | None) -> None:
    """Completes d_logits of the targets in the region's memory; with `late` takes the late
    targets' terms out of it again."""
    head, per_token, unread = state.head, state.per_token, state.per_token.factors
    below, most_sum = (0.0, 0.0) if late is None else late_bounds(late)
    start(exact_targets_kernel, (state.num_blocks,))(
        workspace_ptr=region.memory,
        class_weight_ptr=state.or_dummy(head.class_weight),
        target_ptr=per_token.targets,
        upstream_ptr=per_token.factors,
        rows_ptr=per_token.rows,
        late_ptr=unread if late is None else late.grads,
        sums_ptr=unread if late is None else late.sums,
        late_below=below,
        late_sum=most_sum,
        num_rows=state.num_tokens,
        first_column=region.first_column,
        num_columns=region.num_columns,
        N=region.memory.shape[1],
        scale=per_token.scale,
        softcap=head.softcap or 1.0,
        BLOCK_N=TOKEN_BLOCK,
        WIDE=is_wide(state.weight),
        LEAVES_OUT=late is not None,
        HAS_SOFTCAP=head.softcap is not None,
        HAS_ENTROPY=state.has_entropy,
        HAS_SMOOTH=state.has_smooth,
        HAS_CLASS_WEIGHT=head.class_weight is not None,
    )


def _launch_logits(
    state: BackwardState,
    hidden: Tensor,
    region: Region,
    bad_ref: Tensor | None,
    *,
    has_logits: bool = False,
) -> None:
    weight, head, tiles, per_token = state.weight, state.head, state.tiles, state.per_token
    # Logits that are there already take no product, and a smaller tile.
    columns = tiles.dims if has_logits else tiles.columns
    use_tma = takes_tma(weight) and takes_tma(hidden)
    start(exact_logits_kernel, (num_programs(weight) * (4 if has_logits else 1),))(
        hidden=descriptor_of(hidden, TOKEN_BLOCK, tiles.dims, use_tma),
        weight=descriptor_of(weight, columns, tiles.dims, use_tma),
        workspace=descriptor_of(region.memory, columns, TOKEN_BLOCK, use_tma),
        workspace_ptr=region.memory, logit_ptr=region.as_logits(),
        ref_ptr=state.or_dummy(region.ref), bad_ref_ptr=state.or_dummy(bad_ref),
        bias_ptr=state.or_dummy(head.bias), class_weight_ptr=state.or_dummy(head.class_weight),
        count_ptr=state.count, upstream_ptr=per_token.factors, first_column=region.first_column,
        num_columns=region.num_columns,
        cached_blocks=cached_blocks(weight, weight.element_size()), N=region.memory.shape[1],
        V=weight.shape[0], D=weight.shape[1], stride_hn=hidden.stride(0),
        stride_wv=weight.stride(0), scale=per_token.scale, softcap=head.softcap or 1.0,
        BLOCK_N=TOKEN_BLOCK, BLOCK_V=columns, BLOCK_D=tiles.dims, USE_TMA=use_tma,
        PRECISION="ieee", WIDE=is_wide(weight), HAS_LOGITS=has_logits,
        ONLY_BAD_REF=bad_ref is not None and not has_logits, HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None, HAS_ENTROPY=state.has_entropy,
        HAS_SMOOTH=state.has_smooth, HAS_CLASS_WEIGHT=head.class_weight is not None,
        EVERY_BLOCK=state.by_torch and has_logits, num_warps=tiles.warps,
        # A tile that is stored through a descriptor takes the shared memory of a stage.
        num_stages=max(2, tiles.stages - 1),
    )  # fmt: skip


def _chunks(state: BackwardState) -> Iterator[Region]:
    """Yields the regions whose logits the forward kept, then the other columns in chunks that fit
    the workspace."""
    weight, kept = state.weight, state.logits
    columns, padded = state.tiles.columns, state.num_blocks * TOKEN_BLOCK
    left, memory = weight.shape[0], None
    if kept is not None:
        yield from kept.regions
        left, memory = kept.first_column, kept.workspace
    num_tiles = triton.cdiv(left, columns)
    if num_tiles == 0:
        return
    room = max(1, tiles_in(state.room, weight, padded))
    if memory is not None:
        room = memory.shape[0] // columns
    if state.invariant:
        per_chunk = min(INVARIANT_TILES, num_tiles)
    else:
        per_chunk = choose_tiles_per_chunk(num_tiles, room, state.num_blocks, num_programs(weight))
    if memory is None:
        memory = weight.new_empty(per_chunk * columns, padded)
    for tile in range(0, num_tiles, per_chunk):
        first = tile * columns
        yield Region(first, min(per_chunk * columns, left - first), memory)


def choose_tiles_per_chunk(num_tiles: int, room: int, num_blocks: int, programs: int) -> int:
    """Chooses the tiles of a chunk, from half of `room` to all of it: the number whose SDD tasks
    fill whole waves best."""
    if room >= num_tiles:
        return num_tiles

    def waste(tiles: int) -> float:
        tasks = tiles * num_blocks
        return triton.cdiv(tasks, programs) * programs / tasks

    return min(range(room, max(1, room // 2) - 1, -1), key=waste)
