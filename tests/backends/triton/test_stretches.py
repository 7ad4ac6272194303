"""Stretches of a recording, and the CUDA graphs that start them."""

from __future__ import annotations

import ctypes
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton

from cce_dist import linear_cross_entropy
from cce_dist.backends.triton.launch import graphs, replay, stretches
from cce_dist.backends.triton.launch.steps import (
    Allocation,
    Fork,
    Join,
    Launch,
    Operator,
    Place,
    Recording,
    Release,
    Step,
    Zero,
)
from cce_dist.backends.triton.launch.stretches import SLACK, Stretch, in_stretches

MIB = 2**20


def launch(*numbers: int, descriptors: tuple[int, ...] = (), side: int | None = None) -> Launch:
    places = [(at, place_of(number)) for at, number in enumerate(numbers)]
    behind = [(len(places) + at, object, {}, place_of(x)) for at, x in enumerate(descriptors)]
    values = [None] * (len(places) + len(behind))
    return Launch(None, None, (1, 1, 1), values, (), places, behind, side)


def place_of(number: int, offset: int = 0) -> Place:
    return Place(number, offset, (1,), (1,), torch.uint8)


def allocation(number: int) -> Allocation:
    return Allocation(number, (1,), (1,), torch.uint8)


def operator(*makes: int) -> Operator:
    return Operator(None, (), {}, list(enumerate(makes)), True, None)


def flat(steps: list[Step]) -> list[Step]:
    """Returns the steps in the order in which they run."""
    result: list[Step] = []
    for step in steps:
        if isinstance(step, Stretch):
            result += [*step.allocations, *step.work, Release(step.releases)]
        else:
            result.append(step)
    return result


def peak(steps: list[Step], num_bytes: list[int], inputs: int) -> int:
    live = most = sum(num_bytes[:inputs])
    for step in steps:
        live += stretches._change(step, num_bytes)
        most = max(most, live)
    return most


def test_launches_without_an_operator_between_them_are_one_stretch() -> None:
    steps = [allocation(1), launch(0, 1), Zero(place_of(1), None), launch(1), Release([1])]
    (stretch,) = in_stretches([*steps, launch(0)], [0, MIB], 1)
    assert isinstance(stretch, Stretch)
    assert stretch.allocations == [steps[0]]
    assert stretch.work[:3] == steps[1:4]
    assert stretch.releases == [1]


def test_an_operator_ends_a_stretch() -> None:
    steps = [*(launch(0) for _ in range(3)), operator(1), *(launch(1) for _ in range(3))]
    first, between, second = in_stretches(steps, [0, 8], 1)
    assert between is steps[3]
    for stretch in (first, second):
        assert isinstance(stretch, Stretch) and len(stretch.work) == 3


def test_few_launches_are_no_stretch() -> None:
    steps: list[Step] = [allocation(1), launch(1), launch(1), Release([1])]
    assert in_stretches(steps, [0, MIB], 1) == steps


