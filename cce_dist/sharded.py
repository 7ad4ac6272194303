"""The algorithm. Read this first.

Every rank holds some rows of the LM head and computes four steps, of which the second and the
last talk to the other ranks, once each:

    local_stats          log-sum-exp and target logit of this rank's columns, tile by tile
                         (local_torch.py, local_triton.py)
    merge_stats          log-add-exp over the ranks: every rank gets the same lse (collectives.py)
    local_grads          d_logits of the columns that matter, times hidden and weight
                         (local_torch_grads.py, local_triton_grads.py)
    reduce_grad_hidden   sum of every rank's part of the hidden gradient (collectives.py)

`forward` is the first two and `backward` the others; `find_kept` says between them which columns
matter, where the gradient is filtered. (So that the first step can tell, ranks then also say what
each token's lse is at least: four times while it goes on, once where torch screens.) Which files
compute this rank's part is chosen in local.py.

The group may be tensor-parallel ranks, pipeline ranks, or their product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from cce_dist import collectives
from cce_dist.collectives import (
    gather_bounds,
    gather_tokens,
    gather_tokens_later,
    merge_stats,
    reduce_grad_hidden,
    start_merge_stats,
    start_reduce_grad_hidden,
    sum_over_ranks,
)
from cce_dist.loss_plan import Plan
from cce_dist.partials import (
    Head,
    LocalGrads,
    Needs,
    StartSum,
    Stats,
    StepKind,
    Tokens,
    Upstream,
    Wanted,
)
from cce_dist.transport import group_size


def require_same_sizes(hidden: Tensor, num_tokens: int, plan: Plan) -> None:
    """Before ranks say anything else. Collectives: those of `collectives.require_same_sizes`.

    Args: num_tokens: that are computed.
    """
    sizes = {
        "tokens of hidden": hidden.shape[0],
        "tokens to compute (not ignored)": num_tokens,
        "D of hidden": hidden.shape[1],
        "bytes an element of hidden": hidden.element_size(),
        "statistics (label_smoothing, stats) as bits": sum(
            given << place for place, given in enumerate(astuple(plan.wanted))
        ),
    }
    collectives.require_same_sizes(sizes, hidden.device, plan.group)


def forward(
    tokens: Tokens, head: Head, plan: Plan, *, score: bool, keep_logits: Any = None
) -> tuple[Stats, Any]:
    """Steps 1 and 2.

    Args:
        score: record what `find_kept` has to know of each column.
        keep_logits: what `room_for_logits` returned; the forward fills it.
    Returns:
        Statistics over the whole vocabulary, [N] each, the same bits on every rank.
        This rank's scores, the backend's own; None where none were asked for.
    Collectives: those of `merge_stats`; before them, where columns are scored on several ranks,
        all-gathers of [N] fp32.
    """
    how: dict[str, Any] = {}
    score = score or plan.screen is not None
    if score and plan.filters and plan.backend.exchanges and group_size(plan.group) > 1:
        how["gather"] = functools.partial(gather_bounds, group=plan.group)
    local, scores = _local(tokens, head, plan, score=score, keep_logits=keep_logits, **how)
    return _merge(local, tokens, plan), scores


def find_kept(tokens: Tokens, head: Head, plan: Plan, scores: Any, lse: Tensor) -> Any:
    """The columns that each block keeps, by the lse of all ranks; None: all of them.
    No collectives."""
    if scores is None:
        return None
    return plan.backend.kept(
        tokens,
        head,
        scores,
        lse,
        threshold=plan.threshold,
        by_largest=plan.options.filter.eps is not None,
        tail=plan.options.filter.tail,
        draws=plan.options.draws,
        workspace_bytes=plan.workspace_bytes(len(tokens), head),
    )


def backward(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    stats: Stats,
    upstream: Upstream,
    *,
    kept: Any,
    needs: Needs,
    grad_weight: Tensor | None,  # [V_local, D], written
    accumulate: bool,
    logits: Any = None,  # what the forward kept
    in_fp32: bool = False,  # the hidden gradient, rather than in hidden's dtype or in fp32
) -> LocalGrads:
    """Steps 3 and 4.

    Args:
        stats: those of `forward`.
        upstream: the loss's gradient by each token's nll, lse, mean logit and entropy, [N] each.
        kept: what `find_kept` returned.
        accumulate: add to `grad_weight` rather than overwrite it.
    Returns:
        The hidden gradient, summed over ranks, of the rows of this rank's hidden; the bias's
        [V_local], in the accumulation dtype, of this rank's rows alone. None where not needed.
    Collectives: those of `reduce_grad_hidden`.
    """
    if plan.shard.vocab_size == 1 and upstream.nll is not None:
        # One class has probability 1: a difference of two roundings is no gradient.
        upstream = replace(upstream, nll=0 * upstream.nll)
    if tokens.scale is not None:
        # A gradient by a token's logits is one by what they are made of, times its factor.
        upstream = upstream.scaled(tokens.scale)
    dtype = torch.float32 if in_fp32 else tokens.hidden.dtype
    how: dict[str, Any] = {}
    if plan.backend.stores_rows:
        how = {
            "store_as": _store_as(head.weight.dtype, plan, in_fp32),
            "start_sum": _start_sum(plan, dtype),
            "beside": plan.beside,
        }
    grads = plan.backend.grads(
        tokens,
        head,
        stats.lse,
        upstream,
        target_logit=stats.target_logit,
        entropy=stats.entropy,
        # The entropy's gradient p (log p + H) is not small where p is: it takes every column.
        kept=None if upstream.entropy is not None else kept,
        needs=needs,
        grad_weight=grad_weight,
        accumulate=accumulate,
        workspace_bytes=plan.workspace_bytes(len(tokens), head),
        logits=logits,
        **how,
    )
    if grads.hidden is None or plan.backend.stores_rows:
        return grads
    num_rows = tokens.hidden.shape[0]
    hidden = finish_grad_hidden(grads.hidden, tokens.rows, num_rows, plan, dtype)
    return LocalGrads(hidden, grads.bias)


def _local(
    tokens: Tokens, head: Head, plan: Plan, *, score: bool, keep_logits: Any = None, **how: Any
) -> tuple[Stats, Any]:
    if plan.screen is not None:
        # Which columns are to be exact, their masses tell.
        how["screen"] = plan.screen
        if plan.backend.stores_rows:
            how["beside"] = plan.beside
        head = head.quantized_by(plan.backend.quantize, tokens, plan.screen)
    return plan.backend.stats(
        tokens,
        head,
        wanted=plan.wanted,
        score=(score and plan.filters) or "screen" in how,
        score_largest=plan.options.filter.eps is not None,
        threshold=plan.threshold,
        workspace_bytes=plan.workspace_bytes(len(tokens), head),
        keep_logits=keep_logits,
        **how,
    )


def _merge(local: Stats, tokens: Tokens, plan: Plan) -> Stats:
    return merge_stats(local, plan.shard, plan.group, tokens.count, plan.backend.merge_kernels)


def _start_sum(plan: Plan, dtype: torch.dtype) -> StartSum | None:
    """Step 4 where step 3 stores hidden's rows: begun as soon as nothing but the weight's gradient
    is left to do, which hides it."""
    if plan.group is None or group_size(plan.group) == 1:
        return None
    return functools.partial(
        start_reduce_grad_hidden,
        group=plan.group,
        scatter=plan.options.sequence_parallel,
        dtype=dtype,
    )


def finish_grad_hidden(
    grad: Tensor,  # [N, D] of the computed tokens; overwritten
    rows: Tensor | None,  # [N] their rows among the num_rows tokens; None: all of them
    num_rows: int,
    plan: Plan,
    dtype: torch.dtype,  # of a sum
) -> Tensor:
    """Step 4: sum over ranks, zero at tokens that were left out: [num_rows, D], or this rank's
    slice of it under sequence parallel."""

    def spread(grad: Tensor) -> Tensor:
        if rows is None:
            return grad
        return grad.new_zeros(num_rows, grad.shape[1]).index_copy_(0, rows, grad)

    if group_size(plan.group) == 1:
        return spread(grad)
    if plan.options.sequence_parallel:
        return reduce_grad_hidden(spread(grad), plan.group, scatter=True, dtype=dtype)
    return spread(reduce_grad_hidden(grad, plan.group, scatter=False, dtype=dtype))


def _store_as(dtype: torch.dtype, plan: Plan, in_fp32: bool) -> torch.dtype:
    """What a backend that writes hidden's rows writes: a part is summed over ranks in fp32."""
    return torch.float32 if in_fp32 or group_size(plan.group) > 1 else dtype


