"""Losses that train a student, each by dense logits and by this library.

All are means over tokens, at temperature 1, without the targets' cross-entropy beside a divergence.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.distillation.contenders import CHUNK
from benchmarks.distillation.inputs import Teacher, divergence_of
from cce_dist import linear_cross_entropy
from cce_dist.core.types import accumulate_dtype
from cce_dist.distillation import linear_distillation, listed_distillation, teacher_topk

# The student alone, without a teacher.
CROSS_ENTROPY = "cross_entropy"
DIVERGENCES = ("forward_kl", "jsd", "topk", CROSS_ENTROPY)
# Ids of the teacher at each token in "topk"; the others are one class.
TOP_K = 64

# divergence, hidden [N, D], weight [V, D], targets [N], teacher -> mean loss, []
StudentLoss = Callable[[str, Tensor, Tensor, Tensor, Teacher | None], Tensor]


def ours(
    divergence: str, hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Teacher | None
) -> Tensor:
    """Computes the loss by the library's functions, with their default options."""
    if teacher is None:
        assert divergence == CROSS_ENTROPY
        loss = linear_cross_entropy(hidden, weight, targets)
    elif divergence == "topk":
        listed = teacher_topk(teacher.hidden, teacher.weight, TOP_K)
        loss = listed_distillation(hidden, weight, listed)
    else:
        of_teacher = teacher.hidden, teacher.weight
        loss = linear_distillation(hidden, weight, *of_teacher, divergence=divergence)  # pyright: ignore[reportArgumentType]
    assert isinstance(loss, Tensor)
    return loss


def dense(
    divergence: str, hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Teacher | None
) -> Tensor:
    """Computes the loss by the student's logits in the inputs' dtype, all at once.

    Softmaxes are in fp32 (float64 for float64), of 1024 tokens at a time with the teacher's logits;
    the backward computes them again.
    """
    # A product for each chunk would sum the weight's gradients in the inputs' dtype.
    logits = (hidden @ weight.T).split(CHUNK)
    of_teacher = [None] * len(logits) if teacher is None else teacher.hidden.split(CHUNK)
    teacher_weight = None if teacher is None else teacher.weight
    sums = [
        checkpoint(
            *(_sum_of_chunk, divergence, student, some, rows, teacher_weight),
            use_reentrant=False,
            preserve_rng_state=False,
        )
        for student, some, rows in zip(logits, targets.split(CHUNK), of_teacher, strict=True)
    ]
    return torch.stack(sums).sum() / len(hidden)


def reordered(
    divergence: str, hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Teacher | None
) -> Tensor:
    """Computes `dense` of the tokens and the vocabulary in reverse, which rounds otherwise."""
    if teacher is not None:
        teacher = Teacher(teacher.hidden.flip(0), teacher.weight.flip(0), teacher.temperature)
    targets = len(weight) - 1 - targets.flip(0)
    return dense(divergence, hidden.flip(0), weight.flip(0), targets, teacher)


METHODS: dict[str, StudentLoss] = {"dense": dense, "reordered": reordered, "ours": ours}


def _sum_of_chunk(
    divergence: str,
    student: Tensor,  # [n, V] logits
    targets: Tensor,  # [n]
    teacher_hidden: Tensor | None,  # [n, D_teacher]
    teacher_weight: Tensor | None,  # [V, D_teacher]
) -> Tensor:
    log_q = _log_softmax(student)
    if teacher_hidden is None or teacher_weight is None:
        return F.nll_loss(log_q, targets, reduction="sum")
    log_p = _log_softmax(teacher_hidden @ teacher_weight.T)
    if divergence == "topk":
        ids = log_p.topk(TOP_K, -1).indices
        log_p, log_q = _listed_and_rest(log_p, ids), _listed_and_rest(log_q, ids)
    return divergence_of(log_q, log_p, "jsd" if divergence == "jsd" else "forward_kl").sum()


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(accumulate_dtype(logits.dtype)).log_softmax(-1)


def _listed_and_rest(log_p: Tensor, ids: Tensor) -> Tensor:
    """Returns the ids' log-probabilities and that of all others together, [n, K + 1]."""
    rest = log_p.scatter(-1, ids, -torch.inf).logsumexp(-1, keepdim=True)
    return torch.cat([log_p.gather(-1, ids), rest], -1)