def test_memory_that_is_freed_ends_a_stretch_where_its_room_is_needed() -> None:
    def around(number: int) -> list[Step]:
        return [allocation(number), *(launch(number) for _ in range(3)), Release([number])]

    large, small = [0, 8 * MIB, 8 * MIB], [0, SLACK // 2, SLACK // 2]
    assert len(in_stretches(around(1) + around(2), large, 1)) == 2
    assert len(in_stretches(around(1) + around(2), small, 1)) == 1


def test_a_fork_is_never_cut() -> None:
    """What a fork cannot join to a stretch runs step by step."""
    fork = [Fork(0, True), launch(0, side=0), operator(), launch(0), Join(0)]
    steps = [*(launch(0) for _ in range(3)), *fork, *(launch(0) for _ in range(3))]
    joined = in_stretches(steps, [0], 1)
    assert joined[1:-1] == fork
    alone = [step for step in fork if not isinstance(step, Operator)]
    assert len(in_stretches([*steps[:3], *alone, *steps[-3:]], [0], 1)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_stretches_keep_the_order_and_the_peak(seed: int) -> None:
    random.seed(seed)
    num_bytes = [random.choice([0, MIB // 8, 4 * MIB, 32 * MIB]) for _ in range(12)]
    inputs, live, waiting = 2, {0, 1}, list(range(2, 12))
    steps: list[Step] = []
    while waiting or len(steps) < 40:
        kind = random.random()
        if waiting and kind < 0.3:
            steps.append(allocation(waiting[0]))
            live.add(waiting.pop(0))
        elif kind < 0.4 and live - {0}:
            gone = random.choice(sorted(live - {0}))
            live.remove(gone)
            steps.append(Release([gone]))
        elif kind < 0.45:
            steps.append(operator())
        else:
            steps.append(launch(*random.sample(sorted(live), min(2, len(live)))))
    joined = in_stretches(steps, num_bytes, inputs)
    ran = flat(joined)
    work = [step for step in ran if isinstance(step, Launch | Operator)]
    assert work == [step for step in steps if isinstance(step, Launch | Operator)]
    assert peak(ran, num_bytes, inputs) <= peak(steps, num_bytes, inputs) + SLACK
    alive = set(range(inputs))
    for step in ran:
        if isinstance(step, Allocation):
            alive.add(step.number)
        elif isinstance(step, Release):
            alive -= set(step.numbers)
        elif isinstance(step, Launch):
            assert {number for number, _, _ in step.addresses()} <= alive


def play(*addresses: int, may_start_graphs: bool = True) -> Any:
    return SimpleNamespace(
        addresses=list(addresses),
        bases=[None] * len(addresses),
        may_start_graphs=may_start_graphs,
        ran=[],
    )


class Noted(SimpleNamespace):
    def run(self, play: Any) -> None:
        play.ran.append(self)


def test_steps_that_no_graph_can_start_run_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    def fail(work: Any, play: Any) -> Any:
        tries.append(play)
        raise graphs.Uncapturable("the driver has no such function")

    monkeypatch.setattr(stretches, "Graph", fail)
    work: list[Any] = [Noted(), Noted()]
    stretch = Stretch([], work, [0])
    with pytest.warns(RuntimeWarning, match="one by one.*no such function"):
        stretch.run(first := play(1))
    stretch.run(second := play(2))
    assert first.ran == second.ran == work
    assert len(tries) == 1


def test_a_call_that_must_not_be_replayed_makes_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    graph = SimpleNamespace(launch=launched.append)
    monkeypatch.setattr(stretches, "Graph", lambda work, play: graph)
    stretch = Stretch([], [Noted()], [])
    stretch.run(first := play(1, may_start_graphs=False))
    assert first.ran and stretch.graph is None
    stretch.run(second := play(1))
    stretch.run(third := play(1, may_start_graphs=False))
    assert launched == [second] and not second.ran and third.ran


def parameter(data: bytes) -> tuple[int, int, object]:
    memory = ctypes.create_string_buffer(data, len(data))
    return ctypes.addressof(memory), len(data), memory


def word(value: int) -> tuple[int, int, object]:
    return parameter(value.to_bytes(8, "little"))


def test_addresses_are_found_among_parameters_in_their_order() -> None:
    addresses = [2**40, 2**41]
    step = launch(0, 1, descriptors=(0,))
    values = [
        parameter(b"\1\0\0\0"), word(addresses[0]), word(7), word(addresses[1]),
        parameter(bytes(128)), word(0),
    ]  # fmt: skip
    words, descriptors = graphs._places(step, values, addresses)
    assert [(each.value, number) for each, number, _ in words] == [(2**40, 0), (2**41, 1)]
    assert [(each.value, number) for each, number, _ in descriptors] == [(values[4][0], 0)]
    words[0][0].value = 2**42
    assert ctypes.c_uint64.from_address(values[1][0]).value == 2**42


@pytest.mark.parametrize("change", ["another value", "missing", "another order"])
def test_an_address_that_is_not_among_the_parameters_is_refused(change: str) -> None:
    addresses = [2**40, 2**41]
    values = [word(addresses[0]), word(addresses[1])]
    if change == "another value":
        values[1] = word(3)
    elif change == "missing":
        del values[1]
    else:
        values.reverse()
    with pytest.raises(graphs.Uncapturable, match="not among"):
        graphs._places(launch(0, 1), values, addresses)


WAYS: dict[str, dict[str, Any]] = {
    "filtered": {},
    "softcap and statistics": {"softcap": 10.0, "stats": ("entropy", "correct")},
    "screened": {"logits": "screened"},
    "exact": {"gradient": "exact"},
}


class Loop:
    """Calls of one kind, each with memory of its own, and their results."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.options = options
        self.weight = 0.3 * torch.randn(3000, 128, device="cuda", dtype=torch.bfloat16)
        self.hidden = torch.randn(400, 128, device="cuda", dtype=torch.bfloat16)
        self.targets = torch.randint(0, 3000, (400,), device="cuda")
        self.kept: list[Any] = []

    def call(self, roll: int = 0) -> list[Tensor]:
        """Returns loss and gradients of inputs that depend on `roll`."""
        room = [torch.empty(random.randrange(1, MIB), device="cuda") for _ in range(3)]
        hidden = self.hidden.roll(roll, 0).requires_grad_()
        weight = self.weight.clone().requires_grad_()
        targets = self.targets.clone()
        self.kept.append((room, hidden, weight, targets))
        result: Any = linear_cross_entropy(
            hidden, weight, targets, backend="triton", **self.options
        )
        loss = result if isinstance(result, Tensor) else result.loss
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        return [loss.detach(), hidden.grad, weight.grad]

    def require_same(self, first: list[Tensor], second: list[Tensor]) -> None:
        for left, right in zip(first, second, strict=True):
            assert torch.equal(left, right)


def graphs_of_recordings() -> list[graphs.Graph]:
    kinds = [kind for function in replay._functions for kind in function.kinds.values()]
    steps = [step for kind in kinds if isinstance(kind, Recording) for step in kind.steps]
    return [step.graph for step in steps if isinstance(step, Stretch) and step.graph is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_a_graph_computes_with_the_addresses_of_each_call(way: str) -> None:
    loop = Loop(**WAYS[way])
    prepared = [loop.call(roll) for roll in range(2)]
    assert not graphs_of_recordings()
    # Memory of earlier calls stays, so that each call has other addresses.
    for roll in (0, 1, 1, 0, 1):
        loop.require_same(loop.call(roll), prepared[roll])
    assert len(graphs_of_recordings()) >= 2
    loop.kept.clear()
    for roll in (0, 1):
        loop.require_same(loop.call(roll), prepared[roll])


@pytest.mark.gpu
def test_other_streams_and_threads_start_the_same_graphs() -> None:
    loop = Loop()
    *_, prepared = (loop.call() for _ in range(4))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        on_stream = loop.call()
    stream.synchronize()
    loop.require_same(on_stream, prepared)
    results: list[list[Tensor]] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(5):
                results.append(loop.call())
            torch.cuda.current_stream().synchronize()

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(results) == 15
    for result in results:
        loop.require_same(result, prepared)


@pytest.mark.gpu
def test_a_hook_sees_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    *_, prepared = (loop.call() for _ in range(4))
    assert graphs_of_recordings()
    names = []
    hook: Any = triton.knobs.runtime.launch_enter_hook  # pyright: ignore[reportAttributeAccessIssue]
    if not hasattr(hook, "add"):
        pytest.skip("this Triton has no chain of hooks")
    hook.add(note := lambda metadata: names.append(metadata.get()["name"]))
    try:
        loop.require_same(loop.call(), prepared)
    finally:
        hook.remove(note)
    assert {"pack_kernel", "store_hidden_kernel"} <= set(names)


@pytest.mark.gpu
def test_a_driver_that_captures_nothing_costs_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop()
    *_, prepared = (loop.call() for _ in range(2))

    def missing(name: str) -> Any:
        raise graphs.Uncapturable(f"the driver has no {name}")

    monkeypatch.setattr(graphs, "_function", missing)
    with pytest.warns(RuntimeWarning, match="one by one"):
        loop.require_same(loop.call(), prepared)
    loop.require_same(loop.call(), prepared)
    assert not graphs_of_recordings()


@pytest.mark.gpu
def test_a_graph_is_forgotten_with_its_recording() -> None:
    loop = Loop()
    for _ in range(4):
        loop.call()
    assert graphs_of_recordings()
    torch.cuda.synchronize()
    replay.forget_recordings()
    assert not graphs_of_recordings()
    prepared = loop.call()
    loop.require_same(loop.call(), prepared)
