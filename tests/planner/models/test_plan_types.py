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
from cce_dist.planner.search import best_plan
from tests.planner.models.plan_files import NOT_USED, check_file

H200 = HARDWARE["h200"]
FULL, SLIDING = "full_attention", "sliding_attention"


def config_of(kind: str, layers: int, dim: int, mlp: int, heads: int, kv: int, **more: Any) -> dict:
    return {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        **more,
    }


OLMO2 = config_of("olmo2", 32, 4096, 11008, 32, 32, vocab_size=100352, attention_bias=False)
GEMMA3 = config_of(
    "gemma3_text",
    26,
    1152,
    6912,
    4,
    1,
    vocab_size=262144,
    head_dim=256,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
    query_pre_attn_scalar=256,
    rope_local_base_freq=10000,
    sliding_window=512,
    sliding_window_pattern=6,
)
GRANITE = config_of(
    "granite",
    40,
    2048,
    8192,
    32,
    8,
    vocab_size=49155,
    tie_word_embeddings=True,
    attention_bias=False,
    attention_multiplier=0.015625,
    embedding_multiplier=12.0,
    logits_scaling=8.0,
    mlp_bias=False,
    residual_multiplier=0.22,
)
SMOLLM3 = config_of(
    "smollm3",
    36,
    2048,
    11008,
    16,
    4,
    vocab_size=128256,
    layer_types=[FULL] * 36,
    no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0] * 9,
    sliding_window=None,
    use_sliding_window=False,
)
STARCODER2 = config_of(
    "starcoder2",
    30,
    3072,
    12288,
    24,
    2,
    vocab_size=49152,
    mlp_type="default",
    norm_epsilon=1e-5,
    norm_type="layer_norm",
    sliding_window=4096,
    use_bias=True,
)
QWEN2_MOE = config_of(
    "qwen2_moe",
    24,
    2048,
    5632,
    16,
    16,
    vocab_size=151936,
    tie_word_embeddings=False,
    decoder_sparse_step=1,
    max_window_layers=21,
    moe_intermediate_size=1408,
    norm_topk_prob=False,
    num_experts=60,
    num_experts_per_tok=4,
    shared_expert_intermediate_size=5632,
    sliding_window=32768,
    use_sliding_window=False,
)
STABLELM = config_of("stablelm", 32, 2560, 6912, 32, 32, vocab_size=50304, use_qkv_bias=False)
# As they are published.
FILES: dict[str, tuple[dict[str, Any], int]] = {
    "olmo-7b": (
        config_of("olmo", 32, 4096, 11008, 32, 32, vocab_size=50304, clip_qkv=None),
        6_888_095_744,
    ),
    "olmo2-7b": (OLMO2, 7_298_617_344),
    "olmo2-32b": (
        config_of("olmo2", 64, 5120, 27648, 40, 8, vocab_size=100352),
        32_234_279_936,
    ),
    "granite-2b": (GRANITE, 2_533_531_648),
    "gemma3-1b": (GEMMA3, 999_885_952),
    # Of the file of a model with images: what it leaves out is the type's default.
    "gemma3-4b": (
        {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "sliding_window": 1024,
        },
        3_880_263_168,
    ),
    "glm4-9b": (
        config_of("glm4", 40, 4096, 13696, 32, 2, vocab_size=151552, head_dim=128),
        9_400_279_040,
    ),
    "smollm3-3b": (SMOLLM3, 3_075_098_624),
    "command-r": (
        config_of("cohere", 40, 8192, 22528, 64, 64, vocab_size=256000, logit_scale=0.0625),
        34_980_831_232,
    ),
    "command-r-plus": (
        config_of("cohere", 64, 12288, 33792, 96, 8, vocab_size=256000, use_qk_norm=True),
        103_810_674_688,
    ),
    "starcoder2-3b": (STARCODER2, 3_030_371_328),
    "stablelm-3b": (STABLELM, 2_795_443_200),
    "stablelm2-12b": (
        config_of("stablelm", 40, 5120, 13824, 32, 8, vocab_size=100352)
        | {"use_parallel_residual": True, "qk_layernorm": True},
        12_143_185_920,
    ),
    "qwen1.5-moe": (QWEN2_MOE, 14_315_784_192),
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
# Of 64 dims, 8 heads, 2 of keys, an MLP of 160, 1000 classes and mostly 4 layers: what is beside
# that, parameters, FLOPs of the layers of 32 tokens, with all scores.
SMALL: dict[str, tuple[dict[str, Any], int, int]] = {
    "olmo": ({}, 291_840, 11_534_336),
    "olmo biases": ({"attention_bias": True}, 292_480, 11_534_336),
    "olmo2": ({}, 292_736, 11_534_336),
    "olmo2 biases": ({"attention_bias": True}, 293_376, 11_534_336),
    "granite": ({}, 292_416, 11_534_336),
    "granite biases": ({"attention_bias": True, "mlp_bias": True}, 294_592, 11_534_336),
    "gemma3_text": ({"head_dim": 16, "num_hidden_layers": 8}, 539_968, 30_408_704),
    "gemma3_text biases": ({"head_dim": 16, "attention_bias": True}, 335_040, 15_204_352),
    # With biases, but none of what attention gives, if the file does not say.
    "glm4": ({"head_dim": 16, "attention_bias": False}, 333_888, 15_204_352),
    "glm4 biases": ({"head_dim": 16}, 334_656, 15_204_352),
    "smollm3": ({}, 292_416, 11_534_336),
    "smollm3 biases": ({"attention_bias": True, "mlp_bias": True}, 294_592, 11_534_336),
    "cohere": ({}, 292_160, 11_534_336),
    "cohere norms": ({"use_qk_norm": True, "attention_bias": True}, 293_120, 11_534_336),
    "starcoder2": ({}, 253_568, 8_912_896),
    "starcoder2 plain": ({"use_bias": False}, 252_032, 8_912_896),
    "stablelm": ({}, 292_992, 11_534_336),
    "stablelm biases": ({"use_qkv_bias": True}, 293_376, 11_534_336),
    # One norm of a layer, and those of queries and keys by head.
    "stablelm parallel": (
        {"use_parallel_residual": True, "qk_layernorm": True},
        292_800,
        11_534_336,
    ),
    # The shared expert is no whole number of the others, then two of them.
    "qwen2_moe": (EXPERTS | {"shared_expert_intermediate_size": 80}, 454_336, 12_435_456),
    "qwen2_moe plain": (
        EXPERTS | {"shared_expert_intermediate_size": 96, "qkv_bias": False},
        466_240,
        13_221_888,
    ),
}


def small_config(name: str) -> dict[str, Any]:
    more = {"vocab_size": 1000, "tie_word_embeddings": False, **SMALL[name][0]}
    return config_of(name.split()[0], 4, 64, 160, 8, 2) | more


@pytest.mark.parametrize("name", FILES)
def test_parameters_of_a_file(name: str) -> None:
    check_file(*FILES[name])


@pytest.mark.parametrize("name", SMALL)
def test_parameters_and_flops_of_a_type(name: str) -> None:
    model = model_from_config(small_config(name)).model
    _, parameters, flops = SMALL[name]
    assert model.parameters == parameters
    job = Job(sequence=32, microbatch=1)
    found = sum(layer_cost(model, job, H200, index).flops for index in range(model.layers))
    # Those after a token are not counted here.
    scores = 2 * model.heads * (model.key_dim + model.head_value_dim) * 32 * 16 * model.layers
    assert found + scores == flops


@pytest.mark.parametrize("name", [name for name in SMALL if " " not in name])
def test_a_type_has_a_plan(name: str) -> None:
    model = model_from_config(small_config(name)).model
    plan = best_plan(model, Job(sequence=64, tp=2, pp=2, microbatches=4), H200)
    assert plan.fits and sum(plan.layout) == model.layers


def test_windows_of_a_type() -> None:
    model = model_from_config(GEMMA3).model
    assert (model.window, model.window_every) == (512, 6)
    # Layers 6, 12, 18 and 24 of 26.
    job = Job(sequence=4096)
    seen = [visible_tokens(model, job, index) for index in range(model.layers)]
    assert [index for index in range(26) if seen[index] == 2048] == [5, 11, 17, 23]
    assert set(seen) == {2048, 480}
    assert model_from_config(STARCODER2).model.window == 4096
    assert model_from_config(STARCODER2 | {"sliding_window": None}).model.window == 0
    for config in (SMOLLM3, QWEN2_MOE):
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
        config = GEMMA3 | {"model_type": kind, "num_hidden_layers": 4, "layer_types": types}
        config.pop("sliding_window_pattern")
        beside = {} if kind == "gemma2" else {"sliding_window_pattern": 6}
        model = model_from_config(config | beside).model
        assert model.window_every == every
        seen = [visible_tokens(model, Job(sequence=4096), index) for index in range(4)]
        assert [FULL if tokens == 2048 else SLIDING for tokens in seen] == types


def test_what_a_file_does_not_say_is_noted() -> None:
    found = model_from_config(FILES["gemma3-4b"][0])
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
    notes = model_from_config(SMOLLM3).notes
    assert "no_rope_layers: counted as layers with rotary positions" in notes
    # Multipliers and caps are of no weight, but a cap of a model that has none may be.
    notes = model_from_config(GEMMA3 | {"attn_logit_softcapping": 50.0}).notes
    assert f"{NOT_USED}attn_logit_softcapping" in notes
    notes = model_from_config(OLMO2 | {"residual_multiplier": 0.22}).notes
    assert f"{NOT_USED}residual_multiplier" in notes


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            GEMMA3,
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention of gemma3_text must be False or",
        ),
        (
            GEMMA3,
            {"num_hidden_layers": 4, "layer_types": [FULL, SLIDING, SLIDING, SLIDING]},
            "layer_types of gemma3_text must be 'full_attention' for each n-th of 4 layers and",
        ),
        (GEMMA3, {"layer_types": [SLIDING] * 3}, "each n-th of 26 layers"),
        (
            GEMMA3,
            {"sliding_window_pattern": 0},
            "sliding_window_pattern of gemma3_text must be an integer >= 1, got 0",
        ),
        (
            OLMO2,
            {"sliding_window_pattern": 4},
            "sliding_window_pattern of olmo2 must be absent, got 4",
        ),
        (OLMO2, {"use_qk_norm": True}, "use_qk_norm of olmo2 must be absent, got True"),
        (OLMO2, {"mlp_bias": True}, "mlp_bias of olmo2 must be absent, got True"),
        (GRANITE, {"qk_layernorm": True}, "qk_layernorm of granite must be absent, got True"),
        (GRANITE, {"num_local_experts": 32}, "num_local_experts of granite must be absent, got 32"),
        # Windows in some layers before others, not in all but some.
        (SMOLLM3, {"use_sliding_window": True}, "use_sliding_window of smollm3 must be False or"),
        (
            SMOLLM3,
            {"layer_types": [FULL, SLIDING] * 18},
            r"layer_types of smollm3 must .*got \['sliding_attention",
        ),
        (
            QWEN2_MOE,
            {"use_sliding_window": True},
            "use_sliding_window of qwen2_moe must be False or",
        ),
        (
            QWEN2_MOE,
            {"mlp_only_layers": [3]},
            r"mlp_only_layers of qwen2_moe must be \[\] or None, got \[3\]",
        ),
        (QWEN2_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step of qwen2_moe must be 1 or"),
        (
            QWEN2_MOE,
            {"shared_expert_intermediate_size": 0},
            "shared_expert_intermediate_size of qwen2_moe must be an integer >= 1, got 0",
        ),
        (
            QWEN2_MOE,
            {"model_type": "qwen3_moe", "head_dim": 128},
            "shared_expert_intermediate_size of qwen3_moe must be absent, got 5632",
        ),
        (OLMO2, {"model_type": "granitemoe"}, r"model_type must be one of .*got 'granitemoe'"),
        (GEMMA3, {"model_type": "gemma3n_text"}, r"model_type must be .*got 'gemma3n_text'"),
    ],
)
def test_files_that_are_not_understood_are_refused(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model_from_config(config | change)
