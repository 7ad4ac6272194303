"""The teacher's arguments: placements, checks, padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cce_dist.distillation.function import Teacher
from cce_dist.frontend import validation
from cce_dist.frontend.dtensor import LocalParts, arrived, is_dtensor
from cce_dist.frontend.inputs import options_of
from cce_dist.frontend.prepare import cast_by_autocast
from cce_dist.options import Filter, Screen
from cce_dist.vocab_shard import VocabShard


def local_teacher(
    hidden: Any,
    weight: Any,
    teacher_hidden: Any,
    teacher_weight: Any,
    teacher_bias: Any,
    parts: LocalParts | None,
) -> tuple[Any, Any, Any]:
    """Takes the local parts of the teacher's DTensors, which lie as the student's do.

    Args: parts: of the student's arguments; None: none is a DTensor.
    Raises:
        ValueError: a tensor lies otherwise.
    """
    _require_as("teacher_hidden", teacher_hidden, "hidden", hidden)
    _require_as("teacher_weight", teacher_weight, "weight", weight)
    if is_dtensor(teacher_weight) and len(teacher_weight) != len(weight):
        # Padding at the end of the whole moves the ranks' bounds.
        raise ValueError(
            f"teacher_weight must have weight's {len(weight)} rows in all where they are DTensors, "
            f"got {len(teacher_weight)}"
        )
    if is_dtensor(teacher_hidden):
        teacher_hidden = teacher_hidden.to_local()
        if parts is not None and parts.options.sequence_parallel:
            teacher_hidden = teacher_hidden.movedim(parts.token_dim, 0)
    if is_dtensor(teacher_bias):
        _require_as("teacher_bias", teacher_bias, "weight", weight)
        teacher_bias = teacher_bias.to_local()
    if is_dtensor(teacher_weight):
        teacher_weight = teacher_weight.to_local()
    return teacher_hidden, teacher_weight, teacher_bias


def _require_as(name: str, value: Any, other_name: str, other: Any) -> None:
    if is_dtensor(value) != is_dtensor(other):
        kind = "a DTensor, as" if is_dtensor(other) else "a plain tensor, as"
        raise ValueError(f"{name} must be {kind} {other_name} is, got {type(value)}")
    if is_dtensor(value) and (value.device_mesh, value.placements) != (
        other.device_mesh,
        other.placements,
    ):
        raise ValueError(
            f"{name} must be placed as {other_name}, {list(other.placements)} on "
            f"{other.device_mesh}, got {list(value.placements)} on {value.device_mesh}"
        )


def teacher_logits(softcap: Any, logit_scale: Any) -> tuple[float | None, float]:
    """Checks softcap and scale of the teacher's logits, and returns them.

    Raises:
        ValueError: a value is not allowed.
    """
    try:
        checked = options_of(
            softcap=softcap, logit_scale=logit_scale, filter=Filter(), screen=Screen()
        )
    except ValueError as error:
        # Each message begins with the option's name.
        raise ValueError(f"teacher_{error}") from None
    return checked.softcap, checked.logit_scale


def teacher_of(
    hidden: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    num_weight_rows: int,  # of the student's weight on this rank, its padding included
    shard: VocabShard,
    logits: tuple[float | None, float],  # of `teacher_logits`
    screens: bool = False,
) -> Teacher:
    """Checks the teacher's arguments, and cuts off padding.

    Args: screens: its logits may be computed in 8 bits.
    Raises:
        ValueError: an argument is not supported; the message says which.
    """
    teacher_hidden, teacher_weight = cast_by_autocast(
        arrived(teacher_hidden), arrived(teacher_weight)
    )
    required = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    for name, value in required.items():
        tensor = validation.require_tensor(name, value)
        if tensor.dtype not in validation.DTYPES:
            raise ValueError(f"{name} must be bf16, fp16, fp32 or float64, got {tensor.dtype}")
        validation.require_device(name, tensor, hidden)
    validation.require_no_tangent(teacher_hidden, teacher_weight, teacher_bias)
    validation.require_memory("teacher_weight", teacher_weight)
    rows, shape = list(hidden.shape[:-1]), list(teacher_hidden.shape)
    if not shape or shape[:-1] != rows:
        raise ValueError(
            f"teacher_hidden must be [..., D_teacher] with hidden's tokens {rows}, got {shape}"
        )
    if teacher_weight.dim() != 2 or teacher_weight.shape[1] != shape[-1]:
        raise ValueError(
            f"teacher_weight must be [V_local, D_teacher={shape[-1]}], got "
            f"{list(teacher_weight.shape)}"
        )
    if teacher_weight.dtype != teacher_hidden.dtype:
        raise ValueError(
            f"teacher_weight must have teacher_hidden's dtype {teacher_hidden.dtype}, got "
            f"{teacher_weight.dtype}"
        )
    if screens and teacher_hidden.dtype.itemsize > 2:
        raise ValueError(
            'teacher_hidden must be bf16 or fp16 with logits="screened", since 8-bit logits would '
            f'lose its digits, got {teacher_hidden.dtype}; use logits="full"'
        )
    num_classes, num_rows = shard.num_classes, teacher_weight.shape[0]
    _require_rows(num_rows, num_weight_rows, shard)
    size = [num_rows]
    validation.check_vector("teacher_bias", teacher_bias, size, "teacher_weight's rows", hidden)
    for name, value in (*required.items(), ("teacher_bias", teacher_bias)):
        if value is not None and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} must not require grad: linear_distillation has gradients by the student's "
                "tensors alone; compute the teacher under torch.no_grad(), or pass detach()"
            )
    return Teacher(
        teacher_hidden.reshape(-1, shape[-1]),
        teacher_weight[:num_classes],
        None if teacher_bias is None else teacher_bias[:num_classes],
        *logits,
    )


def _require_rows(num_rows: int, num_weight_rows: int, shard: VocabShard) -> None:
    """Checks the number of rows of teacher_weight beside that of weight."""
    num_classes = shard.num_classes
    if num_rows < num_classes:
        raise ValueError(
            f"teacher_weight must have the student's {num_classes} classes of this rank and may "
            f"have padding after them, got {num_rows} rows"
        )
    # The student's rows may be padded to more than the vocabulary.
    if num_classes < shard.vocab_size <= num_rows != num_weight_rows:
        raise ValueError(
            f"teacher_weight must have this rank's rows of the ids [{shard.start}, {shard.stop}), "
            f"got {num_rows} rows, as many as the whole vocabulary has"
        )
    if shard.stop < shard.vocab_size and num_rows not in (num_classes, num_weight_rows):
        # A head that is padded as a whole, then split, has the next rank's first ids here.
        raise ValueError(
            f"teacher_weight must have the rows of the ids [{shard.start}, {shard.stop}) alone, or "
            f"weight's {num_weight_rows}, on a rank that others follow, got {num_rows} rows: split "
            "the teacher's head where the student's is split"
        )
