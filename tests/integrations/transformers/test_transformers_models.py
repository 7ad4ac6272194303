"""Models, their wrappers and their heads that a patch can get wrong without a word."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from cce_dist.integrations import transformers as integration  # noqa: E402
from cce_dist.integrations.transformers import PatchError  # noqa: E402
from cce_dist.integrations.transformers.logits import DeferredLogits  # noqa: E402
from tests.integrations.architectures import VOCAB_SIZE, batch, make, prepared  # noqa: E402
from tests.integrations.beside import check_loss, run_loss  # noqa: E402

# transformers and its models warn of what comes in later versions.
pytestmark = pytest.mark.filterwarnings("ignore")
BATCH = batch()
MASK = BATCH["labels"] != -100


class Twice(transformers.LlamaForCausalLM):
    """Calls itself, or another model that has its head, within its forward."""

    other: Any = None

    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        if others.pop("inner", False):
            return super().forward(input_ids=input_ids, labels=labels)
        inner = self.other[0] if self.other else self
        keywords = {} if self.other else {"inner": True}
        first = inner(input_ids=input_ids.flip(1), labels=labels, **keywords)
        output = super().forward(input_ids=input_ids, labels=labels)
        output.loss = output.loss + first.loss
        return output


@pytest.mark.parametrize("shares", [False, True], ids=["itself", "another"])
def test_a_forward_within_a_forward_of_the_same_head(llama: Any, shares: bool) -> None:
    model = prepared(Twice(llama.config))
    if shares:
        other = copy.deepcopy(llama)
        other.lm_head = model.lm_head
        model.other = [other]  # no child of the model
    expected = run_loss(model, lambda x: x(**BATCH).loss)
    for each in [model, *(model.other or [])]:
        integration.patch(each)
    torch.testing.assert_close(
        run_loss(model, lambda x: x(**BATCH).loss), expected, atol=1e-6, rtol=1e-5
    )
    assert "forward" not in vars(model.lm_head)


def test_an_inner_model_may_compute_the_loss(llama: Any) -> None:
    """As Blip2 with T5 does, when apply() has patched both."""

    class Outer(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
            return self.inner[0](input_ids=input_ids, labels=labels)

    outer, inner = Outer(llama.config).train(), copy.deepcopy(llama)
    outer.lm_head, outer.inner = inner.lm_head, [inner]
    expected = outer(**BATCH).loss
    integration.patch(outer)
    integration.patch(inner)
    torch.testing.assert_close(outer(**BATCH).loss, expected, atol=1e-6, rtol=1e-6)


def test_a_second_thread_is_refused(llama: Any) -> None:
    integration.patch(llama)
    errors: list[BaseException] = []

    def call() -> None:
        try:
            llama(**BATCH)
        except PatchError as error:
            errors.append(error)

    def within(*_: Any) -> None:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    handle = llama.model.layers[0].register_forward_hook(lambda *_: handle.remove() or within())
    llama(**BATCH).loss.backward()
    assert "another thread" in str(errors[0])
    assert "forward" not in vars(llama.lm_head)


def test_a_pickled_model_is_not_patched(llama: Any) -> None:
    buffer = io.BytesIO()
    torch.save(integration.patch(llama), buffer)
    buffer.seek(0)
    model = torch.load(buffer, weights_only=False)
    assert not isinstance(model(**BATCH).logits, DeferredLogits)
    assert isinstance(integration.patch(model)(**BATCH).logits, DeferredLogits)


def test_remove_leaves_the_wrappers_of_others(llama: Any) -> None:
    model = integration.patch(copy.deepcopy(llama))
    patched = model.forward

    def doubled(*values: Any, **keywords: Any) -> Any:
        output = patched(*values, **keywords)
        output.loss = 2 * output.loss
        return output

    model.forward = doubled
    twice = model(**BATCH).loss
    integration.remove(model)
    output = model(**BATCH)
    assert type(output.logits) is Tensor
    torch.testing.assert_close(output.loss, twice, atol=1e-5, rtol=1e-6)
    output = integration.patch(model)(**BATCH)
    assert isinstance(output.logits, DeferredLogits)
    torch.testing.assert_close(output.loss, twice, atol=1e-5, rtol=1e-6)
    # As Accelerate unwraps a forward.
    model.forward = type(model).forward.__get__(model)
    assert isinstance(integration.patch(model)(**BATCH).logits, DeferredLogits)


@pytest.mark.parametrize("wrap", ["trl", "functools"])
def test_a_wrapper_that_names_the_classs_forward(llama: Any, wrap: str) -> None:
    model = integration.patch(copy.deepcopy(llama))
    expected = llama(**BATCH).loss
    if wrap == "trl":
        # As TRL's trainers take a model.
        pytest.importorskip("trl.trainer.utils").add_fused_lm_head(model)
    else:
        model.forward = functools.wraps(type(model).forward)(functools.partial(model.forward))
    integration.patch(model)
    with integration.patched(model) as status:
        assert status.models == (type(model).__name__,)
    integration.remove(model)
    integration.patch(model)
    output = model(**BATCH)
    assert isinstance(output.logits, DeferredLogits)
    torch.testing.assert_close(output.loss, expected)
    assert model.eval().generate(BATCH["input_ids"], max_new_tokens=2).numel()
    integration.remove(model)
    assert type(model.train()(**BATCH).logits) is Tensor


def test_no_hook_of_optimizers_is_left(llama: Any) -> None:
    before = dict(_global_optimizer_post_hooks)
    second = integration.patch(copy.deepcopy(llama))
    with integration.patched(llama):
        integration.remove(second)
        assert len(_global_optimizer_post_hooks) == len(before) + 1
    assert dict(_global_optimizer_post_hooks) == before
    integration.patch(copy.deepcopy(llama))
    integration.remove()
    assert dict(_global_optimizer_post_hooks) == before


def test_a_module_with_several_models_is_refused(llama: Any) -> None:
    pair = nn.ModuleDict({"teacher": make("gpt2"), "student": llama})
    with pytest.raises(PatchError, match="with GPT2LMHeadModel, LlamaForCausalLM: pass one of"):
        integration.patch(pair)
    # A tower without a head is none of them.
    integration.patch(nn.ModuleDict({"tower": make("gpt2").transformer, "model": llama}))
    assert integration.status().models == ("LlamaForCausalLM",)


def test_a_context_leaves_what_was_patched_before() -> None:
    first, second = make("llama"), make("llama")
    integration.patch(first)
    with integration.patched(first), integration.patched(second), integration.patched():
        third = make("llama")
        assert isinstance(third(**BATCH).logits, DeferredLogits)
    kinds = [type(model(**BATCH).logits) for model in (first, second, third)]
    assert kinds == [DeferredLogits, Tensor, Tensor]
    integration.apply()
    with integration.patched(second), integration.patched():
        fourth = make("llama")
    kinds = [type(model(**BATCH).logits) for model in (first, second, fourth, make("llama"))]
    assert kinds == [DeferredLogits, Tensor, DeferredLogits, DeferredLogits]
    assert len(integration.status().models) == 3


@pytest.mark.parametrize("patched_first", [True, False])
def test_accelerate_unwraps_a_patched_model(llama: Any, patched_first: bool) -> None:
    accelerate = pytest.importorskip("accelerate")
    expected, model = llama(**BATCH).loss, copy.deepcopy(llama)
    # A process has one precision, and a Trainer of another test may have set it.
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
        if patched_first:
            integration.patch(model)
        integration.patch(accelerator.prepare(model))
        for _ in range(2):
            assert isinstance(model(**BATCH).logits, DeferredLogits)
            accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            output = model(**BATCH)
            assert isinstance(output.logits, DeferredLogits)
            # Without autocast, as Accelerate leaves a model.
            torch.testing.assert_close(output.loss, expected, atol=1e-6, rtol=0)
            assert "input_ids" in inspect.signature(model.forward).parameters
            assert pickle.loads(pickle.dumps(model)).forward.__func__ is type(model).forward
            accelerator.prepare(model)
        integration.remove(model)
        accelerator.unwrap_model(model, keep_fp32_wrapper=False)
        assert type(model(**BATCH).logits) is Tensor
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    # A patch that somebody has put aside is not said to be there.
    model.forward = type(model).forward.__get__(model)
    assert integration.status().models == ()


@pytest.mark.parametrize("training", [True, False])
def test_a_replica_of_data_parallel_has_its_own_weights(llama: Any, training: bool) -> None:
    model = integration.patch(copy.deepcopy(llama)).train(training)
    head = model.lm_head._replicate_for_data_parallel()
    head._parameters = {"weight": 2 * model.lm_head.weight, "bias": None}
    replica = model._replicate_for_data_parallel()
    replica._modules = {**model._modules, "lm_head": head}
    logits = replica(**BATCH).logits
    assert isinstance(logits, DeferredLogits) == training
    torch.testing.assert_close(logits.clone(), 2 * model(**BATCH).logits.clone())
    integration.remove(model)
    assert "_replicate_for_data_parallel" not in vars(model)


class Fp32Output(nn.Sequential):
    """As PEFT's notebooks wrap the head of an 8-bit model."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


