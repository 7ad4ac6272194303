"""Logits of listed pairs and their gradients: both backends against dense products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cce_dist.backends.choose import choose_backend
from cce_dist.backends.protocol import PairsGrads, PairsRequest, Room
from cce_dist.core.types import Head, Pairs
from cce_dist.options import LossOptions
from cce_dist.testing import Place, grid

TOKENS, ROWS, CLASSES = 40, 43, 40
# Ids [FIRST, FIRST + OF_SHARD) are this rank's.
FIRST, OF_SHARD = 8, 29


def listed(device: str) -> Pairs:
    """Token 3 has no ids, token 5 is left out, token 7 has more ids than a program takes at once;
    id 20 is of every token."""
    generator = torch.Generator().manual_seed(0)
    allowed = torch.rand(TOKENS, CLASSES, generator=generator) < 0.3
    allowed[7] = allowed[:, 20] = True
    allowed[3] = False
    token, ids = allowed.nonzero().unbind(1)
    row_of = torch.randperm(ROWS, generator=generator)[:TOKENS]
    row_of[5] = -1
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), allowed.sum(1).cumsum(0)])
    pairs = Pairs(row_of[token], ids, offsets, torch.sort(ids, stable=True).indices)
    return Pairs(*(getattr(pairs, name).to(device) for name in pairs.__dataclass_fields__))


@pytest.mark.parametrize(**grid(dim=(40, 1100), strided=(False, True), part=(2, 256)))
def test_pairs_are_entries_of_dense_products(
    monkeypatch: pytest.MonkeyPatch, place: Place, dim: int, strided: bool, part: int
) -> None:
    if place.backend == "triton":
        # Parts of two sorted pairs: id 20 has more of them than a program adds at once.
        monkeypatch.setattr("cce_dist.backends.triton.pairs.PART", part)
    elif part == 2:
        pytest.skip("torch has no parts")
    generator = torch.Generator().manual_seed(1)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(place.device)

    hidden, weight, bias = randn(ROWS, dim), randn(OF_SHARD, dim), randn(OF_SHARD)
    if strided:
        hidden, weight = randn(ROWS, dim + 3)[:, :dim], randn(dim, OF_SHARD).T
    # A row that no pair reads.
    pairs = listed(place.device)
    unread = torch.ones(ROWS, dtype=torch.bool)
    unread[pairs.rows[pairs.rows >= 0].cpu()] = False
    hidden[unread.to(place.device)] = torch.nan
    head = Head(weight, bias, None, CLASSES, None, 1.0)
    backend = choose_backend(LossOptions(backend=place.backend), hidden, TOKENS, OF_SHARD)
    # Room for seven pairs.
    request = PairsRequest(pairs, FIRST, Room(7 * 3 * 4 * dim))

    column = pairs.ids - FIRST
    here = (column >= 0) & (column < OF_SHARD) & (pairs.rows >= 0)
    rows, columns = pairs.rows[here], column[here]
    wide = hidden.nan_to_num(0).double()
    dense = wide @ weight.double().T + bias
    logits = backend.pair_logits(hidden, head, request)
    expected = torch.zeros(len(here), dtype=torch.float64, device=hidden.device)
    expected[here] = dense[rows, columns]
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)

    grad = randn(len(here))
    matrix = torch.zeros_like(dense).index_put_((rows, columns), grad[here].double(), True)
    out = PairsGrads(
        torch.full((ROWS, dim), torch.nan, device=hidden.device),
        torch.full((OF_SHARD, dim), torch.nan, device=hidden.device),
        torch.full((OF_SHARD,), torch.nan, device=hidden.device),
    )
    backend.pair_gradients(hidden, head, request, grad, out)
    right = (matrix @ weight.double(), matrix.T @ wide, matrix.sum(0))
    for name, ours in zip(("hidden", "weight", "bias"), right, strict=True):
        torch.testing.assert_close(getattr(out, name).double(), ours, rtol=1e-5, atol=1e-4)
    alone = PairsGrads(None, None, torch.full((OF_SHARD,), torch.nan, device=hidden.device))
    backend.pair_gradients(hidden, head, request, grad, alone)
    assert alone.bias is not None and torch.equal(alone.bias, out.bias)  # pyright: ignore
