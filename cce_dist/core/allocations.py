"""Measurement of the tensor memory that a piece of code allocates, on any device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Tensor storage allocated inside `track_allocations`, in bytes and elements.

    Storage that existed before is not counted. `live_bytes` falls when storage is freed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest_numel = self.peak_bytes = self.live_bytes = 0
        self._seen: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._see((*args, *kwargs.values()), is_new=False)
        out = func(*args, **kwargs)
        self._see((out,), is_new=True)
        return out

    def _see(self, values: Iterable[Any], *, is_new: bool) -> None:
        for tensor in _tensors_in(values):
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes() if is_new else 0
            if key in self._seen or not storage.nbytes():
                continue
            # New storage may have the address of storage that was freed, whose key must go.
            self._seen[key] = weakref.finalize(storage, self._free, key, num_bytes)
            self.largest_numel = max(self.largest_numel, num_bytes // tensor.element_size())
            self.live_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.pop(key, None)
        self.live_bytes -= num_bytes


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
    with Allocations() as allocations:
        yield allocations
