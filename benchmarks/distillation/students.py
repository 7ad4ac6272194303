"""Small students distilled from a trained teacher on real text, by dense logits and by ours.

Runs of a group differ in the method alone: first weights, batches and teacher are the same.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.converge.converge import (
    Cells,
    Say,
    Trainer,
    Vocabulary,
    Work,
    missing_methods,
    prepare,
    train_and_record,
    trained_once,
)
from benchmarks.converge.plan import CHECKPOINT_SEED, Sizes
from benchmarks.distillation.contenders import CHUNK, dense_divergence
from benchmarks.distillation.inputs import Teacher
from benchmarks.distillation.student_losses import (
    CROSS_ENTROPY,
    DIVERGENCES,
    METHODS,
    StudentLoss,
)
from cce_dist.bench.golden import LossFunction
from cce_dist.train.data.batches import Batches
from cce_dist.train.model.decoder import Decoder, count_parameters
from cce_dist.train.ranks import Ranks


@dataclass(frozen=True)
class StudentSizes:
    """Sizes and settings that all runs of a record share: options of `cce-dist bench students`.

    Args:
        dtype: of autocast and of both heads.
    Raises:
        ValueError: sizes do not fit each other.
    """

    dim: int = 384
    layers: int = 4
    teacher_dim: int = 1024
    teacher_layers: int = 8
    batch: int = 8
    sequence_length: int = 1024
    steps: int = 300
    teacher_steps: int = 1000
    evaluations: int = 3
    held_out_tokens: int = 65536
    lr: float = 1e-3
    teacher_lr: float = 6e-4
    warmup: int = 40
    megabytes: float = 80.0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        # Sizes refuses values that are out of bounds.
        _ = self.teacher

    @property
    def student(self) -> Sizes:
        names = {field.name for field in dataclasses.fields(Sizes)}
        shared = {name: each for name, each in vars(self).items() if name in names}
        return Sizes(**shared, tied=True)

    @property
    def teacher(self) -> Sizes:
        return dataclasses.replace(
            self.student,
            dim=self.teacher_dim,
            layers=self.teacher_layers,
            steps=self.teacher_steps,
            lr=self.teacher_lr,
            evaluations=1,
        )


class Group(NamedTuple):
    """Runs that differ in the method alone."""

    vocab: int
    divergence: str
    seed: int


@dataclass(frozen=True)
class StudentPlan:
    """The groups of runs that one process trains.

    Args:
        work_slice: (k, n): every n-th group, from the k-th on, for n processes that share the work.
    Raises:
        ValueError: a divergence or a method is unknown.
    """

    vocab_sizes: tuple[int, ...]
    divergences: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    work_slice: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        for name, chosen, known in (
            ("divergence", self.divergences, DIVERGENCES),
            ("method", self.methods, METHODS),
        ):
            if unknown := sorted(set(chosen) - set(known)):
                raise ValueError(f"{name} must be among {list(known)}, got {unknown}")

    def groups(self) -> Iterator[Group]:
        """Yields this process's groups by vocabulary, then divergence, then seed."""
        first, count = self.work_slice
        every = itertools.product(self.vocab_sizes, self.divergences, self.seeds)
        return (Group(*group) for group in itertools.islice(every, first, None, count))


StudentWork = Work[StudentPlan, StudentSizes]


@dataclass(frozen=True)
class TeacherModel:
    """A trained teacher.

    Args:
        weight: its head, in the training dtype.
        held_out: ids of held-out sequences, and their hidden states, in batches.
    """

    model: Decoder
    weight: Tensor
    held_out: tuple[tuple[Tensor, Tensor], ...] = ()

    @torch.no_grad()
    def on(self, ids: Tensor) -> Teacher:
        hidden = self.model(ids)
        return Teacher(hidden.to(self.weight.dtype), self.weight)

    @torch.no_grad()
    def kl_of(self, student: Decoder) -> Cells:
        """Returns the mean KL(teacher || student) of held-out tokens, "kl", by logits in fp32."""
        weight = student.head_weight.to(self.weight.dtype).float()
        teacher_weight, total, count = self.weight.float(), 0.0, 0
        for ids, of_teacher in self.held_out:
            hidden = student(ids)
            assert isinstance(hidden, Tensor)
            hidden = hidden.to(self.weight.dtype)
            for rows, others in zip(hidden.split(CHUNK), of_teacher.split(CHUNK), strict=True):
                tensors = rows.float(), weight, others.float(), teacher_weight
                total += float(dense_divergence(*tensors, 1.0).double().sum())
            count += ids.numel()
        return {"kl": total / count}


