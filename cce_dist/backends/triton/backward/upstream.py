"""Each token's numbers that the backward's kernels read, in the order of the blocks."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false, reportReturnType=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from cce_dist.backends.protocol import BackwardRequest
from cce_dist.backends.triton.kernels.backward.upstream import upstream_kernel
from cce_dist.backends.triton.launch.arguments import pad_tokens, rows_of
from cce_dist.backends.triton.launch.start import is_compiling_only, start
from cce_dist.backends.triton.launch.tiles import is_wide
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, Tokens, largest_operand
from cce_dist.options import TOKEN_BLOCK


@dataclass(frozen=True)
class TokenUpstream:
    """The upstream gradients of each token of the blocks; P = num_blocks * 128."""

    factors: Tensor  # [7 or 8, P] fp32: see `exact_logits_kernel`
    count: Tensor  # [1] int32: tokens that count
    grad_scale: Tensor  # [1] the power of two by which the gradients in `factors` were divided
    rows: Tensor  # [P] int64: a permutation of the first N
    read_rows: Tensor  # [P] int64: the same, but a counting token's row for tokens that don't count
    targets: Tensor  # [P] int32, -1: none here
    scale: float | Tensor  # factor of all logits, or [P] fp32 of each token's
    # [P] upstream times dropped mass; with the part of an entropy that is relative to a teacher
    tail_mass: Tensor | None
    # [2, P]: tail_mass with the entropy's part, but for log s_v; factor of the mean of log s_v. Of
    # an entropy relative to a teacher: but for the log ratios of shares; factor of these
    entropy_tail: Tensor | None
    mean: Tensor | None  # [P] upstream of the mean logit, where it is linear

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        head: Head,
        request: BackwardRequest,
        log_dropped: Tensor | None,  # [N]: see `Marks`; None: no tail
        order: Tensor | None,  # [N] of the blocks' tokens; None: the caller's
        num_blocks: int,
        *,
        by_torch: bool,  # torch's products follow, which take d_logits whole and undivided
        # [N] of the model that the entropy is relative to: lse, and `Marks.of_dropped`
        beside: tuple[Tensor, Tensor | None] | None = None,
    ) -> TokenUpstream:
        stats, upstream, lse = request.stats, request.upstream, request.stats.lse
        (rows, count), size = rows_of(tokens), num_blocks * TOKEN_BLOCK
        grads = [upstream.nll, upstream.lse, upstream.entropy, upstream.smooth_logit]
        # The gradient of a sum is an expanded scalar: its elements share one number in memory.
        grads = [None if g is None else g.to(lse.dtype).contiguous() for g in grads]
        of_elements = grads[3] is not None and (head.softcap is not None or by_torch)
        linear = grads[3] is not None and not of_elements
        of_tokens = [*grads[:3], grads[3] if of_elements else None]
        divides = head.weight.element_size() == 2 and not (by_torch or request.invariant)
        divides = divides and any(g is not None for g in of_tokens)
        has_entropy_tail = log_dropped is not None and grads[2] is not None
        new = functools.partial(torch.empty, device=lse.device)
        wide, fp32, int64 = is_wide(head.weight), torch.float32, torch.int64
        per_token = cls(
            factors=new(7 + wide, size, dtype=fp32),
            count=count,
            grad_scale=new(1, dtype=fp32),
            rows=new(size, dtype=int64),
            read_rows=new(size, dtype=int64),
            targets=new(size, dtype=torch.int32),
            scale=_scale_of(tokens, head, order, size),
            tail_mass=None if log_dropped is None else new(size, dtype=fp32),
            entropy_tail=new(2, size, dtype=fp32) if has_entropy_tail else None,
            mean=new(size, dtype=fp32) if linear else None,
        )
        # The kernel reads the entropy for its gradient alone; None spares a second binary.
        entropy = None if grads[2] is None else stats.entropy
        lse = _with_rest(stats) if wide else lse
        vectors = (lse, stats.target_logit, *grads, entropy, log_dropped, *(beside or (None, None)))
        vectors = (None if x is None else x.contiguous() for x in vectors)
        start(upstream_kernel, (num_blocks,))(
            rows,
            tokens.local_targets,
            *(count if x is None else x for x in (order, count, *vectors, per_token.grad_scale)),
            per_token.factors,
            per_token.rows,
            per_token.read_rows,
            per_token.targets,
            count if per_token.tail_mass is None else per_token.tail_mass,
            count if per_token.entropy_tail is None else per_token.entropy_tail,
            count if per_token.mean is None else per_token.mean,
            len(tokens),
            head.logit_scale,
            head.logit_scale / head.vocab_size,
            abs(head.logit_scale) / largest_operand(head.weight.dtype),
            TOKENS=TOKEN_BLOCK,
            HAS_ORDER=order is not None,
            HAS_NLL=grads[0] is not None,
            HAS_LSE=grads[1] is not None,
            HAS_ENTROPY=grads[2] is not None,
            HAS_SMOOTH=of_elements,
            HAS_MEAN=linear,
            HAS_TAIL=log_dropped is not None,
            HAS_TEACHER=beside is not None,
            BY_BLOCK=request.kept is not None,
            DIVIDES=divides,
            WIDE=wide,
        )
        return per_token


def _with_rest(stats: Stats) -> Tensor:
    """Returns lse and its rest, [2, N]. Distillation's kernels have none."""
    rest = torch.zeros_like(stats.lse) if stats.lse_rest is None else stats.lse_rest
    return torch.stack((stats.lse, rest))


def _scale_of(tokens: Tokens, head: Head, order: Tensor | None, size: int) -> float | Tensor:
    if tokens.scale is None:
        return head.logit_scale
    scale = tokens.scale
    if order is not None and not is_compiling_only():
        scale = scale.index_select(0, order.long())
    return pad_tokens(scale * head.logit_scale, size, 1.0)
