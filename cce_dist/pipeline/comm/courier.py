"""Collectives that start on the devices of all ranks at once.

An NCCL kernel that waits for other ranks holds multiprocessors. A matrix product that is laid out
for all multiprocessors takes up to twice as long beside such a kernel. So ranks that are at
different microbatches meet on the host first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

Collective = Callable[[], Any]  # issues a collective; returns an object with `wait`
Wait = Callable[[], object]

JOIN_SECONDS = 5.0


@dataclass
class _Job:
    collective: Collective
    ready: Any  # event after the work that made its inputs, and after the last use of its outputs
    issued: threading.Event = field(default_factory=threading.Event)
    work: Any = None


def mark(device: torch.device) -> Any:
    """Records an event behind all work on the current stream; None without a GPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)
    event.record(torch.cuda.current_stream(device))
    return event


class Courier:
    """An issuer of one group's collectives, in the order of the calls of `issue`.

    Args:
        group: used by this courier alone; `close` destroys it.
        meeting: a group of the same ranks over gloo. A thread then issues each collective, when
            the work on the caller's stream is done and all ranks have reached the collective.
            None: `issue` issues it at once.
    """

    def __init__(
        self, group: ProcessGroup, device: torch.device, meeting: ProcessGroup | None = None
    ) -> None:
        self.group, self._device, self._meeting = group, device, meeting
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def issue(self, collective: Collective, after: Any = None) -> Wait:
        """Starts a collective without waiting.

        Args: after: an event of `mark`; the collective starts after the work before the event.
            None: after all work on the current stream.
        Returns: a function that waits: the host waits until the collective has started, the
            current stream until it ends. It raises the error of `collective` or of the meeting.
        """
        if self._meeting is None:
            return collective().wait
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="cce_dist courier", daemon=True)
            self._thread.start()
        job = _Job(collective, after or mark(self._device))
        self._jobs.put(job)

        def wait() -> None:
            job.issued.wait()
            if job.work is None:
                assert self._error is not None
                raise self._error
            job.work.wait()

        return wait

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(JOIN_SECONDS)
            self._thread = None
        for group in (self.group, self._meeting):
            if group is not None:
                dist.destroy_process_group(group)

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
            # A stream without other work, for which a collective would wait.
            torch.cuda.set_stream(torch.cuda.Stream(self._device, priority=-1))
        number = torch.zeros(1)
        for job in iter(self._jobs.get, None):
            try:
                if self._error is None:
                    if job.ready is not None:
                        job.ready.synchronize()
                    dist.all_reduce(number, group=self._meeting)
                    job.work = job.collective()
            except BaseException as error:  # the caller's wait raises it
                self._error = error
            job.issued.set()
