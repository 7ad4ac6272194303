"""The phase of a step that this process is in, for those who watch over ranks.

The loss tells of `merge` and `reduce`, where it talks to other ranks; a training job adds phases
of its own. Nothing travels, and no device waits. Watchers are the process's, not a thread's:
autograd and pipelines have threads of their own. A CUDA graph tells of its phases when it is
captured, not when it replays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Is called on the thread that is in the phase. An exception is raised there."""

    def enter(self, phase: str, begins: bool) -> None:
        """`begins` is False where a phase that was begun before is waited for."""

    def leave(self, phase: str, error: BaseException | None) -> None:
        """Also after an `enter` that raised."""


_watchers: tuple[Watcher, ...] = ()


@contextmanager
def watched_by(watcher: Watcher) -> Iterator[None]:
    """Tells `watcher` of every phase of this process. The newest watcher is told first."""
    global _watchers
    _watchers = (watcher, *_watchers)
    try:
        yield
    finally:
        _watchers = tuple(each for each in _watchers if each is not watcher)


def in_phase(name: str, *, begins: bool = True) -> _Phase:
    """A context, or a decorator of a function, that is phase `name` of a step."""
    return _Phase(name, begins)


class _Phase(ContextDecorator):
    """Holds no state of an entry, since a decorated function may run on several threads."""

    def __init__(self, name: str, begins: bool) -> None:
        self.name, self.begins = name, begins

    def __enter__(self) -> None:
        told: list[Watcher] = []
        try:
            for watcher in _watchers:
                told.append(watcher)
                watcher.enter(self.name, self.begins)
        except BaseException as error:
            for watcher in told:
                watcher.leave(self.name, error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for watcher in _watchers:
            watcher.leave(self.name, error)
