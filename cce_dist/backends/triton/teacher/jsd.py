"""Jensen-Shannon's forward of two heads over this rank's shard, once both log-sum-exps are known.

No autograd, no groups, and nothing that makes the host wait for the device.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from cce_dist.backends.protocol import ForwardRequest, Mixture, TeacherStats
from cce_dist.backends.triton.forward.operands import ForwardLaunch
from cce_dist.backends.triton.forward.state import ForwardState
from cce_dist.backends.triton.kernels.numbers import HIGHEST, LOG2E
from cce_dist.backends.triton.kernels.teacher.divergence import jsd_kernel
from cce_dist.backends.triton.launch.arguments import for_kernels
from cce_dist.backends.triton.launch.start import start
from cce_dist.backends.triton.launch.tiles import is_wide
from cce_dist.backends.triton.teacher.state import HeadStates, marks_of_heads, merged_state
from cce_dist.backends.triton.tokens.order import in_similar_order
from cce_dist.core.stats import Stats, split_lse
from cce_dist.core.types import Head, Tokens
from cce_dist.options import TOKEN_BLOCK


def jsd_of_heads(
    tokens: Tokens,
    head: Head,
    teacher: tuple[Tokens, Head],
    request: ForwardRequest,
    mixture: Mixture,
    order_as: torch.dtype | None,
) -> TeacherStats:
    """Computes this shard's parts of Jensen-Shannon, in one launch. Deterministic.

    Args: as of `forward_of_heads`.
    Source: docs/design/distillation.md#jensen-shannon.
    """
    rule, order = request.filter, None
    assert rule is not None and request.reverse and request.screen is None
    if len(tokens) > TOKEN_BLOCK:
        tokens, order = in_similar_order(tokens)
    of_teacher = replace(tokens, hidden=teacher[0].hidden)
    both = for_kernels(head), for_kernels(teacher[1])
    heads = HeadStates.of((tokens, of_teacher), both, request)
    wide = is_wide(both[0].weight) or is_wide(both[1].weight)
    lses = zip(heads.states, (mixture.lse, mixture.teacher_lse), strict=True)
    states = [_starting_from(state, lse, order, wide) for state, lse in lses]
    heads = replace(heads, student=states[0], teacher=states[1])
    launch = heads.student.alone()
    heads.launch(launch, rule.threshold)
    student = merged_state(heads.student, launch, 1, order, order_as)
    parts = _parts_of(heads, launch)[:, : len(tokens)]
    if order is not None:
        parts = torch.empty_like(parts).scatter_(1, order.expand(3, -1), parts)
    ratios = heads.teacher.buffers.mass
    assert ratios is not None
    marks = marks_of_heads(heads, student, (ratios, student.factors), rule)
    stats = Stats(student.placed.lse, student.placed.target_logit)
    marks = replace(marks, of_dropped=parts[2])
    return TeacherStats(stats, mixture.teacher_lse, parts[:2], marks)


def _starting_from(
    state: ForwardState, lse: Tensor, order: Tensor | None, wide: bool
) -> ForwardState:
    """Returns the state with lse [N] as the reference of all sums of the tokens that count. Args:
    wide: as WIDE of `teacher_forward_kernel`."""
    lse = lse if order is None else lse.index_select(0, order)
    number, counts, lower = len(lse), state.counts, state.buffers.lower
    if wide:
        near, rest = split_lse(lse.double())
        lower = torch.stack([lower, torch.full_like(lower, HIGHEST.value), torch.zeros_like(lower)])
        lower[1, :number] = near.where(counts, HIGHEST.value)
        lower[2, :number] = rest.where(counts, 0)
        lower = lower.view(-1)
    lower[:number] = torch.where(counts, lse * LOG2E.value, lower[:number])
    return replace(state, buffers=replace(state.buffers, lower=lower))


def _parts_of(heads: HeadStates, launch: ForwardLaunch) -> Tensor:
    """Returns the sums of `jsd_kernel`, [3, N_padded] in the blocks' order."""
    student, teacher = heads.states
    states = [x.buffers.split_states for x in (teacher, student)]
    slot, padded, block = launch.number % len(states[0]), student.packed.shape[0], 128
    out = student.buffers.lower.new_empty(3, padded)
    start(jsd_kernel, (triton.cdiv(padded, block),))(
        student.count,
        student.shape,
        *(x[slot] for x in states),
        teacher.buffers.lower,
        student.buffers.lower,
        out,
        padded,
        student.buffers.size,
        heads.beta,
        TOKENS=TOKEN_BLOCK,
        BLOCK_N=block,
    )
    return out
