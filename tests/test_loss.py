"""linear_cross_entropy on one rank against the golden: options, shapes, layouts, autograd."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, LinearCrossEntropy, LossOutput, linear_cross_entropy
from cce_dist.testing import (
    DTYPES,
    TORCH_CPU,
    TORCH_CUDA,
    TRITON_CPU,
    TRITON_CUDA,
    Case,
    Place,
    check_close64,
    check_gate,
    check_outputs,
    check_promise,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    pairwise,
    run_case,
    zipf_inputs,
)

MODES = ("filtered", "exact", "in_forward")
# The smallest that is accepted: a few thousand columns already take several chunks.
SMALL_WORKSPACE = 2**16
EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def make_case(
    dtype: torch.dtype = torch.float32,
    *,
    place: Place = TORCH_CPU,
    tokens: Any = 129,  # one block of 128 tokens and one of a single one
    num_classes: int | None = None,  # None: whole tiles and a ragged one
    dim: int = 37,  # no multiple of 8
    tensors: tuple[str, ...] = (),
    ignore: int | None = None,
    maker: Any = gaussian_inputs,
    **more: Any,
) -> Case:
    if num_classes is None:
        # torch: 2048 and 452 columns; Triton's tiles have 128 or 256, of which fewer will do.
        num_classes = 300 if place.interprets else 2500
    inputs = maker(tokens, num_classes, dim, generator=generator(), dtype=dtype)
    inputs = inputs.with_options(generator(), *tensors)
    if ignore is not None:
        inputs = inputs.ignoring(generator(), 0.3, ignore)
    return Case(inputs, **more).at(place)


# Each option alone: (tensors, ignored id or None, tokens, options).
OPTIONS: dict[str, tuple[tuple[str, ...], int | None, Any, dict[str, Any]]] = {
    "plain": ((), None, 129, {}),
    "bias": (("bias",), None, 129, {}),
    "softcap": ((), None, 129, {"softcap": 1.5}),
    "logit_scale": ((), None, 129, {"logit_scale": -1.7}),
    "label_smoothing": ((), None, 129, {"label_smoothing": 0.2}),
    "z_loss": ((), None, 129, {"z_loss": 0.1}),
    "token_weight": (("token_weight",), None, 129, {}),
    "class_weight": (("class_weight",), None, 129, {}),
    "class_weight_smoothing": (("class_weight",), None, 129, {"label_smoothing": 0.2}),
    "class_weight_sum": (("class_weight",), -100, 129, {"reduction": "sum"}),
    "ignored": ((), -100, 129, {}),
    "ignore_index_in_vocabulary": ((), 0, 129, {"ignore_index": 0}),
    "ignore_index_minus_1": ((), -1, 129, {"ignore_index": -1}),
    "shift": (("token_weight",), -100, (3, 43), {"shift": 1}),
    "shift_3_flat": ((), None, 129, {"shift": 3}),
    "sum": ((), -100, 129, {"reduction": "sum"}),
    "none": ((), -100, (3, 43), {"reduction": "none"}),
    "stats": ((), -100, 129, {"stats": EVERY_STAT}),
    "small_workspace": ((), None, 129, {"workspace_bytes": SMALL_WORKSPACE}),
}


def not_refused(row: dict[str, Any]) -> bool:
    return not (row["gradient"] == "in_forward" and row["option"] == "none")


@pytest.mark.parametrize(
    **grid(option=tuple(OPTIONS), gradient=MODES, dtype=tuple(DTYPES), allowed=not_refused)
)
def test_linear_cross_entropy_each_option(
    place: Place, option: str, gradient: str, dtype: str
) -> None:
    tensors, ignore, tokens, options = OPTIONS[option]
    case = make_case(
        DTYPES[dtype],
        place=place,
        tokens=tokens,
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
    **grid(shape=tuple(SHAPES), gradient=MODES, dtype=tuple(DTYPES), workspace=WORKSPACES)
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


def on_cpu(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: output.cpu() for name, output in outputs.items()}


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


def leaves_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden and weight on the case's device, as leaves of their own."""
    return tuple(
        tensor.to(case.device, copy=True).requires_grad_()
        for tensor in (case.inputs.hidden, case.inputs.weight)
    )


def targets_of(case: Case) -> torch.Tensor:
    return case.inputs.targets.to(case.device)


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


@pytest.mark.parametrize(**grid(gradient=MODES))
def test_linear_cross_entropy_without_grad(place: Place, gradient: str) -> None:
    case = make_case(place=place, options={"gradient": gradient, "stats": EVERY_STAT})
    hidden, weight = leaves_of(case)
    with torch.no_grad():
        result = linear_cross_entropy(hidden, weight, targets_of(case), **case.options)
    assert not result.loss.requires_grad and not result.lse.requires_grad
    found = {"loss": result.loss, "lse": result.lse, "entropy": result.entropy}
    found |= {"correct": result.correct, "max_logit": result.logit_moments.max}
    found |= {"mean_logit": result.logit_moments.mean}
    found |= {"variance_logit": result.logit_moments.variance}
    check_outputs(replace(case, backward=False), on_cpu(found))


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
    *before, last = fields
    assert before == ["loss", "lse", "entropy", "correct", "tail_mass", "logit_moments"]
    assert last == "screened" and result.screened is None


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
