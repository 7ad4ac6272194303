"""A rank's place, in memory that ranks of the same host can read even after the rank was killed.

A beat in the store is up to an interval old, and a killed rank sends no further beat. The memory
is an anonymous file that others open by /proc/PID/fd (Linux). It starts with a token that the
rank's beats also have. Equal tokens prove that the process is the rank: another process may have
the same number, after the rank has ended or in another container.
"""

from __future__ import annotations

import mmap
import os
import secrets
import signal
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass

# Phases that every rank of a layout begins equally often, in the order of a step.
COUNTED = ("step", "forward", "merge", "backward", "reduce", "update", "checkpoint")
TEXT_BYTES = 128
TOKEN_BYTES = 16
_RECORD = struct.Struct(f"<{TOKEN_BYTES}sq{len(COUNTED)}q{TEXT_BYTES}s")


@dataclass(frozen=True)
class Seen:
    """A rank's place at the time of reading. `counts` is in the order of COUNTED."""

    step: int
    phase: str
    counts: Sequence[int]

    def __str__(self) -> str:
        return f"step {self.step} ({self.phase})"

    def count(self, phase: str) -> int:
        """Returns how often the rank has begun the phase."""
        return self.counts[COUNTED.index(phase)]


class Place:
    """A watcher of `core.phases`: this rank's step, and the phases that its threads are in.

    `phase` is the rank's phase while no thread is in a phase.
    """

    def __init__(self) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.file = os.memfd_create("cce_dist_place") if hasattr(os, "memfd_create") else None
        self._memory = None
        if self.file is not None:
            os.ftruncate(self.file, _RECORD.size)
            self._memory = mmap.mmap(self.file, _RECORD.size)
        self._lock = threading.Lock()
        self._step, self._phase = 0, "starting"
        self._open: dict[int, list[str]] = {}
        self._counts = [0] * len(COUNTED)
        # The phase in which an error began; None again when another phase begins. The rank leaves
        # the phase before it reports the error.
        self._failed_in: str | None = None
        # An error of another thread than the main thread, which may not notice it for long.
        self.thread_error: BaseException | None = None
        self._write()

    @property
    def step(self) -> int:
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        with self._lock:
            self._step = step
            self._counts[COUNTED.index("step")] += 1
            self._write()

    @property
    def phase(self) -> str:
        return self._phase

    @phase.setter
    def phase(self, phase: str) -> None:
        with self._lock:
            self._phase, self._failed_in, self.thread_error = phase, None, None
            self._write()

    @property
    def seen(self) -> Seen:
        with self._lock:
            return Seen(self._step, self._text(), tuple(self._counts))

    def enter(self, phase: str, begins: bool) -> None:
        with self._lock:
            phases = self._open.setdefault(threading.get_ident(), [])
            # A phase within the same phase counts once.
            if begins and phase in COUNTED and phase not in phases:
                self._counts[COUNTED.index(phase)] += 1
            phases.append(phase)
            if self.thread_error is None:
                self._failed_in = None
            self._write()

    def leave(self, phase: str, error: BaseException | None) -> None:
        with self._lock:
            if error is not None and self._failed_in is None:
                self._failed_in = phase
                if threading.current_thread() is not threading.main_thread():
                    self.thread_error = error
            phases = self._open.get(threading.get_ident(), [])
            if phases:
                phases.pop()
            if not phases:
                self._open.pop(threading.get_ident(), None)
            self._write()

    def _text(self) -> str:
        if self._failed_in is not None:
            return self._failed_in
        innermost = dict.fromkeys(phases[-1] for phases in self._open.values() if phases)
        return ", ".join(innermost) or self._phase

    def _write(self) -> None:
        if self._memory is not None:
            text = self._text().encode()[:TEXT_BYTES]
            # Write in one piece: a reader or a SIGKILL may come at any time.
            self._memory[:] = _RECORD.pack(self.token, self._step, *self._counts, text)


class SeenPlace:
    """Another rank's Place, from a process of the same host.

    Raises:
        OSError: the process is not on this host, or has no memory with this token.
    """

    def __init__(self, pid: int, file: int, token: bytes) -> None:
        self.pid, self.file, self.token = pid, file, token
        # Map the memory now: the mapping outlives the process.
        self._memory = self._map()

    @property
    def seen(self) -> Seen:
        _, step, *counts, text = _RECORD.unpack(self._memory[:])
        phase: bytes = text.rstrip(b"\0")
        return Seen(step, phase.decode(errors="replace"), counts)

    @property
    def state(self) -> str:
        """The process's state: "gone", "stopped" or "running"."""
        try:
            self._map().close()
            with open(f"/proc/{self.pid}/stat") as file:
                # The process's name, in parentheses, may contain spaces.
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            return "gone"
        return {"T": "stopped", "t": "stopped", "Z": "gone", "X": "gone"}.get(state, "running")

    def kill(self) -> bool:
        """Kills the process; returns False if it was gone."""
        try:
            handle = os.pidfd_open(self.pid)
        except OSError:
            return False
        try:
            # While the handle is open, it means the same process. Is that process the rank?
            self._map().close()
            signal.pidfd_send_signal(handle, signal.SIGKILL)
        except OSError:
            return False
        finally:
            os.close(handle)
        return True

    def _map(self) -> mmap.mmap:
        file = os.open(f"/proc/{self.pid}/fd/{self.file}", os.O_RDONLY | os.O_NONBLOCK)
        try:
            if os.fstat(file).st_size != _RECORD.size:
                raise OSError(f"file {self.file} of process {self.pid} is no rank's place")
            memory = mmap.mmap(file, _RECORD.size, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        if memory[:TOKEN_BYTES] != self.token:
            raise OSError(f"process {self.pid} is no rank of this job")
        return memory
