"""Models by name, from their public configurations."""

from __future__ import annotations

import re
from typing import Any

from cce_dist.planner.names import nearest_name

from .model import Model

_GEMMA2 = {"tied": True, "norms": 4, "window": 4096, "window_every": 2}
_PLAIN = {"gated": False, "norm_bias": True, "out_bias": True, "mlp_bias": True}
_GPT2 = _PLAIN | {"tied": True, "qkv_bias": True, "positions": 1024, "buffers": 12 * 1024**2}
_GPT_NEO = _PLAIN | {"tied": True, "positions": 2048}
# Without its layer of multi-token prediction.
_DEEPSEEK_V3 = (
    {"experts": 256, "experts_per_token": 8, "shared_experts": 1}
    | {"dense_layers": 3, "dense_mlp_dim": 18432, "kv_rank": 512, "query_rank": 1536}
    | {"head_dim": 128, "rope_dim": 64, "value_dim": 128}
)
_SIZES = ("classes", "dim", "layers", "mlp_dim", "heads", "kv_heads")
# Values of _SIZES, then other fields. The last nine are of Cut Cross-Entropy's Table A3.
_PRESETS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "gemma2-2b": ((256000, 2304, 26, 9216, 8, 4), _GEMMA2 | {"head_dim": 256}),
    "gemma2-9b": ((256000, 3584, 42, 14336, 16, 8), _GEMMA2 | {"head_dim": 256}),
    "gemma2-27b": ((256000, 4608, 46, 36864, 32, 16), _GEMMA2 | {"head_dim": 128}),
    "llama3-8b": ((128256, 4096, 32, 14336, 32, 8), {}),
    "llama3-70b": ((128256, 8192, 80, 28672, 64, 8), {}),
    "qwen2.5-7b": ((151665, 3584, 28, 18944, 28, 4), {"rows": 152064, "qkv_bias": True}),
    "qwen2.5-72b": ((151665, 8192, 80, 29568, 64, 8), {"rows": 152064, "qkv_bias": True}),
    "qwen3-8b": (
        (151669, 4096, 36, 12288, 32, 8),
        {"rows": 151936, "head_dim": 128, "qk_norm": True},
    ),
    "mistral-7b": ((32000, 4096, 32, 14336, 32, 8), {}),
    "mistral-nemo": ((131072, 5120, 40, 14336, 32, 8), {"head_dim": 128}),
    "mixtral-8x7b": ((32000, 4096, 32, 14336, 32, 8), {"experts": 8, "experts_per_token": 2}),
    "deepseek-v3": ((129280, 7168, 61, 2048, 128, 128), _DEEPSEEK_V3),
    "GPT2": ((50257, 768, 12, 3072, 12, 12), _GPT2),
    "GPT Neo (1.3B)": ((50257, 2048, 24, 8192, 16, 16), _GPT_NEO | {"buffers": 12 * 2048**2}),
    "GPT Neo (2.7B)": ((50257, 2560, 32, 10240, 20, 20), _GPT_NEO | {"buffers": 16 * 2048**2}),
    "Gemma (2B)": ((256000, 2048, 18, 16384, 8, 1), {"head_dim": 256, "tied": True}),
    "Llama 2 (13B)": ((32000, 5120, 40, 13824, 40, 40), {}),
    "Llama 2 (7B)": ((32000, 4096, 32, 11008, 32, 32), {}),
    "Phi 1.5": (
        (50295, 2048, 24, 8192, 32, 32),
        _PLAIN | {"rows": 51200, "norms": 1, "qkv_bias": True, "head_bias": True},
    ),
    "Phi3 Medium": ((32011, 5120, 40, 17920, 40, 10), {"rows": 32064}),
    "Qwen1.5 (7B)": ((151646, 4096, 32, 11008, 32, 32), {"rows": 151936, "qkv_bias": True}),
}
MODELS: dict[str, Model] = {
    name: Model(**dict(zip(_SIZES, sizes, strict=True)), **fields)
    for name, (sizes, fields) in _PRESETS.items()
}


def _plain(name: str) -> str:
    """Spells "Gemma 2 (27B)" and "gemma2-27b" alike."""
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def find_model(name: str) -> Model:
    """Finds a preset; case, spaces, hyphens and parentheses of the name do not matter.

    Raises:
        ValueError: no preset has this name.
    """
    for preset, model in MODELS.items():
        if _plain(preset) == _plain(name):
            return model
    raise ValueError(
        f"model must be a config.json or one of {list(MODELS)}, got {name!r}, which is neither "
        f"a file nor a preset{nearest_name(name, MODELS)}"
    )
