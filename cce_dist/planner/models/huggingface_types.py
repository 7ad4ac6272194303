"""The differences between transformers' model types.

For each type: the names of its keys, the traits of all its models, and transformers' defaults for
keys that a file leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_GPT_NEO = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
# transformers' common name of a key -> its name in files of the type.
NAMES = {"gpt2": _GPT2, "gpt_neo": _GPT_NEO}


@dataclass(frozen=True)
class Biases:
    """The parts of a layer that have biases: queries, keys and values; attention's output; MLP."""

    qkv: bool = False
    out: bool = False
    mlp: bool = False


@dataclass(frozen=True, kw_only=True)
class TypeTraits:
    """Traits that all models of a type have; the fields are those of `Model`."""

    gated: bool = True
    norms: int = 2
    norm_weight: bool = True
    norm_bias: bool = False
    biases: Biases = Biases()
    head_bias: bool = False
    qk_norm: bool = False
    qk_norm_heads: bool = False
    query_gate: bool = False
    shared_experts: int = 0
    shared_gate: bool = False
    more_rows: int = 0


_ALL = Biases(qkv=True, out=True, mlp=True)
TRAITS: dict[str, TypeTraits] = {
    "llama": TypeTraits(),
    "mistral": TypeTraits(),
    "ministral": TypeTraits(),
    "ministral3": TypeTraits(),
    "mixtral": TypeTraits(),
    "qwen2": TypeTraits(biases=Biases(qkv=True)),
    "qwen2_vl_text": TypeTraits(biases=Biases(qkv=True)),
    "qwen2_5_vl_text": TypeTraits(biases=Biases(qkv=True)),
    "qwen2_moe": TypeTraits(shared_experts=1, shared_gate=True),
    "qwen3": TypeTraits(qk_norm=True),
    "qwen3_moe": TypeTraits(qk_norm=True),
    "qwen3_5_text": TypeTraits(qk_norm=True, query_gate=True),
    "qwen3_5_moe_text": TypeTraits(
        qk_norm=True, query_gate=True, shared_experts=1, shared_gate=True
    ),
    "gemma": TypeTraits(),
    "gemma2": TypeTraits(norms=4),
    "gemma3_text": TypeTraits(norms=4, qk_norm=True),
    "phi3": TypeTraits(),
    "phi": TypeTraits(gated=False, norms=1, norm_bias=True, biases=_ALL, head_bias=True),
    "gpt2": TypeTraits(gated=False, norm_bias=True, biases=_ALL),
    "gpt_neo": TypeTraits(gated=False, norm_bias=True, biases=Biases(out=True, mlp=True)),
    "gpt_neox": TypeTraits(gated=False, norm_bias=True, biases=_ALL),
    "deepseek_v3": TypeTraits(),
    "olmo": TypeTraits(norm_weight=False),
    # A norm after each half of a layer, none before.
    "olmo2": TypeTraits(qk_norm=True, qk_norm_heads=True),
    "olmo3": TypeTraits(qk_norm=True, qk_norm_heads=True),
    "exaone4": TypeTraits(qk_norm=True),
    "granite": TypeTraits(),
    "glm4": TypeTraits(norms=4),
    "smollm3": TypeTraits(),
    # Attention and MLP run in parallel, after one norm.
    "cohere": TypeTraits(norms=1),
    "starcoder2": TypeTraits(gated=False, norm_bias=True),
    "stablelm": TypeTraits(norm_bias=True),
    # The embedding alone has rows for images.
    "mllama_text_model": TypeTraits(more_rows=8),
}
# Types whose head is tied where the file does not say.
TIED = {"gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "smollm3", "cohere", "starcoder2"}
# Defaults of vocab_size, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size and
# num_key_value_heads. None: transformers has no default; num_key_value_heads is then the number of
# query heads.
_SIZES: dict[str, tuple[int | None, ...]] = {
    "llama": (32000, 4096, 32, 32, 11008, None),
    "mistral": (32000, 4096, 32, 32, 14336, 8),
    "ministral": (32000, 4096, 32, 32, 14336, 8),
    "ministral3": (131072, 4096, 34, 32, 14336, 8),
    "mixtral": (32000, 4096, 32, 32, 14336, 8),
    "qwen2": (151936, 4096, 32, 32, 22016, 32),
    "qwen2_vl_text": (152064, 8192, 80, 64, 29568, 8),
    "qwen2_5_vl_text": (152064, 8192, 80, 64, 29568, 8),
    "qwen2_moe": (151936, 2048, 24, 16, 5632, 16),
    "qwen3": (151936, 4096, 32, 32, 22016, 32),
    "qwen3_moe": (151936, 2048, 24, 32, 6144, 4),
    "qwen3_5_text": (248320, 4096, 32, 16, 12288, 4),
    "qwen3_5_moe_text": (248320, 2048, 40, 16, None, 2),
    "gemma": (256000, 3072, 28, 16, 24576, 16),
    "gemma2": (256000, 2304, 26, 8, 9216, 4),
    # Text configs of Gemma 3's larger models leave out keys that have these values.
    "gemma3_text": (262208, 2304, 26, 8, 9216, 4),
    "phi3": (32064, 3072, 32, 32, 8192, None),
    "phi": (51200, 2048, 24, 32, 8192, None),
    "gpt2": (50257, 768, 12, 12, None, None),
    "gpt_neo": (50257, 2048, 24, 16, None, None),
    "gpt_neox": (50432, 6144, 44, 64, 24576, None),
    "deepseek_v3": (129280, 7168, 61, 128, 18432, 128),
    "olmo": (50304, 4096, 32, 32, 11008, None),
    "olmo2": (50304, 4096, 32, 32, 11008, None),
    "olmo3": (50304, 4096, 32, 32, 11008, None),
    "exaone4": (102400, 4096, 32, 32, 16384, 32),
    "granite": (32000, 4096, 32, 32, 11008, None),
    "glm4": (151552, 4096, 40, 32, 13696, 2),
    "smollm3": (128256, 2048, 36, 16, 11008, 4),
    "cohere": (256000, 8192, 40, 64, 22528, None),
    "starcoder2": (49152, 3072, 30, 24, 12288, 2),
    "stablelm": (50304, 2560, 32, 32, 6912, 32),
    "mllama_text_model": (128256, 4096, 40, 32, 14336, 8),
}
_SIZE_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "num_key_value_heads",
)
_QWEN3_5 = {
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096},
    "ministral": {"sliding_window": 4096},
    "ministral3": {"head_dim": 128},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": {
        **_QWEN3_5,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096},
    "gemma3_text": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 6},
    "gpt2": {"n_positions": 1024},
    "gpt_neo": {"max_position_embeddings": 2048},
    "deepseek_v3": {
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    },
    "olmo3": {"sliding_window": 4096},
    "exaone4": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "glm4": {"head_dim": 128},
}


