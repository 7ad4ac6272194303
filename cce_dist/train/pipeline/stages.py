"""A pipeline's stages as modules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist import VocabShard
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.model.decoder import add_rotary_table, autocast, embed


class RowsEmbedding(nn.Module):
    """An embedding with rows over the tp ranks of a stage.

    It maps [batch, sequence] int64 to [batch, sequence, dim]; with sequence parallelism to a tp
    rank's slice of dim 0.
    """

    def __init__(
        self, weight: nn.Parameter, shard: VocabShard, group: dist.ProcessGroup, slices: bool
    ) -> None:
        super().__init__()
        self.weight, self.shard, self.group, self.slices = weight, shard, group, slices

    def forward(self, ids: Tensor) -> Tensor:
        rows = embed(ids.flatten(), self.weight, self.shard, self.group, self.slices)
        return rows.unflatten(0, (-1, ids.shape[1]))


class Stage(nn.Module):
    """A stage's computation on a microbatch: it maps [batch, sequence, dim] fp32 to the same shape.

    The first stage reads [batch, sequence] int64; the last returns the head's dtype.

    Args:
        embedding: given on the first stage.
        final_norm: given on the last stage.
        head: given if the last stage computes the loss alone: schedules that split the backward
            make gradients of the stages' parameters only.
    """

    def __init__(
        self,
        config: TrainConfig,
        blocks: Sequence[nn.Module],
        *,
        embedding: nn.Module | None = None,
        final_norm: nn.Module | None = None,
        head: nn.Parameter | None = None,
    ) -> None:
        super().__init__()
        self.embedding, self.final_norm, self.head = embedding, final_norm, head
        self.blocks = nn.ModuleList(blocks)
        self.config = config
        add_rotary_table(self, config)

    def forward(self, x: Tensor) -> Tensor:
        # Autocast is here, not around the schedule: the schedule runs backwards as well.
        with autocast(x.device, self.config):
            if self.embedding is not None:
                # Rows of a tied weight over the pipeline have the head's dtype.
                x = self.embedding(x).float() * math.sqrt(self.config.model.dim)
            for block in self.blocks:
                x = block(x, (self.rotary_cos, self.rotary_sin))
            if self.final_norm is not None:
                x = self.final_norm(x).to(getattr(torch, self.config.dtype))
        return x
