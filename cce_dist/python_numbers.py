"""Conversion of numeric options, such as numpy's scalars, to Python numbers; no torch."""

from __future__ import annotations

import numbers
import sys
from typing import Any


def python_number(name: str, got: object) -> float | None:
    """Returns a number as an int or a float; None: `got` is no number.

    Numpy's scalars, and tensors and arrays without dims, are converted. For a tensor on a device
    the host waits.

    Raises:
        ValueError: `got` requires grad, and its gradient would be lost; or torch.compile traces,
            for which numpy's scalars are tensors without a value.
    """
    if isinstance(got, bool):
        return None
    loaded = sys.modules.get("torch")
    is_traced = loaded is not None and loaded.compiler.is_compiling()
    if type(got) is int or type(got) is float:
        return constant(got) if is_traced else got
    if is_traced:
        raise ValueError(
            f"{name} must be a Python number within torch.compile: convert it by float(...) "
            "outside of the compiled function"
        )
    if getattr(got, "requires_grad", False):
        raise ValueError(
            f"{name} must not require grad: an option has no gradient; pass it detached"
        )
    kind = str(getattr(got, "dtype", ""))
    if "bool" in kind or "complex" in kind or getattr(got, "ndim", 0) != 0:
        return None
    if isinstance(got, int | float | numbers.Real) or kind:
        is_integer = isinstance(got, numbers.Integral) or "int" in kind
        return int(got) if is_integer else float(got)  # pyright: ignore[reportArgumentType]
    return None


def constant(value: Any) -> Any:
    """Makes a traced number a constant, by a function that the tracer cannot put into its graph;
    returns other values.

    A number that had another value in an earlier call is a symbol, which no operator's key may
    hold.
    """
    if type(value) is float:
        return float.fromhex(value.hex())
    if type(value) is int:
        return len(range(value)) if value >= 0 else -len(range(-value))
    return value


def use_python_numbers(options: Any, *names: str) -> None:
    """Converts these fields of a frozen dataclass to Python numbers, in place.

    Later code compares, prints and compiles them. A field that is no number stays as it is.
    """
    for name in names:
        got = getattr(options, name)
        if got is None or isinstance(got, bool | str) or type(got) is int or type(got) is float:
            continue
        number = python_number(name, got)
        if number is not None:
            object.__setattr__(options, name, number)
