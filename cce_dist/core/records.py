"""Records of tensors: dataclasses and named tuples."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from functools import cache


@cache
def names_of(kind: type) -> tuple[str, ...] | None:
    """Returns the fields of a dataclass or of a named tuple; None for other classes."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return getattr(kind, "_fields", None)
