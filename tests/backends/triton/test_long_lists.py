"""Lists of most columns: the device computes all columns instead, into the same gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter
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
from cce_dist.backends.triton.backward.state import BackwardState, GradBuffers
from cce_dist.backends.triton.filter import marks
from cce_dist.backends.triton.filter.lists import Lists
from cce_dist.backends.triton.launch import replay
from cce_dist.ranks.hidden_sum import SumOverRanks

CLASSES = 700
KINDS = {"flat": "flat", "peaked": "peaked"}
# Of the filter.
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
    state: BackwardState,
    grads: GradBuffers,
    hidden: Tensor,
    chunk: Tensor,
    queue: Tensor,
    count: Tensor,
) -> Callable[[int], None]:
    """In the place of Hopper's kernel, the portable ones, which take no such count."""
    assert queue.tolist() == [0] * 8 and len(hidden) <= len(chunk)
    launch_all = None

    def launch(stage: int) -> None:
        nonlocal launch_all
        if count.item() < 0:
            return
        assert count.item() == state.count.item()
        packed = state.hidden[state.per_token.read_rows]
        assert torch.equal(hidden, packed)
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
    place: Place, kind: str, options: dict[str, Any], trainable: tuple[str, ...] = ALL
) -> Case:
    """300 tokens of a flat softmax, or a peaked one, of which a tenth is ignored."""
    dtype, made = torch.bfloat16 if place.compiles else torch.float32, generator()
    make = gaussian_inputs if kind == "flat" else zipf_inputs
    inputs = make(300, CLASSES, 24, generator=made, dtype=dtype)
    if kind == "flat":
        inputs = replace(inputs, weight=inputs.weight * 0.1)
    bias = 0.1 * torch.randn(CLASSES, generator=made).to(dtype)
    inputs = replace(inputs, bias=bias).ignoring(made, 0.1)
    # The rows of ignored tokens are not read.
    inputs.hidden[inputs.targets == -100] = float("nan")
    rule = Filter(keep=64 / CLASSES, **{name: options[name] for name in FIELDS if name in options})
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


pytestmark = pytest.mark.usefixtures("as_on_hopper")


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
    monkeypatch.setattr(marks, "keeps_flat", lambda *_: False)
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
    taken: list[Tensor] = []

    def start(self: Any, part: Tensor, *, finish: Callable[[], object]) -> Callable[[], Tensor]:
        finish()
        taken.append(part.to(case.inputs.hidden.dtype))
        return lambda: taken[0]

    monkeypatch.setattr(SumOverRanks, "is_local", False)
    monkeypatch.setattr(SumOverRanks, "start", start)
    found = run_case(None, case)
    assert len(taken) == 1
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_each_played_call_decides_anew(place: Place) -> None:
    kinds = ("flat", "peaked", "flat", "peaked")
    cases = {kind: case_of(place, kind, {}) for kind in kinds}
    fresh = {}
    for kind, case in cases.items():
        replay.forget_recordings()
        fresh[kind] = run_case(None, case)
    for kind in kinds:
        found = run_case(None, cases[kind])
        assert all(torch.equal(found[name], value) for name, value in fresh[kind].items())
