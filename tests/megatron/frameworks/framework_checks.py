"""What test_frameworks.py checks on two ranks that share a head: values and gradients of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patch
from cce_dist.reference import Reference, linear_cross_entropy_reference
from megatron_patch.frameworks import nemo_rl, skyrl, verl
from tests.megatron.frameworks.stand_ins import (
    NEMO_SETUP,
    NEMO_UTILS,
    SKYRL,
    VERL,
    load,
    stand_ins,
)
from tests.megatron.megatron_head import make_model, processed, whole
from tests.megatron.megatron_setup import CLASSES, HIDDEN, SEQUENCE, Setup, megatron

TEMPERATURE = 0.7
OPTIONS: dict[str, Any] = {"backend": "torch", "gradient": "exact"}
BY_NEMO_RL = {"return_logprobs_for_linear_ce_fusion": True}
SETUPS = {
    "alone_rows": Setup(tp=2),
    "sequence_parallel": Setup(tp=2, sequence_parallel=True),
    "tied": Setup(tp=2, sequence_parallel=True, tied=True),
}
close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)


def run_check(_: Any, check: Callable[..., None], setup: str, is_real: bool) -> None:
    with nullcontext() if is_real else stand_ins(), megatron(SETUPS[setup]):
        try:
            check(SETUPS[setup])
        finally:
            for framework in (verl, skyrl, nemo_rl):
                framework.remove()
            megatron_patch.remove()


class Case:
    """A model, hidden [s, b, h] of its last layer (a shard under sequence parallelism), and ids."""

    def __init__(self, setup: Setup, batch: int) -> None:
        self.setup, self.model = setup, make_model(setup)
        generator = torch.Generator().manual_seed(3)
        hidden = torch.randn(SEQUENCE, batch, HIDDEN, generator=generator)
        if setup.sequence_parallel:
            hidden = hidden.chunk(2)[dist.get_rank()]
        self.hidden = hidden.clone().requires_grad_()
        self.ids = torch.randint(CLASSES, (batch, SEQUENCE), generator=generator)
        self.weight = (
            self.model.shared_embedding_or_output_weight()
            if setup.tied
            else self.model.output_layer.weight
        )
        self.group = self.model.output_layer.tp_group
        rows = self.weight.shape[0]
        self.rows = (dist.get_rank() * rows, (dist.get_rank() + 1) * rows)

    def processed(self, processor: Any, labels: Tensor | None, context: Any) -> Any:
        return processed(processor, self.model, self.hidden, labels, context, self.ids)

    def golden(self, targets: Tensor, temperature: float) -> tuple[Reference, list[Tensor]]:
        """Float64, of all tokens [b, s] and classes; and its leaves, hidden [s, b, h] first."""
        every = whole(self.hidden) if self.setup.sequence_parallel else self.hidden.detach()
        leaves = [x.double().requires_grad_() for x in (every, whole(self.weight))]
        result = linear_cross_entropy_reference(
            leaves[0].transpose(0, 1), leaves[1], targets, temperature=temperature
        )
        return result, leaves

    def share(self, grads: tuple[Tensor, ...]) -> list[Tensor]:
        """This rank's part of the leaves' gradients."""
        hidden, weight = grads
        if self.setup.sequence_parallel:
            hidden = hidden.chunk(2)[dist.get_rank()]
        return [hidden, weight.chunk(2)[dist.get_rank()]]

    def grads(self, total: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(total, (self.hidden, self.weight))


def same(
    case: Case, ours: tuple[Tensor, ...], golden: tuple[Tensor, ...], of: list[Tensor]
) -> None:
    """Values, and the gradients of a loss that reads each of them."""
    for x, right in zip(ours, golden, strict=True):
        assert x.dtype == torch.float32
        close(x.detach().double(), right.detach())
    total = sum((x.sin().sum() for x in golden), start=torch.zeros(()).double())
    right = case.share(torch.autograd.grad(total, of))
    grads = case.grads(sum((x.sin().sum() for x in ours), start=torch.zeros(())))
    for x, right_one in zip(grads, right, strict=True):
        close(x.double(), right_one)


@contextmanager
def taking_output_processors(model: Any) -> Iterator[None]:
    """Megatron before 0.18 has none: then the model says that it takes one, and isn't called."""
    try:
        if hasattr(model.forward, "__func__"):
            model.forward = lambda output_processor=None, output_processor_context=None: None
        yield
    finally:
        vars(model).pop("forward", None)


