"""What is said of plans: shares, verdicts, advice, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cce_dist.planner.hardware import HARDWARE
from cce_dist.planner.job import Job
from cce_dist.planner.plan import make_plan
from cce_dist.planner.presets import find_model

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
