"""`token_logprobs` under a support, and of candidates, over ranks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from cce_dist import TokenLogprobs, TokenSupport, token_logprobs
from cce_dist.testing import shared_pool
from tests.frontend.dtensor.dtensor_cases import mesh_of, place, whole
from tests.frontend.test_support import compute, differentiated, gradients
from tests.support.head_cases import on_rank
from tests.support.listed_cases import CLASSES, Listing


def on_a_rank(group: Any, listing: Listing, cuts: tuple[int, ...], split: bool) -> dict[str, Any]:
    leaves, options, _ = on_rank(listing.leaves(), group, cuts, split=split)
    found = {}
    for supported in (True, False):
        values = compute(listing, leaves, supported=supported, top_k=7, **options)
        usable = listing.usable(0)
        grads = gradients(values, usable, differentiated(leaves, supported))
        plain = [None if x is None else x.detach() for x in values]
        found[supported] = (plain, grads)
    return found


@pytest.mark.parametrize(
    ("cuts", "split"),
    [((0, 45, CLASSES), False), ((0, 11, 11, CLASSES), True)],
    ids=["even", "ragged_and_sequence_parallel"],
)
def test_over_ranks(cuts: tuple[int, ...], split: bool) -> None:
    listing = Listing.make(torch.float64)
    ranks = shared_pool().run(len(cuts) - 1, on_a_rank, listing, cuts, split)
    for supported in (True, False):
        leaves = listing.leaves()
        alone = compute(listing, leaves, supported=supported, top_k=7)
        expected = gradients(alone, listing.usable(0), differentiated(leaves, supported))
        for name, *values in zip(alone._fields, *(x[supported][0] for x in ranks), strict=True):
            one = getattr(alone, name)
            for value in values:
                if one is None:
                    assert value is None
                    continue
                assert torch.equal(value, values[0]), name
                torch.testing.assert_close(value, one, rtol=1e-10, atol=1e-10)
        by_rank = [x[supported][1] for x in ranks]
        hidden = [x[0] for x in by_rank]
        torch.testing.assert_close(torch.cat(hidden) if split else hidden[0], expected[0])
        for leaf in (1, 2):
            grad = torch.cat([x[leaf] for x in by_rank])
            torch.testing.assert_close(grad, expected[leaf], rtol=1e-10, atol=1e-10)


def other_lists(group: Any) -> None:
    ids = torch.arange(4)
    support = TokenSupport(torch.arange(5), ids + 0)
    if dist.get_rank(group):
        support = TokenSupport(torch.tensor([0, 1, 2, 3, 5]), torch.arange(5))
    given = (torch.ones(4, 8), torch.ones(5, 8), ids)
    with pytest.raises(ValueError, match=r"same sizes, got by rank .*pairs \[4, 5\]"):
        token_logprobs(*given, support=support, group=group)
    rule = r"every rank of the group must list the same ids in the same order .*on rank [01]"
    with pytest.raises(ValueError, match=rule):
        others = torch.tensor([[1], [2], [3], [4 - dist.get_rank(group)]])
        token_logprobs(*given, candidates=others, group=group)
    with pytest.raises(ValueError, match=rule):
        turned = torch.tensor([0, 1]) if dist.get_rank(group) else torch.tensor([1, 0])
        support = TokenSupport(torch.tensor([0, 2, 2, 2, 2]), turned)
        token_logprobs(*given, support=support, group=group)


def test_ranks_with_other_supports() -> None:
    shared_pool().run(2, other_lists)


def on_a_mesh(group: Any) -> None:
    mesh, listing = mesh_of(group), Listing.make(torch.float64)
    for supported, placement in itertools.product((True, False), (Replicate(), Shard(1))):
        leaves = listing.leaves()
        alone = compute(listing, leaves, supported=supported, top_k=3, shift=1)
        usable = listing.usable(1)
        expected = gradients(alone, usable, differentiated(leaves, supported))
        there = listing.leaves()
        there["hidden"] = place(there["hidden"].detach(), mesh, placement).requires_grad_()
        for name in ("weight", "bias"):
            there[name] = place(there[name].detach(), mesh, Shard(0)).requires_grad_()
        found = compute(listing, there, supported=supported, top_k=3, shift=1)
        assert isinstance(found.candidates, DTensor)
        for name in ("logprobs", "candidates", "entropy", "top_ids"):
            torch.testing.assert_close(whole(getattr(found, name)), getattr(alone, name))
        local = TokenLogprobs(*(None if x is None else whole(x) for x in found))
        grads = gradients(local, usable, differentiated(there, supported))
        for ours, right in zip(grads, expected, strict=True):
            torch.testing.assert_close(whole(ours), right)


def test_of_dtensors() -> None:
    shared_pool().run(2, on_a_mesh)
