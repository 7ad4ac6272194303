"""Signals: Ctrl-C and SIGTERM ask the loop to save and stop; a second Ctrl-C ends it at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# torchrun may pass a single Ctrl-C on more than once within moments.
SAME_KEYPRESS_S = 1.5


def end_at_once() -> None:
    """Restores the signals' default action, for work without results to save.

    Python's handler of Ctrl-C would wait for the training of a vocabulary, which may take minutes.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


class StopRequest:
    """A request to stop: true once a signal has come while `listening`."""

    def __init__(self) -> None:
        self.received_at: float | None = None

    def __bool__(self) -> bool:
        return self.received_at is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listens for signals, in the main thread only."""
        for number in SIGNALS:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            end_at_once()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received_at is None:
            self.received_at = now
        elif number == signal.SIGINT and now - self.received_at > SAME_KEYPRESS_S:
            os._exit(128 + number)
