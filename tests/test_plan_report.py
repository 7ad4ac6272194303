"""What is said of plans: shares, verdicts, advice, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cce_dist.planner.hardware import HARDWARE
from cce_dist.planner.job import Job
from cce_dist.planner.plan import make_plan
from cce_dist.planner.presets import MODELS, find_model
from cce_dist.planner.search import verdict_on, vocab_pays

H200 = HARDWARE["h200"]
GEMMA, LLAMA = find_model("gemma2-2b"), find_model("llama3-8b")
PIPE = Job(pp=4, microbatches=16, loss="native")


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
            job = Job(dp=24, tp=count) if what == "tp" else Job(dp=count, ep=count)
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
