"""A loss that is kept after its backward keeps vectors of tokens; and what hooks see of others."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from cce_dist import Filter, Screen, StepQuantizer, linear_cross_entropy, quantize_weight
from cce_dist.core.allocations import track_allocations
from cce_dist.pipeline.schedules.server import Waiting
from cce_dist.testing import (
    CPU_PLACES,
    TORCH_CPU,
    TORCH_CUDA,
    TRITON_CPU,
    TRITON_CUDA,
    Place,
    grid,
    shared_pool,
)
from tests.support.reachable import largest_storage, reachable_tensors

# Marks of this vocabulary, 6 KB, are more than the vectors of so many tokens.
TOKENS, CLASSES, DIM = 40, 768, 16
SIZES = (TOKENS, CLASSES)
# Of a token: each statistic, its target, its row.
BYTES_PER_TOKEN = 96
# "auto" keeps every column of so few.
SOME: dict[str, Any] = {"filter": Filter(keep=0.01)}
SCREENED: dict[str, Any] = {**SOME, "logits": "screened", "screen": Screen(max_kept=1.0)}
IN_FORWARD: dict[str, Any] = {**SOME, "gradient": "in_forward"}
EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments", "screened", "sum_p2")
MODES: dict[str, dict[str, Any]] = {
    "filtered": SOME,
    "eps": {"filter": Filter(eps=2**-10)},
    "stats": {**SOME, "stats": EVERY_STAT, "z_loss": 0.1, "label_smoothing": 0.1},
    "none": {**SOME, "reduction": "none", "class_weight": True},
    "exact": {"gradient": "exact", "class_weight": True},
    "in_forward": {**IN_FORWARD, "class_weight": True, "z_loss": 0.1},
    "screened": SCREENED,
    "screened_in_forward": {**SCREENED, **IN_FORWARD},
    "quantized": {**SCREENED, "quantized_weight": quantize_weight},
    "quantized_in_forward": {**SCREENED, **IN_FORWARD, "quantized_weight": quantize_weight},
    "quantizer": {**SCREENED, "quantized_weight": StepQuantizer},
    "main_grad": {**SOME, "grad_weight_into": True},
    "main_grad_in_forward": {**IN_FORWARD, "grad_weight_into": True},
}
KEEPING: dict[str, dict[str, Any]] = {
    "exact": {"gradient": "exact", "keep_logits": True},
    "exact_stats": {"gradient": "exact", "keep_logits": True, "stats": ("lse", "entropy")},
    "screened": {**SCREENED, "keep_logits": True},
    "screened_in_forward": {**SCREENED, **IN_FORWARD, "keep_logits": True},
}


def given_for(
    place: Place, options: dict[str, Any], group: Any = None, sizes: tuple[int, int] = SIZES
) -> dict[str, Any]:
    """The arguments of this rank's call; an option that is True is a tensor of that name."""
    generator = torch.Generator().manual_seed(0)
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    num_tokens, num_classes = sizes
    dtype = torch.float32
    if "logits" in options:
        dtype = torch.float16 if place.interprets else torch.bfloat16
    rows = slice(rank * num_classes // ranks, (rank + 1) * num_classes // ranks)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(place.device)

    targets = torch.randint(num_classes, (num_tokens,), generator=generator).to(place.device)
    given = {**options, **place.options, "targets": targets, "group": group}
    given["hidden"] = randn(num_tokens, DIM).to(dtype).requires_grad_()
    given["weight"] = (2 * randn(num_classes, DIM))[rows].to(dtype, copy=True).requires_grad_()
    if "class_weight" in options:
        given["class_weight"] = randn(num_classes).abs()
    if "grad_weight_into" in options:
        given["grad_weight_into"] = torch.zeros_like(given["weight"].detach().float())
    make = options.get("quantized_weight")
    if make is quantize_weight:
        how: Any = {"screen": options["screen"], **place.options}
        given["quantized_weight"] = quantize_weight(given["weight"], **how)
    elif make is not None:
        given["quantized_weight"] = make()
    return given


def loss_of(given: dict[str, Any]) -> Tensor:
    result = linear_cross_entropy(**given)
    return (result if isinstance(result, Tensor) else result.loss).sum()


def gradients(given: dict[str, Any]) -> list[Tensor | None]:
    found = [given["hidden"].grad, given["weight"].grad, given.get("grad_weight_into")]
    given["hidden"].grad = given["weight"].grad = None
    return found


def assert_keeps_vectors(loss: Tensor) -> None:
    for tensor in reachable_tensors(loss):
        size = tensor.untyped_storage().nbytes()
        assert size <= BYTES_PER_TOKEN * TOKENS, f"{list(tensor.shape)} {tensor.dtype}: {size}"


@pytest.mark.parametrize(**grid(places=CPU_PLACES, options=MODES))
def test_a_kept_loss_keeps_vectors_of_tokens(place: Place, options: dict[str, Any]) -> None:
    given = given_for(place, options)
    with track_allocations() as allocations:
        loss = loss_of(given)
        # What the walk is for: it finds the weight, which autograd saves until the backward.
        assert largest_storage(loss) >= 2 * CLASSES * DIM
        loss.backward()
        assert_keeps_vectors(loss)
        gradients(given)
        gc.collect()
        # Of memory that Triton's interpreter moves tensors into, nothing is seen.
        assert allocations.live_bytes <= BYTES_PER_TOKEN * TOKENS


@pytest.mark.parametrize(**grid(places=(TRITON_CPU,), options=KEEPING))
def test_a_kept_loss_keeps_no_logits(place: Place, options: dict[str, Any]) -> None:
    loss = loss_of(given_for(place, options))
    loss.backward()
    assert_keeps_vectors(loss)


@pytest.mark.parametrize(**grid(places=CPU_PLACES, options=MODES))
def test_second_backwards(place: Place, options: dict[str, Any]) -> None:
    """Over a retained graph the same gradients; then torch's own words."""
    given = given_for(place, options)
    loss, into = loss_of(given), given.get("grad_weight_into")
    loss.backward(retain_graph=True)
    first = gradients(given)
    if into is not None:
        first[2] = 2 * into
        assert bool(into.any())
    loss.backward()
    for one, other in zip(first, gradients(given), strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            # Twice what was added is not what was added twice; nor are logits kept in 16 bits.
            difference = (one.double() - other.double()).norm()
            assert difference <= torch.finfo(one.dtype).eps * one.double().norm()
    assert_keeps_vectors(loss)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


class NoGradient(torch.autograd.Function):
    """Of whatever it is applied to, autograd gets no gradient, not even zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:  # pyright: ignore[reportIncompatible]
        return None


@pytest.mark.parametrize(**grid(places=(TORCH_CPU,), options=MODES))
def test_a_backward_that_nothing_reaches_keeps_vectors(
    place: Place, options: dict[str, Any]
) -> None:
    loss: Any = loss_of(given_for(place, options))
    loss = NoGradient.apply(loss)
    loss.backward()
    assert_keeps_vectors(loss)


def test_a_kept_loss_of_many_classes() -> None:
    """A list of losses for logging; 4.28 MiB of column masses were kept with each."""
    num_tokens, num_classes = 4096, 32_768
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, 8, generator=generator).requires_grad_()
    weight = torch.randn(num_classes, 8, generator=generator).requires_grad_()
    targets = torch.randint(num_classes, (num_tokens,), generator=generator)
    with track_allocations() as allocations:
        loss = linear_cross_entropy(hidden, weight, targets, backend="torch")
        assert isinstance(loss, Tensor)
        loss.backward()
        hidden.grad = weight.grad = None
        gc.collect()
        assert allocations.live_bytes <= 16 * num_tokens


def kept_on(group: Any, options: dict[str, Any]) -> None:
    # As many columns on each of two ranks as one has in the other tests.
    loss = loss_of(given_for(TORCH_CPU, options, group, (TOKENS, 2 * CLASSES)))
    loss.backward()
    assert_keeps_vectors(loss)


RANKED = ("filtered", "stats", "exact", "in_forward", "screened", "main_grad")


@pytest.mark.parametrize("mode", RANKED)
def test_a_kept_loss_over_ranks(mode: str) -> None:
    shared_pool().run(2, kept_on, MODES[mode])


ALL = {**MODES, **{f"keep_logits_{name}": options for name, options in KEEPING.items()}}


@pytest.mark.parametrize(
    **grid(
        places=(TORCH_CUDA, TRITON_CUDA),
        name=tuple(ALL),
    )
)
def test_kept_losses_take_no_memory_of_a_gpu(place: Place, name: str) -> None:
    if name.startswith("keep_logits") and place.backend == "torch":
        pytest.skip("the torch backend keeps no logits")
    sizes = (2048, 16_384)
    given = given_for(place, ALL[name], sizes=sizes)

    def step() -> Tensor:
        loss = loss_of(given)
        loss.backward()
        gradients(given)
        return loss

    # What the first steps allocate once: kernels, a library's workspace.
    kept = [step() for _ in range(2)]
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    kept += [step() for _ in range(4)]
    gc.collect()
    torch.cuda.synchronize()
    taken = (torch.cuda.memory_allocated() - before) / 4
    assert len(kept) == 6 and taken <= BYTES_PER_TOKEN * sizes[0], f"{taken} bytes a loss"


def test_a_kept_loss_of_a_pipeline_keeps_no_server() -> None:
    class Server:
        """Keeps the head and the stages."""

        infers = False

        def grad(self, index: int) -> Tensor:
            return torch.ones(2, 3)

    server = Server()
    output = torch.zeros(2, 3, requires_grad=True)
    loss: Any = Waiting.apply(output, server, 4)
    loss.backward()
    gone = weakref.ref(server)
    del server
    assert gone() is None and output.grad is not None and bool(output.grad.all())
    with pytest.raises(RuntimeError, match="microbatch 4 was asked for twice"):
        loss.backward()


# -- hooks of saved tensors ---------------------------------------------------------------------


@pytest.mark.parametrize(**grid(places=CPU_PLACES, options=MODES))
def test_hooks_see_what_is_saved(place: Place, options: dict[str, Any]) -> None:
    """The marks of the columns too; and gradients are what they are without."""
    given = given_for(place, options)
    loss_of(given).backward()
    expected, seen = gradients(given), []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.shape)
        return tensor.clone()

    for hooks in (saved_tensors_hooks(pack, lambda tensor: tensor), save_on_cpu()):
        given = given_for(place, options)
        with hooks:
            loss = loss_of(given)
        loss.backward()
        for one, other in zip(expected, gradients(given), strict=True):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.equal(one, other)
    marks = [shape for shape in seen if CLASSES in shape and shape != (CLASSES, DIM)]
    filters = options.get("gradient", "filtered") == "filtered"
    assert bool(marks) == (filters or not {"class_weight", "quantized_weight"}.isdisjoint(options))
