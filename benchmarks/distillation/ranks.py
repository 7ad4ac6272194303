"""Distillation over ranks, as a method of `cce_dist.bench.ranks`."""

from __future__ import annotations

from torch import Tensor

from benchmarks.distillation.inputs import JSD_BETA, Teacher
from cce_dist.bench.golden import LossFunction
from cce_dist.bench.methods import Method
from cce_dist.bench.rank_methods import Setup
from cce_dist.distillation import linear_distillation
from cce_dist.options import GradientMode

GRADIENTS: dict[str, GradientMode] = {
    "filtered": "filtered",
    "screened": "filtered",
    "in_forward": "in_forward",
    "exact": "exact",
}


def method_of(name: str, teacher: Teacher) -> Method:
    """Returns `linear_distillation` from a teacher whose rows lie as the student's do.

    Args:
        name: of `GRADIENTS`.
        teacher: all tokens and the whole vocabulary, the same on every rank.
    """

    def build(setup: Setup) -> LossFunction:
        place = setup.place
        assert place is not None
        # A copy: the rank's own rows, and not a part of the whole.
        weight, hidden = teacher.weight[place.rows].clone(), teacher.hidden
        if place.sequence_parallel:
            hidden = hidden.chunk(place.size)[place.rank]

        def loss(student_hidden: Tensor, student_weight: Tensor, targets: Tensor) -> Tensor:
            result = linear_distillation(
                student_hidden,
                student_weight,
                hidden,
                weight,
                targets,
                divergence=teacher.divergence,
                beta=JSD_BETA,
                temperature=teacher.temperature,
                gradient=GRADIENTS[name],
                logits="screened" if name == "screened" else "full",
                backend=setup.backend,
                group=place.group,
                vocab_shard=place.shard,
                sequence_parallel=place.sequence_parallel,
            )
            assert isinstance(result, Tensor)
            return result

        return loss

    return Method(name, "ours", build, ranks=True)