def train_students(work: StudentWork, ranks: Ranks, say: Say, *, retry: bool) -> None:
    """Trains the runs that the record lacks, one by one.

    Args:
        retry: also trains the runs that failed before.
    Raises:
        ConfigError, ValueError: there is no text, it is too short, or a size is out of bounds.
        JobError: the teacher's run fails.
        RecordError: the record's file has another machine, commit or settings.
        DeviceLostError: a method broke the device and is recorded as failed; call again.
    """
    work.append([])
    vocabulary = teacher = None
    for group in work.plan.groups():
        methods = missing_methods(work, group, retry=retry)
        if not methods:
            continue
        if teacher is None or vocabulary is None or vocabulary.size != group.vocab:
            teacher = None  # frees the last vocabulary's
            vocabulary = prepare(work, work.sizes.student, group.vocab, ("random",), say)
            teacher = _teacher(work, vocabulary, ranks, say)
        trainer = _trainer(work, group, vocabulary, teacher, ranks)
        for method in methods:
            build = _builder(method, group, teacher, trainer)
            parameters = count_parameters(trainer.config).total
            train_and_record(work, group, trainer, method, build, say, parameters=parameters)
        del trainer
        gc.collect()


def _builder(
    method: str, group: Group, teacher: TeacherModel, trainer: Trainer
) -> Callable[[], LossFunction]:
    of_run = None if group.divergence == CROSS_ENTROPY else teacher
    return lambda: student_loss(METHODS[method], group.divergence, of_run, trainer.job.batches)


def _teacher(work: StudentWork, vocabulary: Vocabulary, ranks: Ranks, say: Say) -> TeacherModel:
    sizes = work.sizes
    weights, trained = trained_once(work, "teacher", sizes.teacher, vocabulary, ranks, say)
    say(f"V={vocabulary.size}: the teacher's loss {trained['all']:.4f}")
    config = sizes.teacher.config(vocabulary.size, CHECKPOINT_SEED, "random", work.cache)
    model = Decoder(config, ranks).to(ranks.device)
    model.load_state_dict(weights)
    model.requires_grad_(False)
    held_out = torch.from_numpy(vocabulary.texts["random"].held_out[:-1].astype(np.int64))
    ids = held_out.view(-1, sizes.sequence_length).to(ranks.device)
    weight = model.head_weight.to(getattr(torch, sizes.dtype))
    teacher = TeacherModel(model, weight)
    batches = tuple((some, teacher.on(some).hidden) for some in ids.split(sizes.batch))
    return dataclasses.replace(teacher, held_out=batches)


def _trainer(
    work: StudentWork, group: Group, vocabulary: Vocabulary, teacher: TeacherModel, ranks: Ranks
) -> Trainer:
    sizes = work.sizes.student
    config = sizes.config(group.vocab, group.seed, "random", work.cache)
    text = vocabulary.texts["random"]
    arguments = (config, sizes.marks, text, group._asdict(), vocabulary.key, ranks)
    return Trainer(*arguments, measure=teacher.kl_of)


def student_loss(
    function: StudentLoss, divergence: str, teacher: TeacherModel | None, batches: Batches
) -> LossFunction:
    """Returns a loss for one run, to be called once a step, from the first step on.

    With a teacher each call runs its layers on the ids of the step.
    """
    steps = itertools.count(1)

    def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        if teacher is None:
            return function(divergence, hidden, weight, targets, None)
        ids, expected = (x.to(targets.device) for x in batches.step(next(steps), 0, 1))
        if not torch.equal(expected.flatten(), targets):
            raise RuntimeError("the teacher must get the tokens of the student's step")
        return function(divergence, hidden, weight, targets, teacher.on(ids))

    return loss
