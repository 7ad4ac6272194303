"""Patched encoder-decoders and vision-language models beside themselves without the patch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from cce_dist.integrations import transformers as integration  # noqa: E402
from tests.integrations.architectures import VOCAB_SIZE, batch, prepared  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

TEXT = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TEXT |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "patch_size": 8}
VISION |= {"num_attention_heads": 4, "image_size": 16, "projection_dim": 32}
SIGLIP = {**VISION, "model_type": "siglip_vision_model"}
QWEN = {"depth": 1, "hidden_size": 32, "num_heads": 4, "patch_size": 4}
MLLAMA = {**VISION, "num_global_layers": 1, "attention_heads": 4, "vision_output_dim": 64}
SIZES = {"vocab_size": VOCAB_SIZE, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1}
SIZES |= {f"{x}_attention_heads": 4 for x in ("encoder", "decoder")}
SIZES |= {f"{x}_ffn_dim": 48 for x in ("encoder", "decoder")}
T5 = {"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2}
CHAMELEON = {"embed_dim": 8, "num_embeddings": 8, "hidden_channels": 32, "resolution": 16}
CHAMELEON |= {"channel_multiplier": [1], "num_res_blocks": 1}
IMAGES = {"<image>": 3, **{f"IMGIMG{chr(65 + i)}Z": 4 + i for i in range(8)}}
# Name of the configuration, of the model if it is another, and what the configuration has.
MODELS: dict[str, dict[str, Any]] = {
    "T5": {**T5, "num_heads": 4, "decoder_start_token_id": 0},
    "SwitchTransformers": {
        **{**T5, "num_heads": 4, "decoder_start_token_id": 0, "num_experts": 4},
        **{"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
        **{"router_z_loss_coef": 0.1, "router_jitter_noise": 0.0},
    },
    "Bart": {**SIZES, "max_position_embeddings": 64},
    "Whisper": {
        **{**SIZES, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64},
        **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    },
    "Qwen2VL": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {**QWEN, "embed_dim": 32},
    },
    "Qwen3VL": {
        "text_config": {**TEXT, **ROPE},
        "vision_config": {**QWEN, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    },
    "Gemma3": {
        "text_config": {**TEXT, "final_logit_softcapping": 5.0},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
        "image_token_index": 3,
    },
    "PaliGemma": {
        "text_config": {**TEXT, "model_type": "gemma"},
        "vision_config": SIGLIP,
        "image_token_index": 3,
        "projection_dim": 32,
    },
    "Llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {**VISION, "model_type": "clip_vision_model"},
        "image_token_index": 3,
    },
    "Idefics3": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": VISION,
        "image_token_id": 3,
    },
    "Mllama": {
        "text_config": {**TEXT, "cross_attention_layers": [1]},
        "vision_config": {**MLLAMA, "intermediate_layers_indices": [0]},
    },
    "Chameleon": {
        **{name: value for name, value in TEXT.items() if name != "head_dim"},
        "vq_config": CHAMELEON,
        "vocabulary_map": IMAGES,
    },
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    model = prepared(getattr(transformers, f"{name}ForConditionalGeneration")(config))
    if name == "Bart":
        model.final_logits_bias.normal_()
    return model


def inputs_of(name: str) -> dict[str, torch.Tensor]:
    inputs = batch()
    if name == "SwitchTransformers":
        return {**inputs, "output_router_logits": torch.tensor(True)}
    if name == "Whisper":
        return {"labels": inputs["labels"], "input_features": torch.randn(2, 8, 40)}
    if name in ("Gemma3", "PaliGemma"):
        # Its loss leaves out tokens that are not attended to.
        mask = torch.ones(2, 17, dtype=torch.long)
        mask[0, :5] = 0
        inputs |= {
            "attention_mask": mask,
            "token_type_ids": torch.full((2, 17), int(name[0] == "P")),
        }
    return inputs


@pytest.mark.parametrize("name", [name for name in MODELS if name != "Chameleon"])
def test_models(name: str) -> None:
    check_same(make(name), inputs_of(name))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_a_masked_model(sparse: bool) -> None:
    config = transformers.ModernBertConfig(
        **TEXT, sep_token_id=2, cls_token_id=1, sparse_prediction=sparse
    )
    check_same(prepared(transformers.ModernBertForMaskedLM(config)), batch())


def test_two_losses_of_a_model() -> None:
    config = transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=1, n_head=4, n_positions=64, num_labels=1
    )
    model = prepared(transformers.GPT2DoubleHeadsModel(config))
    inputs = {name: x.view(1, 2, -1) for name, x in batch().items()}
    choices = {"mc_token_ids": torch.tensor([[15, 16]]), "mc_labels": torch.tensor([1])}
    check_same(model, {**inputs, **choices})


def check_same(model: Any, inputs: dict[str, torch.Tensor]) -> None:
    """Checks each loss of a model and its gradients before and after the patch."""
    results = []
    for patch in (False, True):
        if patch:
            integration.patch(model)
        model.zero_grad()
        output = model(**inputs)
        losses = {key: x for key, x in output.items() if key.endswith("loss")}
        (output.loss + losses.get("mc_loss", 0)).backward()
        grads = {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}
        results.append(({key: x.detach() for key, x in losses.items()}, grads))
    assert not output.logits.is_computed
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-4)


def test_logits_that_are_masked_are_refused() -> None:
    model = integration.patch(make("Chameleon"))
    with pytest.raises(integration.PatchError, match="its forward applies __setitem__"):
        model(**batch())
    integration.remove(model)
    assert torch.isfinite(model(**batch()).loss)


@pytest.mark.parametrize("autocasts", [True, False], ids=["autocast", "16-bit model"])
def test_a_bias_of_a_wider_dtype(autocasts: bool) -> None:
    """The head of Bart returns 16 bits, and the model adds a bias in fp32: that makes fp32."""
    model, inputs = make("Bart"), inputs_of("Bart")
    if not autocasts:
        model.to(torch.bfloat16).final_logits_bias = model.final_logits_bias.float()
    outputs = []
    for patch in (False, True):
        if patch:
            integration.patch(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            outputs.append(model(**inputs))
    before, after = outputs
    assert (after.loss.dtype, after.logits.dtype) == (before.loss.dtype, before.logits.dtype)
    assert after.logits.dtype == torch.float32
    assert torch.equal(after.logits.clone(), before.logits)
    # Theirs are of a product in 16 bits.
    torch.testing.assert_close(after.loss, before.loss, atol=1e-3, rtol=0)
