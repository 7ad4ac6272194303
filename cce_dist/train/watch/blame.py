"""The rank to blame for a failure, by one rank's view of the others, and the message."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from .place import COUNTED, Seen, SeenPlace

FINISHED = "finished"
NOWHERE = Seen(0, "starting", (0,) * len(COUNTED))


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life in the rendezvous store.

    Args:
        number: the beat's number, which tells it from the rank's last beat.
        seen: the rank's place.
        kin: see `Heartbeat`.
        file: the descriptor of the file behind the rank's `Place`; None: the system has no such
            files.
        token: the Place's token, in hexadecimal digits.
        failure: the rank's own failure, for which it leaves.
        blames: the ranks for whose loss this rank leaves.
    """

    number: int
    seen: Seen
    kin: int
    pid: int
    host: str
    file: int | None
    token: str
    failure: str | None
    blames: list[int]

    @classmethod
    def from_json(cls, text: bytes) -> Beat:
        values = json.loads(text)
        return cls(**{**values, "seen": Seen(**values["seen"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Peer:
    """Another rank, as the watching rank knows it.

    Args:
        beat: the rank's newest beat; None before the first.
        read_at: time of the beat's first reading, by the watching rank's clock.
        place: the rank's place in memory, if it is on this host.
    """

    beat: Beat | None = None
    read_at: float = field(default_factory=time.monotonic)
    place: SeenPlace | None = None

    def receive(self, beat: Beat) -> None:
        if beat == self.beat:
            return
        is_first = self.beat is None
        self.beat, self.read_at = beat, time.monotonic()
        if is_first and beat.file is not None and beat.host == socket.gethostname():
            with contextlib.suppress(OSError):
                self.place = SeenPlace(beat.pid, beat.file, bytes.fromhex(beat.token))

    @property
    def age(self) -> float:
        """Seconds since the newest beat was first read."""
        return time.monotonic() - self.read_at

    @property
    def has_given_reason(self) -> bool:
        """True if the rank leaves for a failure of its own, which it reports."""
        return self.beat is not None and bool(self.beat.failure)

    @property
    def blames(self) -> list[int]:
        """The ranks for whose loss this rank leaves."""
        return [] if self.beat is None else self.beat.blames

    @property
    def is_leaving(self) -> bool:
        is_finished = self.beat is not None and self.beat.seen.phase == FINISHED
        return is_finished or self.has_given_reason or bool(self.blames)

    @property
    def is_gone(self) -> bool:
        return self.place is not None and self.place.state == "gone"

    @property
    def place_in_beat(self) -> Seen:
        """The rank's place by its newest beat."""
        return NOWHERE if self.beat is None else self.beat.seen

    @property
    def seen(self) -> Seen:
        """The rank's place by its memory, or by its newest beat if it is on another host."""
        return self.place_in_beat if self.place is None else self.place.seen


def describe_lost_peer(rank: int, peer: Peer, *, died: bool, place: Seen) -> str:
    """Describes the loss of a rank.

    Args:
        died: the rank's process ended; False: the rank fell silent.
        place: the place of the rank that writes the message.
    """
    if peer.beat is None:
        return f"rank {rank} has never responded in {peer.age:.0f} s; this rank is in {place}"
    name = f"rank {rank} (pid {peer.beat.pid} on {peer.beat.host})"
    if died:
        return f"{name} has died; last seen in {peer.seen}"
    text = f"{name} has not responded for {peer.age:.0f} s"
    if peer.place is None:
        is_here = peer.beat.host == socket.gethostname()
        where = "on this host, but hidden from this rank" if is_here else "not on this host"
        return (
            f"{text}; last heard of in {peer.place_in_beat}, while this rank is in {place}. It is "
            f"{where}: if it still runs, its launcher has to end it; if not, look at the network"
        )
    text += f"; last seen in {peer.seen}"
    is_stopped = peer.place.state == "stopped"
    return f"{text}, {'stopped by a signal' if is_stopped else 'hanging'}; this rank ends it"


def find_skipped(places: Mapping[int, Seen], *, in_order: bool) -> str | None:
    """Describes the rank that skipped a collective in which another rank waits.

    Returns None if no rank did. A late rank skips nothing: ranks that begin the same phases in the
    same order are always at places of one sequence, where the rank that is further has begun each
    phase at least as often.

    Args:
        places: the places of ranks that begin each phase of COUNTED equally often; they may have
            been read at different times.
        in_order: ranks begin phases in the order of COUNTED. False (pipelines): a rank begins each
            `merge` before its `reduce`, and all merges and reduces before the step's `update`.
    """
    for phase in COUNTED[1:]:
        for rank, seen in places.items():
            for other, theirs in places.items():
                fewer = seen.count(phase) < theirs.count(phase)
                if fewer and _is_past(phase, seen, theirs, in_order):
                    return (
                        f"rank {rank} has skipped a {phase}: it is in {seen}, having begun "
                        f"{seen.count(phase)} of them, while rank {other} is in {theirs}, having "
                        f"begun {theirs.count(phase)}"
                    )
    return None


def _is_past(phase: str, seen: Seen, theirs: Seen, in_order: bool) -> bool:
    if seen.count("step") != theirs.count("step"):
        return seen.count("step") > theirs.count("step")
    after = COUNTED[COUNTED.index(phase) + 1 :]
    if not in_order:
        if phase == "merge" and seen.count("reduce") > seen.count("merge"):
            return True
        after = after[after.index("update") :] if "update" in after else ()
    return any(seen.count(each) > theirs.count(each) for each in after)
