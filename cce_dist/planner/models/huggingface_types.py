"""The differences between transformers' model types: their keys' names, the constants of a type,
and the defaults where a file does not say."""

from __future__ import annotations

from typing import Any

_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}
_GPT_NEO = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}
# Keys of transformers' common names -> those of a type.
NAMES = {"gpt2": _GPT2, "gpt_neo": _GPT_NEO}

_ALL_BIASES = {"norm_bias": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
FIXED: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral": {},
    "ministral3": {},
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen2_vl_text": {"qkv_bias": True},
    "qwen2_5_vl_text": {"qkv_bias": True},
    "qwen2_moe": {"shared_experts": 1, "shared_gate": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "qwen3_5_text": {"qk_norm": True, "query_gate": True},
    "qwen3_5_moe_text": {
        "qk_norm": True,
        "query_gate": True,
        "shared_experts": 1,
        "shared_gate": True,
    },
    "gemma": {},
    "gemma2": {"norms": 4},
    "gemma3_text": {"norms": 4, "qk_norm": True},
    "phi3": {},
    "phi": {"gated": False, "norms": 1, "head_bias": True, **_ALL_BIASES},
    "gpt2": {"gated": False, **_ALL_BIASES},
    "gpt_neo": {"gated": False, **_ALL_BIASES, "qkv_bias": False},
    "gpt_neox": {"gated": False, **_ALL_BIASES},
    "deepseek_v3": {},
    "olmo": {"norm_weight": False},
    # Norms after each half of a layer, none before.
    "olmo2": {"qk_norm": True, "qk_norm_heads": True},
    "olmo3": {"qk_norm": True, "qk_norm_heads": True},
    "exaone4": {"qk_norm": True},
    "granite": {},
    "glm4": {"norms": 4},
    "smollm3": {},
    # Attention and MLP beside each other, of one norm.
    "cohere": {"norms": 1},
    "starcoder2": {"gated": False, "norm_bias": True},
    "stablelm": {"norm_bias": True},
    # Rows for images, in the embedding alone.
    "mllama_text_model": {"more_rows": 8},
}
TIED = {"gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "smollm3", "cohere", "starcoder2"}
# Where the file does not say: vocab_size, hidden_size, num_hidden_layers, num_attention_heads,
# intermediate_size, num_key_value_heads; None: as many as of queries, or none.
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
    # Text configs of Gemma 3's larger models leave out whatever is so.
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
_MORE_DEFAULTS: dict[str, dict[str, Any]] = {
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
    return defaults | _MORE_DEFAULTS.get(kind, {})


DEFAULTS: dict[str, dict[str, Any]] = {kind: _defaults(kind) for kind in FIXED}
# Types with a window in all layers but each n-th (0: in all), where layer_types does not say; None:
# sliding_window_pattern does.
WINDOWS = {"gemma2": 2, "gemma3_text": None, "exaone4": None, "olmo3": 4, "ministral": 0}
LINEAR = ("qwen3_5_text", "qwen3_5_moe_text")
# The key that decides of biases, what it is without one, and which biases; other types have
# attention_bias and mlp_bias.
BIASES: dict[str, tuple[str, bool, tuple[str, ...]]] = {
    "qwen2_moe": ("qkv_bias", True, ("qkv_bias",)),
    "glm4": ("attention_bias", True, ("qkv_bias",)),
    "starcoder2": ("use_bias", True, ("qkv_bias", "out_bias", "mlp_bias")),
    "stablelm": ("use_qkv_bias", False, ("qkv_bias",)),
}
# The key that gives each head of queries and keys a norm.
QK_NORMS = {"cohere": "use_qk_norm", "stablelm": "qk_layernorm"}
# Keys that decide of a bias or a gate in other types, and that transformers does not read in these:
# all models of the type have it, or another key decides.
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
# Types whose heads are hidden_size / num_attention_heads wide, whatever head_dim says.
EVEN_HEADS = (
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "mllama_text_model",
    "qwen2_vl_text",
    "qwen2_5_vl_text",
    "stablelm",
)
# Text models that transformers takes where a text_config has no model_type, by the model with it.
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
# What transformers takes of a text_config in place of the text model's own defaults.
PART_DEFAULTS: dict[str, dict[str, Any]] = {
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
# Models whose file may have the text model's keys beside the other parts.
FLAT = ("qwen2_5_vl", "qwen2_vl")
