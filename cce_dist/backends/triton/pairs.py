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
    pair_parts_kernel,
    pair_weight_kernel,
)
from cce_dist.backends.triton.launch.arguments import for_kernels, with_unit_inner_stride
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.core.types import Head

# Pairs and elements of a row that a program reads at once, and its warps. A hidden gradient's
# program is one warp, so that no thread waits for another's sum; the weight's reads a pair at once.
LOGITS = (16, 128, 4)
HIDDEN = (4, 256, 1)
WEIGHT = (1024, 4)
# Sorted pairs that one program sums at most, and sums of such parts that take memory: with more
# pairs parts are longer, up to MOST times as long.
PART, PARTS, MOST = 256, 8192, 16


def pair_logits(hidden: Tensor, head: Head, request: PairsRequest) -> Tensor:
    """Computes each pair's logit: see `protocol.Backend.pair_logits`."""
    head, hidden = for_kernels(head), with_unit_inner_stride(hidden)
    pairs, columns = request.pairs, request.columns(head)
    out = torch.empty(len(columns), dtype=torch.float32, device=hidden.device)
    if len(columns):
        block, dims, warps = LOGITS
        block = 64 if interpreted() else block
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
            BLOCK_D=_dims(hidden, dims),
            HAS_BIAS=head.bias is not None,
            num_warps=warps,
        )
    return out


def pair_gradients(
    hidden: Tensor, head: Head, request: PairsRequest, grad: Tensor, out: PairsGrads
) -> None:
    """Computes the gradients: see `protocol.Backend.pair_gradients`."""
    head, hidden, grad = for_kernels(head), with_unit_inner_stride(hidden), grad.contiguous()
    if out.hidden is not None:
        _hidden_gradient(head, request, grad, out.hidden)
    if out.weight is not None or out.bias is not None:
        _gradients_of_ids(hidden, head, request, grad, out)


def _hidden_gradient(head: Head, request: PairsRequest, grad: Tensor, out: Tensor) -> None:
    pairs, weight, dim = request.pairs, head.weight, out.shape[1]
    # Rows without pairs stay 0.
    out.zero_()
    block_pairs, dims, warps = HIDDEN
    block = _dims(out, dims)
    if len(pairs.ids):
        start(pair_hidden_kernel, (len(pairs.offsets) - 1, triton.cdiv(dim, block)))(
            weight,
            pairs.rows,
            request.columns(head),
            pairs.offsets,
            grad,
            out,
            dim,
            weight.stride(0),
            BLOCK_P=block_pairs,
            BLOCK_D=block,
            num_warps=warps,
        )


def _gradients_of_ids(
    hidden: Tensor, head: Head, request: PairsRequest, grad: Tensor, out: PairsGrads
) -> None:
    pairs, columns, dim = request.pairs, head.weight.shape[0], hidden.shape[1]
    ids, rows, grad = (x[pairs.order] for x in (pairs.ids, pairs.rows, grad))
    has_weight, has_bias = out.weight is not None, out.bias is not None
    dims, warps = WEIGHT
    block = _dims(hidden, dims)
    blocks, part = triton.cdiv(dim, block) if has_weight else 1, _part(len(ids))
    num_parts = triton.cdiv(len(ids), part)
    sums = grad.new_empty(num_parts, dim if has_weight else 0)
    of_bias = grad.new_empty(num_parts)
    if num_parts > 1:
        start(pair_parts_kernel, (num_parts, blocks))(
            hidden,
            rows,
            ids,
            grad,
            sums,
            of_bias,
            len(ids),
            request.first_id,
            columns,
            dim,
            hidden.stride(0),
            PART=part,
            BLOCK_D=block,
            HAS_WEIGHT=has_weight,
            HAS_BIAS=has_bias,
            num_warps=warps,
        )
    start(pair_weight_kernel, (columns, blocks))(
        hidden,
        rows,
        request.starts(ids, columns),
        grad,
        sums,
        of_bias,
        hidden if out.weight is None else out.weight,
        grad if out.bias is None else out.bias,
        dim,
        hidden.stride(0),
        0 if out.weight is None else out.weight.stride(0),
        PART=part,
        BLOCK_D=block,
        HAS_WEIGHT=has_weight,
        HAS_BIAS=has_bias,
        num_warps=warps,
    )


def _part(num_pairs: int) -> int:
    longer = triton.next_power_of_2(triton.cdiv(max(num_pairs, 1), PARTS * PART))
    return PART * min(MOST, longer)


def _dims(hidden: Tensor, most: int) -> int:
    return min(most, triton.next_power_of_2(hidden.shape[1]))
