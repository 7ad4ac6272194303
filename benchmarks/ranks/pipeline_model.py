"""Stages of a decoder whose head gets the input of a trained model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks.megatron_model import Sizes
from cce_dist.train.model.decoder import INIT_STD, rotary_table, rotate


class Layer(nn.Module):
    """A decoder layer: RMSNorm, rotary positions, grouped queries, gated MLP, no bias.

    Its attention is torch's fused one.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        inner, outer = sizes.heads * sizes.head_dim, sizes.query_groups * sizes.head_dim
        self.attention_norm, self.mlp_norm = nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)
        self.qkv = nn.Linear(sizes.dim, inner + 2 * outer, bias=False)
        self.attention_out = nn.Linear(inner, sizes.dim, bias=False)
        self.gate_up = nn.Linear(sizes.dim, 2 * sizes.mlp_dim, bias=False)
        self.down = nn.Linear(sizes.mlp_dim, sizes.dim, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        heads, groups = self.sizes.heads, self.sizes.query_groups
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (heads + 2 * groups, -1))
        q, k, v = qkv.transpose(1, 2).split((heads, groups, groups), dim=1)
        q, k = rotate(q, rotary), rotate(k, rotary)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attention_out(y.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class ReplacedOutput(torch.autograd.Function):
    """Replacement of `x` by `final`, whose gradient goes to `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, final: Tensor) -> Tensor:
        return final.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class StageModule(nn.Module):
    """A stage's layers; the first stage has the embedding before them, the last a norm after them.

    On the last stage, `final` [batch, sequence, dim] replaces the norm's output.
    """

    def __init__(
        self,
        sizes: Sizes,
        layers: int,
        sequence: int,
        *,
        embedding: nn.Module | None,
        final: Tensor | None,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(layers))
        self.norm = None if final is None else nn.RMSNorm(sizes.dim)
        self.final = final
        cos, sin = rotary_table(sequence, sizes.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin))
        if self.norm is not None:
            assert self.final is not None
            x = ReplacedOutput.apply(self.norm(x), self.final)  # pyright: ignore[reportAssignmentType]
        return x


@torch.no_grad()
def initialize(module: StageModule) -> None:
    for parameter in module.layers.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=INIT_STD)


def even_layout(layers: int, stages: int) -> list[int]:
    """Returns the layers of each stage; the first stages take one more if some are left over."""
    each, remainder = divmod(layers, stages)
    return [each + (stage < remainder) for stage in range(stages)]


def relayout(layers: int, stages: int, layer: float, head: float) -> list[int]:
    """Returns each stage's layers, with fewer on the last stage, which has the head.

    The layout minimises the longest stage; of several such layouts it is the most even.

    Args:
        layer, head: times of one layer and of the head, in any unit.
    """

    def longest(last: int) -> tuple[float, int]:
        others = -(-(layers - last) // (stages - 1))
        return max(last * layer + head, others * layer), -last

    most = layers // stages
    last = min(range(min(1, most), most + 1), key=longest)
    return [*even_layout(layers - last, stages - 1), last]
