"""Later calls of a kind play a recording, with the bits of a call that prepares everything."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from cce_dist import Filter, LossOutput, linear_cross_entropy, linear_distillation
from cce_dist.backends.triton import backend as triton_backend
from cce_dist.backends.triton.launch import replay
from cce_dist.backends.triton.launch.recording import LARGE, Recorder, Unrecordable
from cce_dist.backends.triton.launch.replay import Replayed, forget_recordings
from cce_dist.backends.triton.launch.steps import Recording
from cce_dist.testing import TRITON_PLACES, Place, RankPool, grid

FUNCTIONS = (
    triton_backend._pick,
    triton_backend._forward_and_store,
    triton_backend._forward_of_heads,
    triton_backend._backward,
)
# A call takes one of the forwards.
PLAYED = len(FUNCTIONS) - 1
FILTER = Filter(keep=0.01)
# Two blocks of tokens, and three tiles of columns, neither of them whole.
TOKENS, COLUMNS = 140, 300
# Every kernel: those of each gradient, of screened logits, of statistics and of a bias.
WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": FILTER},
    "exact": {"gradient": "exact", "softcap": 5.0, "bias": True, "stats": ("lse", "correct")},
    "in_forward": {"gradient": "in_forward", "filter": FILTER, "label_smoothing": 0.1},
    "screened": {"logits": "screened", "filter": FILTER, "stats": ("entropy", "correct")},
    "distillation": {"teacher": True, "filter": FILTER, "bias": True, "alpha": 0.2},
}


def problem(place: Place, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float16
    weight = 0.3 * torch.randn(COLUMNS, 48, generator=generator).to(dtype)
    hidden = torch.randn(TOKENS, 48, generator=generator).to(dtype)
    targets = torch.randint(0, COLUMNS, (TOKENS,), generator=generator)
    targets[::7] = -100
    return tuple(x.to(place.device) for x in (hidden, weight, targets))


def run(tensors: tuple[Tensor, Tensor, Tensor], **options: Any) -> list[Tensor]:
    hidden, weight = (x.detach().clone().requires_grad_() for x in tensors[:2])
    bias = None
    if options.pop("bias", False):
        bias = torch.linspace(-1, 1, len(weight), device=hidden.device)
    options |= {"backend": "triton", "bias": bias}
    if options.pop("teacher", False):
        teacher = (tensors[0].flip(0), tensors[1].flip(0))
        result: Any = linear_distillation(hidden, weight, *teacher, tensors[2], **options)
    else:
        result = linear_cross_entropy(hidden, weight, tensors[2], **options)
    loss = result.loss if isinstance(result, LossOutput) else result
    loss.backward()
    results = result if isinstance(result, LossOutput) else [loss]
    values = [x.detach() for x in results if isinstance(x, Tensor)]
    assert hidden.grad is not None and weight.grad is not None
    return [*values, hidden.grad, weight.grad]


def recordings() -> list[Recording]:
    kinds = [kind for function in FUNCTIONS for kind in function.kinds.values()]
    return [kind for kind in kinds if isinstance(kind, Recording)]


def require_same(first: list[Tensor], second: list[Tensor]) -> None:
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=tuple(WAYS)))
def test_a_played_call_has_the_bits_of_a_prepared_one(place: Place, way: str) -> None:
    problems = problem(place), problem(place, seed=1)
    # The first call of a kind prepares everything; so does the second, which is recorded.
    prepared = [run(tensors, **WAYS[way]) for tensors in problems]
    assert len(recordings()) == PLAYED
    for tensors, expected in zip(problems, prepared, strict=True):
        require_same(run(tensors, **WAYS[way]), expected)
    assert len(recordings()) == PLAYED


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_a_played_call_adds_to_the_callers_buffer(place: Place) -> None:
    tensors = problem(place)
    sums = []
    for _ in range(4):
        hidden, weight = (x.clone().requires_grad_() for x in tensors[:2])
        into = torch.ones(weight.shape, device=weight.device)
        linear_cross_entropy(
            hidden, weight, tensors[2], backend="triton", filter=FILTER, grad_weight_into=into
        ).backward()
        sums.append(into)
    assert len(recordings()) == PLAYED
    require_same(sums[1:], sums[:1] * 3)


CHANGES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "fewer tokens": lambda hidden, weight, targets: (hidden[:-1], weight, targets[:-1]),
    "fewer columns": lambda hidden, weight, targets: (hidden, weight[:-1], targets.clamp_max(200)),
    "dtype": lambda hidden, weight, targets: (hidden.float(), weight.float(), targets),
    "stride": lambda hidden, weight, targets: (hidden.T.contiguous().T, weight, targets),
    "alignment": lambda hidden, weight, targets: (unaligned(hidden), weight, targets),
}


def unaligned(tensor: Tensor) -> Tensor:
    memory = tensor.new_empty(tensor.numel() + 1)
    return memory[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("change", CHANGES)
def test_another_layout_is_another_kind(change: str) -> None:
    place = TRITON_PLACES[0]
    tensors = problem(place)

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return linear_cross_entropy(hidden, weight, targets, backend="triton", filter=FILTER)

    changed = CHANGES[change](*tensors)
    expected = loss(*changed)
    forget_recordings()
    for _ in range(3):
        loss(*tensors)
    assert torch.equal(loss(*changed), expected)
    assert any(kind is replay._Kind.SEEN for kind in FUNCTIONS[1].kinds.values())


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


def test_a_played_calls_results_are_no_views() -> None:
    function = Replayed(lambda x: (torch.empty(3, 4).copy_(x), torch.empty_strided((3, 4), (1, 3))))
    for _ in range(4):
        matrix, transposed = function(torch.ones(3, 4))
    assert isinstance(next(iter(function.kinds.values())), Recording)
    assert matrix._base is None and torch.equal(matrix, torch.ones(3, 4))
    assert transposed.stride() == (1, 3)


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


def on_a_rank(group: Any, place: Place, way: str, slices: bool) -> list[list[Tensor]]:
    hidden, weight, targets = problem(place)
    weight = weight.chunk(group.size())[group.rank()]
    if slices:
        hidden = hidden.chunk(group.size())[group.rank()]
    forget_recordings()
    results = [
        run((hidden, weight, targets), group=group, sequence_parallel=slices, **WAYS[way])
        for _ in range(4)
    ]
    assert len(recordings()) == PLAYED
    forget_recordings()
    return results


@pytest.mark.parametrize(
    ("way", "slices"), [("filtered", True), ("screened", False), ("distillation", True)]
)
def test_ranks_play_their_collectives(pools: dict[int, RankPool], way: str, slices: bool) -> None:
    for results in pools[2].run(2, on_a_rank, TRITON_PLACES[0], way, slices):
        for result in results[1:]:
            require_same(result, results[0])


@pytest.mark.gpu
def test_a_graph_captures_a_played_call() -> None:
    place = next(place for place in TRITON_PLACES if place.device == "cuda")
    tensors = problem(place)
    hidden, weight = (x.requires_grad_() for x in tensors[:2])

    def step() -> list[Tensor]:
        hidden.grad = weight.grad = None
        loss = linear_cross_entropy(hidden, weight, tensors[2], backend="triton", filter=FILTER)
        loss.backward()
        assert hidden.grad is not None and weight.grad is not None
        return [loss.detach(), hidden.grad, weight.grad]

    expected = [x.clone() for x in step()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    graph.replay()
    require_same(results, expected)


@pytest.mark.gpu
def test_a_played_call_takes_no_more_memory() -> None:
    hidden = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32000, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 32000, (2048,), device="cuda")
    peaks = []
    for _ in range(4):
        hidden.grad = weight.grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, targets).backward()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert max(peaks[2:]) <= peaks[0] + 2**20
