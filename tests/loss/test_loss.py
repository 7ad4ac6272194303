"""linear_cross_entropy on one rank against the golden: options, backends, the module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import LinearCrossEntropy, LossOutput, linear_cross_entropy
from cce_dist.testing import (
    DTYPES,
    TORCH_CPU,
    TORCH_CUDA,
    TRITON_CPU,
    TRITON_CUDA,
    Place,
    check_close64,
    check_gate,
    check_outputs,
    dense_outputs,
    golden_outputs,
    grid,
    pairwise,
    run_case,
    zipf_inputs,
)
from tests.support.grids import paired_grid
from tests.support.loss_cases import (
    EACH_OPTION,
    EVERY_STAT,
    MODES,
    SMALL_WORKSPACE,
    leaves_of,
    make_case,
    targets_of,
)

OPTIONS: dict[str, tuple[tuple[str, ...], int | None, dict[str, Any]]] = {
    **EACH_OPTION,
    "class_weight_sum": (("class_weight",), -100, {"reduction": "sum"}),
    "ignore_index_minus_1": ((), -1, {"ignore_index": -1}),
    "shift_3_flat": ((), None, {"shift": 3}),
    "small_workspace": ((), None, {"workspace_bytes": SMALL_WORKSPACE}),
}


def not_refused(row: dict[str, Any]) -> bool:
    return not (row["gradient"] == "in_forward" and row["option"] == "none")


@pytest.mark.parametrize(
    **paired_grid(option=tuple(OPTIONS), gradient=MODES, dtype=tuple(DTYPES), allowed=not_refused)
)
def test_linear_cross_entropy_each_option(
    place: Place, option: str, gradient: str, dtype: str
) -> None:
    tensors, ignore, options = OPTIONS[option]
    case = make_case(
        DTYPES[dtype],
        place=place,
        tokens=129 if option == "shift_3_flat" else (3, 43),
        tensors=tensors,
        ignore=ignore,
        options={**options, "gradient": gradient},
    )
    check_outputs(case, run_case(None, case))


FACTORS = {
    "gradient": MODES,
    "dtype": tuple(DTYPES),
    "reduction": ("mean", "sum", "none"),
    "bias": (False, True),
    "softcap": (None, 2.0),
    "logit_scale": (1.0, 0.6),
    "label_smoothing": (0.0, 0.1),
    "z_loss": (0.0, 0.05),
    "token_weight": (False, True),
    "class_weight": (False, True),
    "shift": (0, 1),
    "ignored": ("none", "some", "id_5"),
    "trainable": ("all", "hidden", "weight"),
    "upstream": ("loss", "lse", "entropy", "all"),
    "main_grad": (False, True),
    "workspace_bytes": (SMALL_WORKSPACE, 2**22),
}


def admitted(row: dict[str, Any]) -> bool:
    if row["gradient"] == "in_forward" and (
        row["reduction"] == "none" or row["upstream"] != "loss"
    ):
        return False
    if row["gradient"] == "filtered" and row["softcap"] and row["label_smoothing"]:
        return False
    return not (row["main_grad"] and row["trainable"] == "hidden")


def row_id(row: dict[str, Any]) -> str:
    words = [row["gradient"], row["dtype"], row["reduction"]]
    words += [
        f"{name}_{value}" if not isinstance(value, bool) else name
        for name, value in list(row.items())[3:]
        if value != FACTORS[name][0]
    ]
    return "-".join(words)


PAIRS = [
    pytest.param(place, row, id=f"{place}-{row_id(row)}")
    for place in (TORCH_CPU, TRITON_CPU, TRITON_CUDA)
    for row in pairwise({**FACTORS, "dtype": place.dtypes}, admitted)
]


@pytest.mark.parametrize(("place", "row"), PAIRS)
def test_linear_cross_entropy_pairs_of_options(place: Place, row: dict[str, Any]) -> None:
    ignore = {"none": None, "some": -100, "id_5": 5}[row["ignored"]]
    case = make_case(
        DTYPES[row["dtype"]],
        place=place,
        tokens=(3, 43),
        tensors=tuple(name for name in ("bias", "token_weight", "class_weight") if row[name]),
        ignore=ignore,
        options={
            **{
                name: row[name]
                for name in (
                    "gradient",
                    "reduction",
                    "softcap",
                    "logit_scale",
                    "label_smoothing",
                    "z_loss",
                    "shift",
                    "workspace_bytes",
                )
            },
            "ignore_index": 5 if ignore == 5 else -100,
            "stats": EVERY_STAT,
        },
        trainable={
            "all": ("hidden", "weight", "bias"),
            "hidden": ("hidden",),
            "weight": ("weight", "bias"),
        }[row["trainable"]],
        upstream={
            "loss": {},
            "lse": {"lse": 0.3},
            "entropy": {"entropy": -0.7},
            "all": {"loss": 0.5, "lse": 0.3, "entropy": 0.2},
        }[row["upstream"]],
        main_grad=row["main_grad"],
    )
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize(**grid(dtype=("bf16", "fp16", "fp32"), gradient=MODES))
def test_linear_cross_entropy_is_deterministic(place: Place, gradient: str, dtype: str) -> None:
    # Every third token is ignored: their number is another thing the kernels must not race for.
    case = make_case(
        DTYPES[dtype],
        place=place,
        maker=zipf_inputs,
        tensors=("bias",),
        ignore=-100,
        options={"gradient": gradient, "stats": ("lse", "entropy")},
    )
    first, second = run_case(None, case), run_case(None, case)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_linear_cross_entropy_explicit_backend() -> None:
    case = make_case(options={"backend": "torch"})
    auto = replace(case, options={})
    assert torch.equal(run_case(None, case)["loss"], run_case(None, auto)["loss"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "float64"])
def test_linear_cross_entropy_auto_takes_triton_on_a_gpu(dtype: str) -> None:
    # Where it can: float64 is torch's.
    place = TRITON_CUDA if dtype in TRITON_CUDA.dtypes else TORCH_CUDA
    named = make_case(DTYPES[dtype], place=place)
    auto = replace(named, options={})
    assert torch.equal(run_case(None, auto)["loss"], run_case(None, named)["loss"])


@pytest.mark.interpreter
def test_linear_cross_entropy_auto_never_interprets() -> None:
    named = make_case(place=TORCH_CPU)
    auto = replace(named, options={})
    assert torch.equal(run_case(None, auto)["loss"], run_case(None, named)["loss"])


def test_linear_cross_entropy_workspace_changes_rounding_only() -> None:
    small = make_case(torch.float64, options={"workspace_bytes": SMALL_WORKSPACE})
    large = replace(small, options={"workspace_bytes": 2**26})
    found, expected = run_case(None, small), run_case(None, large)
    for name in expected:
        check_close64(name, found[name], expected[name])


TENSORS = {"": (), "all": ("bias", "token_weight", "class_weight")}


@pytest.mark.parametrize(**grid(tensors=TENSORS, gradient=MODES))
def test_module_equals_function(place: Place, tensors: tuple[str, ...], gradient: str) -> None:
    case = make_case(place=place, tensors=tensors, ignore=-100)
    options = {"gradient": gradient, "z_loss": 0.1, "label_smoothing": 0.1, "stats": ("lse",)}
    options |= place.options
    more = {name: getattr(case.inputs, name).to(place.device) for name in tensors}
    module = LinearCrossEntropy(**options)
    assert not list(module.parameters()) and not module.state_dict()
    found = []
    for function in (module, lambda *args, **kw: linear_cross_entropy(*args, **kw, **options)):
        hidden, weight = leaves_of(case)
        result = function(hidden, weight, targets_of(case), **more)
        assert isinstance(result, LossOutput)
        result.loss.backward()
        found.append((result.loss, result.lse, hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_module_passes_grad_weight_into() -> None:
    case = make_case()
    hidden, weight = leaves_of(case)
    buffer = torch.zeros_like(weight.detach())
    module = LinearCrossEntropy()
    module(hidden, weight, case.inputs.targets, grad_weight_into=buffer).backward()
    assert weight.grad is None
    check_gate(
        "grad_weight",
        buffer,
        golden_outputs(case)["grad_weight"],
        dense_outputs(case)["grad_weight"],
    )


def test_loss_output_is_none_where_not_asked() -> None:
    case = make_case(tokens=5, num_classes=20, dim=4)
    args = (case.inputs.hidden, case.inputs.weight, case.inputs.targets)
    assert isinstance(linear_cross_entropy(*args), torch.Tensor)
    result = linear_cross_entropy(*args, stats=("correct",))
    assert isinstance(result, LossOutput)
    assert result.lse is None and result.entropy is None and result.logit_moments is None
    assert result.tail_mass is None and result.correct.dtype == torch.bool
    fields = LossOutput._fields
    *before, screened, last = fields
    assert before == ["loss", "lse", "entropy", "correct", "tail_mass", "logit_moments"]
    assert (screened, last) == ("screened", "sum_p2")
    assert result.screened is None and result.sum_p2 is None
