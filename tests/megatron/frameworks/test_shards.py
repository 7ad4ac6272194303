"""Log-probabilities from a rank's rows of the head, also of an uneven split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

from cce_dist.testing import shared_pool
from megatron_patch.frameworks.shards import shard_logprobs
from megatron_patch.options import PatchOptions

CUTS = (0, 11, 19)


def on_a_rank(group: Any, tensors: tuple[Tensor, Tensor, Tensor], vocab_size: int | None) -> Tensor:
    hidden, weight, targets = tensors
    bounds = (CUTS[group.rank()], CUTS[group.rank() + 1])
    rows, options = weight[slice(*bounds)], PatchOptions(vocab_size=vocab_size)
    return shard_logprobs(
        hidden, rows, targets, group=group, options=options, bounds=bounds
    ).logprobs


def refused(group: Any, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    # Raised on each rank, or the other one would wait.
    with pytest.raises(ValueError, match=r"must tile|of the same sizes"):
        on_a_rank(group, tensors, None)
    hidden, weight, targets = tensors
    start, options = CUTS[group.rank()], PatchOptions()
    for rows, bounds in ((weight[:9], (start, start + 8)), (weight[:9], (9, 18))):
        with pytest.raises(ValueError, match=r"weight|must tile"):
            shard_logprobs(hidden, rows, targets, group=group, options=options, bounds=bounds)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_an_uneven_split(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(6, 8, generator=generator)
    weight, targets = torch.randn(19, 8, generator=generator), torch.arange(6) * 3
    tensors = (hidden, weight, targets.to(dtype))
    expected = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    for found in shared_pool().run(2, on_a_rank, tensors, 19):
        torch.testing.assert_close(found, expected)
    shared_pool().run(2, refused, tensors)
