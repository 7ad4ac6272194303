"""The hidden gradient is whole before the last of the weight's: ranks sum it meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter
from cce_dist.core import streams
from cce_dist.ranks.hidden_sum import SumOverRanks
from cce_dist.testing import TRITON_PLACES, Case, Place, grid, run_case, zipf_inputs

pytest.importorskip("triton")

from cce_dist.backends.triton import grads as triton_grads
from cce_dist.backends.triton.backward import state as backward_state
from cce_dist.backends.triton.backward.filtered import FilteredMemory
from cce_dist.backends.triton.backward.state import BackwardState
from cce_dist.backends.triton.launch.tiles import AFTER_HIDDEN

SMALL = {"workspace_bytes": 2**16}
ALL = ("hidden", "weight", "bias")
# Of one chunk, of several, of none where nothing is kept; and what the forward kept.
WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": Filter(keep=0.01)},
    "filtered_chunks": {"filter": Filter(keep=0.002), **SMALL},
    "nothing_kept": {"filter": Filter(keep=128, draw=False)},
    "exact": {"gradient": "exact"},
    "exact_chunks": {"gradient": "exact", **SMALL},
    "keep_logits": {"gradient": "exact", "keep_logits": True, **SMALL},
    "in_forward": {"gradient": "in_forward", "filter": Filter(keep=0.01)},
}
# Rows of the weight's gradient are added to, or not wanted.
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"options": way} for name, way in WAYS.items()},
    "main_grad": {"options": WAYS["filtered_chunks"], "main_grad": True},
    "frozen_head": {"options": WAYS["filtered_chunks"], "trainable": ("hidden",)},
    "bias_alone": {"options": WAYS["filtered_chunks"], "trainable": ("hidden", "bias")},
    "exact_main_grad": {"options": WAYS["exact_chunks"], "main_grad": True},
    "exact_bias_alone": {"options": WAYS["exact_chunks"], "trainable": ("hidden", "bias")},
}


@pytest.mark.usefixtures("unextended")
@pytest.mark.parametrize(**grid(places=TRITON_PLACES, kind=KINDS))
def test_hidden_is_done_before_the_rest(
    place: Place, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if place.compiles else torch.float32
    inputs = zipf_inputs(130, 700, 16, generator=generator, dtype=dtype)
    inputs = inputs.with_options(generator, "bias").ignoring(generator, 0.1)
    options = {**kind["options"], "reduction": "sum"}
    case = Case(inputs, **{"trainable": ALL, **kind, "options": options}).at(place)
    expected = run_case(None, case)
    taken: list[Tensor] = []

    def start(self: Any, part: Tensor, *, finish: Callable[[], object]) -> Callable[[], Tensor]:
        finish()
        assert part.dtype == torch.float32
        total = part.to(dtype)
        taken.append(total.cpu().clone())
        return lambda: total.mul_(2)

    monkeypatch.setattr(SumOverRanks, "is_local", False)
    monkeypatch.setattr(SumOverRanks, "start", start)
    found = run_case(None, case)
    assert len(taken) == 1
    assert torch.equal(taken[0].view_as(expected["grad_hidden"]), expected["grad_hidden"])
    for name, value in expected.items():
        wanted = 2 * value if name == "grad_hidden" else value
        assert torch.equal(found[name], wanted), name


@pytest.mark.usefixtures("unextended")
@pytest.mark.parametrize(**grid(places=TRITON_PLACES, kind=KINDS))
def test_few_tokens_are_summed_in_pieces(
    place: Place, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = zipf_inputs(130, 700, 16, generator=generator, dtype=torch.float32)
    inputs = inputs.with_options(generator, "bias").ignoring(generator, 0.1)
    options = {**kind["options"], "reduction": "sum"}
    if chunks := "workspace_bytes" in options:
        # Of which pieces may take a quarter.
        options["workspace_bytes"] = 2**17
    case = Case(inputs, **{"trainable": ALL, **kind, "options": options}).at(place)
    expected = run_case(None, case)
    sums: list[int] = []
    of = BackwardState.of

    def remember(*args: Any) -> BackwardState:
        state = of(*args)
        sums.append(state.pieces)
        return state

    # Two blocks, one slice of dims.
    monkeypatch.setattr(backward_state, "num_programs", lambda _: 10)
    monkeypatch.setattr(backward_state, "LEAST_OF_A_PIECE", 100)
    monkeypatch.setattr(BackwardState, "of", remember)
    found = run_case(None, case)
    # Logits that are kept have taken the room.
    assert set(sums) == {1 if "keep_logits" in options else 2 if chunks else 5}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_workspace_is_gone_before_the_hidden_gradient_is_stored(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which takes its memory, on one rank.
    workspaces: list[weakref.ref[Tensor]] = []
    of, finish = FilteredMemory.of, BackwardState.finish_hidden

    def remember(*args: Any) -> FilteredMemory:
        memory = of(*args)
        workspaces.append(weakref.ref(memory.workspace))
        return memory

    def look(self: BackwardState, *args: Any) -> Tensor:
        assert workspaces and not [ref for ref in workspaces if ref() is not None]
        return finish(self, *args)

    monkeypatch.setattr(FilteredMemory, "of", remember)
    monkeypatch.setattr(BackwardState, "finish_hidden", look)
    inputs = zipf_inputs(130, 700, 16, generator=torch.Generator().manual_seed(0))
    run_case(None, Case(inputs, WAYS["filtered"]).at(place))
    # On a GPU the first call of its kind compiles first.
    assert len(workspaces) in ((1, 2) if place.compiles else (1,))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, at=["lists", "after_hidden"]))
def test_what_runs_beside_is_waited_for_after_an_error(
    place: Place, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its memory would be another's while it still writes.
    started: list[torch.device] = []
    waited: list[torch.device] = []

    def start_on_side_stream(device: torch.device, run: Callable[[], object]) -> Callable[[], None]:
        started.append(device)
        wait = streams.start_on_side_stream(device, run)

        def note() -> None:
            waited.append(device)
            wait()

        return note

    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("no room for it")

    def launch(stage: int) -> None:
        if stage == AFTER_HIDDEN:
            fail()

    def start(self: Any, part: Tensor, *, finish: Callable[[], object]) -> Callable[[], Tensor]:
        wait = start_on_side_stream(part.device, finish)

        def total() -> Tensor:
            wait()
            return part

        return total

    monkeypatch.setattr(backward_state, "start_on_side_stream", start_on_side_stream)
    monkeypatch.setattr(SumOverRanks, "is_local", False)
    monkeypatch.setattr(SumOverRanks, "start", start)
    if at == "lists":
        monkeypatch.setattr(backward_state.Lists, "of", fail)
    else:
        monkeypatch.setattr(triton_grads, "products", lambda *_, **__: launch)
    inputs = zipf_inputs(130, 700, 16, generator=torch.Generator().manual_seed(0))
    with pytest.raises(MemoryError, match="no room"):
        run_case(None, Case(inputs, WAYS["filtered"]).at(place))
    assert started and len(started) == len(waited)
