"""Checks of arguments, stages and steps for the vocabulary over pipeline ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cce_dist.frontend.validation import require_values
from cce_dist.options import LossOptions
from cce_dist.ranks.transport import group_size

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# An attribute of stages, which outlive a head.
_BROKEN = "cce_dist_is_broken"


def check_scalar(options: LossOptions) -> None:
    """Refuses a loss that is no scalar: a schedule begins its backward at a microbatch's loss."""
    if options.reduction == "none":
        raise ValueError(
            "options.reduction must be 'mean' or 'sum' under a schedule that is handed a "
            "microbatch's loss, got 'none'"
        )


def check_weight(
    group: ProcessGroup | None, weight: Tensor, shape: tuple[int, ...], options: LossOptions
) -> None:
    if group is None:
        raise ValueError("group must be the pipeline's ranks, got None")
    ranks = dist.get_process_group_ranks(group)
    if ranks != sorted(ranks):
        raise ValueError(f"group must have its ranks in ascending order, got {ranks}")
    require_values("weight", weight)
    if weight.ndim != 2:
        raise ValueError(f"weight must be [V_local, D], got {list(weight.shape)}")
    if len(shape) < 2 or shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden_shape must be [..., D] with D = {weight.shape[1]} of weight, got {shape}"
        )
    refused = {
        "gradient": options.gradient == "in_forward",
        "stats": bool(options.stats),
        "sequence_parallel": options.sequence_parallel,
        "keep_logits": options.keep_logits,
        "check_ranks": options.check_ranks,
        "invariant": options.invariant,
    }
    for name, is_refused in refused.items():
        if is_refused:
            got = getattr(options, name)
            raise ValueError(f"options.{name} is not supported over pipeline ranks, got {got!r}")
    for name in ("_post_accumulate_grad_hooks", "_backward_hooks"):
        if getattr(weight, name, None):
            raise ValueError(
                "weight must have no gradient hooks, as DDP and FSDP put on parameters: none would "
                "run; keep the head out of the modules that they wrap"
            )


def check_product(
    group: ProcessGroup,
    vocab_group: ProcessGroup,
    tensor_group: ProcessGroup | None,
    sequence_parallel: bool,
) -> None:
    """Checks that vocab_group, whose ranks share the vocabulary, is the product of the others."""
    size, vocab, tensor = map(group_size, (group, vocab_group, tensor_group))
    if vocab != size * tensor:
        raise ValueError(
            f"vocab_group must have as many ranks as group times tensor_group, {size} x {tensor}, "
            f"got {vocab}"
        )
    if sequence_parallel and tensor_group is None:
        raise ValueError("sequence_parallel=True needs tensor_group, got None")


def check_microbatch(
    hidden: Tensor,
    targets: Tensor,
    hidden_shape: tuple[int, ...],
    targets_shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Compares the last stage's tensors with the shapes and dtypes that all ranks expect."""
    if hidden.shape != hidden_shape or hidden.dtype != dtype:
        advice = "pad microbatches to one shape"
        if hidden.dtype != dtype:
            advice = "the last stage's output, also under autocast, must have weight's dtype"
        raise ValueError(
            f"hidden of every microbatch must be {list(hidden_shape)} {dtype}, which the other "
            f"ranks expect, got {list(hidden.shape)} {hidden.dtype}; {advice}"
        )
    check_ids("targets", targets, targets_shape)


def check_ids(name: str, ids: Any, shape: tuple[int, ...]) -> None:
    """Checks a microbatch's tokens or targets."""
    if not isinstance(ids, Tensor) or ids.shape != shape or ids.dtype != torch.int64:
        got = f"{list(ids.shape)} {ids.dtype}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(
            f"{name} of every microbatch must be {list(shape)} torch.int64, hidden's shape without "
            f"D, got {got}"
        )


def check_step(
    stages: Sequence[Any],
    microbatches: Sequence[Any],
    *,
    targets_shape: tuple[int, ...],
    embeds: bool,
) -> None:
    """Checks the arguments of a rank's schedule, before its first pass.

    Args:
        microbatches: the arguments of the schedule's `_step_microbatches`: positional arguments,
            keywords and targets of each microbatch.
        embeds: the first stage's tokens go to a `TiedEmbedding`.
    """
    args, keywords, targets = microbatches
    if any(stage.is_last for stage in stages):
        if targets is None:
            raise ValueError(
                "target must be given to the schedule on the rank of the last stage, got None"
            )
        for each in targets:
            check_ids("targets", each, targets_shape)
    for stage in stages:
        if stage.is_first:
            _check_inputs(stage, args or (), embeds, by_keyword=any(keywords or ()))


