"""A forward in 8 bits whose columns that matter are computed again, exactly.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from cce_dist.eight_bits import (
    LARGEST,
    Moments,
    Rounding,
    correct_for_rounding,
    every_for_centre,
    quantized_rows,
    screen_dtype,
)
from cce_dist.kernels.quantize import moments_kernel, quantize_kernel
from cce_dist.kernels.screen import (
    exact_columns_kernel,
    guard_kernel,
    guard_parts_kernel,
    screened_lse_kernel,
)
from cce_dist.local_triton_forward import Forward
from cce_dist.local_triton_inputs import rows_of, with_unit_inner_stride
from cce_dist.local_triton_launch import start
from cce_dist.local_triton_lists import TILE, ListedLogits, Lists, Marks
from cce_dist.local_triton_operands import EightBit, Finished
from cce_dist.local_triton_products import LEFT_TO_OTHERS
from cce_dist.local_triton_tiles import interpreted, num_programs, tiles_for
from cce_dist.options import TOKEN_BLOCK, Screen
from cce_dist.partials import Head, QuantizedRows, Tokens
from cce_dist.streams import start_aside


def moments_of(matrix: Tensor, count: Tensor | None = None, *, every: int = 1) -> Moments:
    """Args: count: [1] only so many rows count, and the others are 0."""
    taken, sums, launch = _sums_of(with_unit_inner_stride(matrix), every)
    launch()
    return Moments.of_sums(sums, taken if count is None else count.clamp_min(1))


def start_weight_moments(head: Head, screen: Screen | None) -> Callable[[], Moments] | None:
    """Begins the `moments_of` a weight that `with_eight_bits` is going to quantise, beside what the
    current stream is given next. Returns: what waits for them, to be called whatever happens; None:
    there is nothing to quantise."""
    if screen is None or head.quantized is not None:
        return None
    weight = with_unit_inner_stride(head.weight)
    taken, sums, launch = _sums_of(weight, every_for_centre(weight))
    wait = start_aside(weight.device, launch)

    def moments() -> Moments:
        wait()
        return Moments.of_sums(sums, taken)

    return moments


def _sums_of(matrix: Tensor, every: int) -> tuple[int, Tensor, Callable[[], None]]:
    """How many rows are taken; room for [2, D], the sum of them and of their squares; and what
    launches the kernels that fill it."""
    num_rows, dim = matrix.shape
    taken = triton.cdiv(num_rows, every)
    block_n, block_d = (512, 256) if interpreted() else (16, 128)
    splits = max(1, min(triton.cdiv(taken, 8 * block_n), 64))
    part = torch.empty(splits, 2, dim, dtype=torch.float32, device=matrix.device)
    sums = torch.empty_like(part[0])
    launch_parts = functools.partial(
        start(moments_kernel, (triton.cdiv(dim, block_d), splits)),
        matrix,
        part,
        num_rows,
        every,
        dim,
        matrix.stride(0),
        ROWS=block_n,
        BLOCK_D=block_d,
    )

    def launch() -> None:
        launch_parts()
        torch.sum(part, 0, out=sums)

    return taken, sums, launch


def quantize_weight(
    weight: Tensor,  # [V_local, D]
    hidden: Moments | None,
    dtype: torch.dtype,
    into: QuantizedRows | None = None,
    own: Moments | None = None,
) -> QuantizedRows:
    """The weight in 8 bits. Reads it once, and some of its rows twice.

    Args: as of `eight_bits.quantized_rows`; own: None: computed here.
    """
    weight = with_unit_inner_stride(weight)
    if own is None:
        own = moments_of(weight, every=every_for_centre(weight))
    make = functools.partial(_quantize, weight, dtype=dtype, into=into)
    return quantized_rows(own, hidden, into, make)


def _quantize(
    source: Tensor,  # [R, D]
    centre: Tensor,
    channel: Tensor,
    across: Tensor,
    dtype: torch.dtype,
    into: QuantizedRows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """[R, stride] of 8 bits, [2, R] scale and inner product with `across`, [2, R] sizes: see
    `quantize_kernel`."""
    num_rows, dim = source.shape
    device, fp32 = source.device, torch.float32
    if into is None:
        padded = triton.cdiv(dim, 16) * 16
        values = torch.empty(num_rows, padded, dtype=dtype, device=device)
        of_rows = torch.empty(2, num_rows, dtype=fp32, device=device)
    else:
        values, of_rows = into.values, into.of_rows
    size = torch.empty(2, num_rows, dtype=fp32, device=device)
    rows = 512 if interpreted() else 1
    # Threads that read 8 bytes of a row at once, and keep up to 36 of its numbers in registers.
    warps = min(16, triton.next_power_of_2(triton.cdiv(dim, 36 * 32)))
    block_d = 4 * 32 * warps
    chunks = triton.cdiv(values.stride(0), block_d)
    groups = triton.cdiv(num_rows, rows)
    # Enough that the last ones to end have company, and each goes on to some ten groups.
    # Interpreted, one goes on to all of them.
    programs = min(groups, num_programs(source) * (1 if interpreted() else 120))
    start(quantize_kernel, (programs,))(
        source,
        channel,
        -centre * channel,
        across,
        values,
        of_rows,
        size,
        num_rows,
        dim,
        source.stride(0),
        values.stride(0),
        LARGEST[dtype],
        ROWS=rows,
        BLOCK_D=block_d,
        CHUNKS=chunks,
        EVEN=dim == chunks * block_d and num_rows % rows == 0,
        IS_INTEGER=dtype == torch.int8,
        num_warps=warps,
        # Where the compiler would take more, fewer programs are at work than the sums, for which
        # a program's warps wait for one another, can do with.
        maxnreg=96 if chunks in (8, 9) else None,
    )
    return values, of_rows, size


def quantize_for(tokens: Tokens, weight: Tensor, screen: Screen) -> QuantizedRows:
    """The weight in 8 bits, as it suits these tokens, for them and others."""
    rows, count = rows_of(tokens)
    hidden = tokens.hidden.index_select(0, rows)
    counts = torch.arange(len(rows), device=hidden.device) < count
    moments = moments_of(hidden.masked_fill_(~counts[:, None], 0), count)
    return quantize_weight(weight, moments.for_others(), screen_dtype(screen, weight))


def with_eight_bits(run: Forward, screen: Screen, own: Moments | None) -> tuple[Forward, Rounding]:
    """The same forward of 8-bit operands, and what [N_padded] tokens' logits are off by.

    Args: own: the weight's; None: computed here, if they are needed.
    """
    head, dim = run.head, run.weight.shape[1]
    hidden, weight = run.packed[:, :dim], head.quantized
    if weight is None:
        dtype = screen_dtype(screen, run.weight)
        weight = quantize_weight(run.weight, moments_of(hidden, run.count), dtype, own=own)
    values, of_tokens, size = _quantize(
        hidden, weight.hidden_centre, 1 / weight.channel, weight.centre, weight.values.dtype
    )
    variance = correct_for_rounding(of_tokens, size, weight, head.logit_scale)
    operands = EightBit(values, weight.values, weight.of_rows, of_tokens)
    return replace(run, eight=operands), Rounding(weight, variance)


@dataclass(frozen=True)
class Screened:
    """What came of an 8-bit forward."""

    full: Tensor  # [1] int32: 1 where full precision was needed in its place


def guard(
    run: Forward, made: Finished, variance: Tensor, screen: Screen
) -> tuple[Forward, Screened]:
    """Whether 8 bits will do, decided on the device; and the forward that runs if they won't."""
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
        made.lse,
        made.unkept,
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
    found = Screened(int32(1))
    start(guard_kernel, (1,))(
        number,
        error,
        run.count,
        run.shape,
        found.full,
        shape,
        len(number),
        columns,
        screen.max_kept,
        screen.max_error,
        BLOCK=1024,
    )
    return replace(run, shape=shape, eight=None), found


