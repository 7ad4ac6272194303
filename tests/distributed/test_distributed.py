"""`cce_dist.distributed`: devices, threads and groups of ranks that a launcher has started."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cce_dist.distributed import init, join, leave, split_ranks
from cce_dist.distributed import joining as distributed
from cce_dist.distributed.joining import choose_device
from cce_dist.distributed.launchers import TORCH, LaunchError
from cce_dist.testing.forks import fork_context
from tests.distributed.distributed_places import launch_of, slurm_place
from tests.support.nodes import free_port
from tests.support.torchrun import Place

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("world_size", "sizes", "expected"),
    [
        (8, {"tp": 2}, (4, 2)),
        (8, {"tp": 2, "pp": 2, "dp": 2}, (2, 2)),
        (8, {"tp": "all"}, (1, 8)),
        (8, {"tp": "all", "pp": 4}, (1, 2)),
        (8, {"tp": 3}, "tp must divide the number of ranks, got tp=3 on 8 ranks"),
        (8, {"tp": "all", "pp": 3}, "pp x tp must divide the number of ranks, got pp=3 and tp=all"),
        (8, {"tp": 2, "dp": 2}, "dp must be 4, which pp=1 and tp=2 leave of 8 ranks, got 2"),
        (8, {"tp": 0}, "tp must divide the number of ranks, got tp=0"),
    ],
)
def test_split_ranks(world_size: int, sizes: dict[str, Any], expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError) as caught:
            split_ranks(world_size, **sizes)
        assert expected in str(caught.value)
    else:
        assert split_ranks(world_size, **sizes) == expected


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """Pretends that there are so many; the devices that are then chosen."""
    chosen: list[int] = []

    def pretend(count: int) -> list[int]:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return pretend


@pytest.mark.parametrize(
    ("count", "local", "index"),
    [(4, (3, 4), 3), (8, (1, 4), 1), (1, (0, 1), 0), (1, (3, 4), 0)],
    ids=["a GPU each", "more GPUs", "alone", "each sees its own alone"],
)
def test_choose_device(
    gpus: Callable[[int], list[int]], count: int, local: tuple[int, int], index: int
) -> None:
    launch = replace(launch_of(), local_rank=local[0], local_world_size=local[1])
    chosen = gpus(count)
    assert choose_device(launch) == torch.device("cuda", index)
    assert chosen == [index]
    assert choose_device(launch, "cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("launcher", "local_size", "omp_threads", "threads"),
    [
        ("single", 1, None, 6),
        ("single", 1, "3", None),
        ("single", 1, "1", None),
        ("torchrun", 2, "1", 3),
        ("torchrun", 2, "2", None),
        ("openmpi", 2, "1", None),
        ("openmpi", 4, None, 1),
    ],
)
def test_threads_of_a_rank_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
    launcher: Any,
    local_size: int,
    omp_threads: str | None,
    threads: int | None,
) -> None:
    """None: as torch has them, by OMP_NUM_THREADS."""
    numbers_set: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers_set.append)
    monkeypatch.setattr(distributed, "num_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp_threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp_threads)
    launch = replace(launch_of(), launcher=launcher, local_rank=0, local_world_size=local_size)
    choose_device(launch, "cpu")
    assert numbers_set == ([] if threads is None else [threads])


def test_choose_device_refuses(gpus: Callable[[int], list[int]]) -> None:
    gpus(2)
    launch = replace(launch_of(), local_rank=0, local_world_size=4)
    with pytest.raises(LaunchError, match=r"got 4 ranks on this host \(MPI_LOCALNRANKS\) and 2 GP"):
        choose_device(launch)
    gpus(0)
    with pytest.raises(ValueError, match="device must be auto or cpu where torch finds no GPU"):
        choose_device(launch, "cuda")
    wrong: Any = "tpu"
    with pytest.raises(ValueError, match="device must be auto, cuda or cpu, got 'tpu'"):
        choose_device(launch, wrong)


def sizes_of_groups(place: Place, results: Any) -> None:
    """A process that has never heard of pytest."""
    os.environ.update({name: str(value) for name, value in place.items()})
    ranks = init(tp=2, pp=2, device="cpu", timeout=20, join_timeout=20)
    value = torch.tensor([2.0**ranks.rank])
    assert ranks.pp_group is not None
    groups = (ranks.dp_group, ranks.tp_group, ranks.pp_group, ranks.stage_group, ranks.vocab_group)
    sums = []
    for group in groups:
        total = value.clone()
        dist.all_reduce(total, group=group)
        sums.append(int(total))
    meshes = {mesh.mesh_dim_names: mesh.mesh.tolist() for mesh in (ranks.mesh, ranks.vocab_mesh)}
    at = (ranks.dp_rank, ranks.pp_rank, ranks.tp_rank)
    results.put((ranks.rank, at, sums, meshes, ranks.launch.launcher))
    leave(ranks)


def test_init_makes_groups_and_meshes() -> None:
    context = fork_context()
    results = context.SimpleQueue()
    port = free_port()
    processes = [
        context.Process(target=sizes_of_groups, args=(slurm_place(rank, 8, port), results))
        for rank in range(8)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(50)
        assert [process.exitcode for process in processes] == [0] * 8
    finally:
        for process in processes:
            process.kill()
    for rank, at, sums, meshes, launcher in sorted(results.get() for _ in processes):
        dp_rank, pp_rank, tp_rank = at
        assert (launcher, rank) == ("slurm", dp_rank * 4 + pp_rank * 2 + tp_rank)

        def members(*, dp: Any = dp_rank, pp: Any = pp_rank, tp: Any = tp_rank) -> int:
            """Bits of the ranks at these places; None: at any."""
            places = [(r // 4, r // 2 % 2, r % 2) for r in range(8)]
            wanted = (dp, pp, tp)
            return sum(
                2**r
                for r, place in enumerate(places)
                if all(w in (None, x) for w, x in zip(wanted, place, strict=True))
            )

        assert sums == [
            members(dp=None),
            members(tp=None),
            members(pp=None),
            members(dp=None, tp=None),
            members(pp=None, tp=None),
        ]
        first = 2 * pp_rank
        assert meshes["tp", "dp"] == [[first, first + 4], [first + 1, first + 5]]
        assert meshes["vocab", "dp"] == [[r, r + 4] for r in range(4)]


def test_join_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCH, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    world = join(device="cpu", timeout=7)
    assert (world.rank, world.world_size, world.launch.launcher) == (0, 1, "single")
    assert world.timeout == timedelta(seconds=7)
    leave(world)
    assert not dist.is_initialized()


def test_init_checks_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in slurm_place(1, 2, 1).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed, "join", None)
    with pytest.raises(ValueError, match="tp must divide the number of ranks, got tp=4 on 2 ranks"):
        init(tp=4)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e10, float("inf"), float("nan")])
@pytest.mark.parametrize("name", ["timeout", "join_timeout"])
def test_join_refuses_a_time_that_torch_cannot_count(name: str, seconds: float) -> None:
    with pytest.raises(
        ValueError, match=rf"^{name} must be > 0 and at most 1000000000 seconds, got"
    ):
        join(**{name: seconds})


def sum_over_gpus(place: Place, results: Any) -> None:
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        ranks = init(tp=2, timeout=60, join_timeout=60)
    except LaunchError as error:
        results.put((str(error), None))
        return
    values = [torch.ones(1, device=device) for device in (ranks.device, "cpu")]
    for value in values:
        dist.all_reduce(value, group=ranks.tp_group)
    results.put((str(ranks.device), [float(value) for value in values]))
    leave(ranks)


@pytest.mark.multigpu
@pytest.mark.parametrize("shared", [False, True], ids=["a GPU each", "one for both"])
def test_init_on_gpus(shared: bool) -> None:
    # CUDA does not survive a fork.
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    port = free_port()
    places = [slurm_place(rank, 2, port) for rank in range(2)]
    if shared:
        places = [{**place, "CUDA_VISIBLE_DEVICES": 0} for place in places]
    processes = [context.Process(target=sum_over_gpus, args=(x, results)) for x in places]
    for process in processes:
        process.start()
    found = sorted(results.get() for _ in processes)
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    if shared:
        assert all("ranks 0 and 1 have both GPU " in message for message, _ in found)
    else:
        assert found == [("cuda:0", [2.0, 2.0]), ("cuda:1", [2.0, 2.0])]
