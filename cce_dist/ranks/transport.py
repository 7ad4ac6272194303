"""The transport of a group's collectives: torch.distributed, or an adapter in its place.

No other module distinguishes the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor

from cce_dist.core.observer import observed, same_by_identity

if TYPE_CHECKING:
    from typing import TypeAlias

    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    Group: TypeAlias = "ProcessGroup | RankGroup"

if dist.is_available():
    same_by_identity.append(dist.ProcessGroup)


@runtime_checkable
class RankGroup(Protocol):
    """Ranks that communicate without torch.distributed, as `ranks.mpi.MPIGroup` does.

    Every rank calls the same methods in the same order, with tensors of the same shape and dtype,
    which are contiguous and on `device_type`. A sum has the same bits on every rank.
    """

    device_type: str

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """Gathers every rank's tensor [n, ...] into out [W n, ...], in rank order."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums fp32 or float64 tensors over the ranks, in place."""
        ...

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> None:
        """Sums tensor [W n, ...], fp32 or float64; writes this rank's rows of the sum to out
        [n, ...]."""
        ...

    def all_reduce_logaddexp(
        self,
        records: Tensor,  # [N, K >= 2] fp32 | float64
        numbers: Sequence[int],
    ) -> list[list[int]]:
        """Merges records (base, sum, others...) over the ranks, in place: base + log sum by
        log-add-exp, the others by adding.

        Args: numbers: at most eleven.
        Returns: the `numbers` of every rank, in rank order.
        """
        ...


def adapter_of(group: Group | None) -> RankGroup | None:
    """Returns a group that is not torch's; None: it is torch's, or there is no group.
    `isinstance(group, RankGroup)` would cost 16 us: RankGroup is a runtime-checkable protocol."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return None
    return group  # pyright: ignore[reportReturnType]


def is_over_mpi(group: object) -> bool:
    """Tells whether the group is an MPIGroup. It also works while torch.compile traces: before
    2.13 a tracer cannot check for a protocol's methods."""
    # A caller with an MPIGroup has imported the module.
    adapter = sys.modules.get("cce_dist.ranks.mpi")
    return adapter is not None and isinstance(group, adapter.MPIGroup)


def resolve_group(group: Group | DeviceMesh | None) -> Group | None:
    """Returns the group of a ProcessGroup, of a 1-D DeviceMesh or of a `RankGroup`; None: one rank.

    Raises:
        ValueError: the group has another type, is a mesh of several dims, or does not contain this
            process.
    """
    if group is None:
        return None
    is_torch = dist.is_available() and isinstance(group, dist.ProcessGroup)
    if not is_torch and isinstance(group, RankGroup):
        return group
    if type(group).__module__.partition(".")[0] == "mpi4py":
        raise ValueError(
            f"group must be cce_dist.ranks.mpi.MPIGroup(comm) to run over MPI, got {type(group)}"
        )
    if not dist.is_available():
        raise ValueError("group must be None: this build of torch has no torch.distributed")
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must contain the calling rank, got GroupMember.NON_GROUP_MEMBER")
    if not isinstance(group, dist.ProcessGroup):
        from torch.distributed.device_mesh import DeviceMesh

        if not isinstance(group, DeviceMesh):
            raise ValueError(
                "group must be a ProcessGroup, a 1-D DeviceMesh, an MPIGroup or None, got "
                f"{type(group)}"
            )
        if group.ndim != 1:
            raise ValueError(
                f"group must be one dim of a DeviceMesh, got a mesh of {group.ndim} dims "
                f'{group.mesh_dim_names}: slice it, as in mesh["tp"]'
            )
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError("group must contain the calling rank, got a group of other ranks")
    return group


def process_group(group: Group | DeviceMesh | None, for_what: str) -> ProcessGroup | None:
    """Resolves a group as `resolve_group` does, for callers that need torch.distributed.

    Args: for_what: ends the rule in the error's message, as in "of a pipeline".
    Raises:
        ValueError: `resolve_group` refuses the group, or it is no ProcessGroup.
    """
    resolved = resolve_group(group)
    if adapter_of(resolved) is not None:
        raise ValueError(f"group must be a ProcessGroup {for_what}, got {type(group)}")
    return resolved  # pyright: ignore[reportReturnType]


def group_size(group: Group | None) -> int:
    return 1 if group is None else group.size()


def group_rank(group: Group | None) -> int:
    return 0 if group is None else group.rank()


def _single(name: str, until_2_12: str) -> Callable[..., Any]:
    """Returns a collective on one tensor: torch 2.13 renamed these, and warns of the old names."""
    return getattr(dist, name, None) or getattr(dist, until_2_12)


@observed
def all_gather_into(out: Tensor, tensor: Tensor, group: Group, *, async_op: bool = False) -> Any:
    """Gathers every rank's tensor [n, ...] into out [W n, ...], in rank order.

    Returns: with `async_op` a work whose `wait` waits; None: the gather is done.
    """
    adapter = adapter_of(group)
    if adapter is not None:
        return adapter.all_gather(out, tensor)
    gather = _single("all_gather_single", "all_gather_into_tensor")
    return gather(out, tensor, group=group, async_op=async_op)


@observed
def all_reduce(tensor: Tensor, group: Group) -> None:
    """Sums a tensor over the ranks, in place."""
    adapter = adapter_of(group)
    if adapter is not None:
        adapter.all_reduce(tensor)
    else:
        dist.all_reduce(tensor, group=group)


@observed
def reduce_scatter_into(out: Tensor, tensor: Tensor, group: Group) -> None:
    """Sums tensor [W n, ...] over the ranks, and writes this rank's rows of the sum to out."""
    adapter = adapter_of(group)
    if adapter is not None:
        adapter.reduce_scatter(out, tensor)
    else:
        _single("reduce_scatter_single", "reduce_scatter_tensor")(out, tensor, group=group)


def device_of_numbers(group: Group | None) -> str:
    """Returns a device type from which every rank of the group can send numbers."""
    adapter = adapter_of(group)
    if adapter is not None:
        return adapter.device_type
    on_cpu = group is None or "gloo" in dist.get_backend(group)  # pyright: ignore[reportArgumentType]
    return "cpu" if on_cpu else "cuda"
