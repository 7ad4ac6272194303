"""Models from the config.json of Hugging Face's transformers.

huggingface_types.py has the differences between model types: their keys, and transformers' defaults
for keys that a file leaves out. A key that would change the numbers and is not modelled is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cce_dist.planner.names import read_json

from .huggingface_keys import KeyReader, keys_not_used, require_modelled
from .huggingface_parts import text_model_config
from .huggingface_types import (
    BIASES,
    DEFAULTS,
    EVEN_HEADS,
    LINEAR,
    QK_NORMS,
    TIED,
    TRAITS,
    UNREAD,
    WINDOWS,
    Fields,
)
from .linear_attention import LinearAttention
from .model import Model


class FromConfig(NamedTuple):
    model: Model
    notes: tuple[str, ...]  # sizes that the file leaves out, and keys that are not modelled


def read_config(path: str | Path) -> FromConfig:
    """Reads a model from a config.json, or from a folder with a config.json.

    Raises:
        ValueError: the file is no readable config.json, its model type is unknown, a key is
            missing, or a key has a value that is not modelled.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file, "model must be a readable config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold an object, got {type(config).__name__}")
    return model_from_config(config)


def model_from_config(config: Mapping[str, Any]) -> FromConfig:
    """Makes a model of a config.json's keys.

    Raises:
        ValueError: as `read_config`.
    """
    config, notes = text_model_config(config)
    kind = config.get("model_type")
    if kind not in DEFAULTS:
        raise ValueError(f"model_type must be one of {sorted(DEFAULTS)}, got {kind!r}")
    require_modelled(config, kind)
    keys = KeyReader(config, kind)
    model = Model(**_fields(keys))
    for key in ("quantization_config", "num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if keys.value(key):
            keys.notes.append(f"{key}: not modelled")
    unused = keys_not_used(config, keys.read_keys)
    if unused:
        keys.notes.append(f"not used by the planner: {', '.join(unused)}")
    keys.notes.append("vocab_size: taken for the number of classes, padding included")
    return FromConfig(model, (*notes, *keys.notes))


def _fields(keys: KeyReader) -> Fields:
    """Returns the fields of `Model`; keys are read in the order of their notes."""
    kind = keys.kind
    sizes = keys.sizes(
        heads="num_attention_heads",
        classes="vocab_size",
        dim="hidden_size",
        layers="num_hidden_layers",
    )
    heads, dim, layers = sizes["heads"], sizes["dim"], sizes["layers"]
    tied = bool(keys.value_or_default("tie_word_embeddings", kind in TIED))
    kv_heads = heads if kind in ("gpt2", "gpt_neo", "gpt_neox") else _kv_heads(keys, heads)
    sizes |= {"tied": tied, "kv_heads": kv_heads, "head_dim": _head_dim(keys, dim, heads)}
    sizes["mlp_dim"] = _mlp_dim(keys, dim)
    # Other types compute positions; there the key only bounds the sequence.
    keys.read_keys.add("max_position_embeddings")
    if kind in ("gpt2", "gpt_neo"):
        sizes["positions"] = keys.size("max_position_embeddings")
    fields = TRAITS.get(kind, {}) | sizes | _biases(keys)
    if kind in QK_NORMS and keys.value(QK_NORMS[kind]):
        fields |= {"qk_norm": True, "qk_norm_heads": True}
    # A parallel residual leaves stablelm one norm; gpt_neox keeps two.
    if kind == "stablelm" and keys.value("use_parallel_residual"):
        fields["norms"] = 1
    # True is refused where a type has no such bias.
    if kind in UNREAD and keys.value(UNREAD[kind]) is False:
        keys.notes.append(f"{UNREAD[kind]}: False, which transformers' {kind} does not read")
    attention = _linear(keys, layers) if kind in LINEAR else _window(keys, layers)
    return fields | attention | _experts(keys) | _image_layers(keys)


def _head_dim(keys: KeyReader, dim: int, heads: int) -> int | None:
    value = keys.value("head_dim")
    if keys.kind in EVEN_HEADS:
        if value is not None and value != dim / heads:
            even = f"transformers' {keys.kind} does not read it"
            keys.notes.append(f"head_dim: {value}, but {even}: hidden_size / heads")
        return None
    # A type's default is for files without the key.
    if value or ("head_dim" not in keys.config and "head_dim" in keys.defaults):
        return keys.size("head_dim")
    return None


def _kv_heads(keys: KeyReader, heads: int) -> int:
    key = "num_key_value_heads"
    if key in keys.config and keys.value(key) is None:
        keys.notes.append(f"{key}: null, taken for {heads}, the number of query heads")
        return heads
    return keys.integer_or_default(key, heads, least=1)


def _biases(keys: KeyReader) -> Fields:
    kind = keys.kind
    if kind in BIASES:
        key, default, biases = BIASES[kind]
        return biases if keys.value_or_default(key, default) else {}
    fields: Fields = {}
    bias = keys.value("attention_bias")
    if bias is not None and UNREAD.get(kind) != "attention_bias":
        if kind == "deepseek_v3" and bias:
            raise ValueError(
                f"attention_bias of deepseek_v3 must be false or absent, got {bias!r}: its "
                "biases are not modelled"
            )
        fields = {"qkv_bias": bool(bias), "out_bias": bool(bias)}
    return fields | ({"mlp_bias": True} if keys.value("mlp_bias") else {})


def _mlp_dim(keys: KeyReader, dim: int) -> int:
    if keys.kind in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text", "deepseek_v3"):
        # intermediate_size is that of layers without experts.
        keys.read_keys.add("intermediate_size")
        return keys.size("moe_intermediate_size")
    name = keys.names.get("intermediate_size", "intermediate_size")
    if keys.kind in ("gpt2", "gpt_neo") and keys.value(name) is None:
        keys.notes.append(f"{name}: not in the file, 4 * {dim} as in transformers")
        return 4 * dim
    return keys.size("intermediate_size")


def _window(keys: KeyReader, layers: int) -> Fields:
    kind = keys.kind
    if kind in WINDOWS:
        size = keys.integer_or_zero("sliding_window")
        # Without a window both kinds of layer look back at all tokens.
        keys.read_keys.add("layer_types")
        return {"window": size, "window_every": _window_every(keys, layers) if size else 0}
    unknown = set(keys.value("layer_types") or ()) - {"full_attention"}
    if unknown:
        raise ValueError(
            f"layer_types of {kind} must be 'full_attention' in every layer, got "
            f"{sorted(unknown)}: no other kind is modelled in this type"
        )
    if kind in ("mistral", "ministral3", "mixtral", "phi3", "starcoder2"):
        return {"window": keys.integer_or_zero("sliding_window")}
    if kind == "smollm3":
        keys.notes.append("no_rope_layers: counted as layers with rotary positions")
    elif kind == "gpt_neo":
        types = keys.value("attention_types") or [[["global", "local"], 1]]
        if not isinstance(types[0], list) or types[0][:1] != [["global", "local"]]:
            raise ValueError(
                "attention_types of gpt_neo must alternate 'global' and 'local', got "
                f"{types!r}: other orders are not modelled"
            )
        # The first layer is a global layer.
        size = keys.integer_or_default("window_size", 256)
        return {"window": size, "window_every": 2, "window_offset": 1}
    return {}


def _window_every(keys: KeyReader, layers: int) -> int:
    """Returns n where every n-th layer's attention looks back at all tokens; 0: no layer's."""
    if keys.value("layer_types") is not None:
        return _full_every(keys, layers, "sliding_attention")
    every = WINDOWS[keys.kind]
    if every is None:
        return keys.integer_or_default("sliding_window_pattern", None, least=1)
    except_for = f"but each {every}. " if every else ""
    keys.notes.append(f"layer_types: not in the file, all {except_for}sliding as in transformers")
    return every


def _full_every(keys: KeyReader, layers: int, usual: str) -> int:
    """Returns n where each n-th of layer_types is full attention and the rest are `usual`; 0:
    no layer is full attention."""
    types, full = keys.value("layer_types"), "full_attention"
    every = types.index(full) + 1 if full in types else 0
    rule = [usual if not every or index % every else full for index in range(1, layers + 1)]
    if types != rule:
        raise ValueError(
            f"layer_types of {keys.kind} must be {full!r} for each n-th of {layers} layers and "
            f"{usual!r} for all others, got {types!r}"
        )
    return every


def _linear(keys: KeyReader, layers: int) -> Fields:
    keys.read_keys.add("full_attention_interval")
    if keys.value("layer_types") is None:
        every = keys.size("full_attention_interval")
    else:
        every = _full_every(keys, layers, "linear_attention")
    sizes = keys.sizes(
        key_heads="linear_num_key_heads",
        value_heads="linear_num_value_heads",
        key_dim="linear_key_head_dim",
        value_dim="linear_value_head_dim",
        kernel="linear_conv_kernel_dim",
    )
    linear = LinearAttention(**sizes)
    keys.notes.append("linear attention: time and memory by a formula, not measured")
    return {"linear": linear, "linear_every": every}


def _image_layers(keys: KeyReader) -> Fields:
    if keys.kind != "mllama_text_model":
        return {}
    key, default = "cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38]
    layers = tuple(keys.value_or_default(key, default))
    keys.notes.append(f"{key}: text passes them by; attention to images is not modelled")
    return {"image_layers": layers}


def _experts(keys: KeyReader) -> Fields:
    """Returns the fields of experts, and of deepseek_v3's latent attention."""
    kind = keys.kind
    if kind == "mixtral":
        return keys.sizes(experts="num_local_experts", experts_per_token="num_experts_per_tok")
    if kind == "deepseek_v3":
        experts = keys.sizes(experts="n_routed_experts", experts_per_token="num_experts_per_tok")
        experts["shared_experts"] = keys.integer_or_default("n_shared_experts", 1)
        experts["dense_layers"] = keys.integer_or_default("first_k_dense_replace", 3)
        latent = keys.sizes(
            dense_mlp_dim="intermediate_size",
            head_dim="qk_nope_head_dim",
            rope_dim="qk_rope_head_dim",
            value_dim="v_head_dim",
            kv_rank="kv_lora_rank",
        )
        return experts | latent | {"query_rank": keys.integer_or_zero("q_lora_rank")}
    if kind not in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text"):
        return {}
    experts = keys.sizes(experts="num_experts", experts_per_token="num_experts_per_tok")
    if kind == "qwen3_moe":
        return experts
    return experts | keys.sizes(shared_mlp_dim="shared_expert_intermediate_size")