def check_verl(setup: Setup) -> None:
    module: Any = load(VERL)
    case = Case(setup, 1)
    verl.apply(**OPTIONS)
    with taking_output_processors(case.model):
        module.patch_fused_forward(case.model)
    context = module.FusedOutputProcessorContext(temperature=TEMPERATURE)
    labels = case.ids.roll(-1, -1)
    output = case.processed(module.fused_output_processor, labels, context)
    assert type(output) is module.CausalLMOutputForPPO and output.hidden_states is case.hidden
    golden, leaves = case.golden(labels, TEMPERATURE)
    right = (-golden.nll.view(-1), golden.entropy.view(-1))
    same(case, (output.log_probs, output.entropy), right, leaves)

    process = partial(case.processed, module.fused_output_processor)
    with pytest.raises(ValueError, match="labels must be given"):
        process(None, context)
    with pytest.raises(megatron_patch.PatchError, match=r"one row of packed .*got \[2, 8\]"):
        process(labels.view(2, -1), context)
    with pytest.raises(megatron_patch.PatchError, match=r"temperature alone, got \['temp.*top_k"):
        process(labels, SimpleNamespace(temperature=TEMPERATURE, top_k=20))
    case.model.config.config_logger_dir = "somewhere"
    with pytest.raises(megatron_patch.PatchError, match="config_logger_dir must be empty"):
        process(labels, context)
    case.model.config.config_logger_dir = ""
    case.model.forward = lambda labels=None: None
    with pytest.raises(megatron_patch.PatchError, match="whose forward takes output_processor"):
        module.patch_fused_forward(case.model)
    del case.model.forward
    verl.remove()
    assert megatron_patch.status().heads == ()
    assert not hasattr(module.fused_output_processor, "__wrapped__")


def skyrls(case: Case, module: Any) -> tuple[Tensor, ...]:
    """By SkyRL's functions: log-probabilities, those of packed rows, and entropies [b, s]."""
    context: dict[str, Tensor] = {}
    hidden = case.processed(module._fused_lm_head_output_processor, None, context)
    weight = context["lm_head_weight"]
    keywords: dict[str, Any] = {
        **dict(zip(("vocab_start_index", "vocab_end_index"), case.rows, strict=True)),
        "inference_only": False,
        "chunk_size": 5,
        "temperature": TEMPERATURE,
        "fused_backend": "torch",
    }
    logprobs = module.from_parallel_hidden_to_logprobs(
        hidden, weight, case.ids, tp_group=case.group, cp_group=None, **keywords
    )
    packed = module.from_parallel_hidden_to_logprobs_packed_sequences(
        hidden[:1],
        weight,
        case.ids[:1],
        torch.tensor([0, SEQUENCE]),
        SEQUENCE,
        group=case.group,
        cp_group=None,
        **keywords,
    )
    with torch.no_grad():
        entropy = module._fused_vocab_parallel_entropy_from_hidden(
            hidden, weight, case.group, chunk_size=5, temperature=TEMPERATURE
        )
    return logprobs, packed, entropy


def check_skyrl(setup: Setup) -> None:
    module: Any = load(SKYRL)
    case = Case(setup, 2)
    skyrl.apply(**OPTIONS)
    logprobs, packed, entropy = skyrls(case, module)
    golden, leaves = case.golden(case.ids.roll(-1, -1), TEMPERATURE)
    right = -golden.nll[:, :-1]
    same(case, (logprobs, packed), (right, right[:1]), leaves)
    close(entropy.double(), golden.entropy.detach())
    assert logprobs.shape == (2, SEQUENCE - 1)

    process = partial(case.processed, module._fused_lm_head_output_processor, None, {})
    refuses_other_heads(case.model, process)


