"""Records of tensors: dataclasses and named tuples."""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.core.observer import same_by_identity

# Records whose tensors a caller gets as gradients: each has an allocation of its own.
handed_out: list[type] = []


@cache
def names_of(kind: type) -> tuple[str, ...] | None:
    """Returns the fields of a dataclass or of a named tuple; None for other classes."""
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return getattr(kind, "_fields", None)


class View(NamedTuple):
    """A tensor within an allocation of bytes."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def of(self, memory: Tensor) -> Tensor:
        start = memory.storage_offset() + self.offset
        flat = memory.view(self.dtype)
        return flat.as_strided(self.shape, self.stride, start // self.dtype.itemsize)


@dataclass(eq=False)
class Packing:
    """Which tensors of a `Packed` lie in its allocation."""

    num_bytes: int
    parts: tuple[View | None, ...]  # None: the tensor is apart

    def pack(self, tensors: tuple[Tensor, ...]) -> Packed:
        """Copies tensors into one allocation."""
        memory = tensors[0].new_empty(self.num_bytes, dtype=torch.uint8)
        apart = []
        for part, tensor in zip(self.parts, tensors, strict=True):
            apart += [tensor] if part is None else []
            if part is not None:
                part.of(memory).copy_(tensor)
        return Packed((memory, *apart), self)


same_by_identity.append(Packing)


class Packed(NamedTuple):
    """Tensors that a recording may keep in one allocation: it is faster to make, and for autograd
    to save."""

    tensors: tuple[Tensor, ...]  # with a packing its allocation first, then those apart
    packing: Packing | None = None

    def unpacked(self) -> tuple[Tensor, ...]:
        if self.packing is None:
            return self.tensors
        memory, *apart = self.tensors
        rest = iter(apart)
        return tuple(next(rest) if x is None else x.of(memory) for x in self.packing.parts)
