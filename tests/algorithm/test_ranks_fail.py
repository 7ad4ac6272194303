"""A rank that dies, stops or skips a call: the others raise within the group's timeout, none hangs,
and a fresh group computes the same bits."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist import linear_cross_entropy
from cce_dist.ranks import gather, hidden_sum
from cce_dist.testing import fork_context

TIMEOUT = 2.0
# Beside the timeout: two processes on a busy core.
SLACK = 20.0
SIZE, TOKENS, CLASSES, DIM = 6, 64, 300, 16
# Of which the last one fails.
Members = tuple[int, ...]


def step(group: Any) -> tuple[Tensor, ...]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    made = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, DIM, generator=made).requires_grad_()
    weight = torch.randn(CLASSES, DIM, generator=made)
    weight = weight[rank * CLASSES // size : (rank + 1) * CLASSES // size].clone().requires_grad_()
    targets = torch.randint(CLASSES, (TOKENS,), generator=made)
    loss = linear_cross_entropy(hidden, weight, targets, group=group, backend="torch")
    assert isinstance(loss, Tensor)
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class SkippedError(RuntimeError):
    """This rank alone ran out of memory, say, and its caller goes on."""


def skip() -> None:
    raise SkippedError


FAULTS: dict[str, Callable[[], None]] = {"dies": die, "stops": stop, "skips": skip}


@contextlib.contextmanager
def fault_at(phase: str, fault: Callable[[], None]) -> Iterator[None]:
    """Just before this rank's part of a collective."""
    places = {"forward": (gather, "start_all_gather"), "backward": (hidden_sum, "_reduction")}
    if phase == "before":
        fault()
    if phase not in places:
        yield
        return
    module, name = places[phase]
    original = getattr(module, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        fault()
        return original(*args, **kwargs)

    setattr(module, name, failing)
    try:
        yield
    finally:
        setattr(module, name, original)


def serve(rank: int, store: str, groups: list[Members], connection: Connection) -> None:
    torch.set_num_threads(1)
    short, long = (datetime.timedelta(seconds=seconds) for seconds in (TIMEOUT, 60))
    dist.init_process_group("gloo", store=dist.FileStore(store, SIZE), rank=rank, world_size=SIZE)
    # One for each call, in the same order on every rank: a group that saw a failure is lost.
    made = [
        dist.new_group(list(members), timeout=short if 0 < number <= len(SCENARIOS) else long)
        for number, members in enumerate(groups)
    ]
    connection.send_bytes(pickle.dumps("ready"))
    while True:
        number, fault, phase = pickle.loads(connection.recv_bytes())
        begin = time.monotonic()
        mine = fault != "" and rank == groups[number][-1]
        answer: Any = None
        try:
            with fault_at(phase, FAULTS[fault]) if mine else contextlib.nullcontext():
                answer = step(made[number])
        except SkippedError:
            answer = "skipped"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        connection.send_bytes(pickle.dumps((answer, time.monotonic() - begin)))


class Ranks:
    """Six processes, and the groups that each scenario uses up."""

    def __init__(self, folder: Path, groups: list[Members]) -> None:
        context = fork_context()
        self.workers: list[Any] = []
        self.connections: list[Connection] = []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            arguments = (rank, str(folder / "store"), groups, theirs)
            worker = context.Process(target=serve, args=arguments, daemon=True)
            worker.start()
            theirs.close()
            self.workers.append(worker)
            self.connections.append(ours)
        for connection in self.connections:
            assert connection.poll(120), "a process did not start"
            assert pickle.loads(connection.recv_bytes()) == "ready"

    def ask(self, group: int, members: Members, fault: str = "", phase: str = "") -> None:
        for rank in members:
            self.connections[rank].send_bytes(pickle.dumps((group, fault, phase)))

    def answer(self, rank: int) -> tuple[Any, float]:
        connection = self.connections[rank]
        assert connection.poll(TIMEOUT + SLACK), f"rank {rank} hangs"
        return pickle.loads(connection.recv_bytes())

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.join()


PHASES = ("before", "forward", "backward")
PAIRS = ((0, 1), (2, 3), (4, 5))
Scenario = tuple[Members, str, str]
# Those of a row at the same time, by ranks of their own: of these faults only the timeout tells.
ROWS: list[list[Scenario]] = [
    *(
        [(pair, fault, phase) for pair, phase in zip(PAIRS, PHASES, strict=True)]
        for fault in ("skips", "stops")
    ),
    # 2, 3 and 4 die in turn.
    *([((0, 1, rank), "dies", phase)] for rank, phase in zip((2, 3, 4), PHASES, strict=True)),
]
SCENARIOS = [scenario for row in ROWS for scenario in row]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    # The first group computes what is right, the last ones once more after all that happened.
    groups: list[Members] = [(0, 1), *(members for members, _, _ in SCENARIOS), *PAIRS, (0, 1)]
    started = Ranks(tmp_path, groups)
    try:
        yield started
    finally:
        started.close()


def require_failure(ranks: Ranks, scenario: Scenario) -> None:
    members, fault, _ = scenario
    for rank in members[:-1]:
        answer, seconds = ranks.answer(rank)
        assert isinstance(answer, str), f"{scenario}: rank {rank} got a result"
        assert not answer.startswith("ValueError"), (scenario, answer)
        # A dead rank's connection breaks at once; of others only the timeout tells.
        assert seconds < TIMEOUT + SLACK / 2, (scenario, answer, seconds)
    failed = members[-1]
    if fault == "dies":
        ranks.workers[failed].join(SLACK)
        assert ranks.workers[failed].exitcode == -signal.SIGKILL
    elif fault == "stops":
        os.kill(ranks.workers[failed].pid, signal.SIGCONT)
        answer, _ = ranks.answer(failed)
        assert isinstance(answer, str), f"{scenario}: it went on without the others"
    else:
        assert ranks.answer(failed)[0] == "skipped"


@pytest.mark.timeout(250)
def test_the_others_raise_when_a_rank_fails(ranks: Ranks) -> None:
    ranks.ask(0, (0, 1))
    before = [ranks.answer(rank)[0] for rank in (0, 1)]
    numbers = itertools.count(1)
    for row in ROWS:
        if row is ROWS[2]:  # Ranks die from here on.
            for number, pair in enumerate(PAIRS, len(SCENARIOS) + 1):
                require_same(ranks, number, pair, before)
        for scenario in row:
            ranks.ask(next(numbers), *scenario)
        for scenario in row:
            require_failure(ranks, scenario)
    require_same(ranks, len(SCENARIOS) + len(PAIRS) + 1, (0, 1), before)


def require_same(ranks: Ranks, number: int, members: Members, before: list[Any]) -> None:
    ranks.ask(number, members)
    after = [ranks.answer(rank)[0] for rank in members]
    for one, other in zip(before, after, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
