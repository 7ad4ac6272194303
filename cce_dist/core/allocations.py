"""Measurement of the tensor memory that a piece of code allocates, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass
class Allocations:
    """Tensor storage allocated inside `track_allocations`, in bytes and elements.

    Storage that existed before is not counted. `live_bytes` falls when storage is freed.
    """

    largest_numel: int = 0
    peak_bytes: int = 0
    live_bytes: int = 0
    _seen: dict[int, Any] = field(default_factory=dict, repr=False)

    def ignore(self, tensors: Iterator[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            # New storage may have the address of storage that was freed, whose key must go.
            if key not in self._seen and storage.nbytes():
                self._seen[key] = weakref.finalize(storage, self._free, key, 0)

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or storage.nbytes() == 0:
            return
        num_bytes = storage.nbytes()
        self._seen[key] = weakref.finalize(storage, self._free, key, num_bytes)
        self.largest_numel = max(self.largest_numel, num_bytes // tensor.element_size())
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.pop(key, None)
        self.live_bytes -= num_bytes


class _Tracker(TorchDispatchMode):
    def __init__(self, allocations: Allocations) -> None:
        super().__init__()
        self.allocations = allocations

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.allocations.ignore(_tensors_in((*args, *kwargs.values())))
        out = func(*args, **kwargs)
        for tensor in _tensors_in((out,)):
            self.allocations.add(tensor)
        return out


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yields tensors of an operator's arguments or results, which lists and tuples may hold.

    torch's pytree, which knows other containers too, takes half of a small operator's time.
    """
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


@contextmanager
def track_allocations() -> Iterator[Allocations]:
    """Records the tensors that operators return in the context: eager mode, forward and backward.

    Memory that one operator both allocates and frees is not seen.
    """
    allocations = Allocations()
    with _Tracker(allocations):
        yield allocations
