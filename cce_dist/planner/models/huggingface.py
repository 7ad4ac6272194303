"""Models from the config.json of Hugging Face's transformers.

What differs between types is in huggingface_types.py: which keys one has, and what transformers
takes where one is not in the file. What would change the numbers and is not understood is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .huggingface_keys import HARMLESS_OF, keys_not_used, require_modelled
from .huggingface_parts import text_part
from .huggingface_types import (
    BIASES,
    DEFAULTS,
    EVEN_HEADS,
    FIXED,
    LINEAR,
    NAMES,
    QK_NORMS,
    TIED,
    UNREAD,
    WINDOWS,
)
from .linear_attention import LinearAttention
from .model import Model


class FromConfig(NamedTuple):
    model: Model
    notes: tuple[str, ...]  # sizes that the file does not say, and keys that are not modelled


def read_config(path: str | Path) -> FromConfig:
    """Reads a model from a config.json, or from the folder that has one.

    Raises:
        ValueError: not such a file, a model type that is not known, a key that is missing, or one
            that is not understood.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        # Some editors begin a file with a byte-order mark.
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"model must be a readable config.json, got {file}: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold an object, got {type(config).__name__}")
    return model_from_config(config)


def model_from_config(config: Mapping[str, Any]) -> FromConfig:
    """Raises ValueError as `read_config`."""
    config, notes = text_part(config)
    kind = config.get("model_type")
    if kind not in FIXED:
        raise ValueError(f"model_type must be one of {sorted(FIXED)}, got {kind!r}")
    require_modelled(config, str(kind))
    result = _Reader(config, str(kind)).read()
    return FromConfig(result.model, (*notes, *result.notes))


