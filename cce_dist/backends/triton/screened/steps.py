"""The steps of a screened forward: 8-bit logits, then exact ones of the columns that matter.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from cce_dist.backends.eight_bits import Rounding
from cce_dist.backends.protocol import Room
from cce_dist.backends.triton.filter.lists import TILE, ListedLogits, Lists, int32_zeros
from cce_dist.backends.triton.filter.marks import Marks
from cce_dist.backends.triton.forward.operands import EightBit, Finished
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.kernels.screened.exact_columns import (
    exact_columns_kernel,
    no_columns_kernel,
    screened_lse_kernel,
)
from cce_dist.backends.triton.kernels.screened.guard import guard_kernel, guard_parts_kernel
from cce_dist.backends.triton.kernels.screened.stats import (
    ALL_SUMS,
    PLAIN_SUMS,
    screened_stats_kernel,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import (
    LEFT_TO_OTHERS,
    interpreted,
    num_programs,
    tiles_for,
)
from cce_dist.backends.triton.screened.quantize import Sums, quantize_both, quantize_tokens
from cce_dist.core.stats import Stats
from cce_dist.options import TOKEN_BLOCK, Screen


def eight_bits_of(
    state: ForwardState, screen: Screen, sums: Sums | None
) -> tuple[EightBit, Rounding]:
    """Returns the 8-bit operands of a forward, and the error of each token's logits.

    Args: sums: of the rows of both sides; None: the head has its 8-bit copy already.
    """
    head, hidden = state.head, state.packed[:, : state.weight.shape[1]]
    if head.quantized is None:
        assert sums is not None
        quantized = quantize_both(hidden, state.weight, sums, screen, head.logit_scale)
    else:
        quantized = head.quantized, *quantize_tokens(hidden, head.quantized, head.logit_scale)
    rows, values, of_tokens, variance = quantized
    return EightBit(values, rows.values, rows.of_rows, of_tokens), Rounding(rows, variance)


@dataclass(frozen=True)
class Screened:
    """The outcome of an 8-bit forward."""

    full: Tensor  # [1] int32: 1 if a forward in full precision takes its place


def guard(
    state: ForwardState, finished: Finished, variance: Tensor, screen: Screen
) -> tuple[ForwardState, Screened]:
    """Decides on the device whether 8 bits will do. Also returns the forward in full precision,
    which has no blocks to compute if they do."""
    num_blocks, columns = state.num_blocks, state.weight.shape[0]
    padded = state.packed.shape[0]
    block_v = 4096 if interpreted() else 1024
    grid = triton.cdiv(num_blocks, 16), triton.cdiv(columns, block_v)
    int32 = functools.partial(state.weight.new_empty, dtype=torch.int32)
    number, shape = int32(grid[0] * grid[1]), int32(3)
    error = torch.empty_like(number, dtype=torch.float32)
    start(guard_parts_kernel, grid)(
        state.buffers.mass,
        state.count,
        state.shape,
        finished.lse,
        finished.unkept,
        variance,
        state.buffers.lower,
        number,
        error,
        shape,
        columns,
        padded,
        *state.for_shape(state.weight.element_size()),
        BLOCKS=16,
        BLOCK_V=block_v,
        BLOCK_N=1024 if interpreted() else 128,
        GROUPS=state.groups,
    )
    screened = Screened(int32(1))
    start(guard_kernel, (1,))(
        number,
        error,
        state.count,
        state.shape,
        screened.full,
        shape,
        len(number),
        columns,
        screen.max_kept,
        screen.max_error,
        BLOCK=1024,
    )
    return replace(state, shape=shape, eight=None), screened


@dataclass(frozen=True)
class ExactSums:
    """Sums of the kept columns' exact logits."""

    sums: Tensor  # [PLAIN_SUMS | ALL_SUMS, N_padded] fp32: see `ALL_SUMS`
    ref: Tensor | None  # these two as of `ListedLogits`, filled by `add_exact_columns`
    bad_ref: Tensor | None


def sum_exact_columns(
    state: ForwardState,
    finished: Finished,
    marks: Marks,
    screened: Screened,
    room: Room,
    logits: ListedLogits | None,
) -> ExactSums:
    """Sums exact logits over the columns that `marks` keep; does nothing if the forward was
    repeated in full precision.

    Args: logits: filled with the last chunk's logits, for the backward.
    """
    padded = state.packed.shape[0]
    num_sums = ALL_SUMS.value if state.has_screened_stats else PLAIN_SUMS.value
    sums = state.weight.new_empty(num_sums, padded, dtype=torch.float32)
    rows = state.weight.new_empty(padded, dtype=torch.int64)
    start(no_columns_kernel, (triton.cdiv(padded, TOKEN_BLOCK),))(
        sums, rows, padded, SUMS=num_sums, BLOCK_N=TOKEN_BLOCK
    )
    num_bytes = marks.room(room.workspace_bytes, state.num_blocks)
    draws = logits is not None and logits.draws
    lists = Lists.of(marks, state.weight, state.num_blocks, num_bytes, draws=draws)
    stored = ref = bad_ref = None
    if logits is not None:
        stored, ref, bad_ref = logits.make_room(lists, state.weight)
    _launch_exact_columns(
        state, finished, marks, lists, screened.full, rows, sums, stored, room.shares_device
    )
    return ExactSums(sums, ref, bad_ref)


