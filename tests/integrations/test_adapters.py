"""PEFT's adapters of the head of a patched model of transformers."""

from __future__ import annotations

import gc
import os
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from cce_dist.integrations import transformers as integration  # noqa: E402
from cce_dist.integrations.transformers import adapters  # noqa: E402
from cce_dist.integrations.transformers.logits import DeferredLogits  # noqa: E402
from tests.integrations.architectures import VOCAB_SIZE, batch, make  # noqa: E402
from tests.integrations.beside import check_same, gradients, step  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def with_lora(**options: Any) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(make("gemma2", tie_word_embeddings=False), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.train()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["lm_head"], "use_rslora": True, "lora_dropout": 0.3},
        {"target_modules": ["lm_head"], "lora_bias": True},
        {"target_modules": ["lm_head"], "use_dora": True},
        {"target_modules": ["lm_head"], "use_dora": True, "lora_dropout": 0.3},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    ],
    ids=["lora", "rslora-dropout", "lora-bias", "dora", "dora-dropout", "modules_to_save"],
)
@pytest.mark.parametrize("first", ["peft", "patch"])
def test_adapters_of_the_head(options: dict[str, Any], first: str) -> None:
    _, expected = step(with_lora(**options))
    if first == "patch":
        # Every model that is made in there, before its adapter.
        with integration.patched():
            model = with_lora(**options)
            after, found = step(model)
        assert isinstance(after.logits, DeferredLogits)
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], atol=1e-6, rtol=1e-4)
    else:
        check_same(with_lora(**options))
    assert any("lm_head" in name for name in expected)
    assert not any("base_layer" in name for name in expected)


def test_logits_of_a_16_bit_head_with_dora() -> None:
    """Its magnitudes are fp32, and the head's own weight and hidden states are not."""
    lora = peft.LoraConfig(r=4, target_modules=["lm_head"], use_dora=True, init_lora_weights=False)
    model = peft.get_peft_model(make("gemma2", tie_word_embeddings=False).bfloat16(), lora).train()
    before, expected = step(model)
    integration.patch(model)
    after, found = step(model)
    assert (after.loss.dtype, after.logits.dtype) == (before.loss.dtype, before.logits.dtype)
    # Each is rounded to 16 bits in other places.
    torch.testing.assert_close(after.logits.clone(), before.logits, atol=5e-2, rtol=2e-2)
    torch.testing.assert_close(after.loss, before.loss, atol=2e-3, rtol=0)
    for name in expected:
        error = torch.linalg.vector_norm((found[name] - expected[name]).float())
        assert error < 3e-2 * torch.linalg.vector_norm(expected[name].float()), name


@pytest.mark.parametrize("gradient", ["exact", "in_forward"])
def test_adapters_make_no_gradient_of_the_frozen_head(
    gradient: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several chunks of the vocabulary.
    monkeypatch.setattr(adapters, "TEMPORARIES", 10)
    model = with_lora(target_modules=["lm_head"], lora_bias=True)
    sizes: list[int] = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            old = {
                x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, Tensor)
            }
            new = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            sizes.extend(x.numel() for x in new if x.untyped_storage().data_ptr() not in old)
            return result

    def run(model: Any) -> Any:
        model.zero_grad()
        # Fewer tokens than the head has dims.
        output = model(**batch(size=1))
        sizes.clear()
        with Sizes():
            output.loss.backward()
        return output, {name: grad.clone() for name, grad in gradients(model).items()}

    # dropout(x) of the adapter, bias, softcap and scale: gemma2's.
    check_same(model, run, gradient=gradient, workspace_bytes=2**16)
    # The backward makes no tensor as large as the head's weight.
    assert max(sizes) < VOCAB_SIZE * 32


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_workspace_bounds_the_adapters_gradient(softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (64, 12), (4096, 12), (4096,), (64, 4), (4096, 4)
    hidden, weight, bias, states, columns = (torch.randn(x, generator=generator) for x in shapes)
    targets = torch.randint(4096, (64,), generator=generator)
    targets[3] = -1
    columns.requires_grad_()

    def nll_of(columns: Tensor) -> tuple[Tensor, Tensor]:
        logits = hidden @ weight.T + bias + states @ columns.T
        logits = 0.7 * (logits if softcap is None else softcap * torch.tanh(logits / softcap))
        lse = logits.logsumexp(-1)
        return lse, lse - logits.gather(-1, targets.clamp(min=0)[:, None])[:, 0]

    lse, nll = nll_of(columns)
    upstream = torch.randn(64, generator=generator)
    (expected,) = torch.autograd.grad((nll * upstream)[targets >= 0].sum(), columns)
    both = torch.cat([hidden, states], 1), torch.cat([weight, columns.detach()], 1)
    logits = adapters.Logits(*both, bias, 0.7, softcap)
    values = targets, lse.detach(), nll.detach(), states, columns
    zeros = adapters.AdapterGrad.apply(logits, 2**16, *values)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.shape[:1] == (64,):
                largest = max(largest, result.nbytes)
            return result

    with Sizes():
        (gradient,) = torch.autograd.grad(zeros, columns, upstream)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=1e-4)
    assert 2**14 < largest <= 2**16 // adapters.TEMPORARIES


def test_the_weight_of_a_loss_that_is_kept_goes_with_its_backward() -> None:
    model = integration.patch(with_lora(target_modules=["lm_head"]))
    saved: list[Any] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(weakref.ref(tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(**batch()).loss
    loss.backward()
    # Those of the head's weight, and of B beside it.
    assert not [x().shape for x in saved if x() is not None and x().shape == (VOCAB_SIZE, 36)]


@pytest.mark.parametrize("reads", [False, True], ids=["unread", "read"])
def test_hidden_states_go_with_the_output(reads: bool) -> None:
    """Without the garbage collector, which a loop may not run for many steps."""
    model = integration.patch(with_lora(target_modules=["lm_head"]))
    decoder = model.base_model.model.model
    seen: list[Any] = []
    decoder.register_forward_hook(lambda *args: seen.append(weakref.ref(args[2][0])))
    gc.collect()
    gc.disable()
    try:
        output = model(**batch())
        if reads:
            output.logits.argmax(-1)
        assert seen.pop()() is not None
        output = model(**batch())
        output.loss.backward()
        del output
        assert seen.pop()() is None
    finally:
        gc.enable()
