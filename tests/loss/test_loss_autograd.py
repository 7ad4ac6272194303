"""linear_cross_entropy within autograd: frozen inputs, backward twice, accumulation, gradcheck."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from cce_dist import Filter, linear_cross_entropy
from cce_dist.frontend import eager
from cce_dist.testing import (
    DTYPES,
    Place,
    check_close64,
    check_gate,
    check_outputs,
    check_promise,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    run_case,
    zipf_inputs,
)
from tests.support.loss_cases import (
    EVERY_STAT,
    MODES,
    SMALL_WORKSPACE,
    generator,
    leaves_of,
    make_case,
    on_cpu,
    targets_of,
)

TRAINABLE = {
    "_".join(names) or "nothing": names
    for size in range(4)
    for names in itertools.combinations(("hidden", "weight", "bias"), size)
}


@pytest.mark.parametrize(**grid(trainable=TRAINABLE, gradient=MODES))
def test_linear_cross_entropy_each_input_frozen(
    place: Place, trainable: tuple[str, ...], gradient: str
) -> None:
    case = make_case(
        place=place, tensors=("bias",), options={"gradient": gradient}, trainable=trainable
    )
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    assert {name for name in outputs if name.startswith("grad_")} == {
        f"grad_{name}" for name in trainable
    }


@pytest.mark.parametrize(**grid(gradient=("filtered", "exact")))
def test_linear_cross_entropy_token_weight_gradient(place: Place, gradient: str) -> None:
    case = make_case(
        place.widest,
        place=place,
        tensors=("token_weight",),
        ignore=-100,
        options={"gradient": gradient, "z_loss": 0.1, "shift": 2},
        trainable=("hidden", "weight", "token_weight"),
    )
    whole = replace(case.inputs, token_weight=case.inputs.token_weight.to(place.widest))
    case = replace(case, inputs=whole)
    check_outputs(case, run_case(None, case))


TWICE = {
    "exact": {"gradient": "exact"},
    "in_forward": {"gradient": "in_forward"},
    "filtered": {"filter": Filter(keep=0.1)},
    "tail_mass": {"filter": Filter(keep=0.1), "stats": ("tail_mass",)},
    "in_forward_filtered": {
        "gradient": "in_forward",
        "filter": Filter(keep=0.1),
        "stats": ("tail_mass",),
    },
}


@pytest.mark.parametrize(**grid(options=TWICE, dtype=("fp32", "bf16")))
def test_linear_cross_entropy_backward_twice(
    place: Place, options: dict[str, Any], dtype: str
) -> None:
    case = make_case(DTYPES[dtype], place=place, maker=zipf_inputs)
    hidden, weight = leaves_of(case)
    options = {**options, **place.options, "workspace_bytes": SMALL_WORKSPACE}
    result = linear_cross_entropy(hidden, weight, targets_of(case), **options)
    loss = result.loss if "stats" in options else result
    loss.backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    loss.backward(torch.tensor(2.0, device=place.device), retain_graph=True)
    assert torch.equal(hidden.grad, 2 * first[0]) and torch.equal(weight.grad, 2 * first[1])
    hidden.grad = weight.grad = None
    loss.backward()
    assert torch.equal(hidden.grad, first[0]) and torch.equal(weight.grad, first[1])


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_gradient_accumulation(place: Place, gradient: str) -> None:
    # Two halves with reduction="sum" into the same .grad are one batch.
    options = {"gradient": gradient, "reduction": "sum"}
    case = make_case(place=place, tokens=130, options=options)
    hidden, weight = leaves_of(case)
    total = 0
    for part in (slice(0, 65), slice(65, 130)):
        loss = linear_cross_entropy(hidden[part], weight, targets_of(case)[part], **case.options)
        loss.backward()
        total += loss.detach()
    outputs = {"loss": total, "grad_hidden": hidden.grad, "grad_weight": weight.grad}
    check_outputs(case, on_cpu(outputs))


@pytest.mark.parametrize(**grid(dtype=tuple(DTYPES), gradient=MODES))
def test_linear_cross_entropy_grad_weight_into(place: Place, gradient: str, dtype: str) -> None:
    case = make_case(DTYPES[dtype], place=place, options={"gradient": gradient}, main_grad=True)
    check_outputs(case, run_case(None, case))


BUFFERS = {
    "contiguous": lambda buffer: buffer,
    "row_padded": lambda buffer: torch.nn.functional.pad(buffer, (0, 3))[:, :-3],
    "transposed": lambda buffer: buffer.T.contiguous().T,
}


@pytest.mark.parametrize(**grid(layout=BUFFERS, gradient=MODES, dtype=("bf16", "fp16")))
def test_linear_cross_entropy_grad_weight_into_accumulates(
    place: Place, layout: Any, gradient: str, dtype: str
) -> None:
    case = make_case(DTYPES[dtype], place=place, options={"gradient": gradient})
    hidden, weight = leaves_of(case)
    buffer = layout(torch.full(weight.shape, 3.0, device=place.device))
    pointer = buffer.data_ptr()
    loss = linear_cross_entropy(
        hidden, weight, targets_of(case), **case.options, grad_weight_into=buffer
    )
    assert bool((buffer == 3).all()), "the buffer must not change before backward"
    loss.backward(retain_graph=True)
    once = buffer - 3
    loss.backward()
    assert weight.grad is None and buffer.data_ptr() == pointer
    torch.testing.assert_close(buffer - 3, 2 * once, atol=1e-6, rtol=1e-5)
    golden = golden_outputs(case)["grad_weight"]
    torch.testing.assert_close(once.double().cpu(), golden, atol=2e-5, rtol=1e-2)


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_the_buffer_gets_no_gradient_that_is_not_asked_for(place: Place, gradient: str) -> None:
    case = make_case(place=place, options={"gradient": gradient})
    hidden, weight = leaves_of(case)
    buffer = torch.zeros(weight.shape, device=place.device)
    # The head may be no leaf.
    for head in (weight, weight * 1):
        loss = linear_cross_entropy(
            hidden, head, targets_of(case), **case.options, grad_weight_into=buffer.zero_()
        )
        (by_hidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        assert not buffer.any()
        loss.backward()
        torch.testing.assert_close(hidden.grad, by_hidden)
        golden = golden_outputs(case)["grad_weight"]
        torch.testing.assert_close(buffer.double().cpu(), golden, atol=2e-5, rtol=1e-2)
        hidden.grad = None
    loss = linear_cross_entropy(
        hidden, weight, targets_of(case), **case.options, grad_weight_into=buffer.zero_()
    )
    torch.autograd.grad(loss, weight, allow_unused=True)
    assert buffer.any()


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_a_backward_that_failed_leaves_the_buffer_to_its_caller(
    place: Place, gradient: str
) -> None:
    case = make_case(place=place, options={"gradient": gradient})
    hidden, weight = leaves_of(case)
    buffer = torch.zeros(weight.shape, device=place.device)
    # As if memory had run out.
    fail = mock.Mock(side_effect=MemoryError)
    for inputs in ([hidden, weight], [hidden]):
        loss = linear_cross_entropy(
            hidden, weight, targets_of(case), **case.options, grad_weight_into=buffer
        )
        with mock.patch.multiple(eager, backward=fail, _backward=fail), pytest.raises(MemoryError):
            loss.backward(inputs=inputs)
        # Otherwise the gradient would go to weight.grad.
        with pytest.raises(RuntimeError, match="grad_weight_into may hold part of its gradient"):
            loss.backward()
        assert weight.grad is None and hidden.grad is None


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_without_grad(place: Place, gradient: str) -> None:
    case = make_case(place=place, options={"gradient": gradient, "stats": EVERY_STAT})
    hidden, weight = leaves_of(case)
    with torch.no_grad():
        result = linear_cross_entropy(hidden, weight, targets_of(case), **case.options)
    assert not result.loss.requires_grad and not result.lse.requires_grad
    found = {"loss": result.loss, "lse": result.lse, "entropy": result.entropy}
    found |= {"sum_p2": result.sum_p2, "correct": result.correct}
    found |= {"max_logit": result.logit_moments.max}
    found |= {"mean_logit": result.logit_moments.mean}
    found |= {"variance_logit": result.logit_moments.variance}
    check_outputs(replace(case, backward=False), on_cpu(found))


@pytest.mark.parametrize(**grid(dtype=tuple(DTYPES), gradient=MODES))
def test_linear_cross_entropy_composes_with_autograd(
    place: Place, dtype: str, gradient: str
) -> None:
    # hidden and weight as results of other operators, the loss inside a larger one.
    options = {"gradient": gradient}
    case = make_case(DTYPES[dtype], place=place, tokens=20, num_classes=50, dim=8, options=options)
    hidden, weight = leaves_of(case)
    loss = linear_cross_entropy(2 * hidden, weight + 0, targets_of(case), **case.options)
    (3 * loss + 1).backward()
    doubled = replace(case.inputs, hidden=2 * case.inputs.hidden)
    expected = golden_outputs(replace(case, inputs=doubled, upstream={"loss": 3.0}))
    baseline = dense_outputs(replace(case, inputs=doubled, upstream={"loss": 3.0}))
    found = on_cpu({"grad_hidden": hidden.grad / 2, "grad_weight": weight.grad})
    if dtype == "float64":
        for name, ours in found.items():
            check_close64(name, ours, expected[name])
        return
    for name, ours in found.items():
        if dtype == "fp32":
            check_gate(name, ours, expected[name], baseline[name])
        else:
            check_promise(name, ours, expected[name], baseline[name], DTYPES[dtype])


GRADCHECK = {
    "plain": {},
    "mean": {"reduction": "mean"},
    "softcap": {"softcap": 1.3},
    "z_loss": {"z_loss": 0.3},
    "smoothing": {"label_smoothing": 0.3},
    "scale": {"logit_scale": -0.7},
    "sum_ignored": {"reduction": "sum", "ignore_index": 2},
    "everything": {"z_loss": 0.2, "label_smoothing": 0.1, "logit_scale": 1.4, "shift": 1},
}


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("option", GRADCHECK)
def test_linear_cross_entropy_gradcheck(option: str, gradient: str) -> None:
    options = {"gradient": gradient, **GRADCHECK[option]}
    if gradient != "in_forward":
        options.setdefault("reduction", "none")
    inputs = gaussian_inputs(5, 11, 4, generator=generator(), dtype=torch.float64)
    inputs = inputs.with_options(generator(), "bias", "token_weight", "class_weight")
    targets = torch.tensor([0, 10, 2, 7, 3])
    differentiable = gradient != "in_forward"

    def function(hidden, weight, bias, token_weight):
        result = linear_cross_entropy(
            hidden,
            weight,
            targets,
            bias=bias,
            token_weight=token_weight,
            class_weight=inputs.class_weight,
            stats=("lse", "entropy"),
            **options,
        )
        return (result.loss, result.lse, result.entropy) if differentiable else result.loss

    leaves = [inputs.hidden, inputs.weight, inputs.bias, inputs.token_weight.double()]
    for leaf in leaves[: 4 if differentiable else 3]:
        leaf.requires_grad_()
    assert torch.autograd.gradcheck(function, leaves, fast_mode=False)