class _Reader:
    """Keys of one file, and what it had no word of."""

    def __init__(self, config: Mapping[str, Any], kind: str) -> None:
        self.config, self.kind, self.notes = config, kind, []
        self.read_keys = set(HARMLESS_OF.get(kind, ()))
        self.names = NAMES.get(kind, {})
        self.defaults = DEFAULTS.get(kind, {})

    def value(self, key: str) -> Any:
        """Returns a key's value; None where the file has none."""
        self.read_keys.add(key)
        return self.config.get(key)

    def number(self, key: str) -> int:
        name = self.names.get(key, key)
        value = self.value(name)
        # A type's default is for files without the key.
        if name not in self.config and name in self.defaults:
            return int(self.other(name, None))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} of {self.kind} must be an integer >= 1, got {value!r}")
        return value

    def other(self, key: str, default: Any) -> Any:
        """Returns a key's value; else notes and returns `default`, or the default of the type."""
        value = self.value(key)
        if value is not None:
            return value
        value = self.defaults.get(key, default)
        self.notes.append(f"{key}: not in the file, {value} as in transformers")
        return value

    def whole(self, key: str, default: Any, *, least: int = 0) -> int:
        """Returns `other`, an integer."""
        value = self.other(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            rule = f"an integer >= {least}"
            raise ValueError(f"{key} of {self.kind} must be {rule}, got {value!r}")
        return value

    def said(self, key: str) -> int:
        """Returns 0 where the file has null, or nothing and the type has no default."""
        has_default = key not in self.config and key in self.defaults
        return self.whole(key, 0) if has_default or self.value(key) else 0

    def read(self) -> FromConfig:
        kind = self.kind
        heads = self.number("num_attention_heads")
        sizes: dict[str, Any] = {
            "classes": self.number("vocab_size"),
            "dim": self.number("hidden_size"),
            "layers": self.number("num_hidden_layers"),
            "heads": heads,
            "kv_heads": heads,
            "tied": bool(self.other("tie_word_embeddings", kind in TIED)),
            **FIXED[kind],
        }
        if kind not in ("gpt2", "gpt_neo", "gpt_neox"):
            sizes["kv_heads"] = self._kv_heads(heads)
        self._head_dim(sizes)
        sizes["mlp_dim"] = self._mlp_dim(sizes["dim"])
        # Others' are computed, and only bound the sequence.
        self.read_keys.add("max_position_embeddings")
        if kind in ("gpt2", "gpt_neo"):
            sizes["positions"] = self.number("max_position_embeddings")
        self._biases(sizes)
        self._norms(sizes)
        self._unread()
        self._window(sizes)
        self._linear(sizes)
        self._experts(sizes)
        if kind == "mllama_text_model":
            self._image_layers(sizes)
        for key in ("quantization_config", "num_nextn_predict_layers", "mtp_num_hidden_layers"):
            if self.value(key):
                self.notes.append(f"{key}: not modelled")
        unused = keys_not_used(self.config, self.read_keys)
        if unused:
            self.notes.append(f"not used by the planner: {', '.join(unused)}")
        self.notes.append("vocab_size: taken for the number of classes, padding included")
        return FromConfig(Model(**sizes), tuple(self.notes))

    def _head_dim(self, sizes: dict[str, Any]) -> None:
        value = self.value("head_dim")
        if self.kind in EVEN_HEADS:
            if value is not None and value * sizes["heads"] != sizes["dim"]:
                even = f"transformers' {self.kind} does not read it"
                self.notes.append(f"head_dim: {value}, but {even}: hidden_size / heads")
        # A type's default is for files without the key.
        elif value or ("head_dim" not in self.config and "head_dim" in self.defaults):
            sizes["head_dim"] = self.number("head_dim")

    def _kv_heads(self, heads: int) -> int:
        key = "num_key_value_heads"
        if key in self.config and self.value(key) is None:
            self.notes.append(f"{key}: null, taken for {heads}, as many as of queries")
            return heads
        return self.whole(key, heads, least=1)

    def _biases(self, sizes: dict[str, Any]) -> None:
        kind = self.kind
        if kind in BIASES:
            key, default, biases = BIASES[kind]
            sizes |= dict.fromkeys(biases, bool(self.other(key, default)))
            return
        bias = self.value("attention_bias")
        if bias is not None and "attention_bias" not in UNREAD.get(kind, ()):
            if kind == "deepseek_v3" and bias:
                raise ValueError("attention_bias = True of deepseek_v3 is not understood")
            sizes["qkv_bias"] = sizes["out_bias"] = bool(bias)
        if self.value("mlp_bias"):
            sizes["mlp_bias"] = True

    def _unread(self) -> None:
        for key in UNREAD.get(self.kind, ()):
            # True is refused where a type has no such bias.
            if self.value(key) is False:
                self.notes.append(f"{key}: False, which transformers' {self.kind} does not read")

    def _norms(self, sizes: dict[str, Any]) -> None:
        if self.kind in QK_NORMS and self.value(QK_NORMS[self.kind]):
            sizes["qk_norm"] = sizes["qk_norm_heads"] = True
        # gpt_neox has two norms with it, too.
        if self.kind == "stablelm" and self.value("use_parallel_residual"):
            sizes["norms"] = 1

    def _mlp_dim(self, dim: int) -> int:
        if self.kind in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v3"):
            # intermediate_size is that of layers without experts.
            self.read_keys.add("intermediate_size")
            return self.number("moe_intermediate_size")
        name = self.names.get("intermediate_size", "intermediate_size")
        if self.kind in ("gpt2", "gpt_neo") and self.value(name) is None:
            self.notes.append(f"{name}: not in the file, 4 * {dim} as in transformers")
            return 4 * dim
        return self.number("intermediate_size")

    def _window(self, sizes: dict[str, Any]) -> None:
        kind = self.kind
        if kind in WINDOWS:
            sizes["window"] = self.said("sliding_window")
            # Without a window both kinds of layer look back at all tokens.
            self.read_keys.add("layer_types")
            sizes["window_every"] = self._window_every(sizes["layers"]) if sizes["window"] else 0
            return
        if kind in LINEAR:
            return
        others = set(self.value("layer_types") or ()) - {"full_attention"}
        if others:
            raise ValueError(f"layer_types with {sorted(others)} of {kind} is not understood")
        if kind in ("mistral", "ministral3", "mixtral", "phi3", "starcoder2"):
            sizes["window"] = self.said("sliding_window")
            # Without a window both kinds of layer look back at all tokens.
            self.read_keys.add("layer_types")
        elif kind == "smollm3":
            self.notes.append("no_rope_layers: counted as layers with rotary positions")
        elif kind == "gpt_neo":
            types = self.value("attention_types") or [[["global", "local"], 1]]
            if types[0][0] != ["global", "local"]:
                raise ValueError(f"attention_types = {types!r} of gpt_neo is not understood")
            sizes |= {"window": self.whole("window_size", 256), "window_every": 2}
            # The first layer is a global one.
            sizes["window_offset"] = 1

    def _window_every(self, layers: int) -> int:
        """Returns n where every n-th layer's attention looks back at all tokens; 0: no layer's."""
        if self.value("layer_types") is not None:
            return self._full_every(layers, "sliding_attention")
        every = WINDOWS[self.kind]
        if every is None:
            return self.whole("sliding_window_pattern", None, least=1)
        which = f"but each {every}. " if every else ""
        self.notes.append(f"layer_types: not in the file, all {which}sliding as in transformers")
        return every

    def _full_every(self, layers: int, other: str) -> int:
        """Returns n where each n-th of layer_types is full attention and all others are `other`; 0:
        none."""
        types, full = self.value("layer_types"), "full_attention"
        every = types.index(full) + 1 if full in types else 0
        rule = [other if not every or index % every else full for index in range(1, layers + 1)]
        if types != rule:
            raise ValueError(
                f"layer_types of {self.kind} must be {full!r} for each n-th of {layers} layers and "
                f"{other!r} for all others, got {types!r}"
            )
        return every

    def _linear(self, sizes: dict[str, Any]) -> None:
        if self.kind not in LINEAR:
            return
        self.read_keys.add("full_attention_interval")
        if self.value("layer_types") is None:
            sizes["linear_every"] = self.number("full_attention_interval")
        else:
            sizes["linear_every"] = self._full_every(sizes["layers"], "linear_attention")
        sizes["linear"] = LinearAttention(
            key_heads=self.number("linear_num_key_heads"),
            value_heads=self.number("linear_num_value_heads"),
            key_dim=self.number("linear_key_head_dim"),
            value_dim=self.number("linear_value_head_dim"),
            kernel=self.number("linear_conv_kernel_dim"),
        )
        self.notes.append("linear attention: time and memory by a formula, not measured")

    def _image_layers(self, sizes: dict[str, Any]) -> None:
        key, usual = "cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38]
        sizes["image_layers"] = tuple(self.other(key, usual))
        self.notes.append(f"{key}: text passes them by; attention to images is not modelled")

    def _experts(self, sizes: dict[str, Any]) -> None:
        if self.kind == "mixtral":
            sizes["experts"] = self.number("num_local_experts")
            sizes["experts_per_token"] = self.number("num_experts_per_tok")
        elif self.kind in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text"):
            sizes["experts"] = self.number("num_experts")
            sizes["experts_per_token"] = self.number("num_experts_per_tok")
            if self.kind != "qwen3_moe":
                sizes["shared_mlp_dim"] = self.number("shared_expert_intermediate_size")
        elif self.kind == "deepseek_v3":
            sizes |= {
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
