"""Random shapes, options and groups against the golden, in the widest dtype: any slip shows."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cce_dist import Filter
from cce_dist.testing import (
    CPU_PLACES,
    Case,
    Inputs,
    Place,
    check_close64,
    check_outputs,
    gaussian_inputs,
    golden_outputs,
    join_ranks,
    run_case,
    shared_pool,
)

SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
STATS = ("lse", "entropy", "correct", "tail_mass", "logit_moments", "sum_p2")


@st.composite
def cases(draw: st.DrawFn, world_size: int, place: Place) -> Case:
    shape = draw(
        st.one_of(
            st.tuples(st.integers(0, 20)),
            st.tuples(st.integers(1, 3), st.integers(1, 8)),
            st.tuples(st.integers(130, 150)),  # more than a block of tokens
        )
    )
    sequence_parallel = draw(st.booleans())
    if sequence_parallel:
        shape = (max(shape[0] // world_size, 1) * world_size, *shape[1:])
    num_classes = draw(st.integers(1, 40))
    padding = draw(st.integers(0, 10))
    cuts = draw(
        st.lists(
            st.integers(0, num_classes + padding),
            min_size=world_size - 1,
            max_size=world_size - 1,
        )
    )
    edges = [0, *sorted(cuts), num_classes + padding]
    dim = draw(st.integers(1, 9))

    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([0.1, 1.0, 30.0]))
    inputs = gaussian_inputs(
        shape, num_classes + padding, dim, generator=generator, dtype=place.widest
    )
    inputs = replace(inputs, hidden=scale * inputs.hidden, targets=inputs.targets % num_classes)
    ignore_index = draw(st.sampled_from([-100, 0, -1]))
    inputs = inputs.ignoring(generator, draw(st.sampled_from([0.0, 0.4, 1.0])), ignore_index)
    tensors = draw(st.sets(st.sampled_from(["bias", "token_weight", "class_weight"])))
    inputs = inputs.with_options(generator, *sorted(tensors))
    if inputs.class_weight is not None:
        inputs = replace(inputs, class_weight=inputs.class_weight[:num_classes])

    gradient = draw(st.sampled_from(["filtered", "exact", "in_forward"]))
    reductions = ["mean", "sum"] + ["none"] * (gradient != "in_forward")
    softcap = draw(st.sampled_from([None, 3.0]))
    smoothing = draw(st.sampled_from([0.0, 0.2]))
    options: dict[str, Any] = {
        "gradient": gradient,
        "reduction": draw(st.sampled_from(reductions)),
        "ignore_index": ignore_index,
        "softcap": softcap,
        "label_smoothing": smoothing,
        "logit_scale": draw(st.sampled_from([1.0, -0.5, 2.0])),
        "z_loss": draw(st.sampled_from([0.0, 0.1])),
        "stats": STATS,
        "sequence_parallel": sequence_parallel,
        "workspace_bytes": draw(st.sampled_from([2**16, 2**24])),
    }
    if shape[-1] > 1:
        options["shift"] = draw(st.integers(0, shape[-1] - 1))
    if gradient == "filtered" and softcap and smoothing:
        options["filter"] = Filter(keep=0)
    upstream = {}
    if gradient != "in_forward":
        upstream = draw(st.sampled_from([{}, {"lse": 0.3}, {"entropy": -0.4}]))
    return Case(
        inputs,
        options,
        bounds=tuple(itertools.pairwise(edges)),
        vocab_size=num_classes,
        upstream=upstream,
        main_grad=draw(st.booleans()),
    ).at(place)


def check(case: Case, outputs: dict[str, torch.Tensor]) -> None:
    """As check_outputs; what cancels to 0 (one class, say) is measured by the logits' size."""
    golden = golden_outputs(case)
    scale = golden["scale"].abs().max() if golden["scale"].numel() else torch.zeros(())
    weights = max(1.0, float(golden["loss"].abs().max()) if golden["loss"].numel() else 0.0)
    size = torch.maximum(scale, torch.ones(())) ** 2 * weights
    for name, expected in golden.items():
        if name == "correct":
            # In fp32 a softcap makes ties of logits that float64 tells apart.
            if case.computed_dtype == torch.float64 or not case.options["softcap"]:
                assert torch.equal(outputs[name], expected)
        elif name not in ("token_loss", "scale"):
            ours, scale = outputs[name], size.expand(expected.shape)
            if case.computed_dtype == torch.float64:
                assert ours.dtype == expected.dtype, name
                check_close64(name, ours, expected, scale=scale)
            elif expected.numel():
                error = float((ours.double() - expected).abs().max())
                assert error <= 1e-5 * float(size), f"{name}: {error:.3e}, unit {float(size):.3e}"


