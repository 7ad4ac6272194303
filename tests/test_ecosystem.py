"""What people train with, around the loss: autocast, checkpointing, DDP with no_sync, copies."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from cce_dist import (
    LinearCrossEntropy,
    linear_cross_entropy,
    linear_distillation,
    token_logprobs,
)
from cce_dist.testing import shared_pool

TOKENS, CLASSES, DIM = 96, 600, 16
MODES = ("filtered", "exact", "in_forward")


def randn(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def targets_of(seed: int, tokens: int = TOKENS) -> Tensor:
    return torch.randint(CLASSES, (tokens,), generator=torch.Generator().manual_seed(seed))


# -- autocast -----------------------------------------------------------------------------------


def under_autocast(group: Any, mode: str, sequence_parallel: bool) -> None:
    """Each result of fp32 leaves under autocast, against the same call of bf16 ones."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = slice(rank * CLASSES // size, (rank + 1) * CLASSES // size)
    tokens = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    fp32 = torch.float32
    hidden, weight = randn(0, TOKENS, DIM, dtype=fp32), randn(1, CLASSES, DIM, dtype=fp32)[rows]
    if sequence_parallel:
        hidden = hidden[tokens]
    got = []
    for casts in (True, False):
        leaves = [x.clone() if casts else x.bfloat16() for x in (hidden, weight)]
        for leaf in leaves:
            leaf.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = linear_cross_entropy(
                *leaves,
                targets_of(2),
                group=group,
                sequence_parallel=sequence_parallel,
                gradient=mode,  # pyright: ignore[reportArgumentType]
            )
            assert isinstance(loss, Tensor) and loss.dtype == fp32
            # A backward within the region must not cast its fp32 sums.
            loss.backward()
        assert all(leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in leaves)
        got.append((loss.detach(), *(leaf.grad.float() for leaf in leaves)))
    for with_casts, without in zip(*got, strict=True):
        assert torch.equal(with_casts, without)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_a_cast_of_the_inputs(mode: str, sequence_parallel: bool) -> None:
    shared_pool().run(2, under_autocast, mode, sequence_parallel)


@pytest.mark.parametrize(
    ("hidden", "weight", "message"),
    [
        pytest.param(torch.int64, torch.int64, "hidden must be bf16, .*int64", id="integers"),
        pytest.param(torch.float32, torch.float64, "weight must have .*float64", id="float64"),
        pytest.param(torch.float32, torch.complex64, "weight must be .*complex", id="complex"),
    ],
)
def test_autocast_casts_what_torch_casts(
    hidden: torch.dtype, weight: torch.dtype, message: str
) -> None:
    inputs = (torch.ones(8, DIM, dtype=hidden), torch.ones(50, DIM, dtype=weight))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=message),
    ):
        linear_cross_entropy(*inputs, targets_of(2, 8) % 50)


# -- activation checkpointing -------------------------------------------------------------------


def checkpointed(group: Any, mode: str, reentrant: bool, sequence_parallel: bool) -> None:
    """The loss in a checkpointed region: its collectives run again, on every rank alike."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = slice(rank * CLASSES // size, (rank + 1) * CLASSES // size)
    hidden = randn(0, TOKENS, DIM)
    if sequence_parallel:
        hidden = hidden.chunk(size)[rank]
    got = []
    for again in (False, True):
        hidden = hidden.detach().clone().requires_grad_()
        weight = randn(1, CLASSES, DIM)[rows].clone().requires_grad_()

        def head(hidden: Tensor, weight: Tensor) -> Any:
            return linear_cross_entropy(
                hidden.tanh(),
                weight,
                targets_of(2),
                group=group,
                sequence_parallel=sequence_parallel,
                gradient=mode,  # pyright: ignore[reportArgumentType]
            )

        run: Any = head
        loss = (
            checkpoint(run, hidden, weight, use_reentrant=reentrant)
            if again
            else run(hidden, weight)
        )
        loss.backward()
        got.append((loss.detach(), hidden.grad, weight.grad))
    for plain, recomputed in zip(*got, strict=True):
        assert torch.equal(plain, recomputed)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_activation_checkpointing(mode: str, reentrant: bool, sequence_parallel: bool) -> None:
    shared_pool().run(2, checkpointed, mode, reentrant, sequence_parallel)


# -- data parallel ------------------------------------------------------------------------------


class Model(nn.Module):
    """A trunk that every rank has, and some rows of a head."""

    def __init__(self, rows: slice, group: Any, sequence_parallel: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Linear(DIM, DIM).double()
        self.weight = nn.Parameter(randn(1, CLASSES, DIM)[rows].clone())
        self.group = group
        self.sequence_parallel = sequence_parallel
        with torch.no_grad():
            self.trunk.weight.copy_(randn(3, DIM, DIM) / 4)
            self.trunk.bias.zero_()

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        hidden = self.trunk(inputs)
        if self.sequence_parallel:
            hidden = hidden.chunk(self.group.size())[self.group.get_local_rank()]
        how: dict[str, Any] = {"group": self.group, "sequence_parallel": self.sequence_parallel}
        return linear_cross_entropy(
            hidden, self.weight, targets, gradient="exact", reduction="sum", **how
        )


def accumulated(_: Any, sequence_parallel: bool) -> None:
    """tp=2 x dp=2: three microbatches, of which the last one synchronises."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh["tp"], mesh["dp"]
    part, replica = tp.get_local_rank(), dp.get_local_rank()
    rows = slice(part * CLASSES // 2, (part + 1) * CLASSES // 2)
    part_of = Model(rows, tp, sequence_parallel)
    model = DistributedDataParallel(part_of, process_group=dp.get_group())
    whole = Model(slice(None), None)
    for step in range(3):
        last = step == 2
        with contextlib.nullcontext() if last else model.no_sync():
            seed = 10 + 2 * step + replica
            model(randn(seed, 40, DIM), targets_of(seed, 40)).backward()
        for seed in (10 + 2 * step, 11 + 2 * step):
            (whole(randn(seed, 40, DIM), targets_of(seed, 40)) / 2).backward()
    inner = model.module
    if sequence_parallel:
        # Of this rank's tokens: whoever splits them sums it.
        for trunk in inner.trunk.parameters():
            dist.all_reduce(trunk.grad, group=tp.get_group())
    pairs = [
        (inner.trunk.weight.grad, whole.trunk.weight.grad),
        (inner.trunk.bias.grad, whole.trunk.bias.grad),
        (inner.weight.grad, whole.weight.grad[rows]),  # pyright: ignore[reportOptionalSubscript]
    ]
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradient_accumulation_with_no_sync(sequence_parallel: bool) -> None:
    shared_pool().run(4, accumulated, sequence_parallel)


# -- second derivatives -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_a_second_derivative_is_refused(mode: Any) -> None:
    hidden, weight = randn(0, 8, DIM).requires_grad_(), randn(1, 50, DIM).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets_of(2, 8) % 50, gradient=mode)
    assert isinstance(loss, Tensor)
    first, other = torch.autograd.grad(loss, (hidden, weight), create_graph=True)
    # Of a constant the first two would be 0 in silence.
    for penalty in (loss + first.square().sum(), loss + other.square().sum(), first.sum()):
        with pytest.raises(RuntimeError, match="a loss of cce_dist is differentiable once"):
            torch.autograd.grad(penalty, hidden, retain_graph=True)


