"""Jobs, models, hardware and times that tests of the planner share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cce_dist.planner.cost.hardware import HARDWARE
from cce_dist.planner.cost.job import Job
from cce_dist.planner.models.model import Model
from cce_dist.planner.models.presets import find_model
from cce_dist.planner.orders.predict import StageTimes, simulate_schedule
from cce_dist.planner.orders.schedules import Schedule
from cce_dist.planner.orders.timeline import Task
from cce_dist.planner.orders.vocab_1f1b import Pass, Times

H200 = HARDWARE["h200"]
GEMMA, LLAMA = find_model("gemma2-2b"), find_model("llama3-8b")
SMALL = Model(classes=32000, dim=512, layers=8, mlp_dim=2048, heads=8, kv_heads=8)
PIPE = Job(pp=4, microbatches=16, loss="native")


def gpt(rows: int, dim: int, layers: int, heads: int, positions: int) -> Model:
    """A model of GPT-2's architecture."""
    sizes = {"classes": rows, "dim": dim, "mlp_dim": 4 * dim, "heads": heads, "kv_heads": heads}
    return replace(find_model("GPT2"), layers=layers, positions=positions, **sizes)


def makespan(orders: Sequence[Sequence[Pass]], times: Times) -> float:
    """The time at which the last of these ranks, which are alike, ends its last pass."""
    ranks, embeds = len(orders), any(each.kind == "E" for each in orders[0])
    tasks = tuple(tuple(Task(*each) for each in order) for order in orders)
    stages = StageTimes(
        (times.forward,) * ranks,
        (times.backward,) * ranks,
        statistics=(times.statistics,) * ranks,
        gradients=(times.gradients,) * ranks,
        embedding=(times.embedding,) * ranks if embeds else (),
        head_latency=times.latency,
    )
    return simulate_schedule(Schedule("vocab", tasks, 1, len(orders[0])), stages).seconds
