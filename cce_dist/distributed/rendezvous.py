"""Meeting of ranks: rank 0's address, a store, and keys in it that belong to one attempt alone."""

from __future__ import annotations

import json
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from cce_dist.distributed.launchers import MPI, Launch, LaunchError

# Rank 0 looks this often for ranks that have come.
POLL_S = 0.01
# Most seconds that rank 0 waits until all others have read an error, or have left the store.
LET_HEAR_S = 2.0
# Name of a rank's fact that must be another one on each rank, unless it is None.
OWN_GPU = "gpu"


class JoinError(RuntimeError):
    """An error of ranks that did not come, or did not reach rank 0; the text names the ranks."""


def locate(launch: Launch, timeout: timedelta) -> tuple[Launch, dist.Store | None]:
    """Fills in the fields that MPI must tell: place on the host, rank 0's address, a free port.

    Returns:
        launch: no field of it is None, if there are several ranks.
        server: the store, on rank 0 if rank 0 had to choose the port, which is then in use; else
            None.
    Raises:
        LaunchError: mpi4py is needed and missing, or sees other ranks than mpirun has started.
    Collectives: over MPI a split and, without MASTER_PORT, a broadcast; none if no field is None.
    """
    known = (launch.local_rank, launch.address, launch.port)
    if launch.launcher not in MPI or None not in known:
        return launch, None
    if launch.world_size == 1:
        return replace(launch, local_rank=0, local_world_size=1), None
    comm, node = _mpi_communicators(launch)
    launch = replace(launch, local_rank=node.Get_rank(), local_world_size=node.Get_size())
    server, endpoint = None, None
    if launch.rank == 0 and launch.port is None:
        # A name, not a number: many hosts resolve their own name to 127.0.1.1.
        alone = launch.local_world_size == launch.world_size
        address = launch.address or ("127.0.0.1" if alone else socket.gethostname())
        server = _host_store(address, 0, timeout)
        endpoint = (address, server.port)
    elif launch.rank == 0:
        endpoint = (launch.address or socket.gethostname(), launch.port)
    address, port = comm.bcast(endpoint, root=0)
    return replace(launch, address=address, port=port), server


def _mpi_communicators(launch: Launch) -> tuple[Any, Any]:
    """Returns communicators of all ranks, and of this host's ranks."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"MASTER_ADDR and MASTER_PORT must be set under mpirun if mpi4py cannot be imported "
            f"({error}): pip install mpi4py, with which ranks agree on them, or pass the host of "
            "rank 0 and a free port on it to every rank"
        ) from None
    comm = MPI.COMM_WORLD
    if (comm.Get_rank(), comm.Get_size()) != (launch.rank, launch.world_size):
        library = MPI.Get_library_version().split("\n")[0].strip("\0 ,")
        raise LaunchError(
            f"{launch.variables.world_size} must be the size of mpi4py's COMM_WORLD, "
            f"{comm.Get_size()}, got {launch.world_size}: mpi4py has loaded {library}, and mpirun "
            "is another MPI's; take both from the same environment"
        )
    return comm, comm.Split_type(MPI.COMM_TYPE_SHARED, key=launch.rank)


def open_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Opens the store at launch.address, hosted by the launcher or else by rank 0.

    Raises:
        JoinError: the store cannot be hosted or reached.
    """
    assert launch.address is not None and launch.port is not None
    try:
        if launch.rank == 0 and not launch.agent_store:
            return _host_store(launch.address, launch.port, timeout)
        return dist.TCPStore(
            launch.address, launch.port, is_master=False, timeout=timeout, wait_for_workers=False
        )
    except dist.DistError as error:
        verb = "host" if launch.rank == 0 and not launch.agent_store else "reach"
        raise JoinError(
            f"rank {launch.rank} cannot {verb} the ranks' store at MASTER_ADDR="
            f"{launch.address} MASTER_PORT={launch.port}: {str(error).splitlines()[0]}"
        ) from None


