"""Breaking a training job: one rank, in one phase, once. The job itself knows nothing of it."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch.distributed as dist

from cce_dist.algorithm import sharded
from cce_dist.core.phases import in_phase, watched_by
from cce_dist.pipeline import microbatch
from cce_dist.ranks import hidden_sum
from cce_dist.testing.forks import fork_context
from cce_dist.train import loop
from cce_dist.train.model import decoder as model

from .nodes import Node, free_port
from .torchrun import run_command

Kind = Literal["dies", "stops", "raises", "loses its link", "skips", "fills the disk"]
# What a file may have on a disk that is full, by the kernel's limit for a process: enough for
# messages, too little for a checkpoint. Needs no rights and no disk of its own.
FULL_BYTES = 2**15
# A phase before all others, in which a planted fault happens at once.
BEGINNING = "beginning"


@dataclass(frozen=True)
class Fault:
    """An event that befalls `rank` the `number`-th time that it begins `phase`."""

    kind: Kind
    phase: str
    number: int
    rank: int = 1


class PlantedError(BaseException):
    """As if a rank had run out of memory, say. The worst of torch and Rust are no Exception."""


class Planter:
    """A watcher of phases."""

    def __init__(self, fault: Fault, note: Path, node: Node | None) -> None:
        self.fault, self.note, self.node = fault, note, node
        self.count = self.depth = 0

    def enter(self, phase: str, begins: bool) -> None:
        if phase != self.fault.phase:
            return
        # A phase within itself is one.
        self.depth += 1
        self.count += begins and self.depth == 1
        if self.count == self.fault.number and begins and self.depth == 1:
            self.act()

    def leave(self, phase: str, error: BaseException | None) -> None:
        self.depth -= phase == self.fault.phase

    def act(self) -> None:
        self.note.write_text(str(time.monotonic()))
        if self.fault.kind == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.fault.kind == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.fault.kind == "raises":
            raise PlantedError("planted")
        elif self.fault.kind == "fills the disk":
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
        elif self.fault.kind == "loses its link":
            assert self.node is not None
            self.node.cut()


# Phases that a rank can skip: the phase's function, and its replacement.
SKIPS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "forward": (model.SumPartials, "forward", lambda ctx, x, group: x.clone()),
    "merge": (sharded, "merge_stats", lambda local, *others, **named: local),
    "pipelined merge": (
        microbatch,
        "start_merge_stats",
        lambda local, *others, **named: lambda: local,
    ),
    "reduce": (hidden_sum, "reduce_grad_hidden", lambda grad, *others, **named: grad),
    "checkpoint": (loop, "save_checkpoint", lambda *arguments: None),
    "step": (loop, "train_step", lambda job, run, step: False),
}


def planted(
    fault: Fault | None, note: Path, node: Node | None = None
) -> AbstractContextManager[object]:
    """Plants the fault in this process, as long as the context; writes to `note` when it
    happens."""
    if fault is None:
        return nullcontext()
    if fault.kind == "skips":
        return _skip(fault, note)
    planter = Planter(fault, note, node)
    if fault.phase == BEGINNING:
        planter.act()
        return nullcontext()
    return _before_fsync(planter) if fault.phase == "fsync" else watched_by(planter)


def _before_fsync(planter: Planter) -> Any:
    """Patches os.fsync, with which a checkpoint's files are flushed one by one."""
    original = os.fsync

    def flush(file: Any) -> None:
        with watched_by(planter), in_phase("fsync"):
            original(file)

    return mock.patch.object(os, "fsync", flush)


def _skip(fault: Fault, note: Path) -> Any:
    """Patches a phase for as long as the process lasts."""
    where, name, instead = SKIPS[fault.phase]
    original, count = getattr(where, name), 0

    def skipping(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count != fault.number:
            return original(*args, **kwargs)
        note.write_text(str(time.monotonic()))
        return instead(*args, **kwargs)

    is_method = isinstance(where, type)
    return mock.patch.object(where, name, staticmethod(skipping) if is_method else skipping)


@dataclass
class Ending:
    """The end of a job: exit codes by rank, seconds from the fault to each rank's end, all
    output."""

    codes: list[int]
    seconds: list[float]
    output: str

    @property
    def messages(self) -> list[str]:
        return [line for line in self.output.splitlines() if line.startswith("error: ")]


@dataclass
class ForkedJob:
    """`cce-dist train` on ranks forked from a process with all imports, which nobody launched.

    Args:
        store: of the ranks that do not make one themselves.
    """

    processes: list[Any]
    output: Path
    note: Path
    store: Any = None
    ended_at: dict[int, float] = field(default_factory=dict)

    def finish(self) -> Ending:
        codes = [process.exitcode for process in self.processes]
        began = float(self.note.read_text()) if self.note.exists() else 0.0
        seconds = [self.ended_at[rank] - began for rank in range(len(codes))]
        return Ending(codes, seconds, self.output.read_text())

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def start_job(
    num_ranks: int,
    config: Path,
    *arguments: str,
    fault: Fault | None = None,
    nodes: Sequence[Node] = (),
    by_launcher: bool = True,
) -> ForkedJob:
    """Args:
    nodes: one a rank.
    by_launcher: a store outlives the ranks, as torchrun's does; else, and with nodes, rank 0
        holds it, as under mpirun or srun.
    """
    suffix = ".resumed.out" if "--resume" in arguments else ".out"
    output, note = config.with_suffix(suffix), config.with_suffix(".fault")
    output.write_text("")
    note.unlink(missing_ok=True)
    store = None
    place: dict[str, Any] = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    if nodes:
        place |= {"MASTER_ADDR": nodes[0].address, "MASTER_PORT": 29500}
    elif not by_launcher:
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
    processes = []
    for rank in range(num_ranks):
        node = nodes[rank] if nodes else None
        mine = fault if fault is not None and fault.rank == rank else None
        rank_place = {**place, "RANK": rank, "LOCAL_RANK": rank}
        command = ("train", str(config), *arguments)
        run_args = (rank_place, output, command, mine, note, node)
        processes.append(fork_context().Process(target=_run_rank, args=run_args))
        processes[-1].start()
    return ForkedJob(processes, output, note, store)


def _run_rank(
    place: dict[str, Any],
    output: Path,
    command: tuple[str, ...],
    fault: Fault | None,
    note: Path,
    node: Node | None,
) -> None:
    if node is not None:
        node.enter()
    with planted(fault, note, node):
        run_command(place, output, command)


def finish_all(jobs: Sequence[ForkedJob], timeout: float) -> list[Ending]:
    """Waits for jobs that run at the same time.

    Raises:
        TimeoutError: a rank has not ended; says what its job wrote.
    """
    deadline = time.monotonic() + timeout
    running = {
        process.sentinel: (job, rank) for job in jobs for rank, process in enumerate(job.processes)
    }
    try:
        while running:
            for sentinel in wait(list(running), max(deadline - time.monotonic(), 0)):
                job, rank = running.pop(sentinel)  # pyright: ignore
                job.ended_at[rank] = time.monotonic()
                job.processes[rank].join()
            if running and time.monotonic() > deadline:
                late = [(job.output.read_text(), rank) for job, rank in running.values()]
                raise TimeoutError(f"ranks that have not ended in {timeout:.0f} s: {late}")
    finally:
        for job in jobs:
            job.kill()
    return [job.finish() for job in jobs]
