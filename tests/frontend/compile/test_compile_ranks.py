"""Within torch.compile in processes of their own: a model, ranks of a group."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from cce_dist import VocabShard, linear_cross_entropy
from cce_dist.testing import CPU_PLACES, Place, grid, shared_pool
from tests.frontend.compile.compile_cases import CLASSES, DIM, SOME, WARNING, made
from tests.support.graphs import AOT_CHECKED

pytestmark = [
    # What torch 2.11's compiler imports.
    pytest.mark.filterwarnings(f"ignore:{WARNING}:DeprecationWarning"),
    # The default compiler starts with torch's headers: a minute of C++ on a loaded machine.
    pytest.mark.timeout(200),
]


class Model(nn.Module):
    """A trunk whose layer is computed again in the backward, and the loss."""

    def __init__(self, group: Any = None, shard: VocabShard | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        rows = slice(None) if shard is None else slice(shard.start, shard.stop)
        self.layer = nn.Linear(DIM, DIM, bias=False)
        self.weight = nn.Parameter(torch.randn(CLASSES, DIM, generator=generator)[rows].clone())
        self.how = {"group": group, "vocab_shard": shard, "filter": SOME}
        with torch.no_grad():
            self.layer.weight.copy_(torch.randn(DIM, DIM, generator=generator) / 4)

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        hidden = checkpoint(self.layer, inputs, use_reentrant=False)
        return linear_cross_entropy(hidden, self.weight, targets, **self.how)  # pyright: ignore


def by_the_default_compiler(_: Any) -> None:
    warnings.filterwarnings("ignore", WARNING, DeprecationWarning)
    tensors = made(torch.float32, batch=4)
    inputs, targets = tensors["hidden"].detach(), tensors["targets"]
    got = []
    for compiles in (False, True):
        model = Model()
        run: Any = torch.compile(model, fullgraph=True) if compiles else model
        loss = run(inputs, targets)
        loss.backward()
        got.append([loss.detach(), *(x.grad for x in model.parameters())])
    torch.testing.assert_close(got[1], got[0])


def test_a_model_by_the_default_compiler() -> None:
    # In a process whose torch.empty is torch's own: a compiler traces what replaces it.
    shared_pool().run(1, by_the_default_compiler, timeout=200)


def on_a_group(group: Any, backend: str) -> None:
    """Tensor parallel over uneven shards, sequence parallel, and DTensors."""
    warnings.filterwarnings("ignore", WARNING, DeprecationWarning)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    tensors = made(torch.float32, batch=4)
    if backend == "triton":  # a block of tokens: interpreted, each of twelve calls takes seconds
        tensors |= {name: tensors[name][:2].detach() for name in ("hidden", "targets")}
    hidden, weight, targets = (tensors[name].detach() for name in ("hidden", "weight", "targets"))
    shard = VocabShard.chunked(CLASSES - 1, rank, size)
    rows = weight[shard.start : shard.stop]
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
    part = hidden.chunk(size)[rank]
    how: dict[str, Any] = {"group": group, "vocab_shard": shard}
    first = 0 if rank == 0 else CLASSES - 1
    everything = VocabShard(first, CLASSES - 1, CLASSES - 1)

    def place(tensor: Tensor, placement: Any) -> Tensor:
        return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)

    cases: dict[str, tuple[Tensor, Tensor, dict[str, Any]]] = {
        "tensor parallel": (hidden, rows, how),
        "sequence parallel": (part, rows, {**how, "sequence_parallel": True}),
        "mesh": (hidden, rows, {**how, "group": mesh}),
        "empty shard": (hidden, weight[first:-1], {**how, "vocab_shard": everything}),
        "dtensor": (place(hidden, Replicate()), place(weight[:-1], Shard(0)), {}),
        "dtensor, split": (place(hidden, Shard(0)), place(weight[:-1], Shard(0)), {}),
    }
    if backend == "triton":  # a mesh, and tensors on it, are a group before a backend is called
        cases = {name: cases[name] for name in ("sequence parallel", "empty shard")}
    targets = torch.where(targets == CLASSES - 1, 0, targets)
    for name, (given, rows_of, options) in cases.items():
        torch._dynamo.reset()

        def run(hidden: Tensor, weight: Tensor, options: dict[str, Any] = options) -> Any:
            return linear_cross_entropy(
                2 * hidden, weight, targets, filter=SOME, backend=backend, **options
            )

        got = []
        for function in (run, torch.compile(run, fullgraph=True, backend=AOT_CHECKED)):
            leaves = [x.clone().detach().requires_grad_() for x in (given, rows_of)]
            loss = function(*leaves)
            assert isinstance(loss, DTensor) == name.startswith("dtensor"), name
            loss.backward()
            values = [loss.detach(), *(leaf.grad for leaf in leaves)]
            got.append([x.to_local() if isinstance(x, DTensor) else x for x in values])
        torch.testing.assert_close(got[1], got[0], msg=name)


@pytest.mark.parametrize(**grid(places=CPU_PLACES))
def test_compiled_on_a_group(place: Place) -> None:
    shared_pool().run(2, on_a_group, place.backend, timeout=200)
