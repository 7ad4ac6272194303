"""listed_distillation and teacher_topk over ranks and with DTensors, against one rank."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from cce_dist import TeacherLogprobs, teacher_topk
from cce_dist.testing import shared_pool
from tests.distillation.listed.listed_teachers import (
    CLASSES,
    DIVERGENCES,
    OPTIONS,
    RESTS,
    Student,
    upstream_of,
)
from tests.frontend.dtensor.dtensor_cases import mesh_of, place, whole
from tests.support.head_cases import on_rank

TOP = 7


def topk(leaves: dict[str, Tensor], **options: Any) -> TeacherLogprobs:
    """Lists of the student itself."""
    same = {name: OPTIONS[name] for name in ("temperature", "softcap", "logit_scale")}
    return teacher_topk(
        leaves["hidden"], leaves["weight"], TOP, bias=leaves["bias"], **same, **options
    )


def on_a_rank(group: Any, student: Student, cuts: tuple[int, ...], split: bool) -> Any:
    leaves, options, _ = on_rank(student.leaves(), group, cuts, split=split)
    results = []
    for divergence, rest in itertools.product(DIVERGENCES, RESTS):
        computed = student.run(leaves, divergence=divergence, rest=rest, **options)
        total = (computed.loss * upstream_of(computed.loss)).sum()
        grads = torch.autograd.grad(total, list(leaves.values()))
        results.append(([x.detach() for x in computed if x is not None], grads))
    return results, topk(leaves, **options)


@pytest.mark.parametrize(
    ("cuts", "split"),
    [
        ((0, 45, CLASSES), False),
        ((0, 30, 60, CLASSES), True),
        ((0, 11, 11, CLASSES), False),
    ],
    ids=["even", "even_and_sequence_parallel", "ragged_with_an_empty_shard"],
)
def test_over_ranks(cuts: tuple[int, ...], split: bool) -> None:
    student = Student.make(torch.float64)
    ranks = shared_pool().run(len(cuts) - 1, on_a_rank, student, cuts, split)
    leaves = student.leaves()
    for number, (divergence, rest) in enumerate(itertools.product(DIVERGENCES, RESTS)):
        alone = student.run(leaves, divergence=divergence, rest=rest)
        total = (alone.loss * upstream_of(alone.loss)).sum()
        expected = torch.autograd.grad(total, list(leaves.values()))
        by_rank = [results[number] for results, _ in ranks]
        for values, _ in by_rank:
            for ours, first, right in zip(values, by_rank[0][0], alone[:3], strict=True):
                assert torch.equal(ours, first)
                torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-11)
        hidden = [grads[0] for _, grads in by_rank]
        joined = [
            torch.cat(hidden) if split else hidden[0],
            *(torch.cat([grads[leaf] for _, grads in by_rank]) for leaf in (1, 2)),
        ]
        torch.testing.assert_close(joined, list(expected), rtol=1e-10, atol=1e-11)
    lists = topk(leaves)
    for _, ours in ranks:
        assert torch.equal(ours.ids, lists.ids)
        torch.testing.assert_close(ours.logprobs, lists.logprobs, rtol=1e-11, atol=1e-11)


def on_a_mesh(group: Any) -> None:
    mesh, student = mesh_of(group), Student.make(torch.float64)
    # 24 tokens a row lie evenly over two ranks.
    longer = {
        "hidden": torch.cat([student.hidden, student.hidden[:, :1]], 1),
        "targets": torch.cat([student.targets, student.targets[:, :1]], 1),
        "teacher": TeacherLogprobs(*(torch.cat([x, x[:, :1]], 1) for x in student.teacher)),
    }
    student = replace(student, **longer)
    weights = torch.rand(student.targets.shape, generator=torch.Generator().manual_seed(2)).double()
    for placement, reduction in itertools.product((None, Replicate(), Shard(1)), ("none", "mean")):
        results = []
        for over_ranks in (False, True):
            leaves = student.leaves()
            options: dict[str, Any] = {"reduction": reduction, "token_weight": weights}
            if over_ranks:
                for name in ("weight", "bias"):
                    leaves[name] = place(leaves[name].detach(), mesh, Shard(0)).requires_grad_()
                if placement is None:
                    options["group"] = mesh
                else:
                    tensor = place(leaves["hidden"].detach(), mesh, placement)
                    leaves["hidden"] = tensor.requires_grad_()
            computed = student.run(leaves, **options)
            assert isinstance(computed.loss, DTensor) == (over_ranks and placement is not None)
            lists = topk(leaves, **({"group": mesh} if "group" in options else {}))
            assert not isinstance(lists.ids, DTensor)
            (whole(computed.loss) * upstream_of(whole(computed.loss))).sum().backward()
            grads = []
            for leaf in leaves.values():
                assert leaf.grad is not None
                grads.append(whole(leaf.grad))
            results.append(([whole(x) for x in computed if x is not None], grads, lists))
        torch.testing.assert_close(results[1], results[0], rtol=1e-10, atol=1e-11)


def test_dtensors() -> None:
    shared_pool().run(2, on_a_mesh)


def targets_on_a_mesh(group: Any) -> None:
    mesh, student = mesh_of(group), Student.make(torch.float64)
    leaves = student.leaves()
    alone = student.run(leaves).loss
    there = {name: place(leaves[name].detach(), mesh, Shard(0)) for name in ("weight", "bias")}
    there["hidden"] = place(leaves["hidden"].detach(), mesh, Replicate())
    targets = place(student.targets, mesh, Replicate())
    ours = replace(student, targets=targets).run(there).loss
    torch.testing.assert_close(whole(ours), alone.detach())
    lists = TeacherLogprobs(place(student.teacher.ids, mesh, Replicate()), student.teacher.logprobs)
    with pytest.raises(ValueError, match=r"^teacher.ids must be a plain tensor, the same on every"):
        replace(student, teacher=lists).run(there)


def test_targets_may_be_dtensors_and_lists_may_not() -> None:
    shared_pool().run(2, targets_on_a_mesh)


def other_lists(group: Any) -> None:
    student = Student.make(torch.float64)
    ids = student.teacher.ids + 0
    ids[1, 1] = (ids[1, 1] + dist.get_rank(group)) % CLASSES
    teacher = student.teacher._replace(ids=ids)
    leaves = student.leaves()
    for name in ("weight", "bias"):
        leaves[name] = leaves[name].detach().chunk(2)[dist.get_rank(group)]
    with pytest.raises(ValueError, match="every rank of the group must list the same ids"):
        replace(student, teacher=teacher).run(leaves, group=group)


def test_ranks_with_other_lists() -> None:
    shared_pool().run(2, other_lists)
