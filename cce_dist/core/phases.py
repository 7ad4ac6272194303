"""The phase of a step that this process is in, for code that watches over ranks.

The loss reports the phases `merge` and `reduce`, in which it talks to other ranks, and none without
a group; a training job adds phases. A report sends nothing, and no device waits for it. Watchers
belong to the process, not to a thread: autograd and pipelines run threads. A CUDA graph reports its
phases when it is captured, not when it is replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Protocol

from cce_dist.core.observer import observer


class Watcher(Protocol):
    """An observer, called on the thread that is in the phase; its exceptions are raised there."""

    def enter(self, phase: str, begins: bool) -> None:
        """Notes that a phase is entered.

        Args: begins: False if the phase began earlier, and the process now waits for its end.
        """

    def leave(self, phase: str, error: BaseException | None) -> None:
        """Notes that a phase is left, also if `enter` raised."""


_watchers: tuple[Watcher, ...] = ()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Reports every phase of this process to `watcher`, to the newest watcher first."""
    global _watchers
    _watchers = (watcher, *_watchers)
    try:
        yield
    finally:
        _watchers = tuple(each for each in _watchers if each is not watcher)


def in_phase(name: str, *, begins: bool = True) -> _Phase:
    """Makes a context, or a decorator of a function, of phase `name` of a step."""
    return _Phase(name, begins)


class _Phase(ContextDecorator):
    """A phase; it has no state of an entry: a decorated function may run on several threads."""

    def __init__(self, name: str, begins: bool) -> None:
        self.name, self.begins = name, begins

    def __enter__(self) -> None:
        seen_by = observer.get()
        if seen_by is not None:
            seen_by.enter_phase(self)
        entered: list[Watcher] = []
        try:
            for watcher in _watchers:
                entered.append(watcher)
                watcher.enter(self.name, self.begins)
        except BaseException as error:
            for watcher in entered:
                watcher.leave(self.name, error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        seen_by = observer.get()
        if seen_by is not None:
            seen_by.leave_phase()
        for watcher in _watchers:
            watcher.leave(self.name, error)
