"""What is said of plans: shares, verdicts, advice, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cce_dist.planner.cost.job import SOFTWARE, Job
from cce_dist.planner.flags import megatron_flags
from cce_dist.planner.models.presets import MODELS, find_model
from cce_dist.planner.plan import make_plan
from cce_dist.planner.report import describe
from cce_dist.planner.search import verdict_on, vocab_pays
from tests.planner.plan_jobs import GEMMA, H200, LLAMA, PIPE

GPT2 = find_model("GPT2")


@pytest.mark.parametrize(
    ("values", "padded", "divisible_by"),
    [
        # Megatron's multiple of 128 tp; on all ranks one of pp tp as well.
        ({}, 50304, 128),
        ({"tp": 4}, 50688, 128),
        ({"vocab_over": "pp", "loss": "exact"}, 50304, 128),
        ({"vocab_over": "pp", "loss": "exact", "pp": 12}, 50304, 128),
        ({"vocab_over": "pp-tp", "loss": "exact", "pp": 3, "tp": 2}, 50688, 384),
        ({"vocab_over": "pp", "loss": "exact", "pp": 10}, 50560, 640),
        # torch's ranks have a row more or less.
        ({"software": SOFTWARE["torch"]}, 50257, 128),
        ({"software": SOFTWARE["torch"], "vocab_over": "pp", "loss": "exact"}, 50260, 128),
    ],
)
def test_padding_of_the_vocabulary(values: dict[str, Any], padded: int, divisible_by: int) -> None:
    job = replace(PIPE, **({"sequence": 1024} | values))
    plan = make_plan(GPT2, job, H200)
    assert job.padded_rows(50257) == padded and padded % job.head_ranks == 0
    # What pads is a model of as many rows, but for the share of FLOPs that counts.
    same = make_plan(replace(GPT2, rows=padded), job, H200)
    assert same.seconds == plan.seconds and same.peak == plan.peak
    assert [rank.flops for rank in same.ranks] == [rank.flops for rank in plan.ranks]
    extra = 3 * 2 * job.tokens * GPT2.dim * (padded - 50257) * 16 / job.tp
    counted = (same.utilization - plan.utilization) * len(plan.ranks) * plan.seconds
    assert counted * H200.flops == pytest.approx(extra, rel=1e-6, abs=1e4)
    found = describe(plan)["head_rows"]
    assert found == {"model": 50257, "padded": padded, "of_rank": padded / job.head_ranks}
    if job.software.framework == "megatron":
        flag = f"--make-vocab-size-divisible-by {divisible_by}"
        assert (flag in megatron_flags(GPT2, job, plan.layout)) is (divisible_by != 128)


def test_what_tensor_parallel_ranks_repeat_is_no_model_flop() -> None:
    job = Job(tp=4, pp=2, microbatches=16, loss="filtered")
    done = []
    for over in ("last", "pp", "pp-tp"):
        plan = make_plan(GEMMA, replace(job, vocab_over=over), H200)
        done.append(plan.utilization * plan.seconds)
    assert done == pytest.approx([done[0]] * 3)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_nearest_number_of_ranks_is_one_that_works(name: str) -> None:
    for what, most in (("tp", 17), ("ep", 25)):
        for count in range(2, most):
            job = Job(sequence=1024, dp=24) if what == "tp" else Job(sequence=1024, dp=count)
            job = replace(job, **{what: count})  # pyright: ignore
            try:
                job.check_model(MODELS[name])
            except ValueError as error:
                near = int(str(error).split("the nearest is ")[1])
                replace(job, **{what: near}).check_model(MODELS[name])  # pyright: ignore


def test_no_verdict_says_yes_to_what_does_not_fit() -> None:
    small = replace(H200, memory=20 * 2**30)
    pays = vocab_pays(GEMMA, replace(PIPE, microbatch=8), small)
    assert pays is not None and not pays.over.fits and not pays.last.fits
    assert pays.verdict.startswith("no: neither fits, ") and pays.verdict.endswith(", of 18.4")
    fits = make_plan(GEMMA, PIPE, H200)
    assert verdict_on(fits, pays.last).startswith("yes: it fits")


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_each_stage_is_described(schedule: str) -> None:
    plan = make_plan(LLAMA, replace(PIPE, chunks=2, schedule=schedule), H200)
    for rank in describe(plan)["ranks"]:
        assert len(rank["stages"]) == 2
        for key in ("parameters", "flops", "forward_seconds", "backward_seconds", "head_seconds"):
            each = [stage[key] for stage in rank["stages"]]
            assert sum(each) == pytest.approx(rank[key]) and min(each) >= 0
        assert all(stage["kept_bytes"] > 0 for stage in rank["stages"])


def test_one_pipeline_rank_is_noted() -> None:
    plan = make_plan(LLAMA, Job(loss="exact", vocab_over="pp"), H200)
    assert any("there is only one pipeline rank" in note for note in describe(plan)["notes"])
