"""Keys of a config.json by their meaning to a plan.

A key is read, or refused with a value that changes the computation and is not modelled, or known
not to matter to memory and FLOPs. A note names every other key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .huggingface_types import DEFAULTS, LINEAR, NAMES

# Keys that are refused, unless they have one of these values, which change nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "moe_layer_freq": (1, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention"), (False, None)),
    **dict.fromkeys(("use_sliding_window", "use_bidirectional_attention"), (False, None)),
    **dict.fromkeys(("attention_out_bias", "lm_head_bias"), (False, None)),
}
_QWEN_MOE = "qwen2_moe qwen3_moe qwen3_5_moe_text"
# Keys that change the numbers, and the types for which they are modelled. Types with the key
# use_sliding_window, which REFUSED has, never use sliding_window.
_KEYS_OF_TYPES = {
    "num_local_experts": "mixtral",
    "num_experts": _QWEN_MOE,
    "n_routed_experts n_shared_experts": "deepseek_v3",
    "moe_intermediate_size": f"{_QWEN_MOE} deepseek_v3",
    "shared_expert_intermediate_size": "qwen2_moe qwen3_5_moe_text",
    "kv_lora_rank q_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim": "deepseek_v3",
    "sliding_window": "mistral ministral ministral3 mixtral exaone4 olmo3 phi3 starcoder2 gemma2 "
    "gemma3_text qwen2 qwen2_vl_text qwen2_5_vl_text qwen2_moe qwen3 qwen3_moe smollm3",
    "sliding_window_pattern": "gemma3_text exaone4",
    "window_size attention_types": "gpt_neo",
    "mlp_bias": "llama granite smollm3",
    "use_qk_norm": "cohere",
    "qk_layernorm": "stablelm",
    "attn_output_gate": "qwen3_5_text qwen3_5_moe_text",
    "attention_bias": "llama qwen2 qwen2_vl_text qwen2_5_vl_text qwen3 qwen3_moe qwen3_5_text "
    "qwen3_5_moe_text gemma gemma2 gemma3_text phi gpt_neox deepseek_v3 olmo olmo2 olmo3 granite "
    "glm4 smollm3 cohere",
}
KEYS_OF_TYPES = {
    key: kinds.split() for keys, kinds in _KEYS_OF_TYPES.items() for key in keys.split()
}
# Topics of _UNMODELLED that are modelled in some types.
_MODELLED = {"linear attention": LINEAR, "cross attention": ("mllama_text_model",)}
# Topic -> keys of models that have it. A model here has it only in the types of _MODELLED.
_UNMODELLED = {
    "state-space or recurrent layers": "ssm_cfg ssm_state_size state_size conv_kernel conv1d_width "
    "lru_width mamba_d_conv mamba_d_state mamba_expand mamba_n_heads mamba_num_heads",
    "layers of several kinds": "attn_layer_indices attn_layer_offset attn_layer_period block_types "
    "expert_layer_offset expert_layer_period hybrid_override_pattern interleave_moe_layer_step "
    "layers_block_type",
    "linear attention": "full_attention_interval linear_conv_kernel_dim linear_key_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_value_head_dim",
    "sparse or chunked attention": "attention_chunk_size index_head_dim index_n_heads index_topk "
    "sparse_attention",
    "cross attention": "cross_attention_hidden_size cross_attention_layers",
    "an encoder": "decoder_layers encoder_ffn_dim encoder_layers num_decoder_layers",
    "a part that is not text": "audio_config vision_config",
    "experts by other names": "moe_num_experts n_experts num_shared_experts "
    "shared_intermediate_size",
    "layers that share or add inputs": "altup_num_inputs hidden_size_per_layer_input laurel_rank "
    "num_kv_shared_layers num_loops total_ut_steps word_embed_proj_dim",
    "norms of queries and keys": "qk_norm",
}
_TOPIC_OF = {key: topic for topic, keys in _UNMODELLED.items() for key in keys.split()}

# Keys, by topic, that change no modelled size or time.
_HARMLESS_TOPICS = {
    "names": "architectures auto_map finetuning_task id2label label2id model_type name_or_path "
    "prefix problem_type task_specific_params tokenizer_class transformers_version "
    "is_llama_config unsloth_fixed unsloth_version",
    "dtypes and how it is run": "attn_implementation dtype gradient_checkpointing "
    "output_attentions output_hidden_states output_router_logits output_scores pretraining_tp "
    "output_past reorder_and_upcast_attn return_dict return_dict_in_generate tf_legacy_loss "
    "torch_dtype torchscript use_bfloat16 use_cache cache_implementation chunk_size_feed_forward",
    "numerics": "activation_function hidden_act hidden_activation initializer_factor "
    "initializer_range layer_norm_eps layer_norm_epsilon query_pre_attn_scalar rms_norm_eps "
    "scale_attn_by_inverse_layer_idx scale_attn_weights use_parallel_residual",
    "positions that are computed": "original_max_position_embeddings partial_rotary_factor "
    "rope_interleave rope_interleaved rope_local_base_freq rope_parameters rope_scaling rope_theta "
    "rotary_emb_base rotary_pct use_mrope",
    "which experts": "aux_loss_alpha ep_size n_group norm_topk_prob routed_scaling_factor "
    "router_aux_loss_coef router_jitter_noise scoring_func seq_aux topk_group topk_method",
    "said by other keys": "attention_layers is_decoder max_window_layers n_ctx qk_head_dim "
    "tie_encoder_decoder pruned_heads",
    "generation": "bad_words_ids diversity_penalty do_sample early_stopping "
    "exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size "
    "num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty "
    "suppress_tokens temperature top_k top_p typical_p",
}
_HARMLESS = {key for keys in _HARMLESS_TOPICS.values() for key in keys.split()}
_HARMLESS_ENDS = ("_token_id", "_dropout", "_dropout_prob", "_pdrop")
_HARMLESS_STARTS = ("_", "summary_", "encoder_no_repeat_", "begin_suppress_", "forced_")
# Keys that change no modelled size or time in files of one type.
HARMLESS_OF = {
    "cohere": "logit_scale",
    "granite": "attention_multiplier embedding_multiplier logits_scaling residual_multiplier",
    "olmo": "clip_qkv",
    "qwen3_5_text": "mamba_ssm_dtype mlp_only_layers mtp_use_dedicated_embeddings",
    "qwen3_5_moe_text": "mamba_ssm_dtype mtp_use_dedicated_embeddings",
    "smollm3": "no_rope_layer_interval no_rope_layers",
    # transformers reads norm_epsilon alone of these.
    "starcoder2": "attention_softmax_in_fp32 mlp_type norm_epsilon norm_type "
    "scale_attention_softmax_in_fp32",
}


LISTS = ("attention_types", "cross_attention_layers", "layer_types")


def require_modelled(config: Mapping[str, Any], kind: str) -> None:
    """Checks that the planner models what the keys say of the model.

    Raises:
        ValueError: a key has a value that is not modelled; the message names both.
    """
    for key in LISTS:
        if config.get(key) is not None and not isinstance(config[key], list | tuple):
            raise ValueError(f"{key} of {kind} must be a list, got {config[key]!r}")
    for key, harmless in REFUSED.items():
        if key in config and config[key] not in harmless:
            allowed = " or ".join(map(repr, harmless))
            raise ValueError(
                f"{key} of {kind} must be {allowed}, got {config[key]!r}: other values are not "
                "modelled"
            )
    for key, kinds in KEYS_OF_TYPES.items():
        if config.get(key) and kind not in kinds:
            raise ValueError(
                f"{key} of {kind} must be absent, got {config[key]!r}: the planner models it for "
                f"{', '.join(kinds)} alone"
            )
    for key, value in config.items():
        topic = _TOPIC_OF.get(key)
        if value and topic is not None and kind not in _MODELLED.get(topic, ()):
            raise ValueError(
                f"{key} of {kind} must be absent, got {value!r}: the planner does not model {topic}"
            )


def keys_not_used(config: Mapping[str, Any], read: Iterable[str]) -> list[str]:
    """Lists the keys of a file that were not read and may matter; a key of null does not."""
    absent = (key for key in _TOPIC_OF if not config.get(key))
    known = {*read, *REFUSED, *KEYS_OF_TYPES, *absent, *_HARMLESS}
    return sorted(
        key
        for key, value in config.items()
        if value is not None
        and key not in known
        and not key.endswith(_HARMLESS_ENDS)
        and not key.startswith(_HARMLESS_STARTS)
    )


class KeyReader:
    """A reader of one file's keys."""

    def __init__(self, config: Mapping[str, Any], kind: str) -> None:
        self.config, self.kind = config, kind
        self.notes: list[str] = []  # a sentence for each default taken; the caller adds others
        # Keys that were read, and keys of the type that do not matter.
        self.read_keys = set(HARMLESS_OF.get(kind, "").split())
        self.names = NAMES.get(kind, {})
        self.defaults = DEFAULTS.get(kind, {})

    def value(self, key: str) -> Any:
        """Returns a key's value; None: the file has none."""
        self.read_keys.add(key)
        return self.config.get(key)

    def size(self, key: str) -> int:
        """Returns an integer >= 1, or the type's default if the file does not have the key."""
        name = self.names.get(key, key)
        value = self.value(name)
        # A type's default is for files without the key: null is refused.
        if name not in self.config and name in self.defaults:
            return int(self.value_or_default(name, None))
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} of {self.kind} must be an integer >= 1, got {value!r}")
        return value

    def sizes(self, **keys: str) -> dict[str, Any]:
        """Returns the `size` of each of `keys`, by its name here."""
        return {name: self.size(key) for name, key in keys.items()}

    def value_or_default(self, key: str, default: Any) -> Any:
        """Returns a key's value; else notes and returns the type's default, or `default`."""
        value = self.value(key)
        if value is not None:
            return value
        value = self.defaults.get(key, default)
        self.notes.append(f"{key}: not in the file, {value} as in transformers")
        return value

    def integer_or_default(self, key: str, default: Any, *, least: int = 0) -> int:
        """Returns `value_or_default`, an integer >= `least`."""
        value = self.value_or_default(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{key} of {self.kind} must be an integer >= {least}, got {value!r}")
        return value

    def integer_or_zero(self, key: str) -> int:
        """Returns 0 if the file has null, or if the file and the type's defaults lack the key."""
        has_default = key not in self.config and key in self.defaults
        return self.integer_or_default(key, 0) if has_default or self.value(key) else 0
