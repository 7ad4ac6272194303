"""gradient="exact" with keep_logits: the same gradients, whatever was kept, and where."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import linear_cross_entropy
from cce_dist.testing import (
    DTYPES,
    TRITON_CPU,
    TRITON_PLACES,
    Case,
    Place,
    check_outputs,
    gaussian_inputs,
    grid,
    run_case,
    zipf_inputs,
)

# Of 2,600 columns: those in the weight's gradient alone, some in the workspace too, all in both.
WORKSPACES = {"no": 2**16, "some": 2**19 + 2**17, "all": 2**26}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap_smoothing": {"softcap": 2.0, "label_smoothing": 0.1},
    "scale_stats": {"logit_scale": -1.7, "stats": ("lse", "entropy", "correct", "logit_moments")},
}


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def make_case(place: Place, dtype: str, options: dict[str, Any], workspace: str) -> Case:
    inputs = gaussian_inputs(200, 2600, 32, generator=generator(), dtype=DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias", "class_weight").ignoring(generator(), 0.5)
    options = {"gradient": "exact", "keep_logits": True, "stats": ("lse",), **options}
    return Case(inputs, {**options, "workspace_bytes": WORKSPACES[workspace]}).at(place)


@pytest.mark.parametrize(
    **grid(
        places=TRITON_PLACES,
        options=OPTIONS,
        workspace=tuple(WORKSPACES),
        dtype=("fp32", "fp16", "bf16"),
    )
)
def test_keep_logits_changes_no_gradient(
    place: Place, options: dict[str, Any], workspace: str, dtype: str
) -> None:
    case = make_case(place, dtype, options, workspace)
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    again = run_case(None, case)
    for name, value in again.items():
        assert torch.equal(outputs[name], value), name


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, dtype=("fp32", "fp16", "bf16")))
def test_keep_logits_with_frozen_inputs_and_main_grad(place: Place, dtype: str) -> None:
    every = make_case(place, dtype, {}, "some")
    others = [replace(every, trainable=names) for names in (("hidden",), ("weight",), ("bias",))]
    for case in (*others, replace(every, main_grad=True)):
        outputs = run_case(None, case)
        check_outputs(case, outputs)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, dtype=("fp32", "fp16", "bf16")))
def test_keep_logits_backward_again_over_a_retained_graph(place: Place, dtype: str) -> None:
    inputs = zipf_inputs(150, 2600, 32, generator=generator(), dtype=DTYPES[dtype])
    hidden = inputs.hidden.to(place.device).requires_grad_()
    weight = inputs.weight.to(place.device).requires_grad_()
    targets = inputs.targets.to(place.device)
    options: dict[str, Any] = {**place.options, "gradient": "exact", "reduction": "sum"}
    loss = linear_cross_entropy(hidden, weight, targets, keep_logits=True, **options)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, (hidden, weight))
    plain = linear_cross_entropy(hidden, weight, targets, **options)
    expected = torch.autograd.grad(plain, (hidden, weight))
    for one, copy, two, three in zip(first, kept, second, expected, strict=True):
        # The second backward is not made in the memory of the first one's gradients.
        assert torch.equal(one, copy)
        for other in (two, three):
            difference = float((one.double() - other.double()).norm())
            assert difference <= 4 * torch.finfo(one.dtype).eps * float(three.double().norm())


def test_keep_logits_without_a_gradient_keeps_nothing() -> None:
    case = make_case(TRITON_CPU, "fp32", {}, "all")
    inputs, options = case.inputs, {**case.options, "stats": ()}
    with torch.no_grad():
        loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.targets, **options)
    assert not loss.requires_grad


def test_keep_logits_is_refused_by_the_torch_backend() -> None:
    inputs = gaussian_inputs(8, 50, 4, generator=generator())
    for backend in ("torch", "auto"):
        with pytest.raises(ValueError, match=r"keep_logits=True needs.*backend=\"triton\".*torch"):
            linear_cross_entropy(
                inputs.hidden,
                inputs.weight,
                inputs.targets,
                gradient="exact",
                keep_logits=True,
                backend=backend,
            )
    # No token, no logits to keep: a rank of an empty microbatch is none to refuse.
    loss = linear_cross_entropy(
        inputs.hidden[:0], inputs.weight, inputs.targets[:0], gradient="exact", keep_logits=True
    )
    assert float(loss) == 0
