"""Models by name and from a Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cce_dist.planner.models.huggingface import model_from_config, read_config
from cce_dist.planner.models.model import Model
from cce_dist.planner.models.presets import MODELS, find_model
from tests.planner.models.plan_configs import COMMON, FILES, LLAMA, PARAMETERS
from tests.planner.models.plan_files import NOT_USED, check_file


@pytest.mark.parametrize("name", MODELS)
def test_presets(name: str) -> None:
    assert find_model(name) is MODELS[name] and MODELS[name].parameters == PARAMETERS[name]


def test_presets_are_found_however_they_are_spelt() -> None:
    assert find_model("Gemma 2 (27B)") is MODELS["gemma2-27b"]
    assert find_model("GPT2").positions == 1024
    assert find_model("phi 1.5").rows == 51200
    with pytest.raises(ValueError, match=r"model must be a config.json or one of .*got 'gpt5'"):
        find_model("gpt5")


@pytest.mark.parametrize("kind", FILES)
def test_parameters_of_a_file(kind: str) -> None:
    config, parameters = FILES[kind]
    assert model_from_config(config).model.parameters == parameters


def test_biases_of_a_file() -> None:
    """Of a gated MLP's three matrices; counted by transformers 5.24.0."""
    biases = {"attention_bias": True, "mlp_bias": True}
    config = {"model_type": "llama"} | COMMON | biases
    assert model_from_config(config).model.parameters == 294_592


def test_what_a_file_does_not_say_is_noted() -> None:
    found = model_from_config(FILES["gemma"][0])
    assert any("tie_word_embeddings: not in the file, True" in note for note in found.notes)
    assert any("head_dim: not in the file, 256" in note for note in found.notes)
    assert found.model.tied and found.model.head_dim == 256
    found = model_from_config(FILES["deepseek_v3"][0])
    assert "num_nextn_predict_layers: not modelled" in found.notes


def test_defaults_of_a_type_are_those_of_transformers() -> None:
    left_out = {"num_key_value_heads", "sliding_window"}
    config = {key: value for key, value in FILES["mistral"][0].items() if key not in left_out}
    found = model_from_config(config)
    assert (found.model.kv_heads, found.model.window) == (8, 4096)
    assert "num_key_value_heads: not in the file, 8 as in transformers" in found.notes
    assert "sliding_window: not in the file, 4096 as in transformers" in found.notes
    found = model_from_config(config | dict.fromkeys(left_out))
    assert (found.model.kv_heads, found.model.window) == (32, 0)
    assert "num_key_value_heads: null, taken for 32, the number of query heads" in found.notes


