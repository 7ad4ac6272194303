"""A small modern decoder: RMSNorm, rotary embeddings, causal attention, SwiGLU.

The body is the same on every rank; embedding and head hold this rank's rows of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist import LossOutput, VocabShard
from cce_dist.train.collectives import SumPartials, SumPartialsToSlices
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.ranks import Ranks

INIT_STD = 0.02
# One generator draws this many rows of the vocabulary: initial weights must not depend on tp.
INIT_BLOCK_ROWS = 1024
ROTARY_BASE = 10_000.0


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        hidden_dim = -(-8 * dim // 3 // 32) * 32
        self.attention_norm = nn.RMSNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.attention_out = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.RMSNorm(dim)
        self.gate_up = nn.Linear(dim, 2 * hidden_dim, bias=False)
        self.down = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, rotary), rotate(k, rotary), v, is_causal=True)
        x = x + self.attention_out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def linears(self) -> list[nn.Module]:
        """Lists the linear layers in the order of the forward."""
        return [self.qkv, self.attention_out, self.gate_up, self.down]


class Decoder(nn.Module):
    """A decoder: ids [batch, sequence] of the whole dp rank -> hidden [tokens of this rank, dim].

    With sequence parallelism each tp rank runs the body on some of the batch's sequences, each of
    them whole: hidden is the rank's contiguous slice of the batch's tokens. Without sequence
    parallelism hidden has all tokens.
    """

    # StagedDecoder, for pipelines, has other values: the number of the pipeline's ranks with the
    # same rows of the vocabulary, and the names of parameters with rows on all of its ranks.
    num_vocabulary_copies = 1
    names_over_pipeline: frozenset[str] = frozenset()

    def __init__(self, config: TrainConfig, ranks: Ranks) -> None:
        super().__init__()
        dim = config.model.dim
        self.vocab_size = config.data.vocab_size
        self.shard = VocabShard.chunked(config.data.vocab_size, ranks.tp_rank, ranks.tp)
        self.tp_group = ranks.tp_group
        self.sequence_parallel = config.parallel.sequence_parallel
        self.embedding = nn.Parameter(torch.empty(self.shard.num_rows, dim))
        self.blocks = nn.ModuleList(
            Block(dim, config.model.heads) for _ in range(config.model.layers)
        )
        self.final_norm = nn.RMSNorm(dim)
        if not config.model.tied:
            self.head = nn.Parameter(torch.empty(self.shard.num_rows, dim))
        self.tied = config.model.tied
        cos, sin = rotary_table(config.data.sequence_length, dim // config.model.heads)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)

    def forward(
        self, ids: Tensor, head: Callable[[Tensor, Tensor], LossOutput] | None = None
    ) -> Tensor | LossOutput:
        """Returns hidden, or the result of `head` on hidden and the head's weight.

        Under FSDP the weight is whole only within this method, so a training step passes its loss
        as `head`.
        """
        # Rows are scaled, not normed: weight decay shrinks rows, and a norm would divide gradients
        # by the rows' size.
        x = self.embed(ids.flatten()) * math.sqrt(self.embedding.shape[1])
        x = x.unflatten(0, (-1, ids.shape[1]))
        for block in self.blocks:
            x = block(x, (self.rotary_cos, self.rotary_sin))
        hidden = self.final_norm(x).flatten(0, 1)
        return hidden if head is None else head(hidden, self.head_weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Embeds [N] int64 -> [N, dim], or [N / tp, dim] with sequence parallelism."""
        return embed(ids, self.embedding, self.shard, self.tp_group, self.sequence_parallel)

    @property
    def head_weight(self) -> nn.Parameter:
        return self.embedding if self.tied else self.head

    def sharded_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters with rows of the vocabulary; others are equal on all ranks."""
        shards = {"embedding": self.embedding}
        return shards if self.tied else {**shards, "head": self.head}

    def body_parameters(self) -> dict[str, nn.Parameter]:
        sharded = self.sharded_parameters()
        return {name: p for name, p in self.named_parameters() if name not in sharded}


def embed(
    ids: Tensor,  # [N] int64
    weight: Tensor,  # [V_local, dim]
    shard: VocabShard,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
) -> Tensor:
    """Embeds ids [N]: returns [N, dim], or [N / ranks, dim] with sequence parallelism.

    Collectives: one all-reduce, or one reduce-scatter; see train/collectives.py for the backward.
    """
    local_ids = shard.local_targets(ids)
    mine = (local_ids >= 0).nonzero().squeeze(1)
    rows = F.embedding(local_ids[mine], weight)
    partial = rows.new_zeros(ids.shape[0], rows.shape[1]).index_copy(0, mine, rows)
    if sequence_parallel:
        return SumPartialsToSlices.apply(partial, group)
    return SumPartials.apply(partial, group)


def rotary_table(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, [length, head_dim / 2] fp32 each."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Applies rotary position embedding to [batch, heads, length, head_dim]; keeps norms."""
    cos, sin = (table.to(x.dtype) for table in rotary)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Draws the initial weights on the CPU: the same for every tp, dp and device."""
    draw_blocks([block for block in model.blocks if isinstance(block, Block)], seed)
    for name, parameter in model.sharded_parameters().items():
        draw_rows(parameter, model.shard, name, seed, tied=model.tied)


@torch.no_grad()
def draw_blocks(blocks: Sequence[Block], seed: int) -> None:
    """Draws all blocks of a decoder, in order, from one generator.

    `blocks` may repeat one spare block in place of the blocks on other ranks. Norms stay as they
    are.
    """
    generator = torch.Generator().manual_seed(seed)
    # With this scale the residual stream's variance does not depend on depth (GPT-2).
    output_std = INIT_STD / math.sqrt(2 * len(blocks))
    for block in blocks:
        for name, parameter in block.named_parameters():
            if parameter.dim() < 2:
                continue
            is_output = name.endswith(("attention_out.weight", "down.weight"))
            parameter.normal_(std=output_std if is_output else INIT_STD, generator=generator)


@torch.no_grad()
def draw_rows(
    parameter: nn.Parameter, shard: VocabShard, name: str, seed: int, *, tied: bool
) -> None:
    """Draws a shard of the "embedding" or the "head", block by block."""
    if shard.num_rows == 0:
        return
    is_input_only = name == "embedding" and not tied
    std = 1 / math.sqrt(parameter.shape[1]) if is_input_only else INIT_STD
    index = ("embedding", "head").index(name)
    last = (shard.stop - 1) // INIT_BLOCK_ROWS
    for block in range(shard.start // INIT_BLOCK_ROWS, last + 1):
        # The CPU generator reads only 32 bits of a seed, so SeedSequence mixes the three numbers.
        (mixed,) = np.random.SeedSequence((seed, index, block)).generate_state(1).tolist()
        generator = torch.Generator().manual_seed(mixed)
        rows = torch.empty(INIT_BLOCK_ROWS, parameter.shape[1])
        rows.normal_(std=std, generator=generator)
        first = block * INIT_BLOCK_ROWS
        start, stop = max(first, shard.start), min(first + INIT_BLOCK_ROWS, shard.stop)
        parameter[start - shard.start : stop - shard.start] = rows[start - first : stop - first]


@dataclass(frozen=True)
class ModelSize:
    total: int
    vocabulary: int


def count_parameters(config: TrainConfig) -> ModelSize:
    """Counts parameters over the whole vocabulary and all layers, each parameter once."""
    dim = config.model.dim
    with torch.device("meta"):
        block = sum(p.numel() for p in Block(dim, config.model.heads).parameters())
    vocabulary = (1 if config.model.tied else 2) * config.data.vocab_size * dim
    return ModelSize(config.model.layers * block + dim + vocabulary, vocabulary)
