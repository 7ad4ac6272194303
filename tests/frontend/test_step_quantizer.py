"""The 8-bit copy of a weight that is made once a step: never an old one, never twice."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, Screen, StepQuantizer, linear_cross_entropy
from cce_dist.backends.triton.launch.replay import Replayed
from cce_dist.backends.triton.screened import quantize as screened_quantize
from cce_dist.backends.triton.screened import steps as screened_steps
from cce_dist.testing import zipf_inputs

pytest.importorskip("triton")
pytestmark = pytest.mark.interpreter

OPTIONS: dict[str, Any] = {
    "logits": "screened",
    "filter": Filter(keep=0.05),
    "screen": Screen(max_kept=1.0),
    "stats": ("lse", "screened"),
    "backend": "triton",
}
INPUTS = zipf_inputs(40, 600, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float16)
OTHER = 0.8 * INPUTS.hidden.flip(0)


@contextmanager
def copies_made() -> Iterator[list[Any]]:
    """Weak references to all 8-bit copies of a weight that are made.

    Nothing is recorded meanwhile: a call that plays a recording calls neither function.
    """
    made = []
    weight, both = screened_quantize.quantize_weight, screened_steps.quantize_both

    def of_weight(*given: Any, **named: Any) -> Any:
        rows = weight(*given, **named)
        made.append(weakref.ref(rows))
        return rows

    def of_both(*given: Any, **named: Any) -> Any:
        rows, *others = both(*given, **named)
        made.append(weakref.ref(rows))
        return rows, *others

    def call(self: Replayed, *args: Any) -> Any:
        return self.function(*args)

    with (
        mock.patch.object(Replayed, "__call__", call),
        mock.patch.object(screened_quantize, "quantize_weight", of_weight),
        mock.patch.object(screened_steps, "quantize_both", of_both),
    ):
        yield made


def lse_of(weight: Tensor, quantizer: StepQuantizer | None, hidden: Tensor | None = None) -> Tensor:
    hidden = INPUTS.hidden if hidden is None else hidden
    found: Any = linear_cross_entropy(
        hidden, weight, INPUTS.targets, quantized_weight=quantizer, **OPTIONS
    )
    assert found.screened[INPUTS.targets >= 0].all()
    return found.lse.detach()


def check_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)


def test_one_copy_a_step() -> None:
    weight, quantizer = INPUTS.weight.clone().requires_grad_(), StepQuantizer()
    before = lse_of(weight, None)
    with copies_made() as made:
        with quantizer.step():
            check_close(lse_of(weight, quantizer), before)
            # Other hidden states, also in the channel that is the same in all of the first ones.
            check_close(lse_of(weight, quantizer, OTHER), lse_of(weight, None, OTHER))
            # A view of it, as megatron_patch hands it over.
            check_close(lse_of(weight.view_as(weight), quantizer), before)
            assert len(made) == 2 and 600 * 24 < quantizer.num_bytes < 600 * 50
        assert quantizer.num_bytes == 0
        gc.collect()
        assert made[0]() is None
        # By another tensor of the same memory: no version tells.
        version = weight._version
        weight.data.mul_(1.5)
        assert weight._version == version
        after = lse_of(weight, None)
        assert float((after - before).abs().max()) > 0.1
        with quantizer.step():
            check_close(lse_of(weight, quantizer), after)
            check_close(lse_of(weight, quantizer), after)
        assert len(made) == 4


def test_no_copy_stays_outside_of_a_step() -> None:
    weight, quantizer = INPUTS.weight.clone(), StepQuantizer()
    with copies_made() as made:
        lse_of(weight, quantizer)
        weight.data.mul_(1.5)
        check_close(lse_of(weight, quantizer), lse_of(weight, None))
        with pytest.raises(ZeroDivisionError), quantizer.step():
            lse_of(weight, quantizer)
            raise ZeroDivisionError
        lse_of(weight, quantizer)
        assert len(made) == 5


def test_a_weight_that_is_seen_to_change_is_quantised_again() -> None:
    weight, other, quantizer = INPUTS.weight.clone(), 1.5 * INPUTS.weight, StepQuantizer()
    with quantizer.step():
        lse_of(weight, quantizer)
        check_close(lse_of(other, quantizer), lse_of(other, None))
        with copies_made() as made:
            lse_of(other, quantizer)
            other.mul_(0.5)
            check_close(lse_of(other, quantizer), lse_of(other, None))
            assert len(made) == 2


def test_played_calls_take_the_copy_of_their_step() -> None:
    weight, quantizer = INPUTS.weight.clone(), StepQuantizer()
    for _ in range(4):
        with quantizer.step():
            for hidden in (INPUTS.hidden, OTHER, INPUTS.hidden):
                check_close(lse_of(weight, quantizer, hidden), lse_of(weight, None, hidden))
        weight.data.mul_(0.8)


def test_what_does_not_count_leaves_no_trace() -> None:
    hidden, targets = INPUTS.hidden.clone(), INPUTS.targets.clone()
    hidden[3:9], targets[3:9] = math.nan, -100
    quantizer = StepQuantizer()
    with quantizer.step():
        linear_cross_entropy(hidden, INPUTS.weight, targets, quantized_weight=quantizer, **OPTIONS)
        check_close(lse_of(INPUTS.weight, quantizer), lse_of(INPUTS.weight, None))


def test_full_logits_are_refused() -> None:
    options = {**OPTIONS, "logits": "full", "screen": Screen()}
    with pytest.raises(ValueError, match='quantized_weight has no effect with logits="full"'):
        linear_cross_entropy(
            INPUTS.hidden,
            INPUTS.weight,
            INPUTS.targets,
            quantized_weight=StepQuantizer(),
            **options,
        )


def test_where_every_column_is_kept_there_is_no_copy() -> None:
    quantizer, options = StepQuantizer(), {**OPTIONS, "filter": Filter()}
    with copies_made() as made, quantizer.step():
        linear_cross_entropy(
            INPUTS.hidden, INPUTS.weight, INPUTS.targets, quantized_weight=quantizer, **options
        )
        assert not made and quantizer.num_bytes == 0
