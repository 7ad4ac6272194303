"""Later calls of a kind play a recording, with the bits of a call that prepares everything."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from cce_dist import (
    Filter,
    LossOutput,
    linear_cross_entropy,
    linear_distillation,
    quantize_weight,
    token_logprobs,
)
from cce_dist.algorithm.saved import take_apart
from cce_dist.backends.triton.launch import replay
from cce_dist.backends.triton.launch.memory import ALIGNMENT, LARGE
from cce_dist.backends.triton.launch.recording import Recorder, Unrecordable
from cce_dist.backends.triton.launch.replay import Replayed, forget_recordings
from cce_dist.backends.triton.launch.steps import Recording
from cce_dist.core.phases import watched_by
from cce_dist.core.records import Packed
from cce_dist.options import GradientMode
from cce_dist.testing import TRITON_PLACES, Place, RankPool, grid

# A loss is a forward and a backward. Ways that are recorded by parts pick their tokens apart.
PLAYED = {"distillation": 3}
FILTER = Filter(keep=0.01)
# Two blocks of tokens, and three tiles of columns, neither of them whole.
TOKENS, COLUMNS = 140, 300
# Every kernel: those of each gradient, of screened logits, of statistics and of a bias.
WAYS: dict[str, dict[str, Any]] = {
    "filtered": {"filter": FILTER},
    "exact": {"gradient": "exact", "softcap": 5.0, "bias": True, "stats": ("lse", "correct")},
    "in_forward": {"gradient": "in_forward", "filter": FILTER, "label_smoothing": 0.1},
    # Two chunks of tokens. In fp32 torch multiplies, in fp16 kernels do.
    "three products": {
        **{"gradient": "in_forward", "filter": Filter(keep=0), "workspace_bytes": 2**18},
        **{"dtype": torch.float32, "stats": ("lse", "tail_mass"), "bias": True},
    },
    "three products, fp16": {
        **{"gradient": "in_forward", "filter": Filter(keep=0), "workspace_bytes": 2**17},
    },
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
    dtype = options.pop("dtype", tensors[0].dtype)
    hidden, weight = (x.detach().clone().to(dtype).requires_grad_() for x in tensors[:2])
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
    return [kind for kind in kinds() if isinstance(kind, Recording)]


def kinds() -> list[Any]:
    return [kind for function in replay._functions for kind in function.kinds.values()]


def require_same(first: list[Tensor], second: list[Tensor]) -> None:
    for left, right in zip(first, second, strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=tuple(WAYS)))
def test_a_played_call_has_the_bits_of_a_prepared_one(place: Place, way: str) -> None:
    problems = problem(place), problem(place, seed=1)
    # The first call of a kind prepares everything; so does the second, which is recorded.
    prepared = [run(tensors, **WAYS[way]) for tensors in problems]
    assert len(recordings()) == PLAYED.get(way, 2)
    for tensors, expected in zip(problems, prepared, strict=True):
        require_same(run(tensors, **WAYS[way]), expected)
    assert len(recordings()) == PLAYED.get(way, 2)


def vector(size: int, grad: bool = False) -> Callable[[torch.device], Tensor]:
    return lambda device: torch.linspace(0.5, 1.5, size, device=device).requires_grad_(grad)


# What the results take beside the kernels: a call is recorded whole with all of it.
REDUCTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum", "shift": 1},
    "none": {"reduction": "none", "shift": 1},
    "token_weight": {"token_weight": vector(TOKENS), "reduction": "none"},
    "grad of token_weight": {
        "token_weight": vector(TOKENS, grad=True),
        "label_smoothing": 0.1,
        "shift": 1,
    },
    "class_weight": {"class_weight": vector(COLUMNS), "z_loss": 1e-3},
    "bias": {"bias": vector(COLUMNS, grad=True), "gradient": "exact", "keep_logits": True},
    "stats": {
        "stats": ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2"),
        "reduction": "none",
    },
    "temperature": {"temperature": vector(TOKENS), "entropy": True},
    "grad of temperature": {"temperature": vector(TOKENS, grad=True)},
}


def results_of(place: Place, seed: int, **options: Any) -> list[Tensor]:
    """Returns the results of a call, and the gradients of all its inputs that need one."""
    options = {name: x(place.device) if callable(x) else x for name, x in options.items()}
    hidden, weight, targets = problem(place, seed)
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    leaves += [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    if "gradient" not in options:
        options["filter"] = FILTER
    function = token_logprobs if "temperature" in options else linear_cross_entropy
    output = function(hidden, weight, targets, backend="triton", **options)
    results = take_apart(output)[1]
    total = sum(
        (x * torch.linspace(1, 2, x.numel(), device=x.device).view(x.shape)).sum()
        for x in results
        if x.requires_grad
    )
    assert isinstance(total, Tensor)
    return [*(x.detach() for x in results), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=tuple(REDUCTIONS)))
def test_a_call_is_recorded_whole(place: Place, way: str) -> None:
    prepared = [results_of(place, seed, **REDUCTIONS[way]) for seed in range(2)]
    for seed in range(2):
        require_same(results_of(place, seed, **REDUCTIONS[way]), prepared[seed])
    assert len(recordings()) == 2


@pytest.mark.parametrize("change", ["requires_grad", "no_grad", "autocast", "buffer"])
def test_what_a_caller_may_change_is_another_kind(change: str) -> None:
    place = TRITON_PLACES[0]
    for _ in range(4):
        expected = run(problem(place), filter=FILTER)
    hidden, weight, targets = problem(place)
    options: dict[str, Any] = {"backend": "triton", "filter": FILTER}
    hidden.requires_grad_()
    if change == "requires_grad":
        loss = linear_cross_entropy(hidden, weight, targets, **options)
        (grad,) = torch.autograd.grad(loss, hidden)
        require_same([loss.detach(), grad], expected[:2])
    elif change == "no_grad":
        with torch.no_grad():
            loss = linear_cross_entropy(hidden, weight.requires_grad_(), targets, **options)
        assert not loss.requires_grad and torch.equal(loss, expected[0])
    elif change == "autocast":
        weight.requires_grad_()
        # Operators of a play must not be cast: those of a prepared call are not.
        with torch.autocast("cpu", torch.float16):
            loss = linear_cross_entropy(hidden, weight, targets, **options)
            loss.backward()
        assert hidden.grad is not None and torch.equal(hidden.grad, expected[1])
    else:
        into = torch.zeros(weight.shape)
        loss = linear_cross_entropy(
            hidden, weight.requires_grad_(), targets, grad_weight_into=into, **options
        )
        loss.backward()
        assert weight.grad is None and torch.equal(into.to(weight.dtype), expected[2])


def nested(value: Tensor) -> Tensor:
    return torch.nested.nested_tensor([value, value])


BAD: dict[str, Callable[[Tensor], Any]] = {
    "no tensor": lambda value: value.tolist(),
    "a module": lambda value: torch.nn.Linear(2, 2),
    "sparse": lambda value: value.to_sparse(),
    "nested": nested,
    "on the meta device": lambda value: value.to("meta"),
}
TENSORS = (
    *("hidden", "weight", "targets", "bias", "token_weight", "class_weight", "grad_weight_into"),
)


# The kind of a call is taken before its arguments are checked.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("bad", BAD)
def test_an_argument_without_a_kind_has_a_clear_error(name: str, bad: str) -> None:
    hidden, weight, targets = problem(TRITON_PLACES[0])
    arguments: dict[str, Any] = {
        **{"hidden": hidden.requires_grad_(), "weight": weight.requires_grad_()},
        **{"targets": targets, "bias": torch.zeros(COLUMNS), "token_weight": torch.ones(TOKENS)},
        **{"class_weight": torch.ones(COLUMNS), "grad_weight_into": torch.zeros(weight.shape)},
    }
    for _ in range(3):
        linear_cross_entropy(**arguments, backend="triton")
    arguments[name] = BAD[bad](arguments[name].detach())
    with pytest.raises(ValueError, match=name):
        linear_cross_entropy(**arguments, backend="triton")


def test_a_played_call_checks_the_weights_copy() -> None:
    hidden, weight, targets = problem(TRITON_PLACES[0])
    copy = quantize_weight(weight, backend="triton")
    options: dict[str, Any] = {"backend": "triton", "logits": "screened", "filter": FILTER}
    for _ in range(4):
        linear_cross_entropy(hidden, weight, targets, quantized_weight=copy, **options)
    assert recordings()
    with pytest.raises(ValueError, match="weight must be a dense tensor"):
        linear_cross_entropy(hidden, weight.to_sparse(), targets, quantized_weight=copy, **options)
    with pytest.raises(ValueError, match="of another tensor"):
        linear_cross_entropy(hidden, weight.clone(), targets, quantized_weight=copy, **options)
    weight.mul_(2)
    with pytest.raises(ValueError, match="of earlier values"):
        linear_cross_entropy(hidden, weight, targets, quantized_weight=copy, **options)


def test_a_played_call_checks_its_targets() -> None:
    hidden, weight, targets = problem(TRITON_PLACES[0])
    for _ in range(4):
        run((hidden, weight, targets), filter=FILTER)
    targets[3] = COLUMNS + 2
    with pytest.raises(ValueError, match=rf"targets must lie in .* to {COLUMNS + 2}"):
        run((hidden, weight, targets), filter=FILTER)
    assert recordings()


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_results_of_a_played_call_can_be_written(reduction: str) -> None:
    hidden, weight, targets = problem(TRITON_PLACES[0])
    grads = []
    for _ in range(4):
        leaf = hidden.clone().requires_grad_()
        loss = linear_cross_entropy(
            leaf, weight, targets, backend="triton", filter=FILTER, reduction=reduction
        )
        loss *= 2.0
        grads += torch.autograd.grad(loss.sum(), leaf)
    require_same(grads[1:], grads[:1] * 3)


# A checkpoint compares what its two forwards save, of which the first may be prepared.
@pytest.mark.parametrize("way", ["filtered", "screened", "exact", "in_forward"])
def test_the_forwards_of_a_checkpoint_save_alike(way: str) -> None:
    hidden, weight, targets = problem(TRITON_PLACES[0])
    options = {name: value for name, value in WAYS[way].items() if name not in ("bias", "stats")}
    grads = []
    for _ in range(4):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        function = partial(linear_cross_entropy, backend="triton", **options)
        loss = checkpoint(function, *leaves, targets, use_reentrant=False)
        assert isinstance(loss, Tensor)
        grads.append(torch.autograd.grad(loss, leaves))
    for each in grads[1:]:
        require_same([*each], [*grads[0]])
    assert recordings()


@pytest.mark.parametrize("way", ["filtered", "in_forward", "three products, fp16"])
def test_a_played_call_has_a_second_backward(way: str) -> None:
    for _ in range(4):
        hidden, weight, targets = problem(TRITON_PLACES[0])
        leaves = hidden.requires_grad_(), weight.requires_grad_()
        loss = linear_cross_entropy(*leaves, targets, backend="triton", **WAYS[way])
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        require_same([*torch.autograd.grad(loss, leaves)], [*first])
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, gradient=["filtered", "in_forward"]))
def test_a_played_call_adds_to_the_callers_buffer(place: Place, gradient: GradientMode) -> None:
    tensors = problem(place)
    sums = []
    for _ in range(4):
        hidden, weight = (x.clone().requires_grad_() for x in tensors[:2])
        into = torch.ones(weight.shape, device=weight.device)
        options: dict[str, Any] = {"gradient": gradient, "filter": FILTER, "backend": "triton"}
        linear_cross_entropy(
            hidden, weight, tensors[2], grad_weight_into=into, **options
        ).backward()
        sums.append(into)
    assert len(recordings()) == 2
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
    assert any(kind is replay._Kind.SEEN for kind in kinds())


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


class Phases:
    """A watcher that notes the phases."""

    def __init__(self) -> None:
        self.entered: set[str] = set()

    def enter(self, phase: str, begins: bool) -> None:
        self.entered.add(phase)

    def leave(self, phase: str, error: BaseException | None) -> None: ...


def on_a_rank(group: Any, place: Place, way: str, slices: bool) -> list[list[Tensor]]:
    hidden, weight, targets = problem(place)
    weight = weight.chunk(group.size())[group.rank()]
    if slices:
        hidden = hidden.chunk(group.size())[group.rank()]
    forget_recordings()
    results, phases = [], []
    for _ in range(4):
        seen = Phases()
        with watched_by(seen):
            results.append(
                run((hidden, weight, targets), group=group, sequence_parallel=slices, **WAYS[way])
            )
        phases.append(seen.entered)
    assert len(recordings()) == PLAYED.get(way, 2)
    # Whoever watches over ranks learns in which phase each of them waits.
    assert all({"merge", "reduce"} <= each for each in phases)
    forget_recordings()
    return results


@pytest.mark.parametrize(
    ("way", "slices"),
    [
        *(("filtered", True), ("screened", False), ("distillation", True)),
        *(("in_forward", False), ("three products", True)),
    ],
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