def refuses_other_heads(model: Any, forward: Callable[[], Any]) -> None:
    """Heads whose weight alone does not give their logits."""
    layer = model.output_layer
    hook = layer.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(megatron_patch.PatchError, match=r"pre-hooks.*overlap_param_gather=False"):
        forward()
    hook.remove()
    hook = layer.register_forward_hook(lambda *_: None)
    with pytest.raises(megatron_patch.PatchError, match="cannot use this model: output_layer has"):
        forward()
    hook.remove()
    layer.__class__ = type("WithSoftcap", (type(layer),), {})
    with pytest.raises(megatron_patch.PatchError, match="output_layer is a WithSoftcap"):
        forward()
    layer.__class__ = type(layer).__bases__[0]
    model.config.use_mup = True
    with pytest.raises(megatron_patch.PatchError, match="use_mup scales logits"):
        forward()
    model.config.use_mup = False


def check_skyrl_as_theirs(setup: Setup) -> None:
    """SkyRL's own function, with ours and without."""
    module: Any = load(SKYRL)
    case = Case(setup, 2)
    theirs = skyrls(case, module)
    right = case.grads(theirs[0].sin().sum() + theirs[1].cos().sum())
    skyrl.apply(**OPTIONS)
    ours = skyrls(case, module)
    for x, right_one in zip(ours, theirs, strict=True):
        assert (x.dtype, x.shape) == (right_one.dtype, right_one.shape)
        close(x, right_one)
    for x, right_one in zip(
        case.grads(ours[0].sin().sum() + ours[1].cos().sum()), right, strict=True
    ):
        close(x, right_one)


def nemos(case: Case, **others: Any) -> Tensor:
    module: Any = load(NEMO_UTILS)
    return module.from_parallel_hidden_states_to_logprobs(
        case.hidden,
        case.weight,
        None,
        case.ids,
        vocab_start_index=case.rows[0],
        vocab_end_index=case.rows[1],
        tp_group=case.group,
        **{"inference_only": False, "cp_group": None, "chunk_size": 5, **others},
    )


def check_nemo_rl(setup: Setup) -> None:
    load(NEMO_UTILS)
    case = Case(setup, 2)
    nemo_rl.apply(**OPTIONS)
    logprobs = nemos(case)
    golden, leaves = case.golden(case.ids.roll(-1, -1), 1.0)
    same(case, (logprobs,), (-golden.nll[:, :-1],), leaves)
    assert not nemos(case, inference_only=True).requires_grad
    with pytest.raises(
        megatron_patch.PatchError, match=r"context_parallel_size must be 1 .* got 2"
    ):
        nemos(case, cp_group=case.group)


@contextmanager
def forward_of_gpt_model() -> Iterator[None]:
    """NeMo-RL replaces it, and never puts it back."""
    gpt_model: Any = load("megatron.core.models.gpt").GPTModel
    before = gpt_model.forward
    try:
        yield
    finally:
        nemo_rl.remove()
        gpt_model.forward = before
        for name in [x for x in vars(gpt_model) if "linear_ce_fusion" in x]:
            delattr(gpt_model, name)


def check_nemo_rl_model(setup: Setup, is_set_up: bool) -> None:
    """A model's forward, which NeMo-RL replaces before apply(), or after it."""
    module: Any = load(NEMO_SETUP if is_set_up else NEMO_UTILS)
    case = Case(setup, 2)
    model = case.model

    def forward() -> Tensor:
        inputs = {"decoder_input": case.hidden, "labels": case.ids}
        return model(case.ids, None, None, **inputs, **BY_NEMO_RL)

    with forward_of_gpt_model():
        if is_set_up:
            module.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=5)
        nemo_rl.apply(**OPTIONS)
        if not is_set_up:
            module.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=5)
        golden, leaves = case.golden(case.ids.roll(-1, -1), 1.0)
        same(case, (forward(),), (-golden.nll[:, :-1],), leaves)
        refuses_other_heads(model, forward)
        model.config.mtp_num_layers = 2
        with pytest.raises(megatron_patch.PatchError, match=r"mtp_num_layers must be 0 .*got 2"):
            forward()
        with torch.no_grad():
            close(forward().double(), -golden.nll[:, :-1].detach())
        model.config.mtp_num_layers = None
        with_logits = model(case.ids, torch.arange(SEQUENCE).expand_as(case.ids), None)
        assert with_logits.shape[:2] == case.ids.shape
        nemo_rl.remove()
        model.config.use_mup = True
        assert forward() == "theirs"


