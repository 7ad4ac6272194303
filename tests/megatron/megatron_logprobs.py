"""What test_megatron.py checks of `megatron_patch.logprobs`, on ranks that share a head."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron import core
from torch import Tensor

import megatron_patch
from cce_dist import TokenLogprobs, TokenSupport
from cce_dist.reference import Reference, linear_cross_entropy_reference
from megatron_patch import LogprobOptions
from megatron_patch.logprobs import turn_support
from tests.megatron.megatron_head import (
    BATCH,
    SETUP,
    Checks,
    head_loss,
    inputs,
    make_model,
    processed,
    whole,
)
from tests.megatron.megatron_setup import CLASSES, SEQUENCE, Setup

CHECKS = check = Checks()
STATS: Any = ("entropy", "sum_p2", "correct", "mean_logit")


def logprobs_of(model: Any, hidden: Tensor, labels: Tensor | None, context: Any) -> TokenLogprobs:
    return processed(megatron_patch.logprobs, model, hidden, labels, context)


def listing() -> tuple[Tensor, Tensor, TokenSupport, Tensor]:
    """Temperatures [b, s]; a support as a mask and as lists; candidates [b, s, 3]."""
    generator = torch.Generator().manual_seed(5)
    shape = (BATCH, SEQUENCE)
    temperature = 0.5 + torch.rand(shape, generator=generator)
    allowed = torch.rand(*shape, CLASSES, generator=generator) < 0.3
    allowed.scatter_(-1, inputs()[1].clamp(0, CLASSES - 1)[..., None], True)
    flat = allowed.view(-1, CLASSES)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), flat.sum(1).cumsum(0)])
    candidates = torch.randint(CLASSES, (*shape, 3), generator=generator)
    return temperature, allowed, TokenSupport(offsets, flat.nonzero()[:, 1]), candidates


def total(found: TokenLogprobs | Reference, counts: Tensor) -> Tensor:
    of_logprobs = found.logprobs if isinstance(found, TokenLogprobs) else -found.nll
    assert found.candidates is not None and found.entropy is not None
    chosen = found.candidates.masked_fill(found.candidates == -torch.inf, 0)
    each = of_logprobs.sin() + chosen.sin().sum(-1) + found.entropy.sin()
    return each.masked_fill(~counts, 0).double().sum()


def compare_with_dense(setup: Setup, supported: bool, classes: int = CLASSES) -> None:
    model = make_model(setup)
    megatron_patch.apply(model, backend="torch", gradient="exact", vocab_size=classes, softcap=4.0)
    (hidden, labels), rank = inputs(setup), dist.get_rank()
    temperature, allowed, support, candidates = listing()
    candidates = candidates.clamp_max(classes - 1)
    kept = support.ids < classes
    lost = torch.cat([torch.zeros(1, dtype=torch.int64), (~kept).cumsum(0)])
    support = TokenSupport(support.offsets - lost[support.offsets], support.ids[kept])
    context = LogprobOptions(temperature, STATS, support if supported else None, candidates, 2)
    found = logprobs_of(model, hidden, labels.int(), context)
    weight = model.shared_embedding_or_output_weight() if setup.tied else model.output_layer.weight
    counts = (labels >= 0) & (labels < classes)
    ours = torch.autograd.grad(total(found, counts), (hidden, weight))

    every = whole(hidden) if setup.sequence_parallel else hidden.detach()
    leaves = [x.double().requires_grad_() for x in (every, whole(weight)[:classes])]
    golden = linear_cross_entropy_reference(
        leaves[0].transpose(0, 1),
        leaves[1],
        labels.masked_fill(~counts, -100),
        temperature=temperature,
        softcap=4.0,
        support=allowed[..., :classes] if supported else None,
        candidates=candidates,
    )
    right = list(torch.autograd.grad(total(golden, counts), leaves))
    if setup.sequence_parallel:
        right[0] = right[0].chunk(2)[rank]
    right[1] = torch.cat([right[1], right[1].new_zeros(CLASSES - classes, right[1].shape[1])])
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(ours[0].double(), right[0])
    close(ours[1].double(), right[1].chunk(2)[rank])
    close(found.logprobs[counts].double(), -golden.nll[counts])
    for name in (*STATS, "candidates"):
        close(getattr(found, name)[counts].double(), getattr(golden, name)[counts].double())
    assert found.top_ids is not None and found.top_ids.shape == (*labels.shape, 2)
    assert torch.equal(found.top_ids[..., 0][counts] == labels[counts], golden.correct[counts])
    assert not found.logprobs[~counts].any() and found.logprobs.is_contiguous()


for _name, _given in {
    "logprobs": (SETUP, False),
    "logprobs_under_a_support": (SETUP, True),
    "logprobs_sequence_parallel": (Setup(tp=2, sequence_parallel=True, tied=True), False),
    "logprobs_under_a_support_sequence_parallel": (Setup(tp=2, sequence_parallel=True), True),
    "logprobs_without_padding": (SETUP, True, 90),
}.items():
    CHECKS[_name] = partial(compare_with_dense, *_given)


@check
def logprobs_are_minus_the_losses() -> None:
    model = make_model()
    megatron_patch.apply(model, backend="torch")
    hidden, labels = inputs()
    found = logprobs_of(model, hidden, labels, None)
    torch.testing.assert_close(found.logprobs, -head_loss(model, hidden, labels))
    assert found.entropy is None
    model._scale_logits = lambda logits: 0.25 * logits
    scaled = logprobs_of(model, hidden, labels, None)
    torch.testing.assert_close(scaled.logprobs, -head_loss(model, hidden, labels, 0.25))


@check
def logprobs_beside_a_loss_in_main_grad() -> None:
    """DDP's hook adds no gradient of a weight of which a loss has added one in the same step."""
    grads = []
    for fusion in (False, True):
        model = make_model(Setup(tp=2, fusion=fusion))
        megatron_patch.apply(model, backend="torch")
        hidden, labels = inputs()
        weight = model.output_layer.weight
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
        total = logprobs_of(model, hidden, labels, None).logprobs.sum()
        (total + head_loss(model, hidden, labels).square().sum()).backward()
        assert weight.grad_added_to_main_grad == fusion
        grads.append(weight.main_grad if fusion else weight.grad)
        megatron_patch.remove()
    torch.testing.assert_close(*grads)


