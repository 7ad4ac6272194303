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
from cce_dist.distributed.rendezvous import locate, open_attempt
from cce_dist.doctor.check import Check, make_check, name_ranks, ranks_by_value
from cce_dist.doctor.facts import SOURCES, Facts, RankFacts

# Time to wait for the store's answer once a rank hangs.
ASK_SECONDS = 3.0
# With clocks further apart, logs of several hosts cannot be put in order.
LARGEST_SKEW_S = 2.0


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
        keys = [f"{phase}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout))
        except dist.DistError as error:
            raise AbsentRanks(self._why_late(phase)) from error
        return [json.loads(self.store.get(key)) for key in keys]

    def absent(self, phase: str) -> list[int]:
        return [x for x in range(self.size) if not self.store.check([f"{phase}/{x}"])]

    def _why_late(self, phase: str) -> str:
        # A store dies with the rank that hosts it.
        try:
            absent = self.absent(phase)
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
    return Ranks(launch, open_attempt(launch, store, alike, limit), timeout)


@contextmanager
def ends_within(seconds: float, ranks: Ranks, phase: str) -> Iterator[None]:
    """Ends this process with exit code 1 and a message if the phase takes longer.

    No exception ends a kernel or a collective that waits for ever.
    """
    began = f"began {phase}"
    ranks.store.set(f"{began}/{ranks.rank}", "")

    def end() -> None:
        absent: list[int] = []
        # The store itself may hang.
        ask = threading.Thread(target=lambda: absent.extend(ranks.absent(began)), daemon=True)
        ask.start()
        ask.join(ASK_SECONDS)
        who = f"rank {ranks.rank} on {socket.gethostname()}"
        others = f"; {name_ranks(absent)} never came to it" if absent else ""
        sys.stderr.write(f"error: {who} hung in {phase} for {seconds:g} s{others}\n")
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
        software=facts.software,
    )
    return [RankFacts(**fields) for fields in ranks.share("its description", asdict(mine))]


def check_devices(everyone: Sequence[RankFacts]) -> Check:
    """Checks that every rank has a GPU of its own, or that none has any."""
    owners = ranks_by_value({rank: facts.gpu for rank, facts in enumerate(everyone)})
    without = owners.pop(None, [])
    if not owners and not any(facts.has_gpus for facts in everyone):
        return Check("devices", "ok", "every rank on the CPU, over gloo")
    problems = [f"{name_ranks(ranks)} share a GPU" for ranks in owners.values() if len(ranks) > 1]
    if without:
        problems.append(f"{name_ranks(without)} without one")
    return make_check(
        "devices",
        not problems,
        "; ".join(problems) or f"{len(owners)} GPUs, one a rank",
        expected="a GPU of its own for every rank, or none for any",
        remedy="start as many ranks as GPUs on each host, each with its LOCAL_RANK, and let all "
        "of a host see the same CUDA_VISIBLE_DEVICES",
    )


def check_alike(everyone: Sequence[RankFacts]) -> Check:
    """Checks that all ranks have the same code and the same libraries."""
    different = []
    mine = everyone[0].software
    for name in mine:
        ranks = ranks_by_value({x: facts.software.get(name) for x, facts in enumerate(everyone)})
        if len(ranks) > 1:
            values = [f"{value or 'none'} on {name_ranks(who)}" for value, who in ranks.items()]
            different.append(f"{name}: {', '.join(values)}")
    version, sources = mine["cce-dist"] or "a checkout", mine[SOURCES]
    return make_check(
        "software",
        not different,
        "\n".join(different) or f"cce_dist {version}, sources {sources}, alike everywhere",
        expected="the same versions, and the same files of cce_dist, on every rank",
        remedy="install the same environment on every host",
        numbers={"sources": sources},
    )


def check_clocks(everyone: Sequence[RankFacts]) -> list[Check]:
    """Compares the clocks that the hosts read at the same time; no row for a single host."""
    hosts: dict[str, float] = {}
    for facts in everyone:
        hosts.setdefault(facts.host, facts.clock)
    if len(hosts) < 2:
        return []
    apart = max(hosts.values()) - min(hosts.values())
    clocks = make_check(
        "clocks",
        apart <= LARGEST_SKEW_S,
        f"{apart:.2f} s apart between {len(hosts)} hosts",
        expected=f"<= {LARGEST_SKEW_S:g} s",
        remedy="synchronise them, by NTP or chrony",
        otherwise="warning",
        numbers={"apart_seconds": apart},
    )
    return [clocks]
