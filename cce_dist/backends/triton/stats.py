"""Forward over this rank's shard in Triton: statistics, and marks for the backward.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cce_dist.backends.eight_bits import Rounding
from cce_dist.backends.protocol import ForwardRequest
from cce_dist.backends.triton.filter.kept_logits import KeptLogits
from cce_dist.backends.triton.filter.lists import ListedLogits
from cce_dist.backends.triton.filter.marks import Marks, MassFactors, marks_of
from cce_dist.backends.triton.forward.bounds import EXCHANGES, raise_lower
from cce_dist.backends.triton.forward.extras import (
    in_order,
    mean_logit_by_linearity,
    merge_extras,
    sums_softcapped,
)
from cce_dist.backends.triton.forward.operands import Finished, ForwardLaunch
from cce_dist.backends.triton.forward.shares import mass_factors
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.forward.targets import Placed, add_targets, start_products
from cce_dist.backends.triton.launch.arguments import for_kernels
from cce_dist.backends.triton.screened.quantize import start_sums
from cce_dist.backends.triton.screened.steps import (
    Screened,
    add_exact_columns,
    add_exact_stats,
    eight_bits_of,
    guard,
    sum_exact_columns,
)
from cce_dist.backends.triton.screened.tail_error import correct_tail
from cce_dist.backends.triton.tokens.order import in_similar_order
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, Tokens
from cce_dist.options import TOKEN_BLOCK


def forward(
    tokens: Tokens, head: Head, request: ForwardRequest, *, order_as: torch.dtype | None = None
) -> tuple[Stats, Marks | None]:
    """Computes statistics of every token over this rank's shard. Deterministic.

    `request.store` is a KeptLogits without a filter, or a ListedLogits with a screen.
    `request.bounds` is called once for each of `EXCHANGES`.

    Args: order_as: dtype of the marks' order; None: `order_dtype`.
    Returns:
        Stats with fields [N] fp32, 0 for tokens that don't count.
        Marks if there is a filter, else None.
    Source: Cut Cross-Entropy, arXiv:2411.09009, Alg. 1-2; docs/design/forward.md.
    """
    rule, screen, bounds, order = request.filter, request.screen, request.bounds, None
    head = for_kernels(head)
    wait_for_sums = start_sums(tokens, head, screen)
    try:
        if rule is not None and len(tokens) > TOKEN_BLOCK:
            tokens, order = in_similar_order(tokens)
        every = request.store if isinstance(request.store, KeptLogits) else None
        state = ForwardState.of(
            tokens, head, request.wanted, rule is not None, every, screen is not None
        )
    finally:
        sums = None if wait_for_sums is None else wait_for_sums()
    rounding = None
    if screen is not None:
        eight, rounding = eight_bits_of(state, screen, sums)
        state = replace(state, eight=eight)
    buffers, launches = state.buffers, state.launches(bounds is not None)
    shard_lower = buffers.lower if bounds is None else buffers.lower.clone()
    for launch in launches:
        state.launch(rule, launch)
        if bounds is not None and launch.number in EXCHANGES:
            raise_lower(
                bounds, shard_lower, buffers, state.shape, len(tokens), launch.number, order
            )
    last = ForwardLaunch(launches[-1].number, 0, state.num_tiles, robust=True)
    finished, screened, factors, placed = _merged(
        state, last, len(launches), request, rounding, order, order_as
    )
    stats = _packed_stats(state, finished, screened)
    if order is not None and not stats.is_plain:
        stats = in_order(stats, order)
    stats = replace(stats, lse=placed.lse, target_logit=placed.target_logit)
    if rule is None:
        return stats, None
    assert placed.log_dropped is not None and placed.seed is not None
    assert factors is not None and buffers.mass is not None
    marks = marks_of(
        buffers.mass,
        factors,
        state.count,
        placed.log_dropped,
        placed.seed,
        state.weight.dtype,
        threshold=rule.threshold,
        # Columns are drawn by mass: a threshold of the largest probability is no mass.
        draws=not rule.by_largest,
        order=placed.order,
        # A rank learns the other ranks' sums only between launches, so its masses are too large.
        looseness=1.0 if bounds is None else 2.0,
    )
    if screened is not None and rounding is not None:
        inputs = (state, finished, marks, screened, rounding, request, placed, order)
        _compute_kept_columns(*inputs, stats)
    return stats, marks


def statistics_of_segments(tokens: Tokens, head: Head, request: ForwardRequest) -> Stats:
    """Computes statistics of every token over each segment of the shard: see
    `ForwardRequest.segment`. Deterministic.

    Every segment has splits of its own, as many whatever the number of tokens is, and their first
    reference is a logit of the segment. A split's overflow computes that token again alone.
    """
    head = for_kernels(head)
    state = ForwardState.of(tokens, head, request.wanted, False, None, segment=request.segment)
    for robust in (False, True):
        state.launch(None, state.alone(robust))
    products = start_products(state)
    try:
        finished = state.merge(state.alone())
    finally:
        of_targets = products()
    placed = add_targets(state, replace(finished, lse=finished.lse[0]), of_targets, None)
    stats = _packed_stats(state, finished, None)
    # Every segment has a row, and the target's alone its logit.
    segment = torch.arange(state.segments, device=head.weight.device)[:, None]
    here = tokens.local_targets.div(request.segment, rounding_mode="floor") == segment
    return replace(stats, target_logit=placed.target_logit.where(here, 0))


def _compute_kept_columns(
    state: ForwardState,
    finished: Finished,
    marks: Marks,
    screened: Screened,
    rounding: Rounding,
    request: ForwardRequest,
    placed: Placed,  # written
    order: Tensor | None,
    stats: Stats,  # all but lse and target logit, written
) -> None:
    """Computes exact logits of the kept columns, and corrects the 8-bit error of all others."""
    assert request.filter is not None and placed.log_dropped is not None
    listed = request.store if isinstance(request.store, ListedLogits) else None
    by_mass = None if request.filter.by_largest else request.filter.threshold
    assert finished.unkept is not None
    wait = correct_tail(state, finished, rounding, screened.full, by_mass)
    try:
        exact = sum_exact_columns(state, finished, marks, screened, request.room, listed)
    finally:
        wait()
    add_exact_columns(state, finished, screened, exact, order, placed.lse, placed.log_dropped)
    if state.has_screened_stats:
        add_exact_stats(state, finished, screened, exact, rounding.variance, order, stats)


def _merged(
    state: ForwardState,
    last: ForwardLaunch,
    num_launches: int,
    request: ForwardRequest,
    rounding: Rounding | None,
    order: Tensor | None,
    order_as: torch.dtype | None,
) -> tuple[Finished, Screened | None, MassFactors | None, Placed]:
    """Merges the splits, repeats the forward in full precision if 8 bits won't do, and adds the
    targets."""
    screened = factors = is_full = None
    state.launch(request.filter, last)
    # The products overlap small kernels from here on; the forward's kernel left them no registers.
    wait_for_products = start_products(state)
    try:
        finished = state.merge(last)
        if request.screen is not None:
            assert rounding is not None
            full, screened = guard(state, finished, rounding.variance, request.screen)
            for launch in (full.alone(), full.alone(robust=True)):
                full.launch(request.filter, launch)
            is_full = screened.full
            finished = state.merge(last, is_full)
        if state.score:
            factors = mass_factors(state, finished, num_launches, is_full)
    finally:
        products = wait_for_products()
    placed = add_targets(state, finished, products, order, order_as, full=is_full)
    return finished, screened, factors, placed


def _packed_stats(state: ForwardState, finished: Finished, screened: Screened | None) -> Stats:
    """Returns all statistics in the order of the packed tokens, without the targets' columns."""
    num_tokens = len(state.tokens)
    stats = Stats(finished.lse[..., :num_tokens], finished.target_logit[:num_tokens])
    stats = _with_extras(state, stats, finished)
    for name in ("entropy", "sum_p2", "lse_rest"):
        values = getattr(finished, name)
        if values is not None:
            stats = replace(stats, **{name: values[..., :num_tokens]})
    if state.wanted.screened:
        counts = state.counts.to(finished.lse.dtype)
        of_screened = 0 * counts if screened is None else counts * (1 - screened.full)
        stats = replace(stats, screened=of_screened)
    return stats


