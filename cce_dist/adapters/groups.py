"""What pipeline ranks say to each other besides the loss's own collectives."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cce_dist.adapters.courier import Courier, Wait


def own_groups(
    ranks: Sequence[int], count: int, timeout: datetime.timedelta, device: torch.device
) -> list[ProcessGroup]:
    """Groups of these ranks in this order, with communicators and a timeout of their own.

    The caller destroys them. Their communicators are there when it returns: NCCL makes them at the
    first use else, in a thread that may then keep the others from the store that all of them need.
    Collectives: every rank of the job calls it at the same time, with the ranks it is among, which
    are none twice; one all-gather of the ranks of all groups, their creation, and three of one
    number. (A group can be made by its members alone, but torch then names it by how many groups a
    rank is in.)
    """
    own = _groups(ranks, count, timeout, device.type)
    for made in own:
        _connect(made, device)
    return own


def own_couriers(
    ranks: Sequence[int],
    count: int,
    timeout: datetime.timedelta,
    device: torch.device,
    *,
    paced: bool,
) -> list[Courier]:
    """Couriers of groups of their own; `paced`: ranks meet before each collective. As
    `own_groups`."""
    groups = own_groups(ranks, count, timeout, device)
    meetings: list[Any] = [None] * count
    if paced:
        meetings = _groups(ranks, count, timeout, "cpu")
    return [Courier(x, device, met) for x, met in zip(groups, meetings, strict=True)]


def timeout_of(group: ProcessGroup, device: torch.device) -> datetime.timedelta:
    """How long a collective of the group waits for its ranks on tensors of this device."""
    # torch hands over none but by a backend's options.
    return group._get_backend(device).options._timeout


def _groups(
    ranks: Sequence[int], count: int, timeout: datetime.timedelta, device: str
) -> list[ProcessGroup]:
    ranks = list(ranks)
    everywhere: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, ranks)
    own: list[ProcessGroup] = []
    for members in sorted({tuple(each) for each in everywhere}):
        for _ in range(count):
            how: dict[str, Any] = {"backend": "gloo"}
            if device == "cuda":
                how = {"pg_options": _options(timeout)}
            made = dist.new_group(list(members), timeout=timeout, **how)
            if list(members) == ranks:
                assert isinstance(made, ProcessGroup)
                own.append(made)
    return own


def _options(timeout: datetime.timedelta) -> Any:
    """Of NCCL's communicators.

    torch gives each of them one of 32 streams, in turns, unless it is of high priority: of two on
    one stream the one waits for the other, and ranks for one another. Their kernels stay on the
    device until all ranks have come, each program on a multiprocessor that is lost to the stages:
    by default up to 32 of them; 4 carry what a microbatch sends many times in the time it takes.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = 4
    options._timeout = timeout
    return options


def _connect(group: ProcessGroup, device: torch.device) -> None:
    """Each kind of collective that is to come, once."""
    number = torch.zeros(1, device=device)
    parts = [torch.zeros_like(number) for _ in range(dist.get_world_size(group))]
    dist.broadcast(number, group=group, group_src=0)
    dist.reduce(number, group=group, group_dst=0)
    dist.all_gather(parts, number, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def connect_neighbours(
    group: ProcessGroup, neighbours: Collection[int], device: torch.device, *, alone: bool = True
) -> None:
    """Communicators for what stages on these ranks of the group send each other, both ways.

    NCCL makes them at the first use else, and may then wait for all that the device has begun: for
    a collective of the head, that is, whose other ranks wait for what is to be sent. torch sends
    alone by a communicator of two ranks, and sends with receives by the group's.
    Collectives: a number each way between this rank and each neighbour, twice. All ranks of the
    group call it at the same time, and are neighbours of theirs.
    """
    rank = dist.get_rank(group)
    mine, theirs = torch.zeros(2, 1, device=device)
    both: list[dist.P2POp] = []
    for peer in sorted(set(neighbours) - {rank}):
        other = dist.get_global_rank(group, peer)
        first, second = (dist.send, dist.recv) if rank < peer else (dist.recv, dist.send)
        for move in (first, second) if alone else ():
            move(mine if move is dist.send else theirs, other, group=group)
        both += [
            dist.P2POp(dist.isend, mine, other, group),
            dist.P2POp(dist.irecv, theirs, other, group),
        ]
    if both:
        for work in dist.batch_isend_irecv(both):
            work.wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _All:
    """Works as one."""

    def __init__(self, works: list[Any]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def start_broadcast(root: int, courier: Courier, *tensors: Tensor) -> Wait:
    """Rank `root`'s tensors into every rank's. Returns: what waits for them."""
    how: dict[str, Any] = {"group": courier.group, "group_src": root, "async_op": True}
    return courier.begin(lambda: _All([dist.broadcast(tensor, **how) for tensor in tensors]))


def start_reduce(root: int, courier: Courier, tensor: Tensor) -> Wait:
    """The sum of every rank's tensor into rank `root`'s; what the others hold then is undefined.
    Returns: what waits for it."""
    how: dict[str, Any] = {"group": courier.group, "group_dst": root, "async_op": True}
    return courier.begin(lambda: dist.reduce(tensor, **how))
