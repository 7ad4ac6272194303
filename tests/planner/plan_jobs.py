"""Jobs, models and hardware that tests of the planner share."""

from __future__ import annotations

from cce_dist.planner.cost.hardware import HARDWARE
from cce_dist.planner.cost.job import Job
from cce_dist.planner.models.model import Model
from cce_dist.planner.models.presets import find_model

H200 = HARDWARE["h200"]
GEMMA, LLAMA = find_model("gemma2-2b"), find_model("llama3-8b")
SMALL = Model(classes=32000, dim=512, layers=8, mlp_dim=2048, heads=8, kv_heads=8)
PIPE = Job(pp=4, microbatches=16, loss="native")
