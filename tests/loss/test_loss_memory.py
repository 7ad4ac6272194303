"""No tensor of N x V_local elements is ever allocated, forward or backward."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cce_dist import Filter
from cce_dist.core.allocations import track_allocations
from cce_dist.testing import (
    DTYPES,
    TRITON_CPU,
    Case,
    Inputs,
    Place,
    dense_outputs,
    run_case,
    shared_pool,
    zipf_inputs,
)
from tests.support.grids import value_grid
from tests.support.loss_cases import generator

MODES = ("filtered", "exact", "in_forward")
# Hidden and weight are small beside the logits: 16 k and 0.25 M elements against 4.2 M.
N, V, D = 512, 8_192, 32
WORKSPACE = 2**20

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "z_loss": 0.1,
        "label_smoothing": 0.1,
        "stats": ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2"),
    },
    "softcap": {"softcap": 5.0},
    "shift": {"shift": 3},
}


@functools.cache
def skewed_inputs(num_tokens: int, num_classes: int, dim: int, dtype: torch.dtype) -> Inputs:
    """Once for all tests: of so many columns they take longer than the loss. A case takes copies of
    them."""
    return zipf_inputs(num_tokens, num_classes, dim, generator=generator(), dtype=dtype)


def largest_tensor(group: dist.ProcessGroup | None, case: Case) -> tuple[int, int]:
    """Elements of the largest tensor, and bytes of all at the peak, of forward and backward: of a
    first call, which allocates what later ones do, and what they keep."""
    with track_allocations() as allocations:
        run_case(group, case)
    return allocations.largest_numel, allocations.peak_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_linear_cross_entropy_never_holds_the_logits(
    options: dict[str, Any], gradient: str, dtype: torch.dtype
) -> None:
    inputs = skewed_inputs(N, V, D, dtype)
    inputs = inputs.with_options(generator(), "bias").ignoring(generator(), 0.1)
    options = {**options, "gradient": gradient, "workspace_bytes": WORKSPACE}
    largest, peak = largest_tensor(None, Case(inputs, options))
    # The in_forward mode holds the logits of 128 tokens, a quarter of these; others a workspace.
    bound = N * V // 4 if gradient == "in_forward" else N * V // 8
    assert largest <= bound, f"{largest} elements of {N * V}"
    assert peak < 4 * N * V * (0.75 if gradient == "in_forward" else 0.5)


@pytest.mark.parametrize(
    **value_grid(places=(TRITON_CPU,), options=CASES, gradient=MODES, dtype=("fp32", "fp16"))
)
def test_linear_cross_entropy_never_holds_the_logits_by_triton(
    place: Place, options: dict[str, Any], gradient: str, dtype: str
) -> None:
    # Eight times as many logits as elements of the weight; a chunk holds 256 columns at the least.
    num_tokens, num_classes, dim = 512, 2304, 16
    inputs = skewed_inputs(num_tokens, num_classes, dim, DTYPES[dtype])
    inputs = inputs.with_options(generator(), "bias").ignoring(generator(), 0.1)
    options = {**options, "gradient": gradient, "workspace_bytes": 2**18}
    largest, _ = largest_tensor(None, Case(inputs, options).at(place))
    logits = num_tokens * num_classes
    # Of so few classes in_forward computes all columns, of 128 tokens at a time: see above.
    bound = logits // (4 if gradient == "in_forward" else 8)
    assert largest <= bound, f"{largest} elements of {logits}"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"filter": Filter(keep=0.5)}, id="filter"),
        pytest.param({"filter": Filter(eps=2**-12, tail=False)}, id="eps"),
        pytest.param({"filter": Filter(keep=0)}, id="keep_everything"),
        pytest.param({"gradient": "exact", "reduction": "none"}, id="none"),
        pytest.param({"gradient": "exact", "stats": ("entropy",)}, id="entropy_gradient"),
        pytest.param({"filter": Filter(keep=0.5), "logits": "screened"}, id="screened"),
    ],
)
def test_linear_cross_entropy_never_holds_the_logits_more_options(options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "logits" in options else torch.float32
    inputs = skewed_inputs(N, V, D, dtype)
    upstream = {"entropy": 0.1} if "stats" in options else {}
    case = Case(inputs, {**options, "workspace_bytes": WORKSPACE}, upstream=upstream)
    largest, _ = largest_tensor(None, case)
    assert largest <= N * V // 8, f"{largest} elements of {N * V}"


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize(
    "trainable", [("hidden",), ("weight",), ()], ids=["hidden", "weight", "no"]
)
def test_linear_cross_entropy_frozen_inputs_never_hold_the_logits(
    trainable: tuple[str, ...], gradient: str
) -> None:
    inputs = skewed_inputs(N, V, D, torch.float32)
    options = {"gradient": gradient, "workspace_bytes": WORKSPACE}
    case = Case(inputs, options, trainable=trainable)
    largest, _ = largest_tensor(None, replace(case, backward=bool(trainable)))
    assert largest <= N * V // (4 if gradient == "in_forward" else 8)


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence_parallel"])
def test_linear_cross_entropy_never_holds_the_logits_on_a_group(
    sequence_parallel: bool, gradient: str
) -> None:
    inputs = skewed_inputs(N, V, D, torch.float32)
    options = {"gradient": gradient, "workspace_bytes": WORKSPACE}
    case = Case(inputs, {**options, "sequence_parallel": sequence_parallel})
    # Of V_local now: two ranks hold 4096 columns each.
    bound = N * V // 2 // (4 if gradient == "in_forward" else 8)
    for largest, _ in shared_pool().run(2, largest_tensor, case):
        assert largest <= bound, f"{largest} elements of {N * V // 2}"


def test_track_allocations_sees_the_dense_logits() -> None:
    case = Case(skewed_inputs(N, V, D, torch.float32))
    with track_allocations() as allocations:
        dense_outputs(case)
    assert allocations.largest_numel >= N * V and allocations.peak_bytes >= 4 * N * V
