"""The rank to blame for a failure, found from a rank's view of the others, and the message."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .place import COUNTED, Seen, SeenPlace

FINISHED = "finished"
NOWHERE = Seen(0, "starting", (0,) * len(COUNTED))


@dataclass
class Peer:
    """Another rank, as the watching rank knows it.

    Args:
        beat: the rank's newest beat, as JSON; empty before the first.
        seen_at: time of the beat's first reading, by the watching rank's clock.
        place: the rank's place in memory, if it is on this host.
    """

    beat: dict[str, Any] = field(default_factory=dict)
    seen_at: float = field(default_factory=time.monotonic)
    place: SeenPlace | None = None

    def receive(self, beat: dict[str, Any]) -> None:
        if beat == self.beat:
            return
        is_first = not self.beat
        self.beat, self.seen_at = beat, time.monotonic()
        if is_first and beat["file"] is not None and beat["host"] == socket.gethostname():
            with contextlib.suppress(OSError):
                self.place = SeenPlace(beat["pid"], beat["file"], bytes.fromhex(beat["token"]))

    @property
    def age(self) -> float:
        return time.monotonic() - self.seen_at

    @property
    def has_said_why(self) -> bool:
        """True if the rank is leaving and has given its reason."""
        return bool(self.beat.get("failure"))

    @property
    def blames(self) -> list[int]:
        """Ranks that this rank names as the reason for leaving."""
        return self.beat.get("blames", [])

    @property
    def is_leaving(self) -> bool:
        is_finished = self.beat.get("phase") == FINISHED
        return is_finished or self.has_said_why or bool(self.blames)

    @property
    def is_gone(self) -> bool:
        return self.place is not None and self.place.state == "gone"

    @property
    def told(self) -> Seen:
        """The rank's place by its newest beat."""
        if not self.beat:
            return NOWHERE
        return Seen(self.beat["step"], self.beat["phase"], self.beat["counts"])

    @property
    def seen(self) -> Seen:
        return self.told if self.place is None else self.place.seen


def describe_lost(rank: int, peer: Peer, *, died: bool, place: Seen) -> str:
    """Describes a rank that is lost.

    Args:
        died: the lost rank's process ended; False: it fell silent.
        place: the place of the rank that writes the message.
    """
    if not peer.beat:
        return f"rank {rank} has never responded in {peer.age:.0f} s; this rank is in {place}"
    who = f"rank {rank} (pid {peer.beat['pid']} on {peer.beat['host']})"
    if died:
        return f"{who} has died; last seen in {peer.seen}"
    text = f"{who} has not responded for {peer.age:.0f} s"
    if peer.place is None:
        here = peer.beat["host"] == socket.gethostname()
        return (
            f"{text}; last heard of in {peer.told}, while this rank is in {place}. It is "
            f"{'hidden' if here else 'not'} on this host: if it still runs, its launcher has to "
            "end it; else look at the network"
        )
    text += f"; last seen in {peer.seen}"
    is_stopped = peer.place.state == "stopped"
    return f"{text}, {'stopped by a signal' if is_stopped else 'hanging'}; this rank ends it"


def describe_place(rank: int, seen: Seen) -> str:
    return f"rank {rank} is alive in {seen}"


def find_skipped(places: Mapping[int, Seen], *, in_order: bool) -> str | None:
    """Describes the rank that skipped a collective in which another rank waits; None: no rank did.

    A late rank is not named. Ranks that begin the same phases in the same order are always at
    places of one sequence: a rank that is further has begun each phase at least as often.

    Args:
        places: the places of ranks that begin each phase of COUNTED equally often; they may have
            been read at different times.
        in_order: ranks begin phases in the order of COUNTED. False (pipelines): a rank begins each
            `merge` before its `reduce`, and all of them before the step's `update`.
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
