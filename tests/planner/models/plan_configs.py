"""A config.json of each type of model, with its number of parameters."""

from __future__ import annotations

from typing import Any

NOT_USED = "not used by the planner: "
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

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


def config_of(
    kind: str,
    rows: int | None,
    layers: int,
    dim: int,
    mlp: int | None,
    heads: int | None,
    kv: int | None,
    **others: Any,
) -> dict[str, Any]:
    """A file with these sizes but those that are None, and other keys."""
    sizes = {
        "vocab_size": rows,
        "num_hidden_layers": layers,
        "hidden_size": dim,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }
    present = {key: value for key, value in sizes.items() if value is not None}
    return {"model_type": kind, **present, **others}


def around(kind: str, text: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The file of a model that has `text` as a part."""
    return {"model_type": kind, "text_config": text, "vision_config": {"depth": 2}, **others}


TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
# Sizes of a small model; of those that are published.
SMALL_LLAMA = config_of("llama", 1000, 4, 64, 160, 8, 2) | UNTIED
LLAMA = config_of("llama", 128256, 32, 4096, 14336, 32, 8) | UNTIED
MISTRAL = LLAMA | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}
MIXTRAL = LLAMA | {"model_type": "mixtral", "vocab_size": 32000}
MIXTRAL |= {"num_local_experts": 8, "num_experts_per_tok": 2}
# As it is on the hub, with what transformers has written beside it.
LLAMA_31: dict[str, Any] = LLAMA | {
    "_name_or_path": "somewhere",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
}
SMOLLM2 = (
    LLAMA_31
    | config_of("llama", 49152, 30, 576, 1536, 9, 3, head_dim=None)
    | {"is_llama_config": True, "rope_interleaved": False}
    | TIED
)
QWEN25 = config_of("qwen2", 151936, 24, 896, 4864, 14, 2) | TIED
QWEN25 |= {"max_position_embeddings": 32768, "max_window_layers": 24, "sliding_window": 32768}
QWEN25 |= {"use_mrope": False, "use_sliding_window": False}
PHI3 = config_of("phi3", 32064, 40, 5120, 17920, 40, 10, sliding_window=2047)
PHI4_MINI = config_of("phi3", 200064, 32, 3072, 8192, 24, 8, sliding_window=262144) | TIED
PHI4_MINI |= dict.fromkeys(("attention_bias", "lm_head_bias", "mlp_bias"), False)
PHI4_MINI |= {"partial_rotary_factor": 0.75, "resid_pdrop": 0.0}
QWEN2 = config_of("qwen2", 152064, 28, 3584, 18944, 28, 4, sliding_window=131072) | UNTIED
QWEN3 = LLAMA | {"model_type": "qwen3", "num_hidden_layers": 36, "vocab_size": 151936}
QWEN3_MOE = config_of("qwen3_moe", 151936, 48, 2048, 6144, 32, 4, head_dim=128) | UNTIED
QWEN3_MOE |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3_MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
QWEN2_MOE = config_of("qwen2_moe", 151936, 24, 2048, 5632, 16, 16, sliding_window=32768) | UNTIED
QWEN2_MOE |= {"moe_intermediate_size": 1408, "num_experts": 60, "num_experts_per_tok": 4}
QWEN2_MOE |= {"shared_expert_intermediate_size": 5632, "max_window_layers": 21}
QWEN2_MOE |= {"decoder_sparse_step": 1, "norm_topk_prob": False, "use_sliding_window": False}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None}
GPT2 |= {"n_positions": 1024, "vocab_size": 50257}
GPT_NEO = {"model_type": "gpt_neo", "hidden_size": 2048, "num_layers": 24, "num_heads": 16}
GPT_NEO |= {"intermediate_size": None, "max_position_embeddings": 2048, "vocab_size": 50257}
GPT_NEO |= {"attention_types": [[["global", "local"], 12]], "window_size": 256}
DEEPSEEK = config_of("deepseek_v3", 129280, 61, 7168, 18432, 128, 128) | UNTIED
DEEPSEEK |= {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1}
DEEPSEEK |= {"num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1}
DEEPSEEK |= {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128}
DEEPSEEK |= {"qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False}
DEEPSEEK |= {"num_nextn_predict_layers": 1}
GEMMA2 = config_of("gemma2", 256000, 26, 2304, 9216, 8, 4, head_dim=256, sliding_window=4096)
GEMMA3 = config_of("gemma3_text", 262144, 26, 1152, 6912, 4, 1, head_dim=256, sliding_window=512)
GEMMA3 |= {"attn_logit_softcapping": None, "final_logit_softcapping": None}
GEMMA3 |= {"query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "sliding_window_pattern": 6}
# Of the file of a model with images: what it leaves out is the type's default.
GEMMA3_4B = config_of("gemma3_text", None, 34, 2560, 10240, None, None, sliding_window=1024)
GRANITE = config_of("granite", 49155, 40, 2048, 8192, 32, 8, attention_bias=False) | TIED
GRANITE |= {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
GRANITE |= {"mlp_bias": False, "residual_multiplier": 0.22}
SMOLLM3 = config_of("smollm3", 128256, 36, 2048, 11008, 16, 4, layer_types=[FULL] * 36)
SMOLLM3 |= {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9}
SMOLLM3 |= {"sliding_window": None, "use_sliding_window": False}
STARCODER2 = config_of("starcoder2", 49152, 30, 3072, 12288, 24, 2, sliding_window=4096)
STARCODER2 |= {"mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm"}
STARCODER2 |= {"use_bias": True}
STABLELM = config_of("stablelm", 50304, 32, 2560, 6912, 32, 32, use_qkv_bias=False)
STABLELM2 = config_of("stablelm", 100352, 40, 5120, 13824, 32, 8, use_parallel_residual=True)
STABLELM2 |= {"qk_layernorm": True}
OLMO2 = config_of("olmo2", 100352, 32, 4096, 11008, 32, 32, attention_bias=False)
OLMO3 = config_of("olmo3", 100278, 32, 4096, 11008, 32, 32, attention_bias=False)
EXAONE4 = config_of("exaone4", 102400, 64, 5120, 27392, 40, 8, head_dim=128, sliding_window=4096)
EXAONE4 |= {"layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 16, "sliding_window_pattern": "LLLG"}
EXAONE4_SMALL = config_of("exaone4", 102400, 30, 2048, 4096, 32, 8, head_dim=64) | TIED
EXAONE4_SMALL |= {"layer_types": [FULL] * 30, "sliding_window": None}
MISTRAL_SMALL = config_of("mistral", 131072, 40, 5120, 32768, 32, 8, head_dim=128)
MISTRAL_SMALL |= {"sliding_window": None}
MINISTRAL3 = config_of("ministral3", 131072, 26, 3072, 9216, 32, 8, head_dim=128) | TIED
MINISTRAL3 |= {"sliding_window": None}
QWEN_VL = config_of("qwen2_5_vl", 152064, 28, 3584, 18944, 28, 4, sliding_window=32768) | UNTIED
QWEN_VL |= {"use_sliding_window": False}
QWEN35 = config_of("qwen3_5_text", 248320, 64, 5120, 17408, 24, 4, head_dim=256)
QWEN35 |= {"attn_output_gate": True, "full_attention_interval": 4, "linear_num_value_heads": 48}
QWEN35 |= {"mamba_ssm_dtype": "float32", "mlp_only_layers": [], "mtp_num_hidden_layers": 1}
QWEN35_MOE = config_of("qwen3_5_moe_text", None, 60, 4096, None, 32, 2, linear_num_value_heads=64)
QWEN35_MOE |= {"moe_intermediate_size": 1024, "num_experts": 512, "num_experts_per_tok": 10}
QWEN35_MOE |= {"shared_expert_intermediate_size": 1024}
LLAMA_VISION = config_of("mllama_text_model", 128256, 40, 4096, 14336, 32, 8)
LLAMA_VISION |= {"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}
LLAMA_VISION_90B = config_of("mllama_text_model", 128256, 100, 8192, 28672, 64, 8)
LLAMA_VISION_90B |= {"cross_attention_layers": list(range(3, 100, 5))}
VOXTRAL = config_of("llama", 131072, 30, 3072, 8192, 32, 8, head_dim=128)

# By sizes as they are published; parameters of the text model.
FILES: dict[str, tuple[dict[str, Any], int]] = {
    "llama": (LLAMA, 8_030_261_248),
    "llama 3.1": (LLAMA_31, 8_030_261_248),
    "gemma2": (GEMMA2, 2_614_341_888),
    "gemma": (config_of("gemma", 256000, 18, 2048, 16384, 8, 1), 2_506_172_416),
    "mistral": (MISTRAL, 7_241_732_096),
    "mixtral": (MIXTRAL, 46_702_792_704),
    "qwen2": (QWEN2 | {"use_sliding_window": False}, 7_615_616_512),
    "qwen3": (QWEN3 | {"intermediate_size": 12288, "head_dim": 128}, 8_190_735_360),
    "qwen3_moe": (QWEN3_MOE, 30_532_122_624),
    "phi": (config_of("phi", 51200, 24, 2048, 8192, 32, None), 1_418_270_720),
    "phi3": (PHI3, 13_960_238_080),
    "gpt2": (GPT2, 124_439_808),
    "gpt_neo": (GPT_NEO, 1_315_575_808),
    "gpt_neox": (config_of("gpt_neox", 50304, 16, 2048, 8192, 8, None) | UNTIED, 1_011_781_632),
    "deepseek_v3": (DEEPSEEK, PARAMETERS["deepseek-v3"]),
    "smollm2-135m": (SMOLLM2, 134_515_008),
    "qwen2.5-0.5b": (QWEN25, 494_032_768),
    "phi4-mini": (PHI4_MINI, 3_836_021_760),
    "olmo-7b": (config_of("olmo", 50304, 32, 4096, 11008, 32, 32, clip_qkv=None), 6_888_095_744),
    "olmo2-7b": (OLMO2, 7_298_617_344),
    "olmo2-32b": (config_of("olmo2", 100352, 64, 5120, 27648, 40, 8), 32_234_279_936),
    "granite-2b": (GRANITE, 2_533_531_648),
    "gemma3-1b": (GEMMA3, 999_885_952),
    "gemma3-4b": (GEMMA3_4B, 3_880_263_168),
    "glm4-9b": (config_of("glm4", 151552, 40, 4096, 13696, 32, 2, head_dim=128), 9_400_279_040),
    "smollm3-3b": (SMOLLM3, 3_075_098_624),
    "command-r": (
        config_of("cohere", 256000, 40, 8192, 22528, 64, 64, logit_scale=0.0625),
        34_980_831_232,
    ),
    "command-r-plus": (
        config_of("cohere", 256000, 64, 12288, 33792, 96, 8, use_qk_norm=True),
        103_810_674_688,
    ),
    "starcoder2-3b": (STARCODER2, 3_030_371_328),
    "stablelm-3b": (STABLELM, 2_795_443_200),
    "stablelm2-12b": (STABLELM2, 12_143_185_920),
    "qwen1.5-moe": (QWEN2_MOE, 14_315_784_192),
    "ministral3-3b": (around("mistral3", MINISTRAL3) | TIED, 3_429_006_336),
    "ministral3-8b": ({"model_type": "ministral3"}, 8_489_553_920),
    "mistral-small-3.1": (around("mistral3", MISTRAL_SMALL), 23_572_403_200),
    "exaone4-32b": (EXAONE4, 32_003_216_384),
    "exaone4-1.2b": (EXAONE4_SMALL, 1_279_391_488),
    "olmo3-7b": (OLMO3, 7_298_011_136),
    "olmo3-32b": (config_of("olmo3", 100278, 64, 5120, 27648, 40, 8), 32_233_522_176),
    "qwen2.5-vl-7b": (QWEN_VL | {"vision_config": {"depth": 32}}, 7_615_616_512),
    "qwen3.5-9b": (around("qwen3_5", {}), 8_953_803_264),
    "qwen3.5-27b": (around("qwen3_5", QWEN35) | UNTIED, 26_895_998_464),
    "qwen3.5-35b-a3b": ({"model_type": "qwen3_5_moe_text"}, 34_660_610_688),
    "qwen3.5-397b-a17b": (around("qwen3_5_moe", QWEN35_MOE), 396_346_350_336),
    "llama3.2-vision-11b": (around("mllama", LLAMA_VISION), 9_775_192_080),
    "llama3.2-vision-90b": (around("mllama", LLAMA_VISION_90B), 87_666_865_192),
    "voxtral-mini": (around("voxtral", VOXTRAL, audio_config={}), 4_014_136_320),
    # What a text_config leaves out is the whole model's default, not llama's.
    "voxtral-mini by defaults": (around("voxtral", {"model_type": "llama"}), 4_014_136_320),
    # Without 256 numbers that correct the router of each of 58 layers.
    "deepseek-v3 by defaults": ({"model_type": "deepseek_v3"}, 671_026_404_352),
}
