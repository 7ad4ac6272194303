"""Records whose tensors autograd keeps from the forward to the backward, and frees after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from torch import Tensor


class _Slot(Enum):
    TENSOR = "where a tensor was"


def take_apart(record: Any) -> tuple[Any, list[Tensor]]:
    """Returns a dataclass without the tensors in it, nested dataclasses included; and the tensors,
    in order."""
    if isinstance(record, Tensor):
        return _Slot.TENSOR, [record]
    if not _has_fields(record):
        return record, []
    values, tensors = {}, []
    for field in fields(record):
        values[field.name], field_tensors = take_apart(getattr(record, field.name))
        tensors += field_tensors
    return replace(record, **values), tensors


def put_together(record: Any, tensors: Iterator[Tensor]) -> Any:
    """Puts tensors back into a record, in the order in which `take_apart` took them out."""
    if record is _Slot.TENSOR:
        return next(tensors)
    if not _has_fields(record):
        return record
    values = {
        field.name: put_together(getattr(record, field.name), tensors) for field in fields(record)
    }
    return replace(record, **values)


def _has_fields(record: Any) -> bool:
    return is_dataclass(record) and not isinstance(record, type)
