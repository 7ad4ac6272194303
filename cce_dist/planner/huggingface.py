"""Models from the config.json of Hugging Face's transformers.

A model type has its own module here only in what differs: which keys it has, and what transformers
takes where one is not in the file. What would change the numbers and is not understood is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .huggingface_keys import keys_not_used, require_modelled
from .models import Model

# Keys of transformers' common names -> those of a type.
_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_GPT_NEO = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}

_ALL_BIASES = {"norm_bias": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
# What is the same in all models of a type.
_FIXED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma": {},
    "gemma2": {"norms": 4, "window_every": 2},
    "phi3": {},
    "phi": {"gated": False, "norms": 1, "head_bias": True, **_ALL_BIASES},
    "gpt2": {"gated": False, **_ALL_BIASES},
    "gpt_neo": {"gated": False, **_ALL_BIASES, "qkv_bias": False},
    "gpt_neox": {"gated": False, **_ALL_BIASES},
    "deepseek_v3": {},
}
_TIED = {"gemma", "gemma2", "gpt2", "gpt_neo"}
# Of a type, where the file does not say; those of transformers.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen3_moe": {"num_key_value_heads": 4},
    "gemma": {"head_dim": 256, "num_key_value_heads": 16},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
    "deepseek_v3": {
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
    },
}


class FromConfig(NamedTuple):
    model: Model
    notes: tuple[str, ...]  # what the file does not say, and what is not modelled


def read_config(path: str | Path) -> FromConfig:
    """A model from a config.json, or from the folder that has one.

    Raises:
        ValueError: not such a file, a model type that is not known, a key that is missing, or one
            that is not understood.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"model must be a readable config.json, got {file}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold an object, got {type(config).__name__}")
    return model_from_config(config)


def model_from_config(config: Mapping[str, Any]) -> FromConfig:
    """Raises ValueError as `read_config`."""
    if "text_config" in config:
        raise ValueError(
            "model_type must be that of a text model, got one with a text_config "
            f"({config.get('model_type')!r}); save that part as a file of its own"
        )
    kind = config.get("model_type")
    if kind not in _FIXED:
        raise ValueError(f"model_type must be one of {sorted(_FIXED)}, got {kind!r}")
    require_modelled(config, str(kind))
    return _Reader(config, str(kind)).read()


