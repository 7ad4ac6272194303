"""Patched models of transformers beside themselves without the patch: loss, gradients, outputs."""

from __future__ import annotations

import copy
import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from cce_dist.integrations import transformers as integration  # noqa: E402
from cce_dist.integrations.transformers import PatchError  # noqa: E402
from cce_dist.integrations.transformers.logits import DeferredLogits  # noqa: E402
from tests.integrations.architectures import (  # noqa: E402
    ARCHITECTURES,
    VOCAB_SIZE,
    batch,
    make,
)
from tests.integrations.beside import check_same, gradients, step  # noqa: E402

# transformers and its models warn of what comes in later versions.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_architectures(model_type: str) -> None:
    before, after = check_same(make(model_type))
    assert isinstance(after.logits, DeferredLogits) and not after.logits.is_computed
    torch.testing.assert_close(after.logits.clone(), before.logits, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "cohere", "mixtral"])
def test_arguments_of_the_loss(model_type: str) -> None:
    inputs, model = batch(), make(model_type)
    shifted = nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for extra in (
        {"num_items_in_batch": torch.tensor(40)},
        {"num_items_in_batch": 40},
        {"shift_labels": shifted},
        {"shift_labels": shifted, "num_items_in_batch": torch.tensor(40)},
        {"labels": inputs["input_ids"], "ignore_index": 5},
        {"return_dict": False},
    ):
        arguments = {**inputs, **extra}
        before = model(**arguments)
        with integration.patched(model):
            after = model(**arguments)
        torch.testing.assert_close(after[0], before[0], atol=1e-6, rtol=1e-6)
    # Only the last tokens have logits.
    inputs["labels"] = inputs["labels"][:, -6:]
    before = model(**inputs, logits_to_keep=6)
    with integration.patched(model):
        after = model(**inputs, logits_to_keep=6)
    torch.testing.assert_close(after.loss, before.loss, atol=1e-6, rtol=1e-6)
    assert after.logits.shape == (2, 6, VOCAB_SIZE)


@pytest.mark.parametrize("gradient", ["exact", "in_forward"])
def test_options_reach_the_loss(gradient: str) -> None:
    check_same(make("llama"), gradient=gradient, backend="torch", workspace_bytes=2**22)


def test_no_tensor_is_as_large_as_the_logits() -> None:
    vocab_size, inputs = 20000, batch(size=4, length=65)
    model = integration.patch(make("gemma2", vocab_size=vocab_size), workspace_bytes=2**20)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))
            return result

    with Sizes():
        model(**inputs).loss.backward()
    # The weight is the largest.
    assert max(sizes) == vocab_size * 32 < inputs["labels"].numel() * vocab_size / 8


def test_without_labels_and_in_eval_nothing_changes() -> None:
    model, inputs = make("gemma2"), batch()
    ids = {"input_ids": inputs["input_ids"]}

    def outputs() -> list[Tensor]:
        model.train()
        found = [model(**ids).logits]
        model.eval()
        with torch.no_grad():
            found += [model(**ids).logits, model(**inputs).logits, model(**inputs).loss]
            found.append(model.generate(**ids, max_new_tokens=3, do_sample=False, pad_token_id=0))
        return found

    before = outputs()
    integration.patch(model)
    for new, old in zip(outputs(), before, strict=True):
        assert type(new) is Tensor and torch.equal(new, old)


def test_logits_are_computed_when_somebody_reads_them() -> None:
    model = make("granite")
    stock = model(**batch()).logits
    integration.patch(model)
    logits = model(**batch()).logits
    assert "nobody has computed them" in repr(logits)
    assert logits.shape == stock.shape and logits.dtype == stock.dtype and logits.requires_grad
    half = logits[:, 3:-1].to(torch.bfloat16)
    assert isinstance(half, DeferredLogits) and half.shape == (2, 13, VOCAB_SIZE)
    torch.testing.assert_close(half.clone(), stock[:, 3:-1].bfloat16(), atol=1e-2, rtol=0)
    detached = logits.detach() * 2
    assert isinstance(detached, DeferredLogits) and not detached.requires_grad
    assert not detached.clone().requires_grad and not logits.is_computed
    assert torch.equal(logits.argmax(-1), stock.argmax(-1))
    assert logits.is_computed and repr(logits).endswith("computed)")
    # What is computed is what counts.
    logits[0, 0] = 0
    assert not logits[0, 0].any()
    logits.sum().backward()
    assert gradients(model)


def test_logits_after_a_step_are_refused() -> None:
    model = make("llama")
    integration.patch(model)
    output = model(**batch())
    output.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(PatchError, match="the head changed after it was called"):
        output.logits.clone()


