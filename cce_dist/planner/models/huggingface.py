"""Models from the config.json of Hugging Face's transformers.

huggingface_types.py has the differences between model types: their keys, and transformers' defaults
for keys that a file leaves out. A key that would change the numbers and is not modelled is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .huggingface_keys import KeyReader, keys_not_used, require_modelled
from .huggingface_parts import text_model_config
from .huggingface_types import (
    BIASES,
    EVEN_HEADS,
    LINEAR,
    QK_NORMS,
    TIED,
    TRAITS,
    UNREAD,
    WINDOWS,
    Biases,
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
    try:
        # Some editors write a byte-order mark at the start of a file.
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"model must be a readable config.json, got {file}: {error}") from None
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
    if kind not in TRAITS:
        raise ValueError(f"model_type must be one of {sorted(TRAITS)}, got {kind!r}")
    require_modelled(config, str(kind))
    result = _read(KeyReader(config, str(kind)))
    return FromConfig(result.model, (*notes, *result.notes))


@dataclass(frozen=True)
class _Window:
    """Sliding-window attention; the fields are `Model`'s window, window_every, window_offset."""

    size: int = 0
    every: int = 0
    offset: int = 0


@dataclass(frozen=True)
class _Experts:
    """Experts; `shared` is None where the type's traits decide."""

    count: int = 0
    per_token: int = 0
    shared: int | None = None
    shared_mlp_dim: int = 0
    dense_layers: int = 0
    dense_mlp_dim: int = 0


@dataclass(frozen=True)
class _Latent:
    """Sizes of multi-head latent attention."""

    head_dim: int | None = None
    rope_dim: int = 0
    value_dim: int = 0
    kv_rank: int = 0
    query_rank: int = 0


