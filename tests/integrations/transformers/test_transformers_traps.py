"""Uses of a patched model and of its logits that a deferral can get wrong without a word."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from cce_dist.integrations import transformers as integration  # noqa: E402
from cce_dist.integrations.transformers import PatchError  # noqa: E402
from cce_dist.integrations.transformers.logits import DeferredLogits  # noqa: E402
from tests.integrations.architectures import VOCAB_SIZE, batch, make, prepared  # noqa: E402
from tests.integrations.beside import check_loss  # noqa: E402

# transformers and its models warn of what comes in later versions.
pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = batch()
MASK = BATCH["labels"] != -100


def test_a_metric_under_no_grad_leaves_the_gradient(llama: Any) -> None:
    for context in (torch.no_grad, torch.inference_mode):

        def loss(model: Any, context: Any = context) -> Tensor:
            output = model(**BATCH)
            with context():
                output.logits.argmax(-1)
            return output.loss + output.logits.logsumexp(-1).square().mean()

        check_loss(llama, loss)


def test_logits_of_no_grad_have_no_gradient(llama: Any) -> None:
    def loss(model: Any) -> Tensor:
        with torch.no_grad():
            teacher = model(**BATCH).logits
        student = model(**batch(1))
        with torch.no_grad():
            first = student.logits[:, :5]
        assert not teacher.requires_grad
        other = F.kl_div(student.logits.log_softmax(-1), teacher.softmax(-1))
        return student.loss + other + first.exp().mean()

    check_loss(llama, loss)
    integration.patch(llama)
    with torch.inference_mode():
        logits = llama(**BATCH).logits
    assert not logits.exp().requires_grad


INDICES = {
    "a class, ellipsis at the end": (slice(None), slice(None), 3, Ellipsis),
    "a mask of numpy and a class": (MASK.numpy(), 5),
    "a mask of a list and a class": (MASK.tolist(), 5),
    "a uint8 mask and a class": (MASK.to(torch.uint8), 5),
    "True and a class": (True, slice(None), slice(None), 5),
    "one number": (0, 1, 2, Ellipsis),
    "a row, ellipsis at the end": (0, Ellipsis),
    "tokens in steps": (slice(None), slice(None, None, 2)),
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_indices(llama: Any, index: Any) -> None:
    def loss(model: Any) -> Tensor:
        output = model(**BATCH)
        return output.loss + output.logits[index].exp().mean()

    check_loss(llama, loss)


def cross_entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, VOCAB_SIZE), BATCH["labels"].reshape(-1))


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "squeeze": lambda x: x[:1].squeeze().exp(),
    "squeeze of dims": lambda x: x[:1].squeeze((0, 1)).exp(),
    "more dims in the bias": lambda x: (x[0] + torch.ones(1, 1, VOCAB_SIZE)).squeeze(0),
    "a shape by its name": lambda x: torch.reshape(x, shape=(-1, VOCAB_SIZE)),
    "a negative factor in the softcap": lambda x: cross_entropy((x * -2).tanh() * 3),
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_operators(llama: Any, operator: Callable[[Tensor], Tensor]) -> None:
    def loss(model: Any) -> Tensor:
        output = model(**BATCH)
        return output.loss + operator(output.logits).square().mean()

    check_loss(llama, loss)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("return_dict", [True, False])
def test_shifted_labels_alone_leave_the_loss_to_the_caller(kind: str, return_dict: bool) -> None:
    """As in a loop of sequence parallelism, and in Trainer with a loss function of the user's."""
    shifted = F.pad(BATCH["labels"], (0, 1), value=-100)[:, 1:]
    inputs = {"input_ids": BATCH["input_ids"], "shift_labels": shifted}

    def loss(model: Any) -> Tensor:
        output = model(**inputs, return_dict=return_dict)
        assert not return_dict or output.loss is None
        logits = output.logits if return_dict else output[0]
        value = F.cross_entropy(logits.view(-1, VOCAB_SIZE), shifted.flatten())
        assert not isinstance(logits, DeferredLogits) or not logits.is_computed
        return value

    check_loss(make(kind), loss)


def test_logits_of_two_calls_add_up(llama: Any) -> None:
    def loss(model: Any) -> Tensor:
        first, second = model(**BATCH), model(**batch(1))
        return first.loss + (first.logits + second.logits).logsumexp(-1).mean()

    check_loss(llama, loss)


