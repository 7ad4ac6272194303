"""The memory of a recording's steps: one pool for small memories, one allocation for a pack of the
result, and allocations and releases of large memories between the steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cce_dist.backends.triton.launch.memory import (
    LARGE,
    Layout,
    Memory,
    Place,
    aligned,
    share,
)
from cce_dist.backends.triton.launch.steps import (
    Allocation,
    Launch,
    Pack,
    Release,
    Step,
    Steps,
    Wait,
    Zero,
)
from cce_dist.core.records import Packing, View


def arranged(
    steps: Sequence[Step],
    memories: Sequence[Memory],
    packs: Sequence[Pack],  # of the result
    plain: set[Memory],  # that the result has outside of its packs
) -> tuple[list[Step], int]:
    """Places the memories. Returns the steps, with those that allocate and release; and the number
    of a play's tensors."""
    # The result uses its memories after the last step.
    inner = {memory for memory in memories if memory.last_use < len(steps)}
    pool = len(memories)
    first: list[Step] = []
    for base, pack in enumerate(packs, pool + 1):
        first += _for_pack(pack, base, plain)
    small = [memory for memory in memories if memory in inner and 0 < memory.num_bytes < LARGE]
    zeros = [memory for memory in small if memory.zeroed_by is not None]
    first += _for_pool(pool, small, zeros)
    before: dict[int, list[Step]] = {}
    after: dict[int, list[int]] = {}
    for memory in memories:
        if memory.base >= pool:
            continue
        if memory.layout is not None:
            before.setdefault(memory.born, []).append(Allocation(memory.base, memory.layout))
        if memory in inner:
            after.setdefault(memory.last_use, []).append(memory.base)
    done = {memory.zeroed_by for memory in zeros}
    # An argument that no step uses.
    first += [Release(after[-1])] if -1 in after else []
    for at, step in enumerate([*steps, None]):
        first += before.get(at, [])
        first += [] if step is None or at in done else [step]
        first += [Release(after[at])] if at in after else []
    return _joined(first), pool + 1 + len(packs)


def _for_pool(base: int, small: Sequence[Memory], zeros: Sequence[Memory]) -> list[Step]:
    """Places small memories in one allocation, zeros first. Returns its allocation, and the zeros.

    Others that are not in use at the same time share room.
    """
    end = 0
    for memory in zeros:
        memory.base, memory.start = base, end
        end += aligned(memory.num_bytes)
    others = [x for x in small if x.layout is not None and x.zeroed_by is None]
    total = share(others, base, end)
    steps: list[Step] = []
    if total:
        steps.append(Allocation(base, _bytes(total)))
    if end:
        steps.append(Zero(Place(Memory(base), 0, _bytes(end)), 0))
    return steps


def _for_pack(pack: Pack, base: int, plain: set[Memory]) -> list[Step]:
    """Places small memories of a pack in one allocation, and returns it."""
    end = 0
    for memory in {place.memory: None for place in pack.places}:
        if memory.layout is not None and memory.num_bytes < LARGE and memory not in plain:
            memory.base, memory.start = base, end
            end += aligned(memory.num_bytes)
    if not end:
        return []
    views = (
        View(place.memory.start + place.offset, *place.layout)
        if place.memory.base == base
        else None
        for place in pack.places
    )
    pack.base, pack.packing = base, Packing(end, tuple(views))
    return [Allocation(base, _bytes(end))]


def _bytes(count: int) -> Layout:
    return Layout((count,), (1,), torch.uint8)


def _joined(steps: Sequence[Step]) -> list[Step]:
    """Joins launches, zeros and waits that follow each other."""
    joined: list[Step] = []
    for step in steps:
        if not isinstance(step, Launch | Zero | Wait):
            joined.append(step)
        elif joined and isinstance(joined[-1], Steps):
            joined[-1].steps.append(step)
        else:
            joined.append(Steps([step]))
    return joined
