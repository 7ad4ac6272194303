"""Logits of listed pairs of a token and an id, in eager torch: some pairs at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from cce_dist.backends.protocol import PairsGrads, PairsRequest
from cce_dist.backends.torch.tiles import spans
from cce_dist.core.types import Head, accumulate_dtype

# Rows in memory at once: hidden's, the weight's, their product.
ROWS_ALIVE = 3


def pair_logits(hidden: Tensor, head: Head, request: PairsRequest) -> Tensor:
    """Computes each pair's logit: see `protocol.Backend.pair_logits`."""
    dtype = wide = accumulate_dtype(hidden.dtype)
    if hidden.dtype == torch.float32:
        # A sum of nearly 300 loses digits with every number that is added.
        wide = torch.float64
    columns = request.columns(head)
    out = torch.zeros(columns.shape, dtype=dtype, device=hidden.device)
    listed = (columns >= 0).nonzero()[:, 0]
    for start, stop in spans(len(listed), _chunk(hidden, request)):
        pairs = listed[start:stop]
        column = columns[pairs]
        x = hidden[request.pairs.rows[pairs]].to(wide)
        x = x.mul_(head.weight[column].to(wide)).sum(1)
        out[pairs] = (x if head.bias is None else x.add_(head.bias[column].to(wide))).to(dtype)
    return out


def pair_gradients(
    hidden: Tensor, head: Head, request: PairsRequest, grad: Tensor, out: PairsGrads
) -> None:
    """Computes the gradients: see `protocol.Backend.pair_gradients`."""
    columns = request.columns(head)
    listed = (columns >= 0).nonzero()[:, 0]
    rows, columns, grad = request.pairs.rows[listed], columns[listed], grad[listed]
    chunk = _chunk(hidden, request)
    if out.hidden is not None:
        _add_up(out.hidden, rows, grad, head.weight, columns, chunk)
    if out.weight is not None:
        _add_up(out.weight, columns, grad, hidden, rows, chunk)
    if out.bias is not None:
        # Unlike index_add_, this adds in one order on a GPU.
        out.bias.zero_().index_put_((columns,), grad, accumulate=True)


def _add_up(
    out: Tensor, into: Tensor, factor: Tensor, source: Tensor, taken: Tensor, chunk: int
) -> None:
    """Writes out[r] = sum of factor_p source[taken_p] over the pairs with into_p = r."""
    touched, at = torch.unique(into, return_inverse=True)
    sums = factor.new_zeros(len(touched), source.shape[1])
    for start, stop in spans(len(into), chunk):
        rows = source[taken[start:stop]].to(sums.dtype)
        rows.mul_(factor[start:stop, None])
        sums.index_put_((at[start:stop],), rows, accumulate=True)
    out.zero_()
    out[touched] = sums.to(out.dtype)


def _chunk(hidden: Tensor, request: PairsRequest) -> int:
    """Returns the pairs that are computed at once."""
    row = hidden.shape[1] * (8 if hidden.element_size() > 2 else 4)
    return max(1, request.room.workspace_bytes // (ROWS_ALIVE * row))
