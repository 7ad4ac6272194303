"""Blame: which rank a failure is put down to, without processes or sockets."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from cce_dist.train.heartbeat import Heartbeat, Peer, kill_sibling

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")


@dataclass
class FakeRanks:
    rank: int
    world_size: int
    store: dist.Store


def two_heartbeats(timeout_s: float = 0.4) -> tuple[Heartbeat, Heartbeat]:
    """Of ranks 0 and 1; neither thread runs, so beats happen when the test says so."""
    store = dist.HashStore()
    first, second = (
        Heartbeat(FakeRanks(rank, 2, store), timeout_s, lambda: False)  # type: ignore[arg-type]
        for rank in range(2)
    )
    first._watch()
    return first, second


def test_explain_names_the_silent_rank() -> None:
    first, second = two_heartbeats()
    second.step, second.phase = 17, "training"
    second._beat()
    first._watch()
    # Both are this process, which would be killed as its own silent sibling.
    first.peers[1].beat["parent"] = 0
    message = first.explain(LOST)
    assert message is not None
    assert message.startswith(f"rank 1 (pid {os.getpid()} on {socket.gethostname()}) has not")
    assert message.endswith("last seen in step 17 (training)")


def test_explain_own_error_is_told_to_the_others() -> None:
    first, second = two_heartbeats()
    message = second.explain(ValueError("something else"))
    assert message == "rank 1 failed in step 0 (starting): ValueError: something else"
    first._watch()
    assert first.explain(LOST) is None, "rank 1 has said it"


def test_explain_says_where_everyone_is_if_all_live() -> None:
    # Their threads run: a busy machine may hold one up for a tenth of a second, and who is silent
    # for a quarter of the timeout is killed.
    first, second = two_heartbeats(4.0)
    second.step, second.phase = 16, "saving a checkpoint"
    second.start()
    first.start()
    try:
        message = first.explain(RuntimeError("Timed out waiting 10000ms for recv"))
    finally:
        first.closed.set()
        second.closed.set()
    assert message is not None and "Timed out" in message
    assert message.endswith("rank 1 is alive in step 16 (saving a checkpoint)")


def test_close_is_no_death() -> None:
    first, second = two_heartbeats()
    second.start()
    second.close()
    first._watch()
    first.peers[1].seen_at -= 3600
    assert first._silent(1.0) == {}


@pytest.mark.parametrize(
    ("host", "parent"),
    [
        pytest.param("elsewhere", None, id="another host"),
        pytest.param(None, 1, id="another launcher"),
        # A child of ours, as it says, is no sibling.
        pytest.param(None, None, id="pid used again"),
    ],
)
def test_kill_sibling_spares(host: str | None, parent: int | None) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        beat = {
            "pid": process.pid,
            "host": host or socket.gethostname(),
            "parent": parent or os.getppid(),
        }
        kill_sibling(Peer(json.loads(json.dumps(beat))))
        assert process.poll() is None
        process.communicate(b"\n")
    assert process.returncode == 0
