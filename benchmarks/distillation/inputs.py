"""Inputs of a distillation: the heads of a teacher and a student that know the same text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zipfile import is_zipfile

import torch
import torch.nn.functional as F
from torch import Tensor

from cce_dist.bench.inputs import (
    COMMON_CHANNEL,
    FREQUENCY_SLOPE,
    BenchInputs,
    Shape,
    draw_targets,
    make_inputs,
    zipf_tensors,
)
from cce_dist.options import require_finite

# Share of the smaller model's channels that both models have; the others are each model's alone.
SHARED_CHANNELS = 0.75
# Standard deviations of the logits, in nats, that each model's other channels add to the shared
# ones. KL(teacher || student) is then about 0.4 nats at temperature 1, and the teacher's entropy
# 2.5 nats for 8192 ids, 3.1 nats for 151936.
TEACHER_SPREAD, STUDENT_SPREAD = 0.5, 1.0
# Times that the most frequent id is counted; the others follow Zipf's law.
MOST_COUNTS = 1e9
# Weight of the teacher in Jensen-Shannon's mixture, and of its KL to the mixture.
JSD_BETA = 0.5

Measured = Literal["forward_kl", "reverse_kl", "jsd"]


@dataclass(frozen=True)
class Teacher:
    """The teacher's side of a distillation: hidden [N, D_teacher], weight [V, D_teacher].

    Args:
        temperature: divides both models' logits.
        divergence: what is measured.
    """

    hidden: Tensor
    weight: Tensor
    temperature: float = 1.0
    divergence: Measured = "forward_kl"


def divergence_of(log_q: Tensor, log_p: Tensor, divergence: Measured) -> Tensor:
    """Computes each token's divergence, [n], from the student's and the teacher's
    log-probabilities, [n, V]."""
    if divergence == "forward_kl":
        return _kl(log_p, log_q)
    if divergence == "reverse_kl":
        return _kl(log_q, log_p)
    log_m = log_mixture(log_q, log_p)
    return JSD_BETA * _kl(log_p, log_m) + (1 - JSD_BETA) * _kl(log_q, log_m)


def log_mixture(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Computes Jensen-Shannon's log(beta p + (1 - beta) q)."""
    return torch.logaddexp(log_p + math.log(JSD_BETA), log_q + math.log(1 - JSD_BETA))


def _kl(near: Tensor, far: Tensor) -> Tensor:
    return F.kl_div(far, near, reduction="none", log_target=True).sum(-1)


def make_models(
    shape: Shape,
    teacher_dim: int,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[BenchInputs, Teacher]:
    """Makes a student and a teacher whose softmaxes resemble those of trained models.

    Both have the channels of `zipf_tensors`: the constant channel of the hidden states, whose
    column of the weight is the id's log-frequency, and the contexts, which the teacher has rotated.
    Normal channels of each model's own make the two softmaxes differ. No logits [N, V] are made.

    Args:
        shape: tokens, vocabulary, and the student's hidden size.
    Returns:
        The student, whose targets are drawn from the teacher at temperature 1, with counts of the
        ids as in a text; and the teacher.
    Raises:
        ValueError: a hidden size is less than 4, or the temperature is not > 0.
    """
    if min(shape.dim, teacher_dim) < 4:
        raise ValueError(f"dim and teacher-dim must be >= 4, got {shape.dim} and {teacher_dim}")
    require_temperature(temperature)
    generator = torch.Generator(device).manual_seed(0)
    num_shared = int(SHARED_CHANNELS * min(shape.dim, teacher_dim))
    sizes = shape.num_tokens, shape.vocab_size, num_shared
    hidden, weight, _ = zipf_tensors(*sizes, generator=generator, dtype=torch.float32)
    log_frequency = weight[:, 0] * (COMMON_CHANNEL / FREQUENCY_SLOPE)
    counts = (MOST_COUNTS * log_frequency.double().exp()).round().long()
    student = _embed(hidden, weight, shape.dim, STUDENT_SPREAD, generator, dtype)
    normal = torch.randn(num_shared - 1, num_shared - 1, generator=generator, device=device)
    rotation = torch.linalg.qr(normal).Q
    for tensor in (hidden, weight):
        tensor[:, 1:] = tensor[:, 1:] @ rotation
    teacher = _embed(hidden, weight, teacher_dim, TEACHER_SPREAD, generator, dtype)
    del hidden, weight
    targets = draw_targets(*teacher, generator)
    inputs = BenchInputs("two models", *student, targets, token_counts=counts)
    return inputs, Teacher(*teacher, temperature)


def load_models(
    student: Path,
    teacher: Path,
    shape: Shape,
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[BenchInputs, Teacher]:
    """Loads two models' inputs of the same text, of `cce-dist bench capture`.

    Args: shape: the number of tokens; the files have the other sizes.
    Raises:
        ValueError: a file has other contents, or the two have other ids or targets.
    """
    require_temperature(temperature)
    for name, path in (("inputs", student), ("teacher-inputs", teacher)):
        if not (path.is_file() and is_zipfile(path)):
            raise ValueError(f"{name} must be a file of `cce-dist bench capture`, got '{path}'")
    ours, theirs = (
        make_inputs(str(path), shape, dtype=dtype, device=device) for path in (student, teacher)
    )
    sizes = [[len(each.weight), len(each.targets)] for each in (ours, theirs)]
    if sizes[0] != sizes[1] or not torch.equal(ours.targets, theirs.targets):
        raise ValueError(
            "teacher-inputs must have the ids and targets of inputs: capture both with one "
            f"--vocab, --megabytes and --tokens; ids and tokens are {sizes[1]} and {sizes[0]}"
        )
    return ours, Teacher(theirs.hidden, theirs.weight, temperature)


def require_temperature(temperature: float) -> None:
    if require_finite("temperature", temperature) <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature!r}")


def _embed(
    hidden: Tensor,  # [N, shared]
    weight: Tensor,  # [V, shared]
    dim: int,
    spread: float,
    generator: torch.Generator,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Returns both with normal channels up to `dim`, which add `spread` nats to the logits."""
    num_shared = hidden.shape[1]
    num_other = dim - num_shared
    scale = 1 / math.sqrt(num_shared)
    grown = []
    for tensor, size in ((hidden, spread / (scale * math.sqrt(num_other))), (weight, scale)):
        wide = tensor.new_empty(len(tensor), dim, dtype=dtype)
        wide[:, :num_shared] = tensor
        shape = len(tensor), num_other
        drawn = torch.randn(shape, generator=generator, device=tensor.device, dtype=dtype)
        wide[:, num_shared:] = drawn.mul_(size)
        grown.append(wide)
    return grown[0], grown[1]
