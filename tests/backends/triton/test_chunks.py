"""gradient="in_forward" of every column: chunks of tokens, whose logits become their gradients."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cce_dist import Filter, LossOptions, linear_cross_entropy
from cce_dist.algorithm import in_forward
from cce_dist.algorithm.plan import Plan, plan_of
from cce_dist.backends.protocol import LateTargets
from cce_dist.backends.torch.tiles import add_product
from cce_dist.core.types import Tokens
from cce_dist.testing import (
    DTYPES,
    TRITON_CPU,
    TRITON_CUDA,
    TRITON_PLACES,
    Case,
    Place,
    check_outputs,
    dense_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    join_ranks,
    run_case,
    shared_pool,
)
from cce_dist.vocab_shard import VocabShard
from tests.backends.triton.triton_cases import give_programs
from tests.support.loss_cases import SMALL_WORKSPACE, generator

pytest.importorskip("triton")

from cce_dist.backends.triton.backward import late_targets
from cce_dist.backends.triton.backward.late_targets import add_late_targets
from cce_dist.backends.triton.grads import scale

# Three blocks of tokens, which are three chunks; a whole tile of columns and a ragged one.
TOKENS, CLASSES, DIM = 300, 301, 37
DEFAULT: dict[str, Any] = {"workspace_bytes": None}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sum": {"reduction": "sum", "z_loss": 0.05},
    "smoothing": {"label_smoothing": 0.2, "logit_scale": 0.7},
    "softcap": {"softcap": 1.5, "logit_scale": -1.7},
    "softcap_smoothing": {"softcap": 2.0, "label_smoothing": 0.1},
    "stats": {"stats": ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2")},
}


def make_case(dtype: str, options: dict[str, Any], *tensors: str, ignored: float = 0.3) -> Case:
    inputs = gaussian_inputs(TOKENS, CLASSES, DIM, generator=generator(), dtype=DTYPES[dtype])
    inputs = inputs.with_options(generator(), *tensors).ignoring(generator(), ignored)
    every = {"gradient": "in_forward", "filter": Filter(keep=0), "stats": ("lse",)}
    return Case(inputs, {**every, "workspace_bytes": SMALL_WORKSPACE, **options})


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each chunk."""
    found: list[int] = []
    add_chunk = in_forward._add_chunk

    def spy(sums: Any, tokens: Any, at: slice, *given: Any) -> None:
        found.append(at.stop - at.start)
        add_chunk(sums, tokens, at, *given)

    monkeypatch.setattr(in_forward, "_add_chunk", spy)
    return found


@pytest.mark.parametrize(
    **grid(
        places=TRITON_PLACES,
        options=OPTIONS,
        dtype=("fp32", "fp16", "bf16"),
        tensors={"": (), "all": ("bias", "token_weight", "class_weight")},
    )
)
def test_chunks_meet_the_promise(
    place: Place, options: dict[str, Any], dtype: str, tensors: tuple[str, ...], chunks: list[int]
) -> None:
    case = replace(make_case(dtype, options, *tensors), upstream={"loss": 3.0}).at(place)
    check_outputs(case, run_case(None, case))
    assert chunks == [128, 128, 44]
    # All logits fit the default workspace.
    chunks.clear()
    check_outputs(case, run_case(None, replace(case, options={**case.options, **DEFAULT})))
    assert chunks == [300]


@pytest.mark.parametrize(
    **grid(
        places=TRITON_PLACES,
        options=OPTIONS,
        most_mass={"every_target": 1e9, "some": 0.7},
        tensors={"": (), "all": ("bias", "token_weight", "class_weight")},
    )
)
def test_late_targets_are_added_after_the_last_chunk(
    place: Place,
    options: dict[str, Any],
    most_mass: float,
    tensors: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = replace(make_case("fp32", options, *tensors), upstream={"loss": 3.0}).at(place)
    plain = run_case(None, case)
    monkeypatch.setattr(in_forward, "_late_targets", late_in_any_dtype)
    monkeypatch.setattr(late_targets, "MOST_MASS", most_mass)
    found = run_case(None, case)
    check_outputs(case, found)
    # Only the order of the weight's sums differs.
    assert not torch.equal(found["grad_weight"], plain.pop("grad_weight"))
    for name, value in plain.items():
        assert torch.equal(found[name], value), name


def late_in_any_dtype(rows: Tensor, num_tokens: int, size: int) -> LateTargets:
    memory = (rows.new_empty(number, dtype=torch.float32) for number in (num_tokens, len(rows)))
    return LateTargets(*memory, num_tokens, size)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES))
