"""Blame: the rank that a message names for a failure. tests/train/test_faults.py has real jobs."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import pytest
import torch.distributed as dist

from cce_dist.core.phases import in_phase, watched_by
from cce_dist.distributed.launchers import Launch, read_launch
from cce_dist.testing import fork_context
from cce_dist.train.errors import JobError
from cce_dist.train.watch.blame import Beat, Peer, find_skipped
from cce_dist.train.watch.heartbeat import Heartbeat
from cce_dist.train.watch.place import COUNTED, Place, Seen, SeenPlace

LOST = RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
# The timeout of tests with threads, which a busy machine may hold up for tenths of a second. A rank
# that is silent for half the timeout is killed, and a rank that cannot reach the store within an
# eighth of the timeout reports by itself.
PATIENT_S = 4.0


@dataclass
class FakeRanks:
    rank: int
    world_size: int
    store: dist.Store
    launch: Launch = field(default_factory=lambda: read_launch({}))


def heartbeats(timeout_s: float = 0.4, count: int = 2) -> list[Heartbeat]:
    """Makes the heartbeats of `count` ranks. No thread runs: the test sends and reads beats."""
    store = dist.HashStore()
    beating = [
        Heartbeat(FakeRanks(rank, count, store), timeout_s, lambda: False)  # type: ignore[arg-type]
        for rank in range(count)
    ]
    beating[0]._read_beats()
    return beating


def hide(heartbeat: Heartbeat) -> None:
    """Hides the peers' places: all ranks are this process, which must not kill itself."""
    for peer in heartbeat.peers.values():
        peer.place = None


def test_explain_names_the_silent_rank() -> None:
    first, second = heartbeats()
    second.place.step = 17
    with watched_by(second.place), in_phase("merge"):
        second._send_beat()
    first._read_beats()
    hide(first)
    message = first.explain(LOST)
    assert message is not None
    assert message.startswith(f"rank 1 (pid {os.getpid()} on {socket.gethostname()}) has not")
    assert "last heard of in step 17 (merge), while this rank is in step 0 (starting)" in message
    assert "hidden from this rank: if it still runs, its launcher has to end it" in message


def test_explain_own_error_is_told_to_the_others() -> None:
    first, second = heartbeats(PATIENT_S)
    first.grace_s = 0.0  # Nothing comes in it.
    message = second.explain(ValueError("something else"))
    assert message == "rank 1 failed in step 0 (starting): ValueError: something else"
    first._read_beats()
    assert first.explain(LOST) is None, "rank 1 has said it"


def test_refuse_is_said_by_one_rank() -> None:
    """The rank that reports may be any rank, and the others need not have found the error."""
    first, second = heartbeats(PATIENT_S)
    first.grace_s = 0.0
    assert second.refuse(JobError("a full disk")) == "a full disk"
    assert first.refuse(JobError("a full disk")) is None
    first._read_beats()
    assert first.explain(LOST) is None


def test_explain_finds_the_lost_peer_in_what_pipelines_raise() -> None:
    first, _ = heartbeats()
    wrapped = RuntimeError("Failed to run stage backward")
    wrapped.__cause__ = LOST
    assert first.comes_from_lost_peer(wrapped)
    first_of_two, second_of_two = ValueError("one"), RuntimeError("Failed to run stage backward")
    first_of_two.__cause__, second_of_two.__cause__ = second_of_two, first_of_two
    assert not first.comes_from_lost_peer(first_of_two)


def test_explain_says_where_everyone_is_if_all_live() -> None:
    first, second = heartbeats(PATIENT_S)
    second.place.step, second.place.phase = 16, "saving a checkpoint"
    second.start()
    first.start()
    try:
        message = first.explain(RuntimeError("Timed out waiting 10000ms for recv"))
    finally:
        first.closed.set()
        second.closed.set()
    assert message is not None and "Timed out" in message
    assert message.endswith("rank 1 is alive in step 16 (saving a checkpoint)")


def test_explain_is_said_once() -> None:
    first, second, third = heartbeats(PATIENT_S, count=3)
    for each in (first, second):
        each._read_beats()
        hide(each)
        each.peers = {2: each.peers[2]}
        # As after the time of grace, in which nothing comes.
        each.peers[2].read_at -= each.grace_s
        each.grace_s = 0.0
    said = [each.explain(LOST) for each in (first, second)]
    assert said[0] is not None and said[0].startswith("rank 2 ") and said[1] is None
    # Ranks 0 and 1, which left because of rank 2, are not lost.
    third._read_beats()
    assert third.peers[0].blames == [2] and set(third._find_lost_peers(0.0)) == set()


