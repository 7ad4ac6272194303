"""A pipeline rank's part of the decoder, and its stages as modules.

Parameters have the names and initial values that they have in the whole model, so that neither
losses nor checkpoints depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cce_dist import VocabShard
from cce_dist.train.config.pipeline import Layout
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.model.decoder import Block, Decoder, draw_blocks, draw_rows, embed, rotary_table
from cce_dist.train.ranks import Ranks


class StagedDecoder(nn.Module):
    """The layers of this rank's stages, and its rows of the vocabulary's parameters:

    untied      embedding on the first stage; head on the last, or on all ranks of the pipeline
    tied        one parameter on the first and on the last stage; or one on all ranks

    A parameter of one stage is split over the stage's tp ranks; one of all ranks over pp x tp.
    """

    def __init__(self, config: TrainConfig, ranks: Ranks, layout: Layout) -> None:
        super().__init__()
        self.layout, self.tied = layout, config.model.tied
        self.vocab_size, self.num_layers = config.data.vocab_size, config.model.layers
        self.held = layout.stages_of(ranks.pp_rank)
        self.has_first, self.has_last = 0 in self.held, layout.num_stages - 1 in self.held
        self.dim, self.num_heads = dim, heads = config.model.dim, config.model.heads
        layers = [layer for stage in self.held for layer in layout.layers[stage]]
        self.blocks = nn.ModuleDict({str(x): Block(dim, heads) for x in layers})
        self.final_norm = nn.RMSNorm(dim) if self.has_last else None
        self.shards = self._shards(ranks)
        for name, shard in self.shards.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shard.num_rows, dim)))

    def _shards(self, ranks: Ranks) -> dict[str, VocabShard]:
        """Returns this rank's shard of each vocabulary parameter, if it has rows of it."""
        of_stage = VocabShard.chunked(self.vocab_size, ranks.tp_rank, ranks.tp)
        place = ranks.pp_rank * ranks.tp + ranks.tp_rank
        of_pipeline = VocabShard.chunked(self.vocab_size, place, ranks.pp * ranks.tp)
        if self.tied and self.layout.over_pipeline:
            return {"embedding": of_pipeline}
        if self.tied:
            return {"embedding": of_stage} if self.has_first or self.has_last else {}
        shards = {"embedding": of_stage} if self.has_first else {}
        if self.layout.over_pipeline:
            return {**shards, "head": of_pipeline}
        return {**shards, "head": of_stage} if self.has_last else shards

    @property
    def names_over_pipeline(self) -> frozenset[str]:
        """Names of the parameters that are sharded over all ranks of the pipeline."""
        return frozenset((self.head_name,) if self.layout.over_pipeline else ())

    @property
    def head_name(self) -> str:
        return "embedding" if self.tied else "head"

    @property
    def head_weight(self) -> nn.Parameter:
        """The head's weight, on ranks that have rows of it."""
        return self.sharded_parameters()[self.head_name]

    @property
    def num_vocabulary_copies(self) -> int:
        """The number of ranks of the pipeline that have the same rows of the vocabulary."""
        return 2 if self.is_copied else 1

    @property
    def is_copied(self) -> bool:
        """True if the first and the last stage hold the same weight, on two ranks."""
        return self.tied and not self.layout.over_pipeline and self.layout.last_rank != 0

    def sharded_parameters(self) -> dict[str, nn.Parameter]:
        return {name: self.get_parameter(name) for name in self.shards}

    def body_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if name not in self.shards}

    def initialize(self, seed: int) -> None:
        """Draws the parameters' initial values, the same as in `Decoder`."""
        here, elsewhere = dict(self.blocks.items()), Block(self.dim, self.num_heads)
        blocks = [here.get(str(layer), elsewhere) for layer in range(self.num_layers)]
        draw_blocks([block for block in blocks if isinstance(block, Block)], seed)
        for name, parameter in self.sharded_parameters().items():
            draw_rows(parameter, self.shards[name], name, seed, tied=self.tied)

    def stage_blocks(self, stage: int) -> list[nn.Module]:
        return [self.blocks[str(layer)] for layer in self.layout.layers[stage]]


# The part of a decoder that a rank trains.
AnyDecoder: TypeAlias = Decoder | StagedDecoder


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
        self.scale = math.sqrt(config.model.dim)
        self.dtype = getattr(torch, config.dtype)
        head_dim = config.model.dim // config.model.heads
        cos, sin = rotary_table(config.data.sequence_length, head_dim)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # Autocast is here, not around the schedule: the schedule runs backwards as well.
        lowers = self.dtype != torch.float32
        with torch.autocast(x.device.type, torch.bfloat16, enabled=lowers):
            if self.embedding is not None:
                # Rows of a tied weight over the pipeline have the head's dtype.
                x = self.embedding(x).float() * self.scale
            for block in self.blocks:
                x = block(x, (self.rotary_cos, self.rotary_sin))
            if self.final_norm is not None:
                x = self.final_norm(x).to(self.dtype)
        return x
