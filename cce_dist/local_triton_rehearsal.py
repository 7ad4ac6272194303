"""The first call of its kind: compile what forward and backward will start, side by side."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from torch import Tensor

from cce_dist.local_triton import local_stats
from cce_dist.local_triton_grads import local_grads
from cce_dist.local_triton_launch import can_rehearse, rehearsal
from cce_dist.local_triton_lists import (
    ListedLogits,
    blocks_padded,
    local_kept,
    order_dtype,
)
from cce_dist.local_triton_tiles import interpreted
from cce_dist.options import TOKEN_BLOCK
from cce_dist.partials import Head, StepKind, Tokens, Upstream
from cce_dist.slower import warn_slower

# What distinguishes the kernels that this process has compiled.
_rehearsed: set[tuple[object, ...]] = set()


def rehearse(tokens: Tokens, head: Head, kind: StepKind) -> None:
    """Compiles the kernels of a filtered loss and of its gradients, all at once; once.

    They don't depend on the number of tokens, so a few stand for all. Nothing is read or written.
    Kernels of rarer calls are compiled when they come: for upstream gradients of statistics, for
    bounds that ranks exchange.
    """
    weight, num_blocks = head.weight, triton.cdiv(len(tokens), TOKEN_BLOCK)
    if interpreted() or torch.cuda.is_current_stream_capturing():
        return
    if not can_rehearse():
        warn_slower(
            f"triton {triton.__version__} compiles a first call's kernels one after the other, in "
            "twice the time; 3.6 and later do so side by side"
        )
        return
    has = (head.bias is None, head.class_weight is None, head.softcap is None)
    has += (tokens.scale is None,)
    layout = (weight.device, weight.dtype, weight.shape, weight.stride(), tokens.hidden.stride())
    sizes = (num_blocks > 1, order_dtype(len(tokens)), blocks_padded(num_blocks))
    if (kind, has, layout, sizes) in _rehearsed:
        return
    _rehearsed.add((kind, has, layout, sizes))
    with rehearsal(weight.device), torch.no_grad():
        _go_through(tokens, head, kind)


def _go_through(tokens: Tokens, head: Head, kind: StepKind) -> None:
    few = tokens.slice(0, min(len(tokens), 2 * TOKEN_BLOCK))
    # Any will do for a binary that takes them as numbers.
    least, threshold = 1, 1.0
    listed = ListedLogits(kind.draws and kind.needs.hidden) if kind.keeps_listed else None
    stats, marks = local_stats(
        few,
        head,
        wanted=kind.wanted,
        score=True,
        score_largest=kind.by_largest,
        threshold=threshold,
        workspace_bytes=least,
        keep_logits=listed,
        screen=kind.screen,
        # This and what comes below is what the kernels do know of the number of tokens.
        order_as=order_dtype(len(tokens)),
    )
    assert marks is not None
    marks = replace(marks, blocks_padded=blocks_padded(triton.cdiv(len(tokens), TOKEN_BLOCK)))
    kept = local_kept(
        few,
        head,
        marks,
        stats.lse,
        threshold=threshold,
        by_largest=kind.by_largest,
        tail=kind.tail,
        draws=kind.draws,
        workspace_bytes=least,
    )
    grad_weight = None
    if kind.grad_weight is not None:
        # Of the shape and the alignment, without the memory; whoever writes it gets an error.
        row = head.weight.new_empty(1, head.weight.shape[1], dtype=kind.grad_weight)
        grad_weight = row.expand(head.weight.shape)
    local_grads(
        few,
        head,
        stats.lse,
        Upstream(stats.lse, stats.lse if kind.of_lse else None, stats.smooth_logit),
        target_logit=stats.target_logit,
        entropy=None,
        kept=kept,
        needs=kind.needs,
        grad_weight=grad_weight,
        accumulate=kind.accumulate,
        workspace_bytes=least,
        logits=listed,
        store_as=kind.store_as,
        start_sum=_sum_nothing if kind.in_parts else None,
    )


def _sum_nothing(grad_hidden: Tensor, *, finish: Callable[[], object]) -> Callable[[], Tensor]:
    finish()
    return lambda: grad_hidden
