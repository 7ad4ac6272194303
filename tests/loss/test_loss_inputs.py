"""linear_cross_entropy on one rank, whatever the shapes, layouts and dtypes of its inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import linear_cross_entropy
from cce_dist.testing import (
    DTYPES,
    TORCH_CPU,
    TORCH_CUDA,
    TRITON_CPU,
    TRITON_CUDA,
    Place,
    check_gate,
    check_outputs,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    run_case,
    zipf_inputs,
)
from tests.support.grids import paired_grid
from tests.support.loss_cases import MODES, SMALL_WORKSPACE, generator, make_case, on_cpu

SHAPES: dict[str, tuple[Any, int, int]] = {
    "no_tokens": (0, 50, 16),
    "no_tokens_2d": ((2, 0), 50, 16),
    "one_token": (1, 50, 16),
    "one_class": (7, 1, 5),  # loss 0, gradients 0
    "one_column_beyond_a_tile": (7, 2049, 300),  # and D > 256 with a bias
    "several_tiles": (129, 5003, 37),  # two token blocks, the last one ragged
    "three_leading_dims": ((2, 3, 5), 131, 9),
    "more_tokens_than_classes": (1000, 67, 12),  # eight token blocks
}
# Triton's tiles are smaller: the same regimes, sooner interpreted.
INTERPRETED_SHAPES = {
    "one_column_beyond_a_tile": (7, 257, 300),
    "several_tiles": (129, 603, 37),
    "more_tokens_than_classes": (520, 67, 12),  # five token blocks
}
WORKSPACES = {"chunks": SMALL_WORKSPACE, "one_chunk": 2**26}


@pytest.mark.parametrize(
    **paired_grid(shape=tuple(SHAPES), gradient=MODES, dtype=tuple(DTYPES), workspace=WORKSPACES)
)
def test_linear_cross_entropy_shapes(
    place: Place, shape: str, gradient: str, dtype: str, workspace: int
) -> None:
    tokens, num_classes, dim = SHAPES[shape]
    if place.interprets:
        tokens, num_classes, dim = INTERPRETED_SHAPES.get(shape, SHAPES[shape])
    case = make_case(
        DTYPES[dtype],
        place=place,
        tokens=tokens,
        num_classes=num_classes,
        dim=dim,
        tensors=("bias",),
        options={"gradient": gradient, "workspace_bytes": workspace, "stats": ("lse",)},
        # From 4096 classes on the default filter drops columns in 16 bits: what it promises, it
        # promises for a trained model's softmax.
        maker=zipf_inputs if num_classes > 4096 else gaussian_inputs,
    )
    outputs = run_case(None, case)
    if shape == "one_class" and place.backend == "triton":  # lse and its logit round apart
        check_outputs(case, outputs, but=("loss",))
        golden, dense = golden_outputs(case), dense_outputs(case)
        check_gate("loss", outputs["loss"], golden["loss"], dense["loss"], scale=golden["lse"])
        return
    # A single number, or a handful of exact zeros, has no rms to compare: see the fp32 gate.
    check_outputs(case, outputs)


LAYOUTS = {
    "hidden_transposed": {"hidden": lambda x: x.T.contiguous().T},
    "hidden_strided": {"hidden": lambda x: x.repeat_interleave(2, -1)[..., ::2]},
    "hidden_row_padded": {"hidden": lambda x: torch.nn.functional.pad(x, (0, 3))[..., :-3]},
    "weight_transposed": {"weight": lambda x: x.T.contiguous().T},
    "weight_row_padded": {"weight": lambda x: torch.nn.functional.pad(x, (0, 3))[..., :-3]},
    "targets_strided": {"targets": lambda x: x.repeat_interleave(2)[::2]},
    "bias_strided": {"bias": lambda x: x.repeat_interleave(2)[::2]},
}


@pytest.mark.parametrize(**grid(layout=tuple(LAYOUTS), gradient=MODES))
def test_linear_cross_entropy_non_contiguous(place: Place, layout: str, gradient: str) -> None:
    case = make_case(place=place, tensors=("bias",), options={"gradient": gradient})
    leaves = {
        name: getattr(case.inputs, name).to(place.device, copy=True)
        for name in ("hidden", "weight", "bias", "targets")
    }
    for name, change in LAYOUTS[layout].items():
        leaves[name] = change(leaves[name])
        assert not leaves[name].is_contiguous()
    for name in ("hidden", "weight", "bias"):
        leaves[name].requires_grad_()
    loss = linear_cross_entropy(
        leaves["hidden"],
        leaves["weight"],
        leaves["targets"],
        bias=leaves["bias"],
        **case.options,
    )
    loss.backward()
    outputs = {"loss": loss.detach()}
    outputs |= {f"grad_{name}": leaves[name].grad for name in ("hidden", "weight", "bias")}
    check_outputs(case, on_cpu(outputs))


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_batch_first_transposed(place: Place, gradient: str) -> None:
    # [T, B, D] seen as [B, T, D]: what a sequence-first model hands over.
    options = {"gradient": gradient, "shift": 1, "reduction": "sum"}
    case = make_case(place=place, tokens=(4, 30), ignore=-100, options=options)
    hidden = case.inputs.hidden.transpose(0, 1).contiguous().to(place.device).requires_grad_()
    weight = case.inputs.weight.to(place.device, copy=True).requires_grad_()
    targets = case.inputs.targets.T.contiguous().to(place.device)
    loss = linear_cross_entropy(hidden.transpose(0, 1), weight, targets.T, **case.options)
    loss.backward()
    found = {"loss": loss.detach(), "grad_hidden": hidden.grad.transpose(0, 1)}
    check_outputs(case, on_cpu({**found, "grad_weight": weight.grad}))


CASTS = {
    "both_fp32": (torch.float32, torch.float32),
    "hidden_bf16": (torch.bfloat16, torch.float32),
    "weight_bf16": (torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize(
    **grid(places=(TORCH_CPU, TORCH_CUDA, TRITON_CUDA), cast=CASTS, gradient=MODES)
)
def test_linear_cross_entropy_autocast(
    place: Place, cast: tuple[torch.dtype, torch.dtype], gradient: str
) -> None:
    hidden_dtype, weight_dtype = cast
    # Inputs are already bf16 numbers, so that rounding them is no part of the error.
    case = make_case(
        torch.bfloat16,
        place=place,
        tensors=("bias",),
        options={"gradient": gradient, "stats": ("lse",)},
        autocast=torch.bfloat16,
    )
    whole = case.inputs
    whole = replace(
        whole,
        hidden=whole.hidden.to(hidden_dtype),
        weight=whole.weight.to(weight_dtype),
        bias=whole.bias.float(),
    )
    case = replace(case, inputs=whole)
    check_outputs(case, run_case(None, case))


AUTOCAST = {
    TORCH_CPU: torch.bfloat16,
    TRITON_CPU: torch.float16,  # the interpreter has no bf16
    TORCH_CUDA: torch.bfloat16,
    TRITON_CUDA: torch.bfloat16,
}


@pytest.mark.parametrize(("place", "dtype"), AUTOCAST.items(), ids=map(str, AUTOCAST))
def test_linear_cross_entropy_autocast_of_rounding_inputs(place: Place, dtype: torch.dtype) -> None:
    # fp32 masters that 16 bits round: the answer is that of the rounded ones, as for F.linear.
    case = make_case(torch.float32, place=place, options={"stats": ("lse",)}, autocast=dtype)
    outputs = run_case(None, case)
    dense = dense_outputs(case, torch.float32)
    check_gate("lse", outputs["lse"], golden_outputs(case)["lse"], dense["lse"])
    assert outputs["grad_weight"].dtype == torch.float32


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_leaves_its_inputs_alone(place: Place, gradient: str) -> None:
    inputs = gaussian_inputs(33, 70, 12, generator=generator())
    inputs = inputs.with_options(generator(), "bias", "token_weight", "class_weight")
    names = ("hidden", "weight", "targets", "bias", "token_weight", "class_weight")
    tensors = {name: getattr(inputs, name).to(place.device, copy=True) for name in names}
    for name in ("hidden", "weight", "bias"):
        tensors[name].requires_grad_()
    positional = (tensors.pop("hidden"), tensors.pop("weight"), tensors.pop("targets"))
    upstream = torch.tensor(0.7, device=place.device)
    loss = linear_cross_entropy(*positional, **tensors, **place.options, gradient=gradient)
    loss.backward(upstream)
    for name, tensor in zip(names, (*positional, *tensors.values()), strict=True):
        assert torch.equal(tensor.detach().cpu(), getattr(inputs, name)), name
    assert float(upstream) == pytest.approx(0.7)
