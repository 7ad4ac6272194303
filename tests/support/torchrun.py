"""Running the training job as users do, as processes of its own, and breaking it."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cce_dist.testing.forks import fork_context
from cce_dist.train.watch import watch

# Environment variables of a rank.
Place = Mapping[str, Any]


@dataclass(frozen=True)
class TrainingJob:
    """A started `cce-dist train`. `launcher` is torchrun's agent, or the only rank itself."""

    launcher: Any  # a forked process
    output: Path
    run_dir: Path

    def finish(self, timeout: float) -> tuple[int, str]:
        """Waits for the launcher; returns its exit code, and the output of it and its ranks."""
        self.launcher.join(timeout)
        if self.launcher.exitcode is None:
            raise TimeoutError(f"not done within {timeout} s:\n{self.output.read_text()}")
        return self.launcher.exitcode, self.output.read_text()

    def rank_pids(self) -> dict[int, int]:
        """Process id by rank, of the ranks that torchrun has started so far (Linux)."""
        # It forks them in their order.
        return dict(enumerate(children(self.launcher.pid)))

    def wait_for_step(self, step: int, timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while len(read_losses(self.run_dir)) < step:
            if self.launcher.exitcode is not None:
                raise AssertionError(f"ended before step {step}:\n{self.finish(timeout)[1]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"did not reach step {step} within {timeout} s")
            time.sleep(0.01)


def write_config(
    folder: Path, name: str = "run", defaults: Mapping[str, Any] | None = None, **changes: Any
) -> Path:
    """Writes FOLDER/NAME.json, a job that takes moments; its run is FOLDER/NAME.

    No number of ranks in the tests divides its 301 ids.

    Args:
        defaults: keys that a file of tests has otherwise; of a section, those that differ.
        changes: the same of one test.
    """
    config: dict[str, Any] = {
        "run": {"name": name, "out": str(folder)},
        "data": {
            "paths": [argparse.__file__],
            "vocab_size": 301,
            "sequence_length": 16,
            "cache": str(folder / "cache"),
        },
        "model": {"dim": 16, "layers": 2, "heads": 2},
        "parallel": {"timeout_s": 20},
        "checkpoint": {"every": 2},
        "steps": 6,
        "batch": 8,
    }
    for key, value in (*(defaults or {}).items(), *changes.items()):
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return path


@contextmanager
def started_training(num_ranks: int, config: Path, *arguments: str) -> Iterator[TrainingJob]:
    """Starts `torchrun --standalone --nproc-per-node NUM_RANKS -m cce_dist train CONFIG`; no
    process outlives the context, stopped ones included.

    torchrun's own agent starts the ranks and watches over them; it and they are forked, which takes
    a tenth of the time. `num_ranks` 0 starts one without it. The JSON file `config` names the run's
    folder.
    """
    output = config.with_suffix(".out")
    output.write_text("")
    command = ("train", str(config), *arguments)
    settings = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": num_ranks, "max_restarts": 0}
    launcher = (
        fork_context().Process(target=run_agent, args=(settings, command, output))
        if num_ranks
        else fork_context().Process(target=run_command, args=({}, output, command))
    )
    launcher.start()
    run = json.loads(config.read_text())["run"]
    job = TrainingJob(launcher, output, Path(run["out"]) / run["name"])
    try:
        yield job
    finally:
        for pid in [*job.rank_pids().values(), launcher.pid]:
            kill(pid)
        launcher.join()


def run_agent(
    settings: Mapping[str, Any],
    arguments: Sequence[str],
    output: Path,
    *,
    environment: Mapping[str, str] | None = None,
    run: Callable[..., object] | None = None,
) -> None:
    """Runs an agent of torchrun; its ranks are forks of this process, which call run(arguments).

    Args:
        settings: of LaunchConfig, in addition to those of `--standalone`.
        run: a function of a module; None: the command.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.update(environment or {}, CUDA_VISIBLE_DEVICES="")
    with output.open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    alone = {
        "run_id": "standalone",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",
        "local_addr": "127.0.0.1",
        "monitor_interval": 0.1,
        "start_method": "fork",
    }
    elastic_launch(LaunchConfig(**{**alone, **settings}), run or run_rank)(tuple(arguments))


def run_rank(arguments: tuple[str, ...]) -> None:
    """Runs as `python -m cce_dist` does; its exit code is the rank's."""
    sys.argv[1:] = arguments
    try:
        runpy.run_module("cce_dist", run_name="__main__", alter_sys=True)
    except SystemExit as done:
        sys.stdout.flush()
        code = int(done.code or 0)
        if code:
            os._exit(code)
    # The agent takes nothing but a return for success; one that has been told to stop takes nothing
    # at all, and whoever returns waits until it has.
    leave = threading.Timer(1.0, os._exit, (0,))
    leave.daemon = True
    leave.start()


def run_training(
    num_ranks: int, config: Path, *arguments: str, timeout: float = 100.0
) -> tuple[int, str]:
    """Returns exit code and output of a job that runs to its end."""
    with started_training(num_ranks, config, *arguments) as job:
        return job.finish(timeout)


def run_forked_training(
    num_ranks: int, config: Path, *arguments: str, timeout: float = 100.0
) -> tuple[int, str]:
    """Runs as run_training, in a tenth of its time: ranks are forked from a process with all
    imports.

    For what does not depend on who starts the ranks.
    """
    output = config.with_suffix(".out")
    return run_forked(num_ranks, output, "train", str(config), *arguments, timeout=timeout)


def run_forked(
    num_ranks: int,
    output: Path,
    *arguments: str,
    timeout: float = 100.0,
    run: Callable[[Sequence[str]], None] | None = None,
) -> tuple[int, str]:
    """Runs `cce-dist` with these arguments; `output` is a file for the ranks' output.

    This process gives them what torchrun would: their places, and the store. The exit code is of
    the last rank that failed. `run` is a function of the arguments that each rank calls instead.
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
    return run_placed(places or [{}], output, *arguments, timeout=timeout, run=run)


def run_placed_training(
    places: Sequence[Place], config: Path, *arguments: str, timeout: float = 100.0
) -> tuple[int, str]:
    """Runs as run_forked_training, with the environment variables of each rank."""
    output = config.with_suffix(".out")
    return run_placed(places, output, "train", str(config), *arguments, timeout=timeout)


def run_placed(
    places: Sequence[Place],
    output: Path,
    *arguments: str,
    timeout: float,
    run: Callable[[Sequence[str]], None] | None = None,
) -> tuple[int, str]:
    """Runs as run_forked, with the environment variables of each rank."""
    output.write_text("")
    ranks = [
        fork_context().Process(target=run_command, args=(place, output, arguments, run))
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


def run_command(
    place: Place,
    output: Path,
    arguments: Sequence[str],
    run: Callable[[Sequence[str]], None] | None = None,
) -> None:
    """Runs as `python -m cce_dist` does, or calls `run`."""
    os.environ.update({name: str(value) for name, value in place.items()}, CUDA_VISIBLE_DEVICES="")
    with output.open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    if run is not None:
        return run(arguments)
    # A rank that leaves the report to another one waits for a launcher to end it: here is none.
    watch.REPORT_S = 0.5
    sys.argv[1:] = arguments
    runpy.run_module("cce_dist", run_name="__main__", alter_sys=True)


def read_losses(run_dir: Path) -> list[float]:
    """Reads the losses of the whole lines of metrics.jsonl, in order."""
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
    """Sends SIGKILL, which also ends a stopped process; a process that has ended is fine."""
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
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in parentheses may hold spaces; the parent follows the state.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == parent:
                pids.append(int(entry.name))
    return sorted(pids)


def bench(folder: Path, command: str, *arguments: str) -> tuple[int, str]:
    """Runs `cce-dist bench COMMAND` on two forked ranks over gloo; returns exit code and output."""
    return run_forked(2, folder / "bench.out", "bench", command, *arguments, timeout=150)
