"""The shares of the columns that a block drops: masses of every launch by the lse of all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Screen
from cce_dist.backends.protocol import ColumnFilter, ForwardRequest, Room
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, Tokens, Wanted
from cce_dist.testing import TRITON_PLACES, Place, grid
from tests.backends.triton.triton_cases import give_programs

pytest.importorskip("triton")

from cce_dist.backends.triton import stats as triton_stats
from cce_dist.backends.triton.filter.marks import Marks, MassFactors
from cce_dist.backends.triton.forward import state as forward_state

BLOCK, DIM = 128, 32
# 40 tiles of 256 columns: of two splits each has tiles enough for all four launches.
CLASSES = 10_000
# Shares are bf16, to which Triton's interpreter truncates.
ROUNDING = 2.0**-7


def problem(place: Place, num_tokens: int, num_classes: int, softcap: float | None) -> Any:
    """Tokens that agree on frequent columns, which come last: early bounds say little."""
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, DIM, generator=made) + 0.5
    weight = 0.2 * torch.randn(num_classes, DIM, generator=made)
    weight += 0.25 * torch.arange(num_classes)[:, None] / num_classes
    targets = torch.full((num_tokens,), -1, dtype=torch.int32)
    parts = hidden.half(), weight.half(), targets
    hidden, weight, targets = (x.to(place.device) for x in parts)
    return Tokens(hidden, None, targets), Head(weight, None, None, num_classes, softcap, 1.0)


def stats_of(tokens: Tokens, head: Head, **options: Any) -> tuple[Stats, Marks]:
    rule = ColumnFilter(0.08, by_largest=False, tail=True, draws=True)
    request = ForwardRequest(Wanted(), rule, None, None, None, Room(2**24))
    found = triton_stats.forward(tokens, head, replace(request, **options))
    assert found[1] is not None
    return found[0], found[1]


def launches_of(num_columns: int, width: int, splits: int) -> Tensor:
    """The launch, from 0, that computes each column: a 64th of a split's tiles, then four times as
    many each time, and at least one more."""
    tiles = torch.arange(-(-num_columns // width))
    launch = torch.empty_like(tiles)
    for split in range(splits):
        own = tiles[split::splits]
        ends = torch.tensor([-(-len(own) // 64), -(-len(own) // 16), -(-len(own) // 4)])
        ends = ends.maximum(torch.tensor([1, 2, 3]))
        launch[own] = torch.searchsorted(ends, torch.arange(len(own)), right=True)
    return launch.repeat_interleave(width)[:num_columns]


@pytest.fixture
def factors(monkeypatch: pytest.MonkeyPatch) -> list[MassFactors]:
    """Those of each forward; their shape as it was then."""
    seen: list[MassFactors] = []
    made = triton_stats.mass_factors

    def mass_factors(*args: Any) -> MassFactors:
        seen.append(made(*args))
        return seen[-1]

    monkeypatch.setattr(triton_stats, "mass_factors", mass_factors)
    return seen


# 5 blocks, the last of them not whole. Of 10 programs each block has two.
@pytest.mark.parametrize(**grid(places=TRITON_PLACES, softcap=(None, 3.0)))
def test_shares_of_a_launch_add_up_to_what_it_drops(
    place: Place,
    softcap: float | None,
    factors: list[MassFactors],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_programs(monkeypatch, 10)
    tokens, head = problem(place, 5 * BLOCK - 50, CLASSES, softcap)
    # As if ranks told each other bounds: else one program would compute all in one launch.
    _, marks = stats_of(tokens, head, bounds=lambda bound: bound[None])
    z = tokens.hidden.double() @ head.weight.double().T
    slope = torch.ones_like(z)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
        slope = 1 - (z / softcap) ** 2
    assert marks.order is not None
    mass = (z.softmax(-1) * slope)[marks.order.long()]
    (found,) = factors
    splits = int(found.shape[1]) // found.groups
    launch = launches_of(head.vocab_size, found.width, splits).to(mass.device)
    assert launch.unique().tolist() == [0, 1, 2, 3]
    for block, rows in enumerate(mass.split(BLOCK)):
        kept = (marks.kept[:, 0] >> block & 1).bool()
        dropped = rows.sum(0).masked_fill(kept, 0)
        assert bool(dropped.any()) and bool(kept.any())
        # Five blocks are as many groups.
        share = marks.share[block].double()
        assert bool((share[kept] == 0).all())
        for number in range(4):
            of_launch = launch == number
            torch.testing.assert_close(
                share[of_launch].sum(), dropped[of_launch].sum(), rtol=ROUNDING, atol=1e-12
            )
        # As they are recorded, early columns would have several times their share.
        assert float(found.of_blocks[block, 1]) < 0.3 * float(found.of_blocks[block, 3])


# Of 16-bit logits fewer blocks fit the cache than of 8-bit ones, and the splits are others.
@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_a_refused_screen_is_the_full_forward(
    place: Place, monkeypatch: pytest.MonkeyPatch, factors: list[MassFactors]
) -> None:
    def cached_blocks(weight: Tensor, element_size: int, beside: int) -> int:
        return 4 if element_size == 1 else 1

    monkeypatch.setattr(forward_state, "cached_blocks", cached_blocks)
    give_programs(monkeypatch, 4)
    tokens, head = problem(place, 4 * BLOCK, CLASSES, None)
    full, _ = stats_of(tokens, head)
    refused, _ = stats_of(tokens, head, screen=Screen(max_kept=0.0, max_error=10.0))
    stats_of(tokens, head, screen=Screen(max_kept=1.0, max_error=10.0))
    in_full, _, in_8_bits = (int(found.shape[1]) // found.groups for found in factors)
    assert in_8_bits < in_full
    torch.testing.assert_close(refused.lse, full.lse, rtol=0, atol=1e-5)
    # One launch has computed all columns: one factor.
    assert bool((factors[1].of_blocks == factors[1].of_blocks[:, :1]).all())


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch, place: Place) -> tuple[Tokens, Head, ColumnFilter]:
    """A flat softmax whose columns have 0.7 of the threshold. Each of 8 splits has 15 tiles, of
    which a 64th and a 16th are the same one."""
    give_programs(monkeypatch, 8)
    made, num_classes = torch.Generator().manual_seed(0), 8 * 15 * 256
    hidden = torch.randn(BLOCK, DIM, generator=made).half()
    weight = (0.05 * torch.randn(num_classes, DIM, generator=made)).half()
    targets = torch.full((BLOCK,), -1, dtype=torch.int32)
    hidden, weight, targets = (x.to(place.device) for x in (hidden, weight, targets))
    rule = ColumnFilter(BLOCK / num_classes / 0.7, by_largest=False, tail=True, draws=True)
    head = Head(weight, None, None, num_classes, None, 1.0)
    return Tokens(hidden, None, targets), head, rule


# Three quarters of the columns are computed with a sum that is expected or known.
@pytest.mark.parametrize(
    **grid(
        places=TRITON_PLACES,
        screen={"no": None, "refused": Screen(max_kept=0.0, max_error=10.0)},
    )
)
def test_a_flat_softmax_of_few_tiles_drops_columns(
    place: Place, flat: tuple[Tokens, Head, ColumnFilter], screen: Screen | None
) -> None:
    tokens, head, rule = flat
    stats, marks = stats_of(tokens, head, filter=rule, screen=screen)
    dropped = (marks.log_dropped - stats.lse).exp()
    assert float(dropped.mean()) > 0.6