def test_close_is_no_death() -> None:
    first, second = heartbeats(PATIENT_S)
    second.start()
    second.close()
    first._read_beats()
    first.peers[1].read_at -= 3600
    assert first._find_lost_peers(1.0) == {}


def wait_in_merge(connection: Connection) -> None:
    place = Place()
    place.step = 7
    with watched_by(place), in_phase("forward"), in_phase("merge"):
        connection.send((os.getpid(), place.file, place.token))
        connection.recv()


def test_place_outlives_its_process() -> None:
    ours, theirs = fork_context().Pipe()
    process = fork_context().Process(target=wait_in_merge, args=(theirs,), daemon=True)
    process.start()
    pid, file, token = ours.recv()
    place = SeenPlace(pid, file, token)
    assert place.state == "running"
    with pytest.raises(OSError, match="no rank of this job"):
        SeenPlace(pid, file, bytes(16))
    # With another token the process is another one with the same number: it is not killed.
    place.token = bytes(16)
    assert place.state == "gone" and not place.kill()
    place.token = token
    assert place.state == "running"
    os.kill(pid, signal.SIGSTOP)
    while place.state != "stopped":
        time.sleep(0.01)
    assert place.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert place.state == "gone" and not place.kill()
    assert str(place.seen) == "step 7 (merge)"
    assert [place.seen.count(x) for x in ("step", "forward", "merge", "reduce")] == [1, 1, 1, 0]


def test_peer_of_another_host_has_no_place() -> None:
    place = Place()
    beat = Beat(
        number=1,
        seen=place.seen,
        kin=0,
        pid=os.getpid(),
        host="elsewhere",
        file=place.file,
        token=place.token.hex(),
        failure=None,
        blames=[],
    )
    peer = Peer()
    peer.receive(beat)
    assert peer.place is None
    peer = Peer()
    peer.receive(replace(beat, host=socket.gethostname()))
    assert peer.place is not None and peer.place.state == "running"


def test_place_of_several_threads() -> None:
    place = Place()
    place.phase = "training"
    inside, leave = threading.Event(), threading.Event()

    @in_phase("merge", begins=False)
    def wait() -> None:
        inside.set()
        leave.wait()

    with watched_by(place):
        thread = threading.Thread(target=wait)
        with in_phase("forward and backward"):
            thread.start()
            inside.wait()
            assert place.seen.phase == "forward and backward, merge"
            leave.set()
            thread.join()
            assert place.seen.phase == "forward and backward"
        assert place.seen.phase == "training" and place.seen.count("merge") == 0
        # The place of an error stays after the error has left its phases.
        with pytest.raises(ZeroDivisionError), in_phase("backward"), in_phase("reduce"):
            raise ZeroDivisionError
        assert place.seen.phase == "reduce"
        place.phase = "evaluating"
        assert place.seen.phase == "evaluating"
        with in_phase("merge"), in_phase("merge"):
            assert place.seen.count("merge") == 1
    with in_phase("merge"):
        assert place.seen.phase == "evaluating", "it no longer watches"


