"""One forward of a student's and a teacher's head over this rank's shard: launches, marks, KL.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import replace

import torch

from cce_dist.backends.protocol import ForwardRequest, TeacherStats
from cce_dist.backends.triton.forward.bounds import EXCHANGES, raise_lower
from cce_dist.backends.triton.launch.arguments import for_kernels
from cce_dist.backends.triton.screened.quantize import start_sums
from cce_dist.backends.triton.teacher.jsd import jsd_of_heads
from cce_dist.backends.triton.teacher.state import (
    HeadStates,
    marks_of_heads,
    merged_state,
    stats_of,
)
from cce_dist.backends.triton.tokens.order import in_similar_order
from cce_dist.core.types import Head, Tokens
from cce_dist.options import TOKEN_BLOCK


def forward_of_heads(
    tokens: Tokens,
    head: Head,
    teacher: tuple[Tokens, Head],
    request: ForwardRequest,
    order_as: torch.dtype | None = None,
) -> TeacherStats:
    """Computes statistics of both heads over this rank's shard, and a divergence. Deterministic.

    Args: order_as: dtype of the marks' order; None: `order_dtype`.
    Source: docs/design/distillation.md.
    """
    if request.mixture is not None:
        return jsd_of_heads(tokens, head, teacher, request, request.mixture, order_as)
    rule, bounds, order = request.filter, request.bounds, None
    assert rule is not None and not rule.by_largest
    assert request.screen is None or not request.reverse
    both = for_kernels(head), for_kernels(teacher[1])
    wait_for_sums = start_sums(replace(tokens, hidden=teacher[0].hidden), both[1], request.screen)
    try:
        if len(tokens) > TOKEN_BLOCK:
            tokens, order = in_similar_order(tokens)
        of_teacher = replace(tokens, hidden=teacher[0].hidden)
        heads = HeadStates.of((tokens, of_teacher), both, request)
    finally:
        sums = None if wait_for_sums is None else wait_for_sums()
    if request.screen is not None:
        heads = heads.in_eight_bits(request.screen, sums)
    launches = heads.student.launches(bounds is not None)
    lowers = [state.buffers.lower for state in heads.states]
    if bounds is not None:
        lowers = [lower.clone() for lower in lowers]
    for launch in launches:
        heads.launch(launch, rule.threshold)
        if bounds is not None and launch.number in EXCHANGES:
            for state, lower in zip(heads.states, lowers, strict=True):
                at = state.buffers, state.shape, len(tokens), launch.number, order
                raise_lower(bounds, lower, *at)
    last = replace(launches[-1], robust=True)
    heads.launch(last, rule.threshold)
    of_call = last, len(launches), order, order_as
    student = merged_state(heads.student, *of_call)
    of_teacher = merged_state(heads.teacher, *of_call, (heads, student))
    # A rank of several knows the other ranks' sums at its launches' beginnings alone.
    looseness = 1.0 if bounds is None else 2.0
    of_mass = of_teacher.mass, of_teacher.factors
    marks = marks_of_heads(heads, student, of_mass, rule, looseness)
    kl, of_dropped = (x[: len(tokens)] for x in of_teacher.divergence)
    if order is not None:
        kl = torch.empty_like(kl).scatter_(0, order, kl)
    if not request.reverse:
        of_dropped = of_teacher.log_dropped
    elif order is not None:
        of_dropped = torch.empty_like(of_dropped).scatter_(0, order, of_dropped)
    marks = replace(marks, of_dropped=of_dropped)
    stats = stats_of(student)
    full = None if heads.eight is None else heads.eight.full
    return TeacherStats(stats, of_teacher.lse_of_tokens, kl, marks, full)
