"""Pools of worker processes over gloo or NCCL, and a counter of the collectives they issue."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cce_dist.testing.forks import fork_context
from cce_dist.testing.interpreter import speed_up_interpreter

# Time that the other ranks have to fail or finish after one rank has failed.
GRACE_SECONDS = 5.0
START_SECONDS = 120.0
# A rank writes its threads' stacks at this part of the time that it has for an answer.
STACKS_AT = 0.9


class RankError(RuntimeError):
    """At least one rank raised, died or did not answer.

    `failures` maps a rank (in the group) to "ExceptionType: message" and the traceback.
    """

    def __init__(self, failures: dict[int, tuple[str, str]]) -> None:
        self.failures = failures
        lines = [f"rank {rank}: {message}\n{trace}" for rank, (message, trace) in failures.items()]
        super().__init__("\n".join(lines))


class RankPool:
    """`size` processes joined in one group; calls run on any contiguous part of them.

    Over "nccl" each has the CUDA device of its rank.
    Processes start at the first call and again after a call that timed out or killed a rank.
    Tensors travel as pickled bytes. A function must be importable by its module's name.

    Args:
        timeout: seconds for each call.
        prepare: called before the first call, over "gloo" once for all ranks: they are forks of a
            process that has called it. Over "nccl" each rank calls it.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        timeout: float = 50.0,
        backend: str = "gloo",
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.size = size
        self.backend = backend
        self.timeout = timeout
        self.prepare = prepare
        self._workers: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: str | None = None

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        *args: Any,
        first_rank: int = 0,
        timeout: float | None = None,
    ) -> list[Any]:
        """Calls function(group, *args) on `world_size` ranks; returns their results by rank.

        Args:
            first_rank: rank 0 of the group is this process of the pool.
            timeout: seconds, in place of the pool's.
        Raises:
            RankError: a rank raised, died, or did not answer in time (the pool is then killed).
        """
        if not 1 <= world_size <= self.size - first_rank:
            raise ValueError(
                f"world_size must lie in [1, {self.size - first_rank}], got {world_size}"
            )
        try:
            if not self._workers:
                self._start()
            seconds = timeout or self.timeout
            payload = pickle.dumps((first_rank, world_size, seconds, function, args))
            connections = self._connections[first_rank : first_rank + world_size]
            for connection in connections:
                connection.send_bytes(payload)
            results, failures = self._collect(connections, seconds)
        except BaseException:
            self.close()
            raise
        if failures:
            raise RankError(failures)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Ends the processes. A later call starts new ones."""
        for connection in self._connections:
            connection.close()
        for worker in self._workers:
            # Its forks are in its process group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.kill()
            worker.join()
        self._workers, self._connections = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="cce_dist_ranks_")
        # An import may have touched CUDA, which no fork can then use.
        spawned = multiprocessing.get_context("spawn")
        context: Any = spawned if self.backend == "nccl" else fork_context()
        store = str(Path(self._folder, "store"))
        pipes = [context.Pipe() for _ in range(self.size)]
        ranks = [
            (rank, self.size, store, theirs, self.backend) for rank, (_, theirs) in enumerate(pipes)
        ]
        for worker_ranks in [[rank] for rank in ranks] if self.backend == "nccl" else [ranks]:
            worker = context.Process(
                target=_serve_all, args=(self.prepare, worker_ranks), daemon=True
            )
            worker.start()
            self._workers.append(worker)
        for ours, theirs in pipes:
            theirs.close()
            self._connections.append(ours)
        _, failures = self._collect(self._connections, START_SECONDS)
        if failures:
            raise RankError(failures)

    def _collect(
        self, connections: list[Connection], timeout: float
    ) -> tuple[dict[int, Any], dict[int, tuple[str, str]]]:
        results: dict[int, Any] = {}
        failures: dict[int, tuple[str, str]] = {}
        pending = {connection: rank for rank, connection in enumerate(connections)}
        deadline = time.monotonic() + timeout
        broken = False
        while pending:
            answered = wait(list(pending), max(deadline - time.monotonic(), 0))
            ready = [connection for connection in pending if connection in answered]
            if not ready:
                for connection, rank in pending.items():
                    message = f"no answer in {timeout:.0f} s; the pool was killed"
                    failures[rank] = (message, self._stacks(connection))
                broken = True
                break
            for connection in ready:
                rank = pending.pop(connection)
                try:
                    failure, result = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError) as error:
                    failure, result, broken = self._death(connection, error), None, True
                if failure is None:
                    results[rank] = result
                    continue
                failures[rank] = failure
                grace = time.monotonic() + GRACE_SECONDS
                if grace < deadline:
                    deadline, timeout = grace, GRACE_SECONDS
        if broken:
            self.close()
        return results, failures

    def _stacks(self, connection: Connection) -> str:
        """Returns the stacks that a rank's process has written."""
        assert self._folder is not None
        return _stacks_of(self._folder, self._connections.index(connection)).read_text()

    def _death(self, connection: Connection, error: Exception) -> tuple[str, str]:
        """Returns the failure of a rank whose process ended: its message and its stacks."""
        stacks = self._stacks(connection)
        cause = "" if stacks else "; it exited or was killed, perhaps for want of memory"
        return f"the process died: {error!r}{cause}", stacks


