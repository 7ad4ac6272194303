"""The memory of a recording's steps: one pool for small memories, one allocation for a pack of the
result, and allocations and releases of large memories between the steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    Operator,
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
    plain: set[Memory],  # of the caller's results
    once: Iterable[Memory],  # that the result has for its first reader
) -> tuple[list[Step], int]:
    """Places the memories. Returns the steps, with those that allocate and release; and the number
    of a play's tensors."""
    # The result uses its memories after the last step.
    inner = {memory for memory in memories if memory.last_use < len(steps)}
    pool = len(memories)
    first: list[Step] = []
    for base, pack in enumerate(packs, pool + 1):
        first += _for_pack(pack, base, plain)
    handed = pool + 1 + len(packs)
    first += _one_after_another(handed, [x for x in once if x.base < pool and x not in plain])
    small = [memory for memory in memories if memory in inner and _is_small(memory)]
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
    large = {memory.base for memory in memories if memory.num_bytes >= LARGE}
    return _joined(_together(first, large)), handed + 1


def _is_small(memory: Memory) -> bool:
    return memory.layout is not None and 0 < memory.num_bytes < LARGE


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
    packed = {place.memory: None for place in pack.places if place.memory not in plain}
    allocation = _one_after_another(base, packed)
    if allocation:
        views = (
            View(place.memory.start + place.offset, *place.layout)
            if place.memory.base == base
            else None
            for place in pack.places
        )
        num_bytes = allocation[0].layout.shape[0]
        pack.base, pack.packing = base, Packing(num_bytes, tuple(views))
    return [*allocation]


def _one_after_another(base: int, memories: Iterable[Memory]) -> list[Allocation]:
    """Places the small ones of these memories in one allocation, and returns it, if there are."""
    end = 0
    for memory in filter(_is_small, memories):
        memory.base, memory.start = base, end
        end += aligned(memory.num_bytes)
    return [Allocation(base, _bytes(end))] if end else []


def _bytes(count: int) -> Layout:
    return Layout((count,), (1,), torch.uint8)


def _together(steps: Sequence[Step], large: set[int]) -> list[Step]:
    """Brings the steps of the driver together: allocations come earlier and releases later, where
    the most large memory that is in use at a time stays the same.

    Args: large: the numbers of large tensors.
    """
    out: list[Step] = []
    room = 0  # where an allocation may come: nothing large is released after it
    ended: list[int] = []
    for step in steps:
        if isinstance(step, Release):
            ended += step.bases
        elif isinstance(step, Allocation | Operator):
            is_small = isinstance(step, Allocation) and step.base not in large
            if not is_small and not large.isdisjoint(ended):
                out.append(Release(ended))
                room, ended = len(out), []
            if isinstance(step, Allocation):
                out.insert(room, step)
                room += 1
            else:
                out.append(step)
                # It allocates by itself: a tensor allocated earlier would raise the peak.
                room = len(out)
        else:
            out.append(step)
    return [*out, Release(ended)] if ended else out


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