def _read(keys: KeyReader) -> FromConfig:
    model = _model(keys)
    for key in ("quantization_config", "num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if keys.value(key):
            keys.notes.append(f"{key}: not modelled")
    unused = keys_not_used(keys.config, keys.read_keys)
    if unused:
        keys.notes.append(f"not used by the planner: {', '.join(unused)}")
    keys.notes.append("vocab_size: taken for the number of classes, padding included")
    return FromConfig(model, tuple(keys.notes))


def _model(keys: KeyReader) -> Model:
    kind, traits = keys.kind, TRAITS[keys.kind]
    heads, classes = keys.size("num_attention_heads"), keys.size("vocab_size")
    dim, layers = keys.size("hidden_size"), keys.size("num_hidden_layers")
    tied = bool(keys.value_or_default("tie_word_embeddings", kind in TIED))
    kv_heads = heads
    if kind not in ("gpt2", "gpt_neo", "gpt_neox"):
        kv_heads = _kv_heads(keys, heads)
    head_dim = _head_dim(keys, dim, heads)
    mlp_dim = _mlp_dim(keys, dim)
    # Other types compute positions; there the key only bounds the sequence.
    keys.read_keys.add("max_position_embeddings")
    positions = keys.size("max_position_embeddings") if kind in ("gpt2", "gpt_neo") else 0
    biases = _biases(keys, traits.biases)
    has_qk_norms = kind in QK_NORMS and bool(keys.value(QK_NORMS[kind]))
    norms = _norms(keys, traits.norms)
    _note_unread(keys)
    window = _window(keys, layers)
    linear, linear_every = _linear(keys, layers)
    experts, latent = _experts(keys), _latent(keys)
    return Model(
        classes=classes,
        dim=dim,
        layers=layers,
        mlp_dim=mlp_dim,
        heads=heads,
        kv_heads=kv_heads,
        more_rows=traits.more_rows,
        head_dim=head_dim if latent.head_dim is None else latent.head_dim,
        gated=traits.gated,
        tied=tied,
        norms=norms,
        norm_weight=traits.norm_weight,
        norm_bias=traits.norm_bias,
        qkv_bias=biases.qkv,
        out_bias=biases.out,
        mlp_bias=biases.mlp,
        head_bias=traits.head_bias,
        positions=positions,
        experts=experts.count,
        experts_per_token=experts.per_token,
        shared_experts=traits.shared_experts if experts.shared is None else experts.shared,
        shared_mlp_dim=experts.shared_mlp_dim,
        shared_gate=traits.shared_gate,
        dense_layers=experts.dense_layers,
        dense_mlp_dim=experts.dense_mlp_dim,
        qk_norm=traits.qk_norm or has_qk_norms,
        qk_norm_heads=traits.qk_norm_heads or has_qk_norms,
        window=window.size,
        window_every=window.every,
        window_offset=window.offset,
        kv_rank=latent.kv_rank,
        query_rank=latent.query_rank,
        rope_dim=latent.rope_dim,
        value_dim=latent.value_dim,
        query_gate=traits.query_gate,
        linear=linear,
        linear_every=linear_every,
        image_layers=_image_layers(keys),
    )


def _head_dim(keys: KeyReader, dim: int, heads: int) -> int | None:
    value = keys.value("head_dim")
    if keys.kind in EVEN_HEADS:
        if value is not None and value * heads != dim:
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


def _biases(keys: KeyReader, of_type: Biases) -> Biases:
    kind = keys.kind
    if kind in BIASES:
        key, default, biases = BIASES[kind]
        return biases if keys.value_or_default(key, default) else Biases()
    qkv, out = of_type.qkv, of_type.out
    bias = keys.value("attention_bias")
    if bias is not None and "attention_bias" not in UNREAD.get(kind, ()):
        if kind == "deepseek_v3" and bias:
            raise ValueError(
                f"attention_bias of deepseek_v3 must be false or absent, got {bias!r}: its "
                "biases are not modelled"
            )
        qkv = out = bool(bias)
    return Biases(qkv, out, of_type.mlp or bool(keys.value("mlp_bias")))


def _note_unread(keys: KeyReader) -> None:
    for key in UNREAD.get(keys.kind, ()):
        # True is refused where a type has no such bias.
        if keys.value(key) is False:
            keys.notes.append(f"{key}: False, which transformers' {keys.kind} does not read")


def _norms(keys: KeyReader, of_type: int) -> int:
    # A parallel residual leaves stablelm one norm; gpt_neox keeps two.
    if keys.kind == "stablelm" and keys.value("use_parallel_residual"):
        return 1
    return of_type


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


def _window(keys: KeyReader, layers: int) -> _Window:
    kind = keys.kind
    if kind in WINDOWS:
        size = keys.integer_or_zero("sliding_window")
        # Without a window both kinds of layer look back at all tokens.
        keys.read_keys.add("layer_types")
        return _Window(size, _window_every(keys, layers) if size else 0)
    if kind in LINEAR:
        return _Window()
    unknown = set(keys.value("layer_types") or ()) - {"full_attention"}
    if unknown:
        raise ValueError(
            f"layer_types of {kind} must be 'full_attention' in every layer, got "
            f"{sorted(unknown)}: no other kind is modelled in this type"
        )
    if kind in ("mistral", "ministral3", "mixtral", "phi3", "starcoder2"):
        # Without a window both kinds of layer look back at all tokens.
        keys.read_keys.add("layer_types")
        return _Window(keys.integer_or_zero("sliding_window"))
    if kind == "smollm3":
        keys.notes.append("no_rope_layers: counted as layers with rotary positions")
    elif kind == "gpt_neo":
        types = keys.value("attention_types") or [[["global", "local"], 1]]
        if types[0][0] != ["global", "local"]:
            raise ValueError(
                "attention_types of gpt_neo must alternate 'global' and 'local', got "
                f"{types!r}: other orders are not modelled"
            )
        # The first layer is a global layer.
        return _Window(keys.integer_or_default("window_size", 256), every=2, offset=1)
    return _Window()


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


def _linear(keys: KeyReader, layers: int) -> tuple[LinearAttention | None, int]:
    """Returns `Model`'s linear and linear_every."""
    if keys.kind not in LINEAR:
        return None, 0
    keys.read_keys.add("full_attention_interval")
    if keys.value("layer_types") is None:
        every = keys.size("full_attention_interval")
    else:
        every = _full_every(keys, layers, "linear_attention")
    linear = LinearAttention(
        key_heads=keys.size("linear_num_key_heads"),
        value_heads=keys.size("linear_num_value_heads"),
        key_dim=keys.size("linear_key_head_dim"),
        value_dim=keys.size("linear_value_head_dim"),
        kernel=keys.size("linear_conv_kernel_dim"),
    )
    keys.notes.append("linear attention: time and memory by a formula, not measured")
    return linear, every


def _image_layers(keys: KeyReader) -> tuple[int, ...]:
    if keys.kind != "mllama_text_model":
        return ()
    key, default = "cross_attention_layers", [3, 8, 13, 18, 23, 28, 33, 38]
    layers = tuple(keys.value_or_default(key, default))
    keys.notes.append(f"{key}: text passes them by; attention to images is not modelled")
    return layers


def _experts(keys: KeyReader) -> _Experts:
    if keys.kind == "mixtral":
        return _Experts(keys.size("num_local_experts"), keys.size("num_experts_per_tok"))
    if keys.kind in ("qwen2_moe", "qwen3_moe", "qwen3_5_moe_text"):
        count, per_token = keys.size("num_experts"), keys.size("num_experts_per_tok")
        if keys.kind == "qwen3_moe":
            return _Experts(count, per_token)
        shared_mlp_dim = keys.size("shared_expert_intermediate_size")
        return _Experts(count, per_token, shared_mlp_dim=shared_mlp_dim)
    if keys.kind == "deepseek_v3":
        return _Experts(
            count=keys.size("n_routed_experts"),
            per_token=keys.size("num_experts_per_tok"),
            shared=keys.integer_or_default("n_shared_experts", 1),
            dense_layers=keys.integer_or_default("first_k_dense_replace", 3),
            dense_mlp_dim=keys.size("intermediate_size"),
        )
    return _Experts()


def _latent(keys: KeyReader) -> _Latent:
    if keys.kind != "deepseek_v3":
        return _Latent()
    return _Latent(
        head_dim=keys.size("qk_nope_head_dim"),
        rope_dim=keys.size("qk_rope_head_dim"),
        value_dim=keys.size("v_head_dim"),
        kv_rank=keys.size("kv_lora_rank"),
        query_rank=keys.integer_or_zero("q_lora_rank"),
    )
