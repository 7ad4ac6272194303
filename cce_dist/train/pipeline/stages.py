"""A pipeline's stages as modules."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cce_dist.train.model.decoder import Decoder, add_rotary_table, autocast, embed


class RowsEmbedding(nn.Module):
    """A decoder's embedding, with rows over the tp ranks of a stage.

    It maps [batch, sequence] int64 to [batch, sequence, dim]; with sequence parallelism to a tp
    rank's slice of dim 0.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.weight, self.shard = decoder.embedding, decoder.shards["embedding"]
        self.group, self.slices = decoder.tp_group, decoder.config.parallel.sequence_parallel

    def forward(self, ids: Tensor) -> Tensor:
        rows = embed(ids.flatten(), self.weight, self.shard, self.group, self.slices)
        return rows.unflatten(0, (-1, ids.shape[1]))


class Stage(nn.Module):
    """A stage's computation on a microbatch: it maps [batch, sequence, dim] fp32 to the same shape.

    The first stage reads [batch, sequence] int64; the last returns the head's dtype.

    Args:
        embedding: the first stage's embedding; None: `RowsEmbedding`.
        has_head: the last stage has the head's weight, too, since it computes the loss alone:
            schedules that split the backward make gradients of the stages' parameters only.
    """

    def __init__(
        self, decoder: Decoder, index: int, *, embedding: nn.Module | None, has_head: bool
    ) -> None:
        super().__init__()
        is_last = index == decoder.layout.num_stages - 1
        self.config = decoder.config
        self.embedding = (embedding or RowsEmbedding(decoder)) if index == 0 else None
        self.final_norm = decoder.final_norm if is_last else None
        self.head = decoder.head_weight if is_last and has_head else None
        self.blocks = nn.ModuleList(
            decoder.blocks[str(layer)] for layer in decoder.layout.layers[index]
        )
        add_rotary_table(self, decoder.config)

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
