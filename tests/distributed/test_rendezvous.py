"""Ranks that find one another: in a store that others have used, over MPI."""

from __future__ import annotations

import json
import socket
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from cce_dist.distributed.launchers import LaunchError
from cce_dist.distributed.rendezvous import JoinError, leave_store, locate, meet, open_store
from tests.distributed.distributed_places import PATIENCE, launch_of


@pytest.fixture(scope="module")
def server() -> Iterator[dist.TCPStore]:
    """One for all tests, as torchrun keeps one for all attempts."""
    yield dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def side_by_side(calls: list[Callable[[], Any]]) -> list[Any]:
    """Results by rank, an exception being one."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(outcome, calls))


def meetings(
    server: dist.TCPStore,
    facts: list[dict[str, Any]],
    *,
    world_size: int | None = None,
    patience: timedelta = PATIENCE,
) -> list[Any]:
    """What `meet` gives each rank; there are fewer than `world_size` if some stay away."""

    def call(rank: int) -> Callable[[], Any]:
        store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        size = world_size or len(facts)
        return lambda: meet(store, rank, size, facts[rank], patience)

    return side_by_side([call(rank) for rank in range(len(facts))])


def test_meet_gives_each_attempt_keys_of_its_own(server: dist.TCPStore) -> None:
    # Others of the same ranks have been here, as many, more and fewer of them, and left everything.
    for size in (4, 4, 2, 4):
        stores = meetings(server, [{"WORLD_SIZE": size}] * size)
        assert not stores[0].check(["x"])
        stores[0].set("x", str(size))
        assert [store.get("x") for store in stores] == [str(size).encode()] * size


def test_meet_ignores_those_who_died_while_joining(server: dist.TCPStore) -> None:
    left = dist.PrefixStore("cce_dist/join", server)
    left.set("hello/1", json.dumps({"number": "dead", "facts": {"tp": 3}}))
    stores = meetings(server, [{"tp": 1}, {"tp": 1}])
    stores[1].set("x", "1")
    assert stores[0].get("x") == b"1"


def test_meet_names_the_ranks_that_stay_away(server: dist.TCPStore) -> None:
    for error in meetings(server, [{}, {}], world_size=4, patience=timedelta(seconds=2)):
        assert isinstance(error, JoinError)
        assert str(error) == "of 4 ranks these have not come within 2 s: 2, 3"


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        pytest.param(
            [{"tp": 1}, {"tp": 1}, {"tp": 2}],
            "tp must be the same on every rank, got 1 on rank 0 and 2 on rank 2",
            id="sizes",
        ),
        pytest.param(
            [{"gpu": "GPU a"}, {"gpu": "GPU b"}, {"gpu": "GPU a"}],
            "each rank needs a GPU of its own, but ranks 0 and 2 have both GPU a",
            id="a GPU of two ranks",
        ),
    ],
)
def test_meet_refuses_on_every_rank(
    server: dist.TCPStore, facts: list[dict[str, Any]], message: str
) -> None:
    for error in meetings(server, facts):
        assert isinstance(error, LaunchError) and message in str(error)


def test_meet_of_the_cpu_has_no_gpus_to_tell_apart(server: dist.TCPStore) -> None:
    assert all(isinstance(x, dist.Store) for x in meetings(server, [{"gpu": None}] * 2))


def test_part_waits_for_those_who_use_the_store(server: dist.TCPStore) -> None:
    order: list[int] = []

    def call(rank: int) -> Callable[[], None]:
        # A rank's client is its own: one shared by threads that waits keeps the others from setting
        # what it waits for.
        client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        store = dist.PrefixStore("parting", client)

        def ends() -> None:
            if rank:
                store.wait(["rank 0 is about to leave"], PATIENCE)
                order.append(rank)
            else:
                store.set("rank 0 is about to leave", "")
            leave_store(store, rank, 3, host=True)
            if rank == 0:
                order.append(rank)

        return ends

    assert side_by_side([call(rank) for rank in range(3)]) == [None] * 3
    assert order[-1] == 0 and len(order) == 3


def test_open_store_says_who_cannot_host_or_reach_it(server: dist.TCPStore) -> None:
    taken = launch_of(0, 2, address="127.0.0.1", port=server.port)
    with pytest.raises(JoinError, match=rf"rank 0 cannot host .* MASTER_PORT={server.port}: "):
        open_store(taken, PATIENCE)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = replace(taken, rank=1, port=unused.getsockname()[1])
        with pytest.raises(JoinError, match=r"rank 1 cannot reach .* MASTER_ADDR=127\.0\.0\.1"):
            open_store(nobody, timedelta(seconds=0.2))


class FakeComm:
    """Two ranks of COMM_WORLD on one host, or one of each of two hosts."""

    def __init__(self, rank: int, size: int, told: list[Any], hosts: int = 1) -> None:
        self.rank, self.size, self.told, self.hosts = rank, size, told, hosts

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Split_type(self, kind: str, key: int) -> FakeComm:
        return FakeComm(key % (self.size // self.hosts), self.size // self.hosts, self.told)

    def bcast(self, value: Any, root: int) -> Any:
        if self.rank == root:
            self.told.append(value)
        return self.told[0]


def fake_mpi(monkeypatch: pytest.MonkeyPatch, comm: FakeComm | None) -> None:
    package: Any = None
    if comm is not None:
        package = types.ModuleType("mpi4py")
        package.MPI = types.SimpleNamespace(
            COMM_WORLD=comm,
            COMM_TYPE_SHARED="shared",
            Get_library_version=lambda: "MPICH Version: 5\nmore",
        )
    monkeypatch.setitem(sys.modules, "mpi4py", package)


def test_locate_over_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    fake_mpi(monkeypatch, FakeComm(0, 2, told))
    first, server = locate(launch_of(0, 2), PATIENCE)
    fake_mpi(monkeypatch, FakeComm(1, 2, told))
    second, none = locate(launch_of(1, 2), PATIENCE)
    assert isinstance(server, dist.TCPStore) and none is None
    for launch in (first, second):
        assert (launch.address, launch.port) == ("127.0.0.1", server.port)
        assert (launch.local_rank, launch.local_world_size) == (launch.rank, 2)


@pytest.mark.parametrize("given", [{}, {"port": 7}, {"address": "ib0"}], ids=str)
def test_locate_over_mpi_of_two_hosts(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    told: list[Any] = []
    fake_mpi(monkeypatch, FakeComm(0, 2, told, hosts=2))
    monkeypatch.setattr(socket, "gethostname", lambda: "first")
    hosted: list[str] = []

    def host(address: str, port: int, timeout: timedelta) -> Any:
        hosted.append(address)
        return types.SimpleNamespace(port=29)

    monkeypatch.setattr("cce_dist.distributed.rendezvous._host_store", host)
    launch, _ = locate(launch_of(0, 2, **given), PATIENCE)
    assert launch.address == given.get("address", "first")
    assert launch.port == given.get("port", 29)
    assert hosted == ([] if "port" in given else [launch.address])
    assert (launch.local_rank, launch.local_world_size) == (0, 1)


def test_locate_asks_mpi_only_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_mpi(monkeypatch, None)
    complete = replace(launch_of(1, 2, address="h", port=7), local_rank=0, local_world_size=1)
    assert locate(complete, PATIENCE) == (complete, None)
    alone, _ = locate(launch_of(), PATIENCE)
    assert (alone.local_rank, alone.local_world_size) == (0, 1)


@pytest.mark.parametrize(
    ("comm", "message"),
    [
        (None, "MASTER_ADDR and MASTER_PORT must be set under mpirun if mpi4py cannot be imported"),
        (
            FakeComm(0, 1, []),
            "PMI_SIZE must be the size of mpi4py's COMM_WORLD, 1, got 2: mpi4py has loaded MPICH "
            "Version: 5, and mpirun is another MPI's",
        ),
    ],
    ids=["no mpi4py", "another MPI's mpirun"],
)
def test_locate_refuses(
    monkeypatch: pytest.MonkeyPatch, comm: FakeComm | None, message: str
) -> None:
    fake_mpi(monkeypatch, comm)
    with pytest.raises(LaunchError) as caught:
        locate(launch_of(0, 2), PATIENCE)
    assert message in str(caught.value)
