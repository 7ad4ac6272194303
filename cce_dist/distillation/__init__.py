"""Distillation: a student's head trained on a teacher's, both sharded over the ranks.

No logits of either model exist in memory. Start with `linear_distillation`; with a teacher's
log-probabilities of some ids, `listed_distillation`.
"""

from cce_dist.distillation.listed import TeacherLogprobs, listed_distillation, teacher_topk
from cce_dist.distillation.loss import DistillationOutput, linear_distillation

__all__ = [
    "DistillationOutput",
    "TeacherLogprobs",
    "linear_distillation",
    "listed_distillation",
    "teacher_topk",
]