# Examples, on one rank and on a group: an interpreted one takes up to a second a rank.
EXAMPLES = {"torch": (150, 30), "triton": (25, 8)}


def settings_for(place: Place, number: int) -> settings:
    """Interpreted examples that fail are not made smaller: that takes hundreds of them."""
    phases = (Phase.explicit, Phase.generate) if place.interprets else tuple(Phase)
    return settings(max_examples=number, phases=phases, **SETTINGS)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("place", CPU_PLACES, ids=str)
def test_linear_cross_entropy_equals_golden(place: Place) -> None:
    @settings_for(place, EXAMPLES[place.backend][0])
    @given(case=cases(1, place))
    def run(case: Case) -> None:
        check(case, run_case(None, case))

    run()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("place", CPU_PLACES, ids=str)
@pytest.mark.parametrize("world_size", [2, 3, 4], ids=lambda size: f"{size}_ranks")
def test_linear_cross_entropy_equals_golden_on_a_group(world_size: int, place: Place) -> None:
    @settings_for(place, EXAMPLES[place.backend][1])
    @given(case=cases(world_size, place))
    def run(case: Case) -> None:
        check(case, join_ranks(case, shared_pool().run(world_size, run_case, case)))

    run()


FILTERED = {
    "num_tokens": st.integers(1, 300),
    "num_classes": st.integers(2, 400),
    "keep": st.sampled_from([0.001, 0.02, 0.3, 4.0, 128.0]),
    "tail": st.booleans(),
    "draw": st.booleans(),
    "by_token": st.booleans(),
    "scale": st.sampled_from([0.3, 1.0, 6.0]),
    "seed": st.integers(0, 2**31),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("place", CPU_PLACES, ids=str)
def test_filtered_error_is_bounded_by_tail_mass(place: Place) -> None:
    @settings_for(place, 60 if place.backend == "torch" else 25)
    @given(**FILTERED)
    def run(**drawn: Any) -> None:
        check_bound(place, **drawn)

    run()


def check_bound(
    place: Place,
    num_tokens: int,
    num_classes: int,
    keep: float,
    tail: bool,
    draw: bool,
    by_token: bool,
    scale: float,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype, rounding = place.widest, 1e-9 if place.widest == torch.float64 else 1e-4
    inputs = gaussian_inputs(num_tokens, num_classes, 6, generator=generator, dtype=dtype)
    inputs = replace(inputs, hidden=scale * inputs.hidden)
    criterion = {"eps": min(keep, 1.0)} if by_token else {"keep": keep}
    filter = Filter(**criterion, tail=tail, draw=draw)
    case = Case(inputs, {"reduction": "sum", "filter": filter, "stats": ("tail_mass",)}).at(place)
    outputs, golden = run_case(None, case), golden_outputs(case)
    mass = (2 if tail else 1) * outputs["tail_mass"].double()
    error = (outputs["grad_hidden"] - golden["grad_hidden"]).norm(dim=-1)
    longest = inputs.weight.double().norm(dim=-1).max()
    # What is drawn has a variance, but no bound: tests/loss/filter/test_loss_drawn.py.
    if draw and tail and not by_token:
        assert bool(error.isfinite().all())
    else:
        assert bool((error <= mass * longest + rounding).all())
    error = (outputs["grad_weight"] - golden["grad_weight"]).norm(dim=-1).sum()
    slack = rounding * max(1.0, float(inputs.hidden.norm(dim=-1).sum()))
    assert float(error) <= float((mass * inputs.hidden.norm(dim=-1)).sum()) + slack
    if tail:
        assert float(outputs["grad_weight"].sum(0).abs().max()) < slack


@settings(max_examples=40, **SETTINGS)
@given(
    num_tokens=st.integers(1, 20),
    num_classes=st.integers(2, 60),
    seed=st.integers(0, 2**31),
    order=st.randoms(use_true_random=False),
)
def test_linear_cross_entropy_does_not_care_for_the_order_of_classes(
    num_tokens: int, num_classes: int, seed: int, order: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = gaussian_inputs(num_tokens, num_classes, 5, generator=generator, dtype=torch.float64)
    ids = list(range(num_classes))
    order.shuffle(ids)
    places = torch.tensor(ids)
    inverse = torch.empty_like(places)
    inverse[places] = torch.arange(num_classes)
    moved = Inputs(inputs.hidden, inputs.weight[places], inverse[inputs.targets])
    first, second = run_case(None, Case(inputs)), run_case(None, Case(moved))
    check_close64("loss", second["loss"], first["loss"])
    check_close64("grad_weight", second["grad_weight"], first["grad_weight"][places])
    check_outputs(Case(moved), second)
