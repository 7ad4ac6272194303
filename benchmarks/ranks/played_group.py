"""A process group of one process: its collectives give results that are known beforehand."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d


@dataclass(frozen=True)
class Asked:
    """A collective that a rank called, and the tensor that it contributed.

    Args:
        kind: "all_gather", "all_reduce" or "reduce_scatter".
        takes_largest: it reduces by the maximum, not by the sum.
    """

    kind: str
    tensor: Tensor
    takes_largest: bool = False

    @property
    def num_bytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    def moved(self, size: int) -> float:
        """Returns the bytes that a rank of `size` sends, by a ring."""
        rounds = {"all_gather": size - 1, "all_reduce": 2 * (size - 1) / size}
        return self.num_bytes * rounds.get(self.kind, (size - 1) / size)


class UnknownResultError(Exception):
    """A collective whose result is not known yet. Args: asked: what the rank contributed."""

    def __init__(self, asked: Asked) -> None:
        super().__init__(f"the result of an {asked.kind} is not known")
        self.asked = asked


class PlayedGroup(dist.ProcessGroup):
    """The place of one rank in a group whose other ranks are not there.

    Args:
        results: of a call's collectives, in their order, for this rank.
        is_whole: a call has no other collectives, so a next call begins with the first again.
    """

    def __init__(self, rank: int, size: int, results: Sequence[Tensor], *, is_whole: bool) -> None:
        super().__init__(rank, size)  # pyright: ignore[reportCallIssue] - a signature of two
        self.results, self.is_whole, self.count = results, is_whole, 0

    def _play(self, kind: str, out: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        operator = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
        takes_largest = operator == dist.ReduceOp.MAX
        if not takes_largest and operator != dist.ReduceOp.SUM:
            raise NotImplementedError(f"ranks are simulated for sums and maxima, got {operator!r}")
        if self.count == len(self.results):
            if not self.is_whole or not self.results:
                tensor = tensor.detach().clone()
                raise UnknownResultError(Asked(kind, tensor, takes_largest))
            self.count = 0
        out.copy_(self.results[self.count].view(out.shape))
        self.count += 1
        future: Any = torch.futures.Future()
        future.set_result([out])
        return vars(_distributed_c10d)["_create_work_from_future"](future)

    # torch.distributed calls these, by its own names.

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._play("all_gather", output, input)

    def _reduce_scatter_base(
        self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None
    ) -> dist.Work:
        return self._play("reduce_scatter", outputTensor, inputTensor, opts)

    # Names from torch 2.13 on.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return self._play("all_reduce", tensors[0], tensors[0], opts)


def results_of(asked: Sequence[Asked]) -> list[Tensor]:
    """Returns a collective's result for each rank. Args: asked: by rank.

    Raises:
        RuntimeError: the ranks called different collectives, or sent tensors of different sizes.
    """
    called = {
        (each.kind, each.takes_largest, each.tensor.shape, each.tensor.dtype) for each in asked
    }
    if len(called) > 1:
        raise RuntimeError(
            f"all ranks must call the same collective, got {sorted(map(str, called))}"
        )
    size, kind, tensors = len(asked), asked[0].kind, [each.tensor for each in asked]
    if kind == "all_gather":
        return [torch.cat(tensors)] * size
    combine = torch.maximum if asked[0].takes_largest else torch.add
    total = functools.reduce(combine, tensors)
    return [total] * size if kind == "all_reduce" else list(total.chunk(size))


class _Maker:
    """Makes the group that is wanted next: torch knows one maker for a backend's name."""

    group: PlayedGroup

    def __call__(self, store: Any, rank: int, size: int, timeout: Any) -> PlayedGroup:
        return self.group


_make = _Maker()


@contextmanager
def played_group(
    rank: int, size: int, results: Sequence[Tensor], device: torch.device, *, is_whole: bool
) -> Iterator[dist.ProcessGroup]:
    """Yields a `PlayedGroup` that torch.distributed knows, in a process that is in no job."""
    # The library sends numbers from a CPU where gloo connects the ranks, else from a GPU.
    name = f"played-{'gloo' if device.type == 'cpu' else 'nccl'}"
    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, _make, devices=["cpu", "cuda"])
    _make.group = PlayedGroup(rank, size, results, is_whole=is_whole)
    dist.init_process_group(name, store=dist.HashStore(), rank=rank, world_size=size)
    try:
        world = dist.group.WORLD
        assert world is not None
        yield world
    finally:
        dist.destroy_process_group()
