"""linear_cross_entropy on one rank against the golden: options, shapes, layouts, autograd."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from cce_dist import Filter, LinearCrossEntropy, LossOutput, linear_cross_entropy
from cce_dist.testing import (
    Case,
    check_close64,
    check_gate,
    check_outputs,
    check_promise,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    pairwise,
    run_case,
    zipf_inputs,
)

MODES = ("filtered", "exact", "in_forward")
DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float64": torch.float64,
}
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", marks=pytest.mark.gpu, id="cuda")]
# The smallest that is accepted: a few thousand columns already take several chunks.
SMALL_WORKSPACE = 2**16
EVERY_STAT = ("lse", "entropy", "correct", "tail_mass", "logit_moments")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def make_case(
    dtype: torch.dtype = torch.float32,
    *,
    tokens: Any = 129,  # one block of 128 tokens and one of a single one
    num_classes: int = 2500,  # one whole tile of 2048 columns and a ragged one
    dim: int = 37,  # no multiple of 8
    tensors: tuple[str, ...] = (),
    ignore: int | None = None,
    maker: Any = gaussian_inputs,
    **more: Any,
) -> Case:
    inputs = maker(tokens, num_classes, dim, generator=generator(), dtype=dtype)
    inputs = inputs.with_options(generator(), *tensors)
    if ignore is not None:
        inputs = inputs.ignoring(generator(), 0.3, ignore)
    return Case(inputs, **more)


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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("option", OPTIONS)
def test_linear_cross_entropy_each_option(
    option: str, gradient: str, dtype: str, device: str
) -> None:
    tensors, ignore, tokens, options = OPTIONS[option]
    if gradient == "in_forward" and options.get("reduction") == "none":
        pytest.skip("refused: test_loss_errors")
    case = make_case(
        DTYPES[dtype],
        tokens=tokens,
        tensors=tensors,
        ignore=ignore,
        options={**options, "gradient": gradient},
        device=device,
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


@pytest.mark.parametrize("row", pairwise(FACTORS, admitted), ids=row_id)
def test_linear_cross_entropy_pairs_of_options(row: dict[str, Any]) -> None:
    ignore = {"none": None, "some": -100, "id_5": 5}[row["ignored"]]
    case = make_case(
        DTYPES[row["dtype"]],
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


@pytest.mark.parametrize("workspace_bytes", [SMALL_WORKSPACE, 2**26], ids=["chunks", "one_chunk"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "float64"])
@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize(
    ("tokens", "num_classes", "dim"),
    [
        pytest.param(0, 50, 16, id="no_tokens"),
        pytest.param((2, 0), 50, 16, id="no_tokens_2d"),
        pytest.param(1, 50, 16, id="one_token"),
        pytest.param(7, 1, 5, id="one_class"),  # loss 0, gradients 0
        pytest.param(7, 2049, 300, id="one_column_beyond_a_tile"),  # and D > 256 with a bias
        pytest.param(129, 5003, 37, id="several_tiles"),  # two token blocks, the last one ragged
        pytest.param((2, 3, 5), 131, 9, id="three_leading_dims"),
        pytest.param(1000, 67, 12, id="more_tokens_than_classes"),  # eight token blocks
    ],
)
def test_linear_cross_entropy_shapes(
    tokens: Any, num_classes: int, dim: int, gradient: str, dtype: str, workspace_bytes: int
) -> None:
    case = make_case(
        DTYPES[dtype],
        tokens=tokens,
        num_classes=num_classes,
        dim=dim,
        tensors=("bias",),
        options={"gradient": gradient, "workspace_bytes": workspace_bytes, "stats": ("lse",)},
        # From 4096 classes on the default filter drops columns in 16 bits: what it promises, it
        # promises for a trained model's softmax.
        maker=zipf_inputs if num_classes > 4096 else gaussian_inputs,
    )
    # A single number, or a handful of exact zeros, has no rms to compare: see the fp32 gate.
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize(
    "trainable",
    list(
        itertools.chain.from_iterable(
            itertools.combinations(("hidden", "weight", "bias"), size) for size in range(4)
        )
    ),
    ids=lambda names: "_".join(names) or "nothing",
)
def test_linear_cross_entropy_each_input_frozen(trainable: tuple[str, ...], gradient: str) -> None:
    case = make_case(tensors=("bias",), options={"gradient": gradient}, trainable=trainable)
    outputs = run_case(None, case)
    check_outputs(case, outputs)
    assert {name for name in outputs if name.startswith("grad_")} == {
        f"grad_{name}" for name in trainable
    }


@pytest.mark.parametrize("gradient", ["filtered", "exact"])
def test_linear_cross_entropy_token_weight_gradient(gradient: str) -> None:
    case = make_case(
        torch.float64,
        tensors=("token_weight",),
        ignore=-100,
        options={"gradient": gradient, "z_loss": 0.1, "shift": 2},
        trainable=("hidden", "weight", "token_weight"),
    )
    whole = replace(case.inputs, token_weight=case.inputs.token_weight.double())
    case = replace(case, inputs=whole)
    check_outputs(case, run_case(None, case))


LAYOUTS = {
    "hidden_transposed": {"hidden": lambda x: x.T.contiguous().T},
    "hidden_strided": {"hidden": lambda x: x.repeat_interleave(2, -1)[..., ::2]},
    "hidden_row_padded": {"hidden": lambda x: torch.nn.functional.pad(x, (0, 3))[..., :-3]},
    "weight_transposed": {"weight": lambda x: x.T.contiguous().T},
    "weight_row_padded": {"weight": lambda x: torch.nn.functional.pad(x, (0, 3))[..., :-3]},
    "targets_strided": {"targets": lambda x: x.repeat_interleave(2)[::2]},
    "bias_strided": {"bias": lambda x: x.repeat_interleave(2)[::2]},
}


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_linear_cross_entropy_non_contiguous(layout: str, gradient: str) -> None:
    case = make_case(tensors=("bias",), options={"gradient": gradient})
    leaves = {
        name: getattr(case.inputs, name).clone() for name in ("hidden", "weight", "bias", "targets")
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
        gradient=gradient,
    )
    loss.backward()
    outputs = {"loss": loss.detach()}
    outputs |= {f"grad_{name}": leaves[name].grad for name in ("hidden", "weight", "bias")}
    check_outputs(case, outputs)


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_batch_first_transposed(gradient: str) -> None:
    # [T, B, D] seen as [B, T, D]: what a sequence-first model hands over.
    case = make_case(
        tokens=(4, 30), ignore=-100, options={"gradient": gradient, "shift": 1, "reduction": "sum"}
    )
    hidden = case.inputs.hidden.transpose(0, 1).contiguous().requires_grad_()
    weight = case.inputs.weight.clone().requires_grad_()
    targets = case.inputs.targets.T.contiguous()
    loss = linear_cross_entropy(
        hidden.transpose(0, 1), weight, targets.T, gradient=gradient, shift=1, reduction="sum"
    )
    loss.backward()
    found = {"loss": loss.detach(), "grad_hidden": hidden.grad.transpose(0, 1)}
    check_outputs(case, {**found, "grad_weight": weight.grad})


def leaves_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = case.inputs.hidden.clone().requires_grad_()
    return hidden, case.inputs.weight.clone().requires_grad_()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"gradient": "exact"}, id="exact"),
        pytest.param({"gradient": "in_forward"}, id="in_forward"),
        pytest.param({"filter": Filter(keep=0.1)}, id="filtered"),
        pytest.param({"filter": Filter(keep=0.1), "stats": ("tail_mass",)}, id="tail_mass"),
    ],
)
def test_linear_cross_entropy_backward_twice(options: dict[str, Any], dtype: str) -> None:
    case = make_case(DTYPES[dtype], maker=zipf_inputs)
    hidden, weight = leaves_of(case)
    result = linear_cross_entropy(
        hidden, weight, case.inputs.targets, workspace_bytes=SMALL_WORKSPACE, **options
    )
    loss = result.loss if "stats" in options else result
    loss.backward(retain_graph=True)
    first = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    loss.backward(torch.tensor(2.0), retain_graph=True)
    assert torch.equal(hidden.grad, 2 * first[0]) and torch.equal(weight.grad, 2 * first[1])
    hidden.grad = weight.grad = None
    loss.backward()
    assert torch.equal(hidden.grad, first[0]) and torch.equal(weight.grad, first[1])


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_gradient_accumulation(gradient: str) -> None:
    # Two halves with reduction="sum" into the same .grad are one batch.
    case = make_case(tokens=130, options={"gradient": gradient, "reduction": "sum"})
    hidden, weight = leaves_of(case)
    total = 0
    for part in (slice(0, 65), slice(65, 130)):
        loss = linear_cross_entropy(
            hidden[part], weight, case.inputs.targets[part], gradient=gradient, reduction="sum"
        )
        loss.backward()
        total += loss.detach()
    outputs = {"loss": total, "grad_hidden": hidden.grad, "grad_weight": weight.grad}
    check_outputs(case, outputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_grad_weight_into(gradient: str, dtype: str) -> None:
    case = make_case(DTYPES[dtype], options={"gradient": gradient}, main_grad=True)
    check_outputs(case, run_case(None, case))


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_grad_weight_into_accumulates(gradient: str) -> None:
    case = make_case(torch.bfloat16, options={"gradient": gradient})
    hidden, weight = leaves_of(case)
    buffer = torch.full(weight.shape, 3.0)
    pointer = buffer.data_ptr()
    loss = linear_cross_entropy(
        hidden, weight, case.inputs.targets, gradient=gradient, grad_weight_into=buffer
    )
    assert bool((buffer == 3).all()), "the buffer must not change before backward"
    loss.backward(retain_graph=True)
    once = buffer - 3
    loss.backward()
    assert weight.grad is None and buffer.data_ptr() == pointer
    torch.testing.assert_close(buffer - 3, 2 * once, atol=1e-6, rtol=1e-5)
    golden = golden_outputs(case)["grad_weight"]
    torch.testing.assert_close(once.double(), golden, atol=2e-5, rtol=1e-2)


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize(
    ("hidden_dtype", "weight_dtype"),
    [
        pytest.param(torch.float32, torch.float32, id="both_fp32"),
        pytest.param(torch.bfloat16, torch.float32, id="hidden_bf16"),
        pytest.param(torch.float32, torch.bfloat16, id="weight_bf16"),
    ],
)
def test_linear_cross_entropy_autocast(
    hidden_dtype: torch.dtype, weight_dtype: torch.dtype, gradient: str
) -> None:
    # Inputs are already bf16 numbers, so that rounding them is no part of the error.
    case = make_case(
        torch.bfloat16,
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


def test_linear_cross_entropy_autocast_of_rounding_inputs() -> None:
    # fp32 masters that bf16 rounds: the answer is that of the rounded ones, as for F.linear.
    case = make_case(torch.float32, options={"stats": ("lse",)}, autocast=torch.bfloat16)
    outputs = run_case(None, case)
    dense = dense_outputs(case, torch.float32)
    check_gate("lse", outputs["lse"], golden_outputs(case)["lse"], dense["lse"])
    assert outputs["grad_weight"].dtype == torch.float32


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_leaves_its_inputs_alone(gradient: str) -> None:
    inputs = gaussian_inputs(33, 70, 12, generator=generator())
    inputs = inputs.with_options(generator(), "bias", "token_weight", "class_weight")
    names = ("hidden", "weight", "targets", "bias", "token_weight", "class_weight")
    tensors = {name: getattr(inputs, name).clone() for name in names}
    for name in ("hidden", "weight", "bias"):
        tensors[name].requires_grad_()
    positional = (tensors.pop("hidden"), tensors.pop("weight"), tensors.pop("targets"))
    upstream = torch.tensor(0.7)
    linear_cross_entropy(*positional, **tensors, gradient=gradient).backward(upstream)
    for name, tensor in zip(names, (*positional, *tensors.values()), strict=True):
        assert torch.equal(tensor.detach(), getattr(inputs, name)), name
    assert float(upstream) == pytest.approx(0.7)


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_without_grad(gradient: str) -> None:
    case = make_case(options={"gradient": gradient, "stats": EVERY_STAT})
    hidden, weight = leaves_of(case)
    with torch.no_grad():
        result = linear_cross_entropy(hidden, weight, case.inputs.targets, **case.options)
    assert not result.loss.requires_grad and not result.lse.requires_grad
    found = {"loss": result.loss, "lse": result.lse, "entropy": result.entropy}
    found |= {"correct": result.correct, "max_logit": result.logit_moments.max}
    found |= {"mean_logit": result.logit_moments.mean}
    found |= {"variance_logit": result.logit_moments.variance}
    check_outputs(replace(case, backward=False), found)


@pytest.mark.parametrize("gradient", MODES)
def test_linear_cross_entropy_is_deterministic(gradient: str) -> None:
    case = make_case(torch.bfloat16, maker=zipf_inputs, options={"gradient": gradient})
    first, second = run_case(None, case), run_case(None, case)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def test_linear_cross_entropy_explicit_backend() -> None:
    case = make_case(options={"backend": "torch"})
    auto = replace(case, options={})
    assert torch.equal(run_case(None, case)["loss"], run_case(None, auto)["loss"])


def test_linear_cross_entropy_workspace_changes_rounding_only() -> None:
    small = make_case(torch.float64, options={"workspace_bytes": SMALL_WORKSPACE})
    large = replace(small, options={"workspace_bytes": 2**26})
    found, expected = run_case(None, small), run_case(None, large)
    for name in expected:
        check_close64(name, found[name], expected[name])


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("tensors", [(), ("bias", "token_weight", "class_weight")], ids=str)
def test_module_equals_function(tensors: tuple[str, ...], gradient: str) -> None:
    case = make_case(tensors=tensors, ignore=-100)
    options = {"gradient": gradient, "z_loss": 0.1, "label_smoothing": 0.1, "stats": ("lse",)}
    more = {name: getattr(case.inputs, name) for name in tensors}
    module = LinearCrossEntropy(**options)
    assert not list(module.parameters()) and not module.state_dict()
    found = []
    for function in (module, lambda *args, **kw: linear_cross_entropy(*args, **kw, **options)):
        hidden, weight = leaves_of(case)
        result = function(hidden, weight, case.inputs.targets, **more)
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
    assert fields == ("loss", "lse", "entropy", "correct", "tail_mass", "logit_moments")


@pytest.mark.parametrize("gradient", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_cross_entropy_composes_with_autograd(dtype: str, gradient: str) -> None:
    # hidden and weight as results of other operators, the loss inside a larger one.
    case = make_case(DTYPES[dtype], tokens=20, num_classes=50, dim=8)
    hidden, weight = leaves_of(case)
    loss = linear_cross_entropy(2 * hidden, weight + 0, case.inputs.targets, gradient=gradient)
    (3 * loss + 1).backward()
    doubled = replace(case.inputs, hidden=2 * case.inputs.hidden)
    expected = golden_outputs(replace(case, inputs=doubled, upstream={"loss": 3.0}))
    baseline = dense_outputs(replace(case, inputs=doubled, upstream={"loss": 3.0}))
    if dtype == "float64":
        check_close64("grad_hidden", hidden.grad, 2 * expected["grad_hidden"])
        check_close64("grad_weight", weight.grad, expected["grad_weight"])
        return
    found = {"grad_hidden": hidden.grad / 2, "grad_weight": weight.grad}
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
