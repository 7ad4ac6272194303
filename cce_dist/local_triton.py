"""Forward over this rank's shard in Triton: statistics, and marks for the backward.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import torch
from torch import Tensor

from cce_dist.eight_bits import Rounding
from cce_dist.local_triton_bounds import EXCHANGES, Gather, raise_lower
from cce_dist.local_triton_forward import Forward
from cce_dist.local_triton_inputs import for_kernels, in_similar_order
from cce_dist.local_triton_kept_logits import KeptLogits
from cce_dist.local_triton_lists import ListedLogits, Marks, MassFactors, marks_of
from cce_dist.local_triton_operands import Finished, Launch
from cce_dist.local_triton_quantize import start_sums
from cce_dist.local_triton_screen import (
    Screened,
    add_exact_columns,
    guard,
    sum_exact_columns,
    with_eight_bits,
)
from cce_dist.local_triton_shares import mass_factors
from cce_dist.local_triton_tail_error import correct_tail
from cce_dist.local_triton_targets import Placed, add_targets, start_products
from cce_dist.options import TOKEN_BLOCK, Screen
from cce_dist.partials import Head, Stats, Tokens, Wanted


def local_stats(
    tokens: Tokens,
    head: Head,
    *,
    wanted: Wanted,
    score: bool,
    score_largest: bool,
    threshold: float,
    workspace_bytes: int,
    keep_logits: KeptLogits | ListedLogits | None = None,
    gather: Gather | None = None,
    screen: Screen | None = None,
    beside: bool = False,
    order_as: torch.dtype | None = None,
) -> tuple[Stats, Marks | None]:
    """Statistics of every token over this rank's shard. Deterministic.

    Args: those of `local_torch.local_stats`; `keep_logits`: filled; with `screen`
        ListedLogits, or else without `score`; `gather`: called once for each of `EXCHANGES`;
        `screen`: logits in 8 bits, those that matter exactly; with `score`;
        `beside`: as of `local_grads`; `order_as`: of the marks' order, None: `order_dtype`.
    Returns:
        Stats with fields [N] fp32, 0 for tokens that don't count.
        Marks if `score`, else None.
    Source: Cut Cross-Entropy, arXiv:2411.09009, Alg. 1-2; docs/performance.md#forward.
    """
    every = keep_logits if isinstance(keep_logits, KeptLogits) else None
    listed = keep_logits if isinstance(keep_logits, ListedLogits) else None
    run, order, rounding = _packed(tokens, head, wanted, score, every, screen)
    launches = run.launches(gather is not None)
    own = run.parts["lower"] if gather is None else run.parts["lower"].clone()
    for launch in launches:
        run.launch(threshold, score_largest, launch)
        if gather is not None and launch.number in EXCHANGES:
            raise_lower(gather, own, run.parts, run.shape, len(tokens), launch.number, order)
    last = Launch(launches[-1].number, 0, run.num_tiles, robust=True)
    by = threshold, score_largest
    made, screened, factors, placed = _merged(
        run, last, len(launches), by, screen, rounding, order, order_as
    )
    others = _others(run, made, screened, order)
    stats = Stats(placed.lse, placed.target_logit, **others)
    if not score:
        return stats, None
    assert placed.log_dropped is not None and placed.seed is not None and factors is not None
    marks = marks_of(
        run.parts["mass"],
        factors,
        run.count,
        placed.log_dropped,
        placed.seed,
        run.weight.dtype,
        threshold=threshold,
        # Columns are drawn by mass, which a threshold of the largest probability is not.
        draws=not score_largest,
        order=placed.order,
    )
    if screened is None:
        return stats, marks
    assert rounding is not None
    by_mass = None if score_largest else threshold
    wait = correct_tail(run, made, rounding, screened.full, by_mass)
    try:
        exact = sum_exact_columns(run, made, marks, screened, workspace_bytes, listed, beside)
    finally:
        wait()
    add_exact_columns(run, made, screened, exact, order, placed.lse, placed.log_dropped)
    return stats, marks


def _packed(
    tokens: Tokens,
    head: Head,
    wanted: Wanted,
    score: bool,
    keep_logits: KeptLogits | None,
    screen: Screen | None,
) -> tuple[Forward, Tensor | None, Rounding | None]:
    """The forward's inputs; which token is the i-th, None: the i-th; with `screen` in 8 bits."""
    order, head = None, for_kernels(head)
    wait_for_sums = start_sums(tokens, head, screen)
    try:
        if score and len(tokens) > TOKEN_BLOCK:
            tokens, order = in_similar_order(tokens)
        run = Forward.of(tokens, head, wanted, score, keep_logits, screen is not None)
    finally:
        sums = None if wait_for_sums is None else wait_for_sums()
    if screen is None:
        return run, order, None
    run, rounding = with_eight_bits(run, screen, sums)
    return run, order, rounding


def _merged(
    run: Forward,
    last: Launch,
    num_launches: int,
    by: tuple[float, bool],  # as of `Forward.launch`
    screen: Screen | None,
    rounding: Rounding | None,
    order: Tensor | None,
    order_as: torch.dtype | None,
) -> tuple[Finished, Screened | None, MassFactors | None, Placed]:
    """The splits merged, in full precision if 8 bits won't do, and the targets added."""
    screened = factors = None
    run.launch(*by, last)
    # Here, where small kernels follow: beside one of the forward's no other program has registers.
    products = start_products(run)
    try:
        made = run.merge(last)
        if screen is not None:
            assert rounding is not None
            full, screened = guard(run, made, rounding.variance, screen)
            for launch in (full.alone(), full.alone(robust=True)):
                full.launch(*by, launch)
            made = run.merge(last)
        if run.score:
            full = None if screened is None else screened.full
            factors = mass_factors(run, made, num_launches, full)
    finally:
        of_targets = products()
    placed = add_targets(run, made, of_targets, order, order_as)
    return made, screened, factors, placed


def _others(
    run: Forward, made: Finished, screened: Screened | None, order: Tensor | None
) -> dict[str, Tensor]:
    """The statistics that few ask for, by the name of `Stats`' field, in the caller's order."""
    others = run.extras()
    if made.entropy is not None:
        others["entropy"] = made.entropy[: len(run.tokens)]
    if run.wanted.screened:
        counts = run.counts.to(made.lse.dtype)
        others["screened"] = 0 * counts if screened is None else counts * (1 - screened.full)
    if order is None or not others:
        return others
    packed = torch.stack([*others.values()])
    packed = torch.empty_like(packed).index_copy_(1, order, packed)
    return dict(zip(others, packed.unbind(0), strict=True))
