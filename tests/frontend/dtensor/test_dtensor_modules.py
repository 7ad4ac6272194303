"""DTensors of modules: parallelize_module beside loss_parallel, FSDP2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from cce_dist import linear_cross_entropy
from cce_dist.testing import shared_pool
from tests.frontend.dtensor.dtensor_cases import BATCH, DIM, LENGTH, made, mesh_of, whole

# -- parallelize_module -------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, num_classes, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.embedding(ids))


def model_of(num_classes: int) -> Model:
    torch.manual_seed(0)
    return Model(num_classes).double()


def beside_loss_parallel(group: Any, sequence_parallel: bool) -> None:
    """The recipe of torch's own loss_parallel, and ours, on the same parallelized model."""
    mesh, targets = mesh_of(group), made(601)["targets"]
    ids = targets.clamp_min(0)
    results = []
    for ours in (False, True):
        model = model_of(601)
        plan: dict[str, Any] = {"head": ColwiseParallel(use_local_output=False)}
        if sequence_parallel:
            plan["embedding"] = RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
            )
            plan["norm"] = SequenceParallel()
            plan["head"] = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        parallelize_module(model, mesh, plan)
        hidden = model(ids)
        assert isinstance(hidden, DTensor) == sequence_parallel
        if ours:
            how = {} if sequence_parallel else {"group": mesh["tp"]}
            loss = linear_cross_entropy(hidden, model.head.weight, targets, gradient="exact", **how)
            loss.backward()
        else:
            with loss_parallel():
                logits = model.head(hidden)
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
                loss.backward()
        grads = {name: x.grad for name, x in model.named_parameters()}
        results.append({"loss": loss, **grads})
    torchs, ours_ = results
    for name, value in ours_.items():
        assert value is not None
        torch.testing.assert_close(whole(value), whole(torchs[name]), msg=name)
        if isinstance(torchs[name], DTensor) and sequence_parallel:
            assert value.placements == torchs[name].placements, name


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_parallelized_module_as_with_loss_parallel(sequence_parallel: bool) -> None:
    shared_pool().run(4, beside_loss_parallel, sequence_parallel)


# -- FSDP2 --------------------------------------------------------------------------------------


class Head(nn.Linear):
    """The loss where the weight is whole: in the forward of the module that holds it."""

    group: Any = None
    sequence_parallel = False

    def forward(self, hidden: Tensor, targets: Tensor) -> Any:  # pyright: ignore
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self.sequence_parallel:
            hidden = hidden.chunk(self.group.size())[self.group.get_local_rank()]
        how: dict[str, Any] = {"group": self.group, "sequence_parallel": self.sequence_parallel}
        return linear_cross_entropy(
            hidden, self.weight, targets, gradient="exact", reduction="sum", **how
        )


class LossModel(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_classes, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = Head(DIM, num_classes, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)), targets)


def under_fsdp(_: Any, tp: int, own_group: bool, sequence_parallel: bool) -> None:
    """Two steps of gradient accumulation, against the whole batch on one rank."""
    mesh = init_device_mesh("cpu", (4 // tp, tp), mesh_dim_names=("dp", "tp"))
    data = mesh["dp"]
    torch.manual_seed(0)
    model, reference = LossModel(601).double(), LossModel(601).double()
    reference.load_state_dict(model.state_dict())
    if tp > 1:
        parallelize_module(model.head, mesh["tp"], _split_rows())
        model.head.group = mesh["tp"]
        model.head.sequence_parallel = sequence_parallel
    if own_group:
        fully_shard(model.head, mesh=data)
    fully_shard(model, mesh=data)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        targets = torch.randint(601, (BATCH, LENGTH), generator=generator)
        ids = targets.roll(1, -1)
        mine = slice(data.get_local_rank(), BATCH, data.size())
        model.set_requires_gradient_sync(seed == 1)
        loss = model(ids[mine], targets[mine])
        assert type(loss) is Tensor
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=data.get_group())
        expected = reference(ids, targets)
        expected.backward()
        torch.testing.assert_close(total, expected.detach())
    for (name, got), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(got.grad, DTensor) and got.grad.placements == got.placements, name
        assert wanted.grad is not None
        grad = got.grad.full_tensor()
        if sequence_parallel and "head" not in name:
            # Of this rank's tokens: whoever splits them sums it.
            dist.all_reduce(grad, group=mesh["tp"].get_group())
        # FSDP averages over data-parallel ranks.
        torch.testing.assert_close(grad * data.size(), wanted.grad, msg=name)


def _split_rows() -> ColwiseParallel:
    # As it splits a Linear, but the module's own forward takes plain tensors.
    from torch.distributed.tensor.parallel import ParallelStyle

    class SplitRows(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
            assert isinstance(module, nn.Linear)
            placed = distribute_tensor(module.weight, device_mesh, [Shard(0)])
            module.weight = nn.Parameter(placed)
            return module

    return SplitRows()  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("own_group", [False, True], ids=["root_group", "own_group"])
@pytest.mark.parametrize(
    ("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)], ids=["dp", "tp", "sp"]
)
def test_fsdp(tp: int, sequence_parallel: bool, own_group: bool) -> None:
    shared_pool().run(4, under_fsdp, tp, own_group, sequence_parallel)
