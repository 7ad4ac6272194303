"""Sends and receives between neighbouring stages, in both directions."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cce_dist.pipeline.comm.courier import Courier, Wait
from cce_dist.pipeline.comm.groups import connect_neighbours, make_couriers


class Neighbours:
    """Connections to the next rank and to the rank before, to send and to receive.

    Both ranks must start the transfers of one direction in the same order. The directions do not
    wait for each other, and a sender does not wait for its receiver while other ranks need it.

    Args:
        ranks: the pipeline's ranks, with this one.
        paced: see `PipelineHead`.
    Collectives: makes two groups of all ranks, or with `paced` up to eight of two ranks each:
        every rank of the job makes its `Neighbours` at the same time.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        device: torch.device,
        timeout: datetime.timedelta,
        *,
        paced: bool,
    ) -> None:
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        near = [x for x in (self.rank - 1, self.rank + 1) if 0 <= x < self.size]
        # For each neighbour's place: a courier for each direction, forward first.
        self._couriers: dict[int, list[Courier]] = {}
        if not paced:
            both = make_couriers(ranks, 2, timeout, device, paced=False)
            for courier in both:
                connect_neighbours(courier.group, near, device)
            self._issuers, self._couriers = both, dict.fromkeys(near, both)
            return
        self._issuers = []
        # Pairs of neighbours: in each round every rank is in at most one pair.
        for first in (0, 1):
            left = self.rank - (self.rank - first) % 2
            pair = [x for x in (left, left + 1) if 0 <= x < self.size]
            both = make_couriers([ranks[x] for x in pair], 2, timeout, device, paced=True)
            self._issuers += both
            for courier in both:
                connect_neighbours(courier.group, range(len(pair)), device)
            self._couriers |= dict.fromkeys((x for x in pair if x != self.rank), both)

    def send(self, tensor: Tensor, *, forward: bool) -> Wait:
        """Starts to send a tensor to the next rank (forward), or to the rank before.

        Returns: a function that waits until the tensor is sent. It must not change before that.
        """
        target = self.rank + (1 if forward else -1)
        courier, peer = self._courier(target, forward)
        return courier.issue(lambda: dist.isend(tensor, group=courier.group, group_dst=peer))

    def receive(self, tensor: Tensor, *, forward: bool, after: Any = None) -> Wait:
        """Starts to receive from the rank before (forward), or from the next rank.

        Args: after: an event behind the last use of the tensor, as in `Courier.issue`.
        Returns: a function that waits until the tensor has arrived.
        """
        source = self.rank - (1 if forward else -1)
        courier, peer = self._courier(source, forward)
        receive = functools.partial(dist.irecv, tensor, group=courier.group, group_src=peer)
        return courier.issue(receive, after)

    def close(self) -> None:
        """Destroys the groups that the constructor made."""
        for courier in self._issuers:
            courier.close()

    def _courier(self, other: int, forward: bool) -> tuple[Courier, int]:
        """Returns the courier to a neighbour, and the neighbour's rank in its group."""
        courier = self._couriers[other][not forward]
        peers = dist.get_world_size(courier.group)
        return courier, other if peers == self.size else int(other > self.rank)
