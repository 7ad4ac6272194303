"""Heads that do more than multiply: they meet what the model gives them, and draw once."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from cce_dist.integrations import log  # noqa: E402
from cce_dist.integrations import transformers as integration  # noqa: E402
from cce_dist.integrations.transformers import PatchError  # noqa: E402
from tests.integrations.architectures import batch, make  # noqa: E402

# transformers and its models warn of what comes in later versions.
pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = batch()


class Centred(nn.Linear):
    """A head that looks along the sequence."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input - input.mean(-2, keepdim=True))


def with_hook(model: Any) -> Any:
    model.lm_head.register_forward_pre_hook(
        lambda head, inputs: (inputs[0] - inputs[0].mean(-2, keepdim=True),)
    )
    return model


def with_own_head(model: Any) -> Any:
    old = model.lm_head
    model.lm_head = Centred(old.in_features, old.out_features, bias=False)
    model.lm_head.weight = old.weight
    return model


def with_dropout(model: Any) -> Any:
    model.lm_head = nn.Sequential(nn.Dropout(0.3), model.lm_head)
    return model


def with_a_noisy_hook(model: Any) -> Any:
    model.lm_head.register_forward_pre_hook(lambda head, inputs: (F.dropout(inputs[0], 0.3),))
    return model


def with_lora_dropout(model: Any) -> Any:
    config = peft.LoraConfig(
        target_modules=["lm_head"], lora_dropout=0.5, init_lora_weights=False, r=4
    )
    return peft.get_peft_model(model, config)


CHANGES = (with_hook, with_own_head, with_dropout, with_a_noisy_hook, with_lora_dropout)


