"""Functions of tensors are recorded: their memory, their operators, and what cannot be repeated."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from cce_dist.algorithm.saved import take_apart
from cce_dist.backends.triton.launch import replay
from cce_dist.backends.triton.launch.memory import ALIGNMENT, LARGE
from cce_dist.backends.triton.launch.recording import Recorder, Unrecordable
from cce_dist.backends.triton.launch.replay import Replayed
from cce_dist.backends.triton.launch.steps import Recording
from cce_dist.core.records import Packed
from cce_dist.testing import TRITON_PLACES
from tests.backends.triton.launch.replay_cases import (
    FILTER,
    problem,
    recordings,
    require_same,
    run,
)


def test_a_played_calls_results_are_no_views() -> None:
    function = Replayed(lambda x: (torch.empty(3, 4).copy_(x), torch.empty_strided((3, 4), (1, 3))))
    for _ in range(4):
        matrix, transposed = function(torch.ones(3, 4))
    assert isinstance(next(iter(function.kinds.values())), Recording)
    assert matrix._base is None and torch.equal(matrix, torch.ones(3, 4))
    assert transposed.stride() == (1, 3)


# Small memories, two places in one, one that is a result as well, a large one, an argument.
def packing(x: Tensor) -> tuple[Tensor, Packed]:
    both, alone = (torch.empty(2, *x.shape).copy_(x), torch.empty_like(x).copy_(2 * x))
    large = torch.empty(LARGE, dtype=x.dtype).fill_(2.0)
    return alone, Packed((both[1], x, torch.empty(3).fill_(7.0), alone, both, large))


def test_what_a_call_saves_lies_in_one_allocation() -> None:
    function = Replayed(packing)
    for seed in range(4):
        x = torch.full((5, 4), float(seed))
        alone, packed = function(x)
        expected_alone, expected = packing(x)
        require_same([alone, *packed.unpacked()], [expected_alone, *expected.unpacked()])
        if seed:
            # As the recording's plays, so does the call that is recorded.
            memory, first, second, third = packed.tensors
            assert memory.dtype == torch.uint8 and memory.nbytes == 2 * ALIGNMENT
            assert first is x and second.data_ptr() == alone.data_ptr() and len(third) == LARGE
    assert isinstance(next(iter(function.kinds.values())), Recording)


@dataclass
class Handed:
    """Memory for one reader, as a forward leaves some to its backward."""

    first: Tensor
    second: Tensor
    large: Tensor
    result: Tensor


def handing(x: Tensor) -> tuple[Tensor, Handed]:
    first, second, result = x + 1, torch.empty_like(x).copy_(2 * x), torch.empty_like(x).copy_(x)
    first = torch.empty_like(x).copy_(first)
    return result, Handed(first, second, torch.empty(LARGE).fill_(3.0), result)


def test_what_a_call_hands_on_lies_in_one_allocation() -> None:
    function = Replayed(handing)
    for seed in range(4):
        x = torch.full((5, 4), float(seed))
        result, handed = function(x)
        expected, like = handing(x)
        require_same([result, *take_apart(handed)[1]], [expected, *take_apart(like)[1]])
    assert isinstance(next(iter(function.kinds.values())), Recording)
    apart = handed.second.data_ptr() - handed.first.data_ptr()
    assert apart == ALIGNMENT and handed.first.untyped_storage().nbytes() == 2 * ALIGNMENT
    # Nothing else lives as long as a caller's result does.
    assert result.untyped_storage().nbytes() == result.nbytes and result._base is None


# A process of its own: others have imported the compiler.
def test_a_recording_imports_no_compiler() -> None:
    code = """
import sys, torch
from cce_dist.backends.triton.launch.replay import Replayed
function = Replayed(lambda x: torch.empty_like(x).copy_(x) + 1)
for _ in range(3):
    function(torch.zeros(2))
assert function.kinds and "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_kinds_are_few() -> None:
    function = Replayed(lambda x: x + 1)
    for size in range(1, replay.MOST_KINDS + 10):
        function(torch.zeros(size))
    assert len(function.kinds) == replay.MOST_KINDS


# Small and large memories, zeros, views, results of operators, and writes to an input.
def mixed(x: Tensor, into: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    zeros = x.new_zeros(x.shape)
    large = torch.empty(LARGE, dtype=x.dtype).fill_(2.0)
    rows = torch.empty_like(x)
    rows[1:].copy_(x[:-1])
    rows[0].copy_(zeros[0])
    total = (rows + large[: x.shape[1]]).cumsum(0)
    order = torch.sort(total, dim=0, stable=True).indices
    into.add_(total)
    half = torch.empty(2, *x.shape).copy_(torch.stack([x, total]))
    return half[1], order, zeros.add_(x)


def test_memory_of_a_recording_is_apart_while_in_use() -> None:
    function = Replayed(mixed)
    for seed in range(5):
        torch.manual_seed(seed)
        x, into = torch.randn(6, 4), torch.randn(6, 4)
        expected_into = into.clone()
        expected = mixed(x, expected_into)
        require_same([*function(x, into), into], [*expected, expected_into])
    assert isinstance(next(iter(function.kinds.values())), Recording)


KEPT = torch.ones(3)
UNRECORDABLE: dict[str, Callable[[Tensor], object]] = {
    "the host waits": lambda x: x.sum().item(),
    "a shape depends on values": lambda x: x.nonzero(),
    "a tensor of an earlier call": lambda x: x + KEPT,
    "memory elsewhere": lambda x: x + len(torch.empty(2, device="meta")),
}


@pytest.mark.parametrize("way", UNRECORDABLE)
def test_a_call_that_cannot_be_repeated_is_never_played(way: str) -> None:
    function = Replayed(UNRECORDABLE[way])
    for value in (0.0, 1.0, 2.0, 3.0):
        x = torch.tensor([value, 0.0, 1.0])
        torch.testing.assert_close(function(x), UNRECORDABLE[way](x))
    assert list(function.kinds.values()) == [replay._Kind.UNRECORDABLE]


def test_inputs_that_overlap_in_part_are_not_recorded() -> None:
    memory = torch.zeros(10)
    recorder = Recorder([memory[:6], memory[4:]])
    with pytest.raises(Unrecordable, match="overlap in part"):
        recorder.finish(memory[:6])


def test_an_error_in_a_recorded_call_is_the_callers() -> None:
    def fail(x: Tensor) -> Tensor:
        if len(function.kinds) and x[0] > 0:
            raise RuntimeError("planted")
        return x + 1

    function = Replayed(fail)
    function(torch.zeros(2))
    with pytest.raises(RuntimeError, match="planted"):
        function(torch.ones(2))
    assert torch.equal(function(torch.zeros(2)), torch.ones(2))


def test_a_dispatch_mode_sees_every_operator() -> None:
    class Count(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            self.seen += 1
            return func(*args, **(kwargs or {}))

    tensors = problem(TRITON_PLACES[0])
    numbers = []
    for _ in range(3):
        with Count() as count:
            run(tensors, filter=FILTER)
        numbers.append(count.seen)
    assert len(set(numbers)) == 1
    assert not recordings()


def test_a_recording_keeps_no_tensor() -> None:
    tensors = problem(TRITON_PLACES[0])
    for _ in range(3):
        results = run(tensors, filter=FILTER)
    kept = [weakref.ref(x.untyped_storage()) for x in (*tensors, *results)]
    del tensors, results
    gc.collect()
    assert recordings() and all(ref() is None for ref in kept)
