"""The backward's products over this rank's shard in Triton: allocations, grids, launches.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.backward.exact import products_of_every_column
from cce_dist.backends.triton.backward.long_lists import products_if_long
from cce_dist.backends.triton.backward.state import BackwardState, GradBuffers
from cce_dist.backends.triton.backward.teacher import teacher_arguments
from cce_dist.backends.triton.backward.whole import products_by_torch
from cce_dist.backends.triton.filter.lists import TILE, Lists, int32_zeros
from cce_dist.backends.triton.kernels.backward.after_hidden import after_hidden_kernel
from cce_dist.backends.triton.kernels.backward.filtered import filtered_kernel
from cce_dist.backends.triton.launch.arguments import descriptor_of
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import (
    AFTER_HIDDEN,
    LEFT_TO_OTHERS,
    interpreted,
    is_wide,
    num_programs,
    takes_branches,
    takes_tma,
)
from cce_dist.options import TOKEN_BLOCK

# Programs of `after_hidden_kernel` for each that the device has room for: most have one task, of
# some 30 us.
SHORT = 16
# Columns and dims of a task that stores columns which no block keeps.
UNKEPT, UNKEPT_SLICE = 32, 256


def products(
    state: BackwardState, grads: GradBuffers, *, shares_device: bool
) -> Callable[[int], None]:
    """Prepares SDD, DSD, DDS of every column, or of the kept columns and the others' tail.

    Args: shares_device: as of `protocol.Room`.
    Returns: a function that launches a stage of them: `ALL`; or first `UNTIL_HIDDEN`, then
        `AFTER_HIDDEN`.
    """
    if state.by_torch:
        return products_by_torch(state, grads)
    assert grads.late is None  # Only torch's products leave targets out.
    if state.lists is None:
        return products_of_every_column(state, grads)
    return _filtered_products(state, state.lists, grads, shares_device)


@dataclass(frozen=True)
class FilteredMemory:
    """Memory that the kernels of the filtered products share."""

    queue: Tensor  # [2 * max_chunks + 3] int32, zeros
    queue_if_long: Tensor  # [8] int32, zeros
    workspace: Tensor  # [.., 128] d_logits of a chunk: see `Lists.new_workspace`
    # [2, max_rows] int32. Past a list's end, its last step reads some column, and any will do.
    entries: Tensor
    pair_rows: Tensor  # [max_pairs, TILE] int32
    drawn_sum: Tensor  # [max_tasks, 128] fp32

    @classmethod
    def of(cls, state: BackwardState, lists: Lists) -> FilteredMemory:
        weight = state.weight
        max_tasks = triton.cdiv(lists.max_rows, state.tiles.pair * TILE) + state.num_blocks

        def int32(*shape: int) -> Tensor:
            return torch.empty(*shape, dtype=torch.int32, device=weight.device)

        queue, queue_if_long = int32_zeros(weight.device, (2 * lists.max_chunks + 3,), (8,))
        workspace = None if state.listed is None else state.listed.take_workspace()
        if workspace is None:
            workspace = lists.new_workspace(weight)
        return cls(
            queue=queue,
            queue_if_long=queue_if_long,
            workspace=workspace,
            entries=lists.entries_in(workspace),
            pair_rows=int32(lists.max_pairs, TILE),
            drawn_sum=weight.new_empty(max_tasks, TOKEN_BLOCK, dtype=torch.float32),
        )


def _filtered_products(
    state: BackwardState, lists: Lists, grads: GradBuffers, shares_device: bool
) -> Callable[[int], None]:
    memory = FilteredMemory.of(state, lists)
    residents = state.tiles.residents
    programs = num_programs(state.weight) * (1 if interpreted() else residents)
    if shares_device and not interpreted():
        programs = max(programs - LEFT_TO_OTHERS * residents, programs // 2)
    launch_if_long = None
    if lists.may_be_long:
        left = num_programs(state.weight) - programs // residents
        launch_if_long = products_if_long(
            state, lists, grads, memory.workspace, memory.queue_if_long, left
        )

    def launch(stage: int) -> None:
        if stage == AFTER_HIDDEN:
            _launch_after_hidden(state, lists, grads, memory, SHORT * programs)
        else:
            _launch_filtered(state, lists, grads, memory, programs, stage)
        if launch_if_long is not None:
            launch_if_long(stage)

    return launch


def _launch_filtered(
    state: BackwardState,
    lists: Lists,
    grads: GradBuffers,
    memory: FilteredMemory,
    programs: int,
    stage: int,
) -> None:
    assert state.kept is not None
    weight, head, tiles, marks = state.weight, state.head, state.tiles, state.kept.marks
    per_token, listed, workspace = state.per_token, state.listed, memory.workspace
    block_k, use_tma, or_dummy = tiles.backward_dims, takes_tma(weight), state.or_dummy
    # Programs wait for each other: all of them must be there before the first one starts.
    cooperative = {} if interpreted() else {"launch_cooperative_grid": True}
    start(filtered_kernel, (programs,))(
        hidden_ptr=state.hidden, rows_ptr=per_token.read_rows, weight_ptr=weight,
        bias_ptr=or_dummy(head.bias), class_weight_ptr=or_dummy(head.class_weight),
        target_ptr=per_token.targets, count_ptr=state.count, upstream_ptr=per_token.factors,
        grad_scale_ptr=per_token.grad_scale, seed_ptr=marks.seed, bits_ptr=lists.bits,
        order_ptr=lists.order, starts_ptr=lists.starts,
        blocks_ptr=lists.blocks, position_ptr=lists.position, num_blocks_ptr=lists.num_blocks,
        num_active_ptr=lists.num_active, first_ptr=lists.first, num_chunks_ptr=lists.num_chunks,
        base_ptr=lists.base, segment_ptr=lists.segment, share_ptr=or_dummy(state.share),
        tail_ptr=or_dummy(state.sums), tail_bias_ptr=or_dummy(state.bias_sums),
        entries_ptr=memory.entries, pair_rows_ptr=memory.pair_rows, workspace_ptr=workspace,
        workspace_rows=descriptor_of(workspace, block_k, TOKEN_BLOCK, use_tma),
        stored_ptr=workspace if listed is None else workspace.view(torch.float16),
        ref_ptr=or_dummy(None if listed is None else listed.ref),
        bad_ref_ptr=or_dummy(None if listed is None else listed.bad_ref),
        drawn_sum_ptr=memory.drawn_sum, grad_hidden_ptr=or_dummy(grads.hidden),
        drawn_total_ptr=state.drawn_total, grad_weight_ptr=or_dummy(grads.weight),
        grad_bias_ptr=or_dummy(grads.bias), queue_ptr=memory.queue, pieces=state.pieces,
        num_rows=state.num_tokens, stage=stage, num_blocks=state.num_blocks, V=weight.shape[0],
        D=weight.shape[1], num_tiles=state.num_tiles, max_chunks=lists.max_chunks,
        max_rows=lists.max_rows, words=marks.kept.shape[1], groups=state.groups,
        at_once=tiles.slices_at_once, stride_hn=state.hidden.stride(0),
        stride_wv=weight.stride(0), stride_gv=grads.weight_stride, scale=per_token.scale,
        softcap=head.softcap or 1.0, TOKENS=TOKEN_BLOCK, TILE=TILE, SEGMENT=tiles.pair * TILE,
        BLOCKS=marks.blocks_padded, SLICE=tiles.slice_dims, BLOCK_K=block_k,
        EVEN_K=weight.shape[1] % block_k == 0, STAGES=tiles.backward_stages,
        LIST_STAGES=2 * tiles.backward_stages - 1, PRECISION="ieee",
        TAIL_PRECISION=state.tail_precision, USE_TMA=use_tma, IS_INTERPRETED=interpreted(),
        WIDE=is_wide(weight), BRANCHES=takes_branches(weight), GROUPS=state.padded_groups,
        HAS_STORED=listed is not None, HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None, HAS_DRAWN=lists.draws,
        HAS_ENTROPY=state.has_entropy,
        HAS_TAIL=state.share is not None, HAS_MEAN=state.mean is not None,
        HAS_CLASS_WEIGHT=head.class_weight is not None, HAS_GRAD_HIDDEN=grads.hidden is not None,
        HAS_GRAD_WEIGHT=grads.weight is not None, HAS_GRAD_BIAS=grads.bias is not None,
        ACCUMULATE=grads.accumulate, UNKEPT=TILE if interpreted() else UNKEPT,
        UNKEPT_SLICE=UNKEPT_SLICE, num_warps=tiles.backward_warps,
        **teacher_arguments(state.teacher, state.count, block_k), **cooperative,
    )  # fmt: skip


def _launch_after_hidden(
    state: BackwardState, lists: Lists, grads: GradBuffers, memory: FilteredMemory, programs: int
) -> None:
    weight, class_weight, tiles = state.weight, state.head.class_weight, state.tiles
    or_dummy = state.or_dummy
    start(after_hidden_kernel, (programs,))(
        hidden_ptr=state.hidden, rows_ptr=state.per_token.read_rows,
        class_weight_ptr=or_dummy(class_weight), grad_scale_ptr=state.per_token.grad_scale,
        order_ptr=lists.order, starts_ptr=lists.starts, blocks_ptr=lists.blocks,
        num_blocks_ptr=lists.num_blocks, num_active_ptr=lists.num_active,
        first_ptr=lists.first, num_chunks_ptr=lists.num_chunks, share_ptr=or_dummy(state.share),
        tail_ptr=or_dummy(state.sums), tail_bias_ptr=or_dummy(state.bias_sums),
        pair_rows_ptr=memory.pair_rows, workspace_ptr=memory.workspace,
        grad_weight_ptr=or_dummy(grads.weight), grad_bias_ptr=or_dummy(grads.bias),
        num_blocks=state.num_blocks, V=weight.shape[0], D=weight.shape[1],
        num_tiles=state.num_tiles, groups=state.groups, at_once=tiles.slices_at_once,
        stride_hn=state.hidden.stride(0), stride_gv=grads.weight_stride, TOKENS=TOKEN_BLOCK,
        TILE=TILE, SLICE=tiles.slice_dims, BLOCK_K=tiles.backward_dims,
        LIST_STAGES=2 * tiles.backward_stages - 1, PRECISION="ieee",
        TAIL_PRECISION=state.tail_precision, WIDE=is_wide(weight),
        GROUPS=state.padded_groups, HAS_TAIL=state.share is not None,
        HAS_MEAN=state.mean is not None, HAS_CLASS_WEIGHT=class_weight is not None,
        HAS_GRAD_WEIGHT=grads.weight is not None, HAS_GRAD_BIAS=grads.bias is not None,
        ACCUMULATE=grads.accumulate, UNKEPT=TILE if interpreted() else UNKEPT,
        UNKEPT_SLICE=UNKEPT_SLICE, num_warps=tiles.backward_warps,
    )  # fmt: skip