def start_forward(
    tokens: Tokens, head: Head, plan: Plan, *, begin: Any, score: bool, elsewhere: Head | None
) -> tuple[Callable[[], Stats], Any]:
    """`forward` whose second step is begun by `begin`: what waits for it, and scores. Ranks at
    different microbatches can't tell each other bounds; `elsewhere`: some of the others' rows."""
    how: dict[str, Any] = {}
    if (score or plan.screen) and plan.filters and plan.backend.exchanges and elsewhere is not None:
        nowhere = replace(tokens, local_targets=torch.full_like(tokens.local_targets, -1))
        full = replace(plan, wanted=Wanted(), backend=replace(plan.backend, screens=False))
        known, _ = _local(nowhere, elsewhere, full, score=False)
        how["gather"] = lambda own: torch.stack([own, known.lse / math.log(2)])
    local, scores = _local(tokens, head, plan, score=score, **how)
    how = {"kernels": plan.backend.merge_kernels, "begin": begin}
    return start_merge_stats(local, plan.shard, plan.group, tokens.count, **how), scores


def tail_mass(kept: Any, lse: Tensor, plan: Plan) -> Tensor:
    """Probability mass of each token whose gradient is approximated, [N]; with a softcap p is
    weighted by its slope. Collectives: one all-gather of [N], none where nothing is filtered."""
    local = lse.new_zeros(lse.shape) if kept is None else kept.dropped_mass
    return sum_over_ranks(local, plan.group) if plan.filters else local


