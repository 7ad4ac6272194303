"""Which backend computes this rank's shard: one decision, in one function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cce_dist import local_torch, local_torch_filter, local_torch_grads
from cce_dist.options import Backend
from cce_dist.partials import Kept, LocalGrads, Scores, Stats


@dataclass(frozen=True)
class LocalBackend:
    """What a backend is: three functions on one rank's shard, without communication.

    Their arguments are those of `local_torch.local_stats`, `local_torch_filter.local_kept` and
    `local_torch_grads.local_grads`.
    """

    stats: Callable[..., tuple[Stats, Scores | None]]
    kept: Callable[..., Kept | None]
    grads: Callable[..., LocalGrads]


TORCH = LocalBackend(
    stats=local_torch.local_stats,
    kept=local_torch_filter.local_kept,
    grads=local_torch_grads.local_grads,
)


def choose_backend(backend: Backend) -> LocalBackend:
    """The backend for "auto", "torch" or "triton".

    Raises:
        ValueError: the one asked for by name cannot run; an explicit choice never falls back.
    """
    if backend == "triton":
        raise ValueError(
            'backend="triton" is not part of this version of cce_dist; use backend="torch", or '
            '"auto" to take the fastest one that can run'
        )
    return TORCH
