"""Model types of Hugging Face beside transformers' own models.

Counts are transformers 5.24.0's: of parameters on the meta device, a tied one once; of FLOPs by
torch 2.13.0's FlopCounterMode.
"""

from __future__ import annotations

from typing import Any

import pytest

from cce_dist.planner.cost.hardware import HARDWARE
from cce_dist.planner.cost.job import Job
from cce_dist.planner.cost.layer import layer_cost, visible_tokens
from cce_dist.planner.models.huggingface import model_from_config
from cce_dist.planner.models.huggingface_types import DEFAULTS
from cce_dist.planner.models.linear_attention import CHUNK
from cce_dist.planner.search import best_plan
from tests.planner.models import plan_configs as files
from tests.planner.models.plan_configs import FILES, FULL, LINEAR, NOT_USED, SLIDING, config_of

H200 = HARDWARE["h200"]
BIASES = {"attention_bias": True}
BOTH_BIASES = {"attention_bias": True, "mlp_bias": True}
PARALLEL = {"use_parallel_residual": True, "qk_layernorm": True}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
SMALL_LINEAR = {"linear_num_key_heads": 2, "linear_key_head_dim": 16, "head_dim": 16}
SMALL_LINEAR |= {"linear_num_value_heads": 4, "linear_value_head_dim": 24}
# Of 64 dims, 8 heads, 2 of keys, an MLP of 160, 1000 classes and mostly 4 layers: what is beside
# that, parameters, FLOPs of the layers of 32 tokens, with all scores.
SHORT: dict[str, tuple[dict[str, Any], int, int]] = {
    "olmo": ({}, 291_840, 11_534_336),
    "olmo biases": (BIASES, 292_480, 11_534_336),
    "olmo2": ({}, 292_736, 11_534_336),
    "olmo2 biases": (BIASES, 293_376, 11_534_336),
    "granite": ({}, 292_416, 11_534_336),
    "granite biases": (BOTH_BIASES, 294_592, 11_534_336),
    "gemma3_text": ({"head_dim": 16, "num_hidden_layers": 8}, 539_968, 30_408_704),
    "gemma3_text biases": ({"head_dim": 16, **BIASES}, 335_040, 15_204_352),
    # With biases, but none of what attention gives, if the file does not say.
    "glm4": ({"head_dim": 16, "attention_bias": False}, 333_888, 15_204_352),
    "glm4 biases": ({"head_dim": 16}, 334_656, 15_204_352),
    "smollm3": ({}, 292_416, 11_534_336),
    "smollm3 biases": (BOTH_BIASES, 294_592, 11_534_336),
    "cohere": ({}, 292_160, 11_534_336),
    "cohere norms": ({"use_qk_norm": True, **BIASES}, 293_120, 11_534_336),
    "starcoder2": ({}, 253_568, 8_912_896),
    "starcoder2 plain": ({"use_bias": False}, 252_032, 8_912_896),
    "stablelm": ({}, 292_992, 11_534_336),
    "stablelm biases": ({"use_qkv_bias": True}, 293_376, 11_534_336),
    # One norm of a layer, and those of queries and keys by head.
    "stablelm parallel": (PARALLEL, 292_800, 11_534_336),
    # The shared expert is no whole number of the others, then two of them.
    "qwen2_moe": (EXPERTS | {"shared_expert_intermediate_size": 80}, 454_336, 12_435_456),
    "qwen2_moe plain": (
        EXPERTS | {"shared_expert_intermediate_size": 96, "qkv_bias": False},
        466_240,
        13_221_888,
    ),
}
# The same of 128 tokens.
LONG: dict[str, tuple[dict[str, Any], int, int]] = {
    "ministral3": ({"head_dim": 16}, 333_376, 85_983_232),
    "exaone4": ({}, 292_480, 58_720_256),
    "olmo3": ({}, 292_736, 58_720_256),
    "olmo3 biases": (BIASES, 293_376, 58_720_256),
    # Of these heads a file's head_dim says nothing.
    "qwen2_vl_text": ({"head_dim": 16}, 292_800, 58_720_256),
    "qwen2_5_vl_text": ({}, 292_800, 58_720_256),
    # Text passes the second layer by.
    "mllama_text_model": ({"cross_attention_layers": [1]}, 292_946, 44_040_192),
    # Without the convolution of 3 tokens of padding: 3 layers of 160 channels, 4 tokens each.
    "qwen3_5_text": (SMALL_LINEAR, 351_296, 79_932_672 - 3 * 3 * 2 * 160 * 4),
    # With 2 experts of a token, which the counter does not see: 3 matrices of 64 * 48.
    "qwen3_5_moe_text": (
        SMALL_LINEAR | EXPERTS | {"shared_expert_intermediate_size": 80},
        512_832,
        64_662_784 - 3 * 3 * 2 * 160 * 4 + 4 * 128 * 2 * 3 * 2 * 64 * 48,
    ),
}


