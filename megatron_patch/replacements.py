"""Functions of Megatron that this process has replaced, until they are put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Replacements:
    """Replaced functions of Megatron's modules and classes."""

    def __init__(self) -> None:
        self._ours: dict[tuple[Any, str], Any] = {}

    def replace(self, owner: Any, name: str, instead: Callable[..., Any]) -> None:
        """Replaces a function, once, by `instead`: it gets the original before the arguments."""
        if (owner, name) in self._ours:
            return
        original = getattr(owner, name)

        @functools.wraps(original)
        def ours(*args: Any, **kwargs: Any) -> Any:
            # If other code has wrapped ours since, ours stays underneath, and ends up here.
            if self._ours.get((owner, name)) is not ours:
                return original(*args, **kwargs)
            return instead(original, *args, **kwargs)

        self._ours[owner, name] = ours
        setattr(owner, name, ours)

    def restore(self) -> None:
        """Puts Megatron's functions back."""
        for (owner, name), ours in self._ours.items():
            if getattr(owner, name) is ours:
                setattr(owner, name, ours.__wrapped__)
        self._ours.clear()
