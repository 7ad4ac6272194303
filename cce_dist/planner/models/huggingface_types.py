"""The differences between transformers' model types.

For each type: the names of its keys, the traits of all its models, and transformers' defaults for
keys that a file leaves out.
"""

from __future__ import annotations

from typing import Any

# Fields of `Model`.
Fields = dict[str, Any]

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

_QKV: Fields = {"qkv_bias": True}
_ALL: Fields = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
_PLAIN: Fields = {"gated": False, "norm_bias": True}
_QK_NORM: Fields = {"qk_norm": True}
_SHARED: Fields = {"shared_experts": 1, "shared_gate": True}
# Fields that are the same in all models of a type. Types without such fields are left out.
TRAITS: dict[str, Fields] = {
    "qwen2": _QKV,
    "qwen2_vl_text": _QKV,
    "qwen2_5_vl_text": _QKV,
    "qwen2_moe": _SHARED,
    "qwen3": _QK_NORM,
    "qwen3_moe": _QK_NORM,
    "qwen3_5_text": _QK_NORM | {"query_gate": True},
    "qwen3_5_moe_text": _QK_NORM | {"query_gate": True} | _SHARED,
    "gemma2": {"norms": 4},
    "gemma3_text": _QK_NORM | {"norms": 4},
    "phi": _PLAIN | _ALL | {"norms": 1, "head_bias": True},
    "gpt2": _PLAIN | _ALL,
    "gpt_neo": _PLAIN | {"out_bias": True, "mlp_bias": True},
    "gpt_neox": _PLAIN | _ALL,
    "olmo": {"norm_weight": False},
    # A norm after each half of a layer, none before.
    "olmo2": _QK_NORM | {"qk_norm_heads": True},
    "olmo3": _QK_NORM | {"qk_norm_heads": True},
    "exaone4": _QK_NORM,
    "glm4": {"norms": 4},
    # Attention and MLP run in parallel, after one norm.
    "cohere": {"norms": 1},
    "starcoder2": _PLAIN,
    "stablelm": {"norm_bias": True},
    # The embedding alone has rows for images.
    "mllama_text_model": {"more_rows": 8},
}
# Types whose head is tied where the file does not say.
TIED = {"gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "smollm3", "cohere", "starcoder2"}
_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "num_key_value_heads"),
)
# Defaults of _SIZE_KEYS. None: transformers has no default; num_key_value_heads is then the number
# of query heads.
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
_WINDOW = {"sliding_window": 4096}
_QWEN3_5 = (
    {"head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
    | {"linear_num_key_heads": 16, "linear_key_head_dim": 128}
    | {"linear_num_value_heads": 32, "linear_value_head_dim": 128}
)
_OTHER_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": _WINDOW,
    "ministral": _WINDOW,
    "ministral3": {"head_dim": 128},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": (
        {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4}
    ),
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": (
        _QWEN3_5
        | {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
        | {"num_experts": 256, "num_experts_per_tok": 8}
    ),
    "gemma": {"head_dim": 256},
    "gemma2": _WINDOW | {"head_dim": 256},
    "gemma3_text": _WINDOW | {"head_dim": 256, "sliding_window_pattern": 6},
    "gpt2": {"n_positions": 1024},
    "gpt_neo": {"max_position_embeddings": 2048},
    "deepseek_v3": (
        {"moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8}
        | {"n_shared_experts": 1, "first_k_dense_replace": 3}
        | {"q_lora_rank": 1536, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    ),
    "olmo3": _WINDOW,
    "exaone4": _WINDOW | {"sliding_window_pattern": 4},
    "glm4": {"head_dim": 128},
}


def _defaults(kind: str) -> dict[str, Any]:
    names = NAMES.get(kind, {})
    sizes = zip(_SIZE_KEYS, _SIZES[kind], strict=True)
    defaults = {names.get(key, key): value for key, value in sizes if value is not None}
    return defaults | _OTHER_DEFAULTS.get(kind, {})


# Model type -> transformers' defaults; its keys are the types that can be read.
DEFAULTS: dict[str, dict[str, Any]] = {kind: _defaults(kind) for kind in _SIZES}
# Types with a window in all layers but each n-th, for files without layer_types. 0: all layers have
# a window. None: n is the key sliding_window_pattern.
WINDOWS = {"gemma2": 2, "gemma3_text": None, "exaone4": None, "olmo3": 4, "ministral": 0}
LINEAR = ("qwen3_5_text", "qwen3_5_moe_text")
# The key that decides whether a type has biases, its default, and the biases that it decides. All
# other types have the keys attention_bias and mlp_bias.
BIASES: dict[str, tuple[str, bool, Fields]] = {
    "qwen2_moe": ("qkv_bias", True, _QKV),
    "glm4": ("attention_bias", True, _QKV),
    "starcoder2": ("use_bias", True, _ALL),
    "stablelm": ("use_qkv_bias", False, _QKV),
}
# The key that decides whether each head of queries and keys has a norm.
QK_NORMS = {"cohere": "use_qk_norm", "stablelm": "qk_layernorm"}
_VL = ("qwen2_vl_text", "qwen2_5_vl_text")
# The key that decides in other types whether a bias or a gate exists. In these types transformers
# does not read it: all models of the type have the bias or gate, or another key decides.
UNREAD: dict[str, str] = {
    **dict.fromkeys(LINEAR, "attn_output_gate"),
    **dict.fromkeys(("gpt2", "gpt_neo", "phi", "qwen2", "qwen2_moe", *_VL), "attention_bias"),
    **dict.fromkeys(("stablelm", "starcoder2"), "attention_bias"),
}
# Types whose heads have hidden_size / num_attention_heads dims; transformers ignores head_dim.
EVEN_HEADS = ("gpt2", "gpt_neo", "gpt_neox", "mllama_text_model", "stablelm", *_VL)
# Model types whose file may have the text model's keys at the top level.
FLAT = ("qwen2_5_vl", "qwen2_vl")
# Model type -> the type of its text model, for files whose text_config has no model_type.
TEXT_OF = (
    dict.fromkeys(("glmasr", "idefics3", "llava", "llava_next", "smolvlm", "voxtral"), "llama")
    | {kind: f"{kind}_text" for kind in ("gemma3", *FLAT, "qwen3_5", "qwen3_5_moe")}
    | {"idefics2": "mistral", "mistral3": "mistral", "paligemma": "gemma"}
    | {"mllama": "mllama_text_model"}
)
# Model type -> defaults of its text_config that replace those of the text model's type.
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "glmasr": dict(zip(_SIZE_KEYS, (59264, 2048, 28, 16, 6144, 4), strict=True)),
    "voxtral": (
        {"vocab_size": 131072, "hidden_size": 3072, "intermediate_size": 8192}
        | {"num_hidden_layers": 30, "num_key_value_heads": 8, "head_dim": 128}
    ),
}
