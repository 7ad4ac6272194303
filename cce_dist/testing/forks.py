"""Processes forked from a server that has imported torch, and has done nothing else."""

from __future__ import annotations

import functools
import gc
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

# Modules that ranks import, with a test's module too; and modules that torch.optim,
# torch.distributed.checkpoint, torch.compile and Megatron import at their first use. The server
# skips those not installed.
IMPORTED = (
    "cce_dist.backends.triton.backend",
    "cce_dist.cli.main",
    "cce_dist.testing",
    "cce_dist.train.job",
    "cce_dist.train.pipeline.step",
    "hypothesis",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "pytest",
    "tokenizers.implementations",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint._fsspec_filesystem",
)

# New objects before Python looks for cycles among them.
GARBAGE = 10_000


class _Fork(ForkServerProcess):
    def run(self) -> None:
        # Modules hold a million objects that never become garbage. Each full collection would
        # visit them for 0.3 s, and so copy the memory that this process shares with the server.
        gc.freeze()
        # By default every 700 new objects: 3 % of a rank's time.
        gc.set_threshold(GARBAGE)
        super().run()


class _ForkContext(ForkServerContext):
    Process = _Fork


@functools.cache
def fork_context() -> ForkServerContext:
    """Returns a context of multiprocessing whose processes are forks of a server.

    A fork starts in 0.1 s; a spawned process would import for 1.5 s or more. The server starts with
    the first process, in the environment of that moment. It has no threads, and none of the
    replacements that tests make in this process.
    """
    context = _ForkContext()
    context.set_forkserver_preload(list(IMPORTED))
    return context


@functools.cache
def start_fork_server() -> None:
    """Starts the server and waits until it has imported all modules, 10 s of a core.

    Otherwise the test that starts the first process would wait.
    """
    process: Any = fork_context().Process()
    process.start()
    process.join()


def run_module(
    name: str,
    arguments: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    path: Sequence[Path] = (),
    timeout: float = 100.0,
) -> subprocess.CompletedProcess[str]:
    """Runs `python -m NAME ARGUMENTS`, in a process that has imported torch already.

    Args:
        folder: folder for files with its stdout and stderr.
        environment: variables that are added to the server's environment.
        path: folders in which Python looks for modules first.
    """
    outputs = [folder / name for name in ("stdout", "stderr")]
    module_args = (
        name,
        tuple(arguments),
        outputs,
        dict(environment or {}),
        [str(each) for each in path],
    )
    process: Any = fork_context().Process(target=_be_module, args=module_args)
    process.start()
    process.join(timeout)
    code = process.exitcode
    process.kill()
    process.join()
    texts = [output.read_text() for output in outputs]
    if code is None:
        raise TimeoutError(f"{name} must end within {timeout} s, got so far: {texts}")
    return subprocess.CompletedProcess([name, *arguments], code, *texts)


def _be_module(
    name: str,
    arguments: Sequence[str],
    outputs: Sequence[Path],
    environment: Mapping[str, str],
    path: Sequence[str],
) -> None:
    for descriptor, output in enumerate(outputs, 1):
        with output.open("w") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.update(environment, CUDA_VISIBLE_DEVICES="")
    sys.path[:0] = path
    sys.argv[1:] = arguments
    runpy.run_module(name, run_name="__main__", alter_sys=True)
