"""Running the training job as users do, as processes of its own, and breaking it."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cce_dist.testing.forks import fork_context

ROOT = Path(__file__).parent.parent.parent
# Environment variables of a rank.
Place = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingJob:
    """A started `cce-dist train`. `launcher` is torchrun, or the only rank itself."""

    launcher: subprocess.Popen[str]
    run_dir: Path

    def finish(self, timeout: float) -> tuple[int, str]:
        """Exit code of the launcher, and what it and its ranks wrote."""
        output = self.launcher.communicate(timeout=timeout)[0]
        return self.launcher.returncode, output

    def rank_pids(self) -> dict[int, int]:
        """Process id by rank, of the ranks that torchrun has started so far (Linux)."""
        found = {}
        for pid in children(self.launcher.pid):
            try:
                entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ranks = [entry[5:] for entry in entries if entry.startswith(b"RANK=")]
            if ranks:
                found[int(ranks[0])] = pid
        return found

    def wait_for_step(self, step: int, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while len(read_losses(self.run_dir)) < step:
            if self.launcher.poll() is not None:
                raise AssertionError(f"ended before step {step}:\n{self.finish(timeout)[1]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"did not reach step {step} within {timeout} s")
            time.sleep(0.01)


@contextmanager
def started_training(num_ranks: int, config: Path, *arguments: str) -> Iterator[TrainingJob]:
    """None of the job's processes outlives the context, stopped ones included.

    `num_ranks` 0 starts it without torchrun; the JSON file `config` names the run's folder.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(launch if num_ranks else []), "-m", "cce_dist", "train"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    environment["OMP_NUM_THREADS"] = "1"
    launcher = subprocess.Popen(
        [*command, str(config), *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    run = json.loads(config.read_text())["run"]
    job = TrainingJob(launcher, Path(run["out"]) / run["name"])
    try:
        yield job
    finally:
        for pid in [*job.rank_pids().values(), launcher.pid]:
            kill(pid)
        launcher.communicate()


def run_training(
    num_ranks: int, config: Path, *arguments: str, timeout: float = 100.0
) -> tuple[int, str]:
    """Exit code and output of a job that runs to its end."""
    with started_training(num_ranks, config, *arguments) as job:
        return job.finish(timeout)


def run_forked_training(
    num_ranks: int, config: Path, *arguments: str, timeout: float = 100.0
) -> tuple[int, str]:
    """As run_training, in a tenth of its time: ranks are forked from a process with all imports.

    For what does not depend on who starts the ranks.
    """
    output = config.with_suffix(".out")
    return run_forked(num_ranks, output, "train", str(config), *arguments, timeout=timeout)


def run_forked(
    num_ranks: int, output: Path, *arguments: str, timeout: float = 100.0
) -> tuple[int, str]:
    """`cce-dist` with these arguments; `output` is a file for what the ranks write.

    This process gives them what torchrun would: their places, and the store. The exit code is of
    the last rank that failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places: list[Place] = [
        {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": num_ranks,
            "LOCAL_WORLD_SIZE": num_ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
        }
        for rank in range(num_ranks)
    ]
    return run_placed(places or [{}], output, *arguments, timeout=timeout)


def run_placed_training(
    places: Sequence[Place], config: Path, *arguments: str, timeout: float = 100.0
) -> tuple[int, str]:
    """As run_forked_training, with the environment variables of each rank."""
    output = config.with_suffix(".out")
    return run_placed(places, output, "train", str(config), *arguments, timeout=timeout)


def run_placed(
    places: Sequence[Place], output: Path, *arguments: str, timeout: float
) -> tuple[int, str]:
    """As run_forked, with the environment variables of each rank."""
    output.write_text("")
    ranks = [
        fork_context().Process(target=run_command, args=(place, output, arguments))
        for place in places
    ]
    deadline = time.monotonic() + timeout
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(deadline - time.monotonic())
        codes = [process.exitcode for process in ranks]
        if None in codes:
            raise TimeoutError(f"not done within {timeout} s:\n{output.read_text()}")
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return next((code for code in reversed(codes) if code), 0), output.read_text()


def run_command(place: Place, output: Path, arguments: tuple[str, ...]) -> None:
    """As `python -m cce_dist` does."""
    os.environ.update({name: str(value) for name, value in place.items()}, CUDA_VISIBLE_DEVICES="")
    with output.open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv[1:] = arguments
    runpy.run_module("cce_dist", run_name="__main__", alter_sys=True)


def read_losses(run_dir: Path) -> list[float]:
    """Of the whole lines of metrics.jsonl, in order."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    lines: list[dict[str, Any]] = [
        json.loads(line)
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n")
    ]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def kill(pid: int) -> None:
    """SIGKILL also ends a stopped process; one that has gone already is fine."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # A zombie has ended; only its parent has not asked yet.
    return stat.rpartition(")")[2].split()[0] != "Z"


def children(parent: int) -> list[int]:
    """Process ids of those whose parent it is (Linux)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in parentheses may hold spaces; the parent follows the state.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                found.append(int(entry.name))
    return sorted(found)


def bench(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`cce-dist bench COMMAND` on two ranks over gloo."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [sys.executable, *launch, "-m", "cce_dist", "bench", command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