@pytest.mark.parametrize("wide", ["output", "input"])
def test_a_head_that_returns_another_dtype(wide: str) -> None:
    model = make("llama").to(torch.bfloat16)
    if wide == "output":
        model.lm_head = Fp32Output(model.lm_head)
    else:
        model.lm_head.float()
        model.lm_head.register_forward_pre_hook(lambda head, args: (args[0].float(),))
    # As T5's, which leaves logits in their dtype.
    model.loss_function = lambda logits, labels, **others: F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    before = model(**BATCH)
    after = integration.patch(model)(**BATCH)
    assert before.loss.dtype == after.loss.dtype == torch.float32
    # The head's own rounding to bf16 is not in our loss.
    torch.testing.assert_close(after.loss, before.loss, atol=2e-3, rtol=0)
    assert after.logits.dtype == after.logits.clone().dtype == torch.float32
    assert torch.equal(after.logits.clone(), before.logits)


class Fp32Head(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return F.linear(input.float(), self.weight)


def test_a_head_that_switches_autocast_off() -> None:
    model = make("llama")
    model.lm_head = Fp32Head(32, VOCAB_SIZE, bias=False)

    def loss(model: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(**BATCH).loss

    check_loss(model, loss)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
def test_no_logits_under_ddp(llama: Any, option: str, tmp_path: Path) -> None:
    """DDP clones what its module returns; Trainer asks for unused parameters."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        expected = run_loss(llama, lambda model: model(**BATCH).loss)
        integration.patch(llama)
        model = DistributedDataParallel(llama, **{option: True})
        for _ in range(3):
            outputs: list[Any] = []

            def loss(model: Any, outputs: list[Any] = outputs) -> Tensor:
                outputs.append(model(**BATCH))
                return outputs[0].loss

            torch.testing.assert_close(run_loss(model, loss), expected, atol=1e-6, rtol=1e-5)
            assert isinstance(outputs[0].logits, DeferredLogits)
            assert not outputs[0].logits.is_computed
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("strict", [False, True], ids=["plain", "strict"])
def test_a_patched_model_is_exported(strict: bool) -> None:
    inputs = {"input_ids": batch()["input_ids"], "use_cache": False}
    model = make("llama", num_hidden_layers=1).eval()
    expected = model(**inputs).logits
    integration.patch(model)
    exported = torch.export.export(model, (), inputs, strict=strict).module()
    assert torch.equal(exported(**inputs).logits, expected)
    # The compiler, which a strict export begins with, wraps it.
    with pytest.raises(Exception, match=r"must be in eval\(\), or without labels"):
        torch.export.export(model.train(), (), {**batch(), "use_cache": False}, strict=strict)