def _defaults(kind: str) -> dict[str, Any]:
    names = NAMES.get(kind, {})
    sizes = zip(_SIZE_KEYS, _SIZES[kind], strict=True)
    defaults = {names.get(key, key): value for key, value in sizes if value is not None}
    return defaults | _OTHER_DEFAULTS.get(kind, {})


DEFAULTS: dict[str, dict[str, Any]] = {kind: _defaults(kind) for kind in TRAITS}
# Types with a window in all layers but each n-th, for files without layer_types. 0: all layers have
# a window. None: n is the key sliding_window_pattern.
WINDOWS = {"gemma2": 2, "gemma3_text": None, "exaone4": None, "olmo3": 4, "ministral": 0}
LINEAR = ("qwen3_5_text", "qwen3_5_moe_text")
# The key that decides whether a type has biases, its default, and the biases that it decides. All
# other types have the keys attention_bias and mlp_bias.
BIASES: dict[str, tuple[str, bool, Biases]] = {
    "qwen2_moe": ("qkv_bias", True, Biases(qkv=True)),
    "glm4": ("attention_bias", True, Biases(qkv=True)),
    "starcoder2": ("use_bias", True, _ALL),
    "stablelm": ("use_qkv_bias", False, Biases(qkv=True)),
}
# The key that decides whether each head of queries and keys has a norm.
QK_NORMS = {"cohere": "use_qk_norm", "stablelm": "qk_layernorm"}
# Keys that decide in other types whether a bias or a gate exists. In these types transformers does
# not read them: all models of the type have the bias or gate, or another key decides.
UNREAD: dict[str, tuple[str, ...]] = {
    "gpt2": ("attention_bias",),
    "gpt_neo": ("attention_bias",),
    "phi": ("attention_bias",),
    "qwen2": ("attention_bias",),
    "qwen2_moe": ("attention_bias",),
    "qwen2_vl_text": ("attention_bias",),
    "qwen2_5_vl_text": ("attention_bias",),
    "qwen3_5_text": ("attn_output_gate",),
    "qwen3_5_moe_text": ("attn_output_gate",),
    "stablelm": ("attention_bias",),
    "starcoder2": ("attention_bias",),
}
# Types whose heads have hidden_size / num_attention_heads dims; transformers ignores head_dim.
EVEN_HEADS = (
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "mllama_text_model",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "stablelm",
)
# Model type -> the type of its text model, for files whose text_config has no model_type.
TEXT_OF = {
    "gemma3": "gemma3_text",
    "glmasr": "llama",
    "idefics2": "mistral",
    "idefics3": "llama",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "mllama": "mllama_text_model",
    "paligemma": "gemma",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "smolvlm": "llama",
    "voxtral": "llama",
}
# Model type -> defaults of its text_config that replace those of the text model's type.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "glmasr": {
        "vocab_size": 59264,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
    },
    "voxtral": {
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
# Model types whose file may have the text model's keys at the top level.
FLAT = ("qwen2_5_vl", "qwen2_vl")
