"""Kinds of groups that the loss takes, and what it refuses on every rank."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cce_dist import LinearCrossEntropy, VocabShard, linear_cross_entropy
from cce_dist.testing import Case, check_outputs, gaussian_inputs, join_ranks, shared_pool
from tests.support.loss_cases import generator


def run_on_mesh(group: dist.ProcessGroup, case: Case) -> dict[str, Tensor]:
    return run_case_with(DeviceMesh.from_group(group, "cpu"), group, case)


def run_on_mesh_dim(group: dist.ProcessGroup, case: Case) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return run_case_with(mesh["tp"], mesh["tp"].get_group(), case)


def run_case_with(group: Any, process_group: dist.ProcessGroup, case: Case) -> dict[str, Tensor]:
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    hidden = case.inputs.hidden.clone().requires_grad_()
    weight = case.inputs.weight.chunk(world)[rank].clone().requires_grad_()
    loss = LinearCrossEntropy(group=group)(hidden, weight, case.inputs.targets)
    loss.backward()
    return {"loss": loss.detach(), "grad_hidden": hidden.grad, "grad_weight": weight.grad}


@pytest.mark.parametrize("function", [run_on_mesh, run_on_mesh_dim], ids=["1d", "dim_of_2d"])
def test_module_takes_a_device_mesh(function: Any) -> None:
    inputs = gaussian_inputs(30, 600, 13, generator=generator(), dtype=torch.float64)
    case = Case(inputs)
    results = shared_pool().run(4, function, case)
    parts = results if function is run_on_mesh else results[:2]
    check_outputs(case, join_ranks(case, parts))


# What a backend cannot do, whatever rows a rank has.
OF_THE_BACKEND: dict[str, dict[str, Any]] = {
    "screened": {"logits": "screened"},
    "kept": {"logits": "screened", "keep_logits": True, "backend": "torch"},
}


def refusal(group: dist.ProcessGroup, kind: str) -> str:
    """The message with which this rank refuses, or "" if it does not."""
    rank = dist.get_rank(group)
    hidden, weight, targets = torch.ones(4, 8), torch.ones(10, 8), torch.tensor([0, 1, 2, 3])
    arguments: dict[str, Any] = {"group": group}
    if kind == "mesh":
        arguments["group"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    elif kind == "outside":
        inner = dist.new_group([0, 1])
        if rank < 2:
            return "inside"
        arguments["group"] = inner
    elif kind == "gap":
        arguments["vocab_shard"] = VocabShard(11 * rank, 11 * rank + 10, 43)
    elif kind == "overlap":
        arguments["vocab_shard"] = VocabShard(9 * rank, 9 * rank + 10, 37)
    elif kind == "overlap_and_gap":  # as many rows as classes
        start = (0, 5, 20, 30)[rank]
        arguments["vocab_shard"] = VocabShard(start, start + 10, 40)
    elif kind == "short":
        arguments["vocab_shard"] = VocabShard(10 * rank, 10 * rank + 10, 45)
    elif kind == "twice":
        arguments["vocab_shard"] = VocabShard(10 * (rank // 2), 10 * (rank // 2) + 10, 20)
    elif kind == "vocab_size":
        arguments["vocab_shard"] = VocabShard(10 * rank, 10 * rank + 10, 40 - (rank == 2))
    elif kind == "target":
        targets = torch.tensor([0, 1, 2, 40])
    elif kind == "padded_target":
        arguments["vocab_shard"] = VocabShard(10 * rank, 10 * rank + 10, 35)
        targets = torch.tensor([0, 1, 2, 35])
    elif kind == "sequence_parallel":
        arguments["sequence_parallel"] = True
    elif kind in OF_THE_BACKEND:  # the last rank has no columns
        arguments |= OF_THE_BACKEND[kind]
        weight = weight[: 0 if rank == 3 else 10]
        arguments["vocab_shard"] = VocabShard(10 * rank, 10 * rank + len(weight), 30)
    try:
        linear_cross_entropy(hidden, weight, targets, **arguments)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [
        pytest.param("mesh", r"group must .*mesh.*2 dims", id="mesh_of_two_dims"),
        pytest.param("gap", r"vocab_shard.*\(11, 21, 43\)", id="gap"),
        pytest.param("overlap", r"vocab_shard.*\(9, 19, 37\)", id="overlap"),
        pytest.param("overlap_and_gap", r"vocab_shard.*\(5, 15, 40\)", id="overlap_and_gap"),
        pytest.param("short", r"vocab_shard.*\(30, 40, 45\)", id="rows_missing_at_the_end"),
        pytest.param("twice", r"vocab_shard.*\(10, 20, 20\)", id="same_rows_twice"),
        pytest.param("vocab_size", r"vocab_shard.*39", id="vocab_sizes_differ"),
        pytest.param("target", r"targets must .*40", id="target_beyond_the_vocabulary"),
        pytest.param("padded_target", r"targets must .*35", id="target_is_padding"),
        pytest.param("sequence_parallel", r"targets must .*16", id="targets_of_one_slice"),
        pytest.param("screened", r"cannot run here: hidden is torch.float32", id="screened_fp32"),
        pytest.param("kept", r"keep_logits=True needs the kernels", id="kept_by_torch"),
    ],
)
def test_linear_cross_entropy_refuses_on_every_rank(kind: str, pattern: str) -> None:
    for message in shared_pool().run(4, refusal, kind):
        assert re.search(pattern, message), message


def test_linear_cross_entropy_refuses_a_group_of_other_ranks() -> None:
    messages = shared_pool().run(4, refusal, "outside")
    assert messages[:2] == ["inside", "inside"]
    for message in messages[2:]:
        assert message.startswith("group must"), message
