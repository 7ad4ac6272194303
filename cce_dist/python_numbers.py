"""Options that are numbers, of whatever kind, as Python's own; no torch."""

from __future__ import annotations

import numbers
import sys
from typing import Any


def python_number(name: str, got: object) -> float | None:
    """An int or a float as it is; numpy's scalars, tensors and arrays without dims as one of these,
    for which a tensor on a device is waited for; None: it is no number.

    Raises:
        ValueError: a gradient would be lost, or torch.compile traces, to which numpy's scalars are
            tensors without a value.
    """
    if isinstance(got, bool):
        return None
    if type(got) is int or type(got) is float:
        return got
    loaded = sys.modules.get("torch")
    if loaded is not None and loaded.compiler.is_compiling():
        raise ValueError(
            f"{name} must be a Python number within torch.compile: pass float(...) of it, made "
            "outside of what is compiled"
        )
    if getattr(got, "requires_grad", False):
        raise ValueError(
            f"{name} must not require grad: an option has no gradient; pass it detached"
        )
    kind = str(getattr(got, "dtype", ""))
    if "bool" in kind or "complex" in kind or getattr(got, "ndim", 0) != 0:
        return None
    if isinstance(got, int | float | numbers.Real) or kind:
        is_whole = isinstance(got, numbers.Integral) or "int" in kind
        return int(got) if is_whole else float(got)  # pyright: ignore[reportArgumentType]
    return None


def use_python_numbers(options: Any, *names: str) -> None:
    """Makes Python's numbers of those fields of a frozen dataclass that are others': what follows
    compares, prints and compiles them."""
    for name in names:
        got = getattr(options, name)
        if got is None or isinstance(got, bool | str) or type(got) is int or type(got) is float:
            continue
        number = python_number(name, got)
        if number is not None:
            object.__setattr__(options, name, number)
