"""Text models in files of models that also take images or sound, and layers of several kinds.

Counts are transformers 5.24.0's: of parameters on the meta device, a tied one once; of FLOPs by
torch 2.13.0's FlopCounterMode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cce_dist.planner.cost.hardware import HARDWARE
from cce_dist.planner.cost.job import Job
from cce_dist.planner.cost.layer import layer_cost, visible_tokens
from cce_dist.planner.models.huggingface import model_from_config, read_config
from cce_dist.planner.models.huggingface_types import DEFAULTS, TEXT_OF, TRAITS
from cce_dist.planner.models.linear_attention import CHUNK, LinearAttention
from cce_dist.planner.models.model import Model
from cce_dist.planner.search import best_plan
from tests.planner.models.plan_files import NOT_USED

H200 = HARDWARE["h200"]
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
EVERY_FOURTH = [SLIDING, SLIDING, SLIDING, FULL]


def sizes(kind: str, rows: int, layers: int, dim: int, mlp: int, heads: int, kv: int) -> dict:
    return {
        "model_type": kind,
        "vocab_size": rows,
        "num_hidden_layers": layers,
        "hidden_size": dim,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
    }


def around(kind: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The file of a model that has `text` as a part."""
    return {"model_type": kind, "text_config": text, "vision_config": {"depth": 2}, **more}


