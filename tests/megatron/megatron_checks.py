"""What test_megatron.py checks of one head, on ranks that share it. Each raises if not so."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_patch
from cce_dist.testing import check_gate, check_promise
from megatron_patch.deferred import DeferredLogits
from tests.megatron.megatron_apply_checks import CHECKS as OF_APPLYING
from tests.megatron.megatron_head import (
    BATCH,
    SETUP,
    Checks,
    dense,
    head_loss,
    inputs,
    make_model,
    run_in,
    whole,
)
from tests.megatron.megatron_logprobs import CHECKS as OF_LOGPROBS
from tests.megatron.megatron_setup import CLASSES, SEQUENCE, Setup

CHECKS = check = Checks({**OF_APPLYING, **OF_LOGPROBS})


def run_check(_: Any, name: str) -> None:
    run_in(SETUP, CHECKS[name])


def compare_with_golden(
    setup: Setup, scale: float = 1.0, classes: int = CLASSES, **options: Any
) -> None:
    """Ours beside Megatron's own, both beside float64, with a mask as its upstream gradient."""
    model = make_model(setup)
    weight = model.shared_embedding_or_output_weight() if setup.tied else model.output_layer.weight
    found: list[dict[str, Tensor]] = []
    rank, labels = dist.get_rank(), inputs(setup)[1]
    mask = ((labels >= 0) & (labels < classes)).float()
    for ours in (False, True):
        hidden, _ = inputs(setup)
        if ours:
            megatron_patch.apply(model, backend="torch", **options)
        # Of int32, as Megatron's own takes them, and elsewhere int64.
        loss = head_loss(model, hidden, labels.int(), scale)
        assert loss.dtype == torch.float32 and loss.is_contiguous() and loss.shape == labels.shape
        assert bool(loss.isfinite().all())
        weight.grad = None
        (loss * mask).sum().backward()
        assert hidden.grad is not None
        found.append({"loss": loss.detach(), "hidden": hidden.grad, "weight": weight.grad.clone()})
    given = (whole(hidden) if setup.sequence_parallel else hidden, whole(weight), labels, mask)
    how = {"scale": scale, "softcap": options.get("softcap"), "classes": classes}
    expected, fp32 = (dense(dtype, *given, **how) for dtype in (torch.float64, torch.float32))
    for result in (expected, fp32):
        if setup.sequence_parallel:
            result["hidden"] = result["hidden"].chunk(2)[rank]
        result["weight"] = result["weight"].chunk(2)[rank]
    theirs, ours = found
    counts = mask.bool()
    assert not ours["loss"][~counts].any()
    if classes < CLASSES or options.get("softcap") is not None:
        theirs = fp32  # Megatron knows neither
    losses = [x["loss"][counts] for x in (ours, expected, theirs, fp32)]
    check_promise("loss", *losses[:3], torch.float32)
    check_gate("loss", losses[0], losses[1], losses[3])
    for name in ("hidden", "weight"):
        check_promise(name, ours[name], expected[name], theirs[name], hidden.dtype, noise=2e-8)


for _name, _given in {
    "loss": {},
    "loss_sequence_parallel": {"setup": Setup(tp=2, sequence_parallel=True)},
    "loss_tied": {"setup": Setup(tp=2, tied=True)},
    "loss_bf16": {"setup": Setup(tp=2, bf16=True)},
    "loss_bf16_sequence_parallel": {"setup": Setup(tp=2, bf16=True, sequence_parallel=True)},
    "loss_exact": {"gradient": "exact"},
    "loss_scaled_as_mup": {"scale": 0.25},
    "loss_softcap": {"softcap": 2.0},
    "loss_without_padding": {"vocab_size": 90, "classes": 90},
}.items():
    CHECKS[_name] = lambda given=_given: compare_with_golden(**{"setup": SETUP, **given})


@check
def labels_that_are_no_class_give_nothing() -> None:
    model = make_model()
    megatron_patch.apply(model, backend="torch")
    hidden, labels = inputs()
    labels = labels.clone().fill_(-100)
    loss = head_loss(model, hidden, labels)
    loss.sum().backward()
    assert hidden.grad is not None
    assert not loss.any() and not hidden.grad.any() and not model.output_layer.weight.grad.any()


