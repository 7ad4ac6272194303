"""The layouts that are found, beside all that there are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from typing import Any

import pytest

from cce_dist.planner.cost.hardware import GIB, HARDWARE
from cce_dist.planner.cost.job import SOFTWARE, Job
from cce_dist.planner.cost.stages import costs_of
from cce_dist.planner.flags import layout_string
from cce_dist.planner.layouts import LayoutEstimates, balanced_layout, fits_somehow, peak_of
from cce_dist.planner.models.model import Model
from cce_dist.planner.models.presets import find_model
from cce_dist.planner.plan import Plan, even_layout, make_plan, plan_layout, schedule_of
from cce_dist.planner.search import best_plan, largest_of_layouts
from tests.planner.plan_jobs import H200

PLAIN = Model(classes=128000, dim=2048, layers=9, mlp_dim=8192, heads=16, kv_heads=16)
# A layer with experts takes another time than one of the first, which have none.
EXPERTS: dict[str, Any] = {"experts": 8, "experts_per_token": 2, "dense_mlp_dim": 32768}
SHAPES = {
    "1f1b": Job(pp=3, microbatches=6, loss="dense"),
    "1f1b, ours": Job(pp=4, microbatches=8, loss="filtered", recompute="full"),
    "gpipe": Job(pp=3, microbatches=6, loss="dense", schedule="gpipe"),
    "interleaved": Job(pp=2, chunks=2, microbatches=4, loss="filtered"),
    "zbv": Job(pp=2, chunks=2, microbatches=6, loss="native", schedule="zbv"),
    "vocab": Job(pp=3, microbatches=12, loss="filtered", vocab_over="pp"),
    "served": Job(pp=3, microbatches=6, loss="exact", vocab_over="pp", schedule="1f1b"),
}


def all_layouts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Only the first and the last stage may have no layer."""
    for cuts in combinations_with_replacement(range(layers + 1), stages - 1):
        found = tuple(b - a for a, b in pairwise((0, *cuts, layers)))
        if all(found[1:-1]):
            yield found


def all_plans(model: Model, job: Job, hardware: Any) -> list[Plan]:
    costs = costs_of(model, job, hardware)
    schedule = schedule_of(costs)
    every = all_layouts(model.layers, job.stages)
    return [plan_layout(costs, schedule, layout) for layout in every]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model", ["plain", "window", "experts"])
def test_no_layout_of_a_few_layers_is_much_better(shape: str, model: str) -> None:
    more = {"plain": {}, "window": {"window": 512, "window_every": 2}, "experts": EXPERTS}[model]
    chosen, job = replace(PLAIN, **more), replace(SHAPES[shape], sequence=8192)
    if model == "experts":
        chosen = replace(chosen, dense_layers=3)
    found, every = best_plan(chosen, job, H200), all_plans(chosen, job, H200)
    assert found.fits
    assert found.seconds <= 1.03 * min(plan.seconds for plan in every)
    estimates = LayoutEstimates(costs_of(chosen, job, H200), found.prediction.schedule)
    for plan in every:
        assert estimates.least_seconds(plan.layout) <= plan.prediction.seconds * (1 + 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_where_memory_is_short_too(shape: str) -> None:
    job, pick = SHAPES[shape], random.Random(0).uniform
    for _ in range(3):
        peak = best_plan(PLAIN, job, H200).peak
        small = replace(H200, memory=max(GIB, pick(0.75, 1.0) * peak / H200.usable))
        fitting = [plan.seconds for plan in all_plans(PLAIN, job, small) if plan.fits]
        found = best_plan(PLAIN, job, small)
        if fitting:
            assert found.fits and found.seconds <= 1.03 * min(fitting)
        assert found.fits is bool(fitting)


def test_layers_go_where_fewest_are_in_flight() -> None:
    """A rank's later stages hold fewer microbatches than its first, and no other layout fits."""
    job = replace(SHAPES["interleaved"], sequence=8192)
    costs = costs_of(PLAIN, job, H200)
    schedule = schedule_of(costs)
    estimates = LayoutEstimates(costs, schedule)
    peaks = [
        peak_of(costs, schedule, layout)
        for layout in (
            even_layout(9, 4),
            balanced_layout(estimates),
            balanced_layout(estimates, is_thrifty=True),
        )
    ]
    assert peaks[2] < min(peaks[:2])
    least = min(plan.peak for plan in all_plans(PLAIN, job, H200))
    small = replace(H200, memory=1.001 * least / H200.usable)
    costs = costs_of(PLAIN, job, small)
    assert min(peaks[:2]) > small.usable * small.memory
    assert fits_somehow(costs, schedule) and best_plan(PLAIN, job, small).fits
    assert largest_of_layouts(PLAIN, job, small) == 1


def test_dense_layers_before_experts_take_their_own_time() -> None:
    """Each counted as the mean one, the first stages had too many of them: 33 % in a small case."""
    model = replace(PLAIN, **EXPERTS, layers=6, dense_layers=3)
    job = Job(pp=4, microbatches=16, loss="filtered", vocab_over="pp", recompute="full")
    found, every = best_plan(model, job, H200), all_plans(model, job, H200)
    assert found.seconds == pytest.approx(min(plan.seconds for plan in every), rel=1e-6)


@pytest.mark.parametrize(
    ("stages", "layout", "flag"),
    [(10, (1,) * 9 + (0,), "Et|(t|)*8L"), (11, (0, *[1] * 9, 0), "E|(t|)*9L")],
)
def test_embedding_and_head_may_have_a_stage_each(
    stages: int, layout: tuple[int, ...], flag: str
) -> None:
    """As 126 layers in 128 stages have; no stage between them is without a layer."""
    job = Job(pp=stages, microbatches=8)
    assert make_plan(PLAIN, job, H200).layout == layout
    found = best_plan(PLAIN, job, H200)
    assert all(found.layout[1:-1]) and sum(found.layout) == 9
    assert layout_string(layout) == flag


def test_an_even_layout_is_not_left_for_a_slower_one() -> None:
    """Whose ranks have less to do, of three microbatches a rank and four stages each."""
    job = Job(sequence=2048, microbatch=2, microbatches=12, tp=2, pp=4, dp=2, loss="filtered")
    job = replace(job, chunks=4, vocab_over="pp-tp", schedule="interleaved")
    job = replace(job, distributed_optimizer=True, software=SOFTWARE["megatron-local"])
    model, h100 = find_model("GPT Neo (1.3B)"), HARDWARE["h100"]
    assert best_plan(model, job, h100).seconds <= make_plan(model, job, h100).seconds
