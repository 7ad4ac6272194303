"""The backend in Triton: each method, and the module that has it."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from cce_dist.backends.protocol import (
    BackwardRequest,
    ExpectedBackward,
    ForwardRequest,
    Traits,
)
from cce_dist.backends.triton.backward.late_targets import add_late_targets
from cce_dist.backends.triton.filter.kept_logits import KeptLogits
from cce_dist.backends.triton.filter.lists import ListedLogits
from cce_dist.backends.triton.filter.marks import Marks, keep
from cce_dist.backends.triton.forward.largest import largest
from cce_dist.backends.triton.grads import backward, scale
from cce_dist.backends.triton.launch.replay import Replayed
from cce_dist.backends.triton.pairs import pair_gradients, pair_logits
from cce_dist.backends.triton.screened.quantize import gains_by_screening, quantize_for
from cce_dist.backends.triton.stats import forward, statistics_of_segments
from cce_dist.backends.triton.teacher.forward import forward_of_heads
from cce_dist.backends.triton.teacher.top import top
from cce_dist.backends.triton.tokens import loss, merge
from cce_dist.backends.triton.tokens.pick import pick_on_device
from cce_dist.backends.triton.warm_up import warm_up
from cce_dist.core.observer import same_by_identity
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, LocalGrads, Picked, Tokens
from cce_dist.vocab_shard import VocabShard


def _forward(
    tokens: Tokens, head: Head, request: ForwardRequest
) -> tuple[Stats, Marks | None, ListedLogits | None]:
    if request.segment:
        return statistics_of_segments(tokens, head, request), None, None
    stats, marks = forward(tokens, head, request)
    return stats, marks, request.store if isinstance(request.store, ListedLogits) else None


def _drop_workspace(tokens: Tokens, head: Head, request: BackwardRequest) -> None:
    if isinstance(request.store, ListedLogits):
        request.store.take_workspace()


_pick = Replayed(pick_on_device)
_forward_and_store = Replayed(_forward)
_backward = Replayed(backward, consume=_drop_workspace)


class TritonBackend:
    """Kernels for bf16, fp16 and fp32 on a GPU, or in Triton's interpreter."""

    traits = Traits(
        counts_on_device=True,
        orders_tokens=True,
        chooses_in_forward=True,
        in_forward_filters=True,
        narrow_logits=True,
    )
    merge_kernels = merge.KERNELS
    loss_kernels = loss.KERNELS

    forward_of_heads = staticmethod(forward_of_heads)
    keep = staticmethod(keep)
    scale = staticmethod(scale)
    add_late_targets = staticmethod(add_late_targets)
    largest = staticmethod(largest)
    top = staticmethod(top)
    scores_like = staticmethod(Marks.like)
    warm_up = staticmethod(warm_up)
    gains_by_screening = staticmethod(gains_by_screening)
    pair_logits = staticmethod(pair_logits)
    pair_gradients = staticmethod(pair_gradients)

    def pick(self, ids: Tensor, ignore_index: int, shard: VocabShard) -> Picked:
        return _pick(ids, ignore_index, shard)

    def forward(
        self, tokens: Tokens, head: Head, request: ForwardRequest
    ) -> tuple[Stats, Marks | None]:
        if request.screen is not None:
            head = head.quantized_by(quantize_for, tokens, request.screen)
        if head.quantize_once is not None:
            head = replace(head, quantize_once=None)
        stats, marks, store = _forward_and_store(tokens, head, request)
        if store is not None and store is not request.store:
            vars(request.store).update(vars(store))
        return stats, marks

    def backward(self, tokens: Tokens, head: Head, request: BackwardRequest) -> LocalGrads:
        return _backward(tokens, head, request)

    def store_for(
        self,
        head: Head,
        num_tokens: int,
        request: ForwardRequest,
        backward: ExpectedBackward,
        spare: Tensor | None,
    ) -> KeptLogits | ListedLogits | None:
        if request.screen is not None:
            assert request.filter is not None
            return ListedLogits(request.filter.draws and backward.hidden is not None)
        return KeptLogits.make(head.weight, num_tokens, request.room.workspace_bytes, spare)

    def store_for_chunk(self, head: Head, num_tokens: int) -> KeptLogits:
        return KeptLogits.make_for_chunk(head.weight, num_tokens)


TRITON = TritonBackend()
same_by_identity.append(TritonBackend)