@check
def logits_for_whoever_asks() -> None:
    model = make_model()
    layer, (hidden, _) = model.output_layer, inputs()
    expected = layer(hidden)[0]
    gathered = layer(hidden, runtime_gather_output=True)[0]
    megatron_patch.apply(model, backend="torch")
    deferred = layer(hidden)[0]
    assert isinstance(deferred, DeferredLogits)
    assert torch.equal(deferred.transpose(0, 1), expected.transpose(0, 1))
    assert deferred.shape == expected.shape and len(deferred) == len(expected)
    assert torch.equal(deferred[1:, 0], expected[1:, 0])
    assert torch.equal(torch.softmax(layer(hidden)[0], -1), torch.softmax(expected, -1))
    assert torch.equal((layer(hidden)[0] * 0.5 * 0.5) + 1, expected * 0.25 + 1)
    with torch.no_grad():
        assert torch.equal(layer(hidden, runtime_gather_output=True)[0], gathered)
    # In training as well, and differentiable.
    assert torch.equal(layer(hidden, runtime_gather_output=True)[0].float(), gathered)
    layer(hidden)[0].sum().backward()
    assert hidden.grad is not None and hidden.grad.any()


@check
def largest_logits_without_the_others() -> None:
    # As the metric of multi-token prediction asks for them, from 0.19 on.
    for setup in (SETUP, Setup(tp=2, sequence_parallel=True)):
        model, (hidden, _) = make_model(setup), inputs(setup)
        layer = model.output_layer
        expected = layer(hidden)[0].detach() * 0.5
        megatron_patch.apply(model)
        with torch.no_grad():
            deferred = layer(hidden)[0] * 0.5
            assert deferred.size(-1) == CLASSES // 2 and deferred.shape == expected.shape
            values, indices = deferred.max(dim=-1)
            torch.testing.assert_close(values, expected.max(dim=-1).values)
            assert torch.equal(indices, expected.argmax(-1))
            assert torch.equal(torch.argmax(deferred, dim=-1), indices)
            assert deferred._logits is None
            assert torch.equal(deferred.max(), expected.max())
        assert (layer(hidden)[0] * 0.5).max(dim=-1).values.requires_grad


@check
def gathered_logits_have_the_right_loss() -> None:
    # Megatron's own is too large by log(tp) here.
    model, (hidden, labels) = make_model(), inputs()
    megatron_patch.apply(model, backend="torch")
    expected = head_loss(model, hidden, labels)
    logits, _ = model.output_layer(hidden, runtime_gather_output=True)
    assert torch.equal(model.compute_language_model_loss(labels, logits), expected)


@check
def evaluation_and_determinism() -> None:
    model, (hidden, labels) = make_model(), inputs()
    megatron_patch.apply(model, backend="torch")
    trained = head_loss(model, hidden, labels)
    model.eval()
    with torch.no_grad():
        assert torch.equal(head_loss(model, hidden, labels), trained.detach())
    both = whole(trained.detach())
    assert torch.equal(both[:BATCH], both[BATCH:])


@check
def every_gradient_of_a_model_in_float64() -> None:
    """Of the whole model, as of the same one in float64 with a dense loss of gathered logits."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region as gather

    labels = inputs()[1]
    tokens = labels.clamp(0, CLASSES - 1).roll(1, 1)
    position = torch.arange(SEQUENCE).expand_as(tokens)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    for tied in (False, True):
        model, exact = (make_model(Setup(tp=2, tied=tied)) for _ in range(2))
        exact.double()
        logits = gather(exact(tokens, position, mask))
        ids = labels.where((labels >= 0) & (labels < CLASSES), torch.tensor(-100))
        expected = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids.flatten(), ignore_index=-100, reduction="sum"
        )
        expected.backward()
        with megatron_patch.patched(model, gradient="exact"):
            loss = model(tokens, position, mask, labels=labels).sum()
        loss.backward()
        torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
        theirs = dict(exact.named_parameters())
        for name, parameter in model.named_parameters():
            off = (parameter.grad - theirs[name].grad).norm() / theirs[name].grad.norm()
            assert float(off) < 2e-6, (name, float(off))
