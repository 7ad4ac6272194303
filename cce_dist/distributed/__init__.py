"""Joining the ranks of a job, whoever started them: device, process groups, device mesh.

    ranks = init(tp=2)
    loss = linear_cross_entropy(hidden, weight, targets, group=ranks.tp_group)
    ...
    leave(ranks)

docs/guide/ranks.md lists the launchers. All ranks call `init`, `join`, `leave`, `own_group` alike.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cce_dist.distributed.joining import Ranks, World, init, join, leave, own_group, split_ranks
    from cce_dist.distributed.launchers import LaunchError, rank_from_environment, read_launch
    from cce_dist.distributed.rendezvous import JoinError

__all__ = [
    "JoinError",
    "LaunchError",
    "Ranks",
    "World",
    "init",
    "join",
    "leave",
    "own_group",
    "rank_from_environment",
    "read_launch",
    "split_ranks",
]


def __getattr__(name: str) -> Any:
    # Late: `joining` imports torch, and `launchers` serves commands that start without torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cce_dist.distributed import joining, launchers, rendezvous

    modules = (joining, launchers, rendezvous)
    return next(getattr(module, name) for module in modules if hasattr(module, name))
