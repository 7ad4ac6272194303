"""Forward KL with the teacher's logits in 8 bits, over ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from cce_dist.backends.triton import backend as triton_backend
from cce_dist.backends.triton.teacher import eight_bits
from cce_dist.testing import nccl_pool, shared_pool
from tests.distillation.test_by_kernels import PLAIN, gradients, wide_leaves, zipf
from tests.distillation.test_distillation import Both, error
from tests.distillation.test_screened_teacher import rms
from tests.support.head_cases import on_rank


def on_a_rank(group: Any, both: Both, cuts: tuple[int, ...], rough: int | None) -> Any:
    """Args: rough: the rank whose 8-bit logits are refused."""
    rank = dist.get_rank(group)
    if dist.get_backend(group) == "nccl":
        both = Both(*(x.cuda() for x in vars(both).values()))
    leaves, options, rows = on_rank(both.leaves(), group, cuts)
    most = eight_bits.MAX_ERROR
    if rank == rough:
        eight_bits.MAX_ERROR = 0.0
    try:
        out = both.with_teacher_on(group, rows, False).run(
            leaves,
            **{**PLAIN, "reduction": "none", "stats": ("divergence", "screened")},
            **options,
            backend="triton",
            logits="screened",
        )
    finally:
        eight_bits.MAX_ERROR = most
    grads = {name: x.cpu() for name, x in gradients(out.loss, leaves).items()}
    return out.divergence.detach().cpu(), bool(out.screened), grads


def check_ranks(both: Both, ranks: Any, screened: bool, limits: tuple[float, float]) -> None:
    wide = wide_leaves(both)
    right = both.dense(wide, "forward_kl", PLAIN)
    expected = gradients(right.loss, wide)
    for kl, is_screened, grads in ranks:
        assert torch.equal(kl, ranks[0][0]) and is_screened == screened
        assert rms(kl - right.divergence) < limits[0]
        assert error(grads["hidden"], expected["hidden"]) < limits[1]
    joined = torch.cat([grads["weight"] for _, _, grads in ranks])
    assert error(joined, expected["weight"]) < limits[1]


@pytest.mark.parametrize(
    ("cuts", "rough"),
    [((0, 2100, 4200), None), ((0, 2100, 4200), 1), ((0, 1800, 1800, 4200), None)],
    ids=["both", "one_refuses", "an_empty_shard"],
)
def test_over_ranks(cuts: tuple[int, ...], rough: int | None) -> None:
    both = zipf(torch.float16, "cpu", 140, 4200)
    ranks = shared_pool().run(len(cuts) - 1, on_a_rank, both, cuts, rough)
    check_ranks(both, ranks, rough is None, (5e-3, 1e-2))


def sizes_of_a_rank(group: Any, both: Both, cuts: tuple[int, ...]) -> tuple[bool, Any]:
    """Returns whether the teacher is screened, and what the rule of small calls was asked."""
    note = Mock(return_value=False)
    with patch.object(triton_backend.TritonBackend, "gains_by_screening", note):
        _, is_screened, _ = on_a_rank(group, both, cuts, None)
    return is_screened, note.call_args.args


def test_ranks_with_different_rows_decide_alike() -> None:
    both = zipf(torch.float16, "cpu", 140)
    found = shared_pool().run(2, sizes_of_a_rank, both, (0, 1000, 6000))
    assert found == [(False, (140, 3000, 64))] * 2


@pytest.mark.gpu
@pytest.mark.multigpu
def test_over_two_gpus() -> None:
    both = zipf(torch.bfloat16, "cpu", 1024, 8192)
    ranks = nccl_pool().run(2, on_a_rank, both, (0, 3000, 8192), None)
    check_ranks(both, ranks, True, (5e-3, 2e-2))
