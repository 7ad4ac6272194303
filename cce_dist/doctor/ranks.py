"""Checks of the ranks of this process's job: which ranks are there, and whether all are alike.

Ranks talk through the launcher's store. It works where no process group can be made, and lets a
rank that waits name the ranks that did not come.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cce_dist.distributed import joining as distributed
from cce_dist.distributed.launchers import Launch, read_launch
from cce_dist.distributed.rendezvous import locate, meet, open_store
from cce_dist.doctor.check import Check, name_ranks
from cce_dist.doctor.facts import Facts, RankFacts

# Time to wait for the store's answer once a rank hangs.
ASK_SECONDS = 3.0
# With clocks further apart, logs of several hosts cannot be put in order.
LARGEST_SKEW_S = 2.0
# Packages of which every rank must have the same version.
ALIKE = ("python", "torch", "triton", "numpy", "cce-dist", "megatron-core", "mpi4py")


class AbsentRanks(RuntimeError):
    """Ranks that did not come in time."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the job. Methods raise AbsentRanks after `timeout` seconds.

    Args:
        store: a store whose keys belong to this attempt alone.
    """

    launch: Launch
    store: dist.Store
    timeout: float

    @property
    def rank(self) -> int:
        return self.launch.rank

    @property
    def size(self) -> int:
        return self.launch.world_size

    def share(self, phase: str, value: Any) -> list[Any]:
        """Gathers every rank's value, by rank; JSON must be able to hold the values.

        Args:
            phase: a name that no other call uses.
        """
        self.store.set(f"{phase}/{self.rank}", json.dumps(value))
        keys = [f"{phase}/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + self.timeout
        for key in keys:
            left = max(deadline - time.monotonic(), 0.001)
            try:
                self.store.wait([key], timedelta(seconds=left))
            except dist.DistError as error:
                raise AbsentRanks(self._absent(phase)) from error
        return [json.loads(self.store.get(key)) for key in keys]

    def _absent(self, phase: str) -> str:
        # A store dies with the rank that hosts it.
        try:
            absent = [x for x in range(self.size) if not self.store.check([f"{phase}/{x}"])]
        except dist.DistError:
            return f"the store is gone, in {phase}: rank 0 or the launcher died"
        who = name_ranks(absent) if absent else "a rank"
        return f"{who} did not come to {phase} within {self.timeout:g} s"

    def leave(self) -> None:
        """Tells that this rank is done. Rank 0 leaves last, since it may host the store."""
        self.store.set(f"left/{self.rank}", "")
        if self.rank == 0:
            keys = [f"left/{rank}" for rank in range(self.size)]
            self.store.wait(keys, timedelta(seconds=self.timeout))


def join(timeout: float, alike: Mapping[str, Any]) -> Ranks:
    """Joins the ranks that a launcher started, or stands alone; makes no process group.

    Args:
        alike: plain values that must be the same on every rank, by name.
    Raises:
        LaunchError: these values differ between ranks, or the launcher's variables contradict each
            other or are missing.
        JoinError: not all ranks are here within `timeout` seconds.
    """
    limit = timedelta(seconds=timeout)
    launch, store = locate(read_launch(os.environ), limit)
    if launch.world_size == 1:
        return Ranks(launch, dist.HashStore(), timeout)
    store = store or open_store(launch, limit)
    alike = {"WORLD_SIZE": launch.world_size, **alike}
    store = meet(store, launch.rank, launch.world_size, alike, limit)
    return Ranks(launch, store, timeout)


@contextmanager
def ends_within(seconds: float, ranks: Ranks, phase: str) -> Iterator[None]:
    """Ends this process with exit code 1 and a message if the phase takes longer.

    No exception ends a kernel or a collective that waits for ever.
    """
    ranks.store.set(f"began {phase}/{ranks.rank}", "")

    def end() -> None:
        absent: list[str] = []
        # The store itself may hang.
        asking = threading.Thread(target=lambda: absent.append(_absent(ranks, phase)), daemon=True)
        asking.start()
        asking.join(ASK_SECONDS)
        host = socket.gethostname()
        text = f"error: rank {ranks.rank} on {host} hung in {phase} for {seconds:g} s"
        sys.stderr.write("; ".join([text, *filter(None, absent)]) + "\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _absent(ranks: Ranks, phase: str) -> str:
    others = [x for x in range(ranks.size) if not ranks.store.check([f"began {phase}/{x}"])]
    return f"{name_ranks(others)} never came to it" if others else ""


def choose_device(ranks: Ranks, facts: Facts) -> torch.device:
    """Makes this rank's GPU current and returns it.

    Without a GPU for this rank it returns the CPU, which `check_devices` judges.
    """
    if not facts.gpus and ranks.size > 1:
        return distributed.choose_device(ranks.launch, "cpu")
    # A launcher may show each rank its own GPU alone.
    index = 0 if len(facts.gpus) == 1 else ranks.launch.local_rank or 0
    if index >= len(facts.gpus):
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def gather_rank_facts(ranks: Ranks, facts: Facts, device: torch.device) -> list[RankFacts]:
    """Gathers the facts of every rank, by rank.

    Raises:
        AbsentRanks: some ranks did not come in time.
    """
    gpu = facts.gpus[device.index] if device.type == "cuda" else None
    mine = RankFacts(
        host=facts.host,
        clock=time.time(),
        gpu=None if gpu is None else gpu.uuid,
        capability=None if gpu is None else gpu.capability,
        links=[(*pair, kind) for pair, kind in facts.links.items()],
        has_gpus=bool(facts.gpus),
        sources=facts.sources,
        versions=dict(facts.versions),
        cuda=facts.cuda,
        nccl=facts.nccl,
    )
    return [RankFacts(**fields) for fields in ranks.share("its description", asdict(mine))]


def check_devices(everyone: Sequence[RankFacts]) -> Check:
    """Checks that every rank has a GPU of its own, or that none has any."""
    expected = "a GPU of its own for every rank, or none for any"
    owners: dict[str, list[int]] = {}
    for rank, facts in enumerate(everyone):
        if facts.gpu is not None:
            owners.setdefault(facts.gpu, []).append(rank)
    shared = [ranks for ranks in owners.values() if len(ranks) > 1]
    without = [rank for rank, facts in enumerate(everyone) if facts.gpu is None]
    if not owners and not any(facts.has_gpus for facts in everyone):
        return Check(name="devices", status="ok", observed="every rank on the CPU, over gloo")
    problems = [f"{name_ranks(ranks)} share a GPU" for ranks in shared]
    if without:
        problems.append(f"{name_ranks(without)} without one")
    return Check(
        name="devices",
        status="failure" if problems else "ok",
        observed="; ".join(problems) or f"{len(owners)} GPUs, one a rank",
        expected=expected,
        remedy="start as many ranks as GPUs on each host, each with its LOCAL_RANK, and let all "
        "of a host see the same CUDA_VISIBLE_DEVICES"
        if problems
        else "",
    )


def check_alike(everyone: Sequence[RankFacts]) -> Check:
    """Checks that all ranks have the same code and the same libraries."""
    seen: dict[str, list[Any]] = {
        name: [facts.versions.get(name) for facts in everyone] for name in ALIKE
    }
    seen["sources of cce_dist"] = [facts.sources for facts in everyone]
    seen["CUDA"] = [facts.cuda for facts in everyone]
    seen["NCCL"] = [facts.nccl for facts in everyone]
    different = [f"{name}: {_by_value(values)}" for name, values in seen.items() if _differ(values)]
    version, sources = everyone[0].versions.get("cce-dist", "a checkout"), everyone[0].sources
    return Check(
        name="software",
        status="failure" if different else "ok",
        observed="\n".join(different) or f"cce_dist {version}, sources {sources}, alike everywhere",
        expected="the same versions, and the same files of cce_dist, on every rank",
        remedy="install the same environment on every host" if different else "",
        numbers={"sources": sources},
    )


def _differ(values: Sequence[Any]) -> bool:
    return any(value != values[0] for value in values)


def _by_value(values: Sequence[Any]) -> str:
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(
        f"{'none' if value is None else value} on {name_ranks(who)}" for value, who in ranks.items()
    )


def check_clocks(everyone: Sequence[RankFacts]) -> Check | None:
    """Compares the clocks that the hosts read at the same time; None: there is a single host."""
    hosts: dict[str, float] = {}
    for facts in everyone:
        hosts.setdefault(facts.host, facts.clock)
    if len(hosts) < 2:
        return None
    apart = max(hosts.values()) - min(hosts.values())
    good = apart <= LARGEST_SKEW_S
    return Check(
        name="clocks",
        status="ok" if good else "warning",
        observed=f"{apart:.2f} s apart between {len(hosts)} hosts",
        expected=f"<= {LARGEST_SKEW_S:g} s",
        remedy="" if good else "synchronise them, by NTP or chrony",
        numbers={"apart_seconds": apart},
    )
