"""Inputs and grids of cases: seeded, shaped, and with every allowed pair."""

from __future__ import annotations

import pytest
import torch

from cce_dist.testing import (
    DTYPES,
    PLACES,
    TORCH_CPU,
    TORCH_CUDA,
    TRITON_CPU,
    TRITON_CUDA,
    each_choice,
    gaussian_inputs,
    grid,
    large_logit_inputs,
    pairwise,
    sample_targets,
    zipf_inputs,
)
from tests.support.loss_cases import generator

FAMILIES = {
    "gaussian": gaussian_inputs,
    "zipf": zipf_inputs,
    "large_logits": lambda *args, **more: large_logit_inputs(*args, largest=100.0, **more),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_inputs_are_seeded_and_shaped(family: str) -> None:
    inputs = [
        FAMILIES[family]((3, 5), 70, 20, generator=generator(), dtype=torch.float16)
        for _ in range(2)
    ]
    assert inputs[0].hidden.shape == (3, 5, 20) and inputs[0].weight.shape == (70, 20)
    assert inputs[0].targets.shape == (3, 5) and inputs[0].targets.dtype == torch.int64
    assert inputs[0].hidden.dtype == inputs[0].weight.dtype == torch.float16
    for name in ("hidden", "weight", "targets"):
        assert torch.equal(getattr(inputs[0], name), getattr(inputs[1], name))
    empty = FAMILIES[family](0, 70, 20, generator=generator())
    assert empty.hidden.shape == (0, 20) and empty.targets.shape == (0,)


def test_zipf_inputs_are_skewed() -> None:
    # The filter's own measure: columns whose mass in a block of 128 tokens reaches twice uniform.
    inputs = zipf_inputs(256, 8192, 64, generator=generator())
    p = (inputs.hidden.double() @ inputs.weight.double().T).softmax(-1)
    mass = p.reshape(2, 128, -1).sum(1)
    kept = mass >= 2 * 128 / 8192
    assert kept.double().mean() < 0.15
    dropped = float(torch.where(kept, 0, mass).sum()) / 256
    assert 0.02 < dropped < 0.4, dropped
    gaussian = gaussian_inputs(256, 8192, 64, generator=generator())
    q = (gaussian.hidden.double() @ gaussian.weight.double().T).softmax(-1)
    assert q.max() < 0.05 < p.max()


def test_large_logit_inputs_reach_both_signs() -> None:
    inputs = large_logit_inputs(33, 101, 20, generator=generator(), dtype=torch.float64)
    logits = inputs.hidden @ inputs.weight.T
    assert 0.99e4 < float(logits.abs().max()) < 1.01e4
    assert bool(((logits.amax(-1) > 100) & (logits.amin(-1) < -100)).all())


def test_sample_targets_follow_softmax() -> None:
    hidden = torch.ones(20_000, 1)
    weight = torch.tensor([[0.0], [1.0], [2.0]])
    counts = torch.bincount(sample_targets(hidden, weight, generator()), minlength=3)
    expected = weight[:, 0].softmax(0) * 20_000
    assert (counts - expected).abs().max() < 4 * 20_000**0.5 / 2


def test_with_options_and_ignoring() -> None:
    inputs = gaussian_inputs((4, 50), 30, 8, generator=generator(), dtype=torch.bfloat16)
    made = inputs.with_options(generator(), "bias", "token_weight", "class_weight")
    assert made.bias.shape == (30,) and made.bias.dtype == torch.bfloat16
    assert made.token_weight.shape == (4, 50) and made.class_weight.shape == (30,)
    ignored = inputs.ignoring(generator(), 0.3, -1).targets == -1
    assert 0.2 < ignored.double().mean() < 0.4


def test_pairwise_covers_every_allowed_pair() -> None:
    factors = {"a": [0, 1, 2], "b": ["x", "y"], "c": [True, False]}
    rows = pairwise(factors, lambda row: not (row["a"] == 0 and row["c"]))
    assert all(not (row["a"] == 0 and row["c"]) for row in rows)
    assert {(row["a"], row["b"]) for row in rows} == {(a, b) for a in range(3) for b in "xy"}
    assert {(row["a"], row["c"]) for row in rows} == {
        (0, False),
        (1, True),
        (1, False),
        (2, True),
        (2, False),
    }
    assert len(rows) < 10


def test_each_choice_covers_every_allowed_value_in_few_rows() -> None:
    factors = {"a": [0, 1, 2, 3], "b": ["x", "y"], "c": [True, False], "d": [5, 6, 7]}
    allowed = lambda row: row["a"] != 0 or row["d"] == 7  # noqa: E731
    rows = each_choice(factors, allowed)
    assert all(allowed(row) for row in rows)
    for name, values in factors.items():
        assert {row[name] for row in rows} == set(values), name
    # Four of them, or one more: rows are chosen one by one.
    assert 4 <= len(rows) <= 5
    assert rows == each_choice(factors, allowed)
    assert len(each_choice(factors)) == 4
    # Where there is a choice, rows are as different as they can be.
    assert len({(row["b"], row["c"]) for row in each_choice(factors)}) == 4
    some = each_choice(factors, lambda row: row["b"] == "x")
    assert len(some) == 4 and {row["b"] for row in some} == {"x"}


def test_grid_is_whole_for_torch_and_covers_pairs_in_the_interpreter() -> None:
    keywords = grid(places=(TORCH_CPU, TRITON_CPU), size=(1, 2, 3), flag={"no": False, "yes": True},
                dtype=("fp32", "bf16", "float64"))  # fmt: skip
    assert keywords["argnames"] == ("place", "size", "flag", "dtype")
    rows = {
        place: [row[1:] for row in keywords["argvalues"] if row[0] is place] for place in PLACES
    }
    assert len(set(rows[TORCH_CPU])) == len(rows[TORCH_CPU]) == 3 * 2 * 3
    # Of these dtypes the interpreter takes one.
    assert {dtype for _, _, dtype in rows[TRITON_CPU]} == {"fp32"}
    assert {row[:2] for row in rows[TRITON_CPU]} == {
        (n, flag) for n in (1, 2, 3) for flag in (0, 1)
    }
    assert keywords["ids"][0] == "torch_cpu-1-no-fp32" and len(set(keywords["ids"])) == len(
        keywords["ids"]
    )


def test_grid_takes_each_value_where_kernels_are_compiled() -> None:
    factors = {"size": (1, 2, 3), "flag": {"no": False, "yes": True}, "dtype": tuple(DTYPES)}
    keywords = grid(places=(TORCH_CUDA, TRITON_CUDA), **factors)
    rows = {
        place: [row[1:] for row in keywords["argvalues"] if row[0] is place] for place in PLACES
    }
    assert len(rows[TORCH_CUDA]) == 3 * 2 * 4 and len(rows[TRITON_CUDA]) == 3
    for place, values in enumerate(((1, 2, 3), (False, True), TRITON_CUDA.dtypes)):
        assert {row[place] for row in rows[TRITON_CUDA]} == set(values)
    assert grid(places=(TRITON_CUDA,))["argvalues"] == [(TRITON_CUDA,)]
    assert len(grid(places=(TRITON_CUDA,), size=(1, 2, 3), flag=(0, 1))["argvalues"]) == 3
    # A value stands in a row that is allowed, or in none.
    keywords = grid(
        places=(TRITON_CUDA,),
        allowed=lambda row: row["size"] == "3" or row["flag"] == "0",
        size=(1, 2, 3),
        flag=(0, 1),
    )
    rows = {row[1:] for row in keywords["argvalues"]}
    assert {(1, 0), (2, 0), (3, 1)} <= rows <= {(1, 0), (2, 0), (3, 0), (3, 1)}


def test_grid_leaves_out_what_is_not_allowed() -> None:
    allowed = lambda row: row["size"] != "2" or row["flag"] == "yes"  # noqa: E731
    keywords = grid(places=(TORCH_CPU,), allowed=allowed, size=(1, 2), flag={"no": 0, "yes": 1})
    assert [row[1:] for row in keywords["argvalues"]] == [(1, 0), (1, 1), (2, 1)]
