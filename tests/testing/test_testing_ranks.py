"""A pool of ranks: exceptions, timeouts, deaths, warnings, collectives."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.testing import CollectiveCounter, RankError, RankPool, shared_pool
from cce_dist.testing.forks import start_fork_server


def report_place(group: dist.ProcessGroup, offset: int) -> tuple[int, int, int, int]:
    total = torch.tensor([dist.get_rank(group) + offset])
    dist.all_reduce(total, group=group)
    return (
        dist.get_rank(group),
        dist.get_world_size(group),
        int(total),
        torch.get_num_threads(),
    )


def echo(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    return tensor


def process_id(group: dist.ProcessGroup) -> int:
    return os.getpid()


def fail_on(group: dist.ProcessGroup, ranks: tuple[int, ...]) -> int:
    rank = dist.get_rank(group)
    if rank in ranks:
        raise ValueError(f"planted at {rank}")
    return rank


def hang_on(group: dist.ProcessGroup, rank: int) -> None:
    if dist.get_rank(group) == rank:
        time.sleep(600)


def crash_on(group: dist.ProcessGroup, rank: int) -> None:
    if dist.get_rank() == rank:
        os.abort()


def die_on(group: dist.ProcessGroup, rank: int) -> None:
    if dist.get_rank(group) == rank:
        os._exit(3)


def warn(group: dist.ProcessGroup) -> None:
    warnings.warn("planted", stacklevel=1)


def count_collectives(group: dist.ProcessGroup) -> list[tuple[str, int]]:
    with CollectiveCounter() as counter:
        dist.all_reduce(torch.ones(5), group=group)
        parts = [torch.empty(3) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, torch.ones(3), group=group)
    assert counter.count("allreduce") == 1 and counter.count("allgather") == 1
    return counter.calls


@pytest.mark.parametrize(
    ("world_size", "first_rank"),
    [(1, 0), (2, 0), (3, 0), (4, 0), (2, 2), (3, 1)],
    ids=["1", "2", "3", "4", "2_from_2", "3_from_1"],
)
def test_rank_pool_runs_on_part_of_the_ranks(world_size: int, first_rank: int) -> None:
    results = shared_pool().run(world_size, report_place, 10, first_rank=first_rank)
    total = sum(range(world_size)) + 10 * world_size
    assert results == [(rank, world_size, total, 1) for rank in range(world_size)]


def test_start_fork_server_is_no_part_of_a_tests_time() -> None:
    """10 s of a core are more on a busy one, and a test has 60."""
    assert start_fork_server.cache_info().currsize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool], ids=str)
def test_rank_pool_carries_tensors(dtype: torch.dtype) -> None:
    sent = torch.arange(6).reshape(2, 3).to(dtype)
    for got in shared_pool().run(2, echo, sent):
        assert got.dtype == dtype and torch.equal(got, sent)


def test_rank_pool_keeps_its_processes_after_an_exception() -> None:
    pool = shared_pool()
    before = pool.run(4, process_id)
    with pytest.raises(RankError, match="planted at 1") as caught:
        pool.run(3, fail_on, (1,))
    assert set(caught.value.failures) == {1}
    message, trace = caught.value.failures[1]
    assert message == "ValueError: planted at 1" and "fail_on" in trace
    with pytest.raises(RankError) as caught:
        pool.run(4, fail_on, (0, 3))
    assert set(caught.value.failures) == {0, 3}
    assert pool.run(4, process_id) == before


def test_rank_pool_makes_warnings_errors() -> None:
    with pytest.raises(RankError, match="UserWarning: planted"):
        shared_pool().run(1, warn)


def test_rank_pool_counts_collectives() -> None:
    for calls in shared_pool().run(3, count_collectives):
        assert [size for _, size in calls] == [5, 3]


def test_rank_pool_restarts_after_a_timeout_and_after_a_death() -> None:
    pool = RankPool(2)
    try:
        before = pool.run(2, process_id)
        with pytest.raises(RankError, match=r"(?s)no answer in 1 s.*in hang_on") as caught:
            pool.run(2, hang_on, 1, timeout=1)
        assert set(caught.value.failures) == {1}
        after = pool.run(2, process_id)
        assert not set(before) & set(after)
        with pytest.raises(RankError, match="it exited or was killed") as caught:
            pool.run(2, die_on, 0)
        assert set(caught.value.failures) == {0}
        with pytest.raises(RankError, match=r"(?s)process died.*Aborted.*in crash_on") as caught:
            pool.run(1, crash_on, 1, first_rank=1)
        assert [rank for rank, *_ in pool.run(2, report_place, 0)] == [0, 1]
    finally:
        pool.close()


def test_rank_pool_refuses_a_world_that_it_has_not() -> None:
    with pytest.raises(ValueError, match="world_size must lie in"):
        shared_pool().run(3, process_id, first_rank=2)
