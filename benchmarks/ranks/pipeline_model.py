"""Stages of a decoder whose head gets the input of a trained model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ranks.megatron_model import HeadInput, Sizes
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

    @property
    def parameters_of_a_layer(self) -> int:
        return sum(parameter.numel() for parameter in self.layers[0].parameters())

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, (self.cos, self.sin))
        if self.norm is not None:
            assert self.final is not None
            x = HeadInput.apply(self.norm(x), self.final)  # pyright: ignore[reportAssignmentType]
        return x


@torch.no_grad()
def initialize(module: StageModule) -> None:
    for parameter in module.layers.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=INIT_STD)


def layout_of(layers: int, stages: int, last: int | None) -> list[int]:
    """Returns the layers of each stage; the first stages take one more if some are left over.

    Args:
        last: layers of the last stage; None: an even share.
    Raises:
        ValueError: there are fewer than two stages, or a stage would have no layer.
    """
    fixed = [] if last is None else [last]
    each, remainder = divmod(layers - sum(fixed), max(1, stages - len(fixed)))
    if stages < 2 or min([each, *fixed]) < 1:
        raise ValueError(
            f"there must be at least 2 ranks, each with a layer, got {stages} ranks and {layers} "
            f"layers, last_layers={last}"
        )
    return [each + (stage < remainder) for stage in range(stages - len(fixed))] + fixed