def _check_inputs(
    stage: Any, args: Sequence[tuple[Any, ...]], embeds: bool, *, by_keyword: bool
) -> None:
    if embeds and not (args and all(args)):
        raise ValueError(
            "tokens must be the first positional argument of the schedule's step on the rank of "
            "the first stage, since the embedding is tied, got none"
        )
    every = [_shapes(each) for each in args]
    # If some inputs come by keyword, input_args need not list the positional ones. Then
    # `check_output` shows that unlisted inputs have the right shape: the stage's output has.
    static = None if by_keyword else _known(stage, "_user_meta", "inputs", "inputs_meta")
    wanted = [_shapes(static)] * bool(static) + every
    for index, shapes in enumerate(every):
        if shapes != wanted[0]:
            raise ValueError(
                f"inputs of every microbatch must have one shape, {wanted[0]}, which the other "
                f"ranks expect, got {shapes} in microbatch {index}; pad microbatches to one shape"
            )


def _known(stage: Any, meta: str, name: str, old_name: str) -> Sequence[Any] | None:
    """Reads what a stage knows of its tensors: stage.meta.name in torch 2.13, or before that
    stage.old_name."""
    known = getattr(stage, meta, None)
    return getattr(stage, old_name, None) if known is None else getattr(known, name)


def _shapes(tensors: Sequence[Any] | None) -> list[list[int]]:
    return [list(x.shape) for x in tensors or () if hasattr(x, "shape")]


def check_output(stage: Any, output: Any) -> None:
    """Compares a stage's output with the next stage's input, before it is sent.

    gloo ends the next stage's process, without a reason, if the output is larger than its input.
    If the output is smaller, gloo leaves the end of the receiving tensor as it was. (torch makes
    the same comparison, but only under TORCH_DISTRIBUTED_DEBUG=DETAIL.)
    """
    # Its output_args, or the outputs that it has sent before.
    wanted = _known(stage, "_stage_meta", "outputs", "_outputs_meta")
    tensors = output if isinstance(output, tuple | list) else (output,)
    # Each rank sends its part of a DTensor.
    if wanted is None or stage.is_last or any(isinstance(x, DTensor) for x in tensors):
        return
    sent, expected = ([(x.shape, x.dtype) for x in each] for each in (tensors, wanted))
    if sent != expected:
        advice = "pad microbatches to one shape"
        if [dtype for _, dtype in sent] != [dtype for _, dtype in expected]:
            advice = "give the stages output_args and input_args of the dtypes that autocast makes"
        raise ValueError(
            f"the output of stage {stage.stage_index} must be {_named(expected)}, as the next "
            f"stage expects of every microbatch, got {_named(sent)}; {advice}"
        )


def _named(tensors: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} {dtype}" for shape, dtype in tensors)


def check_same(group: ProcessGroup, values: Mapping[str, object]) -> None:
    """Compares values over all ranks of the group.

    Args: values: this rank's, by the names that an error gives them; the same names on every rank.
    Raises:
        ValueError: on every rank, if a value differs between ranks.
    Collectives: one gather of objects over the group.
    """
    everyone: list[Mapping[str, object]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, values, group=group)
    for name in values:
        by_rank = [each.get(name) for each in everyone]
        if any(x != by_rank[0] for x in by_rank):
            raise ValueError(f"{name} must be the same on every rank, got by rank: {by_rank}")


def refuse_broken(head: Any, stages: Sequence[Any]) -> None:
    """Refuses a `PipelineHead` or stages of a step that failed, also together with a new head."""
    if head.is_broken or any(getattr(stage, _BROKEN, False) for stage in stages):
        raise RuntimeError(
            "an earlier step failed and left ranks apart: make a new head and new stages over a "
            "new group, since a tensor that was sent in that step may still be on its way"
        )


def mark_broken(head: Any, stages: Sequence[Any], is_broken: bool) -> None:
    """Marks the head and the stages when a step begins, and unmarks them if it does not fail."""
    head.is_broken = is_broken
    for stage in stages:
        setattr(stage, _BROKEN, is_broken)


def refuse_loss_kwargs(loss_kwargs: Mapping[str, object]) -> None:
    """Refuses the loss_kwargs of a schedule's `step`, which hands them to loss_fn."""
    if loss_kwargs:
        raise ValueError(
            f"loss_kwargs must be empty, got {sorted(loss_kwargs)}: give PipelineHead its bias, "
            "class_weight and options (softcap, z_loss, ...), which every rank needs to know"
        )
