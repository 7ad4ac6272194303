"""The vocabulary over pipeline ranks on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cce_dist import LossOptions
from cce_dist.testing.ranks import nccl_pool
from tests.pipeline.pipeline_jobs import evaluate, many_steps, on_last_stage, train
from tests.pipeline.pipeline_setup import PLANNED, SCHEDULES, Setup

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu, pytest.mark.timeout(280)]

FP32 = Setup(
    device="cuda",
    dtype=torch.float32,
    vocab_size=1027,
    options=LossOptions(reduction="sum", backend="triton"),
)


@pytest.mark.parametrize("schedule", [*SCHEDULES, PLANNED])
def test_each_schedule(schedule: str) -> None:
    pool = nccl_pool()
    found = pool.run(pool.size, train, replace(FP32, schedule=schedule), 1e-5)
    for other in found[1:]:
        assert torch.equal(other["losses"].cpu(), found[0]["losses"].cpu())


@pytest.mark.parametrize("parallel", ["", "tp", "sp"])
def test_tied_embedding(parallel: str) -> None:
    pool = nccl_pool()
    if parallel and pool.size < 4:
        pytest.skip("needs 4 GPUs")
    tensor, scatters = (2 if parallel else 1), parallel == "sp"
    setup = replace(FP32, schedule=PLANNED, tied=True, tensor=tensor, sequence_parallel=scatters)
    pool.run(pool.size, train, setup, 1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", PLANNED])
def test_tensor_parallel_stages(schedule: str) -> None:
    pool = nccl_pool()
    if pool.size < 4:
        pytest.skip("needs 4 GPUs")
    setup = replace(FP32, schedule=schedule, tensor=2, sequence_parallel=True)
    pool.run(pool.size, train, setup, 1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", PLANNED])
def test_bf16(schedule: str) -> None:
    """Beside float64 no further than dense bf16 logits in one process, by the tolerance rule, as
    test_pipelining's test_16_bits over gloo."""
    pool = nccl_pool()
    options = LossOptions(reduction="sum", gradient="exact", backend="triton")
    setup = replace(FP32, schedule=schedule, dtype=torch.bfloat16, options=options)
    pool.run(pool.size, train, setup, None)
    tied = replace(setup, tied=True, scale_grads=True)
    pool.run(pool.size, train, tied, None)


@pytest.mark.parametrize("schedule", ["gpipe", PLANNED])
def test_evaluation(schedule: str) -> None:
    pool = nccl_pool()
    setup = replace(FP32, schedule=schedule)
    pool.run(pool.size, evaluate, setup, 1e-5)


def test_head_on_the_last_stage() -> None:
    pool = nccl_pool()
    pool.run(pool.size, on_last_stage, FP32, 1e-5)


@pytest.mark.parametrize("schedule", [*SCHEDULES, PLANNED])
def test_a_thousand_steps(schedule: str) -> None:
    """No deadlock between communicators, nor a rank that is ahead of another."""
    pool = nccl_pool()
    setup = replace(FP32, schedule=schedule, tied=schedule == PLANNED, microbatches=4)
    pool.run(pool.size, many_steps, setup, 1000, timeout=270)
