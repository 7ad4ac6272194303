"""FSDP2: parameters, gradients and optimizer state, each split over the data-parallel ranks.

The linears of each decoder layer are a group. Embedding, norms and head are the root group, which
is whole from the forward's start to the backward's end. docs/guide/training.md#fsdp.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.ranks import Ranks

from .decoder import Block, Decoder


def place(model: Decoder, config: TrainConfig, ranks: Ranks) -> None:
    """Moves the model to the rank's device, split over dp if parallel.fsdp asks for it.

    fully_shard moves one group at a time, so that no GPU ever holds the whole model.
    """
    if not config.parallel.fsdp or ranks.dp == 1:
        model.to(ranks.device)
        return
    data = ranks.mesh["dp"]
    for block in model.blocks.values():
        assert isinstance(block, Block)
        fully_shard(block.linears(), mesh=data, mp_policy=_linears_policy(config))
    fully_shard(model, mesh=data)


def _linears_policy(config: TrainConfig) -> MixedPrecisionPolicy:
    """Returns a policy that casts as autocast does, and sums over ranks in fp32.

    Autocast itself would keep 16-bit copies of every layer's whole weights until the backward. It
    leaves norms and the embedding in fp32, and so does the root group, which casts nothing.
    """
    if config.dtype == "float32":
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )


@contextmanager
def gathered_head(model: Decoder) -> Iterator[Tensor]:
    """Provides this tp rank's whole head weight, after a forward and before a backward.

    Collectives: with FSDP one all-gather over dp, unless the forward has left the weight whole.
    """
    if not isinstance(model, FSDPModule):
        yield model.head_weight
        return
    model.unshard()
    try:
        yield model.head_weight
    finally:
        model.reshard()


def local_shard(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a tensor; the two share memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