def _host_store(address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(
        address, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
    )


def open_attempt(
    launch: Launch, store: dist.Store | None, facts: Mapping[str, Any], timeout: timedelta
) -> dist.Store:
    """Meets the other ranks, and returns a store for keys of this attempt alone.

    Args:
        launch, store: as `locate` returns them.
        facts: as in `meet`.
    Raises:
        LaunchError, JoinError: see `open_store` and `meet`.
    """
    if launch.world_size == 1:
        return dist.PrefixStore("attempt", dist.HashStore())
    store = store or open_store(launch, timeout)
    facts = {"WORLD_SIZE": launch.world_size, **facts}
    return meet(store, launch.rank, launch.world_size, facts, timeout)


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    facts: Mapping[str, Any],
    timeout: timedelta,
) -> dist.Store:
    """Waits until all ranks have come, and returns a store for keys of this attempt alone.

    When torchrun restarts the ranks, it keeps its store with the keys of earlier attempts: gloo
    would connect to the addresses of dead ranks. torchrun's restart count does not tell attempts
    apart. It does not count changes of membership, and it starts at 0 for an agent that comes
    later. So each process writes a hello with a random number, and rank 0 answers that number with
    the name of this attempt.

    Args:
        facts: plain values that must be the same on all ranks, by their names in messages; but
            OWN_GPU must differ unless it is None.
    Returns:
        A view of `store` with a prefix of this attempt.
    Raises:
        LaunchError: on every rank, if facts contradict one another.
        JoinError: some ranks have not come in time; rank 0 names them.
    """
    common = dist.PrefixStore("cce_dist/join", store)
    if rank == 0:
        attempt = uuid.uuid4().hex
        facts_by_rank = _gather(common, attempt, world_size, facts, timeout)
        missing = [str(other) for other in range(world_size) if other not in facts_by_rank]
        error = _contradiction(facts_by_rank)
        if missing:
            error = (
                f"of {world_size} ranks these have not come within "
                f"{timeout.total_seconds():g} s: {', '.join(missing)}"
            )
        all_here = not missing
        common.set(f"{attempt}/verdict", json.dumps([error, all_here]))
        if error is not None:
            # The store may end with this process.
            _wait_until(
                lambda: common.add(f"{attempt}/heard", 0) == len(facts_by_rank) - 1, LET_HEAR_S
            )
    else:
        attempt, error, all_here = _ask(common, rank, world_size, facts, timeout)
    if error is not None:
        raise LaunchError(error) if all_here else JoinError(error)
    return dist.PrefixStore(f"attempt_{attempt}", store)


def _gather(
    store: dist.Store, attempt: str, world_size: int, facts: Mapping[str, Any], timeout: timedelta
) -> dict[int, Mapping[str, Any]]:
    """Gathers, on rank 0, the facts of the ranks that have come in time."""
    facts_by_rank: dict[int, Mapping[str, Any]] = {0: facts}
    # The last answered hello of each rank. Nobody reacts to the answer of a dead rank's hello.
    answered: dict[int, str] = {}
    deadline = time.monotonic() + timeout.total_seconds()
    while len(facts_by_rank) < world_size:
        for rank in range(1, world_size):
            if rank in facts_by_rank or not store.check([f"hello/{rank}"]):
                continue
            hello = json.loads(store.get(f"hello/{rank}"))
            if answered.get(rank) != hello["number"]:
                answered[rank] = hello["number"]
                store.set(f"answer/{hello['number']}", attempt)
            elif store.check([f"{attempt}/here/{hello['number']}"]):
                facts_by_rank[rank] = hello["facts"]
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return facts_by_rank


def _ask(
    store: dist.Store, rank: int, world_size: int, facts: Mapping[str, Any], timeout: timedelta
) -> tuple[str, str | None, bool]:
    """Says hello to rank 0; returns the attempt's name, its error, and whether all ranks came."""
    number = uuid.uuid4().hex
    store.set(f"hello/{rank}", json.dumps({"number": number, "facts": dict(facts)}))
    try:
        store.wait([f"answer/{number}"], timeout)
        attempt = store.get(f"answer/{number}").decode()
        store.set(f"{attempt}/here/{number}", "")
        # Rank 0 names absent ranks when its time is over, which may be later than this rank's.
        store.wait([f"{attempt}/verdict"], timeout + timedelta(seconds=LET_HEAR_S))
        error, all_here = json.loads(store.get(f"{attempt}/verdict"))
        store.add(f"{attempt}/heard", 1)
    except dist.DistError as failure:
        raise JoinError(
            f"rank {rank} of {world_size} has heard nothing of rank 0 within "
            f"{timeout.total_seconds():g} s ({str(failure).splitlines()[0]}): it has failed, or "
            "is of another WORLD_SIZE or MASTER_ADDR"
        ) from None
    return attempt, error, all_here


def leave_store(store: dist.Store, rank: int, world_size: int, *, host: bool) -> None:
    """Leaves the store at the end of a job.

    Args:
        host: rank 0 hosts the store, and waits until all other ranks have left.
    """
    if not host:
        return
    if rank > 0:
        store.add("parted", 1)
    else:
        _wait_until(lambda: store.add("parted", 0) == world_size - 1, LET_HEAR_S)


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _contradiction(facts: Mapping[int, Mapping[str, Any]]) -> str | None:
    for name, expected in facts[0].items():
        for rank, told in sorted(facts.items()):
            value = told.get(name)
            if name != OWN_GPU and value != expected:
                return (
                    f"{name} must be the same on every rank, got {expected} on rank 0 and "
                    f"{value} on rank {rank}"
                )
    owners: dict[str, int] = {}
    for rank, told in sorted(facts.items()):
        gpu = told.get(OWN_GPU)
        if gpu is not None and owners.setdefault(gpu, rank) != rank:
            return (
                f"each rank needs a GPU of its own, but ranks {owners[gpu]} and {rank} have both "
                f"{gpu}: let the launcher show every rank its own GPU, or all of them, or hide "
                "them with CUDA_VISIBLE_DEVICES= to use the CPU"
            )
    return None
