"""A small modern decoder: RMSNorm, rotary embeddings, causal attention, SwiGLU.

The body is the same on every rank; embedding and head hold this rank's rows of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cce_dist import LossOutput, VocabShard
from cce_dist.train.collectives import SumPartials, SumPartialsToSlices
from cce_dist.train.config.pipeline import Layout
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
    """The part of a decoder that a rank trains: all layers, or those of its stages of a pipeline.

    The rank has rows of these parameters of the vocabulary, with the tp ranks of its stage; "over
    the pipeline" with all tp ranks of all stages:

    untied      embedding on the first stage; head on the last stage, or over the pipeline
    tied        one parameter on the first and on the last stage; or one over the pipeline

    Names and initial values are those of the whole model: neither losses nor checkpoints depend on
    the layout.
    """

    embedding: nn.Parameter
    head: nn.Parameter

    def __init__(self, config: TrainConfig, ranks: Ranks, layout: Layout | None = None) -> None:
        super().__init__()
        self.config, self.layout = config, layout or config.layout()
        self.held = self.layout.stages_of(ranks.pp_rank)
        self.has_first, self.has_last = 0 in self.held, self.layout.num_stages - 1 in self.held
        self.tp_group = ranks.tp_group
        dim, heads = config.model.dim, config.model.heads
        layers = [layer for stage in self.held for layer in self.layout.layers[stage]]
        self.blocks = nn.ModuleDict({str(layer): Block(dim, heads) for layer in layers})
        self.final_norm = nn.RMSNorm(dim) if self.has_last else None
        self.head_name = "embedding" if config.model.tied else "head"
        self.shards = self._shards(ranks)
        for name, shard in self.shards.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shard.num_rows, dim)))
        add_rotary_table(self, config)

    def _shards(self, ranks: Ranks) -> dict[str, VocabShard]:
        """Returns this rank's shard of each vocabulary parameter, if it has rows of it."""
        vocab_size, place = self.config.data.vocab_size, ranks.pp_rank * ranks.tp + ranks.tp_rank
        of_stage = VocabShard.chunked(vocab_size, ranks.tp_rank, ranks.tp)
        shards = {"embedding": of_stage} if self.has_first else {}
        if self.layout.over_pipeline:
            shards[self.head_name] = VocabShard.chunked(vocab_size, place, ranks.pp * ranks.tp)
        elif self.has_last:
            shards[self.head_name] = of_stage
        return shards

    def forward(
        self, ids: Tensor, head: Callable[[Tensor, Tensor], LossOutput] | None = None
    ) -> Tensor | LossOutput:
        """Returns hidden, [tokens of this rank, dim], or what `head` makes of it and its weight.

        Without a pipeline alone. Under FSDP the weight is whole only within this method, so a
        training step passes its loss as `head`.

        Args:
            ids: [batch, sequence] of the whole dp rank. With sequence parallelism each tp rank runs
                the layers on some of the sequences: hidden is its contiguous slice of the tokens.
        """
        slices, shard = self.config.parallel.sequence_parallel, self.shards["embedding"]
        assert self.final_norm is not None
        with autocast(ids.device, self.config):
            # Rows are scaled, not normed: weight decay shrinks rows, and a norm would divide
            # gradients by the rows' size.
            x = embed(ids.flatten(), self.embedding, shard, self.tp_group, slices)
            x = (x * math.sqrt(self.config.model.dim)).unflatten(0, (-1, ids.shape[1]))
            for block in self.blocks.values():
                x = block(x, (self.rotary_cos, self.rotary_sin))
            hidden = self.final_norm(x).flatten(0, 1)
        return hidden if head is None else head(hidden, self.head_weight)

    @property
    def head_weight(self) -> nn.Parameter:
        """The head's weight, on ranks that have rows of it."""
        return self.get_parameter(self.head_name)

    @property
    def is_copied(self) -> bool:
        """True if the first and the last stage hold the same weight, on two ranks."""
        is_here = self.layout.over_pipeline or self.layout.last_rank == 0
        return self.config.model.tied and not is_here

    def is_over_pipeline(self, name: str) -> bool:
        """Tells whether a parameter is sharded over all ranks of the pipeline."""
        return self.layout.over_pipeline and name == self.head_name

    def sharded_parameters(self) -> dict[str, nn.Parameter]:
        """Returns parameters with rows of the vocabulary; a stage's ranks share the others."""
        return {name: self.get_parameter(name) for name in self.shards}

    def body_parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if name not in self.shards}


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


def autocast(device: torch.device, config: TrainConfig) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=config.dtype == "bfloat16")


def add_rotary_table(module: nn.Module, config: TrainConfig) -> None:
    """Gives a module the buffers rotary_cos and rotary_sin, which no checkpoint has."""
    head_dim = config.model.dim // config.model.heads
    cos, sin = rotary_table(config.data.sequence_length, head_dim)
    module.register_buffer("rotary_cos", cos, persistent=False)
    module.register_buffer("rotary_sin", sin, persistent=False)


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
    """Draws the initial weights on the CPU: the same for every layout and device."""
    config = model.config
    generator = torch.Generator().manual_seed(seed)
    # With this scale the residual stream's variance does not depend on depth (GPT-2).
    output_std = INIT_STD / math.sqrt(2 * config.model.layers)
    # A spare block draws the numbers of layers that are on other ranks. Norms stay as they are.
    here, elsewhere = dict(model.blocks.items()), Block(config.model.dim, config.model.heads)
    for layer in range(config.model.layers):
        for name, parameter in here.get(str(layer), elsewhere).named_parameters():
            if parameter.dim() < 2:
                continue
            is_output = name.endswith(("attention_out.weight", "down.weight"))
            parameter.normal_(std=output_std if is_output else INIT_STD, generator=generator)
    for name, parameter in model.sharded_parameters().items():
        draw_rows(parameter, model.shards[name], name, seed, tied=config.model.tied)


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
