"""Kernels of two heads over ranks, against dense softmaxes in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import Filter
from cce_dist.testing import nccl_pool, shared_pool
from tests.distillation.test_by_kernels import (
    BY_HOPPER,
    CALLS,
    EVERY,
    GRADIENTS,
    KLS,
    PLAIN,
    gradients,
    wide_leaves,
    zipf,
)
from tests.distillation.test_distillation import CLASSES, Both, error
from tests.support.head_cases import on_rank


def on_a_rank(group: Any, both: Both, cuts: tuple[int, ...], split: bool, call: Any) -> Any:
    if both.hidden.device.type != group_device(group):
        both = Both(*(x.to(group_device(group)) for x in vars(both).values()))
    leaves, options, rows = on_rank(both.leaves(), group, cuts, split=split)
    here = both.with_teacher_on(group, rows, split)
    found = here.run(leaves, **call, **options, backend="triton")
    loss = found if isinstance(found, Tensor) else found.loss
    grads = gradients(loss, leaves)
    return loss.detach().cpu(), {name: x.cpu() for name, x in grads.items()}


def group_device(group: Any) -> str:
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


CUTS = {
    "even_and_sequence_parallel": ((0, 350, CLASSES), True),
    "ragged_with_an_empty_shard": ((0, 11, 11, CLASSES), False),
}
# Each pair of cuts and a divergence, and of a call and a divergence.
OVER_RANKS = [
    *(("even_and_sequence_parallel", "one pass", kl) for kl in ("forward_kl", "jsd")),
    *(("ragged_with_an_empty_shard", "two temperatures", kl) for kl in ("forward_kl", "jsd")),
    ("even_and_sequence_parallel", "two temperatures", "reverse_kl"),
    ("ragged_with_an_empty_shard", "one pass", "reverse_kl"),
]


@pytest.mark.parametrize(("name", "call", "kl"), OVER_RANKS)
def test_over_ranks(name: str, call: str, kl: str) -> None:
    cuts, split = CUTS[name]
    both, options = Both.make(torch.float32), {**CALLS[call], "filter": EVERY, "divergence": kl}
    ranks = shared_pool().run(len(cuts) - 1, on_a_rank, both, cuts, split, options)
    check_ranks(both, ranks, split, options, 5e-6)


@KLS
def test_a_shard_where_a_model_has_no_mass(kl: str) -> None:
    """Its sum underflows beside the other rank's; the other model's does not."""
    both, cuts = Both.make(torch.float32), (0, 350, CLASSES)
    far = both.bias if kl == "forward_kl" else both.teacher_bias
    far[350:] -= 130
    options = {**CALLS["plain"], "temperature": 1.0, "filter": EVERY, "divergence": kl}
    ranks = shared_pool().run(2, on_a_rank, both, cuts, False, options)
    check_ranks(both, ranks, False, options, GRADIENTS[kl]["fp32"] if kl == "jsd" else 5e-6)


@KLS
def test_a_shard_that_a_model_masks(kl: str) -> None:
    both, cuts = Both.make(torch.float32), (0, 350, CLASSES)
    far = both.bias if kl == "forward_kl" else both.teacher_bias
    far[350:] = -torch.inf
    options = {**CALLS["plain"], "filter": EVERY, "divergence": kl}
    ranks = shared_pool().run(2, on_a_rank, both, cuts, False, options)
    if kl == "jsd":
        check_ranks(both, ranks, False, options, GRADIENTS[kl]["fp32"])
    else:
        assert all((loss[both.targets[..., 1:] >= 0] == torch.inf).all() for loss, _ in ranks)


@KLS
def test_filtered_over_ranks(kl: str) -> None:
    """Each rank's dropped columns have the sum of their derivatives: the direction that all rows
    share is right."""
    both, cuts = zipf(torch.float32, "cpu", 140, 3000), (0, 700, 3000)
    generator = torch.Generator().manual_seed(5)
    both.weight.add_(0.5 * torch.randn(both.weight.shape[1], generator=generator))
    options = {**PLAIN, "reduction": "none", "filter": Filter(keep=0.01), "divergence": kl}
    ranks = shared_pool().run(2, on_a_rank, both, cuts, False, options)
    check_ranks(both, ranks, False, options, 5e-2)
    # A column's sum over tokens is right, whether it is kept or not.
    wide = wide_leaves(both)
    right = gradients(both.dense(wide, kl, options).loss, wide)["bias"]
    assert error(torch.cat([grads["bias"] for _, grads in ranks]), right) < 1e-2


@pytest.mark.gpu
@pytest.mark.multigpu
@KLS
@pytest.mark.parametrize("split", [False, True])
def test_filtered_over_two_gpus(split: bool, kl: str) -> None:
    both = zipf(torch.bfloat16, "cpu", 1024, 8192)
    options = {**PLAIN, "reduction": "none", "divergence": kl}
    ranks = nccl_pool().run(2, on_a_rank, both, (0, 3000, 8192), split, options)
    check_ranks(both, ranks, split, options, 1.2e-2)


def check_ranks(both: Both, ranks: Any, split: bool, call: Any, limit: float) -> None:
    wide = wide_leaves(both)
    expected = both.dense(wide, call.get("divergence", "forward_kl"), call).loss
    right = gradients(expected, wide)
    for loss, _ in ranks:
        assert torch.equal(loss, ranks[0][0])
        assert error(loss, expected) < min(limit, BY_HOPPER)
    for name in ("weight", "bias"):
        assert error(torch.cat([grads[name] for _, grads in ranks]), right[name]) < limit, name
    hidden = [grads["hidden"] for _, grads in ranks]
    assert error(torch.cat(hidden) if split else hidden[0], right["hidden"]) < limit
