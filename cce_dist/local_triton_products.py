"""The backward's products over this rank's shard in Triton: allocations, grids, launches.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cce_dist.kernels.backward import exact_kernel, filtered_kernel
from cce_dist.local_triton_layout import Layout
from cce_dist.local_triton_lists import TILE, Lists, choose_tiles_per_chunk
from cce_dist.local_triton_tail import GROUPS
from cce_dist.local_triton_tiles import interpreted, num_programs, rounds_exp2, takes_tma
from cce_dist.options import TOKEN_BLOCK

if TYPE_CHECKING:
    from cce_dist.local_triton_grads import Backward


def products(
    run: Backward,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
    accumulate: bool,
) -> None:
    """SDD, DSD, DDS: of every column, or of what is kept, and the tail of what is not."""
    weight, head, lists = run.weight, run.head, run.lists
    # The tail's shares and sums are fp32; tf32 keeps more digits than the 16-bit inputs have.
    tail_precision = "tf32" if weight.element_size() == 2 else "ieee"
    stored = {
        "class_weight_ptr": run.or_dummy(head.class_weight),
        "tail_ptr": run.or_dummy(run.sums),
        "tail_bias_ptr": run.or_dummy(run.bias_sums),
        "grad_weight_ptr": run.or_dummy(grad_weight),
        "grad_bias_ptr": run.or_dummy(grad_bias),
        "V": weight.shape[0],
        "D": weight.shape[1],
        "stride_gv": 0 if grad_weight is None else grad_weight.stride(0),
        "TILE": TILE,
        "GROUPS": GROUPS,
        "HAS_MEAN": run.mean is not None,
        "HAS_CLASS_WEIGHT": head.class_weight is not None,
        "HAS_GRAD_WEIGHT": grad_weight is not None,
        "HAS_GRAD_BIAS": grad_bias is not None,
        "ACCUMULATE": accumulate,
    }
    common = {
        **stored,
        **_inputs(run),
        "grad_hidden_ptr": run.or_dummy(grad_hidden),
        "HAS_GRAD_HIDDEN": grad_hidden is not None,
        "TAIL_PRECISION": tail_precision,
        "num_warps": run.table.backward_warps,
        **({} if interpreted() else {"launch_cooperative_grid": True}),
    }
    if lists is None:
        _every(run, common)
        return
    tail = {
        "order_ptr": lists.order,
        "num_active_ptr": lists.num_active,
        "share_ptr": run.or_dummy(run.share),
        "groups": run.groups,
        "HAS_TAIL": run.share is not None,
    }
    _listed(run, lists, {**common, **tail})


def _inputs(run: Backward) -> dict[str, Any]:
    """Arguments of both backward kernels that are there before they run."""
    head, table, of_tokens = run.head, run.table, run.of_tokens
    dim = run.weight.shape[1]
    block_k = table.backward_dims
    return {
        "hidden_ptr": run.hidden,
        "rows_ptr": of_tokens.read_rows,
        "weight_ptr": run.weight,
        "bias_ptr": run.or_dummy(head.bias),
        "target_ptr": of_tokens.targets,
        "count_ptr": run.count,
        "pull_ptr": of_tokens.pull,
        "unit_ptr": of_tokens.unit,
        "num_blocks": run.num_blocks,
        "num_tiles": run.num_tiles,
        "stride_hn": run.hidden.stride(0),
        "stride_wv": run.weight.stride(0),
        "scale": head.logit_scale,
        "softcap": head.softcap or 1.0,
        "TOKENS": TOKEN_BLOCK,
        "SLICE": table.slice_dims,
        "BLOCK_K": block_k,
        "EVEN_K": dim % block_k == 0,
        "STAGES": table.backward_stages,
        "LIST_STAGES": 2 * table.backward_stages - 1,
        "PRECISION": "ieee",
        "USE_TMA": _takes_tma(run),
        "IS_INTERPRETED": interpreted(),
        "WIDE": rounds_exp2(run.weight),
        "HAS_BIAS": head.bias is not None,
        "HAS_SOFTCAP": head.softcap is not None,
    }


def _takes_tma(run: Backward) -> bool:
    return takes_tma(run.hidden) and takes_tma(run.weight)


def _tiles_of(run: Backward, matrix: Tensor, rows: int, columns: int) -> Any:
    """A descriptor of tiles of the matrix, or a pointer where nothing is read through one."""
    if not _takes_tma(run):
        return matrix
    strides = [matrix.stride(0), 1]
    return TensorDescriptor(matrix, list(matrix.shape), strides, [rows, columns])


def _programs(run: Backward) -> int:
    return num_programs(run.weight) * (1 if interpreted() else run.table.residents)


def _every(run: Backward, common: dict[str, Any]) -> None:
    weight, table = run.weight, run.table
    room = run.room
    per_chunk = choose_tiles_per_chunk(weight, run.num_blocks, run.num_tiles, room)
    num_chunks = triton.cdiv(run.num_tiles, per_chunk)
    workspace = weight.new_empty(per_chunk * TILE * run.num_blocks, TOKEN_BLOCK)
    block_k = table.backward_dims
    layout = Layout.of(run.of_tokens.read_rows, run.count, run.num_blocks, use_tma=_takes_tma(run))
    exact_kernel[(_programs(run),)](
        **common,
        hidden_rows=_tiles_of(run, run.hidden, TOKEN_BLOCK, block_k),
        hidden_slices=_tiles_of(run, run.hidden, block_k, table.slice_dims),
        straight_ptr=layout.straight,
        blocks_ptr=layout.blocks,
        first_row_ptr=layout.first_row,
        num_straight_ptr=layout.num_straight,
        num_blocks_ptr=layout.num_blocks,
        weight_tile=_tiles_of(run, weight, table.pair * TILE, block_k),
        weight_rows=_tiles_of(run, weight, block_k, table.slice_dims),
        workspace_ptr=workspace,
        workspace_rows=_tiles_of(run, workspace, block_k, TOKEN_BLOCK),
        workspace_columns=_tiles_of(run, workspace, TILE, block_k),
        queue_ptr=torch.zeros(2 * num_chunks + 1, dtype=torch.int32, device=weight.device),
        num_chunks=num_chunks,
        tiles_per_chunk=per_chunk,
        PAIR=table.pair,
        HAS_ENTROPY=run.has_entropy,
        HAS_SMOOTH=run.has_smooth,
    )


def _listed(run: Backward, lists: Lists, common: dict[str, Any]) -> None:
    assert run.kept is not None
    weight, table, marks = run.weight, run.table, run.kept.marks
    segment = table.pair * TILE
    max_tasks = triton.cdiv(lists.max_rows, segment) + run.num_blocks

    def int32(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=weight.device)

    workspace = weight.new_empty(lists.max_rows + TILE, TOKEN_BLOCK)
    workspace[lists.max_rows :] = 0
    filtered_kernel[(_programs(run),)](
        **common,
        place_ptr=run.place,
        seed_ptr=marks.seed,
        kept_ptr=marks.kept,
        drawn_ptr=marks.drawn,
        starts_ptr=lists.starts,
        blocks_ptr=lists.blocks,
        position_ptr=lists.position,
        num_blocks_ptr=lists.num_blocks,
        first_ptr=lists.first,
        num_chunks_ptr=lists.num_chunks,
        base_ptr=lists.base,
        segment_ptr=lists.segment,
        # Any column will do where a list ends before its last step.
        entries_ptr=int32(2, lists.max_rows).zero_(),
        pair_rows_ptr=int32(lists.max_pairs, TILE),
        workspace_ptr=workspace,
        workspace_rows=_tiles_of(run, workspace, table.backward_dims, TOKEN_BLOCK),
        drawn_sum_ptr=weight.new_empty(max_tasks, TOKEN_BLOCK, dtype=torch.float32),
        drawn_total_ptr=run.drawn_total,
        queue_ptr=torch.zeros(2 * lists.max_chunks + 3, dtype=torch.int32, device=weight.device),
        max_chunks=lists.max_chunks,
        max_rows=lists.max_rows,
        words=marks.kept.shape[1],
        SEGMENT=segment,
        BLOCKS=lists.blocks_padded,
        HAS_DRAWN=lists.draws,
        UNKEPT=TILE if interpreted() else 32,
        UNKEPT_SLICE=256,
    )
