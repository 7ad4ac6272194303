"""DTensor placements that are refused."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from cce_dist import VocabShard, linear_cross_entropy
from cce_dist.testing import shared_pool
from tests.frontend.dtensor.dtensor_cases import DIM, made, mesh_of, place


def refusals(group: Any) -> dict[str, str]:
    """What each call says."""
    mesh, given = mesh_of(group), made(600)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    weight = place(given["weight"], mesh, Shard(0))
    hidden = place(given["hidden"], mesh, Replicate())
    sharded = nn.Linear(DIM, 600, bias=False).double()
    fully_shard(sharded, mesh=square["dp"])
    rows = distribute_tensor(given["weight"], square, [Replicate(), Shard(0)], src_data_rank=None)
    mean = DTensor.from_local(given["hidden"], mesh, [Partial()], run_check=False)
    replicated = place(given["weight"], mesh, Replicate())
    on_both = distribute_tensor(given["weight"], square, [Replicate()] * 2, src_data_rank=None)
    whole_vocabulary = VocabShard(0, 600, 600)
    calls: dict[str, dict[str, Any]] = {
        "no group": {"hidden": given["hidden"]},
        "fsdp": {"hidden": given["hidden"], "weight": sharded.weight},
        "other group": {"group": square["tp"]},
        "plain weight": {"weight": given["weight"], "group": group},
        "two dims": {"weight": rows},
        "replicated weight": {"weight": replicated},
        "replicated weight, group": {"weight": replicated, "group": group},
        "replicated weight, plain hidden": {"weight": replicated, "hidden": given["hidden"]},
        "replicated on two dims": {"weight": on_both},
        "columns": {"weight": place(given["weight"], mesh, Shard(1))},
        "split dim": {"hidden": place(given["hidden"], mesh, Shard(2))},
        "partial": {"hidden": mean},
        "uneven tokens": {"hidden": place(given["hidden"][:, :10], mesh, Shard(1))},
        "other mesh": {"hidden": place(given["hidden"], square["tp"], Replicate())},
        "option": {"sequence_parallel": True},
        "targets": {"targets": place(given["targets"], mesh, Shard(0))},
        "bias": {"bias": place(given["bias"], mesh, Replicate())},
        "vocab_shard": {"vocab_shard": whole_vocabulary},
    }
    said = {}
    for name, call in calls.items():
        arguments = {"hidden": hidden, "weight": weight, "targets": given["targets"], **call}
        try:
            linear_cross_entropy(**arguments)
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
    return said


REFUSALS = {
    "no group": r"group must be given where weight is a DTensor.*'tp'.*fully_shard",
    "fsdp": r"group must be given where weight is a DTensor.*within the forward.*head.unshard\(\)",
    "other group": r"group must be that of weight's mesh, ranks \[0, 1, 2, 3\].*got ranks",
    "plain weight": r"weight must be a DTensor too, placed Shard\(0\), where hidden is one",
    "two dims": r"weight must be a DTensor on a mesh of one dim, got .*'dp', 'tp'.*fully_shard",
    "replicated weight": r"weight must be placed Shard\(0\), got \[Replicate\(\)\].*to_local\(\)",
    "replicated weight, group": r"weight must be placed Shard\(0\), got \[Replicate.*to_local",
    "replicated weight, plain hidden": r"got \[Replicate\(\)\].*weight.to_local\(\) without group",
    "replicated on two dims": r"got \[Replicate\(\), Replicate\(\)\].*weight.to_local\(\)",
    "columns": r"weight must be placed Shard\(0\) on its mesh, got Shard\(dim=1\)",
    "split dim": r"hidden must be placed Replicate\(\), or Shard\(d\).*got Shard\(dim=2\) of 3",
    "partial": r"hidden must be placed Replicate\(\), or Shard\(d\).*got Partial",
    "uneven tokens": r"hidden's dim 1 must be a multiple of the mesh's 4 ranks.*got 10",
    "other mesh": r"hidden must be on weight's mesh .*got a DTensor on",
    "option": r"sequence_parallel must be left out where hidden is a DTensor",
    "targets": r"targets must be placed Replicate\(\) on its mesh, got Shard\(dim=0\)",
    "bias": r"bias must be placed Shard\(0\) on its mesh, got Replicate",
    "vocab_shard": r"vocab_shard must have the rows of weight's DTensor on this rank, \[0, 150\)",
}


def test_dtensor_placements_that_are_refused() -> None:
    said, *_ = shared_pool().run(4, refusals)
    assert said.keys() == REFUSALS.keys()
    for name, pattern in REFUSALS.items():
        assert re.search(pattern, said[name], re.DOTALL), (name, said[name])


@contextlib.contextmanager
def one_rank_group(path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(str(path), 1), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["hidden", "weight", "targets", "bias", "token_weight"])
def test_one_dtensor_alone_is_refused(name: str, tmp_path: Path) -> None:
    given = made(20)
    given.pop("class_weight")
    with one_rank_group(tmp_path / "store"):
        mesh = init_device_mesh("cpu", (1,))
        given[name] = DTensor.from_local(given[name], mesh, [Replicate()])
        expected = rf"weight must be a DTensor too.*{name} is one.*pass {name}.to_local\(\)"
        if name == "weight":
            expected = r"weight must be placed Shard\(0\), got .*Pass weight.to_local\(\)"
        with pytest.raises(ValueError, match=expected):
            linear_cross_entropy(**given)
