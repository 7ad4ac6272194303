"""Distillation: a student's head trained on a teacher's, both sharded over the ranks.

No logits of either model exist in memory. Start with `linear_distillation`.
"""

from cce_dist.distillation.loss import DistillationOutput, linear_distillation

__all__ = ["DistillationOutput", "linear_distillation"]
