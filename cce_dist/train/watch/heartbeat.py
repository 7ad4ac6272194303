"""The heartbeat of a rank: a thread shows that the rank lives, and watches the other ranks.

A failed collective tells only that some peer is missing; the heartbeat finds the rank to blame.
Each rank counts up its own beat in the rendezvous store at intervals. The reader measures a beat's
age by its own clock, from the last change that it saw, so hosts' clocks need not agree.
docs/guide/faults.md describes the consequences.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from cce_dist.train.errors import JobError, first_line, say_error, say_traceback
from cce_dist.train.ranks import Ranks

from .blame import FINISHED, Peer, describe_lost, describe_place, find_skipped
from .place import Place

# A healthy rank beats this often; shorter timeouts beat faster.
INTERVAL_S = 1.0
# After a failed collective this many intervals show which rank has fallen silent.
GRACE_INTERVALS = 3
# A failed rank leaves anyway. It may wait so long for the store to learn whether it is to report.
SPEAK_S = 5.0
# torchrun's SIGTERM means that a peer is dead already, so a rank need not wait the whole timeout.
STOPPING_TIMEOUT_S = 5.0


class Heartbeat:
    """Two threads of this rank. Other ranks show its `step` and `phase` in their messages.

    Args:
        timeout_s: seconds of silence after which a rank takes the job down.
        stopping: returns True once this rank has been asked to stop.
        kin: a number, equal on ranks that begin merges and reduces equally often.
        in_order: see `find_skipped`.
    """

    def __init__(
        self,
        ranks: Ranks,
        timeout_s: float,
        stopping: Callable[[], bool],
        *,
        kin: int = 0,
        in_order: bool = True,
    ) -> None:
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self.timeout_s = timeout_s
        self.interval_s = min(INTERVAL_S, timeout_s / 8)
        self.stopping, self.kin, self.in_order = stopping, kin, in_order
        self.is_launchers_store = ranks.launch.agent_store
        self.place = Place()
        # The heartbeat has its own connection: the main thread may wait long on the other one.
        clone = getattr(ranks.store, "clone", lambda: ranks.store)
        self.store = dist.PrefixStore("heartbeat", clone())
        self.peers = {rank: Peer() for rank in range(self.world_size) if rank != self.rank}
        self.number = 0
        self.failure: str | None = None
        self.blames: list[int] = []
        self.closed = threading.Event()
        self._speaking = threading.Lock()
        self._answered_at = time.monotonic()
        self._skipped_since: float | None = None
        self._error_since: float | None = None
        self._beat()
        self.threads = [
            threading.Thread(target=run, name=f"heartbeat {run.__name__}", daemon=True)
            for run in (self._run, self._guard)
        ]

    @property
    def step(self) -> int:
        return self.place.step

    @step.setter
    def step(self, step: int) -> None:
        self.place.step = step

    @property
    def phase(self) -> str:
        return self.place.phase

    @phase.setter
    def phase(self, phase: str) -> None:
        self.place.phase = phase

    def start(self) -> None:
        """Starts the threads; all ranks call this at the same time."""
        # Wait for each rank's first beat: a rank that dies before it would not be recognised.
        deadline = time.monotonic() + GRACE_INTERVALS * self.interval_s
        while not all(peer.beat for peer in self.peers.values()) and time.monotonic() < deadline:
            self._watch()
        self._answered_at = time.monotonic()
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Tells the others that this rank has finished, so that it does not look dead."""
        self.phase = FINISHED
        self.closed.set()
        for thread in self.threads:
            thread.join()
        self._beat()
        if self.rank == 0 and not self.is_launchers_store:
            # The store ends with this process.
            deadline = time.monotonic() + self.timeout_s
            while time.monotonic() < deadline:
                self._watch()
                if all(peer.is_leaving or peer.is_gone for peer in self.peers.values()):
                    break
                time.sleep(self.interval_s / 10)

    def explain(self, error: BaseException) -> str | None:
        """Explains a failure in this rank: returns a message that names the rank to blame.

        Waits a few intervals, since a peer that died just now is not yet silent. Kills ranks that
        hang. Returns None if another rank reports the failure.
        """
        message = (
            f"rank {self.rank} failed in {self.place.seen}: {first_line(_lost_in(error) or error)}"
        )
        if not self.is_lost_peer(error):
            # Stop watching: this rank leaves, whatever the others do.
            self.closed.set()
            self._leave(message, [])
            # Report this failure even if another rank has reported: the two may differ.
            return message
        time.sleep(GRACE_INTERVALS * self.interval_s)
        # Only one thread reports; the other blocks here for ever.
        self._speaking.acquire()
        if any(peer.has_said_why for peer in self.peers.values()):
            return None
        lost = self._lost(2 * self.interval_s)
        if lost:
            return self._blame(lost)
        # Every rank lives, but one may not have reached the collective.
        places = [describe_place(rank, peer.seen) for rank, peer in sorted(self.peers.items())]
        return self._leave(self._find_skipped() or "; ".join([message, *places]), [])

    def refuse(self, error: JobError) -> str | None:
        """Returns the error's message; None if another rank reports it.

        All ranks may have found the error, or this rank alone.
        """
        self.closed.set()
        return self._leave(str(error), [], patience_s=SPEAK_S)

    def is_lost_peer(self, error: BaseException) -> bool:
        """Tells whether the error says only that another rank is missing."""
        return self.world_size > 1 and _lost_in(error) is not None

    def _lost(self, limit_s: float) -> dict[int, Peer]:
        """Returns the silent ranks, and the ranks whose process ended without a message."""
        lost = {}
        for rank, peer in self.peers.items():
            state = None if peer.place is None else peer.place.state
            # A process that is seen to run may be late because its host is busy.
            limit = max(limit_s, self.timeout_s / 2) if state == "running" else limit_s
            if not peer.is_leaving and (peer.age > limit or state == "gone"):
                lost[rank] = peer
        return lost

    def _blame(self, lost: dict[int, Peer]) -> str | None:
        # Kill stopped processes, which cannot act on a launcher's SIGTERM: torchrun would wait
        # 30 s for them, other launchers for ever.
        place, texts = self.place.seen, []
        for rank, peer in lost.items():
            died = peer.is_gone and peer.age < self.timeout_s / 2
            texts.append(describe_lost(rank, peer, died=died, place=place))
        for peer in lost.values():
            if peer.place is not None:
                peer.place.kill()
        return self._leave("\n".join(texts), list(lost))

    def _leave(
        self, message: str, blames: list[int], *, patience_s: float | None = None
    ) -> str | None:
        """Tells the other ranks, which then leave without a message.

        Returns: the message; None if another rank was first, and reports.
        """
        self.blames = blames
        if not blames:
            self.failure = message
        spokesman = [str(self.rank)]

        def tell() -> None:
            self._beat()
            spokesman[0] = self.store.compare_set("spokesman", "", str(self.rank)).decode()

        # The store may be behind the broken link, so another thread talks to it.
        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        telling.join(patience_s or self.interval_s)
        return message if spokesman[0] == str(self.rank) else None

    def _find_skipped(self) -> str | None:
        # This rank compares only itself with each peer: all pairs of ranks would be too many.
        place = self.place.seen
        for rank, peer in self.peers.items():
            if peer.beat.get("kin") == self.kin:
                message = find_skipped({self.rank: place, rank: peer.told}, in_order=self.in_order)
                if message is not None:
                    return message
        return None

    def _run(self) -> None:
        while not self.closed.wait(self.interval_s):
            try:
                self._beat()
                self._watch()
                lost = self._lost(self._limit_s)
                if lost:
                    # A rank that is gone may have sent a last beat after it was read.
                    self._watch()
                self._answered_at = time.monotonic()
            except dist.DistError as error:
                # Rank 0 may have held the store, and may have finished.
                if self.closed.is_set() or self.phase == "leaving":
                    return
                self._die(lambda error=error: self._describe_lost_store(first_line(error)))
            lost = {rank: peer for rank, peer in lost.items() if not peer.is_leaving}
            if lost:
                self._die(lambda lost=lost: self._blame(lost))
            self._follow()
            self._watch_for_skips()
            self._watch_own_threads()

    def _follow(self) -> None:
        """Ends this process after a rank that left with a reason, or that blames other ranks."""
        grace_s = GRACE_INTERVALS * self.interval_s
        if any(peer.has_said_why and peer.age > grace_s for peer in self.peers.values()):
            self._die(lambda: None)
        if any(peer.blames and peer.age > self.timeout_s for peer in self.peers.values()):
            left = {rank: peer.blames for rank, peer in self.peers.items() if peer.blames}
            self._die(lambda: f"rank {self.rank} is left alone: by rank, who blamed whom: {left}")

    @property
    def _limit_s(self) -> float:
        return min(STOPPING_TIMEOUT_S, self.timeout_s) if self.stopping() else self.timeout_s

    def _watch_for_skips(self) -> None:
        if self._find_skipped() is None:
            self._skipped_since = None
        elif self._skipped_since is None:
            self._skipped_since = time.monotonic()
        elif time.monotonic() - self._skipped_since > GRACE_INTERVALS * self.interval_s:
            self._die(lambda: self._leave(self._find_skipped() or "a rank has skipped", []))

    def _watch_own_threads(self) -> None:
        """Watches this rank's threads for a failure.

        The main thread may wait for ranks that wait for a failed thread of this rank.
        """
        error = self.place.error_aside
        if error is None or self.is_lost_peer(error):
            self._error_since = None
        elif self._error_since is None:
            self._error_since = time.monotonic()
        elif time.monotonic() - self._error_since > GRACE_INTERVALS * self.interval_s:
            say_traceback(error)
            self._die(lambda: self.explain(error))

    def _guard(self) -> None:
        """Guards against an unreachable store: it never answers, and the other thread waits."""
        while not self.closed.wait(self.interval_s):
            silence_s = time.monotonic() - self._answered_at
            if silence_s > self.timeout_s + GRACE_INTERVALS * self.interval_s:
                text = f"no answer for {silence_s:.0f} s"
                self._die(lambda text=text: self._describe_lost_store(text))

    def _describe_lost_store(self, what: str) -> str | None:
        place = self.place.seen
        if self.is_launchers_store:
            return (
                f"rank {self.rank}: the launcher's store is gone, so the launcher is too, or the "
                f"network to it ({what}); this rank is in {place}"
            )
        peer = self.peers.get(0)
        if peer is not None and peer.is_gone:
            return describe_lost(0, peer, died=True, place=place)
        return (
            f"rank {self.rank}: rank 0, which holds the store, has died, or the network to it "
            f"({what}); this rank is in {place}"
        )

    def _beat(self) -> None:
        self.number += 1
        seen = self.place.seen
        beat = {
            "number": self.number,
            "step": seen.step,
            "phase": seen.phase,
            "counts": seen.counts,
            "kin": self.kin,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "file": self.place.file,
            "token": self.place.token.hex(),
            "failure": self.failure,
            "blames": self.blames,
        }
        self.store.set(str(self.rank), json.dumps(beat))

    def _watch(self) -> None:
        for rank, peer in self.peers.items():
            if self.store.check([str(rank)]):
                peer.receive(json.loads(self.store.get(str(rank))))

    def _die(self, say: Callable[[], str | None]) -> None:
        # The main thread may be about to explain the same failure.
        self._speaking.acquire()
        message = say()
        # Only a hard exit works here: the main thread may never come back from its collective.
        if message is not None:
            say_error(message)
        os._exit(1)


def _lost_in(error: BaseException) -> BaseException | None:
    """Returns the error or its cause if it says only that another rank is missing; else None."""
    cause, looked_at = error, []
    while cause is not None and cause not in looked_at:
        if _is_connection_error(cause):
            return cause
        looked_at.append(cause)
        # torch's pipelines wrap the error. A thread's error that is raised again may be its own
        # cause.
        cause = cause.__cause__
    return None


def _is_connection_error(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in str(error).lower() for word in ("gloo", "nccl", "connection", "timed out"))
    )
