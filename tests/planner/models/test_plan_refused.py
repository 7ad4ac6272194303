"""Files of Hugging Face's models that are not understood."""

from __future__ import annotations

from typing import Any

import pytest

from cce_dist.planner.models.huggingface import model_from_config
from tests.planner.models.plan_configs import (
    EXAONE4,
    FULL,
    GEMMA3,
    GPT_NEO,
    GRANITE,
    LINEAR,
    LLAMA_VISION,
    OLMO2,
    QWEN2_MOE,
    QWEN35,
    SLIDING,
    SMALL_LLAMA,
    SMOLLM3,
    TIED,
    VOXTRAL,
    around,
)

# Changes of SMALL_LLAMA's file.
LLAMAS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "mamba"}, r"model_type must be one of .*got 'mamba'"),
    ({"model_type": None}, r"model_type must be one of .*got None"),
    ({"hidden_size": None}, "hidden_size of llama must be an integer >= 1, got None"),
    ({"vocab_size": "many"}, "vocab_size of llama must be an integer >= 1, got 'many'"),
    ({"num_attention_heads": 0}, "num_attention_heads of llama must be an integer >= 1, got 0"),
    ({"text_config": {}}, "text_config of llama must have the model_type of a text model"),
    (
        {"model_type": "qwen2", "use_sliding_window": True},
        "use_sliding_window of qwen2 must be False or None, got True: other",
    ),
    (
        {"layer_types": [FULL, SLIDING]},
        r"of llama must be 'full_.*, got \['sliding_attention'\]: no",
    ),
    (
        {"model_type": "deepseek_v3", "moe_layer_freq": 2},
        "moe_layer_freq of deepseek_v3 must be 1 or None, got 2",
    ),
    ({"num_key_value_heads": "x"}, "num_key_value_heads of llama must be an integer >= 1"),
    (
        {"model_type": "mistral", "sliding_window": "4096"},
        "sliding_window of mistral must be an integer >= 0, got '4096'",
    ),
    ({"num_local_experts": 64}, "num_local_experts of llama .* absent, got 64: .* mixtral alone"),
    ({"sliding_window": 1024}, "sliding_window of llama must be absent, got 1024: the planner"),
    ({"num_key_value_heads": 3}, "kv_heads must divide heads, 8, got 3"),
    ({"mamba_d_state": 16}, "mamba_d_state of llama must be .*, got 16: .* state-space or"),
    ({"cross_attention_layers": [3]}, r"of llama must be absent, got \[3\]: .*cross"),
    ({"is_encoder_decoder": True}, "is_encoder_decoder of llama must be False or"),
    ({"encoder_layers": 6}, "encoder_layers of llama must .* got 6: .* an encoder"),
    ({"v_head_dim": 128}, "v_head_dim of llama must .* for deepseek_v3 alone"),
    ({"model_type": "qwen3", "linear_num_key_heads": 16}, "not model linear attention"),
    ({"model_type": "deepseek_v3", "index_topk": 2048}, "not model sparse or chunked"),
    (
        {"model_type": "mistral", "mlp_bias": True},
        "mlp_bias of mistral must be absent, got True: .* for llama, granite, smollm3 alone",
    ),
    ({"lm_head_bias": True}, "lm_head_bias of llama must be False or None, got True"),
    ({"vision_config": {"depth": 1}}, "of llama must be absent.* a part that is not text"),
]
FILES: list[tuple[dict[str, Any], str]] = [
    (GEMMA3 | {"use_bidirectional_attention": True}, "attention of gemma3_text must be False or"),
    (
        GEMMA3 | {"num_hidden_layers": 4, "layer_types": [FULL, SLIDING, SLIDING, SLIDING]},
        "layer_types of gemma3_text must be 'full_attention' for each n-th of 4 layers and",
    ),
    (GEMMA3 | {"layer_types": [SLIDING] * 3}, "each n-th of 26 layers"),
    (
        GEMMA3 | {"sliding_window_pattern": 0},
        "sliding_window_pattern of gemma3_text must be an integer >= 1, got 0",
    ),
    (OLMO2 | {"sliding_window_pattern": 4}, "window_pattern of olmo2 must be absent, got 4"),
    (OLMO2 | {"use_qk_norm": True}, "use_qk_norm of olmo2 must be absent, got True"),
    (OLMO2 | {"mlp_bias": True}, "mlp_bias of olmo2 must be absent, got True"),
    (GRANITE | {"qk_layernorm": True}, "qk_layernorm of granite must be absent, got True"),
    (GRANITE | {"num_local_experts": 32}, "num_local_experts of granite must be absent, got 32"),
    # Windows in some layers before others, not in all but some.
    (SMOLLM3 | {"use_sliding_window": True}, "use_sliding_window of smollm3 must be False or"),
    (
        SMOLLM3 | {"layer_types": [FULL, SLIDING] * 18},
        r"layer_types of smollm3 must .*got \['sliding_attention",
    ),
    (QWEN2_MOE | {"use_sliding_window": True}, "sliding_window of qwen2_moe must be False or"),
    (QWEN2_MOE | {"mlp_only_layers": [3]}, r"of qwen2_moe must be \[\] or None, got \[3\]"),
    (QWEN2_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step of qwen2_moe must be 1 or"),
    (
        QWEN2_MOE | {"shared_expert_intermediate_size": 0},
        "shared_expert_intermediate_size of qwen2_moe must be an integer >= 1, got 0",
    ),
    (
        QWEN2_MOE | {"model_type": "qwen3_moe", "head_dim": 128},
        "shared_expert_intermediate_size of qwen3_moe must be absent, got 5632",
    ),
    (OLMO2 | {"model_type": "granitemoe"}, r"model_type must be one of .*got 'granitemoe'"),
    (GEMMA3 | {"model_type": "gemma3n_text"}, r"model_type must be .*got 'gemma3n_text'"),
    (around("llava", VOXTRAL | {"model_type": "opt"}), "got 'opt'"),
    (around("somebodys", {}), "text_config of somebodys must have"),
    ({"model_type": "mistral3"}, "text_config of mistral3 must be an object"),
    (around("llava", VOXTRAL) | {"text_config": 3}, "an object, got 3"),
    ({"model_type": "mistral", "attention_bias": True}, "of mistral must be absent"),
    ({"model_type": "phi", "qk_layernorm": True}, "qk_layernorm of phi"),
    ({"model_type": "llama", "attn_output_gate": True}, "of llama must"),
    ({"model_type": "llama", "hidden_size": None}, "got None"),
    (QWEN35 | {"layer_types": [FULL, LINEAR] * 32}, "each n-th of 64"),
    (EXAONE4 | {"layer_types": None}, "must be an integer >= 1"),
    (LLAMA_VISION | TIED, "more_rows must be 0"),
    ({"model_type": "qwen3", "layer_types": [LINEAR]}, "of qwen3 must be 'full_attention'"),
    ({"model_type": ["llama"]}, "model_type must be a string, got "),
    ({"model_type": "llama", "layer_types": -1}, "layer_types of llama must be a list, got -1"),
    (QWEN35 | {"layer_types": 0}, "layer_types of qwen3_5_text must be a list, got 0"),
    (LLAMA_VISION | {"cross_attention_layers": 3}, "must be a list, got 3"),
    (GPT_NEO | {"attention_types": {"global": 1}}, "must be a list, got {"),
    (GPT_NEO | {"attention_types": [3]}, "attention_types of gpt_neo must alternate"),
]


@pytest.mark.parametrize(
    ("config", "message"),
    [(SMALL_LLAMA | change, message) for change, message in LLAMAS] + FILES,
    ids=[message for _, message in LLAMAS + FILES],
)
def test_files_that_are_not_understood_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_from_config(config)
