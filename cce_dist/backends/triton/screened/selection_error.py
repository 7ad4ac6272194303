"""The mass that an 8-bit forward's tail loses, as 8-bit masses decide which columns stay in it."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from cce_dist.backends.eight_bits import NEAR_COLUMNS, NEAR_NATS
from cce_dist.backends.triton.forward.operands import Finished
from cce_dist.backends.triton.forward.state import Forward
from cce_dist.backends.triton.kernels.screened.selection_error import (
    count_near_kernel,
    near_logits_kernel,
    pick_near_kernel,
    selection_error_kernel,
)
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.options import TOKEN_BLOCK


def selection_error(
    run: Forward,
    finished: Finished,
    full: Tensor,  # [1] int32: 1: no logits are of 8 bits
    threshold: float,
) -> tuple[Tensor, Callable[[], None]]:
    """Room for what each token's tail has lost, [N_padded] fp32 over exp(lse), and what launches
    the kernels that fill it. Source: docs/numerics.md#the-bias-of-the-tail."""
    num_columns, mass = run.weight.shape[0], run.parts["mass"]
    block_v = 1 << 16 if interpreted() else 4096
    chunks = triton.cdiv(num_columns, block_v)
    near = torch.empty(run.num_blocks, chunks, dtype=torch.int32, device=run.weight.device)
    picked = near.new_empty(run.num_blocks, NEAR_COLUMNS)
    logits = run.weight.new_empty(2, *picked.shape, TOKEN_BLOCK, dtype=torch.float32)
    lost = torch.empty_like(finished.lse)
    whole = {
        "TOKENS": TOKEN_BLOCK,
        "CHUNKS": triton.next_power_of_2(chunks),
        "SAMPLES": NEAR_COLUMNS,
    }
    launch_logits = _logits_of(run, near, picked, full, logits, whole)

    def launch() -> None:
        grid = (run.num_blocks, chunks)
        of_masses = (num_columns, threshold, math.exp(NEAR_NATS))
        start(count_near_kernel, grid)(
            mass, run.count, near, *of_masses, TOKENS=TOKEN_BLOCK, BLOCK_V=block_v
        )
        start(pick_near_kernel, grid)(
            mass, run.count, near, picked, *of_masses, BLOCK_V=block_v, **whole
        )
        launch_logits()
        start(selection_error_kernel, (run.num_blocks,))(
            near,
            logits,
            finished.lse,
            run.count,
            full,
            lost,
            chunks,
            logits[0].numel(),
            2 * NEAR_NATS,
            **whole,
            num_warps=8,
        )

    return lost, launch


def _logits_of(
    run: Forward, near: Tensor, picked: Tensor, full: Tensor, logits: Tensor, whole: dict[str, int]
) -> Callable[[], None]:
    """Returns a function that launches the kernel which fills `logits`, [2, num_blocks,
    NEAR_COLUMNS, TOKENS]."""
    eight, head, weight = run.eight, run.head, run.weight
    assert eight is not None
    columns = NEAR_COLUMNS if interpreted() else 64
    return functools.partial(
        start(near_logits_kernel, (run.num_blocks, NEAR_COLUMNS // columns)),
        run.packed,
        weight,
        run.count if head.bias is None else head.bias,
        eight.hidden,
        eight.weight,
        eight.of_columns,
        eight.of_tokens,
        near,
        picked,
        full,
        logits,
        near.shape[1],
        logits[0].numel(),
        run.packed.shape[0],
        *weight.shape,
        run.packed.stride(0),
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
        **whole,
    )
