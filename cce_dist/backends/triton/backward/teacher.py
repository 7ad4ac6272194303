"""A teacher's part of d_logits, as the filtered backward's kernels read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cce_dist.backends.protocol import BackwardRequest, TeacherPart
from cce_dist.backends.triton.backward.upstream import TokenUpstream
from cce_dist.backends.triton.filter.marks import KeptColumns
from cce_dist.backends.triton.launch.arguments import for_kernels, with_unit_inner_stride
from cce_dist.core.stats import Stats, split_lse
from cce_dist.core.types import Head, Tokens, Upstream


@dataclass(frozen=True)
class TeacherState:
    """The teacher's operands."""

    head: Head
    hidden: Tensor  # [num_rows, D_teacher]
    factors: Tensor  # [7 or 8, P] fp32: see `exact_logits_kernel`; divided as the student's
    tail_mass: Tensor | None  # [P]; None: the student's tail has all that dropped columns add
    beta: float | None  # see `TeacherPart`

    @classmethod
    def of(
        cls,
        tokens: Tokens,
        head: Head,
        request: BackwardRequest,
        part: TeacherPart,
        student: TokenUpstream,
        num_blocks: int,
    ) -> TeacherState:
        """Args: head: the student's, by whose logits the gradient is taken."""
        kept = request.kept
        assert isinstance(kept, KeptColumns)
        upstream, has_tail = Upstream(lse=part.upstream), kept.tail and part.upstream is not None
        lse, rest = split_lse(part.lse) if part.lse.dtype == torch.float64 else (part.lse, None)
        stats = Stats(lse, lse, lse_rest=rest)
        of_teacher = replace(request, stats=stats, upstream=upstream)
        per_token = TokenUpstream.of(
            tokens,
            head,
            of_teacher,
            kept.marks.of_dropped if has_tail else None,
            kept.marks.order,
            num_blocks,
            by_torch=False,
        )
        if part.upstream is not None:
            # Student and teacher were divided by different powers of two: take the student's for
            # both.
            per_token.factors[0] *= per_token.grad_scale / student.grad_scale
            if rest is not None and len(per_token.factors) == 8:
                # The kernel takes exp(y - lse), without the rest.
                per_token.factors[0] *= (-per_token.factors[7]).exp()
        hidden = with_unit_inner_stride(part.tokens.hidden)
        return cls(
            for_kernels(part.head), hidden, per_token.factors, per_token.tail_mass, part.beta
        )


def teacher_arguments(teacher: TeacherState | None, dummy: Tensor, block_k: int) -> dict[str, Any]:
    """Returns the arguments of `filtered_kernel` for a teacher.

    Args: dummy: any pointer, where there is no teacher: the kernel will not read it.
    """
    head = None if teacher is None else teacher.head
    dim = 0 if head is None else head.weight.shape[1]
    bias = None if head is None else head.bias
    return {
        "teacher_hidden_ptr": dummy if teacher is None else teacher.hidden,
        "teacher_weight_ptr": dummy if head is None else head.weight,
        "teacher_bias_ptr": dummy if bias is None else bias,
        "teacher_upstream_ptr": dummy if teacher is None else teacher.factors,
        "TEACHER_D": dim,
        "stride_teacher_hn": 0 if teacher is None else teacher.hidden.stride(0),
        "stride_teacher_wv": 0 if head is None else head.weight.stride(0),
        "teacher_scale": 1.0 if head is None else head.logit_scale,
        "teacher_softcap": 1.0 if head is None or head.softcap is None else head.softcap,
        "beta": 0.0 if teacher is None or teacher.beta is None else teacher.beta,
        "HAS_TEACHER": teacher is not None,
        "IS_JSD": teacher is not None and teacher.beta is not None,
        "TEACHER_EVEN_K": dim % block_k == 0,
        "TEACHER_HAS_BIAS": bias is not None,
        "TEACHER_HAS_SOFTCAP": head is not None and head.softcap is not None,
    }