def test_late_targets_of_one_id(place: Place) -> None:
    """More tokens have it than a program reads at once; others have no id here, or no term."""
    tokens, classes, dim = 600, 7, 530
    hidden = torch.randn(tokens + 20, dim, generator=generator()).to(place.device)
    rows = torch.randperm(tokens + 20, generator=generator())[:tokens].to(place.device)
    targets = torch.randint(-1, classes - 2, (tokens,), generator=generator())
    targets[10:560] = 2
    terms = torch.randn(tokens, generator=generator())
    terms[targets == 1] = 0
    targets, terms = targets.to(place.device), terms.to(place.device)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if place.interprets and dtype == torch.bfloat16:
            continue
        before = torch.randn(classes, dim, generator=generator()).to(place.device, dtype)
        after, golden = before.clone(), before.double()
        add_late_targets(Tokens(hidden, rows, targets.int()), terms, after)
        here = targets >= 0
        products = (terms[:, None] * hidden[rows])[here].double()
        golden.index_add_(0, targets[here], products)
        size = before.double().abs().index_add_(0, targets[here], products.abs())
        assert (after - golden).abs().max() <= torch.finfo(dtype).eps * size.max()
        # Nothing is added to these.
        for row in (1, classes - 2, classes - 1):
            assert torch.equal(after[row], before[row])
    terms[20] = torch.nan
    add_late_targets(Tokens(hidden, rows, targets.int()), terms, after)
    assert after[2].isnan().all() and not after[[0, 1, 3]].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_chunks_of_a_flat_softmax_are_as_close_as_dense_bf16(options: dict[str, Any]) -> None:
    """A row with its target's large term would round away what later chunks add."""
    inputs = gaussian_inputs(1024, 4096, 64, generator=generator(), dtype=torch.bfloat16)
    every = {"gradient": "in_forward", "filter": Filter(keep=0), **options}
    case = Case(inputs, {"workspace_bytes": 2**20, **every}).at(TRITON_CUDA)
    golden, dense = golden_outputs(case), dense_outputs(case)
    error, of_dense = (
        float((x["grad_weight"].double() - golden["grad_weight"]).norm())
        for x in (run_case(None, case), dense)
    )
    assert error <= 1.1 * of_dense, f"{error / of_dense:.2f}"


@pytest.mark.gpu
def test_a_product_is_added_to_a_sum_in_bf16_with_one_rounding() -> None:
    """A product that nearly cancels the sum shows if it was rounded before."""
    with torch.device("cuda"):
        torch.manual_seed(0)
        a, b, first = (torch.randn(*shape) for shape in ((8192, 256), (256, 1024), (8192, 1024)))
    a, b = a.bfloat16(), b.bfloat16()
    product = a.double() @ b.double()
    out = (first * 0.01 - product).bfloat16()
    golden = out.double() + product
    add_product(out, a, b)
    # Sums in fp32 err by their own size; a rounded product would by 2^-9 of it.
    size = a.double().abs() @ b.double().abs()
    assert ((out - golden).abs() <= 2.0**-8 * golden.abs() + 2.0**-17 * size).all()


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, dtype=("fp32", "fp16", "bf16")))
def test_chunks_with_frozen_inputs_and_main_grad(place: Place, dtype: str) -> None:
    every = make_case(dtype, {"label_smoothing": 0.1}, "bias").at(place)
    others = [replace(every, trainable=names) for names in (("hidden",), ("weight",), ("bias",))]
    for case in (*others, replace(every, main_grad=True)):
        check_outputs(case, run_case(None, case))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, dtype=("fp32", "fp16", "bf16")))
def test_ignored_tokens_may_hold_anything(place: Place, dtype: str, chunks: list[int]) -> None:
    # The last chunk has no token that counts, and the one before has some.
    case = make_case(dtype, {"label_smoothing": 0.1}, "bias", ignored=0.6).at(place)
    hidden = case.inputs.hidden.clone()
    hidden[case.inputs.targets == -100] = torch.nan
    found = run_case(None, replace(case, inputs=replace(case.inputs, hidden=hidden)))
    assert len(chunks) == 3
    check_outputs(case, found)
    assert not found["grad_hidden"][case.inputs.targets == -100].any()
    nothing = case.inputs.ignoring(generator(), 1.0)
    hidden = torch.full_like(hidden, torch.nan)
    found = run_case(None, replace(case, inputs=replace(nothing, hidden=hidden)))
    assert not any(bool(value.any()) for value in found.values())