class _Reader:
    """Keys of one file, and what it had no word of."""

    def __init__(self, config: Mapping[str, Any], kind: str) -> None:
        self.config, self.kind, self.notes = config, kind, []
        self.read_keys: set[str] = set()
        self.names = {"gpt2": _GPT2, "gpt_neo": _GPT_NEO}.get(kind, {})

    def value(self, key: str) -> Any:
        """None where the file has none."""
        self.read_keys.add(key)
        return self.config.get(key)

    def number(self, key: str) -> int:
        name = self.names.get(key, key)
        value = self.value(name)
        if value is None and name in _DEFAULTS.get(self.kind, {}):
            return int(self.other(name, None))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} of {self.kind} must be an integer >= 1, got {value!r}")
        return value

    def other(self, key: str, default: Any) -> Any:
        """`default`, or that of the type, is noted where the file has no value."""
        value = self.value(key)
        if value is not None:
            return value
        value = _DEFAULTS.get(self.kind, {}).get(key, default)
        self.notes.append(f"{key}: not in the file, {value} as in transformers")
        return value

    def whole(self, key: str, default: Any, *, least: int = 0) -> int:
        """As `other`, an integer."""
        value = self.other(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            rule = f"an integer >= {least}"
            raise ValueError(f"{key} of {self.kind} must be {rule}, got {value!r}")
        return value

    def said(self, key: str) -> int:
        """0 where the file has null, or nothing and the type has no default."""
        has_default = key not in self.config and key in _DEFAULTS.get(self.kind, {})
        return self.whole(key, 0) if has_default or self.value(key) else 0

    def read(self) -> FromConfig:
        kind = self.kind
        heads = self.number("num_attention_heads")
        found: dict[str, Any] = {
            "classes": self.number("vocab_size"),
            "dim": self.number("hidden_size"),
            "layers": self.number("num_hidden_layers"),
            "heads": heads,
            "kv_heads": heads,
            "tied": bool(self.other("tie_word_embeddings", kind in _TIED)),
            **_FIXED[kind],
        }
        if kind not in ("gpt2", "gpt_neo", "gpt_neox"):
            found["kv_heads"] = self._kv_heads(heads)
        if self.value("head_dim") or kind in ("gemma", "gemma2", "qwen3", "qwen3_moe"):
            found["head_dim"] = self.number("head_dim")
        found["mlp_dim"] = self._mlp_dim(found["dim"])
        # Others' are computed, and only bound the sequence.
        self.read_keys.add("max_position_embeddings")
        if kind in ("gpt2", "gpt_neo"):
            found["positions"] = self.number("max_position_embeddings")
        bias = self.value("attention_bias")
        if bias is not None and kind != "qwen2":
            if kind == "deepseek_v3" and bias:
                raise ValueError("attention_bias = True of deepseek_v3 is not understood")
            found["qkv_bias"] = found["out_bias"] = bool(bias)
        if self.value("mlp_bias"):
            found["mlp_bias"] = True
        self._window(found)
        self._experts(found)
        for key in ("quantization_config", "num_nextn_predict_layers"):
            if self.value(key):
                self.notes.append(f"{key}: not modelled")
        unused = keys_not_used(self.config, self.read_keys)
        if unused:
            self.notes.append(f"not used by the planner: {', '.join(unused)}")
        self.notes.append("vocab_size: taken for the number of classes, padding included")
        return FromConfig(Model(**found), tuple(self.notes))

    def _kv_heads(self, heads: int) -> int:
        key = "num_key_value_heads"
        # A type's default is for files without the key.
        if key in self.config and self.value(key) is None:
            self.notes.append(f"{key}: null, taken for {heads}, as many as of queries")
            return heads
        return self.whole(key, heads, least=1)

    def _mlp_dim(self, dim: int) -> int:
        if self.kind in ("qwen3_moe", "deepseek_v3"):
            # intermediate_size is that of layers without experts.
            self.read_keys.add("intermediate_size")
            return self.number("moe_intermediate_size")
        name = self.names.get("intermediate_size", "intermediate_size")
        if self.kind in ("gpt2", "gpt_neo") and self.value(name) is None:
            self.notes.append(f"{name}: not in the file, 4 * {dim} as in transformers")
            return 4 * dim
        return self.number("intermediate_size")

    def _window(self, found: dict[str, Any]) -> None:
        kind = self.kind
        others = set(self.value("layer_types") or ()) - {"full_attention"}
        if others and kind != "gemma2":
            raise ValueError(f"layer_types with {sorted(others)} of {kind} is not understood")
        if kind in ("mistral", "mixtral", "phi3"):
            found["window"] = self.said("sliding_window")
        elif kind == "gemma2":
            found["window"] = self.whole("sliding_window", 4096)
        elif kind == "gpt_neo":
            types = self.value("attention_types") or [[["global", "local"], 1]]
            if types[0][0] != ["global", "local"]:
                raise ValueError(f"attention_types = {types!r} of gpt_neo is not understood")
            found["window"], found["window_every"] = self.whole("window_size", 256), 2

    def _experts(self, found: dict[str, Any]) -> None:
        if self.kind == "mixtral":
            found["experts"] = self.number("num_local_experts")
            found["experts_per_token"] = self.number("num_experts_per_tok")
        elif self.kind == "qwen3_moe":
            found["experts"] = self.number("num_experts")
            found["experts_per_token"] = self.number("num_experts_per_tok")
        elif self.kind == "deepseek_v3":
            found |= {
                "experts": self.number("n_routed_experts"),
                "experts_per_token": self.number("num_experts_per_tok"),
                "shared_experts": self.whole("n_shared_experts", 1),
                "dense_layers": self.whole("first_k_dense_replace", 3),
                "dense_mlp_dim": self.number("intermediate_size"),
                "head_dim": self.number("qk_nope_head_dim"),
                "rope_dim": self.number("qk_rope_head_dim"),
                "value_dim": self.number("v_head_dim"),
                "kv_rank": self.number("kv_lora_rank"),
                "query_rank": self.said("q_lora_rank"),
            }