def test_what_would_get_the_loss_or_no_gradient_is_refused(llama: Any) -> None:
    integration.patch(llama)
    handle = llama.lm_head.register_forward_hook(lambda module, inputs, output: output * 2)
    with pytest.raises(PatchError, match="forward hook of its head"):
        llama(**BATCH)
    handle.remove()
    for register in (
        llama.lm_head.register_full_backward_hook,
        llama.lm_head.register_full_backward_pre_hook,
        module.register_module_full_backward_hook,
        module.register_module_full_backward_pre_hook,
        module.register_module_forward_hook,
    ):
        handle = register(lambda *_: None)
        try:
            with pytest.raises(PatchError, match="ward hook of its head or of all modules"):
                llama(**BATCH)
        finally:
            handle.remove()
    logits = llama(**BATCH).logits
    loss = F.cross_entropy(logits.flatten(0, 1), BATCH["labels"].flatten())
    for ask in (
        logits.retain_grad,
        lambda: logits.register_hook(print),
        lambda: torch.autograd.grad(loss, logits),
        lambda: torch.autograd.grad(loss, [llama.lm_head.weight, logits], allow_unused=True),
    ):
        with pytest.raises(PatchError, match="no gradient of its logits"):
            ask()
    logits.exp()
    with pytest.raises(PatchError, match="no gradient of its logits"):
        logits.retain_grad()


def test_a_hook_of_torchs_own_counts_the_operations(llama: Any) -> None:
    integration.patch(llama)
    with FlopCounterMode(display=False) as counter:
        llama(**BATCH).loss.backward()
    assert "LlamaForCausalLM.lm_head" in counter.get_flop_counts()


def test_a_head_within_a_reentrant_checkpoint_is_refused(llama: Any) -> None:
    class Checkpointed(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, reentrant: bool = True) -> Any:
            hidden = self.model(input_ids).last_hidden_state
            logits: Any = checkpoint(self.lm_head, hidden, use_reentrant=reentrant)
            return {"loss": self.loss_function(logits, labels, VOCAB_SIZE)}

    model = prepared(Checkpointed(llama.config))
    check_loss(model, lambda x: x(**BATCH, reentrant=False)["loss"])
    integration.patch(model)
    with pytest.raises(PatchError, match="use_reentrant=False"):
        model(**BATCH)


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_logits_after_any_optimizers_step_are_refused(llama: Any, fused: bool) -> None:
    model = integration.patch(copy.deepcopy(llama))
    output = model(**BATCH)
    output.loss.backward()
    torch.optim.AdamW(model.parameters(), fused=fused).step()
    with pytest.raises(PatchError, match="read them before"):
        output.logits.exp()
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    output = model(**BATCH)
    torch.optim.AdamW(other.parameters(), fused=fused).step()
    output.logits.exp()


def test_logits_of_other_weights_or_adapters_are_refused(llama: Any) -> None:
    integration.patch(llama)
    weights = {name: x.detach() for name, x in llama.named_parameters()}
    output = torch.func.functional_call(llama, weights, (), BATCH)
    with pytest.raises(PatchError, match="adapters"):
        output.logits.exp()
    config = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False)
    model = integration.patch(peft.get_peft_model(copy.deepcopy(llama), config))
    with model.disable_adapter():
        output = model(**BATCH)
    with pytest.raises(PatchError, match="adapters"):
        output.logits.exp()


def test_writes_reach_the_logits_or_are_refused(llama: Any) -> None:
    model = integration.patch(llama)
    logits = model(**BATCH).logits
    flat = logits.view(-1, VOCAB_SIZE)
    for write in (lambda x: x.div_(2), lambda x: x.__setitem__(0, 0.0), lambda x: x.__imul__(2)):
        with pytest.raises(PatchError, match="would write to a part of the logits"):
            write(flat)
    assert not logits.is_computed
    before = logits.clone()
    logits.mul_(2)
    assert torch.equal(logits.clone(), 2 * before)
    with pytest.raises(PatchError, match=r"were written to in place, or .* after a part"):
        flat.clone()
    # A view that is taken now is one of the tensor.
    logits.view(-1, VOCAB_SIZE).zero_()
    assert not logits.any()


UNNAMED: dict[str, Callable[[Tensor], Any]] = {
    "inplace": lambda x: F.relu(x, inplace=True),
    "out": lambda x: torch.mul(x, 20, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 20.0),
    "data": lambda x: x.data.mul_(20),
    "numpy": lambda x: x.numpy().__setitem__(..., 0.0),
}


@pytest.mark.parametrize("write", UNNAMED.values(), ids=UNNAMED)
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_writes_without_a_name_reach_the_logits_or_are_refused(
    llama: Any, write: Callable[[Tensor], Any], context: Callable[[], Any]
) -> None:
    expected = llama(**BATCH).logits
    with context():
        write(expected)
    integration.patch(llama)
    logits = llama(**BATCH).logits
    flat = logits.flatten(0, 1)
    with context():
        write(logits)
    torch.testing.assert_close(logits.clone(), expected)
    with pytest.raises(PatchError, match=r"or .data, .numpy\(\) or the like gave their memory out"):
        F.cross_entropy(flat, BATCH["labels"].flatten())


class Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return ctx.saved_tensors[0].softmax(-1) * grads[0][..., None]


class InForward(torch.autograd.Function):
    """Computes the gradient in its forward, without a graph."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        logits = logits.detach()
        ctx.save_for_backward(logits.softmax(-1))
        return logits.logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * grads[0][..., None]


def lse(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1)


@pytest.mark.parametrize(
    "read",
    [
        Entropy.apply,
        InForward.apply,
        lambda logits: Entropy.apply(logits[:, :-1]),
        lambda logits: Entropy.apply(logits.float() / 0.7),
        lambda logits: checkpoint(lse, logits, use_reentrant=True),
    ],
    ids=["function", "in_forward", "slice", "scaled", "reentrant"],
)
def test_a_gradient_that_would_be_lost_is_refused(llama: Any, read: Callable[..., Any]) -> None:
    integration.patch(llama)
    output = llama(**BATCH)
    loss = output.loss + 0.01 * read(output.logits).square().mean()
    with pytest.raises(PatchError, match=r"gradient would be lost: pass it outputs.logits.clone"):
        loss.backward()
    integration.remove(llama)
    check_loss(llama, lambda model: read(model(**BATCH).logits.clone()).square().mean())


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_checkpoint_reads_logits(llama: Any, chunks: int) -> None:
    def loss(model: Any) -> Tensor:
        output = model(**BATCH)
        parts = output.logits.chunk(chunks, 1)
        values = [checkpoint(lse, part, use_reentrant=False) for part in parts]
        return output.loss + 0.01 * torch.cat(values, 1).square().mean()

    check_loss(llama, loss)


def test_a_weight_that_changes_before_the_backward_is_noticed(llama: Any) -> None:
    """As without the patch: by torch, of what autograd has saved."""
    integration.patch(llama)
    loss = llama(**BATCH).logits.square().mean()
    weight = llama.get_output_embeddings().weight
    with torch.no_grad():
        weight.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_indices_and_columns_that_are_used_again(llama: Any) -> None:
    """Logits are computed when they are read: from the values that a mask, a list or a tensor of
    columns had when it was applied."""

    def parts() -> list[Tensor]:
        logits = llama(**BATCH).logits
        mask, columns, index = torch.zeros_like(MASK), torch.zeros(VOCAB_SIZE), [0]
        rows, taken = torch.tensor([0, 1]), []
        for i in range(2):
            mask.zero_()
            mask[i] = True
            columns[i] = index[0] = i
            taken += [logits[mask], logits + columns, logits[index], logits[0, rows]]
            rows += 3
        return [x.clone() for x in taken]

    with torch.no_grad():
        expected = parts()
        integration.patch(llama)
        torch.testing.assert_close(parts(), expected)
    integration.remove(llama)


def lora(model: Any) -> Any:
    config = peft.LoraConfig(target_modules=["lm_head"], init_lora_weights=False, lora_dropout=0.5)
    return peft.get_peft_model(model, config)


def scaling_of(model: Any) -> Any:
    return model.base_model.model.lm_head.scaling


def doubled(module: Any, inputs: Any) -> Any:
    return (inputs[0] * 2,)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "evaluation, LoRA with dropout": (lora, lambda x: x.eval()),
    "a merged adapter": (lora, lambda x: x.merge_adapter()),
    "an adapter's scale": (lora, lambda x: scaling_of(x).update(default=0.1)),
    "a pre-hook": (lambda x: x, lambda x: x.lm_head.register_forward_pre_hook(doubled)),
    "a frozen head": (lambda x: x, lambda x: x.lm_head.requires_grad_(False)),
    "a buffer": (lambda x: x, lambda x: x.lm_head.register_buffer("scale", torch.ones(1))),
    "half": (lambda x: x, lambda x: x.half()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_head_that_changes_before_its_logits_are_read(change: str) -> None:
    prepare, then = CHANGES[change]
    model = prepare(make("llama")).train()
    integration.patch(model)
    logits = model(**BATCH).logits
    then(model)
    with pytest.raises(PatchError, match="the head changed after it was called"):
        logits.clone()


def test_the_mode_of_a_head_without_one() -> None:
    model = make("llama").train()
    integration.patch(model)
    logits = model(**BATCH).logits
    model.eval()
    assert logits.clone().equal(model(**BATCH).logits.clone())
