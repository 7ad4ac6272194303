"""A config.json of each type of model, with its number of parameters."""

from __future__ import annotations

from typing import Any

# What their owners publish.
PARAMETERS = {
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    # 671,026,419,200 with 256 numbers that correct the router of each of 58 layers.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
    "GPT2": 124_439_808,
    "GPT Neo (1.3B)": 1_315_575_808,
    "GPT Neo (2.7B)": 2_651_307_520,
    "Gemma (2B)": 2_506_172_416,
    "Llama 2 (13B)": 13_015_864_320,
    "Llama 2 (7B)": 6_738_415_616,
    "Phi 1.5": 1_418_270_720,
    "Phi3 Medium": 13_960_238_080,
    "Qwen1.5 (7B)": 7_721_324_544,
}

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
# From the files, without what has no bearing here.
FILES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": (LLAMA, 8_030_261_248),
    "gemma2": (
        {
            "model_type": "gemma2",
            "hidden_size": 2304,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "intermediate_size": 9216,
            "head_dim": 256,
            "vocab_size": 256000,
            "sliding_window": 4096,
        },
        2_614_341_888,
    ),
    "gemma": (
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "intermediate_size": 16384,
            "vocab_size": 256000,
        },
        2_506_172_416,
    ),
    "mistral": (
        LLAMA | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096},
        7_241_732_096,
    ),
    "mixtral": (
        LLAMA
        | {
            "model_type": "mixtral",
            "vocab_size": 32000,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        46_702_792_704,
    ),
    "qwen2": (
        {
            "model_type": "qwen2",
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
            "use_sliding_window": False,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
        },
        7_615_616_512,
    ),
    "qwen3": (
        LLAMA
        | {
            "model_type": "qwen3",
            "num_hidden_layers": 36,
            "intermediate_size": 12288,
            "head_dim": 128,
            "vocab_size": 151936,
        },
        8_190_735_360,
    ),
    "qwen3_moe": (
        {
            "model_type": "qwen3_moe",
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        30_532_122_624,
    ),
    "phi": (
        {
            "model_type": "phi",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "intermediate_size": 8192,
            "vocab_size": 51200,
        },
        1_418_270_720,
    ),
    "phi3": (
        {
            "model_type": "phi3",
            "hidden_size": 5120,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "intermediate_size": 17920,
            "vocab_size": 32064,
            "sliding_window": 2047,
        },
        13_960_238_080,
    ),
    "gpt2": (
        {
            "model_type": "gpt2",
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
        124_439_808,
    ),
    "gpt_neo": (
        {
            "model_type": "gpt_neo",
            "hidden_size": 2048,
            "num_layers": 24,
            "num_heads": 16,
            "intermediate_size": None,
            "max_position_embeddings": 2048,
            "attention_types": [[["global", "local"], 12]],
            "window_size": 256,
            "vocab_size": 50257,
        },
        1_315_575_808,
    ),
    "gpt_neox": (
        {
            "model_type": "gpt_neox",
            "hidden_size": 2048,
            "num_hidden_layers": 16,
            "num_attention_heads": 8,
            "intermediate_size": 8192,
            "vocab_size": 50304,
            "tie_word_embeddings": False,
        },
        1_011_781_632,
    ),
    "deepseek_v3": (
        {
            "model_type": "deepseek_v3",
            "hidden_size": 7168,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "moe_layer_freq": 1,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "vocab_size": 129280,
            "attention_bias": False,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
        },
        PARAMETERS["deepseek-v3"],
    ),
}
