"""The memories of a recording: where each lies in a play, and which of them share room."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

# Smaller memories share one allocation.
LARGE = 2**23
ALIGNMENT = 512


@dataclass(eq=False)
class Memory:
    """The memory of one storage of a recording.

    Args:
        base: the number of the tensor of a play that it lies in.
        start: the byte of that tensor at which it begins.
        born: the number of the step that needs it first; -1: the call's argument.
        num_bytes: of an argument, its elements' alone.
        last_use: the number of the last step that needs it.
        layout: as the call has allocated it; None: an argument, or an operator's result.
        zeroed_by: the number of the step that fills all of it with zeros.
    """

    base: int
    start: int = 0
    born: int = -1
    num_bytes: int = 0
    last_use: int = -1
    layout: Layout | None = None
    zeroed_by: int | None = None


class Layout(NamedTuple):
    """The arguments of `torch.empty_strided`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Place(NamedTuple):
    """A tensor within a memory."""

    memory: Memory
    offset: int  # bytes
    layout: Layout


def share(memories: Iterable[Memory], base: int, start: int) -> int:
    """Places memories in one allocation, from byte `start` on, so that two that are in use at once
    lie apart. Returns the allocation's end."""
    end = start
    placed: list[Memory] = []
    for memory in sorted(memories, key=lambda each: -each.num_bytes):
        at = start
        for other in sorted(placed, key=lambda each: each.start):
            apart = other.last_use < memory.born or memory.last_use < other.born
            if not apart and at + memory.num_bytes > other.start:
                at = max(at, other.start + aligned(other.num_bytes))
        memory.base, memory.start = base, at
        placed.append(memory)
        end = max(end, at + aligned(memory.num_bytes))
    return end


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
