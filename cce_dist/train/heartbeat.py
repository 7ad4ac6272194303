"""Which rank is to blame: a thread in each rank says that it lives, and watches the others.

A collective that fails tells only that some peer is missing. Each rank counts up its own beat
in the rendezvous store once in a while; ages are measured by the reader's clock, from when it
last saw a count change, so hosts' clocks need not agree.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from .ranks import Ranks

# A healthy rank beats this often; shorter timeouts beat faster.
INTERVAL_S = 1.0
# After a collective failed, this many intervals show who has fallen silent.
GRACE_INTERVALS = 3
# torchrun's SIGTERM means that a peer is dead already: no need to wait for the whole timeout.
STOPPING_TIMEOUT_S = 5.0
FINISHED = "finished"


@dataclass
class Peer:
    """What the watching rank knows about another one."""

    beat: dict[str, object] = field(default_factory=dict)
    seen_at: float = field(default_factory=time.monotonic)

    @property
    def age(self) -> float:
        return time.monotonic() - self.seen_at


class Heartbeat:
    """A thread of this rank. `step` and `phase` are what others will read in their messages."""

    def __init__(self, ranks: Ranks, timeout_s: float, stopping: Callable[[], bool]) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.timeout_s = timeout_s
        self.interval_s = min(INTERVAL_S, timeout_s / 8)
        self.stopping = stopping
        self.step = 0
        self.phase = "starting"
        # A connection of its own: the main thread may sit in a long wait on the other one.
        clone = getattr(ranks.store, "clone", lambda: ranks.store)
        self.store = dist.PrefixStore("heartbeat", clone())
        self.peers = {rank: Peer() for rank in range(self.world_size) if rank != self.rank}
        self.count = 0
        self.failure: str | None = None
        self.closed = threading.Event()
        self._beat()
        self.thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        """A rank that has finished must not look like one that died."""
        self.phase = FINISHED
        self.closed.set()
        self.thread.join()
        self._beat()

    def explain(self, error: BaseException) -> str | None:
        """After a failure in this rank: whose fault it was, as far as the beats tell.

        Waits a few intervals, since a peer that died just now is not yet silent. Kills those
        who hang. None if another rank is the one to say it.
        """
        own = f"rank {self.rank} failed in step {self.step} ({self.phase}): {_first_line(error)}"
        if not self.is_lost_peer(error):
            self.failure = own
            self._beat()
            return own
        time.sleep(GRACE_INTERVALS * self.interval_s)
        if any(peer.beat.get("failure") for peer in self.peers.values()):
            return None
        silent = self._silent(2 * self.interval_s)
        if silent:
            return self._blame(silent)
        # Every rank lives, but one may have never reached the collective.
        places = [_describe_place(rank, peer) for rank, peer in sorted(self.peers.items())]
        return "; ".join([own, *places])

    def is_lost_peer(self, error: BaseException) -> bool:
        """Whether the error only says that some other rank is missing."""
        return self.world_size > 1 and _is_connection_error(error)

    def _silent(self, limit_s: float) -> dict[int, Peer]:
        return {
            rank: peer
            for rank, peer in self.peers.items()
            if peer.age > limit_s and peer.beat.get("phase") != FINISHED
        }

    def _blame(self, silent: dict[int, Peer]) -> str | None:
        # torchrun waits 30 s for a stopped process, which cannot act on SIGTERM.
        for peer in silent.values():
            kill_sibling(peer)
        survivors = sorted(set(self.peers) - set(silent) | {self.rank})
        if self.rank != survivors[0]:
            return None
        return "\n".join(_describe_silent(rank, peer) for rank, peer in silent.items())

    def _run(self) -> None:
        while not self.closed.wait(self.interval_s):
            try:
                self._beat()
                self._watch()
            except dist.DistError as error:
                if not self.closed.is_set():
                    _die(
                        f"rank {self.rank}: the launcher's store is gone, so the launcher is "
                        f"too ({_first_line(error)}); last step {self.step}"
                    )
                return
            limit_s = STOPPING_TIMEOUT_S if self.stopping() else self.timeout_s
            silent = self._silent(min(limit_s, self.timeout_s))
            if silent:
                _die(self._blame(silent))

    def _beat(self) -> None:
        self.count += 1
        beat = {
            "count": self.count,
            "step": self.step,
            "phase": self.phase,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "host": socket.gethostname(),
            "failure": self.failure,
        }
        self.store.set(str(self.rank), json.dumps(beat))

    def _watch(self) -> None:
        for rank, peer in self.peers.items():
            if not self.store.check([str(rank)]):
                continue
            beat = json.loads(self.store.get(str(rank)))
            if beat != peer.beat:
                peer.beat, peer.seen_at = beat, time.monotonic()


def _describe_silent(rank: int, peer: Peer) -> str:
    if not peer.beat:
        return f"rank {rank} has never responded in {peer.age:.0f} s"
    beat = peer.beat
    return (
        f"rank {rank} (pid {beat['pid']} on {beat['host']}) has not responded for "
        f"{peer.age:.0f} s; last seen in step {beat['step']} ({beat['phase']})"
    )


def _describe_place(rank: int, peer: Peer) -> str:
    return f"rank {rank} is alive in step {peer.beat.get('step')} ({peer.beat.get('phase')})"


def kill_sibling(peer: Peer) -> None:
    """Kill a silent process, if it is a child of our own launcher on this host."""
    beat = peer.beat
    if not beat or beat["host"] != socket.gethostname() or beat["parent"] != os.getppid():
        return
    try:
        with open(f"/proc/{beat['pid']}/stat") as file:
            # The name in parentheses may hold spaces; the parent is the second field after it.
            parent = int(file.read().rpartition(")")[2].split()[1])
    except (OSError, ValueError):
        return
    if parent == os.getppid():
        os.kill(int(str(beat["pid"])), signal.SIGKILL)


def _is_connection_error(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in str(error).lower() for word in ("gloo", "nccl", "connection", "timed out"))
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _die(message: str | None) -> None:
    # Only a hard exit works here: the main thread may never come back from its collective.
    if message is not None:
        sys.stderr.write(f"error: {message}\n")
        sys.stderr.flush()
    os._exit(1)
