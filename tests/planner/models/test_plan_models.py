"""Models by name and from a Hugging Face config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cce_dist.planner.models.huggingface import model_from_config, read_config
from cce_dist.planner.models.huggingface_types import TEXT_OF
from cce_dist.planner.models.linear_attention import LinearAttention
from cce_dist.planner.models.model import Model
from cce_dist.planner.models.presets import MODELS, find_model
from tests.planner.models import plan_configs as files
from tests.planner.models.plan_configs import FILES, NOT_USED, around


@pytest.mark.parametrize("name", MODELS)
def test_presets(name: str) -> None:
    assert find_model(name) is MODELS[name] and MODELS[name].parameters == files.PARAMETERS[name]


def test_presets_are_found_however_they_are_spelt() -> None:
    assert find_model("Gemma 2 (27B)") is MODELS["gemma2-27b"]
    assert find_model("GPT2").positions == 1024
    assert find_model("phi 1.5").rows == 51200
    with pytest.raises(ValueError, match=r"model must be a config.json or one of .*got 'gpt5'"):
        find_model("gpt5")


def test_biases_of_a_file() -> None:
    """Of a gated MLP's three matrices; counted by transformers 5.24.0."""
    biases = {"attention_bias": True, "mlp_bias": True}
    assert model_from_config(files.SMALL_LLAMA | biases).model.parameters == 294_592


def test_what_a_file_does_not_say_is_noted() -> None:
    found = model_from_config(FILES["gemma"][0])
    assert any("tie_word_embeddings: not in the file, True" in note for note in found.notes)
    assert any("head_dim: not in the file, 256" in note for note in found.notes)
    assert found.model.tied and found.model.head_dim == 256
    found = model_from_config(files.DEEPSEEK)
    assert "num_nextn_predict_layers: not modelled" in found.notes


def test_defaults_of_a_type_are_those_of_transformers() -> None:
    left_out = {"num_key_value_heads", "sliding_window"}
    config = {key: value for key, value in files.MISTRAL.items() if key not in left_out}
    found = model_from_config(config)
    assert (found.model.kv_heads, found.model.window) == (8, 4096)
    assert "num_key_value_heads: not in the file, 8 as in transformers" in found.notes
    assert "sliding_window: not in the file, 4096 as in transformers" in found.notes
    found = model_from_config(config | dict.fromkeys(left_out))
    assert (found.model.kv_heads, found.model.window) == (32, 0)
    assert "num_key_value_heads: null, taken for 32, the number of query heads" in found.notes


def test_keys_that_are_not_used_are_named() -> None:
    more = {"tie_word_embedings": True, "logit_scale": 0.5, "mamba_d_state": None, "qk_norm": False}
    found = model_from_config(files.LLAMA_31 | more)
    assert f"{NOT_USED}logit_scale, tie_word_embedings" in found.notes
    # Of another type it is used.
    found = model_from_config(files.LLAMA_31 | {"num_experts_per_tok": 2})
    assert f"{NOT_USED}num_experts_per_tok" in found.notes
    assert not any(NOT_USED in note for note in model_from_config(FILES["mixtral"][0]).notes)


def test_notes_of_a_type() -> None:
    found = model_from_config(files.GEMMA3_4B)
    for key, value in (
        ("vocab_size", 262208),
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("sliding_window_pattern", 6),
        ("tie_word_embeddings", True),
    ):
        assert f"{key}: not in the file, {value} as in transformers" in found.notes
    assert found.model.tied and found.model.window_every == 6
    notes = model_from_config(FILES["glm4-9b"][0]).notes
    assert "attention_bias: not in the file, True as in transformers" in notes
    notes = model_from_config(files.SMOLLM3).notes
    assert "no_rope_layers: counted as layers with rotary positions" in notes
    # Multipliers and caps are of no weight, but a cap of a model that has none may be.
    notes = model_from_config(files.GEMMA3 | {"attn_logit_softcapping": 50.0}).notes
    assert f"{NOT_USED}attn_logit_softcapping" in notes
    notes = model_from_config(files.OLMO2 | {"residual_multiplier": 0.22}).notes
    assert f"{NOT_USED}residual_multiplier" in notes


@pytest.mark.parametrize("kind", TEXT_OF)
def test_a_part_without_a_type_is_transformers_own(kind: str) -> None:
    found = model_from_config(around(kind, {"vocab_size": 5000}))
    assert found.model.classes == 5000
    assert found.notes[0] == f"{kind}: its text model alone, {TEXT_OF[kind]}, without vision_config"


def test_a_part_of_any_model() -> None:
    """The part says which model it is; the whole need not be known."""
    found = model_from_config(around("somebodys", files.VOXTRAL, image_layer=3) | files.TIED)
    assert found.model.tied and found.model.parameters == 4_014_136_320 - 131072 * 3072
    assert f"beside text_config, {NOT_USED}image_layer" in found.notes


def test_whole_and_part_say_whether_the_head_is_tied() -> None:
    notes = model_from_config(around("mistral3", files.MISTRAL_SMALL)).notes
    assert any(note.startswith("tie_word_embeddings: not said by mistral3") for note in notes)
    assert model_from_config(around("mistral3", files.MINISTRAL3)).model.tied
    with pytest.raises(ValueError, match="of mistral3 and of its text_config must be the same"):
        model_from_config(around("mistral3", files.MINISTRAL3, tie_word_embeddings=False))
    part = files.QWEN_VL | {"tie_word_embeddings": True}
    assert model_from_config(around("qwen2_5_vl", part, tie_word_embeddings=False)).model.tied


def test_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(files.LLAMA))
    assert read_config(tmp_path).model == read_config(file).model
    # With a byte-order mark.
    file.write_text(json.dumps(files.LLAMA), encoding="utf-8-sig")
    assert read_config(file) == model_from_config(files.LLAMA)
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
        ({"more_rows": 8, "tied": True}, "more_rows must be 0 in a tied model, got 8"),
    ],
)
def test_bad_models_are_refused(values: dict[str, int], message: str) -> None:
    right = {"classes": 100, "dim": 64, "layers": 2, "mlp_dim": 128, "heads": 4, "kv_heads": 2}
    with pytest.raises(ValueError, match=message):
        Model(**(right | values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": 0}, "kernel of linear attention must be >= 1, got 0"),
        ({"key_heads": 3}, "key_heads of linear attention must divide value_heads, 4, got 3"),
    ],
)
def test_bad_linear_attention_is_refused(change: dict[str, int], message: str) -> None:
    right = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8, "kernel": 4}
    with pytest.raises(ValueError, match=message):
        LinearAttention(**(right | change))