EXAONE4 = sizes("exaone4", 102400, 64, 5120, 27392, 40, 8) | {
    "head_dim": 128,
    "layer_types": EVERY_FOURTH * 16,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
}
MISTRAL_SMALL = sizes("mistral", 131072, 40, 5120, 32768, 32, 8) | {
    "head_dim": 128,
    "sliding_window": None,
}
MINISTRAL3 = sizes("ministral3", 131072, 26, 3072, 9216, 32, 8) | {
    "head_dim": 128,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
OLMO3 = sizes("olmo3", 100278, 32, 4096, 11008, 32, 32) | {"attention_bias": False}
QWEN_VL = sizes("qwen2_5_vl", 152064, 28, 3584, 18944, 28, 4) | {
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}
QWEN35 = sizes("qwen3_5_text", 248320, 64, 5120, 17408, 24, 4) | {
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_num_value_heads": 48,
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
}
QWEN35_MOE = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 4096,
    "linear_num_value_heads": 64,
    "moe_intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 60,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 1024,
}
LLAMA_VISION = sizes("mllama_text_model", 128256, 40, 4096, 14336, 32, 8) | {
    "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]
}
LLAMA_VISION_90B = sizes("mllama_text_model", 128256, 100, 8192, 28672, 64, 8) | {
    "cross_attention_layers": list(range(3, 100, 5))
}
VOXTRAL = sizes("llama", 131072, 30, 3072, 8192, 32, 8) | {"head_dim": 128}
# By sizes as they are published; parameters of the text model.
FILES: dict[str, tuple[dict[str, Any], int]] = {
    "ministral3-3b": (around("mistral3", MINISTRAL3, tie_word_embeddings=True), 3_429_006_336),
    "ministral3-8b": ({"model_type": "ministral3"}, 8_489_553_920),
    "mistral-small-3.1": (around("mistral3", MISTRAL_SMALL), 23_572_403_200),
    "exaone4-32b": (EXAONE4, 32_003_216_384),
    "exaone4-1.2b": (
        sizes("exaone4", 102400, 30, 2048, 4096, 32, 8)
        | {"head_dim": 64, "layer_types": [FULL] * 30, "sliding_window": None}
        | {"tie_word_embeddings": True},
        1_279_391_488,
    ),
    "olmo3-7b": (OLMO3, 7_298_011_136),
    "olmo3-32b": (sizes("olmo3", 100278, 64, 5120, 27648, 40, 8), 32_233_522_176),
    "qwen2.5-vl-7b": (QWEN_VL | {"vision_config": {"depth": 32}}, 7_615_616_512),
    "qwen3.5-9b": (around("qwen3_5", {}), 8_953_803_264),
    "qwen3.5-27b": (around("qwen3_5", QWEN35, tie_word_embeddings=False), 26_895_998_464),
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
SMALL_LINEAR = {
    "head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 24,
}
SMALL_EXPERTS = {
    "moe_intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 80,
}
# Of 64 dims, 8 heads, 2 of keys, an MLP of 160, 1000 classes and 4 layers: what is beside that,
# parameters, FLOPs of the layers of 128 tokens, with all scores.
SMALL: dict[str, tuple[dict[str, Any], int, int]] = {
    "ministral3": ({"head_dim": 16}, 333_376, 85_983_232),
    "exaone4": ({}, 292_480, 58_720_256),
    "olmo3": ({}, 292_736, 58_720_256),
    "olmo3 biases": ({"attention_bias": True}, 293_376, 58_720_256),
    # Of these heads a file's head_dim says nothing.
    "qwen2_vl_text": ({"head_dim": 16}, 292_800, 58_720_256),
    "qwen2_5_vl_text": ({}, 292_800, 58_720_256),
    # Text passes the second layer by.
    "mllama_text_model": ({"cross_attention_layers": [1]}, 292_946, 44_040_192),
    # Without the convolution of 3 tokens of padding: 3 layers of 160 channels, 4 tokens each.
    "qwen3_5_text": (SMALL_LINEAR, 351_296, 79_932_672 - 3 * 3 * 2 * 160 * 4),
    # With 2 experts of a token, which the counter does not see: 3 matrices of 64 * 48.
    "qwen3_5_moe_text": (
        SMALL_LINEAR | SMALL_EXPERTS,
        512_832,
        64_662_784 - 3 * 3 * 2 * 160 * 4 + 4 * 128 * 2 * 3 * 2 * 64 * 48,
    ),
}


def small_config(name: str) -> dict[str, Any]:
    more = {"tie_word_embeddings": False, **SMALL[name][0]}
    return sizes(name.split()[0], 1000, 4, 64, 160, 8, 2) | more


@pytest.mark.parametrize("name", FILES)
def test_parameters_of_a_file(name: str) -> None:
    config, parameters = FILES[name]
    found = model_from_config(config)
    assert found.model.parameters == parameters
    assert not any(NOT_USED in note for note in found.notes)


@pytest.mark.parametrize("name", SMALL)
def test_parameters_and_flops_of_a_type(name: str) -> None:
    model = model_from_config(small_config(name)).model
    _, parameters, flops = SMALL[name]
    assert model.parameters == parameters
    job = Job(sequence=128, microbatch=1)
    for index in range(model.layers):
        flops -= layer_cost(model, job, H200, index).flops
        kind = model.attention_of(index)
        if kind in ("full", "window"):
            # Scores with tokens after a token are not counted here.
            after = 128 - visible_tokens(model, job, index)
            flops -= 2 * model.heads * (model.key_dim + model.head_value_dim) * 128 * after
        elif kind == "linear":
            # Triangular systems, which the counter does not see.
            flops += 128 * CHUNK * 4 * (16 + 24)
    assert flops == 0


@pytest.mark.parametrize("name", SMALL)
def test_a_type_has_a_plan(name: str) -> None:
    model = model_from_config(small_config(name)).model
    job = Job(sequence=64, tp=2, pp=2, microbatches=4, recompute="selective")
    plan = best_plan(model, job, H200)
    assert plan.fits and sum(plan.layout) == model.layers


@pytest.mark.parametrize("kind", TRAITS)
def test_a_file_of_a_type_alone_is_whole(kind: str) -> None:
    """transformers has a default for every size."""
    found = model_from_config({"model_type": kind})
    assert found.model.classes == DEFAULTS[kind]["vocab_size"]
    assert any(note.startswith("vocab_size: not in the file") for note in found.notes)


@pytest.mark.parametrize("kind", TEXT_OF)
def test_a_part_without_a_type_is_transformers_own(kind: str) -> None:
    found = model_from_config(around(kind, {"vocab_size": 5000}))
    assert found.model.classes == 5000
    assert found.notes[0] == f"{kind}: its text model alone, {TEXT_OF[kind]}, without vision_config"


def test_a_part_of_any_model() -> None:
    """The part says which model it is; the whole need not be known."""
    found = model_from_config(around("somebodys", VOXTRAL, image_layer=3, tie_word_embeddings=True))
    assert found.model.tied and found.model.parameters == 4_014_136_320 - 131072 * 3072
    assert f"beside text_config, {NOT_USED}image_layer" in found.notes


def test_layers_of_several_kinds() -> None:
    def seen(config: dict[str, Any]) -> list[str]:
        model = model_from_config(config).model
        return [model.attention_of(index) for index in range(model.layers)]

    assert seen(EXAONE4) == ["window", "window", "window", "full"] * 16
    assert seen(OLMO3) == ["window", "window", "window", "full"] * 8
    assert set(seen(OLMO3 | {"sliding_window": None})) == {"full"}
    assert seen(QWEN35) == ["linear", "linear", "linear", "full"] * 16
    assert seen(QWEN35 | {"layer_types": [LINEAR, FULL] * 32}) == ["linear", "full"] * 32
    assert [i for i, kind in enumerate(seen(LLAMA_VISION)) if kind == "image"] == [*range(3, 40, 5)]
    neo = {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 12]]}
    # The first layer is a global one.
    assert seen(neo) == ["full", "window"] * 12