def add_exact_columns(
    state: ForwardState,
    finished: Finished,
    screened: Screened,
    exact: ExactSums,
    order: Tensor | None,  # of `add_targets`
    lse: Tensor,  # [N] in the caller's order
    log_dropped: Tensor,  # [N]
) -> None:
    """Writes `lse`, from the exact logits of kept columns and the 8-bit logits of all others; and
    `log_dropped`, from `finished.dropped`."""
    padded, block = state.packed.shape[0], TOKEN_BLOCK
    has_stored = exact.ref is not None
    start(screened_lse_kernel, (triton.cdiv(padded, block),))(
        state.count,
        screened.full,
        finished.unkept,
        finished.dropped,
        exact.sums,
        finished.lse,
        exact.ref if has_stored else state.count,
        exact.bad_ref if has_stored else state.count,
        state.count if order is None else order,
        lse,
        log_dropped,
        padded,
        BLOCK_N=block,
        HAS_STORED=has_stored,
        HAS_ORDER=order is not None,
    )


def add_exact_stats(
    state: ForwardState,
    finished: Finished,
    screened: Screened,
    exact: ExactSums,
    variance: Tensor,  # [N_padded] of an 8-bit logit's error
    order: Tensor | None,
    stats: Stats,  # in the caller's order; written
) -> None:
    """Writes entropy, sum_p2, max_logit and target_is_argmax, from the exact logits of kept columns
    and the 8-bit logits of all others; corrects the moments, of 8-bit logits."""
    padded, count = state.packed.shape[0], state.count
    largest, column = finished.largest or (None, None)
    assert finished.unkept is not None
    start(screened_stats_kernel, (triton.cdiv(padded, TOKEN_BLOCK),))(
        count,
        screened.full,
        exact.sums,
        finished.unkept,
        state.or_dummy(finished.entropy),
        state.or_dummy(finished.sum_p2),
        state.or_dummy(largest),
        state.or_dummy(column),
        state.buffers.mass,
        variance,
        state.targets,
        state.or_dummy(order),
        state.or_dummy(stats.mean_logit),
        state.or_dummy(stats.m2_logit),
        state.or_dummy(stats.entropy),
        state.or_dummy(stats.sum_p2),
        state.or_dummy(stats.max_logit),
        state.or_dummy(stats.target_is_argmax),
        padded,
        state.weight.shape[0],
        TOKENS=TOKEN_BLOCK,
        HAS_ENTROPY=stats.entropy is not None,
        HAS_SQUARES=stats.sum_p2 is not None,
        HAS_LARGEST=stats.max_logit is not None,
        HAS_HIT=stats.target_is_argmax is not None,
        HAS_MOMENTS=stats.mean_logit is not None,
        HAS_ORDER=order is not None,
    )


def _launch_exact_columns(
    state: ForwardState,
    finished: Finished,
    marks: Marks,
    lists: Lists,
    full: Tensor,
    rows: Tensor,  # [N_padded] int64: 0 to N_padded - 1
    sums: Tensor,  # written
    stored: Tensor | None,  # [max_rows, 128] fp16, written; None: no logits are kept
    shares_device: bool,
) -> None:
    weight, head, tiles = state.weight, state.head, tiles_for(state.weight)
    dim, segment = weight.shape[1], tiles.pair * TILE
    max_tasks = triton.cdiv(lists.max_rows, segment) + state.num_blocks
    entries, queue = int32_zeros(weight.device, (2, lists.max_rows), (lists.max_chunks + 3,))
    programs, cooperative = num_programs(weight), {}
    if not interpreted():
        # Programs wait for each other: all of them must be there before the first one starts.
        programs *= tiles.residents
        cooperative["launch_cooperative_grid"] = True
        if shares_device:
            programs = max(programs - LEFT_TO_OTHERS * tiles.residents, programs // 2)
    start(exact_columns_kernel, (programs,))(
        hidden_ptr=state.packed, rows_ptr=rows,
        weight_ptr=weight, bias_ptr=state.count if head.bias is None else head.bias,
        target_ptr=state.targets, target_logit_ptr=finished.target_logit, lse_ptr=finished.lse,
        stored_ptr=state.count if stored is None else stored, full_ptr=full,
        bits_ptr=lists.bits, order_ptr=lists.order, starts_ptr=lists.starts,
        first_ptr=lists.first, num_chunks_ptr=lists.num_chunks,
        base_ptr=lists.base, segment_ptr=lists.segment, entries_ptr=entries,
        part_ptr=weight.new_empty(2, len(sums), max_tasks, TOKEN_BLOCK, dtype=torch.float32),
        sum_ptr=sums,
        queue_ptr=queue, num_blocks=state.num_blocks, D=dim,
        num_tiles=lists.blocks.shape[0], max_chunks=lists.max_chunks, max_rows=lists.max_rows,
        part_size=max_tasks * TOKEN_BLOCK, words=marks.kept.shape[1],
        stride_hn=state.packed.stride(0), stride_wv=weight.stride(0),
        scale=head.logit_scale, softcap=head.softcap or 1.0, TOKENS=TOKEN_BLOCK, TILE=TILE,
        SEGMENT=segment, BLOCKS=marks.blocks_padded, BLOCK_K=tiles.backward_dims,
        EVEN_K=dim % tiles.backward_dims == 0, STAGES=tiles.backward_stages, PRECISION="ieee",
        IS_INTERPRETED=interpreted(), HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None, HAS_DRAWN=lists.draws,
        HAS_STORED=stored is not None, HAS_SUMS=state.wanted.entropy or state.wanted.sum_p2,
        HAS_LARGEST=state.wanted.correct or state.wanted.moments,
        num_warps=tiles.backward_warps, **cooperative,
    )  # fmt: skip
