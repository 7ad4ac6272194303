"""A head of Megatron's on two ranks, its inputs, and its loss with the patch and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patch
from tests.megatron.megatron_jobs import build, make_config
from tests.megatron.megatron_setup import CLASSES, HIDDEN, SEQUENCE, Setup, megatron

# Megatron's own loss is off by a rounding: of few tokens, how much is the luck of a CPU.
BATCH = 48
SETUP = Setup(tp=2)
Check = Callable[[], None]


class Checks(dict[str, Check]):
    """Checks by their names; each function that it decorates is one."""

    def __call__(self, function: Check) -> Check:
        self[function.__name__] = function
        return function


def run_in(setup: Setup, check: Check, *, keeps: bool = True) -> None:
    with megatron(setup, keeps=keeps):
        try:
            check()
        finally:
            megatron_patch.remove()


def make_model(setup: Setup = SETUP) -> Any:
    return build(setup, make_config(setup))[0]


def inputs(setup: Setup = SETUP) -> tuple[Tensor, Tensor]:
    """A leaf: this rank's hidden [s or s / tp, b, h]; labels [b, s] of which some are no class."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(SEQUENCE, BATCH, HIDDEN, generator=generator)
    labels = torch.randint(0, CLASSES, (BATCH, SEQUENCE), generator=generator)
    labels[:, ::4], labels[0, 1] = -100, CLASSES + 7
    if setup.sequence_parallel:
        hidden = hidden.chunk(2)[dist.get_rank()]
    return hidden.to(setup.dtype).clone().requires_grad_(), labels


def head_loss(model: Any, hidden: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """As GPTModel._postprocess calls both."""
    tied = model.share_embeddings_and_output_weights
    weight = model.shared_embedding_or_output_weight() if tied else None
    logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=None)
    if scale != 1:
        logits = logits * scale
    return model.compute_language_model_loss(labels, logits)


def processed(
    processor: Any,
    model: Any,
    hidden: Tensor,
    labels: Tensor | None,
    context: Any,
    ids: Tensor | None = None,
) -> Any:
    """As GPTModel._postprocess of megatron-core 0.19 calls an output processor."""
    tied = model.share_embeddings_and_output_weights
    return processor(
        hidden_states=hidden,
        output_layer=model.output_layer,
        output_weight=model.shared_embedding_or_output_weight() if tied else None,
        labels=labels,
        loss_mask=None,
        input_ids=ids,
        position_ids=None,
        attention_mask=None,
        decoder_input=None,
        inference_context=None,
        packed_seq_params=None,
        runtime_gather_output=None,
        context=context,
        compute_language_model_loss=model.compute_language_model_loss,
        scale_logits=getattr(model, "_scale_logits", None),
        config=model.config,
    )


def whole(tensor: Tensor) -> Tensor:
    parts = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(parts, tensor.detach().contiguous())
    return torch.cat(parts)


def dense(
    dtype: torch.dtype,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    upstream: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    classes: int = CLASSES,
) -> dict[str, Tensor]:
    """Loss [b, s] and gradients by all of hidden and weight, from all logits in `dtype`."""
    hidden, weight = (x.detach().to(dtype).requires_grad_() for x in (hidden, weight))
    logits = hidden @ weight[:classes].T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    ids = labels.T.where((labels.T >= 0) & (classes > labels.T), torch.tensor(-100))
    nll = torch.nn.functional.cross_entropy(
        (scale * logits).flatten(0, 1), ids.flatten(), ignore_index=-100, reduction="none"
    )
    loss = nll.view(ids.shape).T
    (loss * upstream.to(dtype)).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    return {"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad}


@contextmanager
def changed(target: Any, **values: Any) -> Iterator[None]:
    missing = object()
    before = {name: vars(target).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(target, name) if value is missing else setattr(target, name, value)