def loss_of_logits(model: Any, take: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Its own loss and one of some of its logits, which are read twice; then a random number."""
    torch.manual_seed(5)
    output = model(**BATCH)
    taken = take(output.logits)
    labels = take(BATCH["labels"][..., None]).flatten()
    of_logits = F.cross_entropy(taken.flatten(0, -2), labels, ignore_index=-100)
    read = output.logits.float().square().mean()
    return output.loss + of_logits + read, torch.rand(())


@pytest.mark.parametrize(
    "take", [lambda x: x, lambda x: x[:, :-2], lambda x: x[:, 1:-1]], ids=["all", "start", "middle"]
)
@pytest.mark.parametrize("change", CHANGES)
def test_heads(change: Callable[[Any], Any], take: Callable[[Tensor], Tensor]) -> None:
    results = []
    for patches in (False, True):
        torch.manual_seed(0)
        model = change(make("llama")).train()
        if patches:
            integration.patch(model, gradient="exact")
        value, drawn = loss_of_logits(model, take)
        value.backward()
        grads = [x.grad for x in model.parameters() if x.grad is not None]
        results.append([value.detach(), drawn, *grads])
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)


class Scaled(nn.Linear):
    """Its logits are scaled by a factor of each class, in fp32, beside a weight in 16 bits."""

    scale: Tensor

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


def test_a_16_bit_head_with_factors_in_fp32() -> None:
    model: Any = make("llama").bfloat16()
    old = model.lm_head
    model.lm_head = Scaled(old.in_features, old.out_features, bias=False)
    model.lm_head.weight = old.weight
    model.lm_head.scale = nn.Parameter(torch.linspace(0.5, 1.5, old.out_features))
    outputs, grads = [], []
    for patches in (False, True):
        if patches:
            integration.patch(model)
        model.zero_grad()
        output = model(**BATCH)
        output.loss.backward()
        outputs.append(output)
        grads.append(model.lm_head.scale.grad)
    before, after = outputs
    assert after.loss.dtype == after.logits.dtype == before.logits.dtype == torch.float32
    torch.testing.assert_close(after.loss, before.loss, atol=1e-3, rtol=0)
    # Their product is rounded to 16 bits before it is scaled.
    torch.testing.assert_close(after.logits.clone(), before.logits, atol=1e-2, rtol=1e-2)
    assert torch.linalg.vector_norm(grads[1] - grads[0]) < 1e-2 * torch.linalg.vector_norm(grads[0])


def test_a_hook_sees_the_models_shape() -> None:
    shapes = []
    model = make("llama").train()
    model.lm_head.register_forward_pre_hook(lambda head, inputs: shapes.append(inputs[0].shape))
    integration.patch(model)
    model(**BATCH).loss.backward()
    assert [shape[:2] for shape in shapes] == [BATCH["input_ids"].shape]


def test_hidden_states_that_change_after_tokens_were_taken_are_refused() -> None:
    model = make("llama").train()
    integration.patch(model)
    states = []
    model.model.register_forward_hook(lambda module, inputs, output: states.append(output[0]))
    output = model(**BATCH)
    # The loss's own backward needs them, too.
    taken = output.logits[:, torch.tensor([0, 2])]
    with torch.no_grad():
        states[0].mul_(2)
    with pytest.raises(PatchError, match="hidden states changed in place"):
        taken.float().sum()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "setitem": lambda x: x.__setitem__((..., slice(3)), -1e4),
    "mul_": lambda x: x.mul_(2),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.0),
    "relu": lambda x: F.relu(x, inplace=True),
    "out": lambda x: torch.mul(x.detach(), 2, out=x.detach()),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "a part": lambda x: x[:, :3].zero_(),
    "data": lambda x: x.data.mul_(2),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_head_that_writes_to_its_logits_is_refused(write: Callable[[Tensor], object]) -> None:
    class Writing(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            logits = super().forward(input)
            write(logits)
            return logits

    model = make("llama")
    head, model.lm_head = model.lm_head, Writing(*model.lm_head.weight.shape[::-1], bias=False)
    model.lm_head.weight = head.weight
    integration.patch(model)
    with pytest.raises(PatchError, match=r"its head (writes to|takes the memory of) its logits"):
        model(**BATCH)


def test_a_head_that_reads_its_logits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reading(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            logits = super().forward(input)
            self.largest = logits.detach().max()
            return logits

    model = make("llama")
    head, model.lm_head = model.lm_head, Reading(*model.lm_head.weight.shape[::-1], bias=False)
    model.lm_head.weight = head.weight
    expected = model(**BATCH).loss
    (handler,) = logging.getLogger("cce_dist.integrations").handlers
    monkeypatch.setattr(handler, "stream", io.StringIO())
    integration.patch(model)
    for _ in range(2):
        torch.testing.assert_close(model(**BATCH).loss, expected)
    assert handler.stream.getvalue().count("are computed, since its head reads them") == 1


@pytest.mark.parametrize("tied", [False, True])
def test_a_compiled_head(tied: bool) -> None:
    results = []
    for patches in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make("llama", tie_word_embeddings=tied).train()
        if patches:
            integration.patch(model, gradient="exact")
        # As Accelerate's regional compilation leaves a model.
        model.lm_head = torch.compile(model.lm_head, backend="aot_eager", fullgraph=True)
        output = model(**BATCH)
        (output.loss + output.logits[:, 1:].square().mean()).backward()
        grads = [x.grad for x in model.parameters() if x.grad is not None]
        results.append([output.loss.detach(), model.eval()(**BATCH).logits.detach(), *grads])
    torch.testing.assert_close(results[1], results[0], atol=1e-6, rtol=1e-5)
    model.train().lm_head.register_forward_pre_hook(lambda head, inputs: None)
    with pytest.raises(PatchError, match="a hook of its compiled head would not run"):
        model(**BATCH)


def test_a_head_that_gets_more_than_hidden_states_is_refused() -> None:
    config = peft.LoraConfig(
        target_modules=["lm_head"],
        alora_invocation_tokens=[int(BATCH["input_ids"][0, 1])],
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(make("llama"), config).train()
    integration.patch(model)
    with pytest.raises(PatchError, match="its head gets alora_offsets beside hidden states"):
        model(**BATCH)


@pytest.mark.parametrize("level", [None, "WARNING"])
def test_a_level_of_the_log_that_was_set_before_stays(level: str | None) -> None:
    # The file alone, without torch, which the package would import.
    code = (
        "import logging, runpy, sys\n"
        "if sys.argv[2:]: logging.getLogger('cce_dist.integrations').setLevel(sys.argv[2])\n"
        "logger = runpy.run_path(sys.argv[1])['logger']\n"
        "print(logging.getLevelName(logger.level))"
    )
    command = [sys.executable, "-c", code, str(log.__file__), *([level] if level else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (level or "INFO")
