"""`cce-dist bench megatron`'s measurement on ranks without a GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks.megatron import Plan, bench_megatron
from benchmarks.ranks.megatron_model import Sizes
from cce_dist.bench.inputs import Shape, make_inputs
from cce_dist.bench.ranks import Job
from cce_dist.bench.report import Cells
from tests.megatron.megatron_setup import Setup, megatron

SEQUENCE, BATCH, CLASSES, DIM = 16, 2, 96, 32


def measure(_: Any, parallel: bool) -> list[Cells]:
    sizes = Sizes(CLASSES, DIM, 64, 2, 2, 2, 16, tied=parallel)
    losses = ("unfused", "native", "exact", "filtered", "no head")
    plan = Plan(losses, SEQUENCE, BATCH, 2, 3, parallel, recompute=parallel)
    with megatron(Setup(tp=2)):
        shape = Shape(SEQUENCE * BATCH, CLASSES, DIM)
        inputs = make_inputs("zipf", shape, dtype=torch.bfloat16)
        job = Job(dist.get_rank(), 2, torch.device("cpu"))
        return bench_megatron(job, sizes, inputs, plan)