def gather_hidden(
    hidden: Tensor, plan: Plan, *, later: bool = False
) -> tuple[Tensor, Callable[[], None] | None]:
    """Under sequence parallel the tokens of all ranks, else hidden itself; and with `later`, for a
    backend that begins with something else, what gathers them."""
    if not plan.options.sequence_parallel:
        return hidden, None
    if later and plan.backend.fills_hidden:
        return gather_tokens_later(hidden, plan.group)
    return gather_tokens(hidden, plan.group), None


def room_for_logits(
    head: Head, num_tokens: int, plan: Plan, needs: Needs, grad_weight: Tensor | None
) -> Any:
    """Where the forward keeps logits for the backward: in the workspace, and, where all of them are
    made exactly, in `grad_weight` as long as nothing else is there; None: nowhere."""
    if plan.screen is not None:
        return room_for_listed(plan, needs)
    make = plan.backend.room_for_logits
    if make is None or not plan.options.keep_logits:
        return None
    return make(head.weight, num_tokens, plan.workspace_bytes(num_tokens, head), grad_weight)


def room_for_listed(plan: Plan, needs: Needs) -> Any:
    """`room_for_logits` of a screened forward."""
    make = plan.backend.room_for_listed
    if make is None or not plan.keeps_listed:
        return None
    return make(plan.options.draws and needs.hidden)


def rehearse(
    tokens: Tokens,
    head: Head,
    plan: Plan,
    needs: Needs,
    grad_weight: torch.dtype | None,  # None: not needed
    *,
    accumulate: bool,
    in_fp32: bool = False,
) -> None:
    """Before the first step: a backend that compiles its kernels compiles all of them at once.

    Other arguments as those of `backward`. No collectives.
    """
    if plan.backend.rehearse is None or not plan.filters:
        return
    options = plan.options
    kind = StepKind(
        wanted=plan.wanted,
        by_largest=options.filter.eps is not None,
        tail=options.filter.tail,
        draws=options.draws,
        needs=needs,
        grad_weight=grad_weight,
        accumulate=accumulate,
        store_as=_store_as(head.weight.dtype, plan, in_fp32),
        in_parts=group_size(plan.group) > 1,
        of_lse=options.z_loss != 0 or plan.wanted.smooth_logit,
        screen=plan.screen,
        keeps_listed=plan.keeps_listed,
    )
    plan.backend.rehearse(tokens, head, kind)
