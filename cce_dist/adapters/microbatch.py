"""The state of a microbatch of `PipelineHead` between its phases, on one rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from cce_dist.autograd import Call
from cce_dist.compute import Finish
from cce_dist.partials import Head, Stats, Tokens


@dataclass
class Microbatch:
    """The state of a microbatch from `post` to `take`."""

    # hidden [..., D], targets [...] int64, and what waits for both; until `statistics`
    posted: tuple[Tensor, Tensor, Callable[[], object]] | None
    step: tuple[Call, Finish, Tokens, Head] | None = None
    scores: Any = None
    merge: Callable[[], Stats] | None = None
    merged: Stats | None = None
    grad_losses: Tensor | None = None  # as targets
    weighed: Callable[[], object] | None = None
    grad: Tensor | None = None  # [N, D] this rank's part, then the sum
    is_taken: bool = False  # here is the last stage
    summed: Callable[[], object] | None = None


P = ParamSpec("P")
R = TypeVar("R")


def plainly(phase: Callable[P, R]) -> Callable[P, R]:
    """Runs a phase without autograd and outside of autocast, which would cast fp32 products."""

    @functools.wraps(phase)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        device: torch.device = args[0].weight.device  # pyright: ignore
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            return phase(*args, **kwargs)

    return run
