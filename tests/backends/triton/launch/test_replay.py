"""Later calls of a kind play a recording, with the bits of a call that prepares everything."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")

from cce_dist import (
    Filter,
    linear_cross_entropy,
    quantize_weight,
    token_logprobs,
)
from cce_dist.algorithm.saved import take_apart
from cce_dist.backends.triton.launch import replay
from cce_dist.backends.triton.launch.replay import forget_recordings
from cce_dist.options import GradientMode
from cce_dist.testing import TRITON_PLACES, Place, grid
from tests.backends.triton.launch.replay_cases import (
    COLUMNS,
    FILTER,
    PLAYED,
    TOKENS,
    WAYS,
    kinds,
    problem,
    recordings,
    require_same,
    run,
    unaligned,
)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, way=tuple(WAYS)))
def test_a_played_call_has_the_bits_of_a_prepared_one(place: Place, way: str) -> None:
    problems = problem(place), problem(place, seed=1)
    # The first call of a kind prepares everything; so does the second, which is recorded.
    prepared = [run(tensors, **WAYS[way]) for tensors in problems]
    assert len(recordings()) == PLAYED.get(way, 2)
    for tensors, expected in zip(problems, prepared, strict=True):
        require_same(run(tensors, **WAYS[way]), expected)
    assert len(recordings()) == PLAYED.get(way, 2)


@pytest.mark.parametrize("way", ["in_forward", "one pass", "kept"])
def test_a_gradient_has_memory_of_its_own(way: str) -> None:
    """What keeps or overwrites one gradient does not touch another, nor the workspace."""
    options: dict[str, Any] = {"gradient": "in_forward"}
    if way == "one pass":
        options["filter"] = Filter(keep=0)
    if way == "kept":
        options = {"gradient": "exact", "keep_logits": True}
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        # A number of tokens that is not round would have a gradient with rows behind its last one.
        tensors = [torch.randn(n, 16, generator=generator).requires_grad_() for n in (304, 700)]
        targets = torch.randint(700, (304,), generator=generator)
        loss = linear_cross_entropy(*tensors, targets, backend="triton", **options)  # pyright: ignore
        grads = torch.autograd.grad(loss, tensors)  # pyright: ignore[reportArgumentType]
        assert grads[0].untyped_storage().data_ptr() != grads[1].untyped_storage().data_ptr()
        assert all(grad.untyped_storage().nbytes() == grad.nbytes for grad in grads)


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


# FSDP frees a weight between the two. The gradients of in_forward are there by then.
def test_a_backward_of_in_forward_needs_no_weight() -> None:
    for _ in range(4):
        hidden, weight, targets = problem(TRITON_PLACES[0])
        leaves = hidden.requires_grad_(), weight.clone().requires_grad_()
        losses = [
            linear_cross_entropy(hidden, x, targets, backend="triton", **WAYS["in_forward"])
            for x in (weight.requires_grad_(), leaves[1])
        ]
        expected = torch.autograd.grad(losses[0], (hidden, weight))
        leaves[1].data.untyped_storage().resize_(0)
        grads = torch.autograd.grad(losses[1], leaves, retain_graph=True)
        require_same([*grads], [*expected])
        with pytest.raises(RuntimeError, match="weight must stay in memory"):
            torch.autograd.grad(losses[1], leaves)


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
