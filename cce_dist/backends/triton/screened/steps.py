"""A forward in 8 bits whose columns that matter are computed again, exactly.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from cce_dist.backends.eight_bits import Rounding
from cce_dist.backends.protocol import Room
from cce_dist.backends.triton.filter.lists import TILE, ListedLogits, Lists, int32_zeros
from cce_dist.backends.triton.filter.marks import Marks
from cce_dist.backends.triton.forward.operands import EightBit, Finished
from cce_dist.backends.triton.forward.state import Forward
from cce_dist.backends.triton.kernels.screened.exact_columns import (
    exact_columns_kernel,
    guard_kernel,
    guard_parts_kernel,
    screened_lse_kernel,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import (
    LEFT_TO_OTHERS,
    interpreted,
    num_programs,
    tiles_for,
)
from cce_dist.backends.triton.screened.quantize import Sums, quantize_both, quantize_tokens
from cce_dist.options import TOKEN_BLOCK, Screen


def with_eight_bits(run: Forward, screen: Screen, sums: Sums | None) -> tuple[Forward, Rounding]:
    """Returns the same forward of 8-bit operands, and the error of [N_padded] tokens' logits.

    Args: sums: None: the head's 8-bit copy is there.
    """
    head, hidden = run.head, run.packed[:, : run.weight.shape[1]]
    if head.quantized is None:
        assert sums is not None
        quantized = quantize_both(hidden, run.weight, sums, screen, head.logit_scale)
    else:
        quantized = head.quantized, *quantize_tokens(hidden, head.quantized, head.logit_scale)
    rows, values, of_tokens, variance = quantized
    operands = EightBit(values, rows.values, rows.of_rows, of_tokens)
    return replace(run, eight=operands), Rounding(rows, variance)


@dataclass(frozen=True)
class Screened:
    """The outcome of an 8-bit forward."""

    full: Tensor  # [1] int32: 1 where full precision was needed in its place


def guard(
    run: Forward, finished: Finished, variance: Tensor, screen: Screen
) -> tuple[Forward, Screened]:
    """Decides on the device whether 8 bits will do; returns the forward that runs if not, too."""
    num_blocks, columns = run.num_blocks, run.weight.shape[0]
    padded = run.packed.shape[0]
    block_v = 4096 if interpreted() else 1024
    grid = triton.cdiv(num_blocks, 16), triton.cdiv(columns, block_v)
    int32 = functools.partial(run.weight.new_empty, dtype=torch.int32)
    number, shape = int32(grid[0] * grid[1]), int32(3)
    error = torch.empty_like(number, dtype=torch.float32)
    start(guard_parts_kernel, grid)(
        run.parts["mass"],
        run.count,
        run.shape,
        finished.lse,
        finished.unkept,
        variance,
        run.parts["lower"],
        number,
        error,
        shape,
        columns,
        padded,
        *run.for_shape(run.weight.element_size()),
        BLOCKS=16,
        BLOCK_V=block_v,
        BLOCK_N=1024 if interpreted() else 128,
        GROUPS=run.groups,
    )
    screened = Screened(int32(1))
    start(guard_kernel, (1,))(
        number,
        error,
        run.count,
        run.shape,
        screened.full,
        shape,
        len(number),
        columns,
        screen.max_kept,
        screen.max_error,
        BLOCK=1024,
    )
    return replace(run, shape=shape, eight=None), screened


@dataclass(frozen=True)
class ExactSums:
    """Sums of the kept columns' exact logits."""

    sums: Tensor  # [2, N_padded] fp32: base 2; the sum of exponentials, over 2 to that
    ref: Tensor | None  # of `ListedLogits`, filled with the sums
    bad_ref: Tensor | None


