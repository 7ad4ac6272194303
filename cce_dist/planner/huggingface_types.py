"""What transformers' model types differ in: what their files call it, what is the same in all
models of a type, and what is taken where a file does not say."""

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
    "mixtral": {},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"shared_experts": 1, "shared_gate": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
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
    "granite": {},
    "glm4": {"norms": 4},
    "smollm3": {},
    # Attention and MLP beside each other, of one norm.
    "cohere": {"norms": 1},
    "starcoder2": {"gated": False, "norm_bias": True},
    "stablelm": {"norm_bias": True},
}
TIED = {"gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neo", "smollm3", "cohere", "starcoder2"}
# Where the file does not say.
DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"head_dim": 128, "num_key_value_heads": 32},
    "qwen3_moe": {"num_key_value_heads": 4},
    "gemma": {"head_dim": 256, "num_key_value_heads": 16},
    "gemma2": {"head_dim": 256, "num_key_value_heads": 4, "sliding_window": 4096},
    # Text configs of Gemma 3's larger models leave out whatever is so.
    "gemma3_text": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
    "deepseek_v3": {
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
    },
    "glm4": {"head_dim": 128, "num_key_value_heads": 2},
    "smollm3": {"num_key_value_heads": 4},
    "starcoder2": {"num_key_value_heads": 2},
    "stablelm": {"num_key_value_heads": 32},
}
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
