"""What holds of any plan, over drawn jobs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cce_dist.planner.cost.hardware import HARDWARE
from cce_dist.planner.cost.job import ATTENTIONS, LOSSES, OURS, SOFTWARE, Job
from cce_dist.planner.models.presets import MODELS
from cce_dist.planner.orders.circles import require_no_circle
from cce_dist.planner.orders.vocab_1f1b import Pass
from cce_dist.planner.plan import Plan
from cce_dist.planner.report import describe
from cce_dist.planner.search import best_plan, largest_microbatch, vocab_pays

# Learned positions end before the drawn sequences; four ranks cannot share 10 heads of keys.
DRAWN = [model for model in MODELS.values() if not model.positions and model.kv_heads != 10]
# How stages lie on ranks: one order, its stages a rank, who has the vocabulary.
SHAPES = (
    ("1f1b", 1, "last"),
    ("gpipe", 1, "last"),
    ("interleaved", 2, "last"),
    ("zbv", 2, "last"),
    ("vocab", 1, "pp"),
    ("vocab", 1, "pp-tp"),
    ("1f1b", 1, "pp"),
    ("gpipe", 1, "pp-tp"),
    ("interleaved", 2, "pp"),
    ("zbv", 2, "pp-tp"),
)


def draw(seed: int) -> Plan:
    pick = random.Random(seed).choice
    schedule, chunks, over = SHAPES[seed % len(SHAPES)]
    values: dict[str, Any] = {
        "sequence": pick((512, 4096, 32768)),
        "microbatch": pick((1, 2, 7)),
        "microbatches": pick((8, 16, 24)),
        "tp": pick((1, 2, 4)),
        "pp": pick((1, 2, 4, 8)),
        "chunks": chunks,
        "cp": pick((1, 2)),
        "dp": pick((1, 4)),
        "sequence_parallel": (parallel := pick((False, True))),
        "distributed_optimizer": pick((False, True)),
        "gradients": pick(("fp32", "bf16")),
        "precision": pick(("mixed", "bf16", "fp32")),
        "recompute": pick(("none", "selective", "full")),
        "attention": pick(ATTENTIONS),
        "dropout": pick((False, True)),
        "overlap_data": pick((False, True)),
        "overlap_tensor": parallel and pick((False, True)),
        "loss": pick(LOSSES if over == "last" else OURS),
        "vocab_over": over,
        "schedule": schedule,
        "software": pick(tuple(SOFTWARE.values())),
    }
    return best_plan(pick(DRAWN), Job(**values), pick(tuple(HARDWARE.values())))


@pytest.mark.parametrize("seed", range(60))
def test_any_plan(seed: int) -> None:
    plan = draw(seed)
    job, found = plan.job, plan.prediction
    assert sum(plan.layout) == plan.model.layers and len(plan.layout) == job.stages
    assert found.seconds >= max(found.busy) * (1 - 1e-9)
    assert 0 <= found.bubble < 1 and 0 < plan.utilization < 1
    for rank in plan.ranks:
        assert all(size >= -1 for size in vars(rank.memory).values())
        assert rank.memory.total >= rank.memory.weights + rank.memory.activations
        assert rank.in_flight <= job.microbatches * job.chunks
    if job.schedule_name == "vocab":
        # It can be run, too.
        orders = [[Pass(x.kind, x.microbatch) for x in each] for each in found.schedule.orders]  # pyright: ignore
        require_no_circle(orders)
    pays = vocab_pays(plan.model, job, plan.hardware)
    assert (pays is None) == (job.pp == 1 or job.loss == "none")
    said = describe(plan, pays, largest=largest_microbatch(plan))
    assert said["fits"] is plan.fits is (said["largest_microbatch"] >= job.microbatch)
