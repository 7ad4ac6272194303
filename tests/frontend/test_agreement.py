"""check_ranks: ranks that were called differently all learn of it, with names, and none hangs."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from cce_dist import Filter, LossOptions, VocabShard, linear_cross_entropy
from cce_dist.frontend.agreement import SWITCH, is_wanted
from cce_dist.testing import CollectiveCounter, shared_pool

WORLD_SIZE = 3
ODD = 1  # the rank that is called differently


def arguments(rank: int, kind: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(12, 8, generator=generator)
    targets = torch.randint(0, 30, (12,), generator=generator)
    weight = torch.randn(10, 8, generator=torch.Generator().manual_seed(rank))
    given: dict[str, Any] = {"hidden": hidden, "weight": weight, "targets": targets}
    if kind == "slices":
        return {**given, "hidden": hidden[4 * rank : 4 * rank + 4], "sequence_parallel": True}
    if kind in ("token_weight", "class_weight"):
        given[kind] = torch.ones(12 if kind == "token_weight" else 30)
    if rank != ODD:
        return given
    changes: dict[str, dict[str, Any]] = {
        "alike": {},
        "tokens": {"hidden": hidden[:11], "targets": targets[:11]},
        "hidden": {"hidden": hidden.index_fill(0, torch.tensor([7]), 0.5)},
        "dtype": {"hidden": hidden.bfloat16(), "weight": weight.bfloat16()},
        "frozen": {"hidden": hidden.clone().requires_grad_()},
        "targets": {"targets": targets.roll(1)},
        "target": {"targets": targets.index_fill(0, torch.tensor([3]), 29)},
        "no_targets": {"targets": None},
        "softcap": {"softcap": 30.0},
        "filter": {"filter": Filter(tail=False)},
        "several": {"reduction": "sum", "z_loss": 1e-4},
        "workspace": {"workspace_bytes": 2**20},
        "token_weight": {"token_weight": torch.ones(12).index_fill(0, torch.tensor([0]), 2)},
        "class_weight": {},
        "bias": {"bias": torch.zeros(10)},
        "mode": {"gradient": "in_forward"},
        "parallel": {"hidden": hidden[:4], "sequence_parallel": True},
        "swapped": {"targets": targets.index_copy(0, torch.arange(4), targets[[3, 2, 1, 0]])},
        "not_a_tensor": {"hidden": None},
        "number": {"z_loss": 0},
    }
    changed = {**given, **changes[kind]}
    if kind == "class_weight":
        del changed["class_weight"]
    return changed


def outcome(group: dist.ProcessGroup, kind: str, switch: str = "option") -> str:
    """The message with which this rank refuses, or how many collectives there were."""
    given = arguments(dist.get_rank(group), kind)
    if switch == "option":
        given["check_ranks"] = True
    with mock.patch.dict(os.environ, {SWITCH: "1"} if switch == "environment" else {}):
        try:
            with CollectiveCounter() as counter, torch.no_grad():
                linear_cross_entropy(**given, group=group)
        except ValueError as error:
            return str(error)
    return str(len(counter.calls))


DIFFERENT = {
    "tokens": "targets",
    "hidden": "values of hidden",
    "dtype": "weight's dtype",
    "frozen": "hidden.requires_grad",
    "targets": "values of targets",
    "target": "values of targets",
    "no_targets": "targets",
    "softcap": "softcap",
    "filter": "filter",
    "token_weight": "values of token_weight",
    "class_weight": "class_weight",
    "bias": "bias",
    "mode": "gradient",
    "parallel": "sequence_parallel",
    "swapped": "values of targets",
    "not_a_tensor": "hidden",
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_check_ranks_names_what_differs_and_where(kind: str) -> None:
    messages = shared_pool().run(WORLD_SIZE, outcome, kind)
    for rank, message in enumerate(messages):
        assert message.startswith("every rank of the group must be called alike, got different ")
        assert f"{DIFFERENT[kind]} by rank: [0, 2] | [1]" in message, message
        assert f"This is rank {rank}" in message, message
    if kind == "tokens":
        assert "hidden torch.float32 [12, 8]" in messages[0] and "[11, 8]" in messages[1]
    if kind == "softcap":
        assert "This is rank 0, with softcap None" in messages[0]
        assert "This is rank 1, with softcap 30.0" in messages[1]


def test_check_ranks_names_everything_that_differs() -> None:
    for message in shared_pool().run(WORLD_SIZE, outcome, "several"):
        assert "reduction by rank: [0, 2] | [1]" in message
        assert "z_loss by rank: [0, 2] | [1]" in message
        assert "softcap" not in message


def with_weights(group: dist.ProcessGroup, kind: str) -> str:
    rank = dist.get_rank(group)
    given = arguments(rank, "alike") | {"check_ranks": True}
    if kind == "two_alike":
        given["weight"] = arguments(max(rank, 1), "alike")["weight"]
    elif kind == "whole":
        given["weight"] = arguments(0, "alike")["weight"]
    elif kind == "whole_without_tokens":
        given["weight"] = arguments(0, "alike")["weight"]
        given["targets"] = torch.full_like(given["targets"], -100)
    elif kind == "zeros":
        given["weight"] = torch.zeros(10, 8)
    elif kind == "rows_alike":
        given["weight"] = torch.arange(8.0).expand(10, 8)
    elif kind == "empty":
        start, stop = (0, 30) if rank == 0 else (30, 30)
        given["weight"] = torch.randn(stop - start, 8)
        given["vocab_shard"] = VocabShard(start, stop, 30)
    try:
        with torch.no_grad():
            return f"{linear_cross_entropy(**given, group=group):.6f}"
    except ValueError as error:
        return str(error)


WITH_SAME_ROWS = {"two_alike": "[0, 1]"}
WITH_SAME_ROWS |= {kind: "[0, 1, 2]" for kind in ("whole", "whole_without_tokens")}


@pytest.mark.parametrize("kind", WITH_SAME_ROWS)
def test_check_ranks_wants_other_rows_of_weight_on_every_rank(kind: str) -> None:
    # Targets are of several ranks, or there are none: nothing but the weight tells.
    for message in shared_pool().run(WORLD_SIZE, with_weights, kind):
        assert f"the same values on ranks {WITH_SAME_ROWS[kind]}: equal rows" in message, message
        assert "weight.chunk(3)[rank]" in message and "group=None" in message


@pytest.mark.parametrize("kind", ["zeros", "rows_alike", "empty"])
def test_check_ranks_lets_a_head_pass_whose_rows_are_alike(kind: str) -> None:
    losses = shared_pool().run(WORLD_SIZE, with_weights, kind)
    assert float(losses[0]) > 0 and losses == [losses[0]] * WORLD_SIZE


@pytest.mark.parametrize("kind", ["alike", "slices", "workspace", "number"])
def test_check_ranks_lets_ranks_that_agree_pass(kind: str) -> None:
    # One collective more than without it; each rank may have a slice, and a workspace, of its own.
    checked = shared_pool().run(WORLD_SIZE, outcome, kind)
    plain = shared_pool().run(WORLD_SIZE, outcome, kind, "off")
    assert checked == [str(int(plain[0]) + 1)] * WORLD_SIZE


def test_check_ranks_by_the_environment() -> None:
    for message in shared_pool().run(WORLD_SIZE, outcome, "softcap", "environment"):
        assert "softcap by rank: [0, 2] | [1]" in message


def test_check_ranks_of_one_rank_costs_nothing() -> None:
    hidden, weight, targets = torch.ones(4, 8), torch.ones(10, 8), torch.tensor([0, 1, 2, 3])
    with CollectiveCounter() as counter:
        checked = linear_cross_entropy(hidden, weight, targets, check_ranks=True)
    assert not counter.calls
    assert torch.equal(checked, linear_cross_entropy(hidden, weight, targets))


def test_check_ranks_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, wanted in {"": False, "0": False, "1": True}.items():
        monkeypatch.setenv(SWITCH, value)
        assert is_wanted(LossOptions()) is wanted
        assert is_wanted(LossOptions(check_ranks=True))
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(ValueError, match=r"CCE_DIST_CHECK_RANKS must be 0 or 1, got 'yes'"):
        is_wanted(LossOptions())