def test_an_error_on_another_thread_is_told_while_the_main_one_waits(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    first, _ = heartbeats()
    said: list[str | None] = []
    monkeypatch.setattr(first, "_die", lambda explain: said.append(explain()))

    @in_phase("merge")
    def fail() -> None:
        with contextlib.suppress(ValueError), in_phase("reduce"):
            raise ValueError("on a thread")

    with watched_by(first.place), in_phase("forward and backward"):
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
        deadline = time.monotonic() + 5
        while not said and time.monotonic() < deadline:
            first._watch_threads()
    assert said == ["rank 0 failed in step 0 (reduce): ValueError: on a thread"]
    assert "ValueError: on a thread" in capfd.readouterr().err


def test_phases_tell_the_newest_watcher_first() -> None:
    told = []

    class Teller:
        def __init__(self, name: str, fails: bool = False) -> None:
            self.name, self.fails = name, fails

        def enter(self, phase: str, begins: bool) -> None:
            told.append((self.name, phase, begins))
            if self.fails:
                raise ValueError(self.name)

        def leave(self, phase: str, error: BaseException | None) -> None:
            told.append((self.name, phase, error and str(error)))

    newer = Teller("newer", fails=True)
    with watched_by(Teller("older")), watched_by(newer), pytest.raises(ValueError, match="newer"):
        in_phase("merge").__enter__()
    # The older watcher did not see the phase begin, so it does not see it end.
    assert told == [("newer", "merge", True), ("newer", "merge", "newer")]


def seen(**counts: int) -> Seen:
    return Seen(counts["step"], "somewhere", tuple(counts.get(name, 0) for name in COUNTED))


def walk(order: list[str], steps: int = 2) -> list[Seen]:
    """Returns each place of a rank in turn."""
    counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
    places = []
    for _ in range(steps):
        for name in ["step", *order]:
            counts[name] += 1
            places.append(seen(**counts))
    return places


STEP = ["forward", "merge", "backward", "reduce", "update", "checkpoint"]
# Two microbatches; the two ranks begin merges and reduces in different orders.
PIPELINE = [
    ["merge", "merge", "reduce", "reduce", "update", "checkpoint"],
    ["merge", "reduce", "merge", "reduce", "update", "checkpoint"],
]


def test_find_skipped_blames_nobody_for_being_late() -> None:
    for first in walk(STEP):
        for second in walk(STEP):
            assert find_skipped({0: first, 1: second}, in_order=True) is None
    for first in walk(PIPELINE[0]):
        for second in walk(PIPELINE[1]):
            assert find_skipped({0: first, 1: second}, in_order=False) is None


@pytest.mark.parametrize("phase", ["forward", "merge", "backward", "reduce", "checkpoint"])
def test_find_skipped_names_the_rank(phase: str) -> None:
    """Rank 0 waits in the phase, rank 1 has gone on to the next."""
    index = COUNTED.index(phase)
    here = {name: 3 if name in COUNTED[: index + 1] else 2 for name in COUNTED}
    after = COUNTED[index + 1] if phase != "checkpoint" else "step"
    there = {**here, phase: 2, after: here[after] + 1}
    places = {0: seen(**here), 1: seen(**there)}
    message = find_skipped(places, in_order=True)
    assert message is not None and message.startswith(f"rank 1 has skipped a {phase}: ")
    assert message.endswith(
        "begun 2 of them, while rank 0 is in step 3 (somewhere), having begun 3"
    )
    swapped = find_skipped({0: places[1], 1: places[0]}, in_order=True)
    assert swapped is not None and swapped.startswith(f"rank 0 has skipped a {phase}: ")


def test_find_skipped_in_a_pipeline() -> None:
    # Within a step, only a reduce before its merge proves a skip; later, the update does.
    waits = {"step": 1, "merge": 4, "reduce": 3}
    within = {"step": 1, "merge": 3, "reduce": 4}
    message = find_skipped({0: seen(**waits), 1: seen(**within)}, in_order=False)
    assert message is not None and message.startswith("rank 1 has skipped a merge")
    done = {"step": 1, "merge": 4, "reduce": 3, "update": 1}
    waits = {"step": 1, "merge": 4, "reduce": 4}
    message = find_skipped({0: seen(**done), 1: seen(**waits)}, in_order=False)
    assert message is not None and message.startswith("rank 0 has skipped a reduce")


def test_heartbeat_compares_kin_alone() -> None:
    """Only the last stage merges in a pipeline whose head is on the last stage."""
    first, second = heartbeats()
    first.in_order = second.in_order = False
    for each in (first, second):
        each.step = 1
    with watched_by(second.place), in_phase("merge"):
        second._send_beat()
    with watched_by(first.place), in_phase("update"):
        first._read_beats()
        assert first._find_skipped() is not None
        second.kin = 1
        second._send_beat()
        first._read_beats()
        assert first._find_skipped() is None


def test_guard_ends_a_rank_whose_store_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = heartbeats(0.2)
    said: list[str | None] = []

    def die(explain) -> None:
        said.append(explain())
        first.closed.set()

    monkeypatch.setattr(first, "_die", die)
    first._answered_at = time.monotonic()
    began = time.monotonic()
    first._guard_store()
    # Late on a busy machine; a guard that waits for the store would never come back.
    assert 0.2 <= time.monotonic() - began < 20
    assert said[0] is not None and "rank 0, which holds the store" in said[0]
    first.is_launchers_store = True
    assert "the launcher's store is gone" in str(first._describe_lost_store("no answer for 1 s"))
