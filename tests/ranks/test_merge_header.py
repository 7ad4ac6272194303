"""Ranks whose numbers do not belong together all learn of it in the merge, and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import VocabShard, linear_cross_entropy
from cce_dist.testing import shared_pool

V, D, N = 24, 8, 40


def arguments(seed: int = 0, num_tokens: int = N) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        "hidden": torch.randn(num_tokens, D, generator=made),
        "weight": torch.randn(V, D, generator=made),
        "targets": torch.randint(0, V, (num_tokens,), generator=made),
    }


def loss_of(group: dist.ProcessGroup, **given: Any) -> str:
    """The loss, or the message with which this rank refuses."""
    trained = {name: given[name].clone().requires_grad_() for name in ("hidden", "weight")}
    try:
        result = linear_cross_entropy(**given | trained, group=group)
        loss = result[0] if isinstance(result, tuple) else result
        loss.sum().backward()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return f"{loss.sum():.5f}"


# -- one head on every rank ---------------------------------------------------------------------


def whole_head(group: dist.ProcessGroup, options: dict[str, Any], kind: str) -> str:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given: dict[str, Any] = arguments()
    if kind == "ignored":
        given["targets"] = given["targets"].masked_fill(torch.arange(N) % 3 > 0, -100)
    elif kind == "stated":
        given["vocab_shard"] = VocabShard(rank * V, (rank + 1) * V, size * V)
    elif kind == "slices":
        given["hidden"] = given["hidden"].chunk(size)[rank]
        given["sequence_parallel"] = True
    return loss_of(group, **given, **options)


MODES = {
    "filtered": {},
    "exact": {"gradient": "exact"},
    "in_forward": {"gradient": "in_forward"},
    "none": {"reduction": "none"},
    "statistics": {"stats": ("entropy", "correct"), "label_smoothing": 0.1},
    "triton": {"backend": "triton"},
    "triton_statistics": {"backend": "triton", "stats": ("entropy",)},
}


@pytest.mark.parametrize("size", [2, 4], ids=["2_ranks", "4_ranks"])
@pytest.mark.parametrize("mode", MODES)
def test_a_whole_head_on_every_rank_is_refused(mode: str, size: int) -> None:
    for message in shared_pool().run(size, whole_head, MODES[mode], "plain"):
        assert message.startswith("ValueError: weight must be this rank's rows"), message
        assert f"each of the {size} ranks" in message and f"weight.chunk({size})[rank]" in message


@pytest.mark.parametrize("mode", ["filtered", "triton"])
@pytest.mark.parametrize("kind", ["ignored", "stated", "slices"])
def test_a_whole_head_is_refused_however_it_is_passed(kind: str, mode: str) -> None:
    for message in shared_pool().run(2, whole_head, MODES[mode], kind):
        assert "a whole head on each of them counts 2 times" in message, message


def one_row_of(group: dist.ProcessGroup, kind: str, options: dict[str, Any]) -> str:
    """Ranks whose log-sum-exps are the same, and rightly so."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    given: dict[str, Any] = arguments()
    if kind == "zeros":
        given["weight"] = torch.zeros(V, D)
    elif kind == "drawn_alike":  # by ranks with the same seed; targets are of all of them
        given["targets"] = given["targets"] * size
        given["targets"][0] = size * V - 1
    elif kind == "small":  # as a head of zeros after a step
        given["weight"] = 0.01 * given["weight"]
    elif kind == "three_tokens":
        given = arguments(num_tokens=3)
    elif kind == "ignored":
        given["targets"] = torch.full((N,), -100)
    elif kind == "own_rows":  # all targets are rank 0's
        given["weight"] = arguments(seed=rank)["weight"]
    return loss_of(group, **given, **options)


@pytest.mark.parametrize("mode", ["filtered", "triton"])
@pytest.mark.parametrize(
    "kind", ["zeros", "drawn_alike", "small", "three_tokens", "ignored", "own_rows"]
)
def test_rows_that_may_be_alike_pass(kind: str, mode: str) -> None:
    losses = shared_pool().run(3, one_row_of, kind, MODES[mode])
    assert losses == [losses[0]] * 3 and float(losses[0]) >= 0


def from_zero(group: dist.ProcessGroup) -> list[str]:
    """Steps of Adam: rows that have not been targets are alike, and all targets are rank 0's."""
    made, rows = torch.Generator().manual_seed(0), 2**15
    hidden = torch.randn(8, 32, generator=made)
    targets = torch.randint(0, rows, (8,), generator=made)
    weight = torch.zeros(rows, 32, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=2e-4)
    said = []
    for _ in range(5):
        optimizer.zero_grad()
        try:
            linear_cross_entropy(hidden, weight, targets, group=group).backward()  # pyright: ignore
        except ValueError as error:
            said.append(str(error))
        optimizer.step()
    return said


def test_a_head_that_begins_at_zero_is_no_whole_head() -> None:
    assert shared_pool().run(2, from_zero) == [[], []]


# -- different sizes ----------------------------------------------------------------------------


def odd_one(group: dist.ProcessGroup, kind: str, options: dict[str, Any]) -> str:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    odd = rank == 1
    given: dict[str, Any] = arguments()
    given["weight"] = given["weight"].chunk(size)[rank]
    if kind == "fewer":
        given |= {name: given[name][: N - 3 * odd] for name in ("hidden", "targets")}
    elif kind == "none":
        given |= {name: given[name][: N * (not odd)] for name in ("hidden", "targets")}
    elif kind == "ignored" and odd:
        given["targets"] = given["targets"].index_fill(0, torch.tensor([2, 5]), -100)
    elif kind == "dim" and odd:
        given |= {name: given[name][:, :6].contiguous() for name in ("hidden", "weight")}
    elif kind == "dtype" and odd:
        given |= {name: given[name].double() for name in ("hidden", "weight")}
    elif kind == "statistics" and odd:
        given["label_smoothing"] = 0.1
    elif kind == "slices":
        rows = 4 - odd
        given |= {"hidden": given["hidden"][:rows], "targets": given["targets"][: rows * size]}
        given["sequence_parallel"] = True
    return loss_of(group, **given, **options)


SIZES = {
    "fewer": "tokens of hidden [40, 37, 40]",
    "none": "tokens of hidden [40, 0, 40]",
    "ignored": "tokens to compute (not ignored) [40, 38, 40]",
    "dim": "D of hidden [8, 6, 8]",
    "dtype": "bytes an element of hidden [4, 8, 4]",
    "statistics": "statistics (label_smoothing, stats) as bits [0, 1, 0]",
    "slices": "tokens of hidden [4, 3, 4]",
}


@pytest.mark.parametrize("mode", ["filtered", "in_forward"])
@pytest.mark.parametrize("kind", SIZES)
def test_ranks_of_other_sizes_learn_whose(kind: str, mode: str) -> None:
    for message in shared_pool().run(3, odd_one, kind, MODES[mode]):
        assert message.startswith("ValueError: every rank of the group must be called"), message
        assert SIZES[kind] in message, message


@pytest.mark.parametrize("kind", ["fewer", "slices"])
def test_ranks_of_other_sizes_learn_whose_with_the_kernels(kind: str) -> None:
    for message in shared_pool().run(3, odd_one, kind, MODES["triton"]):
        assert SIZES[kind] in message, message
