"""Jobs of Megatron's schedule with the vocabulary over the pipeline, in which a rank fails."""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from cce_dist.testing import fork_context
from tests.megatron.megatron_setup import Setup, import_megatron, megatron
from tests.megatron.pipeline.megatron_pipeline_jobs import pretrain

# Of Megatron's groups and of the patch's.
TIMEOUT_S = 6.0
# Beside it: processes on a busy core.
SLACK_S = 20.0
# A job without a fault: groups, two steps, an evaluation.
JOB_S = 60.0
SETUP = Setup(pp=2, layers=2, microbatches=4, steps=2, tied=True)
DATA_PARALLEL = replace(SETUP, dp=2)
TENSOR_PARALLEL = replace(SETUP, tp=2, sequence_parallel=True)
FOUR_STAGES = replace(SETUP, pp=4, layers=4)
PATCH: dict[str, Any] = {"vocab_over_pipeline": True, "gradient": "exact", "backend": "torch"}
STEP, HEAD = "megatron_patch.pipeline.step:Step", "cce_dist.pipeline.head:PipelineHead"
PIPELINE = "megatron_patch.pipeline.stages:Pipeline"
TIED = "cce_dist.pipeline.embedding:TiedEmbedding"
DDP = "megatron.core.distributed:DistributedDataParallel"


@dataclass(frozen=True)
class Fault:
    """What happens to `rank` as it calls a method, `owner`.`method`, for the `number`-th time."""

    rank: int
    owner: str  # module:class
    method: str
    number: int = 3
    kind: Literal["dies", "stops", "raises"] = "dies"
    setup: Setup = SETUP

    @property
    def name(self) -> str:
        return f"rank {self.rank} {self.kind} in {self.owner.split(':')[1]}.{self.method}"


@dataclass(frozen=True)
class Ending:
    """Of a rank: its exit code, None if it had to be killed; seconds from the fault to what it
    raised; what that says."""

    code: int | None
    seconds: float
    error: str


class PlantedError(Exception):
    """As if a rank had met a sample that it cannot read, say."""


def _fail(kind: str) -> None:
    if kind == "raises":
        raise PlantedError("planted")
    os.kill(os.getpid(), signal.SIGKILL if kind == "dies" else signal.SIGSTOP)


@contextlib.contextmanager
def planted(fault: Fault, note: Path) -> Iterator[None]:
    module, name = fault.owner.split(":")
    owner, count = getattr(importlib.import_module(module), name), 0
    as_it_was = getattr(owner, fault.method)

    @functools.wraps(as_it_was)
    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == fault.number:
            note.write_text(str(time.monotonic()))
            _fail(fault.kind)
        return as_it_was(*args, **kwargs)

    with mock.patch.object(owner, fault.method, failing):
        yield


def run_rank(fault: Fault, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    size, timeout = fault.setup.world, datetime.timedelta(seconds=JOB_S)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
    error = ""
    with contextlib.ExitStack() as stack:
        stack.enter_context(megatron(fault.setup, timeout_s=TIMEOUT_S))
        if fault.rank == rank:
            stack.enter_context(planted(fault, folder / "fault"))
        try:
            pretrain(fault.setup, PATCH)
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        ended = {"at": time.monotonic(), "error": error}
        (folder / f"{rank}.json").write_text(json.dumps(ended))
        # As an interpreter whose script has raised: it takes no leave of the other ranks.
        os._exit(1 if error else 0)


@dataclass(frozen=True)
class Job:
    """Ranks that are forks of this process, of which those that survive end by themselves."""

    fault: Fault
    folder: Path
    processes: list[Any]
    deadline: float

    @property
    def note(self) -> Path:
        return self.folder / "fault"

    def wait_for_fault(self) -> None:
        """Returns as soon as it has happened; or when all ranks have ended, without it."""
        while not self.note.exists() and any(each.is_alive() for each in self.processes):
            if time.monotonic() > self.deadline:
                return
            time.sleep(0.01)

    def finish(self) -> list[Ending]:
        running = {process.sentinel for process in self.processes}
        if self.fault.kind == "stops":
            running.discard(self.processes[self.fault.rank].sentinel)
        ended: set[Any] = set()
        while running - ended and time.monotonic() < self.deadline:
            ended |= set(wait(list(running - ended), self.deadline - time.monotonic()))
        began = float(self.note.read_text()) if self.note.exists() else 0.0
        endings = []
        for rank, process in enumerate(self.processes):
            if process.sentinel in ended:
                process.join()
            code = process.exitcode
            process.kill()
            process.join()
            path = self.folder / f"{rank}.json"
            said = json.loads(path.read_text()) if path.exists() else {"at": began, "error": ""}
            endings.append(Ending(code, said["at"] - began, said["error"]))
        return endings


def start_job(fault: Fault, folder: Path) -> Job:
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    ranks = range(fault.setup.world)
    processes = [context.Process(target=run_rank, args=(fault, rank, folder)) for rank in ranks]
    for process in processes:
        process.start()
    return Job(fault, folder, processes, time.monotonic() + JOB_S + TIMEOUT_S + SLACK_S)


def run_jobs(faults: Sequence[Fault], folder: Path) -> list[list[Ending]]:
    """What becomes of each rank, of jobs that are forks of one process that has imported Megatron.

    A job starts when the fault of the one before has happened: survivors of a rank that has stopped
    wait for the timeout, and take no time of a core.
    """
    ours, theirs = fork_context().Pipe(duplex=False)
    process: Any = fork_context().Process(target=_serve, args=(faults, folder, theirs))
    process.start()
    theirs.close()
    try:
        return [ours.recv() for _ in faults]
    finally:
        process.kill()
        process.join()


def _serve(faults: Sequence[Fault], folder: Path, connection: Any) -> None:
    import_megatron("cpu")
    jobs = []
    for number, fault in enumerate(faults):
        jobs.append(start_job(fault, folder / str(number)))
        jobs[-1].wait_for_fault()
    for job in jobs:
        connection.send(job.finish())
