"""The backend of a shard without columns, where the other ranks run the Triton backend.

It computes nothing, but takes part in every exchange that the other ranks make.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cce_dist.backends.protocol import (
    BackwardRequest,
    ColumnFilter,
    ForwardRequest,
    Room,
    Scores,
    TeacherStats,
    Traits,
)
from cce_dist.backends.torch.backend import TorchBackend
from cce_dist.backends.torch.forward import statistics, statistics_of_segments
from cce_dist.backends.torch.pick import pick_on_device
from cce_dist.backends.triton.forward.bounds import EXCHANGES
from cce_dist.backends.triton.tokens import loss, merge
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, LocalGrads, Picked, Tokens
from cce_dist.vocab_shard import VocabShard


def _exchange_nothing(tokens: Tokens, head: Head, request: ForwardRequest) -> None:
    if request.bounds is None:
        return
    nothing = head.weight.new_full((len(tokens),), -torch.inf, dtype=torch.float32)
    for _ in EXCHANGES:
        request.bounds(nothing)


def _nothing_of_heads(
    tokens: Tokens, head: Head, teacher: tuple[Tokens, Head], request: ForwardRequest
) -> TeacherStats:
    # One model after the other, after each launch.
    _exchange_nothing(tokens, head, request)
    _exchange_nothing(tokens, head, request)
    zeros = head.weight.new_zeros(len(tokens), dtype=torch.float32)
    nothing = torch.full_like(zeros, -torch.inf)
    kl = zeros if request.mixture is None else zeros.expand(2, -1)
    return TeacherStats(Stats(nothing, zeros), nothing, kl, None, zeros.new_zeros(1))


class EmptyShard(TorchBackend):
    """A shard without columns: no lse, no mass, no gradient. Inherits the other methods."""

    traits = Traits(
        counts_on_device=True,
        orders_tokens=False,
        chooses_in_forward=True,
        in_forward_filters=True,
        narrow_logits=True,
    )
    merge_kernels = merge.KERNELS
    loss_kernels = loss.KERNELS
    forward_of_heads = staticmethod(_nothing_of_heads)

    def pick(self, ids: Tensor, ignore_index: int, shard: VocabShard) -> Picked:
        return pick_on_device(ids, ignore_index)

    def forward(
        self, tokens: Tokens, head: Head, request: ForwardRequest
    ) -> tuple[Stats, Scores | None]:
        _exchange_nothing(tokens, head, request)
        tokens = replace(tokens, local_targets=tokens.local_targets.long())
        if request.segment:
            return statistics_of_segments(tokens, head, request), None
        return statistics(tokens, head, replace(request, filter=None, store=None))

    def keep(
        self,
        tokens: Tokens,
        head: Head,
        scores: Scores,
        lse: Tensor,
        rule: ColumnFilter,
        room: Room,
    ) -> None:
        return None

    def backward(self, tokens: Tokens, head: Head, request: BackwardRequest) -> LocalGrads:
        if tokens.fill is not None:
            tokens.fill()
        zeros, hidden = head.weight.new_zeros, None
        if request.hidden is not None:
            hidden = zeros(tokens.hidden.shape, dtype=request.hidden.part_dtype)
            if not request.hidden.is_local:
                hidden = request.hidden.start(hidden)()
        return LocalGrads(hidden, zeros(0, dtype=torch.float32) if request.bias else None)
