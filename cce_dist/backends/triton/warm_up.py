"""Before the first call of a kind: the kernels of forward and backward are compiled in parallel."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import (
    BackwardRequest,
    ExpectedBackward,
    ForwardRequest,
    HiddenSum,
    LateTargets,
    LogitStore,
    Mixture,
    Room,
    TeacherPart,
    WeightGrad,
)
from cce_dist.backends.triton import grads as triton_grads
from cce_dist.backends.triton.backward.late_targets import add_late_targets
from cce_dist.backends.triton.filter.kept_logits import KeptLogits, tiles_in
from cce_dist.backends.triton.filter.lists import ListedLogits
from cce_dist.backends.triton.filter.marks import Marks, blocks_padded, keep, order_dtype
from cce_dist.backends.triton.launch.start import compile_together
from cce_dist.backends.triton.launch.tiles import is_wide, tiles_for
from cce_dist.backends.triton.stats import forward
from cce_dist.backends.triton.teacher.forward import forward_of_heads
from cce_dist.backends.triton.tokens import loss
from cce_dist.core.types import Head, Tokens, Upstream
from cce_dist.options import TOKEN_BLOCK


@dataclass(frozen=True)
class NoSum:
    """A stand-in for the sum over ranks, which communicates nothing."""

    is_local: bool
    part_dtype: torch.dtype

    def start(
        self, part: Tensor, *, finish: Callable[[], object] = lambda: None
    ) -> Callable[[], Tensor]:
        finish()
        return lambda: part

    def of_tokens(self, part: Tensor, rows: Tensor | None) -> Tensor:
        return part


def warm_up(
    tokens: Tokens,
    head: Head,
    request: ForwardRequest,
    backward: ExpectedBackward,
    teacher: tuple[Tokens, Head] | None = None,
) -> None:
    """Compiles the kernels of a loss and of its gradients in parallel, the first time.

    Binaries don't depend on the number of tokens, so a few tokens will do. Nothing is read or
    written. The kernels of rarer calls, with gradients of statistics or an exchange of bounds, are
    compiled at their first launch.
    """
    weight, num_blocks = head.weight, max(1, triton.cdiv(len(tokens), TOKEN_BLOCK))
    hidden = backward.hidden
    kind = None if hidden is None else (hidden.is_local, hidden.part_dtype)
    rule, store = request.filter, request.store
    # Kernels take the threshold as a number. Sizes of memory choose binaries where `exact` computes
    # all columns in one chunk, and where it has kept the logits of all.
    key = (
        *_traits(tokens, head),
        *(None if teacher is None else _traits(*teacher), tokens.scale is None),
        *(request.wanted, request.screen, type(store), rule and replace(rule, threshold=1.0)),
        *(request.reverse, request.mixture is not None),
        *(kind, replace(backward, hidden=None)),
        *(num_blocks > 1, order_dtype(len(tokens)), blocks_padded(num_blocks)),
        rule is None and _holds_all(request.room, weight, num_blocks),
        isinstance(store, KeptLogits) and store.first_column == 0,
    )
    hidden = None if kind is None else NoSum(*kind)
    request = replace(request, bounds=None, room=_room_of_few(request, num_blocks))
    # Without `quantize_once`: an 8-bit copy that other calls share needs real numbers.
    head = replace(head, quantize_once=None)
    go_through = functools.partial(_go_through, tokens, head, request, backward, hidden, teacher)
    compile_together(key, weight.device, go_through)


def _holds_all(room: Room, weight: Tensor, num_blocks: int) -> bool:
    tiles = tiles_in(room.workspace_bytes, weight, num_blocks * TOKEN_BLOCK)
    return tiles * tiles_for(weight).columns >= weight.shape[0]


def _room_of_few(request: ForwardRequest, num_blocks: int) -> Room:
    """Returns room for one chunk of two blocks' lists; for as many chunks of all columns as the
    call has, if nothing is filtered."""
    if request.filter is not None:
        return Room(1)
    return Room(max(1, request.room.workspace_bytes * min(2, num_blocks) // num_blocks))


def _store_of_few(
    few: Tokens, weight: Tensor, request: ForwardRequest, expected: ExpectedBackward
) -> LogitStore | None:
    """Returns a store like the call's. Memory for logits is the call's own: nothing is written."""
    if expected.by_chunks:
        return KeptLogits.make_for_chunk(weight, len(few))
    store = request.store
    return ListedLogits(store.draws) if isinstance(store, ListedLogits) else store


def _traits(tokens: Tokens, head: Head) -> tuple[object, ...]:
    """Returns the facts about a head and its tokens that choose binaries."""
    weight = head.weight
    return (
        *(head.bias is None, head.class_weight is None, head.softcap is None),
        *(weight.device, weight.dtype, weight.shape, weight.stride(), tokens.hidden.stride()),
    )


def _mixture_of_few(
    few: Tokens, head: Head, teacher: tuple[Tokens, Head], request: ForwardRequest
) -> tuple[ForwardRequest, Mixture | None]:
    """Goes through the forwards that a mixture needs before. Returns the request with its part for
    some tokens, and that part."""
    mixture = request.mixture
    if mixture is None:
        return request, None
    alone = replace(request, filter=None, reverse=False, mixture=None)
    lses = (forward(*model, alone)[0].lse for model in ((few, head), teacher))
    if is_wide(head.weight) or is_wide(teacher[1].weight):
        lses = (lse.double() for lse in lses)
    mixture = Mixture(mixture.beta, *lses)
    return replace(request, mixture=mixture), mixture


def _go_through(
    tokens: Tokens,
    head: Head,
    request: ForwardRequest,
    expected: ExpectedBackward,
    hidden: HiddenSum | None,
    teacher: tuple[Tokens, Head] | None,
) -> None:
    few = tokens.slice(0, min(len(tokens), 2 * TOKEN_BLOCK))
    request = replace(request, store=_store_of_few(few, head.weight, request, expected))
    # Binaries depend on the number of tokens through `order_dtype` and `blocks_padded` alone. Which
    # of them a call launches may depend on it, too: all are compiled.
    order_as, part = order_dtype(len(tokens)), None
    if teacher is None:
        stats, marks = forward(few, head, request, order_as=order_as)
    else:
        of_teacher = replace(few, hidden=teacher[0].hidden), teacher[1]
        request, mixture = _mixture_of_few(few, head, of_teacher, request)
        out = forward_of_heads(few, head, of_teacher, request, order_as)
        stats, marks = out.student, out.scores
        of_lse = None if request.reverse else stats.lse
        part = TeacherPart(*of_teacher, out.teacher_lse, of_lse, mixture and mixture.beta)
    kept = None
    if request.filter is not None:
        assert isinstance(marks, Marks)
        marks = replace(marks, blocks_padded=blocks_padded(triton.cdiv(len(tokens), TOKEN_BLOCK)))
        kept = keep(few, head, marks, stats.lse, request.filter, request.room)
    weight = None
    if expected.weight is not None:
        # The shape and alignment of the gradient, without its memory: torch refuses to write to it.
        row = head.weight.new_empty(1, head.weight.shape[1], dtype=expected.weight)
        late = LateTargets(stats.lse, stats.lse, 1, 1) if expected.late_targets else None
        weight = WeightGrad(row.expand(head.weight.shape), expected.accumulate, late)
    if expected.sums_nll:
        loss.KERNELS.total(stats.lse, stats.target_logit, stats.lse[:1])
        loss.KERNELS.share_gradient(stats.lse[0], stats.lse, stats.lse[:1])
    entropy = stats.lse if request.reverse else None
    of_lse = stats.lse if expected.of_lse else None
    of_nll = stats.lse if expected.of_nll else None
    upstream = Upstream(of_nll, of_lse, stats.smooth_logit, entropy)
    backward_request = BackwardRequest(
        stats=replace(stats, entropy=entropy),
        upstream=upstream,
        kept=kept,
        hidden=hidden,
        weight=weight,
        bias=expected.bias,
        store=request.store,
        room=request.room,
        teacher=part,
    )
    triton_grads.backward(few, head, backward_request)
    if expected.by_chunks and weight is not None:
        # The chunks after the first.
        later = replace(backward_request, weight=replace(weight, accumulate=True))
        triton_grads.backward(few, head, later)
        if expected.late_targets:
            add_late_targets(few, stats.lse, weight.rows)
    for dtype in expected.scaled:
        row = head.weight.new_empty(head.weight.shape[1], dtype=dtype)
        triton_grads.scale(row, stats.lse[0])
