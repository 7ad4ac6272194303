"""The backward's products over this rank's shard in Triton: allocations, grids, launches.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.backward.exact import products_of_every_column
from cce_dist.backends.triton.backward.state import Backward, GradBuffers
from cce_dist.backends.triton.filter.lists import TILE, Lists
from cce_dist.backends.triton.kernels.backward.filtered import filtered_kernel
from cce_dist.backends.triton.kernels.backward.rest import rest_kernel
from cce_dist.backends.triton.launch.arguments import descriptor_of
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import (
    LEFT_TO_OTHERS,
    REST,
    interpreted,
    num_programs,
    takes_branches,
    takes_tma,
)
from cce_dist.options import TOKEN_BLOCK

# Programs of what is left for each that the device has room for: most are one task, of some 30 us.
SHORT = 16


def products(run: Backward, grads: GradBuffers, *, shares_device: bool) -> Callable[[int], None]:
    """Prepares SDD, DSD, DDS of every column, or of the columns kept, and the others' tail.

    Args: shares_device: as of `protocol.Room`.
    Returns: a function that launches a part of them: `WHOLE`, or first `UNTIL_HIDDEN` and later
        `REST`.
    """
    if run.lists is None:
        return products_of_every_column(run, grads)
    return _listed(run, run.lists, grads, shares_device)


def _inputs(run: Backward) -> dict[str, Any]:
    """Returns the filtered kernel's arguments of tokens and columns, and its tiles."""
    head, table, of_tokens = run.head, run.table, run.of_tokens
    block_k = table.backward_dims
    return {
        "hidden_ptr": run.hidden,
        "rows_ptr": of_tokens.read_rows,
        "weight_ptr": run.weight,
        "bias_ptr": run.or_dummy(head.bias),
        "target_ptr": of_tokens.targets,
        "upstream_ptr": of_tokens.factors,
        "num_blocks": run.num_blocks,
        "num_tiles": run.num_tiles,
        "stride_hn": run.hidden.stride(0),
        "scale": of_tokens.scale,
        "softcap": head.softcap or 1.0,
        "SLICE": table.slice_dims,
        "at_once": table.slices_at_once,
        "BLOCK_K": block_k,
        "EVEN_K": run.weight.shape[1] % block_k == 0,
        "STAGES": table.backward_stages,
        "LIST_STAGES": 2 * table.backward_stages - 1,
        "USE_TMA": takes_tma(run.weight),
        "BRANCHES": takes_branches(run.weight),
        "IS_INTERPRETED": interpreted(),
        "HAS_BIAS": head.bias is not None,
        "HAS_SOFTCAP": head.softcap is not None,
    }


def _listed(
    run: Backward, lists: Lists, grads: GradBuffers, shares_device: bool
) -> Callable[[int], None]:
    weight, table = run.weight, run.table
    queue = torch.zeros(2 * lists.max_chunks + 3, dtype=torch.int32, device=weight.device)
    arguments = {**run.product_arguments(grads), **_inputs(run), **_of_lists(run, lists)}
    arguments["queue_ptr"] = queue
    programs = num_programs(weight) * (1 if interpreted() else table.residents)
    together = {}
    if not interpreted():
        # Programs wait for each other: all of them must be there before the first begins.
        together["launch_cooperative_grid"] = True
        if shares_device:
            programs = max(programs - LEFT_TO_OTHERS * table.residents, programs // 2)

    def launch(part: int) -> None:
        if part != REST:
            start(filtered_kernel, (programs,))(
                **arguments, part=part, num_warps=table.backward_warps, **together
            )
            return
        taken = {name: arguments[name] for name in rest_kernel.arg_names if name in arguments}
        start(rest_kernel, (SHORT * programs,))(**taken, num_warps=table.backward_warps)

    return launch


def _of_lists(run: Backward, lists: Lists) -> dict[str, Any]:
    """Returns the filtered kernel's lists of columns, and its workspace."""
    assert run.kept is not None
    weight, table, marks = run.weight, run.table, run.kept.marks
    segment = table.pair * TILE
    max_tasks = triton.cdiv(lists.max_rows, segment) + run.num_blocks

    def int32(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.int32, device=weight.device)

    listed = run.listed
    workspace = None if listed is None else listed.take_workspace()
    if workspace is None:
        workspace = lists.new_workspace(weight)
    return {
        "seed_ptr": marks.seed,
        "kept_ptr": marks.kept,
        "drawn_ptr": marks.drawn,
        "order_ptr": lists.order,
        "starts_ptr": lists.starts,
        "blocks_ptr": lists.blocks,
        "position_ptr": lists.position,
        "num_blocks_ptr": lists.num_blocks,
        "num_active_ptr": lists.num_active,
        "first_ptr": lists.first,
        "num_chunks_ptr": lists.num_chunks,
        "base_ptr": lists.base,
        "segment_ptr": lists.segment,
        "share_ptr": run.or_dummy(run.share),
        # Any column will do where a list ends before its last step.
        "entries_ptr": int32(2, lists.max_rows).zero_(),
        "pair_rows_ptr": int32(lists.max_pairs, TILE),
        "workspace_ptr": workspace,
        "workspace_rows": descriptor_of(
            workspace, table.backward_dims, TOKEN_BLOCK, takes_tma(weight)
        ),
        "made_ptr": workspace if listed is None else workspace.view(torch.float16),
        "ref_ptr": run.or_dummy(None if listed is None else listed.ref),
        "bad_ref_ptr": run.or_dummy(None if listed is None else listed.bad_ref),
        "HAS_MADE": listed is not None,
        "drawn_sum_ptr": weight.new_empty(max_tasks, TOKEN_BLOCK, dtype=torch.float32),
        "drawn_total_ptr": run.drawn_total,
        "max_chunks": lists.max_chunks,
        "max_rows": lists.max_rows,
        "words": marks.kept.shape[1],
        "groups": run.groups,
        "SEGMENT": segment,
        "BLOCKS": marks.blocks_padded,
        "HAS_DRAWN": lists.draws,
        "HAS_TAIL": run.share is not None,
        "UNKEPT": TILE if interpreted() else 32,
        "UNKEPT_SLICE": 256,
    }
