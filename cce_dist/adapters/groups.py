"""What pipeline ranks say to each other besides the loss's own collectives."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def own_groups(group: ProcessGroup, count: int, timeout: datetime.timedelta) -> list[ProcessGroup]:
    """Groups of the same ranks in the same order, with communicators and a timeout of their own.

    The caller destroys them. Collectives: every rank of the job calls it at the same time, with the
    group that it is in; one all-gather of the ranks of all groups, then their creation. (A group
    can be made by its members alone, but torch then names it by how many groups a rank is in.)
    """
    ranks = dist.get_process_group_ranks(group)
    everywhere: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, ranks)
    own: list[ProcessGroup] = []
    for members in sorted({tuple(each) for each in everywhere}):
        for _ in range(count):
            made = dist.new_group(list(members), timeout=timeout)
            if list(members) == ranks:
                assert isinstance(made, ProcessGroup)
                own.append(made)
    return own


def start_broadcast(tensor: Tensor, root: int, group: ProcessGroup) -> Callable[[], object]:
    """Rank `root`'s tensor into every rank's. Returns: what waits for it."""
    work: Any = dist.broadcast(tensor, group=group, group_src=root, async_op=True)
    return work.wait


def start_reduce(tensor: Tensor, root: int, group: ProcessGroup) -> Callable[[], object]:
    """The sum of every rank's tensor into rank `root`'s; what the others hold then is undefined.
    Returns: what waits for it."""
    work: Any = dist.reduce(tensor, group=group, group_dst=root, async_op=True)
    return work.wait
