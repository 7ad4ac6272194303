"""Groups of pipeline ranks, and their collectives other than the loss's."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from cce_dist.pipeline.comm.courier import Courier, Wait


def make_groups(
    ranks: Sequence[int], count: int, timeout: datetime.timedelta, device: torch.device
) -> list[ProcessGroup]:
    """Makes groups of these ranks in this order, with new communicators and this timeout.

    The caller destroys the groups. Their communicators exist when the function returns. NCCL would
    otherwise make them at the first use, in a thread that may keep other threads from the store
    that all threads need.
    Collectives: every rank of the job calls it at the same time, with the ranks of its own groups;
        no rank is in two lists. One all-gather of the ranks of all groups, the creation of the
        groups, and three collectives of one number. (The members alone could make a group, but
        torch would then name it by the number of groups that a rank is in.)
    """
    groups = _groups(ranks, count, timeout, device.type)
    for group in groups:
        _connect(group, device)
    return groups


def make_couriers(
    ranks: Sequence[int],
    count: int,
    timeout: datetime.timedelta,
    device: torch.device,
    *,
    paced: bool,
) -> list[Courier]:
    """Makes couriers for new groups of `make_groups`.

    Args: paced: the ranks meet on the host before each collective.
    """
    groups = make_groups(ranks, count, timeout, device)
    meetings: list[Any] = [None] * count
    if paced:
        meetings = _groups(ranks, count, timeout, "cpu")
    return [Courier(x, device, met) for x, met in zip(groups, meetings, strict=True)]


def timeout_of(group: ProcessGroup, device: torch.device) -> datetime.timedelta:
    """Returns the time that the group's collectives on this device wait for their ranks."""
    # Only a backend's options tell a timeout in torch.
    return group._get_backend(device).options._timeout


def _groups(
    ranks: Sequence[int], count: int, timeout: datetime.timedelta, device: str
) -> list[ProcessGroup]:
    ranks = list(ranks)
    everywhere: list[list[int]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everywhere, ranks)
    groups: list[ProcessGroup] = []
    backend = None if device == "cuda" else "gloo"
    for members in sorted({tuple(each) for each in everywhere}):
        for _ in range(count):
            options = None if backend else _options(timeout)
            group: Any = dist.new_group(list(members), timeout, backend, options)
            if list(members) == ranks:
                groups.append(group)
    return groups


def _options(timeout: datetime.timedelta) -> Any:
    """Makes the options of an NCCL communicator.

    High priority: torch gives other communicators one of 32 streams, in turns. Two communicators
    on one stream wait for each other, and so do the ranks.
    4 programs: a collective's kernel stays on the device until all ranks have come, and each of
    its programs, by default up to 32, takes a multiprocessor from the stages. With 4 a microbatch
    is sent many times faster than it is computed.
    """
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = 4
    options._timeout = timeout
    return options


def _connect(group: ProcessGroup, device: torch.device) -> None:
    """Runs each kind of collective that the head uses, once."""
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
    """Makes communicators between stages on these ranks of the group, both ways.

    NCCL would otherwise make them at the first use, and may then wait for all work on the device.
    That work may include a collective of the head whose other ranks wait for the tensor to be
    sent. torch uses a communicator of two ranks for a send alone, and the group's communicator for
    sends with receives.
    Collectives: a number each way between this rank and each neighbour, twice. All ranks of the
        group call it at the same time; a neighbour of this rank has this rank as a neighbour.
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


def start_broadcast(root: int, courier: Courier, *tensors: Tensor) -> Wait:
    """Starts to copy rank `root`'s tensors into every rank's. Returns: a function that waits."""

    def broadcast() -> Any:
        works: list[Any] = [
            dist.broadcast(tensor, group=courier.group, group_src=root, async_op=True)
            for tensor in tensors
        ]
        return SimpleNamespace(wait=lambda: [work.wait() for work in works])

    return courier.issue(broadcast)


def start_reduce(root: int, courier: Courier, tensor: Tensor) -> Wait:
    """Starts to sum every rank's tensor into rank `root`'s; other ranks' tensors become undefined.

    Returns: a function that waits.
    """
    group = courier.group
    return courier.issue(lambda: dist.reduce(tensor, group=group, group_dst=root, async_op=True))