def check_nemo_rl_as_theirs(setup: Setup) -> None:
    """NeMo-RL's own function, with ours and without; it knows sequence parallelism alone."""
    load(NEMO_UTILS)
    case = Case(setup, 2)
    theirs = nemos(case)
    right = case.grads(theirs.sin().sum())
    nemo_rl.apply(**OPTIONS)
    ours = nemos(case)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    close(ours, theirs)
    for x, right_one in zip(case.grads(ours.sin().sum()), right, strict=True):
        close(x, right_one)


def check_nemo_rl_model_as_theirs(setup: Setup) -> None:
    """NeMo-RL's forward of a whole model, with ours and without."""
    module: Any = load(NEMO_UTILS)
    case = Case(setup, 2)
    positions = torch.arange(SEQUENCE).expand_as(case.ids)
    mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        logprobs = case.model(case.ids, positions, mask, labels=case.ids, **BY_NEMO_RL)
        return logprobs, torch.autograd.grad(logprobs.sin().sum(), list(case.model.parameters()))

    with forward_of_gpt_model():
        module.patch_gpt_model_forward_for_linear_ce_fusion(chunk_size=5)
        theirs, right = run()
        nemo_rl.apply(**OPTIONS)
        ours, grads = run()
    close(ours, theirs)
    for x, right_one in zip(grads, right, strict=True):
        close(x, right_one)


def packed_model(setup: Setup) -> Any:
    """A model that takes packed tokens without TransformerEngine: no token sees another."""
    model = make_model(setup)
    model.embedding.add_position_embedding = False
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.forward = lambda query, key, value, *_, **__: (
            value.flatten(-2)
        )
    return model


def check_verl_as_theirs(setup: Setup) -> None:
    """verl's fused forward with ours, beside verl's forward that makes logits."""
    module: Any = load(VERL)
    dense: Any = load("verl.models.mcore.model_forward").gptmodel_forward_model_engine
    parallel: Any = load("verl.utils.megatron.tensor_parallel")
    model, generator = packed_model(setup), torch.Generator().manual_seed(1)
    texts = [torch.randint(CLASSES, (size,), generator=generator) for size in (5, 9, 3)]
    ids = torch.nested.as_nested_tensor(texts, layout=torch.jagged)

    def with_logits(logits: Tensor, label: Tensor) -> dict[str, Tensor]:
        logits = logits / TEMPERATURE
        entropy = parallel.vocab_parallel_entropy(logits.clone())
        logprobs = parallel.vocab_parallel_log_probs_from_logits(logits, label)
        return {"log_probs": logprobs, "entropy": entropy}

    def total(output: dict[str, Tensor]) -> Tensor:
        return sum(
            (output[x].values().sin().sum() for x in ("log_probs", "entropy")),
            start=torch.zeros(()),
        )

    theirs = dense(
        model, ids, {}, logits_processor=with_logits, logits_processor_args={"label": ids}
    )
    right = torch.autograd.grad(total(theirs), list(model.parameters()), allow_unused=True)
    verl.apply(**OPTIONS)
    module.patch_fused_forward(model)
    ours = module.fused_forward_model_engine()(
        model, ids, ids, {}, temperature=TEMPERATURE, calculate_entropy=True, pad_token_id=0
    )
    grads = torch.autograd.grad(total(ours), list(model.parameters()), allow_unused=True)
    for name in ("log_probs", "entropy"):
        close(ours[name].values(), theirs[name].values())
    for x, right_one in zip(grads, right, strict=True):
        assert (x is None) == (right_one is None)
        if x is not None:
            close(x, right_one)
