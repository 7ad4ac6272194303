"""The kernel that merges ranks on a GPU: what torch's merge gives, and which shards it accepts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cce_dist.core.stats import Stats, merge_parts
from cce_dist.ranks.merge_header import NUM_DIGITS, flaw, is_sound
from cce_dist.testing import TRITON_PLACES, Place, grid

pytest.importorskip("triton")
from cce_dist.backends.triton.tokens.merge import merge_lse_and_target, pack_lse_and_target

DIGIT = 2**20
Bounds = tuple[tuple[int, int, int], ...]  # start, stop, vocab_size by rank


def gathered(stats: Tensor, bounds: Bounds) -> Tensor:
    """[W, 2, N] and the shards -> [W, 8 + 2 N]"""
    length = 2 * stats.shape[2]
    digits = [[d for value in (length, *rank) for d in divmod(value, DIGIT)] for rank in bounds]
    return torch.cat([torch.tensor(digits, dtype=stats.dtype), stats.flatten(1)], 1)


def even(ranks: int, rows: int = 10) -> Bounds:
    return tuple((rank * rows, (rank + 1) * rows, ranks * rows) for rank in range(ranks))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, ranks=[1, 2, 3, 8, 33]))
def test_merged_as_torch_merges(place: Place, ranks: int) -> None:
    generator = torch.Generator().manual_seed(ranks)
    stats = 30 * torch.randn(ranks, 2, 700, generator=generator)
    stats[:, 1] *= torch.arange(ranks)[:, None] == torch.arange(700) % ranks
    # An empty shard, a token of no column at all, NaN, an infinite logit on one rank, and on all.
    stats[-1, 0, :300] = -torch.inf
    stats[:, 0, 5] = -torch.inf
    stats[0, 0, 6] = torch.nan
    stats[0, 0, 7] = torch.inf
    stats[:, 0, 8] = torch.inf
    stats[0, 0, 9], stats[-1, 0, 9] = torch.inf, torch.nan
    zeros = torch.zeros(ranks, dtype=torch.float64)
    expected = merge_parts(Stats(*stats.double().unbind(1)), zeros, zeros)
    count = torch.tensor([650], dtype=torch.int32)
    for counted, number in ((None, 700), (count.to(place.device), 650)):
        parts = gathered(stats, even(ranks)).to(place.device)
        (lse, target), tiles = merge_lse_and_target(parts, counted)
        assert tiles.item() == 1
        for found, wanted in ((lse, expected.lse), (target, expected.target_logit)):
            wanted = torch.where(torch.arange(700) < number, wanted, 0)
            torch.testing.assert_close(
                found.cpu().double(), wanted, rtol=3e-7, atol=3e-7, equal_nan=True
            )


SHARDS: dict[str, tuple[bool, Bounds]] = {
    "one rank": (True, ((0, 7, 7),)),
    "uneven, in any order": (True, ((40, 41, 41), (0, 30, 41), (30, 40, 41))),
    "empty ones": (True, ((0, 41, 41), (41, 41, 41), (20, 20, 41))),
    "padded rows": (True, ((0, 32, 41), (32, 64, 41), (64, 96, 41))),
    "more than fp32 holds": (True, ((0, 2**33 + 1, 2**34), (2**33 + 1, 2**34, 2**34))),
    "gap": (False, ((0, 10, 30), (10, 19, 30), (20, 30, 30))),
    "overlap": (False, ((0, 11, 30), (10, 20, 30), (20, 30, 30))),
    "overlap and gap": (False, ((0, 10, 30), (5, 15, 30), (20, 30, 30))),
    "twice": (False, ((0, 10, 20), (0, 10, 20))),
    "one vocabulary is smaller": (False, ((0, 10, 20), (10, 20, 19))),
    "short": (False, ((0, 10, 25), (10, 20, 25))),
}


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, shards=SHARDS))
def test_which_shards_tile(place: Place, shards: tuple[bool, Bounds]) -> None:
    fine, bounds = shards
    parts = gathered(torch.zeros(len(bounds), 2, 5), bounds).to(place.device)
    assert merge_lse_and_target(parts, None)[1].item() == fine


BELONGING: dict[str, bool] = {
    "ranks of their own": True,
    "the same lse": False,
    "the same lse but for rounding": False,
    "beyond what counts": True,
    "within what counts": False,
    "targets on two ranks": True,
    "targets' logits alike": True,
    "three tokens": True,
    "NaN": True,
    "empty shards": True,
}


def what_ranks_send(kind: str) -> tuple[Tensor, int | None]:
    """[3, 2, 700], and how many tokens count."""
    generator = torch.Generator().manual_seed(0)
    stats = 3 * torch.randn(1, 2, 700, generator=generator).expand(3, 2, 700).clone()
    stats[1:, 1] = 0
    if kind == "ranks of their own":
        stats[:, 0] = torch.randn(3, 700, generator=generator)
    elif kind == "the same lse but for rounding":
        stats[1, 0] = stats[1, 0].nextafter(torch.tensor(torch.inf))
    elif kind in ("beyond what counts", "within what counts"):
        stats[1, 0, 9 if kind[0] == "b" else 11] += 1
    elif kind == "targets on two ranks":
        stats[2, 1, 99] = 1
    elif kind == "targets' logits alike":
        stats[0, 1] = 5
    elif kind == "NaN":
        stats[:, 0, 7] = torch.nan
    elif kind == "empty shards":
        stats[1:, 0] = -torch.inf
    counted = {"beyond what counts": 10, "within what counts": 10, "three tokens": 3}
    return stats, counted.get(kind)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, kind=list(BELONGING)))
def test_whether_ranks_have_the_same_rows(place: Place, kind: str) -> None:
    stats, counted = what_ranks_send(kind)
    count = None if counted is None else torch.tensor([counted], dtype=torch.int32)
    on_device = None if count is None else count.to(place.device)
    parts = gathered(stats, even(3))
    assert merge_lse_and_target(parts.to(place.device), on_device)[1].item() == BELONGING[kind]
    assert bool(is_sound(parts[:, :NUM_DIGITS], Stats(*stats.unbind(1)), count)) == BELONGING[kind]


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_parts_of_another_length_do_not_belong_together(place: Place) -> None:
    parts = gathered(torch.zeros(3, 2, 5), even(3))
    assert merge_lse_and_target(parts.to(place.device), None)[1].item() == 1
    parts[1, 1] += 2
    assert merge_lse_and_target(parts.to(place.device), None)[1].item() == 0
    stats = Stats(*parts[:, NUM_DIGITS:].view(3, 2, 5).unbind(1))
    assert not is_sound(parts[:, :NUM_DIGITS], stats, None)
    assert "as many numbers to the merge, got by rank [10, 12, 10]" in flaw(parts[:, :NUM_DIGITS])


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, num_tokens=[0, 1, 700]))
def test_what_a_rank_sends(place: Place, num_tokens: int) -> None:
    stats = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(0))
    bounds = ((2**23 + 7, 2**33 + 1, 2**34 - 1),)
    lse, logit = stats.to(place.device)
    header = (2 * num_tokens, *bounds[0])
    numbers = [digit for value in header for digit in divmod(value, DIGIT)]
    found = pack_lse_and_target(lse, logit, numbers)
    assert torch.equal(found.cpu(), gathered(stats[None], bounds)[0])
