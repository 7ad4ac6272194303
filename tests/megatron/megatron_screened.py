"""What ranks of Megatron's do in test_megatron and test_megatron_pipeline with logits="screened".

In fp16: Triton's interpreter has no bf16 product. A vocabulary of 96 keeps every column but for a
filter that no option of the patch gives.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

import megatron_patch
from cce_dist import Filter, Screen
from cce_dist.testing import check_promise
from megatron_patch import PatchError, head
from megatron_patch.options import PatchOptions
from tests.megatron.megatron_head import dense, head_loss, inputs, make_model, whole
from tests.megatron.megatron_jobs import build, forward_step, make_config, microbatch, wrap
from tests.megatron.megatron_setup import BATCH, SEQUENCE, Setup, megatron
from tests.megatron.pipeline.megatron_pipeline_jobs import pretrain
from tests.pipeline.pipeline_screened import screened_seen

OPTIONS: dict[str, Any] = {"logits": "screened", "backend": "triton"}
SETUP = Setup(tp=2, fp16=True)


@contextlib.contextmanager
def filtering() -> Iterator[None]:
    """Of a softmax that is nearly flat some columns are kept, and not all."""
    how: dict[str, Any] = {
        "filter": Filter(keep=2.5, draw=False),
        "screen": Screen(max_kept=1.0),
    }
    loss = PatchOptions.loss.func
    with (
        mock.patch.object(
            head, "linear_cross_entropy", functools.partial(head.linear_cross_entropy, **how)
        ),
        mock.patch.object(PatchOptions, "loss", property(lambda self: replace(loss(self), **how))),
    ):
        yield


def on_tensor_parallel_ranks(_: Any) -> None:
    with megatron(SETUP):
        for check in (loss, one_copy_a_step, refusals):
            try:
                check()
            finally:
                megatron_patch.remove()


def loss() -> None:
    """Closer to float64 than logits of 16 bits, also where the head is called by itself."""
    model = make_model(SETUP)
    hidden, labels = inputs(SETUP)
    hidden, labels = hidden[:, :4].detach().requires_grad_(), labels[:4]
    mask = ((labels >= 0) & (labels < 96)).float()
    weight = model.output_layer.weight
    given = hidden, whole(weight), labels, mask
    right, baseline = dense(torch.float64, *given), dense(torch.float16, *given)
    megatron_patch.apply(model, **OPTIONS)
    with filtering(), screened_seen() as seen:
        found = head_loss(model, hidden, labels)
        (found * mask).sum().backward()
    assert seen == {"screened": 1, "full": 0, "copies": 1}
    counts = mask.bool()
    losses = [x[counts] for x in (found.detach(), right["loss"], baseline["loss"])]
    check_promise("loss", losses[0], losses[1], losses[2], torch.float32)
    rank = torch.distributed.get_rank()
    assert hidden.grad is not None and weight.grad is not None
    for grad, name in ((hidden.grad, "hidden"), (weight.grad, "weight")):
        expected = right[name].chunk(2)[rank] if name == "weight" else right[name]
        off = (grad.double() - expected).norm() / expected.norm()
        assert float(off) < 0.05, (name, float(off))


def one_copy_a_step() -> None:
    """Whatever has written the weight between two calls; optimizers do so unseen."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for distributed in (False, True):
        setup = Setup(tp=2, fp16=True, distributed_optimizer=distributed)
        config = make_config(setup)
        with megatron_patch.patched(**OPTIONS), filtering():
            models = build(setup, config)
            (model,) = wrap(setup, config, models)
            how: dict[str, Any] = {"fp16": True, "params_dtype": setup.dtype, "loss_scale": 1.0}
            how["use_distributed_optimizer"] = distributed
            chosen = OptimizerConfig(optimizer="adam", lr=3e-3, **how)
            optimizer = get_megatron_optimizer(chosen, [model])

            def run(copies: int, forward_only: bool = False) -> list[float]:
                with screened_seen() as seen:
                    found = get_forward_backward_func()(
                        forward_step_func=forward_step,
                        data_iterator=iter([microbatch(i, setup) for i in range(2)]),  # noqa: B023
                        model=model,  # noqa: B023
                        num_microbatches=2,
                        seq_length=SEQUENCE,
                        micro_batch_size=BATCH,
                        forward_only=forward_only,
                    )
                assert seen == {"screened": 2, "full": 0, "copies": copies}
                return [float(x["loss"]) for x in found]

            model.zero_grad_buffer()
            optimizer.zero_grad()
            weight, first = models[0].output_layer.weight, run(copies=1)
            before, version = weight.detach().clone(), weight._version
            done: Any = optimizer.step()
            assert done[0]
            # Why no copy may outlive a step.
            assert weight._version == version and not torch.equal(weight, before)
            found = run(copies=1, forward_only=True)
            assert abs(found[0] - first[0]) > 0.02
            if distributed:
                with mock.patch.object(head, "quantizer_of", lambda layer: None):
                    right = run(copies=2, forward_only=True)
                assert found == pytest.approx(right, abs=2e-3)


def refusals() -> None:
    with pytest.raises(PatchError, match=r"has too few digits for an fp32 model \(params_dtype\)"):
        megatron_patch.apply(make_model(Setup(tp=2)), **OPTIONS)
    from megatron.core.pipeline_parallel import schedules

    names = [name for name in vars(schedules) if name.startswith("forward_backward_")]
    before = {name: getattr(schedules, name) for name in names}
    with mock.patch.object(schedules, names[0], None):
        with pytest.raises(PatchError, match=rf"{names[0]} is missing"):
            megatron_patch.apply(**OPTIONS)
        assert megatron_patch.status().options is None
    model = make_model(SETUP)
    with megatron_patch.patched(model, **OPTIONS):
        assert len({schedules.__dict__[name] for name in names} - set(before.values())) == 3
    with megatron_patch.patched(**OPTIONS, quantize_once=False):
        assert {name: getattr(schedules, name) for name in names} == before
    megatron_patch.apply(**OPTIONS)
    ours = getattr(schedules, names[0])
    with mock.patch.object(schedules, names[0], theirs := lambda **given: ours(**given)):
        megatron_patch.remove()
        assert getattr(schedules, names[0]) is theirs
    setattr(schedules, names[0], before[names[0]])
    assert {name: getattr(schedules, name) for name in names} == before


def over_the_pipeline(_: Any) -> None:
    """Two steps of two microbatches, and an evaluation of three: as with Megatron's own loss."""
    setup = Setup(pp=2, fp16=True, microbatches=2, steps=2)
    patch = {"vocab_over_pipeline": True, **OPTIONS}
    with megatron(setup), filtering(), screened_seen() as seen:
        theirs, ours = pretrain(setup, None), pretrain(setup, patch)
    assert seen == {"screened": 7, "full": 0, "copies": 3}
    assert ours["losses"][:2] == pytest.approx(theirs["losses"][:2], abs=1e-4)
    for what in ("losses", "evaluated"):
        assert ours[what] == pytest.approx(theirs[what], abs=2e-2)
    for name, grad in theirs["grads"].items():
        if "output_layer" not in name:
            off = (ours["grads"][name] - grad).norm() / grad.norm()
            assert float(off) < 0.05, (name, float(off))
