"""Running other people's code: a failure is a finding, and must not end the measurement."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAX_REASON_CHARS = 160


class DeviceLostError(RuntimeError):
    """`name` broke the CUDA context; nothing else can run in this process."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason


def describe_failure(error: BaseException) -> str:
    """The exception's type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:MAX_REASON_CHARS]


def recover(name: str, reason: str, device: torch.device) -> None:
    """Frees what the failed method held.

    Raises:
        DeviceLostError: the device takes no more work.
    """
    gc.collect()
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    except RuntimeError:
        raise DeviceLostError(name, reason) from None


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside after `seconds`, between two Python instructions; 0: never."""

    def interrupt(signal_number: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    if not seconds:
        yield
        return
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def restart_without(error: DeviceLostError) -> None:
    """Begins anew in a fresh process: this one's CUDA context is gone."""
    print(f"the device was lost in {error}; starting again without it", file=sys.stderr)
    again = [*sys.argv[1:], "--failed", f"{error.name}={error.reason}"]
    os.execv(sys.executable, [sys.executable, "-m", "cce_dist", *again])
