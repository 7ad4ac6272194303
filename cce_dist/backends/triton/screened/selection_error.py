"""The mass that an 8-bit forward's tail loses because 8-bit masses choose the columns in it."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from cce_dist.backends.eight_bits import NEAR_THRESHOLD_COLUMNS, NEAR_THRESHOLD_NATS
from cce_dist.backends.triton.forward.operands import Finished
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.kernels.screened.selection_error import (
    count_near_threshold_kernel,
    near_threshold_logits_kernel,
    pick_near_threshold_kernel,
    selection_error_kernel,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.options import TOKEN_BLOCK


def selection_error(
    state: ForwardState,
    finished: Finished,
    full: Tensor,  # [1] int32: 1: no logits are of 8 bits
    threshold: float,
) -> tuple[Tensor, Callable[[], None]]:
    """Returns memory for each token's lost tail mass, [N_padded] fp32 over exp(lse), and a function
    that launches the kernels that fill it. Source: docs/design/screened.md#the-bias-of-the-tail."""
    num_columns, mass = state.weight.shape[0], state.buffers.mass
    block_v = 1 << 16 if interpreted() else 4096
    chunks = triton.cdiv(num_columns, block_v)
    near_threshold = torch.empty(
        state.num_blocks, chunks, dtype=torch.int32, device=state.weight.device
    )
    picked = near_threshold.new_empty(state.num_blocks, NEAR_THRESHOLD_COLUMNS)
    logits = state.weight.new_empty(2, *picked.shape, TOKEN_BLOCK, dtype=torch.float32)
    lost_mass = torch.empty_like(finished.lse)
    chunks_padded = triton.next_power_of_2(chunks)
    launch_logits = _logits_of(state, near_threshold, picked, full, logits, chunks_padded)

    def launch() -> None:
        grid = (state.num_blocks, chunks)
        of_masses = (num_columns, threshold, math.exp(NEAR_THRESHOLD_NATS))
        start(count_near_threshold_kernel, grid)(
            mass, state.count, near_threshold, *of_masses, TOKENS=TOKEN_BLOCK, BLOCK_V=block_v
        )
        start(pick_near_threshold_kernel, grid)(
            mass,
            state.count,
            near_threshold,
            picked,
            *of_masses,
            TOKENS=TOKEN_BLOCK,
            BLOCK_V=block_v,
            CHUNKS=chunks_padded,
            SAMPLES=NEAR_THRESHOLD_COLUMNS,
        )
        launch_logits()
        start(selection_error_kernel, (state.num_blocks,))(
            near_threshold,
            logits,
            finished.lse,
            state.count,
            full,
            lost_mass,
            chunks,
            logits[0].numel(),
            2 * NEAR_THRESHOLD_NATS,
            TOKENS=TOKEN_BLOCK,
            CHUNKS=chunks_padded,
            SAMPLES=NEAR_THRESHOLD_COLUMNS,
            num_warps=8,
        )

    return lost_mass, launch


def _logits_of(
    state: ForwardState,
    near_threshold: Tensor,
    picked: Tensor,
    full: Tensor,
    logits: Tensor,
    chunks_padded: int,
) -> Callable[[], None]:
    """Returns a function that launches the kernel which fills `logits`, [2, num_blocks,
    NEAR_THRESHOLD_COLUMNS, TOKENS]."""
    eight, head, weight = state.eight, state.head, state.weight
    assert eight is not None
    columns = NEAR_THRESHOLD_COLUMNS if interpreted() else 64
    return functools.partial(
        start(near_threshold_logits_kernel, (state.num_blocks, NEAR_THRESHOLD_COLUMNS // columns)),
        state.packed,
        weight,
        state.count if head.bias is None else head.bias,
        eight.hidden,
        eight.weight,
        eight.of_columns,
        eight.of_tokens,
        near_threshold,
        picked,
        full,
        logits,
        near_threshold.shape[1],
        logits[0].numel(),
        state.packed.shape[0],
        *weight.shape,
        state.packed.stride(0),
        weight.stride(0),
        eight.hidden.stride(0),
        eight.weight.stride(0),
        head.logit_scale,
        head.softcap or 1.0,
        COLUMNS=columns,
        BLOCK_D=64,
        ACCUMULATOR=eight.accumulator,
        HAS_BIAS=head.bias is not None,
        HAS_SOFTCAP=head.softcap is not None,
        TOKENS=TOKEN_BLOCK,
        CHUNKS=chunks_padded,
        SAMPLES=NEAR_THRESHOLD_COLUMNS,
    )
