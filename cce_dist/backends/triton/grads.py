"""Backward over this rank's shard in Triton: lists of the kept columns, the tail, the products.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import BackwardRequest
from cce_dist.backends.triton.backward.filtered import products
from cce_dist.backends.triton.backward.state import BackwardState, GradBuffers
from cce_dist.backends.triton.kernels.backward.scale import scale_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import AFTER_HIDDEN, ALL, UNTIL_HIDDEN, num_programs
from cce_dist.core.types import Head, LocalGrads, Tokens


def backward(tokens: Tokens, head: Head, request: BackwardRequest) -> LocalGrads:
    """Computes the gradients of this rank's shard. Deterministic.

    `request.store` is the forward's, and is overwritten. A sum over ranks starts as soon as only
    the weight's gradient is left to compute.

    Returns: the hidden gradient in the dtype of its sum, or in fp32; 0 for tokens that don't count.
    Source: block-sparse products as in MegaBlocks, arXiv:2211.15841; docs/design/tail.md.
    """
    state = BackwardState.of(tokens, head, request)
    weight, hidden, into = state.weight, request.hidden, request.weight
    grad_hidden = grad_bias = rows = wait = None
    if request.bias:
        grad_bias = weight.new_empty(weight.shape[0], dtype=torch.float32)
    if hidden is not None:
        shape = (state.pieces, len(tokens), weight.shape[1])
        grad_hidden = weight.new_empty(shape, dtype=torch.float32)
    if into is not None:
        # Rows that are not contiguous take a copy, rather than a slower kernel.
        whole = into.rows.stride(1) == 1 or into.rows.shape[1] == 1
        rows = into.rows if whole else into.rows.contiguous()
    accumulate, late = (False, None) if into is None else (into.accumulate, into.late)
    # Dropping `launch` frees the workspace; dropping `grad_hidden`, too, the gradient's pieces.
    launch = products(
        state,
        GradBuffers(grad_hidden, rows, grad_bias, accumulate, late),
        shares_device=request.room.shares_device,
    )
    in_two_stages = (
        hidden is not None and not hidden.is_local and (request.bias or into is not None)
    )
    launch(UNTIL_HIDDEN if in_two_stages else ALL)
    if grad_hidden is not None:
        grad_hidden = grad_hidden[0] if state.pieces == 1 else grad_hidden.sum(0)
    if not in_two_stages:
        # Frees the workspace, which makes room for the stored hidden gradient.
        launch = None
    if grad_hidden is not None and hidden is not None:
        part = grad_hidden
        if hidden.is_local:
            grad_hidden = state.finish_hidden(part, hidden.part_dtype)
        else:
            wait = hidden.start(part, finish=lambda: state.finish_hidden(part, part.dtype))
    try:
        if launch is not None:
            launch(AFTER_HIDDEN)
        if into is not None and rows is not None and rows is not into.rows:
            into.rows.copy_(rows)
    finally:
        if wait is not None:
            grad_hidden = wait()
    return LocalGrads(grad_hidden, grad_bias)


def scale(grad: Tensor, factor: Tensor) -> None:
    """Multiplies a contiguous gradient in place by a number, [] fp32; 1 costs nothing."""
    block = 4096
    num_blocks = triton.cdiv(grad.numel(), block)
    grid = (min(num_blocks, 16 * num_programs(grad)),)
    if num_blocks:
        start(scale_kernel, grid)(grad, factor, grad.numel(), num_blocks, BLOCK=block)
