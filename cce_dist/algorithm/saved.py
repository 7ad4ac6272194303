"""Records whose tensors autograd keeps from the forward to the backward, and frees after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cce_dist.core.records import names_of


@dataclass(frozen=True)
class Apart:
    """A record without the tensors in it: its class, and the kind of each field."""

    kind: type
    parts: tuple[Any, ...]  # `Apart`, `TENSOR`, or a value


TENSOR = object()  # stands where a tensor was


def take_apart(record: Any) -> tuple[Any, list[Tensor]]:
    """Returns a dataclass or named tuple without the tensors in it and in its records; and the
    tensors, in order. A record without tensors stays as it is."""
    tensors: list[Tensor] = []
    return _apart(record, tensors), tensors


def _apart(record: Any, tensors: list[Tensor]) -> Any:
    if isinstance(record, Tensor):
        tensors.append(record)
        return TENSOR
    names = names_of(type(record))
    if names is None:
        return record
    before = len(tensors)
    parts = tuple(_apart(getattr(record, name), tensors) for name in names)
    return Apart(type(record), parts) if len(tensors) > before else record


def put_together(record: Any, tensors: Iterator[Tensor]) -> Any:
    """Puts tensors back into a record, in the order in which `take_apart` took them out."""
    if record is TENSOR:
        return next(tensors)
    if type(record) is not Apart:
        return record
    return record.kind(*(put_together(part, tensors) for part in record.parts))
