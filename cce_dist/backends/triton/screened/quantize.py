"""Rows in 8 bits by kernels: the vectors that both sides' rows share, the rows, their errors.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from cce_dist.backends.eight_bits import (
    LARGEST,
    Moments,
    every_for_centre,
    quantized_rows,
    screen_dtype,
)
from cce_dist.backends.triton.kernels.screened.quantize import quantize_kernel
from cce_dist.backends.triton.kernels.screened.rounding import (
    moments_kernel,
    shift_kernel,
    sizes_kernel,
    sum_parts_kernel,
    vectors_kernel,
)
from cce_dist.backends.triton.launch.arguments import rows_of, with_unit_inner_stride
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted, num_programs
from cce_dist.core.streams import start_on_side_stream
from cce_dist.core.types import Head, QuantizedRows, Tokens
from cce_dist.options import Screen

# A call of fewer tokens, or of fewer products of hidden's and weight's elements, takes longer with
# 8-bit logits than with full ones: docs/notebook/2026-11-27/heads.md#when-screening-pays.
FEWEST_TOKENS, FEWEST_PRODUCTS = 1792, 10**12
_screens_small_calls = False
# Programs that add up the sizes of a weight's rows; each program for tokens reads all their sums.
SIZE_PARTS = 64


@dataclass(frozen=True)
class Sums:
    """Sums over rows of either side, [2, D] fp32 each: of the rows, and of their squares."""

    weight: Tensor
    hidden: Tensor
    taken: int  # rows of the weight in its sums
    count: Tensor  # [1] int32: hidden states in their sums


def start_sums(tokens: Tokens, head: Head, screen: Screen | None) -> Callable[[], Sums] | None:
    """Starts the sums that `quantize_both` takes, on a side stream: the current stream's next
    kernels, which order the tokens, leave most of the device idle.

    Returns: a function that waits for the sums and returns them; call it even after an error. None:
        there is nothing to quantise.
    """
    if screen is None or head.quantized is not None:
        return None
    weight = with_unit_inner_stride(head.weight)
    rows, count = rows_of(tokens)
    taken, of_weight, launch_weight = _sums_of(weight, every_for_centre(weight))
    hidden = with_unit_inner_stride(tokens.hidden)
    _, of_hidden, launch_hidden = _sums_of(hidden, rows=rows, count=count)

    def launch() -> None:
        launch_weight()
        launch_hidden()

    # The current stream's next kernels take as long, and need more of a multiprocessor's shared
    # memory, whose split stays as it is while any program runs there.
    wait = start_on_side_stream(weight.device, launch, first=False)

    def sums() -> Sums:
        wait()
        return Sums(of_weight, of_hidden, taken, count)

    return sums


def gains_by_screening(num_tokens: int, num_columns: int, dim: int) -> bool:
    """Tells whether 8-bit logits may save more than it takes to quantise the weight. In the
    interpreter, whose time does not matter, a call of any size screens."""
    if interpreted() or _screens_small_calls:
        return True
    return num_tokens >= FEWEST_TOKENS and num_tokens * num_columns * dim >= FEWEST_PRODUCTS


def screen_small_calls() -> None:
    """Makes screened calls of any size compute in 8 bits, in this process: for tests, and where the
    question is what 8 bits do, and not whether they pay."""
    global _screens_small_calls
    _screens_small_calls = True


def moments_of(matrix: Tensor, *, every: int = 1) -> Moments:
    """Computes the moments of a matrix's rows. Args: every: reads each `every`-th row alone."""
    taken, sums, launch = _sums_of(with_unit_inner_stride(matrix), every)
    launch()
    return Moments.of_sums(sums, taken)