# As it is on the hub, with what transformers has written beside it.
LLAMA_31: dict[str, Any] = {
    "_name_or_path": "somewhere",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3"},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
# Others of the hub's, with what is odd in them.
SMOLLM2: dict[str, Any] = LLAMA_31 | {
    "head_dim": None,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rope_interleaved": False,
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN25: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
PHI4_MINI: dict[str, Any] = {
    "attention_bias": False,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "lm_head_bias": False,
    "mlp_bias": False,
    "model_type": "phi3",
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "resid_pdrop": 0.0,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
HUB = {
    "smollm2-135m": (SMOLLM2, 134_515_008),
    "qwen2.5-0.5b": (QWEN25, 494_032_768),
    "phi4-mini": (PHI4_MINI, 3_836_021_760),
}


@pytest.mark.parametrize("name", HUB)
def test_files_of_the_hub(name: str) -> None:
    check_file(*HUB[name])


def test_a_whole_file_has_no_key_that_is_not_used() -> None:
    check_file(LLAMA_31, PARAMETERS["llama3-8b"])
    for config, parameters in FILES.values():
        check_file(config, parameters)


def test_keys_that_are_not_used_are_named() -> None:
    more = {"tie_word_embedings": True, "logit_scale": 0.5, "mamba_d_state": None, "qk_norm": False}
    found = model_from_config(LLAMA_31 | more)
    assert f"{NOT_USED}logit_scale, tie_word_embedings" in found.notes
    # Of another type it is used.
    found = model_from_config(LLAMA_31 | {"num_experts_per_tok": 2})
    assert f"{NOT_USED}num_experts_per_tok" in found.notes
    assert not any(NOT_USED in note for note in model_from_config(FILES["mixtral"][0]).notes)


def test_windows_of_a_file() -> None:
    assert model_from_config(FILES["gemma2"][0]).model.window_every == 2
    assert model_from_config(FILES["mistral"][0]).model.window == 4096
    assert model_from_config(FILES["qwen2"][0]).model.window == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
            {"layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types of llama must be 'full_attention' in .*, got \['sliding_attention'\]: no",
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
        (
            {"num_local_experts": 64},
            "num_local_experts of llama must be absent, got 64: .* for mixtral alone",
        ),
        ({"sliding_window": 1024}, "sliding_window of llama must be absent, got 1024: the planner"),
        ({"num_key_value_heads": 3}, "kv_heads must divide heads, 8, got 3"),
        (
            {"mamba_d_state": 16},
            "mamba_d_state of llama must be .*, got 16: .* state-space or",
        ),
        (
            {"cross_attention_layers": [3]},
            r"of llama must be absent, got \[3\]: .*cross",
        ),
        (
            {"is_encoder_decoder": True},
            "is_encoder_decoder of llama must be False or",
        ),
        (
            {"encoder_layers": 6},
            "encoder_layers of llama must .* got 6: .* an encoder",
        ),
        (
            {"v_head_dim": 128},
            "v_head_dim of llama must .* for deepseek_v3 alone",
        ),
        ({"model_type": "qwen3", "linear_num_key_heads": 16}, "not model linear attention"),
        ({"model_type": "deepseek_v3", "index_topk": 2048}, "not model sparse or chunked"),
        (
            {"model_type": "mistral", "mlp_bias": True},
            "mlp_bias of mistral must be absent, got True: .* for llama, granite, smollm3 alone",
        ),
        ({"lm_head_bias": True}, "lm_head_bias of llama must be False or None, got True"),
        (
            {"vision_config": {"depth": 1}},
            "of llama must be absent.* a part that is not text",
        ),
    ],
)
def test_files_that_are_not_understood_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_from_config({"model_type": "llama"} | COMMON | change)


def test_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).model == read_config(file).model
    file.write_text("{")
    with pytest.raises(ValueError, match=r"model must be a readable config\.json"):
        read_config(file)
    file.write_text("[]")
    with pytest.raises(ValueError, match="must hold an object, got list"):
        read_config(file)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, "layers must be >= 1, got 0"),
        ({"heads": 12, "kv_heads": 5}, "kv_heads must divide heads, 12, got 5"),
        ({"heads": 5, "kv_heads": 5}, "heads must divide dim, 64, got 5: set head_dim"),
        ({"rows": 99}, "rows must be >= classes, 100, got 99"),
        ({"experts_per_token": 2}, "experts_per_token must be <= experts, 0, got 2"),
        ({"dense_layers": 5}, "dense_layers must be within 0 and layers, 2, got 5"),
        ({"dense_layers": 1}, "dense_mlp_dim must be >= 1, got 0"),
        ({"shared_mlp_dim": 64}, "shared_experts must be >= 1 with shared_mlp_dim or .*, got 0"),
        ({"shared_gate": True}, "shared_experts must be >= 1 with shared_mlp_dim or .*, got 0"),
        ({"qk_norm_heads": True}, "qk_norm must be True with qk_norm_heads, got False"),
    ],
)
def test_bad_models_are_refused(values: dict[str, int], message: str) -> None:
    right = {"classes": 100, "dim": 64, "layers": 2, "mlp_dim": 128, "heads": 4, "kv_heads": 2}
    with pytest.raises(ValueError, match=message):
        Model(**(right | values))
