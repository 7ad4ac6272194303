"""Forward over this rank's shard in Triton: statistics, and marks for the backward.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cce_dist.eight_bits import Rounding
from cce_dist.local_triton_bounds import EXCHANGES, Gather, raise_lower
from cce_dist.local_triton_exact import KeptLogits
from cce_dist.local_triton_forward import Forward
from cce_dist.local_triton_inputs import for_kernels, in_similar_order
from cce_dist.local_triton_lists import ListedLogits, Marks, marks_of
from cce_dist.local_triton_operands import Launch
from cce_dist.local_triton_quantize import start_sums
from cce_dist.local_triton_screen import (
    add_exact_columns,
    guard,
    sum_exact_columns,
    with_eight_bits,
)
from cce_dist.local_triton_tail_error import correct_tail
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
) -> tuple[Stats, Marks | None]:
    """Statistics of every token over this rank's shard. Deterministic.

    Args: those of `local_torch.local_stats`; `keep_logits`: filled; with `screen`
        ListedLogits, or else without `score`; `gather`: called once for each of `EXCHANGES`;
        `screen`: logits in 8 bits, those that matter exactly; with `score`;
        `beside`: as of `local_grads`.
    Returns:
        Stats with fields [N] fp32, 0 for tokens that don't count.
        Marks if `score`, else None.
    Source: Cut Cross-Entropy, arXiv:2411.09009, Alg. 1-2; docs/performance.md#forward.
    """
    screened = None
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
    run.launch(threshold, score_largest, last)
    made = run.merge()
    if screen is not None:
        assert rounding is not None
        full, screened = guard(run, made, rounding.variance, screen)
        for launch in (full.alone(), full.alone(robust=True)):
            full.launch(threshold, score_largest, launch)
        made = run.merge()
    run.add_targets(made)
    stats, log_dropped = run.stats(made), made.dropped
    if wanted.screened:
        counts = run.counts.to(stats.lse.dtype)
        screens = 0 * counts if screened is None else counts * (1 - screened.full)
        stats = replace(stats, screened=screens)
    if not score:
        return stats, None
    assert log_dropped is not None
    log_dropped = log_dropped[: len(tokens)]
    if order is not None:
        stats, log_dropped = in_order(stats, log_dropped, order)
    marks = marks_of(
        run.parts["mass"],
        run.count,
        log_dropped,
        stats.lse,
        run.weight.dtype,
        threshold=threshold,
        # Columns are drawn by mass, which a threshold of the largest probability is not.
        draws=not score_largest,
        order=order,
    )
    if screened is None:
        return stats, marks
    assert rounding is not None and made.dropped is not None
    by_mass = None if score_largest else threshold
    wait = correct_tail(run, made, rounding, screened.full, by_mass)
    try:
        exact = sum_exact_columns(run, made, marks, screened, workspace_bytes, listed, beside)
    finally:
        wait()
    add_exact_columns(run, made, screened, exact)
    corrected = torch.stack([made.lse, made.dropped])[:, : len(tokens)]
    if order is not None:
        corrected = torch.empty_like(corrected).index_copy_(1, order, corrected)
    return replace(stats, lse=corrected[0]), replace(marks, log_dropped=corrected[1])


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


def in_order(stats: Stats, log_dropped: Tensor, order: Tensor) -> tuple[Stats, Tensor]:
    """The order[i]-th token's are the i-th -> the i-th token's are the i-th."""
    packed = torch.stack([*stats.pack(), log_dropped])
    packed = torch.empty_like(packed).index_copy_(1, order, packed)
    return stats.unpack(packed[:-1]), packed[-1]
