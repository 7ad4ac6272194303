"""Lists of most columns: the device computes all columns instead, into the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, linear_distillation
from cce_dist.testing import (
    TRITON_PLACES,
    Case,
    Place,
    gaussian_inputs,
    grid,
    run_case,
    zipf_inputs,
)
from tests.support.loss_cases import generator

pytest.importorskip("triton")

from cce_dist.backends.triton.backward import long_lists
from cce_dist.backends.triton.backward import state as backward_state
from cce_dist.backends.triton.backward.exact import products_of_every_column
from cce_dist.backends.triton.backward.hopper_exact import HopperMemory
from cce_dist.backends.triton.backward.state import BackwardState, GradBuffers
from cce_dist.backends.triton.filter.lists import Lists
from cce_dist.backends.triton.launch import replay
from cce_dist.ranks.hidden_sum import SumOverRanks

CLASSES = 700
KINDS = {"flat": "flat", "peaked": "peaked"}
# Options that are fields of `Filter`.
FIELDS = ("tail", "draw")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "smoothing": {"label_smoothing": 0.1},
    "entropy": {"stats": ("entropy",)},
    "no_tail": {"tail": False},
    "not_drawn": {"draw": False},
    "in_forward": {"gradient": "in_forward"},
}
ALL = ("hidden", "weight", "bias")
TRAINABLE = {
    "hidden": ("hidden",),
    "weight": ("weight",),
    "bias_alone": ("hidden", "bias"),
}


def stand_in(
    state: BackwardState, grads: GradBuffers, memory: HopperMemory, left: int
) -> Callable[[int], None]:
    """Runs the portable kernels in place of Hopper's; they know no count of -1."""
    hidden, chunk, count = memory.hidden, memory.chunk, memory.count
    assert memory.queue.tolist() == [0] * 8
    assert len(hidden) <= len(chunk) and len(chunk) % 256 == 0
    assert chunk.shape[1] >= min(1024, -(-len(state.weight) // 256) * 256)
    launch_all = None

    def launch(stage: int) -> None:
        nonlocal launch_all
        if count.item() < 0:
            return
        assert count.item() == state.count.item()
        packed = state.hidden[state.per_token.read_rows]
        # The chunk's memory is not that of the hidden states.
        chunk.fill_(float("nan"))
        torch.testing.assert_close(hidden, packed, rtol=0, atol=0, equal_nan=True)
        if launch_all is None:
            sums = (None, None)
            if state.mean is not None:
                assert state.sums is not None and state.bias_sums is not None
                sums = state.sums[state.groups :], state.bias_sums[state.groups :]
            every = replace(state, kept=None, lists=None, sums=sums[0], bias_sums=sums[1])
            launch_all = products_of_every_column(every, grads)
        launch_all(stage)

    return launch


def decisions(patch: pytest.MonkeyPatch) -> list[Lists]:
    """All lists that are made from here on."""
    made: list[Lists] = []
    of = Lists.of

    def remembered(*args: Any, **named: Any) -> Lists:
        made.append(of(*args, **named))
        return made[-1]

    patch.setattr(Lists, "of", remembered)
    return made


def case_of(
    place: Place,
    kind: str,
    options: dict[str, Any],
    trainable: tuple[str, ...] = ALL,
    classes: int = CLASSES,
    dim: int = 24,
) -> Case:
    """300 tokens of a flat softmax, or a peaked one, of which a tenth is ignored."""
    dtype, made = torch.bfloat16 if place.compiles else torch.float32, generator()
    make = zipf_inputs if kind == "peaked" else gaussian_inputs
    inputs = make(300, classes, dim, generator=made, dtype=dtype)
    if kind != "peaked":
        inputs = replace(inputs, weight=inputs.weight * 0.1)
    bias = 0.1 * torch.randn(classes, generator=made).to(dtype)
    if kind == "partly_flat":
        # Of each of these columns a block has less mass than the threshold: no block keeps them.
        bias[512:] -= 1.5
    inputs = replace(inputs, bias=bias).ignoring(made, 0.1)
    if "label_smoothing" in options:
        inputs = inputs.with_options(made, "class_weight")
    # The rows of ignored tokens are not read.
    inputs.hidden[inputs.targets == -100] = float("nan")
    rule = Filter(keep=64 / classes, **{name: options[name] for name in FIELDS if name in options})
    others = {name: value for name, value in options.items() if name not in FIELDS}
    options = {"reduction": "sum", "filter": rule, **others}
    return Case(inputs, options, trainable=trainable).at(place)


def exactly(case: Case) -> Case:
    """The same with the gradients of every column."""
    options = {name: value for name, value in case.options.items() if name != "filter"}
    return replace(case, options={**options, "gradient": "exact"})


@pytest.fixture
def as_on_hopper(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    replay.forget_recordings()
    if place.compiles:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("needs Hopper")
        return

    def runs(*_: Any, has_hidden: bool, has_bias_alone: bool) -> bool:
        return not has_bias_alone

    monkeypatch.setattr(backward_state, "runs_on_hopper", runs)
    monkeypatch.setattr(long_lists, "products_on_hopper", stand_in)


# The stand-in reads hidden by its shape, and `Extension` passes a view of fewer rows.
pytestmark = pytest.mark.usefixtures("as_on_hopper", "unextended")


def close(place: Place, found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    most = 1e-3 if place.compiles else 1e-5
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm()
        assert error <= most * value.double().norm(), name


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, option=OPTIONS))
def test_long_lists_make_exact_gradients(
    place: Place, option: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = decisions(monkeypatch)
    case = case_of(place, "flat", option)
    found = run_case(None, case)
    assert made and made[-1].num_chunks.item() == -1
    expected = run_case(None, exactly(case))
    close(place, found, expected)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, trainable=TRAINABLE))
def test_each_gradient_alone(
    place: Place, trainable: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = decisions(monkeypatch)
    case = case_of(place, "flat", {}, trainable)
    found = run_case(None, case)
    # A bias's gradient without the weight's is summed by the portable kernels alone.
    assert made[-1].may_be_long == (trainable != TRAINABLE["bias_alone"])
    close(place, found, run_case(None, exactly(case)))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_short_lists_keep_their_bits(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decisions(monkeypatch)
    case = case_of(place, "peaked", {})
    found = run_case(None, case)
    assert made[-1].may_be_long and made[-1].num_chunks.item() > 0
    replay.forget_recordings()
    monkeypatch.setattr(backward_state, "runs_on_hopper", lambda *_, **named: False)
    expected = run_case(None, case)
    assert not made[-1].may_be_long
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_main_grad_is_added_to_once(place: Place) -> None:
    case = replace(case_of(place, "flat", {}, ("hidden", "weight")), main_grad=True)
    close(place, run_case(None, case), run_case(None, exactly(case)))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, kind=KINDS))
def test_hidden_is_done_before_the_rest(
    place: Place, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(place, kind, {})
    expected = run_case(None, case)
    in_two_stages(monkeypatch, case)
    found = run_case(None, case)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_each_played_call_decides_anew(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {kind: case_of(place, kind, {}) for kind in KINDS}
    fresh = {}
    if place.interprets:
        # A recording cannot repeat the reading of the count: here it is written.
        monkeypatch.setattr(long_lists, "products_on_hopper", shown)
        for kind, case in cases.items():
            counting = (case.inputs.targets != -100).sum() if kind == "flat" else -1
            fresh[kind] = {"grad_weight": torch.full((CLASSES, 24), float(counting))}
    else:
        for kind, case in cases.items():
            replay.forget_recordings()
            fresh[kind] = run_case(None, case)
    for kind in ("flat", "peaked", "flat", "peaked", "peaked", "flat"):
        found = run_case(None, cases[kind])
        assert all(torch.equal(found[name], value) for name, value in fresh[kind].items())


def shown(
    state: BackwardState, grads: GradBuffers, memory: HopperMemory, left: int
) -> Callable[[int], None]:
    """Writes the count of tokens to the weight's gradient."""
    return lambda stage: grads.weight.copy_(memory.count.expand_as(grads.weight))


def in_two_stages(patch: pytest.MonkeyPatch, case: Case) -> None:
    def start(self: Any, part: Tensor, *, finish: Callable[[], object]) -> Callable[[], Tensor]:
        finish()
        part = part.to(case.inputs.hidden.dtype)
        return lambda: part

    patch.setattr(SumOverRanks, "is_local", False)
    patch.setattr(SumOverRanks, "start", start)


# Columns that no block keeps: their tail is in the exact gradients, and is added nowhere.
@pytest.mark.parametrize(**grid(places=TRITON_PLACES, option=OPTIONS))
def test_long_lists_leave_out_columns(
    place: Place, option: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = decisions(monkeypatch)
    case = case_of(place, "partly_flat", option)
    found = run_case(None, case)
    lists = made[-1]
    assert lists.num_chunks.item() == -1
    assert lists.num_active.item() < lists.blocks.shape[0]
    close(place, found, run_case(None, exactly(case)))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_columns_left_out_are_added_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    case = replace(case_of(place, "partly_flat", {}), main_grad=True)
    expected = run_case(None, exactly(case))
    in_two_stages(monkeypatch, case)
    close(place, run_case(None, case), expected)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
@pytest.mark.parametrize("classes", [130, CLASSES])
def test_flat_lists_are_long_whatever_is_ignored(
    place: Place, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ragged tile has no columns beyond the last; ignored tokens have no blocks."""
    made = decisions(monkeypatch)
    case = case_of(place, "flat", {}, classes=classes)
    targets = case.inputs.targets.clone()
    targets[::2] = -100
    targets[200:] = -100
    case = replace(case, inputs=replace(case.inputs, targets=targets))
    found = run_case(None, case)
    assert made[-1].num_chunks.item() == -1
    close(place, found, run_case(None, exactly(case)))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_workspace_must_hold_a_chunk(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decisions(monkeypatch)
    for workspace_bytes in (2**16, None):
        run_case(None, case_of(place, "flat", {"workspace_bytes": workspace_bytes}))
    assert [lists.may_be_long for lists in made] == [False, True]
    # Rows of as many dims as there are columns.
    run_case(None, case_of(place, "flat", {}, dim=CLASSES))
    assert not made[-1].may_be_long


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_distillation_has_lists_of_any_length(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = decisions(monkeypatch)
    case = case_of(place, "flat", {})
    hidden = case.inputs.hidden.to(place.device).nan_to_num()
    weight = case.inputs.weight.to(place.device)
    linear_distillation(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        hidden.detach() + 1,
        weight.detach(),
        case.inputs.targets.to(place.device),
        backend="triton",
        filter=Filter(keep=0.01),
    ).backward()
    assert made and not any(lists.may_be_long for lists in made)