def _sums_of(
    matrix: Tensor, every: int = 1, rows: Tensor | None = None, count: Tensor | None = None
) -> tuple[int, Tensor, Callable[[], None]]:
    """Returns the largest number of rows taken, memory of [2, D] for the sums of rows and of their
    squares, and a function that launches the kernels that fill it.

    Args: rows: [N] int64: sums the first `count` of these rows; None: each `every`-th row.
    """
    num_rows, dim = matrix.shape
    taken = triton.cdiv(num_rows, every) if rows is None else len(rows)
    block_n, block_d = (512, 256) if interpreted() else (32, 128)
    slices = triton.cdiv(dim, block_d)
    # Three programs a multiprocessor leave room for the kernels of the current stream.
    splits = max(1, min(triton.cdiv(taken, 4 * block_n), 3 * num_programs(matrix) // slices))
    part = torch.empty(splits, 2, dim, dtype=torch.float32, device=matrix.device)
    sums = torch.empty_like(part[0])
    launch_parts = functools.partial(
        start(moments_kernel, (slices, splits)),
        matrix,
        matrix if rows is None else rows,
        matrix if count is None else count,
        part,
        num_rows,
        every,
        dim,
        matrix.stride(0),
        ROWS=block_n,
        BLOCK_D=block_d,
        HAS_ROWS=rows is not None,
    )

    def launch() -> None:
        launch_parts()
        sum_parts(part, sums)

    return taken, sums, launch


def sum_parts(part: Tensor, out: Tensor, seen: Tensor | None = None) -> None:
    """Sums fp32 parts, [splits, ...], over the first dim.

    Args: seen: [splits, GROUPS]: `out`, [.., GROUPS, D], is divided by its sum.
    """
    size, block, splits = out.numel(), (4096 if interpreted() else 256), len(part)
    start(sum_parts_kernel, (triton.cdiv(size, block),))(
        part,
        part if seen is None else seen,
        out,
        splits,
        size,
        out.shape[-1],
        GROUPS=1 if seen is None else seen.shape[1],
        HAS_SEEN=seen is not None,
        SPLITS=16,
        BLOCK=block,
    )


def quantize_weight(
    weight: Tensor,  # [V_local, D]
    hidden: Moments | None,
    dtype: torch.dtype,
    into: QuantizedRows | None = None,
) -> QuantizedRows:
    """Quantises the weight. Reads it once, and some of its rows twice.

    Args: as of `eight_bits.quantized_rows`.
    """
    weight = with_unit_inner_stride(weight)
    of_weight = moments_of(weight, every=every_for_centre(weight))

    def make(centre: Tensor, channel: Tensor, across: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _quantize(weight, channel, -centre * channel, across, dtype, into)

    return quantized_rows(of_weight, hidden, into, make)


def quantize_for(tokens: Tokens, weight: Tensor, screen: Screen) -> QuantizedRows:
    """Quantises the weight with channels that suit these tokens, for them and for others."""
    rows, count = rows_of(tokens)
    hidden = with_unit_inner_stride(tokens.hidden)
    _, sums, launch = _sums_of(hidden, rows=rows, count=count)
    launch()
    moments = Moments.of_sums(sums, count.clamp_min(1)).for_others()
    return quantize_weight(weight, moments, screen_dtype(screen, weight))


def quantize_both(
    hidden: Tensor,  # [N_padded, D]
    weight: Tensor,  # [V_local, D]
    sums: Sums,
    screen: Screen,
    logit_scale: float,
) -> tuple[QuantizedRows, Tensor, Tensor, Tensor]:
    """Quantises both sides, for this call alone.

    Returns: the weight's rows, then the results of `quantize_tokens`.
    """
    weight = with_unit_inner_stride(weight)
    dim, fp32 = weight.shape[1], torch.float32
    vectors = weight.new_empty(6, dim, dtype=fp32)
    mean = weight.new_empty(3, dtype=fp32)
    block_d = min(triton.next_power_of_2(dim), 1024)
    start(vectors_kernel, (1,))(
        sums.weight, sums.hidden, sums.count, vectors, mean, sums.taken, dim, BLOCK_D=block_d
    )
    centre, channel, shift, hidden_centre = vectors[:4]
    dtype = screen_dtype(screen, weight)
    values, of_rows, size = _quantize(weight, channel, shift, hidden_centre, dtype)
    num_rows, block = weight.shape[0], 1024
    part = weight.new_empty(2, min(triton.cdiv(num_rows, block), SIZE_PARTS), dtype=fp32)
    start(sizes_kernel, (part.shape[1],))(size, part, num_rows, BLOCK=block)
    rows = QuantizedRows(values, of_rows, centre, channel, hidden_centre, vectors[4:], mean)
    return rows, *quantize_tokens(hidden, rows, logit_scale, part)


def quantize_tokens(
    hidden: Tensor,  # [N_padded, D]
    rows: QuantizedRows,
    logit_scale: float,
    part: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantises hidden states, for the product with `rows`.

    Args: part: [2, parts] sums of the sizes of the weight's rows, from which the first two numbers
        of `rows.mean` are computed; None: `rows.mean` is complete.
    Returns:
        [N_padded, stride] of 8 bits.
        [2, N_padded] the factor of each row; the shift of the token's logits, without the bias of a
        sum of exponentials.
        [N_padded] fp32 the variance of a logit's error.
    """
    values, of_tokens, size = _quantize(hidden, *rows.for_hidden, rows.centre, rows.values.dtype)
    variance = torch.empty_like(size[0])
    num_tokens, block = variance.shape[0], 512 if interpreted() else 128
    start(shift_kernel, (triton.cdiv(num_tokens, block),))(
        of_tokens,
        size,
        size if part is None else part,
        rows.mean,
        variance,
        num_tokens,
        rows.values.shape[0],
        1 if part is None else part.shape[1],
        hidden.shape[1],
        logit_scale,
        BLOCK_N=block,
        PARTS=SIZE_PARTS,
        HAS_PARTS=part is not None,
    )
    return values, of_tokens, variance


def _quantize(
    source: Tensor,  # [R, D]
    channel: Tensor,
    shift: Tensor,
    across: Tensor,
    dtype: torch.dtype,
    into: QuantizedRows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows of 8 bits, [R, stride]; their scale and inner product with `across`, [2, R];
    their sizes, [2, R]: see `quantize_kernel`."""
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
    # A thread reads 8 bytes of a row at once, and keeps up to 36 of its numbers in registers.
    warps = min(16, triton.next_power_of_2(triton.cdiv(dim, 36 * 32)))
    block_d = 4 * 32 * warps
    chunks = triton.cdiv(values.stride(0), block_d)
    groups = triton.cdiv(num_rows, rows)
    # Enough programs that the device stays full near the end, and few enough that each takes some
    # ten groups. Interpreted, one program takes all groups.
    programs = min(groups, num_programs(source) * (1 if interpreted() else 120))
    start(quantize_kernel, (programs,))(
        source,
        channel,
        shift,
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
        # With more registers fewer programs would fit, too few to hide the row sums, in which the
        # warps of a program wait for one another.
        maxnreg=96 if chunks in (8, 9) else None,
    )
    return values, of_rows, size
