"""Similar tokens stand side by side in the Triton backend, and nobody outside of it can tell."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cce_dist import Filter
from cce_dist.core.types import Tokens
from cce_dist.testing import (
    TRITON_PLACES,
    Case,
    Inputs,
    Place,
    dense_outputs,
    golden_outputs,
    grid,
    run_case,
)
from tests.support.loss_cases import generator

CLUSTERS, TOKENS, CLASSES, DIM = 4, 512, 640, 32


def clustered(place: Place, *, interleaved: bool) -> Inputs:
    """Each cluster of tokens wants columns of its own; neighbours are of different clusters."""
    centres = 3 * torch.randn(CLUSTERS, DIM, generator=generator())
    of_token = torch.arange(TOKENS) % CLUSTERS
    order = torch.arange(TOKENS) if interleaved else of_token.argsort(stable=True)
    noise = torch.randn(TOKENS, DIM, generator=generator())
    hidden = (centres[of_token] + 0.3 * noise)[order]
    weight = torch.randn(CLASSES, DIM, generator=generator())
    weight += 0.5 * centres[torch.arange(CLASSES) % CLUSTERS]
    targets = torch.randint(0, CLASSES, (TOKENS,), generator=generator())[order]
    dtype = place.widest
    return Inputs(hidden.to(dtype), weight.to(dtype), targets)


def order_of(hidden: Tensor, rows: Tensor | None, count: int | None, place: Place) -> Tensor:
    from cce_dist.backends.triton.tokens.order import similar_order

    device = place.device
    number = len(hidden) if rows is None else len(rows)
    tokens = Tokens(
        hidden.to(device),
        None if rows is None else rows.to(device),
        torch.zeros(number, dtype=torch.int64, device=device),
        None if count is None else torch.tensor([count], dtype=torch.int32, device=device),
    )
    return similar_order(tokens).cpu()


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, strided=(False, True)))
def test_similar_order_puts_clusters_side_by_side(place: Place, strided: bool) -> None:
    hidden = clustered(place, interleaved=True).hidden
    if strided:
        hidden = hidden.T.contiguous().T
    order = order_of(hidden, None, None, place)
    assert torch.equal(order.sort().values, torch.arange(TOKENS))
    changes = int(((order % CLUSTERS).diff() != 0).sum())
    # Interleaved it changes at every token. A cluster's centres need not be neighbours in line.
    assert changes < 3 * CLUSTERS, f"the cluster changes {changes} times along the order"


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, count=(0, 1, 130, 300)))
def test_similar_order_leaves_what_does_not_count_at_the_end(place: Place, count: int) -> None:
    hidden = clustered(place, interleaved=True).hidden
    # Rows that don't count hold anything.
    rows = torch.randperm(TOKENS, generator=generator())[:300]
    hidden[rows[count:]] = float("nan")
    order = order_of(hidden, rows, count, place)
    assert torch.equal(order[:count].sort().values, torch.arange(count))
    assert torch.equal(order[count:], torch.arange(count, 300))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, value=("nan", "inf", "zero")))
def test_similar_order_of_any_hidden_state_is_a_permutation(place: Place, value: str) -> None:
    hidden = clustered(place, interleaved=True).hidden
    if value == "zero":
        hidden.zero_()
    else:
        hidden[::7] = float(value)
    order = order_of(hidden, None, None, place)
    assert torch.equal(order.sort().values, torch.arange(TOKENS))


def tokens_of(place: Place, size: int, hidden: str, share: float, rows: bool, ids: str) -> Tokens:
    """That share of them count; targets by which each is known."""
    made, spare = generator(), 50 if rows else 0
    states = torch.randn(size + spare, DIM, generator=made)
    if hidden == "clustered":
        states = 0.1 * states + states[torch.arange(size + spare) % CLUSTERS]
    elif hidden == "constant":
        states[:] = 1.0
    elif hidden == "nan":
        states[::3] = float("nan")
    targets = torch.randperm(size, generator=made).to(getattr(torch, ids))
    return Tokens(
        states.to(place.device),
        torch.randperm(size + spare, generator=made)[:size].to(place.device) if rows else None,
        targets.to(place.device),
        torch.tensor([round(share * size)], dtype=torch.int32, device=place.device),
    )


@pytest.mark.parametrize(
    **grid(
        places=TRITON_PLACES,
        # One token, a kernel's block and its neighbours, and more parts than are summed at a time.
        size=(1, 127, 128, 129, 1000, 5000),
        hidden=("random", "clustered", "constant", "nan"),
        share=(0.0, 0.4, 1.0),
        rows=(False, True),
        ids=("int32", "int64"),
    )
)
def test_in_similar_order_sorts_by_key(
    place: Place, size: int, hidden: str, share: float, rows: bool, ids: str
) -> None:
    from cce_dist.backends.triton.launch.arguments import rows_of
    from cce_dist.backends.triton.tokens.order import in_similar_order, similar_keys

    tokens = tokens_of(place, size, hidden, share, rows, ids)
    key, _ = similar_keys(tokens.hidden, *rows_of(tokens))
    wanted = key.sort(stable=True).indices
    found, order = in_similar_order(tokens)
    assert order.dtype == torch.int64
    assert torch.equal(order, wanted)
    same_tokens(found, tokens.reordered(wanted))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, rows=(False, True)))
def test_in_similar_order_of_many_tokens_is_the_same(
    place: Place, rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that torch sorts, because there are too many to count."""
    from cce_dist.backends.triton.tokens import order as tokens_order

    tokens = tokens_of(place, 700, "clustered", 0.9, rows, "int32")
    counted, order = tokens_order.in_similar_order(tokens)
    monkeypatch.setattr(tokens_order, "MOST_COUNTED", 699)
    monkeypatch.delattr(tokens_order, "order_kernel")
    found, order_of_many = tokens_order.in_similar_order(tokens)
    assert torch.equal(order_of_many, order)
    same_tokens(found, counted)


