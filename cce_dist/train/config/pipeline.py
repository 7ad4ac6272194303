"""The assignment of layers to the ranks of a pipeline.

The assignment needs numbers alone, so a configuration can be checked without ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

ScheduleName = Literal["gpipe", "1f1b", "looped", "interleaved", "zero_bubble", "zbv", "vocab_1f1b"]
# Schedules with exactly one stage and exactly two stages a rank. Ranks of other schedules have
# parallel.virtual_stages, by default two.
ONE_STAGE: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "vocab_1f1b")
TWO_STAGES: tuple[ScheduleName, ...] = ("zbv",)
# Schedules whose microbatches torch splits into rounds of equal length.
IN_ROUNDS: tuple[ScheduleName, ...] = ("interleaved", "zero_bubble")
# Schedules that compute hidden gradients first, and gradients of parameters later.
SPLIT_BACKWARD: tuple[ScheduleName, ...] = ("zero_bubble", "zbv")


@dataclass(frozen=True)
class Layout:
    """A pipeline's stages, in the order of the forward, and their ranks in the pipeline.

    Args:
        layers: the decoder's layers on each stage.
        over_pipeline: all ranks of the pipeline have rows of the head; False: only ranks of the
            last stage.
    """

    schedule: ScheduleName
    pp: int
    microbatches: int
    layers: tuple[range, ...]
    over_pipeline: bool

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def rank_of(self, stage: int) -> int:
        if self.schedule == "zbv" and stage >= self.pp:
            return 2 * self.pp - 1 - stage
        return stage % self.pp

    def stages_of(self, rank: int) -> list[int]:
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    @property
    def last_rank(self) -> int:
        """The last stage's rank; the first stage is always on rank 0."""
        return self.rank_of(self.num_stages - 1)

    def describe(self) -> str:
        layers = "+".join(str(len(held)) for held in self.layers)
        where = "all pipeline ranks" if self.over_pipeline else "the last stage"
        return (
            f"{self.schedule}, {self.microbatches} microbatches, layers of stages {layers}, head "
            f"on {where}"
        )


def stages_of_a_rank(schedule: ScheduleName, virtual_stages: int | None) -> int:
    """Returns the number of stages of each rank.

    Raises:
        ValueError: the schedule does not run with `virtual_stages`.
    """
    if schedule not in (*ONE_STAGE, *TWO_STAGES):
        return 2 if virtual_stages is None else virtual_stages
    fixed = 1 if schedule in ONE_STAGE else 2
    if virtual_stages not in (None, fixed):
        raise ValueError(
            f"parallel.virtual_stages must be {fixed} with parallel.schedule={schedule}, got "
            f"{virtual_stages}: leave it out, or use schedule=interleaved, looped or zero_bubble"
        )
    return fixed


def require_microbatches(schedule: ScheduleName, pp: int, microbatches: int) -> None:
    """Checks the number of microbatches.

    Raises:
        ValueError: the schedule cannot run this number of microbatches.
    """
    if schedule == "1f1b" and microbatches < pp:
        raise ValueError(
            f"parallel.microbatches must be at least parallel.pp with parallel.schedule=1f1b, got "
            f"microbatches={microbatches} and pp={pp}: use more microbatches, or "
            "parallel.schedule=gpipe or vocab_1f1b"
        )
    rounds = max(1, microbatches // pp)
    if schedule in IN_ROUNDS and microbatches % rounds:
        raise ValueError(
            f"parallel.microbatches must be a multiple of {rounds}, the number of rounds "
            f"(microbatches // pp) of parallel.schedule={schedule} with parallel.pp={pp}, got "
            f"{microbatches}: use {microbatches // pp * pp}"
        )


def split_layers(
    num_layers: int, stages: int, layers_per_stage: tuple[int, ...] | None
) -> tuple[range, ...]:
    """Splits layers over stages.

    Without `layers_per_stage` the split is as even as possible; the first stages may have one layer
    more.

    Raises:
        ValueError: there are too few layers, or `layers_per_stage` has another number of stages or
            layers, or none for a stage in the middle.
    """
    if layers_per_stage is None:
        if num_layers < stages:
            raise ValueError(
                f"model.layers must be at least one for each of the pipeline's {stages} stages, "
                f"got {num_layers}: use fewer stages or more layers, or set "
                "parallel.layers_per_stage, by which the first and the last stage may have none"
            )
        layers_per_stage = tuple(
            num_layers // stages + (i < num_layers % stages) for i in range(stages)
        )
    rule = None
    if len(layers_per_stage) != stages:
        rule = f"have an entry for each of the pipeline's {stages} stages (pp x stages a rank)"
    elif sum(layers_per_stage) != num_layers:
        rule = f"add up to model.layers={num_layers}"
    elif min(layers_per_stage[1:-1], default=1) < 1:
        rule = "be >= 1 for all stages but the first, which embeds, and the last, which norms"
    if rule is not None:
        raise ValueError(f"parallel.layers_per_stage must {rule}, got {list(layers_per_stage)}")
    return tuple(range(a, b) for a, b in pairwise(accumulate(layers_per_stage, initial=0)))