def test_heads_that_are_frozen_resized_or_have_a_bias() -> None:
    model = make("phi")
    assert model.lm_head.bias is not None and model.lm_head.bias.any()
    model.lm_head.requires_grad_(False)
    check_same(model)
    integration.remove(model)
    model.resize_token_embeddings(VOCAB_SIZE + 9, mean_resizing=False)
    check_same(model)
    # Also while it is patched.
    model.resize_token_embeddings(VOCAB_SIZE + 30, mean_resizing=False)
    after, _ = step(model)
    assert after.logits.shape[-1] == VOCAB_SIZE + 30


def test_autocast() -> None:
    def run(model: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return step(model)

    before, after = check_same(make("llama"), run, atol=2e-3)
    assert after.loss.dtype == before.loss.dtype == torch.float32
    assert after.logits.dtype == before.logits.dtype == torch.bfloat16
    torch.testing.assert_close(after.logits.clone(), before.logits, atol=1e-2, rtol=0)


def test_checkpointing_of_activations() -> None:
    model = make("llama")
    _, expected = step(model)
    model.gradient_checkpointing_enable()
    _, after = check_same(model)
    assert not after.logits.is_computed
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, expected[name], atol=1e-6, rtol=1e-4)


def test_heads_on_devices_of_their_own() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make("llama")
    places = {"model": "cpu", "lm_head": "cpu"}
    check_same(accelerate.dispatch_model(model, places, force_hooks=True))


@pytest.mark.multigpu
def test_logits_are_on_the_device_of_the_models_output() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = make("llama")
    places = {"model": 0, "lm_head": 1}
    model = integration.patch(accelerate.dispatch_model(model, places, force_hooks=True))
    inputs = {name: value.cuda(0) for name, value in batch().items()}
    output = model(**inputs)
    assert output.loss.device == output.logits.device == output.logits.clone().device
    assert output.logits.device == inputs["labels"].device


def test_compiled_models_keep_their_decoder_compiled() -> None:
    _, expected = step(make("llama", num_hidden_layers=1))
    model = integration.patch(make("llama", num_hidden_layers=1))
    sizes: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        sizes.append(len(graph.graph.nodes))
        return graph

    compiled = torch.compile(model, backend=count)
    for _ in range(2):
        after, grads = step(compiled)
    assert not after.logits.is_computed
    for name in expected:
        torch.testing.assert_close(grads[f"_orig_mod.{name}"], expected[name], atol=1e-6, rtol=1e-4)
    # The decoder is one graph, compiled once; the labels' shift is a second one.
    assert max(sizes) > 50 and len(sizes) <= 4


def test_a_deep_copy_has_its_own_weights() -> None:
    model = integration.patch(make("llama"))
    other = copy.deepcopy(model)
    expected = model(**batch()).loss
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert torch.equal(other(**batch()).loss, expected) and model(**batch()).loss != expected
    integration.remove()
    assert "forward" not in vars(other) and "forward" not in vars(model)


def test_apply_patches_what_is_made_later() -> None:
    old = make("llama")
    status = integration.apply(gradient="exact")
    assert status.options is not None and status.options.gradient == "exact"
    assert integration.apply(gradient="exact") == status
    with pytest.raises(PatchError, match=r"gradient='exact', .* with gradient='filtered', "):
        integration.apply(gradient="filtered", workspace_bytes=2**20)
    new = make("qwen2")
    assert integration.status().models == ("Qwen2ForCausalLM",)
    assert isinstance(new(**batch()).logits, DeferredLogits)
    assert type(old(**batch()).logits) is Tensor
    integration.remove()
    assert integration.status() == integration.Status(None, ())
    assert type(new(**batch()).logits) is Tensor and type(make("gpt2")(**batch()).logits) is Tensor


def test_it_says_once_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    (handler,) = logging.getLogger("cce_dist.integrations").handlers
    stream = io.StringIO()
    monkeypatch.setattr(handler, "stream", stream)
    monkeypatch.delenv("RANK", raising=False)
    model = make("stablelm")
    with integration.patched(model):
        for _ in range(2):
            output = model(**batch())
    output.logits.exp()
    first, second = stream.getvalue().splitlines()
    for text in ("StableLm", "in place of", "gradient=filtered", "backend=auto", "remove(model)"):
        assert text in first
    assert second.endswith("are computed, since exp reads them")
    # Other ranks are silent, and so is this handler where logging is configured.
    monkeypatch.setenv("RANK", "1")
    with integration.patched(model):
        model(**batch())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    with integration.patched(model):
        model(**batch())
    assert len(stream.getvalue().splitlines()) == 2


def test_it_says_which_gradient_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's loss cannot have "in_forward"."""
    (handler,) = logging.getLogger("cce_dist.integrations").handlers
    monkeypatch.delenv("RANK", raising=False)
    model, reduction = make("llama"), {}

    def loss_of(logits: Tensor, labels: Tensor, **_: object) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), **reduction)

    model.loss_function = lambda *args, **keywords: loss_of(*args, **keywords).mean()
    for reduction["reduction"], gradient in (("none", "filtered"), ("mean", "in_forward")):
        monkeypatch.setattr(handler, "stream", stream := io.StringIO())
        with integration.patched(model, gradient="in_forward"):
            model(**batch())
        assert f"gradient={gradient}" in stream.getvalue()