@pytest.mark.interpreter
def test_in_similar_order_in_a_devices_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the interpreter are others: here a program sums two lots of tallies."""
    from cce_dist.backends.triton.tokens import order as tokens_order

    place = next(place for place in TRITON_PLACES if place.interprets)
    tokens = tokens_of(place, 4200, "clustered", 0.99, True, "int32")
    counted, order = tokens_order.in_similar_order(tokens)
    monkeypatch.setattr(tokens_order, "interpreted", lambda: False)
    found, found_order = tokens_order.in_similar_order(tokens)
    assert torch.equal(found_order, order)
    same_tokens(found, counted)


def same_tokens(found: Tokens, wanted: Tokens) -> None:
    assert found.hidden is wanted.hidden
    assert found.count is wanted.count
    assert found.rows is not None and wanted.rows is not None
    for a, b in ((found.rows, wanted.rows), (found.local_targets, wanted.local_targets)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_filtered_drops_as_much_whatever_the_order_of_tokens(place: Place) -> None:
    found = {}
    for interleaved in (True, False):
        inputs = clustered(place, interleaved=interleaved)
        case = Case(inputs, {"filter": Filter(keep=0.1, draw=False), "stats": ("tail_mass",)})
        case = case.at(place)
        outputs, golden = run_case(None, case), golden_outputs(case)
        errors = [
            float((outputs[name] - golden[name]).norm() / golden[name].norm())
            for name in ("grad_hidden", "grad_weight")
        ]
        found[interleaved] = float(outputs["tail_mass"].mean()), *errors
    for mixed, sorted_ in zip(found[True], found[False], strict=True):
        assert mixed == pytest.approx(sorted_, rel=0.25)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, gradient=("filtered", "in_forward")))
def test_outputs_are_in_the_callers_order(place: Place, gradient: str) -> None:
    """Every statistic and per-token gradient, of tokens some of which are ignored."""
    inputs = clustered(place, interleaved=True).ignoring(generator(), 0.3)
    options = {"gradient": gradient, "filter": Filter(keep=0.02), "stats": ("lse", "correct")}
    case = Case(replace(inputs), options).at(place)
    outputs, golden = run_case(None, case), golden_outputs(case)
    dense = dense_outputs(case)
    torch.testing.assert_close(outputs["lse"].double(), golden["lse"], rtol=1e-2, atol=1e-2)
    assert torch.equal(outputs["correct"], dense["correct"])
    error = (outputs["grad_hidden"] - golden["grad_hidden"]).double().norm(dim=-1)
    size = golden["grad_hidden"].norm(dim=-1)
    # A gradient at another token's place would be off by more than its own length.
    assert bool((error <= 0.3 * size + 1e-6).all())
    assert bool((outputs["grad_hidden"][inputs.targets < 0] == 0).all())
