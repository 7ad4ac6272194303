"""Triton's interpreter without work whose result it has already, or throws away.

It takes most of the tests' time, and most of its own time goes to this.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any


@functools.cache
def speed_up_interpreter() -> None:
    """In this process, from here on: a launch computes the same bits in about half the time.

    Does nothing where Triton is absent, or compiles.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs

    if not knobs.runtime.interpret:
        return
    from triton.runtime import interpreter as triton_interpreter

    interpreter: Any = triton_interpreter
    # Each sum and product of int32 is made in int64 too, and compared with the limits of int32;
    # what was found is looked at with `debug` alone, which the interpreter never sets.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_builtin = _patching_once(interpreter._patch_attr)
    interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype)


def _patching_once(patch: Callable[..., None]) -> Callable[..., None]:
    """Replaces a namespace's builtins by interpreted ones, unless a caller has done so.

    The interpreter's own version looks through all of triton.language for them at each call of a
    device function.
    """
    from triton.language.core import is_builtin

    @functools.cache
    def builtins_of(namespace: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(namespace) if is_builtin(member)]

    # Before Triton 3.6 there is no scope: what is replaced stays so.
    def patch_builtin(namespace: Any, builder: Any, *scope: Any) -> None:
        names = builtins_of(namespace)
        # All of them are replaced and restored together.
        if names and not is_builtin(getattr(namespace, names[0])):
            return
        for name in names:
            member = getattr(namespace, name)
            if is_builtin(member):
                patch(namespace, name, member, builder, *scope)

    return patch_builtin


def _remembering(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtype of Triton's; the interpreter's own version makes the whole table anew."""
    remembered = functools.cache(np_dtype)

    def np_dtype_of(dtype: Any) -> Any:
        # A block has its element's. Pointers have no hash.
        scalar = dtype.scalar
        return np_dtype(scalar) if scalar.is_ptr() else remembered(scalar)

    return np_dtype_of