@dataclass(frozen=True)
class ExactSums:
    """Of the kept columns' exact logits."""

    sums: Tensor  # [2, N_padded] fp32: base 2; the sum of exponentials, over 2 to that
    ref: Tensor | None  # of `ListedLogits`, filled with the sums
    poor: Tensor | None


def sum_exact_columns(
    run: Forward,
    made: Finished,
    marks: Marks,
    screened: Screened,
    workspace_bytes: int,
    logits: ListedLogits | None,
    beside: bool = False,
) -> ExactSums:
    """Over the columns that `marks` keep; nothing in full precision.

    Args: logits: filled; beside: as of `local_grads`.
    """
    padded = run.packed.shape[0]
    sums = run.weight.new_zeros(2, padded, dtype=torch.float32)
    sums[0] = -torch.inf
    room = marks.room(workspace_bytes, run.num_blocks)
    draws = logits is not None and logits.draws
    lists = Lists.of(marks, run.weight, run.num_blocks, room, draws=draws)
    workspace, ref, poor = run.count, None, None
    if logits is not None:
        workspace, ref, poor = logits.make_room(lists, run.weight)
    programs, together = num_programs(run.weight), {}
    if not interpreted():
        # Programs wait for each other: all of them must be there before the first begins.
        residents = tiles_for(run.weight).residents
        programs *= residents
        together["launch_cooperative_grid"] = True
        if beside:
            programs = max(programs - LEFT_TO_OTHERS * residents, programs // 2)
    arguments = _of_lists(lists, marks, run.weight) | _inputs(run, made)
    start(exact_columns_kernel, (programs,))(
        **arguments,
        made_ptr=workspace,
        full_ptr=screened.full,
        sum_ptr=sums,
        HAS_MADE=logits is not None,
        **together,
    )
    return ExactSums(sums, ref, poor)


def add_exact_columns(
    run: Forward,
    made: Finished,
    screened: Screened,
    exact: ExactSums,
    order: Tensor | None,  # of `add_targets`
    lse: Tensor,  # [N] in the caller's order
    log_dropped: Tensor,  # [N]
) -> None:
    """`lse`, in place: kept columns by their exact logits, all others by their 8-bit ones; and
    `log_dropped`, by `made.dropped`."""
    padded, block = run.packed.shape[0], TOKEN_BLOCK
    has_made = exact.ref is not None
    start(screened_lse_kernel, (triton.cdiv(padded, block),))(
        run.count,
        screened.full,
        made.unkept,
        made.dropped,
        exact.sums,
        made.lse,
        exact.ref if has_made else run.count,
        exact.poor if has_made else run.count,
        run.count if order is None else order,
        lse,
        log_dropped,
        padded,
        BLOCK_N=block,
        HAS_MADE=has_made,
        HAS_ORDER=order is not None,
    )


def _inputs(run: Forward, made: Finished) -> dict[str, Any]:
    """What the exact logits are made of, and the tiles of their products."""
    weight, head, table = run.weight, run.head, tiles_for(run.weight)
    padded, dim = run.packed.shape[0], weight.shape[1]
    block_k = table.backward_dims
    return {
        "hidden_ptr": run.packed,
        "rows_ptr": torch.arange(padded, device=weight.device),
        "weight_ptr": weight,
        "bias_ptr": run.count if head.bias is None else head.bias,
        "target_ptr": run.targets,
        "target_logit_ptr": made.target_logit,
        "lse_ptr": made.lse,
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
    """Which columns are kept, and room for the parts of the sums over them."""
    segment = tiles_for(weight).pair * TILE
    num_tiles, num_blocks = lists.blocks.shape
    max_tasks = triton.cdiv(lists.max_rows, segment) + num_blocks

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int32, device=weight.device)

    return {
        "kept_ptr": marks.kept,
        "drawn_ptr": marks.drawn,
        "order_ptr": lists.order,
        "starts_ptr": lists.starts,
        "first_ptr": lists.first,
        "num_chunks_ptr": lists.num_chunks,
        "base_ptr": lists.base,
        "segment_ptr": lists.segment,
        "entries_ptr": zeros(2, lists.max_rows),
        "part_ptr": weight.new_empty(2, 2, max_tasks, TOKEN_BLOCK, dtype=torch.float32),
        "queue_ptr": zeros(lists.max_chunks + 3),
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
