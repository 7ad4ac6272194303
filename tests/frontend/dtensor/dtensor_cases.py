"""DTensors on a mesh, and the loss of the same tensors on one rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from cce_dist import linear_cross_entropy

BATCH, LENGTH, DIM = 8, 12, 16


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))


def place(tensor: Tensor, mesh: DeviceMesh, placement: Any) -> Tensor:
    """Every rank has the whole tensor: nothing needs to be sent."""
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def made(num_classes: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    targets = torch.randint(num_classes, (BATCH, LENGTH), generator=generator)
    targets[torch.rand(BATCH, LENGTH, generator=generator) < 0.2] = -100
    return {
        "hidden": randn(BATCH, LENGTH, DIM),
        "weight": randn(num_classes, DIM),
        "targets": targets,
        "bias": randn(num_classes),
        "token_weight": randn(BATCH, LENGTH).abs(),
        "class_weight": randn(num_classes).abs(),
    }


LEAVES = ("hidden", "weight", "bias", "token_weight")
OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "mean": ((), {}),
    "everything": (
        ("bias", "token_weight", "class_weight"),
        {"shift": 2, "reduction": "none", "label_smoothing": 0.1, "stats": ("lse", "correct")},
    ),
    "in_forward": (("bias",), {"gradient": "in_forward", "shift": 1}),
}


def loss_of(tensors: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Tensor]:
    """The result, and a scalar that weighs what is in it."""
    result = linear_cross_entropy(**tensors, backend="torch", **{"gradient": "exact", **options})
    if isinstance(result, Tensor):
        return result, result
    assert result.lse is not None
    return result, result.loss.sum() + (result.lse * result.loss).sum()


def on_one_rank(num_classes: int, option: str) -> dict[str, Tensor]:
    names, options = OPTIONS[option]
    given = made(num_classes)
    tensors = {name: given[name] for name in ("hidden", "weight", "targets", *names)}
    leaves = [name for name in LEAVES if name in tensors and name != "token_weight"]
    for name in leaves:
        tensors[name].requires_grad_()
    result, scalar = loss_of(tensors, options)
    scalar.backward()
    loss = result if isinstance(result, Tensor) else result.loss
    out = {"loss": loss.detach(), **{f"grad_{name}": tensors[name].grad for name in leaves}}
    if not isinstance(result, Tensor):
        out |= {"lse": result.lse.detach(), "correct": result.correct}
    return out  # pyright: ignore[reportReturnType]
