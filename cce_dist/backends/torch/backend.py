"""The backend in chunked eager torch: any device, fp32, bf16, fp16, float64."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from cce_dist.backends.protocol import (
    AddLateTargets,
    BackwardRequest,
    ColumnFilter,
    ExpectedBackward,
    ForwardOfHeads,
    ForwardRequest,
    PairsGrads,
    PairsRequest,
    Room,
    Scores,
    Traits,
)
from cce_dist.backends.torch import forward as torch_forward
from cce_dist.backends.torch.backward import gradients, invariant_gradients
from cce_dist.backends.torch.filter import ColumnMask, ColumnMasses, keep_columns
from cce_dist.backends.torch.pairs import pair_gradients, pair_logits
from cce_dist.backends.torch.pick import pick
from cce_dist.backends.torch.screened import screened_statistics
from cce_dist.backends.torch.top import top
from cce_dist.core.observer import same_by_identity
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, LocalGrads, Picked, Tokens, accumulate_dtype
from cce_dist.vocab_shard import VocabShard


class TorchBackend:
    """Tiles of the logits by torch's operators; nothing is compiled.

    The one store of logits is gradient="in_forward"'s, of a chunk: [N, V_local] in the accumulation
    dtype.
    """

    traits = Traits(
        counts_on_device=False,
        orders_tokens=False,
        chooses_in_forward=False,
        in_forward_filters=False,
        narrow_logits=False,
    )
    merge_kernels = None
    loss_kernels = None
    forward_of_heads: ForwardOfHeads | None = None
    add_late_targets: AddLateTargets | None = None

    def pick(self, ids: Tensor, ignore_index: int, shard: VocabShard) -> Picked:
        return pick(ids, ignore_index)

    def forward(
        self, tokens: Tokens, head: Head, request: ForwardRequest
    ) -> tuple[Stats, ColumnMasses | None]:
        if request.segment:
            return torch_forward.statistics_of_segments(_ready(tokens), head, request), None
        if request.screen is not None:
            return screened_statistics(_ready(tokens), head, request)
        return torch_forward.statistics(_ready(tokens), head, request)

    def keep(
        self,
        tokens: Tokens,
        head: Head,
        scores: Scores,
        lse: Tensor,
        rule: ColumnFilter,
        room: Room,
    ) -> ColumnMask | None:
        assert isinstance(scores, ColumnMasses)
        return keep_columns(_ready(tokens), head, scores, lse, rule, room)

    def backward(self, tokens: Tokens, head: Head, request: BackwardRequest) -> LocalGrads:
        compute = invariant_gradients if request.invariant else gradients
        hidden, bias = compute(_ready(tokens), head, request)
        if hidden is not None and request.hidden is not None:
            hidden = request.hidden.of_tokens(hidden, tokens.rows)
        return LocalGrads(hidden, bias)

    def gains_by_screening(self, num_tokens: int, num_columns: int, dim: int) -> bool:
        # A reference: it computes what it is asked for.
        return True

    def scale(self, grad: Tensor, factor: Tensor) -> None:
        grad.mul_(factor)

    def largest(self, tokens: Tokens, head: Head, room: Room) -> tuple[Tensor, Tensor]:
        return torch_forward.largest(tokens, head, room)

    def top(self, tokens: Tokens, head: Head, room: Room, k: int) -> tuple[Tensor, Tensor]:
        return top(tokens, head, room, k)

    def pair_logits(self, hidden: Tensor, head: Head, request: PairsRequest) -> Tensor:
        return pair_logits(hidden, head, request)

    def pair_gradients(
        self, hidden: Tensor, head: Head, request: PairsRequest, grad: Tensor, out: PairsGrads
    ) -> None:
        pair_gradients(hidden, head, request, grad, out)

    def store_for(
        self,
        head: Head,
        num_tokens: int,
        request: ForwardRequest,
        backward: ExpectedBackward,
        spare: Tensor | None,
    ) -> None:
        return None

    def store_for_chunk(self, head: Head, num_tokens: int) -> Tensor:
        weight = head.weight
        dtype = accumulate_dtype(weight.dtype)
        return weight.new_empty((num_tokens, weight.shape[0]), dtype=dtype)

    def scores_like(
        self, num_tokens: int, num_columns: int, weight: Tensor, *, has_teacher: bool = False
    ) -> None:
        return None

    def warm_up(
        self,
        tokens: Tokens,
        head: Head,
        request: ForwardRequest,
        backward: ExpectedBackward,
        teacher: tuple[Tokens, Head] | None = None,
    ) -> None:
        return None


same_by_identity.append(TorchBackend)


def _ready(tokens: Tokens) -> Tokens:
    """Returns the tokens with hidden gathered, and with int64 targets, by which torch indexes."""
    if tokens.fill is not None:
        tokens.fill()
    return replace(tokens, local_targets=tokens.local_targets.long())
