"""keep_logits: the same gradients, whatever was kept, and where."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from cce_dist import Filter, Screen, linear_cross_entropy
from cce_dist.algorithm.plan import Plan
from cce_dist.testing import (
    DTYPES,
    TRITON_CPU,
    TRITON_PLACES,
    Case,
    Place,
    check_outputs,
    gaussian_inputs,
    golden_outputs,
    grid,
    run_case,
    zipf_inputs,
)
from tests.backends.triton.triton_cases import give_programs
from tests.support.loss_cases import generator

pytest.importorskip("triton")
from cce_dist.backends.triton.backward.exact import BLOCKS_AT_ONCE, FURTHEST
from cce_dist.backends.triton.kernels.backward.exact_logits import bad_ref_kernel
from cce_dist.backends.triton.launch.start import start
from cce_dist.options import TOKEN_BLOCK

# Of 2,600 columns: those in the weight's gradient alone, some in the workspace too, all in both.
WORKSPACES = {"no": 2**16, "some": 2**19 + 2**17, "all": 2**26}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap_smoothing": {"softcap": 2.0, "label_smoothing": 0.1},
    "scale_stats": {
        "logit_scale": -1.7,
        "stats": ("lse", "entropy", "sum_p2", "correct", "logit_moments"),
    },
}


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


HARD = {
    # The logits of some tokens are tiny in the columns that come first and huge in others.
    "in_kept_columns": (1100, 1e4),
    "in_columns_before": (300, 1e4),
    "in_the_last_column": (1299, 1e4),
    "falling": (1100, -1e4),
    # Nothing is known of lse until late: the first class is impossible, and so are most targets.
    "first_class_impossible": (0, 0.0),
}


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, hard=HARD, dtype=("fp16", "bf16")))
def test_keep_logits_over_a_poor_reference(
    place: Place, hard: tuple[int, float], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place.interprets:
        # More than one split of the vocabulary, as a device has.
        give_programs(monkeypatch, 4)
    first, last = hard
    inputs = gaussian_inputs(150, 1300, 32, generator=generator(), dtype=DTYPES[dtype])
    hidden, weight = inputs.hidden.clone(), inputs.weight.clone()
    weight[:, 0] = 0
    weight[first:, 0] = 1
    hidden[:, 0] = 0
    hidden[5:9, 0] = last
    bias = torch.zeros(1300, dtype=DTYPES[dtype])
    if first == 0:
        bias[0] = -torch.inf
        hidden[::3] *= 8
    targets = inputs.targets.where(inputs.targets > 0, 1)
    inputs = replace(inputs, hidden=hidden, weight=weight, bias=bias, targets=targets)
    options = {"gradient": "exact", "reduction": "sum", "stats": ("lse",)}
    case = Case(inputs, {**options, "workspace_bytes": WORKSPACES["some"]}).at(place)
    expected = run_case(None, case)
    found = run_case(None, replace(case, options={**case.options, "keep_logits": True}))
    golden = golden_outputs(case)
    for name, value in found.items():
        assert bool(value.isfinite().all()), name
        # Logits of 1e4 are rounded to 1e-3, and so are probabilities; with and without.
        size = float(golden[name].norm())
        error, plain = (float((x.double() - golden[name]).norm()) for x in (value, expected[name]))
        assert error <= 2 * plain + 1e-6 * size, f"{name}: {error / size:.1e}, {plain / size:.1e}"


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


# -- logits="screened" --------------------------------------------------------------------------

SCREENED: dict[str, Any] = {
    "logits": "screened",
    "filter": Filter(keep=2e-3),
    "screen": Screen(max_kept=1.0),
    "reduction": "sum",
    "keep_logits": True,
}
SCREENED_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap_scale": {"softcap": 6.0, "logit_scale": 1.3},
    "no_draw_z_loss": {"filter": Filter(keep=2e-3, draw=False), "z_loss": 0.01},
    "no_tail_smoothing": {"filter": Filter(keep=2e-3, tail=False), "label_smoothing": 0.1},
    "in_forward": {"gradient": "in_forward"},
    # Of which the backward computes the first ones again.
    "chunks": {"workspace_bytes": WORKSPACES["no"]},
    "chunks_softcap": {"workspace_bytes": WORKSPACES["no"], "softcap": 6.0},
}


def screened_case(place: Place, options: dict[str, Any]) -> Case:
    dtype = torch.float16 if place.interprets else torch.bfloat16
    inputs = zipf_inputs(150, 1400, 24, generator=generator(), dtype=dtype)
    inputs = inputs.with_options(generator(), "bias").ignoring(generator(), 0.1)
    return Case(inputs, {**SCREENED, **options}).at(place)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch, prepared: None) -> list[Any]:
    """What each forward has kept."""
    found: list[Any] = []
    make = Plan.store_for

    def spy(*given: Any) -> Any:
        found.append(make(*given))
        return found[-1]

    monkeypatch.setattr(Plan, "store_for", spy)
    return found


def assert_close(found: dict[str, Any], expected: dict[str, Any], dtype: torch.dtype) -> None:
    for name, value in expected.items():
        difference = float((found[name].double() - value.double()).norm())
        # d_logits are rounded to 16 bits, in the same places; the probabilities of them, too.
        assert difference <= torch.finfo(dtype).eps * float(value.double().norm()), name


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, options=SCREENED_OPTIONS))
def test_screened_keeps_logits(place: Place, options: dict[str, Any], rooms: list[Any]) -> None:
    case = replace(screened_case(place, options), upstream={"loss": 0.3})
    kept = run_case(None, case)
    again = run_case(None, replace(case, options={**case.options, "keep_logits": False}))
    assert [room is not None for room in rooms] == [True, False]
    assert not bool(rooms[0].bad_ref.any())
    assert (int(rooms[0].lists.num_chunks) == 1) == ("workspace_bytes" not in options)
    assert_close(kept, again, case.inputs.hidden.dtype)


@pytest.mark.parametrize("trainable", ["hidden", "weight", "bias"])
def test_screened_keeps_logits_with_frozen_inputs(trainable: str) -> None:
    case = replace(screened_case(TRITON_CPU, {}), trainable=(trainable,))
    again = replace(case, options={**case.options, "keep_logits": False})
    assert_close(run_case(None, case), run_case(None, again), case.inputs.hidden.dtype)


def test_screened_backward_begins_with_what_was_kept(rooms: list[Any]) -> None:
    """And only the first one: over a retained graph the second computes logits again."""
    case = screened_case(TRITON_CPU, {"backend": "triton"})
    hidden, weight = (x.clone().requires_grad_() for x in (case.inputs.hidden, case.inputs.weight))
    loss = partial(linear_cross_entropy, hidden, weight, case.inputs.targets, bias=case.inputs.bias)

    def grads(of: Any, **how: Any) -> dict[str, Any]:
        return dict(enumerate(torch.autograd.grad(of, (hidden, weight), **how)))

    plain = grads(loss(**{**case.options, "keep_logits": False}))
    made = loss(**case.options)
    first = grads(made, retain_graph=True)
    # Not in memory until the graph goes.
    assert rooms[-1].workspace is None
    second = grads(made)
    assert_close(first, plain, hidden.dtype)
    assert_close(second, plain, hidden.dtype)
    made = loss(**case.options)
    rooms[-1].workspace.zero_()
    changed = grads(made)
    assert all(float((changed[i] - plain[i]).norm()) > 0.1 * plain[i].norm() for i in plain)
    made = loss(**case.options)
    rooms[-1].workspace.zero_()
    rooms[-1].bad_ref.fill_(1)
    unchanged = grads(made)
    assert all(torch.equal(unchanged[name], second[name]) for name in plain)


REFUSED = {
    # The call is computed in full, or 8-bit logits are too far from those that are to be kept.
    "guard": (Screen(max_kept=0.0), 1.0),
    "far_off": (Screen(max_kept=1.0, max_error=1e9), 600.0),
}


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, refused=REFUSED))
def test_screened_keeps_no_poor_logits(
    place: Place, refused: tuple[Screen, float], rooms: list[Any]
) -> None:
    screen, size = refused
    case = screened_case(place, {"screen": screen})
    hidden = case.inputs.hidden.clone()
    hidden[:20] *= size
    case = replace(case, inputs=replace(case.inputs, hidden=hidden))
    kept = run_case(None, case)
    again = run_case(None, replace(case, options={**case.options, "keep_logits": False}))
    assert bool(rooms[0].bad_ref.any())
    assert_close(kept, again, hidden.dtype)


def test_screened_keeps_logits_by_itself(rooms: list[Any]) -> None:
    """As most backwards are next; False for all others."""
    case = screened_case(TRITON_CPU, {})
    found = {
        keep: run_case(None, replace(case, options={**case.options, "keep_logits": keep}))
        for keep in (True, None, False)
    }
    assert [room is not None for room in rooms] == [True, True, False]
    assert all(torch.equal(found[None][name], found[True][name]) for name in found[True])


def test_screened_keeps_nothing_without_a_gradient(rooms: list[Any]) -> None:
    case = replace(screened_case(TRITON_CPU, {}), backward=False)
    with torch.no_grad():
        run_case(None, case)
    assert rooms == []


WIDE = {"16_bits": False, "fp32": True}


@pytest.mark.parametrize(**grid(places=TRITON_PLACES, num_blocks=(1, 16, 20), wide=WIDE))
def test_blocks_whose_logits_are_not_usable(place: Place, num_blocks: int, wide: bool) -> None:
    """A reference far from lse, below or above, or NaN; of tokens that count alone."""
    size, last = num_blocks * TOKEN_BLOCK, num_blocks - 1
    count = torch.tensor([size - 28], dtype=torch.int32)
    lse = torch.randn(size, generator=torch.Generator().manual_seed(0))
    for token, value in ((None, 0.0), (5, -17.0), (size - 40, 17.0), (0, float("nan"))):
        ref = lse + 15.0
        ref[size - 28 :] = -1e30
        if token is not None:
            ref[token] = lse[token] + value
        factors = torch.full((7, size), float("nan"))
        factors[5] = lse * math.log(2) if wide else lse
        bad_ref = torch.full((num_blocks + 1,), -7, dtype=torch.int32)
        tensors = [x.to(place.device) for x in (factors, ref, count, bad_ref)]
        start(bad_ref_kernel, (1,))(
            *tensors, num_blocks, FURTHEST, TOKENS=TOKEN_BLOCK, BLOCKS=BLOCKS_AT_ONCE, WIDE=wide
        )
        expected = [0] * (num_blocks + 1)
        if token is not None:
            expected[min(token // TOKEN_BLOCK, last)] = expected[num_blocks] = 1
        assert tensors[3].tolist() == expected
