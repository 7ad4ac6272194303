"""The heartbeat of a rank: a thread shows that the rank lives, and watches the other ranks.

A failed collective tells only that some peer is missing; the heartbeat finds the rank to blame.
Each rank writes a new beat to the rendezvous store at intervals. A reader measures a beat's age by
the reader's clock, from the time when it first read the beat, so hosts' clocks need not agree.
docs/guide/faults.md describes the consequences.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from cce_dist.train.errors import JobError, first_line, say_error, say_traceback
from cce_dist.train.ranks import Ranks

from .blame import FINISHED, Beat, Peer, describe_lost_peer, find_skipped
from .place import Place

# A healthy rank beats this often; shorter timeouts beat faster.
INTERVAL_S = 1.0
# After a failed collective this many intervals show which rank has fallen silent.
GRACE_INTERVALS = 3
# A rank that refuses to go on waits at most this long for the store, which tells it whether it is
# the rank that reports. After that it reports.
LEAVE_PATIENCE_S = 5.0
# torchrun's SIGTERM means that a peer is dead already, so a rank need not wait the whole timeout.
STOPPING_TIMEOUT_S = 5.0


class Heartbeat:
    """Two threads of this rank, which beat and watch. Messages of other ranks show its place.

    Args:
        timeout_s: seconds of silence after which a rank takes the job down.
        stopping: returns True once this rank has been asked to stop.
        kin: a number that ranks share if they begin merges and reduces equally often.
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
        self.grace_s = GRACE_INTERVALS * self.interval_s
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
        self._reporting = threading.Lock()
        self._answered_at = time.monotonic()
        self._since: dict[str, float] = {}
        self._send_beat()
        self.threads = [
            threading.Thread(target=target, name=f"heartbeat {target.__name__}", daemon=True)
            for target in (self._beat_and_watch, self._guard_store)
        ]

    def start(self) -> None:
        """Starts the threads; all ranks call this at the same time."""
        # Wait for each rank's first beat: the death of a rank without a beat is not recognised.
        deadline = time.monotonic() + self.grace_s
        while not all(peer.beat for peer in self.peers.values()) and time.monotonic() < deadline:
            self._read_beats()
        self._answered_at = time.monotonic()
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """Tells the others that this rank has finished, so that it does not look dead."""
        self.place.phase = FINISHED
        self.closed.set()
        for thread in self.threads:
            thread.join()
        self._send_beat()
        if self.rank == 0 and not self.is_launchers_store:
            # This process holds the store: it stays until the others need the store no more.
            deadline = time.monotonic() + self.timeout_s
            while time.monotonic() < deadline:
                self._read_beats()
                if all(peer.is_leaving or peer.is_gone for peer in self.peers.values()):
                    break
                time.sleep(self.interval_s / 10)

    def explain(self, error: BaseException) -> str | None:
        """Explains a failure in this rank: returns a message that names the rank to blame.

        Waits a few intervals, since a peer that died just now is not yet silent. Kills ranks that
        hang. Returns None if another rank reports the failure.
        """
        cause = _find_connection_error(error) or error
        message = f"rank {self.rank} failed in {self.place.seen}: {first_line(cause)}"
        if not self.comes_from_lost_peer(error):
            # Stop watching: this rank leaves, whatever the others do.
            self.closed.set()
            self._leave(message, [])
            # Report this failure even if another rank has reported: the two may differ.
            return message
        time.sleep(self.grace_s)
        # Only one thread reports; the other blocks here for ever.
        self._reporting.acquire()
        if any(peer.has_given_reason for peer in self.peers.values()):
            return None
        lost_peers = self._find_lost_peers(2 * self.interval_s)
        if lost_peers:
            return self._blame(lost_peers)
        # Every rank lives, but a rank may not have reached the collective.
        peers = sorted(self.peers.items())
        places = [f"rank {rank} is alive in {peer.seen}" for rank, peer in peers]
        return self._leave(self._find_skipped() or "; ".join([message, *places]), [])

    def refuse(self, error: JobError) -> str | None:
        """Returns the error's message; None if another rank reports the error.

        The error may be this rank's alone, or that of all ranks.
        """
        self.closed.set()
        return self._leave(str(error), [], patience_s=LEAVE_PATIENCE_S)

    def comes_from_lost_peer(self, error: BaseException) -> bool:
        """Tells whether the error says only that another rank is missing."""
        return self.world_size > 1 and _find_connection_error(error) is not None

    def _find_lost_peers(self, limit_s: float) -> dict[int, Peer]:
        """Returns the ranks that have been silent for `limit_s` or have ended without a reason."""
        lost_peers = {}
        for rank, peer in self.peers.items():
            state = None if peer.place is None else peer.place.state
            # A process that runs may be late because its host is busy.
            limit = max(limit_s, self.timeout_s / 2) if state == "running" else limit_s
            if not peer.is_leaving and (peer.age > limit or state == "gone"):
                lost_peers[rank] = peer
        return lost_peers

    def _blame(self, lost_peers: dict[int, Peer]) -> str | None:
        """Kills the lost ranks of this host and leaves; returns what `_leave` returns."""
        # Kill stopped processes, which cannot act on a launcher's SIGTERM: torchrun would wait
        # 30 s for them, other launchers for ever.
        place, texts = self.place.seen, []
        for rank, peer in lost_peers.items():
            died = peer.is_gone and peer.age < self.timeout_s / 2
            texts.append(describe_lost_peer(rank, peer, died=died, place=place))
        for peer in lost_peers.values():
            if peer.place is not None:
                peer.place.kill()
        return self._leave("\n".join(texts), list(lost_peers))

    def _leave(
        self, message: str, blames: list[int], *, patience_s: float | None = None
    ) -> str | None:
        """Tells the other ranks that this rank leaves; they then leave without a message.

        Returns: the message; None if another rank was the first to leave, and reports.
        """
        self.blames = blames
        if not blames:
            self.failure = message
        spokesman = str(self.rank)

        def tell() -> None:
            nonlocal spokesman
            self._send_beat()
            spokesman = self.store.compare_set("spokesman", "", str(self.rank)).decode()

        # The store may be behind the broken link, so another thread talks to it.
        telling = threading.Thread(target=tell, daemon=True)
        telling.start()
        telling.join(patience_s or self.interval_s)
        return message if spokesman == str(self.rank) else None

    def _find_skipped(self) -> str | None:
        # This rank compares only itself with each peer: all pairs of ranks would be too many.
        place = self.place.seen
        for rank, peer in self.peers.items():
            if peer.beat is not None and peer.beat.kin == self.kin:
                message = find_skipped(
                    {self.rank: place, rank: peer.place_in_beat}, in_order=self.in_order
                )
                if message is not None:
                    return message
        return None

    def _beat_and_watch(self) -> None:
        while not self.closed.wait(self.interval_s):
            try:
                self._send_beat()
                self._read_beats()
                lost_peers = self._find_lost_peers(self._limit_s)
                if lost_peers:
                    # A rank may have sent its last beat, and ended, since its beat was read.
                    self._read_beats()
                self._answered_at = time.monotonic()
            except dist.DistError as error:
                # Rank 0 may have held the store and have finished, which is no failure.
                if self.closed.is_set() or self.place.phase == "leaving":
                    return
                self._die(lambda error=error: self._describe_lost_store(first_line(error)))
            lost_peers = {rank: peer for rank, peer in lost_peers.items() if not peer.is_leaving}
            if lost_peers:
                self._die(lambda lost_peers=lost_peers: self._blame(lost_peers))
            self._follow_leaving_peers()
            if self._lasts("skip", self._find_skipped() is not None):
                self._die(lambda: self._leave(self._find_skipped() or "a rank has skipped", []))
            self._watch_threads()

    def _follow_leaving_peers(self) -> None:
        """Ends this process some time after a rank has left for a failure or a lost rank."""
        if any(peer.has_given_reason and peer.age > self.grace_s for peer in self.peers.values()):
            self._die(lambda: None)
        if any(peer.blames and peer.age > self.timeout_s for peer in self.peers.values()):
            blamed = {rank: peer.blames for rank, peer in self.peers.items() if peer.blames}
            self._die(
                lambda: (
                    f"rank {self.rank} cannot go on alone: other ranks have left, and blame (by "
                    f"leaving rank) {blamed}"
                )
            )

    @property
    def _limit_s(self) -> float:
        """Seconds of silence after which a rank counts as lost."""
        return min(STOPPING_TIMEOUT_S, self.timeout_s) if self.stopping() else self.timeout_s

    def _watch_threads(self) -> None:
        """Watches this rank's threads for a failure.

        The main thread may wait for ranks that wait for a failed thread of this rank.
        """
        error = self.place.thread_error
        is_own = error is not None and not self.comes_from_lost_peer(error)
        if self._lasts("error", is_own) and error is not None:
            say_traceback(error)
            self._die(lambda: self.explain(error))

    def _lasts(self, name: str, is_so: bool) -> bool:
        """Tells whether a symptom has been there for the time of grace."""
        if not is_so:
            self._since.pop(name, None)
            return False
        return time.monotonic() - self._since.setdefault(name, time.monotonic()) > self.grace_s

    def _guard_store(self) -> None:
        """Ends this process if the store stops answering, in which `_beat_and_watch` waits."""
        while not self.closed.wait(self.interval_s):
            silence_s = time.monotonic() - self._answered_at
            if silence_s > self.timeout_s + self.grace_s:
                text = f"no answer for {silence_s:.0f} s"
                self._die(lambda text=text: self._describe_lost_store(text))

    def _describe_lost_store(self, symptom: str) -> str | None:
        place = self.place.seen
        if self.is_launchers_store:
            return (
                f"rank {self.rank}: the launcher's store is gone, so the launcher is too, or the "
                f"network to it ({symptom}); this rank is in {place}"
            )
        peer = self.peers.get(0)
        if peer is not None and peer.is_gone:
            return describe_lost_peer(0, peer, died=True, place=place)
        return (
            f"rank {self.rank}: rank 0, which holds the store, has died, or the network to it "
            f"({symptom}); this rank is in {place}"
        )

    def _send_beat(self) -> None:
        self.number += 1
        beat = Beat(
            number=self.number,
            seen=self.place.seen,
            kin=self.kin,
            pid=os.getpid(),
            host=socket.gethostname(),
            file=self.place.file,
            token=self.place.token.hex(),
            failure=self.failure,
            blames=self.blames,
        )
        self.store.set(str(self.rank), beat.to_json())

    def _read_beats(self) -> None:
        for rank, peer in self.peers.items():
            if self.store.check([str(rank)]):
                peer.receive(Beat.from_json(self.store.get(str(rank))))

    def _die(self, explain: Callable[[], str | None]) -> None:
        """Ends this process after the message of `explain`, if it returns one."""
        # The main thread may be about to report the same failure.
        self._reporting.acquire()
        message = explain()
        # Only a hard exit works here: the main thread may never come back from its collective.
        if message is not None:
            say_error(message)
        os._exit(1)


def _find_connection_error(error: BaseException) -> BaseException | None:
    """Returns the error or its cause if it says only that another rank is missing; else None."""
    cause, visited = error, []
    while cause is not None and cause not in visited:
        if _is_connection_error(cause):
            return cause
        visited.append(cause)
        # torch's pipelines wrap the error. The chain of causes of a thread's error that is raised
        # again may lead back to the error.
        cause = cause.__cause__
    return None


def _is_connection_error(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in str(error).lower() for word in ("gloo", "nccl", "connection", "timed out"))
    )
