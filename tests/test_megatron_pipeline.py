"""Pretraining with the vocabulary over Megatron's pipeline: as with Megatron's own schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

from megatron_jobs import Setup
from megatron_pipeline_jobs import ROWS, compare, rows_of

from cce_dist.testing import RankPool

# A rank imports Megatron for seconds, the first time.
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def gpu_pools() -> Iterator[dict[int, RankPool]]:
    pools = {size: RankPool(size, backend="nccl") for size in (2, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


COMMON: dict[str, Any] = {"layers": 4, "steps": 6}
JOBS = {
    "two stages": Setup(**COMMON, pp=2, microbatches=4),
    "four stages": Setup(**COMMON, pp=4, microbatches=6),
}


@pytest.mark.parametrize("name", JOBS)
def test_pretraining_is_the_same(pools: dict[int, RankPool], name: str) -> None:
    setup = JOBS[name]
    check_pretraining(pools[setup.world], setup, {"gradient": "exact", "backend": "torch"})


@pytest.mark.multigpu
@pytest.mark.parametrize("name", JOBS)
def test_pretraining_on_gpus(gpu_pools: dict[int, RankPool], name: str) -> None:
    setup = replace(JOBS[name], device="cuda")
    if setup.world > torch.cuda.device_count():
        pytest.skip(f"needs {setup.world} GPUs")
    check_pretraining(gpu_pools[setup.world], setup, {"gradient": "exact"})


def check_pretraining(pool: RankPool, setup: Setup, patch: dict[str, Any]) -> None:
    ranks = pool.run(setup.world, compare, setup, patch, timeout=200)
    for rank, found in enumerate(ranks):
        ours, theirs = found["ours"], found["theirs"]
        for what in ("losses", "evaluated"):
            assert ours[what] == pytest.approx(theirs[what], rel=1e-5)
            assert bool(ours[what]) == (found["place"]["stage"] == setup.pp - 1)
        for what, atol in (("grads", 1e-6), ("parameters", 1e-5)):
            assert ours[what].keys() == theirs[what].keys() | {ROWS}
            for key, value in ours[what].items():
                expected = theirs[what][key] if key != ROWS else rows_of(ranks, rank, what, setup)
                torch.testing.assert_close(value, expected, rtol=1e-4, atol=atol)
        if ours["losses"]:
            assert ours["losses"][-1] < ours["losses"][0]