def small_config(name: str) -> dict[str, Any]:
    kind, change = name.split()[0], (SHORT | LONG)[name][0]
    return config_of(kind, 1000, 4, 64, 160, 8, 2) | files.UNTIED | change


@pytest.mark.parametrize("name", FILES)
def test_parameters_of_a_file(name: str) -> None:
    """And all of the file is understood."""
    config, parameters = FILES[name]
    found = model_from_config(config)
    assert found.model.parameters == parameters
    assert not any(NOT_USED in note for note in found.notes)


@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_parameters_and_flops_of_a_type(name: str) -> None:
    model, tokens = model_from_config(small_config(name)).model, 32 if name in SHORT else 128
    _, parameters, flops = (SHORT | LONG)[name]
    assert model.parameters == parameters
    job = Job(sequence=tokens)
    for index in range(model.layers):
        flops -= layer_cost(model, job, H200, index).flops
        kind = model.attention_of(index)
        if kind in ("full", "window"):
            # Scores with tokens after a token are not counted here.
            after = tokens - visible_tokens(model, job, index)
            flops -= 2 * model.heads * (model.key_dim + model.head_value_dim) * tokens * after
        elif kind == "linear":
            # Triangular systems, which the counter does not see.
            flops += tokens * CHUNK * 4 * (16 + 24)
    assert flops == 0


@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_a_type_has_a_plan(name: str) -> None:
    model = model_from_config(small_config(name)).model
    job = Job(sequence=64, tp=2, pp=2, microbatches=4, recompute="selective")
    plan = best_plan(model, job, H200)
    assert plan.fits and sum(plan.layout) == model.layers


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_file_of_a_type_alone_is_whole(kind: str) -> None:
    """transformers has a default for every size."""
    found = model_from_config({"model_type": kind})
    assert found.model.classes == DEFAULTS[kind]["vocab_size"]
    assert any(note.startswith("vocab_size: not in the file") for note in found.notes)


def test_layers_of_several_kinds() -> None:
    def seen(config: dict[str, Any]) -> list[str]:
        model = model_from_config(config).model
        return [model.attention_of(index) for index in range(model.layers)]

    assert seen(files.EXAONE4) == ["window", "window", "window", "full"] * 16
    assert seen(files.OLMO3) == ["window", "window", "window", "full"] * 8
    assert set(seen(files.OLMO3 | {"sliding_window": None})) == {"full"}
    assert seen(files.QWEN35) == ["linear", "linear", "linear", "full"] * 16
    assert seen(files.QWEN35 | {"layer_types": [LINEAR, FULL] * 32}) == ["linear", "full"] * 32
    kinds = seen(files.LLAMA_VISION)
    assert [i for i, kind in enumerate(kinds) if kind == "image"] == [*range(3, 40, 5)]
    neo = {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 12]]}
    # The first layer is a global one.
    assert seen(neo) == ["full", "window"] * 12


def test_windows_of_a_type() -> None:
    model = model_from_config(files.GEMMA3).model
    assert (model.window, model.window_every) == (512, 6)
    # Layers 6, 12, 18 and 24 of 26.
    job = Job(sequence=4096)
    seen = [visible_tokens(model, job, index) for index in range(model.layers)]
    assert [index for index in range(26) if seen[index] == 2048] == [5, 11, 17, 23]
    assert set(seen) == {2048, 480}
    assert model_from_config(files.STARCODER2).model.window == 4096
    assert model_from_config(files.STARCODER2 | {"sliding_window": None}).model.window == 0
    assert model_from_config(FILES["gemma2"][0]).model.window_every == 2
    assert model_from_config(FILES["mistral"][0]).model.window == 4096
    for config in (files.SMOLLM3, files.QWEN2_MOE, FILES["qwen2"][0]):
        assert model_from_config(config).model.window == 0


@pytest.mark.parametrize("kind", ["gemma2", "gemma3_text"])
def test_windows_by_layer(kind: str) -> None:
    """The list of layers decides, as in transformers, not the pattern beside it."""
    for types, every in (
        ([SLIDING, SLIDING, FULL, SLIDING], 3),
        ([SLIDING, FULL] * 2, 2),
        ([SLIDING] * 4, 0),
        ([FULL] * 4, 1),
    ):
        config = files.GEMMA3 | {"model_type": kind, "num_hidden_layers": 4, "layer_types": types}
        config.pop("sliding_window_pattern")
        beside = {} if kind == "gemma2" else {"sliding_window_pattern": 6}
        model = model_from_config(config | beside).model
        assert model.window_every == every
        seen = [visible_tokens(model, Job(sequence=4096), index) for index in range(4)]
        assert [FULL if tokens == 2048 else SLIDING for tokens in seen] == types


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