@functools.cache
def shared_pool() -> RankPool:
    """Returns the single pool of this process, four ranks, ended at exit."""
    pool = RankPool()
    atexit.register(pool.close)
    return pool


@functools.cache
def nccl_pool() -> RankPool:
    """Returns the pool with a process on each of two or four CUDA devices, ended at exit.

    Its timeout is long: kernels compile in the first calls.
    """
    pool = RankPool(4 if torch.cuda.device_count() >= 4 else 2, timeout=250, backend="nccl")
    atexit.register(pool.close)
    return pool


def _serve_all(prepare: Callable[[], object] | None, ranks: Sequence[tuple[Any, ...]]) -> None:
    """Serves all ranks: each by a fork of this process, and the last by the process itself."""
    os.setpgid(0, 0)
    if prepare is not None:
        prepare()
        gc.freeze()
    for number, rank in enumerate(ranks):
        others = ranks[number + 1 :]
        if others and os.fork():
            # A pipe ends only when every process that holds it has closed it.
            rank[3].close()
            continue
        for other in others:
            other[3].close()
        _serve(*rank)
        if others:
            os._exit(0)


def _stacks_of(folder: str | Path, rank: int) -> Path:
    """The file in which a rank's process leaves its threads' stacks: at a signal, or when late."""
    return Path(folder, f"stacks{rank}")


def _serve(rank: int, size: int, store_path: str, connection: Connection, backend: str) -> None:
    stacks = _stacks_of(Path(store_path).parent, rank).open("w")  # open as long as the process
    faulthandler.enable(stacks)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    speed_up_interpreter()
    groups = {}
    failure = None
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
            with contextlib.suppress(ImportError):  # Triton may be absent.
                from cce_dist.backends.triton.screened.quantize import screen_small_calls

                screen_small_calls()
        else:
            share_device()
        dist.init_process_group(
            backend, store=dist.FileStore(store_path, size), rank=rank, world_size=size
        )
        # Every process must create every group, member or not, in the same order.
        for first in range(size):
            for count in range(1, size - first + 1):
                groups[first, count] = dist.new_group(list(range(first, first + count)))
    except Exception as error:
        failure = (repr(error), traceback.format_exc())
    connection.send_bytes(pickle.dumps((failure, None)))

    with contextlib.suppress(EOFError, OSError):
        while True:
            payload = connection.recv_bytes()
            connection.send_bytes(_answer(payload, groups, stacks))


def share_device() -> None:
    """Gives all later gloo groups of this process one device: one thread serves their sockets.

    Otherwise each group has a thread that wakes a hundred times a second: 3 % of a core for 40.
    """
    # Not every torch has gloo, and benchmarks import this module for NCCL.
    from torch.distributed import distributed_c10d
    from torch.distributed.constants import default_pg_timeout
    from torch.distributed.distributed_c10d import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    device = gloo.create_default_device()

    class Group(ProcessGroupGloo):
        def __init__(
            self, store: dist.Store, rank: int, size: int, timeout: timedelta = default_pg_timeout
        ) -> None:
            options = gloo._Options()
            options._devices, options._timeout = [device], timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Group


def _answer(payload: bytes, groups: dict[tuple[int, int], Any], stacks: IO[str]) -> bytes:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # The exception that pyproject.toml makes for the tests.
            warnings.filterwarnings("ignore", module=r"triton\.runtime\.interpreter")
            first, count, seconds, function, args = pickle.loads(payload)
            stacks.seek(0)
            stacks.truncate()
            faulthandler.dump_traceback_later(STACKS_AT * seconds, file=stacks)
            return pickle.dumps((None, function(groups[first, count], *args)))
    # pytest.raises fails by an exception that is no Exception.
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        return pickle.dumps(((message, traceback.format_exc()), None))
    finally:
        faulthandler.cancel_dump_traceback_later()


class CollectiveCounter(TorchDispatchMode):
    """A recorder of each collective in its context: (name, elements of the largest tensor)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            leaves = pytree.tree_leaves((args, kwargs))
            sizes = [leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor)]
            self.calls.append((func.__name__, max(sizes, default=0)))
        return func(*args, **kwargs)

    def count(self, *words: str) -> int:
        """Counts the collectives whose name, without underscores, has one of the words."""
        names = [name.replace("_", "") for name, _ in self.calls]
        return sum(any(word in name for word in words) for name in names)
