"""An observer of a call's kernels, side streams, collectives and checks, not torch's operators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Observer(Protocol):
    """Sees the kernels, the side streams and the collectives of the current thread."""

    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        named: dict[str, Any],
        compiled: Any,  # the kernel's binary; None in the interpreter
    ) -> None: ...

    def fork(self, first: bool) -> int:
        """Notes that a side stream waits for the current one, and gets work until `end_fork`.
        Returns the fork's number."""
        ...

    def end_fork(self) -> None: ...

    def join(self, fork: int) -> None:
        """Notes that the current stream waits for the side stream."""
        ...

    def call(
        self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """Calls a collective or a check, notes it, and returns its result."""
        ...

    def enter_phase(self, phase: Any) -> None:
        """Notes that what follows is in a phase of `core.phases`, until `leave_phase`."""
        ...

    def leave_phase(self) -> None: ...


# Classes whose objects are the same for an observer only if they are one object: groups of ranks.
same_by_identity: list[type] = []
# Classes of which an observer compares a part: the function takes it out of an object.
described_by: dict[type, Callable[[Any], tuple[Any, ...]]] = {}
observer: ContextVar[Observer | None] = ContextVar("cce_dist_observer", default=None)


def observed(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Lets an observer call a collective or a check, if there is one."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **named: Arguments.kwargs) -> Result:
        seen_by = observer.get()
        if seen_by is None:
            return function(*args, **named)
        return seen_by.call(function, args, named)

    return call
