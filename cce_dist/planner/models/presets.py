"""Models by name, from their public configurations."""

from __future__ import annotations

import re
from dataclasses import replace

from cce_dist.planner.names import nearest_name

from .model import PAPER, Model

_GEMMA2_2B = Model(
    classes=256000,
    dim=2304,
    layers=26,
    mlp_dim=9216,
    heads=8,
    kv_heads=4,
    head_dim=256,
    tied=True,
    norms=4,
    window=4096,
    window_every=2,
)
_LLAMA3_8B = Model(classes=128256, dim=4096, layers=32, mlp_dim=14336, heads=32, kv_heads=8)
_QWEN25_7B = Model(
    classes=151665,
    rows=152064,
    dim=3584,
    layers=28,
    mlp_dim=18944,
    heads=28,
    kv_heads=4,
    qkv_bias=True,
)

MODELS: dict[str, Model] = {
    "gemma2-2b": _GEMMA2_2B,
    "gemma2-9b": replace(_GEMMA2_2B, dim=3584, layers=42, mlp_dim=14336, heads=16, kv_heads=8),
    "gemma2-27b": replace(
        _GEMMA2_2B, dim=4608, layers=46, mlp_dim=36864, heads=32, kv_heads=16, head_dim=128
    ),
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": replace(_LLAMA3_8B, dim=8192, layers=80, mlp_dim=28672, heads=64),
    "qwen2.5-7b": _QWEN25_7B,
    "qwen2.5-72b": replace(_QWEN25_7B, dim=8192, layers=80, mlp_dim=29568, heads=64, kv_heads=8),
    "qwen3-8b": Model(
        classes=151669,
        rows=151936,
        dim=4096,
        layers=36,
        mlp_dim=12288,
        heads=32,
        kv_heads=8,
        head_dim=128,
        qk_norm=True,
    ),
    "mistral-7b": Model(classes=32000, dim=4096, layers=32, mlp_dim=14336, heads=32, kv_heads=8),
    "mistral-nemo": Model(
        classes=131072, dim=5120, layers=40, mlp_dim=14336, heads=32, kv_heads=8, head_dim=128
    ),
    "mixtral-8x7b": Model(
        classes=32000,
        dim=4096,
        layers=32,
        mlp_dim=14336,
        heads=32,
        kv_heads=8,
        experts=8,
        experts_per_token=2,
    ),
    # Without its layer of multi-token prediction.
    "deepseek-v3": Model(
        classes=129280,
        dim=7168,
        layers=61,
        mlp_dim=2048,
        heads=128,
        kv_heads=128,
        head_dim=128,
        experts=256,
        experts_per_token=8,
        shared_experts=1,
        dense_layers=3,
        dense_mlp_dim=18432,
        kv_rank=512,
        query_rank=1536,
        rope_dim=64,
        value_dim=128,
    ),
}


def _plain(name: str) -> str:
    """Spells "Gemma 2 (27B)" and "gemma2-27b" alike."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def model_names() -> list[str]:
    """Lists the presets, then the paper's models that are no presets."""
    known = {_plain(name) for name in MODELS}
    return [*MODELS, *(name for name in PAPER if _plain(name) not in known)]


def find_model(name: str) -> Model:
    """Finds a preset; case, spaces, hyphens and parentheses of the name do not matter.

    Raises:
        ValueError: no preset has this name.
    """
    for presets in (MODELS, PAPER):
        for preset, model in presets.items():
            if _plain(preset) == _plain(name):
                return model
    raise ValueError(
        f"model must be a config.json or one of {model_names()}, got {name!r}, which is neither "
        f"a file nor a preset{nearest_name(name, model_names())}"
    )
