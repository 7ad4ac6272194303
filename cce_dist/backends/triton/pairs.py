"""Logits of listed pairs of a token and an id, by kernels that read a row a pair."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import PairsGrads, PairsRequest
from cce_dist.backends.triton.kernels.pairs import (
    pair_hidden_kernel,
    pair_logits_kernel,
    pair_weight_kernel,
)
from cce_dist.backends.triton.launch.arguments import for_kernels, with_unit_inner_stride
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.core.types import Head

# Pairs of a program at once.
BLOCK_P = 16
# Blocks of a row of the weight's gradient that a program writes.
BLOCKS = 4


def pair_logits(hidden: Tensor, head: Head, request: PairsRequest) -> Tensor:
    """Computes each pair's logit: see `protocol.Backend.pair_logits`."""
    head, hidden = for_kernels(head), with_unit_inner_stride(hidden)
    pairs, columns = request.pairs, request.columns(head)
    out = torch.empty(len(columns), dtype=torch.float32, device=hidden.device)
    if len(columns):
        block = 64 if interpreted() else BLOCK_P
        start(pair_logits_kernel, (triton.cdiv(len(columns), block),))(
            hidden,
            head.weight,
            hidden if head.bias is None else head.bias,
            pairs.rows,
            columns,
            out,
            len(columns),
            hidden.shape[1],
            hidden.stride(0),
            head.weight.stride(0),
            BLOCK_P=block,
            BLOCK_D=_dims(hidden),
            HAS_BIAS=head.bias is not None,
        )
    return out


def pair_gradients(
    hidden: Tensor, head: Head, request: PairsRequest, grad: Tensor, out: PairsGrads
) -> None:
    """Computes the gradients: see `protocol.Backend.pair_gradients`."""
    head, hidden = for_kernels(head), with_unit_inner_stride(hidden)
    pairs, weight, grad = request.pairs, head.weight, grad.contiguous()
    block, dim = _dims(hidden), hidden.shape[1]
    parts = triton.cdiv(dim, block)
    if out.hidden is not None:
        # Rows without pairs stay 0.
        out.hidden.zero_()
        if len(pairs.ids):
            start(pair_hidden_kernel, (len(pairs.offsets) - 1, parts))(
                weight,
                pairs.rows,
                request.columns(head),
                pairs.offsets,
                grad,
                out.hidden,
                dim,
                weight.stride(0),
                BLOCK_P=BLOCK_P,
                BLOCK_D=block,
            )
    if out.weight is None and out.bias is None:
        return
    columns = weight.shape[0]
    programs = 1 if out.weight is None else triton.cdiv(parts, BLOCKS)
    start(pair_weight_kernel, (columns, programs))(
        hidden,
        pairs.rows,
        pairs.order,
        pairs.starts(request.first_id, columns),
        grad,
        hidden if out.weight is None else out.weight,
        grad if out.bias is None else out.bias,
        dim,
        hidden.stride(0),
        0 if out.weight is None else out.weight.stride(0),
        BLOCK_P=BLOCK_P,
        BLOCK_D=block,
        BLOCKS=min(BLOCKS, parts),
        HAS_WEIGHT=out.weight is not None,
        HAS_BIAS=out.bias is not None,
    )


def _dims(hidden: Tensor) -> int:
    """Returns the elements of a row that a program reads at once."""
    return min(256, triton.next_power_of_2(hidden.shape[1]))
