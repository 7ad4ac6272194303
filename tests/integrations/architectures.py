"""Tiny models of transformers' architectures, made from configurations alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VOCAB_SIZE = 311

_USUAL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
_ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16}
_MLA = {
    **_ROUTED,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": None,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}
_GEMMA = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
_GEMMA |= {"num_kv_shared_layers": 0}
# Model type -> what its configuration has beside the usual keys; None: it has no such key.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama4_text": {"num_local_experts": 2, "intermediate_size_mlp": 48},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "qwen3": {},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
    "gemma": {},
    "gemma2": {"final_logit_softcapping": 5.0},
    "gemma3_text": {"final_logit_softcapping": 5.0},
    "phi": {},
    "phi3": {},
    "phimoe": {**_EXPERTS, "num_local_experts": 4},
    "mistral": {"sliding_window": 8},
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "gpt2": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4},
    "gpt_neox": {},
    "gptj": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    "gpt_bigcode": {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "gpt_oss": {**_EXPERTS, "num_local_experts": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {"head_dim": None, "num_key_value_heads": None},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {**_EXPERTS, "logits_scaling": 4.0, "num_local_experts": 4},
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25},
    "olmo2": {},
    "olmoe": {**_EXPERTS, "num_experts": 4},
    "starcoder2": {},
    "stablelm": {},
    "smollm3": {},
    "glm4": {},
    "glm4_moe": {**_ROUTED, "num_experts_per_tok": 2},
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "minimax": {**_EXPERTS, "num_local_experts": 4},
    "mamba2": {"state_size": 4, "num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 4,
        "lm_head_multiplier": 0.5,
    },
    "nemotron": {},
    "ernie4_5": {},
    "exaone4": {},
    "apertus": {},
    "bitnet": {},
    "persimmon": {},
    "bert": {"is_decoder": True},
    "minicpm3": {**_MLA, "dim_model_base": 8},
    "hyperclovax": {"logits_scaling": 0.25},
    "nanochat": {"final_logit_softcapping": 5.0},
    "recurrent_gemma": {"logits_soft_cap": 5.0, "lru_width": 32, "num_hidden_layers": 3},
    "gemma3n_text": {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]},
    # With 32 its own fp32 rounding is larger than the bound.
    "gemma4_text": {**_GEMMA, "final_logit_softcapping": 5.0, "hidden_size": 64},
    "vaultgemma": {"final_logit_softcapping": 5.0},
    "granitemoehybrid": {
        **_EXPERTS,
        **{"num_local_experts": 4, "logits_scaling": 4.0, "layer_types": ["mamba", "attention"]},
        **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 4, "mamba_chunk_size": 8},
    },
    "jamba": {
        **{**_EXPERTS, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
        **{"mamba_d_state": 4, "use_mamba_kernels": False},
    },
    "qwen3_next": {
        **{**_EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
        **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
        **{"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        **{"shared_expert_intermediate_size": 16},
    },
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4, "moe_intermediate_size": 16},
    "jetmoe": {**_EXPERTS, "num_local_experts": 4, "kv_channels": 8},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def make(model_type: str, **changes: Any) -> Any:
    """Returns a model in fp32, in training, with random weights, also of norms and biases, and
    without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**_USUAL, **ARCHITECTURES[model_type], **changes}
    config = AutoConfig.for_model(model_type, **{k: v for k, v in values.items() if v is not None})
    torch.manual_seed(0)
    return prepared(AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def prepared(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model.train()


def batch(seed: int = 0, size: int = 2, length: int = 17) -> dict[str, Tensor]:
    """Returns input_ids and labels, of which the first four of each row are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB_SIZE, (size, length), generator=generator)
    labels = ids.clone()
    labels[:, :4] = -100
    return {"input_ids": ids, "labels": labels}
