"""linear_distillation of DTensors: values, gradients and placements are those of plain tensors."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from cce_dist.testing import shared_pool
from tests.distillation.test_distillation import CLASSES, Both, upstream_of
from tests.frontend.dtensor.dtensor_cases import mesh_of, place, whole

REDUCTIONS = ("none", "mean")


def even(dtype: torch.dtype = torch.float64) -> Both:
    """A teacher without padding, and tokens that two ranks can share."""
    both = Both.make(dtype)
    rows = {name: getattr(both, name)[:CLASSES] for name in ("teacher_weight", "teacher_bias")}
    names = ("hidden", "teacher_hidden", "targets")
    tokens = {name: getattr(both, name)[:, :34] for name in names}
    return replace(both, **rows, **tokens)


def on_a_mesh(group: Any) -> None:
    mesh, both = mesh_of(group), even()
    for placement, reduction in itertools.product((None, Replicate(), Shard(1)), REDUCTIONS):
        results = []
        for over_ranks in (False, True):
            leaves, options = both.leaves(), dict[str, Any](reduction=reduction)
            ours = both
            if over_ranks:
                for name in ("weight", "bias"):
                    leaves[name] = place(leaves[name].detach(), mesh, Shard(0)).requires_grad_()
                ours = replace(
                    both,
                    teacher_weight=place(both.teacher_weight, mesh, Shard(0)),
                    teacher_bias=place(both.teacher_bias, mesh, Shard(0)),
                )
                if placement is None:
                    options["group"] = mesh
                else:
                    tensor = place(leaves["hidden"].detach(), mesh, placement)
                    leaves["hidden"] = tensor.requires_grad_()
                    of_teacher = place(both.teacher_hidden, mesh, placement)
                    ours = replace(ours, teacher_hidden=of_teacher)
            found = ours.run(leaves, **options)
            assert isinstance(found.loss, DTensor) == (over_ranks and placement is not None)
            (whole(found.loss) * upstream_of(whole(found.loss))).sum().backward()
            grads: list[Tensor] = []
            for leaf in leaves.values():
                assert leaf.grad is not None
                grads.append(whole(leaf.grad))
            results.append([*(whole(x) for x in found if x is not None), *grads])
        torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-11)


def test_they_are_plain_tensors_over_ranks() -> None:
    shared_pool().run(2, on_a_mesh)


def laid_otherwise(group: Any) -> None:
    mesh, both = mesh_of(group), even()
    leaves = both.leaves()
    there = {name: place(leaves[name].detach(), mesh, Shard(0)) for name in ("weight", "bias")}
    there["hidden"] = place(leaves["hidden"].detach(), mesh, Replicate())
    right = {
        "teacher_hidden": place(both.teacher_hidden, mesh, Replicate()),
        "teacher_weight": place(both.teacher_weight, mesh, Shard(0)),
        "teacher_bias": None,
    }
    padded = torch.cat([both.teacher_weight, both.teacher_weight[:6]])
    for name, value, rule in (
        ("teacher_hidden", both.teacher_hidden, "^teacher_hidden must be a DTensor, as hidden is"),
        ("teacher_weight", both.teacher_weight, "^teacher_weight must be a DTensor, as weight is"),
        (
            "teacher_weight",
            place(both.teacher_weight, mesh, Replicate()),
            r"^teacher_weight must be placed as weight, \[Shard\(dim=0\)\] .* got \[Replicate",
        ),
        (
            "teacher_weight",
            place(padded, mesh, Shard(0)),
            "^teacher_weight must have weight's 700 rows in all .* got 706",
        ),
    ):
        with pytest.raises(ValueError, match=rule):
            replace(both, **{**right, name: value}).run(there)
    plain = {**right, "teacher_hidden": both.teacher_hidden}
    with pytest.raises(ValueError, match=r"^teacher_weight must be a plain tensor, as weight is"):
        replace(both, **plain).run(leaves)


def test_a_teacher_that_lies_otherwise_is_refused() -> None:
    shared_pool().run(2, laid_otherwise)


def with_a_whole_teacher(group: Any) -> None:
    both, rank = even(), dist.get_rank(group)
    leaves = both.leaves()
    for name in ("weight", "bias"):
        leaves[name] = leaves[name].detach().chunk(2)[rank]
    rule = r"^teacher_weight must have this rank's rows of the ids \[.*, got 700 rows, as many as"
    with pytest.raises(ValueError, match=rule):
        both.run(leaves, group=group)


def with_a_teacher_that_is_padded_and_split(group: Any) -> None:
    """Its second half begins three ids after the student's."""
    both, rank = Both.make(torch.float64), dist.get_rank(group)
    leaves = both.leaves()
    for name in ("weight", "bias"):
        leaves[name] = leaves[name].detach().chunk(2)[rank]
    halves = {
        name: getattr(both, name).chunk(2)[rank] for name in ("teacher_weight", "teacher_bias")
    }
    if rank == 0:
        rule = r"^teacher_weight must have the rows of the ids \[0, 350\) alone, .* got 353 rows"
        with pytest.raises(ValueError, match=rule):
            replace(both, **halves).run(leaves, group=group)


def test_a_teacher_that_is_split_elsewhere_is_refused() -> None:
    shared_pool().run(2, with_a_teacher_that_is_padded_and_split)


def test_a_whole_teacher_on_every_rank_is_refused() -> None:
    shared_pool().run(2, with_a_whole_teacher)