def test_whole_and_part_say_whether_the_head_is_tied() -> None:
    notes = model_from_config(around("mistral3", MISTRAL_SMALL)).notes
    assert any(note.startswith("tie_word_embeddings: not said by mistral3") for note in notes)
    assert model_from_config(around("mistral3", MINISTRAL3)).model.tied
    with pytest.raises(ValueError, match="of mistral3 and of its text_config must be the same"):
        model_from_config(around("mistral3", MINISTRAL3, tie_word_embeddings=False))
    part = QWEN_VL | {"tie_word_embeddings": True}
    assert model_from_config(around("qwen2_5_vl", part, tie_word_embeddings=False)).model.tied


@pytest.mark.parametrize("kind", ["gpt2", "gpt_neo", "phi", "qwen2", "starcoder2"])
def test_keys_that_a_type_does_not_read(kind: str) -> None:
    """transformers gives these models their biases whatever attention_bias is."""
    plain = model_from_config({"model_type": kind})
    found = model_from_config({"model_type": kind, "attention_bias": False})
    assert found.model == plain.model
    assert f"attention_bias: False, which transformers' {kind} does not read" in found.notes


def test_head_dim_that_a_type_does_not_read() -> None:
    found = model_from_config({"model_type": "stablelm", "head_dim": 128})
    assert found.model.size_of_head == 80
    assert any(note.startswith("head_dim: 128, but") for note in found.notes)


def test_a_tied_head_has_its_bias() -> None:
    phi = {"model_type": "phi"}
    untied, tied = (
        model_from_config(phi | {"tie_word_embeddings": tied}).model for tied in (False, True)
    )
    assert untied.parameters - tied.parameters == 51200 * 2048


def test_files_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(OLMO3), encoding="utf-8-sig")
    assert read_config(file) == model_from_config(OLMO3)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(around("llava", VOXTRAL | {"model_type": "opt"}), "got 'opt'", id="text"),
        pytest.param(around("somebodys", {}), "text_config of somebodys must have", id="no type"),
        pytest.param(
            {"model_type": "mistral3"}, "text_config of mistral3 must be an object", id="0"
        ),
        pytest.param(around("llava", VOXTRAL) | {"text_config": 3}, "an object, got 3", id="3"),
        pytest.param(
            {"model_type": "mistral", "attention_bias": True},
            "of mistral must be absent",
            id="bias",
        ),
        pytest.param(
            {"model_type": "phi", "qk_layernorm": True},
            "qk_layernorm of phi",
            id="norm",
        ),
        pytest.param({"model_type": "llama", "attn_output_gate": True}, "of llama must", id="gate"),
        pytest.param({"model_type": "llama", "hidden_size": None}, "got None", id="null"),
        pytest.param(QWEN35 | {"layer_types": [FULL, LINEAR] * 32}, "each n-th of 64", id="order"),
        pytest.param(EXAONE4 | {"layer_types": None}, "must be an integer >= 1", id="letters"),
        pytest.param(
            LLAMA_VISION | {"tie_word_embeddings": True}, "more_rows must be 0", id="tied"
        ),
        pytest.param(
            {"model_type": "qwen3", "layer_types": [LINEAR]},
            "of qwen3 must be 'full_attention'",
            id="kind",
        ),
    ],
)
def test_files_that_are_not_understood_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_from_config(config)


@pytest.mark.parametrize(
    ("tp", "cp", "message"),
    [
        (8, 1, "tp must divide the 2 heads of keys of the model's linear attention, got 8"),
        (1, 2, "cp must be 1 with linear attention"),
    ],
)
def test_jobs_that_linear_attention_cannot_have(tp: int, cp: int, message: str) -> None:
    model = model_from_config(small_config("qwen3_5_text")).model
    with pytest.raises(ValueError, match=message):
        Job(sequence=64, tp=tp, cp=cp).check_model(model)


def test_bad_models_are_refused() -> None:
    right = {"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 8, "kernel": 4}
    for change, message in (
        ({"kernel": 0}, "kernel of linear attention must be >= 1, got 0"),
        ({"key_heads": 3}, "key_heads of linear attention must divide value_heads, 4, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            LinearAttention(**(right | change))
    with pytest.raises(ValueError, match="more_rows must be 0 in a tied model, got 8"):
        Model(classes=9, dim=8, layers=1, mlp_dim=8, heads=1, kv_heads=1, more_rows=8, tied=True)
