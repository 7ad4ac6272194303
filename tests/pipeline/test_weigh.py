"""`PipelineHead` with reduction "none": gradients of the losses as `losses` returns them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from cce_dist import LossOptions, VocabShard
from cce_dist.pipeline.head import PipelineHead
from cce_dist.testing import RankPool

B, T, V, D = 2, 5, 12, 8
ROOT = 0


def weigh(group: dist.ProcessGroup, shift: int, ignores: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(V, D, generator=generator, dtype=torch.float64)
    hidden = torch.randn(B, T, D, generator=generator, dtype=torch.float64)
    targets = torch.randint(V, (B, T), generator=generator)
    if ignores:
        targets[0, 2:4] = targets[1, 4] = -100
    shard = VocabShard.chunked(V, dist.get_rank(group), dist.get_world_size(group))
    rows = slice(shard.start, shard.stop)
    weight = whole[rows].clone().requires_grad_()
    options = LossOptions(reduction="none", shift=shift, gradient="exact")
    shapes: dict[str, Any] = {"hidden_shape": (B, T, D), "vocab_shard": shard}
    head = PipelineHead(weight, group=group, options=options, **shapes)
    is_root = dist.get_rank(group) == ROOT
    head.start_step()
    head.post(0, ROOT, *((hidden, targets) if is_root else ()))
    head.statistics(0)
    losses = head.losses(0)
    ramp = torch.linspace(1, 2, losses.numel(), dtype=torch.float64).view(losses.shape)
    if is_root:
        for wrong in (None, torch.ones(B, T + 1), ramp[:1]):
            with pytest.raises(ValueError, match=r"grad_losses must have the shape of losses"):
                head.weigh(0, ROOT, wrong)
    head.weigh(0, ROOT, ramp if is_root else None)
    head.gradients(0, ROOT)
    grad_hidden = head.take(0)
    head.finish_step()
    head.close()

    leaves = hidden.requires_grad_(), whole.requires_grad_()
    logprobs = (hidden @ whole.T)[:, : T - shift].log_softmax(-1)
    wanted = targets[:, shift:]
    each = -logprobs.gather(-1, wanted.clamp_min(0)[..., None])[..., 0].where(wanted >= 0, 0)
    torch.testing.assert_close(losses, each)
    expected = torch.autograd.grad((each * ramp).sum(), leaves)
    torch.testing.assert_close(weight.grad, expected[1][rows])
    if is_root:
        torch.testing.assert_close(grad_hidden, expected[0])


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 2])
def test_gradients_of_shifted_losses(shift: int, ignores: bool, pools: dict[int, RankPool]) -> None:
    pools[2].run(2, weigh, shift, ignores)