# name -> a function of hidden, weight and targets
RESULTS: dict[str, Callable[..., Any]] = {
    "loss": lambda x, w, t: linear_cross_entropy(x, w, t, reduction="none"),
    "distillation": lambda x, w, t: linear_distillation(
        x, w, x.detach(), w.detach() * 2, reduction="none"
    ),
    "candidates": lambda x, w, t: token_logprobs(x, w, t, candidates=t[:, None]).candidates,
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_batch_of_upstream_gradients_is_refused(name: str) -> None:
    hidden, weight = randn(0, 8, DIM).requires_grad_(), randn(1, 50, DIM)
    result = RESULTS[name](hidden, weight, targets_of(2, 8) % 50)
    upstream = torch.eye(8).view(8, *result.shape)
    with pytest.raises(RuntimeError, match="takes one upstream gradient at a time, got a batch"):
        torch.autograd.grad(result, hidden, upstream, is_grads_batched=True)


@pytest.mark.parametrize("name", RESULTS)
def test_create_graph_within_a_checkpoint(name: str) -> None:
    hidden, weight = randn(0, 8, DIM).requires_grad_(), randn(1, 50, DIM).requires_grad_()
    targets, leaves = targets_of(2, 8) % 50, (hidden, weight)
    expected = torch.autograd.grad(RESULTS[name](hidden, weight, targets).sum(), leaves)
    result = checkpoint(RESULTS[name], hidden, weight, targets, use_reentrant=False)
    assert isinstance(result, Tensor)
    grads = torch.autograd.grad(result.sum(), leaves, create_graph=True)
    for grad, right in zip(grads, expected, strict=True):
        assert torch.equal(grad, right)
    with pytest.raises(RuntimeError, match="a loss of cce_dist is differentiable once"):
        grads[1].sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_create_graph_leaves_the_first_derivative_as_it_is(mode: Any) -> None:
    hidden, weight = randn(0, 8, DIM).requires_grad_(), randn(1, 50, DIM).requires_grad_()
    loss = linear_cross_entropy(hidden, weight, targets_of(2, 8) % 50, gradient=mode)
    assert isinstance(loss, Tensor)
    expected = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    got = torch.autograd.grad(loss, (hidden, weight), create_graph=True)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


# -- copies ---------------------------------------------------------------------------------------


def copied(group: Any) -> None:
    """As torch.optim.swa_utils.AveragedModel copies a model."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = slice(rank * CLASSES // size, (rank + 1) * CLASSES // size)
    module = LinearCrossEntropy(group=group, z_loss=1e-3).eval()
    made = copy.deepcopy(nn.ModuleList([module, module]))
    assert made[0] is made[1] and made[0] is not module and not made[0].training
    given = (randn(0, TOKENS, DIM), randn(1, CLASSES, DIM)[rows], targets_of(2))
    assert torch.equal(made[0](*given), module(*given))


def test_a_models_copy_has_the_same_group() -> None:
    shared_pool().run(2, copied)
