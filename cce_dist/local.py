"""Which backend computes this rank's shard: one decision, in one function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from cce_dist import local_torch, local_torch_filter, local_torch_grads
from cce_dist.options import Backend
from cce_dist.partials import Head, Kept, LocalGrads, Needs, Scores, Stats, Tokens, Upstream, Wanted


class LocalStats(Protocol):
    """See `cce_dist.local_torch.local_stats`."""

    def __call__(
        self,
        tokens: Tokens,
        head: Head,
        *,
        wanted: Wanted,
        score: bool,
        score_largest: bool,
        workspace_bytes: int,
        keep_logits: Tensor | None = None,
    ) -> tuple[Stats, Scores | None]: ...


class LocalKept(Protocol):
    """See `cce_dist.local_torch_filter.local_kept`."""

    def __call__(
        self,
        tokens: Tokens,
        head: Head,
        scores: Scores,
        lse: Tensor,
        *,
        threshold: float,
        by_largest: bool,
        tail: bool,
        workspace_bytes: int,
    ) -> Kept | None: ...


class LocalGradients(Protocol):
    """See `cce_dist.local_torch_grads.local_grads`."""

    def __call__(
        self,
        tokens: Tokens,
        head: Head,
        lse: Tensor,
        upstream: Upstream,
        *,
        entropy: Tensor | None,
        kept: Kept | None,
        needs: Needs,
        grad_weight: Tensor | None,
        accumulate: bool,
        workspace_bytes: int,
        logits: Tensor | None = None,
    ) -> LocalGrads: ...


@dataclass(frozen=True)
class LocalBackend:
    """The functions of one backend, on one rank's shard, without communication."""

    stats: LocalStats
    kept: LocalKept
    grads: LocalGradients


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
