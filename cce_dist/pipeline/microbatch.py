"""The state of a microbatch of `PipelineHead` between its phases, on one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from cce_dist.algorithm.call import Call
from cce_dist.algorithm.plan import Plan
from cce_dist.backends.protocol import ForwardRequest, Room, Scores
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, Tokens, Wanted
from cce_dist.frontend.reduction import Finish
from cce_dist.ranks.gather import Issue
from cce_dist.ranks.merge import start_merge_stats


@dataclass
class Microbatch:
    """The state of a microbatch from `post` to `take`."""

    # hidden [..., D], targets [...] int64, and a function that waits for both; until `statistics`
    posted: tuple[Tensor, Tensor, Callable[[], object]] | None
    step: tuple[Call, Finish, Tokens, Head] | None = None
    scores: Scores | None = None
    merge: Callable[[], Stats] | None = None
    merged: Stats | None = None
    grad_losses: Tensor | None = None  # of the losses' shape
    weighed: Callable[[], object] | None = None
    grad: Tensor | None = None  # [N, D] this rank's part, then the sum
    is_taken: bool = False  # this rank has the last stage
    summed: Callable[[], object] | None = None


def start_forward(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    *,
    score: bool,
    elsewhere: Head | None,  # some of the other ranks' rows; None: unknown
    issue: Issue,  # issues the merge's collective
) -> tuple[Callable[[], Stats], Scores | None]:
    """Runs `sharded.forward` and starts its merge without waiting.

    Returns: a function that waits for the merge; this rank's scores of its columns.
    """
    request = plan.forward_request(tokens, head, score=score)
    if request.bounds is not None:
        # Ranks are at different microbatches, so they cannot exchange bounds of the same tokens.
        bounds = None
        if elsewhere is not None:
            nobody = torch.full_like(tokens.local_targets, -1)
            room = Room(plan.options.workspace_for(len(tokens)))
            of_others = ForwardRequest(Wanted(), None, None, None, None, room)
            known, _ = plan.backend.forward(
                replace(tokens, local_targets=nobody), elsewhere, of_others
            )
            bound = known.lse / math.log(2)
            bounds = functools.partial(_stack_bounds, bound)
        request = replace(request, bounds=bounds)
    local, scores = plan.backend.forward(tokens, head, request)
    kernels = plan.backend.merge_kernels
    merge = start_merge_stats(local, plan.shard, plan.group, tokens.count, kernels, issue)
    return merge, scores


def _stack_bounds(known: Tensor, local: Tensor) -> Tensor:
    return torch.stack([local, known])


P = ParamSpec("P")
R = TypeVar("R")


def without_autograd(phase: Callable[P, R]) -> Callable[P, R]:
    """Runs a phase without autograd and outside of autocast, which would cast fp32 products."""

    @functools.wraps(phase)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device: torch.device = args[0].weight.device  # pyright: ignore
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return phase(*args, **kwargs)

    return run


def sent_grad(grad_losses: object, like: Tensor) -> Tensor:
    """Returns the gradient that the last stage's rank sends, in the memory layout of `like`, into
    which the others receive it."""
    if not isinstance(grad_losses, Tensor) or grad_losses.shape != like.shape:
        got = list(grad_losses.shape) if isinstance(grad_losses, Tensor) else grad_losses
        raise ValueError(
            f"grad_losses must have the shape of losses, {list(like.shape)}, on the rank of the "
            f"last stage, got {got}"
        )
    return grad_losses.to(like).contiguous()