def sum_exact_columns(
    run: Forward,
    finished: Finished,
    marks: Marks,
    screened: Screened,
    room: Room,
    logits: ListedLogits | None,
) -> ExactSums:
    """Sums over the columns that `marks` keep; nothing where full precision is needed.

    Args: logits: filled.
    """
    padded = run.packed.shape[0]
    sums = run.weight.new_zeros(2, padded, dtype=torch.float32)
    sums[0] = -torch.inf
    num_bytes = marks.room(room.workspace_bytes, run.num_blocks)
    draws = logits is not None and logits.draws
    lists = Lists.of(marks, run.weight, run.num_blocks, num_bytes, draws=draws)
    workspace, ref, bad_ref = run.count, None, None
    if logits is not None:
        workspace, ref, bad_ref = logits.make_room(lists, run.weight)
    programs, together = num_programs(run.weight), {}
    if not interpreted():
        # Programs wait for each other: all of them must be there before the first begins.
        residents = tiles_for(run.weight).residents
        programs *= residents
        together["launch_cooperative_grid"] = True
        if room.shares_device:
            programs = max(programs - LEFT_TO_OTHERS * residents, programs // 2)
    arguments = _of_lists(lists, marks, run.weight) | _inputs(run, finished)
    start(exact_columns_kernel, (programs,))(
        **arguments,
        made_ptr=workspace,
        full_ptr=screened.full,
        sum_ptr=sums,
        HAS_MADE=logits is not None,
        **together,
    )
    return ExactSums(sums, ref, bad_ref)


def add_exact_columns(
    run: Forward,
    finished: Finished,
    screened: Screened,
    exact: ExactSums,
    order: Tensor | None,  # of `add_targets`
    lse: Tensor,  # [N] in the caller's order
    log_dropped: Tensor,  # [N]
) -> None:
    """Writes `lse`: kept columns by their exact logits, all others by their 8-bit ones; and
    `log_dropped`, by `finished.dropped`."""
    padded, block = run.packed.shape[0], TOKEN_BLOCK
    has_made = exact.ref is not None
    start(screened_lse_kernel, (triton.cdiv(padded, block),))(
        run.count,
        screened.full,
        finished.unkept,
        finished.dropped,
        exact.sums,
        finished.lse,
        exact.ref if has_made else run.count,
        exact.bad_ref if has_made else run.count,
        run.count if order is None else order,
        lse,
        log_dropped,
        padded,
        BLOCK_N=block,
        HAS_MADE=has_made,
        HAS_ORDER=order is not None,
    )


def _inputs(run: Forward, finished: Finished) -> dict[str, Any]:
    """Returns the operands of the exact logits, and the tiles of their products."""
    weight, head, table = run.weight, run.head, tiles_for(run.weight)
    padded, dim = run.packed.shape[0], weight.shape[1]
    block_k = table.backward_dims
    return {
        "hidden_ptr": run.packed,
        "rows_ptr": torch.arange(padded, device=weight.device),
        "weight_ptr": weight,
        "bias_ptr": run.count if head.bias is None else head.bias,
        "target_ptr": run.targets,
        "target_logit_ptr": finished.target_logit,
        "lse_ptr": finished.lse,
        "num_blocks": run.num_blocks,
        "V": weight.shape[0],
        "D": dim,
        "stride_hn": run.packed.stride(0),
        "stride_wv": weight.stride(0),
        "scale": head.logit_scale,
        "softcap": head.softcap or 1.0,
        "TOKENS": TOKEN_BLOCK,
        "BLOCK_K": block_k,
        "EVEN_K": dim % block_k == 0,
        "STAGES": table.backward_stages,
        "PRECISION": "ieee",
        "IS_INTERPRETED": interpreted(),
        "HAS_BIAS": head.bias is not None,
        "HAS_SOFTCAP": head.softcap is not None,
        "num_warps": table.backward_warps,
    }


def _of_lists(lists: Lists, marks: Marks, weight: Tensor) -> dict[str, Any]:
    """Returns the lists of kept columns, and room for the parts of the sums over them."""
    segment = tiles_for(weight).pair * TILE
    num_tiles, num_blocks = lists.blocks.shape
    max_tasks = triton.cdiv(lists.max_rows, segment) + num_blocks
    entries, queue = int32_zeros(weight.device, (2, lists.max_rows), (lists.max_chunks + 3,))
    return {
        "kept_ptr": marks.kept,
        "drawn_ptr": marks.drawn,
        "order_ptr": lists.order,
        "starts_ptr": lists.starts,
        "first_ptr": lists.first,
        "num_chunks_ptr": lists.num_chunks,
        "base_ptr": lists.base,
        "segment_ptr": lists.segment,
        "entries_ptr": entries,
        "part_ptr": weight.new_empty(2, 2, max_tasks, TOKEN_BLOCK, dtype=torch.float32),
        "queue_ptr": queue,
        "num_tiles": num_tiles,
        "max_chunks": lists.max_chunks,
        "max_rows": lists.max_rows,
        "part_size": max_tasks * TOKEN_BLOCK,
        "words": marks.kept.shape[1],
        "TILE": TILE,
        "SEGMENT": segment,
        "BLOCKS": marks.blocks_padded,
        "HAS_DRAWN": lists.draws,
    }