def logprobs_by_megatrons_output_processor() -> None:
    model = make_model()
    megatron_patch.apply(model, backend="torch")
    ids = torch.randint(CLASSES, (2, SEQUENCE), generator=torch.Generator().manual_seed(1))
    position = torch.arange(SEQUENCE).expand(2, -1).contiguous()
    future = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    losses = model(ids, position, future, labels=ids)
    found = model(
        ids,
        position,
        future,
        labels=ids,
        output_processor=megatron_patch.logprobs,
        output_processor_context=LogprobOptions(stats=("entropy",)),
    )
    torch.testing.assert_close(found.logprobs, -losses)
    grads = [
        torch.autograd.grad(x.sum(), model.output_layer.weight)[0] for x in (found.logprobs, losses)
    ]
    torch.testing.assert_close(grads[0], -grads[1])


@check
def logprobs_refused() -> None:
    model = make_model()
    hidden, labels = inputs()
    with pytest.raises(megatron_patch.PatchError, match=r"needs a patched model: call .*apply"):
        logprobs_of(model, hidden, labels, None)
    megatron_patch.apply(model, backend="torch")
    with pytest.raises(
        ValueError, match=r"output_processor_context must be a LogprobOptions.*dict"
    ):
        logprobs_of(model, hidden, labels, {"temperature": 1.0})
    with pytest.raises(ValueError, match=r"labels must be given to megatron_patch\.logprobs"):
        logprobs_of(model, hidden, None, None)
    short = LogprobOptions(support=TokenSupport(torch.zeros(3, dtype=torch.int64), labels[0, :0]))
    with pytest.raises(ValueError, match=r"support\.offsets must have shape \[N \+ 1\] with N="):
        logprobs_of(model, hidden, labels, short)
    model._scale_logits = lambda logits: logits.tanh()
    with pytest.raises(megatron_patch.PatchError, match=r"_scale_logits must multiply logits"):
        logprobs_of(model, hidden, labels, None)
    del model._scale_logits
    megatron_patch.remove()
    megatron_patch.apply(model, backend="torch", check_ranks=True)
    with pytest.raises(megatron_patch.PatchError, match=r"check_ranks=True has no log-prob"):
        logprobs_of(model, hidden, labels, None)


@check
def a_support_in_the_order_of_the_head() -> None:
    counts = torch.tensor([2, 0, 1, 3, 1, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    rows = list(torch.arange(9).split(counts.tolist()))
    turned = turn_support(TokenSupport(offsets, torch.arange(9)), torch.Size((3, 2)))
    # [b, s] = [2, 3] has tokens 0 1 2, 3 4 5; [s, b] reads 0 3, 1 4, 2 5.
    assert torch.equal(turned.ids, torch.cat([rows[i] for i in (0, 3, 1, 4, 2, 5)]))
    assert turned.offsets.diff().tolist() == [2, 3, 0, 1, 1, 2]


# Older releases have no output processors.
if (core.package_info.MAJOR, core.package_info.MINOR) >= (0, 18):
    check(logprobs_by_megatrons_output_processor)