def test_signatures_stay() -> None:
    import inspect

    model = make("llama")
    before = inspect.signature(model.forward)
    assert inspect.signature(integration.patch(model).forward) == before


def log_softmax_loss(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
    picked = logits.log_softmax(-1)[:, :-1].gather(-1, labels[:, 1:, None].clamp(min=0))
    return -picked.mean()


def plain_loss(logits: Tensor, labels: Tensor, **others: Any) -> Tensor:
    flat = logits[:, :-1].flatten(0, 1)
    return 2 * nn.functional.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.1)


def test_loss_functions_of_a_models_own() -> None:
    model = make("llama")
    model.loss_function = plain_loss
    check_same(model)
    model.loss_function = log_softmax_loss
    with pytest.raises(PatchError, match=r"its forward applies log_softmax to its logits"):
        model(**batch())
    integration.remove(model)
    assert torch.isfinite(model(**batch()).loss)


@pytest.mark.parametrize("name", ["Linear4bit", "Linear8bitLt"])
def test_quantised_heads_are_refused(name: str) -> None:
    linear = type(name, (nn.Linear,), {"__module__": "bitsandbytes.nn.modules"})
    model = make("llama")
    model.lm_head = linear(32, VOCAB_SIZE, bias=False)
    with pytest.raises(PatchError, match=f"its head is a {name}, whose weight is quantised"):
        integration.patch(model)


def test_a_quantised_weight_of_a_plain_head_is_refused() -> None:
    quantised: Any = type("Int8Tensor", (Tensor,), {"__module__": "torchao.quantization"})
    model = make("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().as_subclass(quantised))
    with pytest.raises(PatchError, match="its head is a Linear, whose weight is quantised"):
        integration.patch(model)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn], ids=str)
def test_heads_of_8_bits_are_refused(dtype: torch.dtype) -> None:
    """Of a quantiser that nobody knows here."""
    model = make("llama")
    weight = torch.zeros(VOCAB_SIZE, 32, dtype=dtype)
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    with pytest.raises(PatchError, match="its head is a Linear, whose weight is quantised"):
        integration.patch(model)


def test_refusals() -> None:
    with pytest.raises(PatchError, match=r"must be, or hold, one PreTrainedModel .* got Linear"):
        integration.patch(nn.Linear(2, 2))
    with pytest.raises(PatchError, match="LlamaModel cannot be patched: it has no output embed"):
        integration.patch(make("llama").model)
    # As FSMT's, which looks ids up in it as well, and Musicgen's, one for each codebook.
    for head in (nn.Embedding(VOCAB_SIZE, 32), nn.ModuleList([nn.Linear(32, VOCAB_SIZE)])):
        model = make("llama")
        model.lm_head = head
        with pytest.raises(PatchError, match=f"one linear map, got {type(head).__name__}"):
            integration.patch(model)
    model = make("llama")
    with pytest.raises(ValueError, match=r"options must be of gradient, .*, got softcap, zloss"):
        integration.patch(model, softcap=3.0, zloss=1.0)
    with pytest.raises(ValueError, match="gradient must be one of"):
        integration.patch(model, gradient="fast")
    integration.patch(model)
    with pytest.raises(
        PatchError,
        match=r"with gradient='filtered', now asked for gradient='exact'; call remove\(model\)",
    ):
        integration.patch(model, gradient="exact")
    # Nor have tensors without values a loss.
    with pytest.raises(PatchError, match="it is on the meta device"):
        copy.deepcopy(model).to("meta")(**{name: x.to("meta") for name, x in batch().items()})
    # A head that is no linear map, and a forward that does not call its head.
    model.lm_head = nn.Sequential(nn.Linear(32, VOCAB_SIZE), nn.GELU())
    with pytest.raises(PatchError, match=r"forward applies gelu|is no linear map"):
        model(**batch())
    other = make("llama")
    other.forward = lambda **inputs: torch.zeros(())  # as Liger's patch computes its loss
    with pytest.raises(PatchError, match=r"without F\.cross_entropy of its head's output"):
        integration.patch(other)(**batch())


def test_a_script_that_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cce_dist.integrations.transformers.__main__ import main

    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from tests.integrations.architectures import batch, make\n"
        "open(sys.argv[1], 'w').write(repr(make('llama')(**batch()).logits))\n"
    )
    monkeypatch.setattr(sys, "argv", ["before"])
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert main(["--gradient", "exact", str(script), str(tmp_path / "out")]) == 0
    assert "nobody has computed them" in (tmp_path / "out").read_text()
    assert integration.status() == integration.Status(None, ())
    with pytest.raises(SystemExit):
        main(["--gradient", "fast", str(script)])