HARD = {
    # The logits of some tokens are tiny in the columns that come first and huge in others.
    "late": (250, 1e4),
    "falling": (250, -1e4),
    "in_the_last_column": (300, 1e4),
    # The first class is impossible, and so are most targets.
    "first_class_impossible": (0, 0.0),
}


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, hard=HARD, dtype=("fp32", "fp16", "bf16")))
def test_chunks_over_a_poor_reference(
    place: Place, hard: tuple[int, float], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place.interprets:
        # More than one split of the vocabulary, as a device has.
        give_programs(monkeypatch, 4)
    first, last = hard
    case = make_case(dtype, {"reduction": "sum"}, "bias").at(place)
    hidden, weight, bias = (
        getattr(case.inputs, name).clone() for name in ("hidden", "weight", "bias")
    )
    weight[:, 0], hidden[:, 0] = 0, 0
    weight[first:, 0] = 1
    hidden[5:9, 0] = last
    hidden[200, 0] = last
    if first == 0:
        bias[0] = -torch.inf
        hidden[::3] *= 8
    targets = case.inputs.targets.where(case.inputs.targets != 0, 1)
    inputs = replace(case.inputs, hidden=hidden, weight=weight, bias=bias, targets=targets)
    case = replace(case, inputs=inputs)
    # `exact` computes these logits in registers alone.
    plain = run_case(None, replace(case, options={**case.options, "gradient": "exact",
                                                  "filter": Filter()}))  # fmt: skip
    found, golden = run_case(None, case), golden_outputs(case)
    for name, value in found.items():
        assert bool(value.isfinite().all()), name
        size = float(golden[name].norm())
        error, other = (float((x.double() - golden[name]).norm()) for x in (value, plain[name]))
        assert error <= 2 * other + 2e-6 * size, f"{name}: {error / size:.1e}, {other / size:.1e}"


def rank_case(place: Place, dtype: str, bounds: Any) -> Case:
    case = make_case(dtype, {"label_smoothing": 0.1, "softcap": 3.0}, "bias", "class_weight")
    return replace(case, bounds=bounds).at(place)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(((0, 128), (128, 301)), id="two"),
        pytest.param(((0, 1), (1, 130), (130, 130), (130, 301)), id="four, one of them empty"),
    ],
)
def test_chunks_over_ranks(dtype: str, bounds: Any) -> None:
    case = rank_case(TRITON_CPU, dtype, bounds)
    outputs = shared_pool().run(len(bounds), run_case, case)
    check_outputs(case, join_ranks(case, outputs))


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, dtype=("fp32", "fp16", "bf16")))
def test_chunks_backward_again_over_a_retained_graph(place: Place, dtype: str) -> None:
    case = make_case(dtype, {}).at(place)
    hidden, weight = (
        x.to(place.device).requires_grad_() for x in (case.inputs.hidden, case.inputs.weight)
    )
    targets = case.inputs.targets.to(place.device)
    options = {name: value for name, value in case.options.items() if name != "stats"}
    loss = linear_cross_entropy(hidden, weight, targets, **options)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    kept = [grad.clone() for grad in first]
    second = torch.autograd.grad(loss, (hidden, weight))
    for one, copy, two in zip(first, kept, second, strict=True):
        assert torch.equal(one, copy) and torch.equal(one, two)


def plan_for(num_tokens: int, vocab_size: int, **options: Any) -> Plan:
    hidden = torch.empty(num_tokens, 8)
    shard = VocabShard(0, vocab_size, vocab_size)
    every = LossOptions(gradient="in_forward", filter=Filter(keep=0), backend="torch", **options)
    plan = plan_of(hidden, num_tokens, every, None, shard)
    traits = SimpleNamespace(in_forward_filters=True, narrow_logits=True)
    return replace(plan, backend=SimpleNamespace(traits=traits))  # pyright: ignore


GIB = 2**30
SIZES = {
    # By default a fifth of the tokens, in whole blocks, of one size.
    "default": (8192, 256_000, None, 1664),
    "few": (7, 256_000, None, 128),
    "none": (0, 256_000, None, 128),
    "two_blocks": (129, 256_000, None, 128),
    # What fits the default workspace of 64 MiB, if that is more.
    "few_classes": (8192, 8000, None, 4096),
    "all": (8192, 256_000, 8 * GIB, 8192),
    "quarter": (8192, 256_000, GIB, 2048),
    # The logits of eight blocks fit, and of seven.
    "eighth": (8192, 256_000, 500 * 2**20, 1024),
    "between": (8192, 256_000, 450 * 2**20, 896),
    "least": (8192, 256_000, 2**16, 128),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_chunk_tokens(size: tuple[int, int, int | None, int]) -> None:
    num_tokens, vocab_size, workspace_bytes, expected = size
    plan = plan_for(num_tokens, vocab_size, workspace_bytes=workspace_bytes)
    assert plan.by_chunks
    assert in_forward.tokens_of_chunk(num_tokens, plan, torch.bfloat16) == expected


def test_many_chunks_sum_the_weights_gradient_in_fp32() -> None:
    for workspace_bytes, narrow in ((None, True), (500 * 2**20, True), (64 * 2**20, False)):
        plan = plan_for(8192, 256_000, workspace_bytes=workspace_bytes)
        assert in_forward.holds_sum(torch.bfloat16, 8192, plan) == narrow
        # For an upstream gradient of 1 the gradients of a mean may be too small for fp16.
        assert not in_forward.holds_sum(torch.float16, 8192, plan)


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, dtype=("fp32", "fp16", "bf16")))
def test_scale_multiplies_in_place(place: Place, dtype: str) -> None:
    # More than a program's block, and less than a whole one.
    grad = torch.randn(3, 4001, generator=generator()).to(place.device, DTYPES[dtype])
    for factor in (1.0, 0.3, 0.0, torch.inf):
        number = torch.tensor(factor, device=place.device)
        # In fp32: torch rounds a number on a GPU to the gradient's dtype first.
        expected, found = grad.float() * number, grad.clone()
        scale(found, number)
        assert torch.equal(found, expected.to(grad.dtype))
    scale(grad[:0], number)
