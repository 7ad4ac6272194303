"""A teacher's part of d_logits, as the filtered backward's kernels read it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cce_dist.backends.protocol import BackwardRequest, TeacherPart
from cce_dist.backends.triton.backward.upstream import TokenUpstream
from cce_dist.backends.triton.filter.marks import KeptColumns, Marks
from cce_dist.backends.triton.launch.arguments import for_kernels, with_unit_inner_stride
from cce_dist.core.stats import Stats
from cce_dist.core.types import Head, Tokens, Upstream


@dataclass(frozen=True)
class TeacherState:
    """The teacher's operands, and the marks of both models."""

    head: Head
    hidden: Tensor  # [num_rows, D_teacher]
    student_kept: Tensor  # [V_local, words] int64: see `Marks.kept`
    kept: Tensor  # the same of the teacher
    either: Marks  # the student's, with what either model keeps
    share: Tensor  # [2 groups, V_local]: the student's, then the teacher's
    factors: Tensor  # [7, P] fp32: see `exact_logits_kernel`; divided as the student's are
    tail_mass: Tensor | None  # [P]; None: dropped columns add nothing

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
        kept, own = part.kept, request.kept
        assert isinstance(kept, KeptColumns) and isinstance(own, KeptColumns)
        marks, upstream = kept.marks, Upstream(lse=part.upstream)
        of_teacher = replace(request, stats=Stats(part.lse, part.lse), upstream=upstream)
        log_dropped = marks.log_dropped if kept.tail else None
        of_tokens = (log_dropped, own.marks.order, num_blocks)
        per_token = TokenUpstream.of(tokens, head, of_teacher, *of_tokens, by_torch=False)
        # Each divides by a power of two of its own.
        per_token.factors[0] *= per_token.grad_scale / student.grad_scale
        return cls(
            head=for_kernels(part.head),
            hidden=with_unit_inner_stride(part.tokens.hidden),
            student_kept=own.marks.kept,
            kept=marks.kept,
            either=replace(own.marks, kept=own.marks.kept | marks.kept),
            share=torch.cat([own.marks.share, marks.share]),
            factors=per_token.factors,
            tail_mass=per_token.tail_mass,
        )


def teacher_arguments(teacher: TeacherState | None, dummy: Tensor, block_k: int) -> dict[str, Any]:
    """Returns the arguments of `filtered_kernel` for a teacher.

    Args: dummy: any pointer, where there is no teacher: the kernel will not read it.
    """
    head = None if teacher is None else teacher.head
    dim = 0 if head is None else head.weight.shape[1]
    bias = None if head is None else head.bias
    return {
        "own_kept_ptr": dummy if teacher is None else teacher.student_kept,
        "teacher_kept_ptr": dummy if teacher is None else teacher.kept,
        "teacher_hidden_ptr": dummy if teacher is None else teacher.hidden,
        "teacher_weight_ptr": dummy if head is None else head.weight,
        "teacher_bias_ptr": dummy if bias is None else bias,
        "teacher_upstream_ptr": dummy if teacher is None else teacher.factors,
        "TEACHER_D": dim,
        "stride_teacher_hn": 0 if teacher is None else teacher.hidden.stride(0),
        "stride_teacher_wv": 0 if head is None else head.weight.stride(0),
        "teacher_scale": 1.0 if head is None else head.logit_scale,
        "teacher_softcap": 1.0 if head is None or head.softcap is None else head.softcap,
        "HAS_TEACHER": teacher is not None,
        "TEACHER_EVEN_K": dim % block_k == 0,
        "TEACHER_HAS_BIAS": bias is not None,
        "TEACHER_HAS_SOFTCAP": head is not None and head.softcap is not None,
    }