def _with_extras(state: ForwardState, stats: Stats, finished: Finished) -> Stats:
    """Adds the statistics that few callers ask for, in the order of the packed tokens; to
    `finished` the largest logit."""
    head, wanted, extras = state.head, state.wanted, state.buffers.extras
    num_tokens = len(state.tokens)
    has_largest = wanted.correct or wanted.moments
    if extras is not None and (has_largest or sums_softcapped(wanted, head)):
        inputs = (state.shape, state.count, state.targets, wanted, head, state.segments)
        merged = merge_extras(extras, *inputs)
        finished.largest = merged[0][0], merged[1][0]
        rows = (row[:, :num_tokens] for row in merged)
        top, _, hit, *moments, smooth = (x if state.segment else x[0] for x in rows)
        if has_largest:
            stats = replace(stats, max_logit=top)
        if wanted.correct:
            stats = replace(stats, target_is_argmax=hit)
        if wanted.moments:
            names = ("origin_logit", "mean_logit", "m2_logit")
            stats = replace(stats, **dict(zip(names, moments, strict=True)))
        if sums_softcapped(wanted, head):
            stats = replace(stats, smooth_logit=smooth)
    if wanted.smooth_logit and stats.smooth_logit is None:
        hidden = state.packed[:num_tokens, : state.weight.shape[1]]
        smooth = mean_logit_by_linearity(hidden, state.counts, head)
        stats = replace(stats, smooth_logit=smooth)
    return stats
