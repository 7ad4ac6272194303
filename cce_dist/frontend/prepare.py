"""The steps before a call: casts, validation, the plan, the tokens that count."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cce_dist.algorithm.call import Call
from cce_dist.algorithm.plan import plan_of
from cce_dist.core.types import accumulate_dtype
from cce_dist.frontend import agreement, validation
from cce_dist.frontend.dtensor import LocalParts, arrived, is_dtensor, local_parts
from cce_dist.frontend.inputs import Inputs
from cce_dist.frontend.quantized import QuantizedWeight, StepQuantizer
from cce_dist.frontend.reduction import (
    Finish,
    PickedTokens,
    TokenLoss,
    pick_tokens,
    scale_of_tokens,
)
from cce_dist.options import LossOptions
from cce_dist.ranks.transport import group_rank, group_size, resolve_group
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cce_dist.ranks.transport import Group


class Entered(NamedTuple):
    """The arguments of a call: plain tensors, hidden and weight cast by autocast."""

    inputs: Inputs
    options: LossOptions
    group: Group | DeviceMesh | None
    vocab_shard: VocabShard | None
    parts: LocalParts | None  # of the arguments that were DTensors; None: none was


_PLAIN = {Tensor, nn.Parameter, type(None)}


def enter(
    inputs: Inputs,
    options: LossOptions,
    group: Group | DeviceMesh | None,
    vocab_shard: VocabShard | None,
) -> Entered:
    """Takes the local parts of DTensors, waits for collectives that write a tensor, and casts.

    Raises:
        ValueError: a DTensor's placement is not supported, or weight is not in memory.
    """
    parts = None
    if not _PLAIN.issuperset(map(type, inputs)) and any(map(is_dtensor, inputs)):
        parts = local_parts(inputs, options, group, vocab_shard)
        inputs, options = parts.inputs, parts.options
        group, vocab_shard = parts.group, parts.vocab_shard
    validation.require_plain_call(inputs.weight, *inputs)
    hidden, weight = cast_by_autocast(arrived(inputs.hidden), arrived(inputs.weight))
    inputs = Inputs(hidden, weight, *inputs[2:])
    return Entered(inputs, options, group, vocab_shard, parts)


class Validated(NamedTuple):
    """The results of validation: the ranks, this rank's rows, and the targets' shape."""

    group: Group | None
    shard: VocabShard
    shape: torch.Size  # targets'


def validate(
    inputs: Inputs,
    options: LossOptions,
    group: Group | DeviceMesh | None,
    vocab_shard: VocabShard | None,
) -> Validated:
    """Checks types, shapes and devices of the arguments; `check_target_range` is left.

    Raises:
        ValueError: an argument is not supported; the message says which.
    """
    hidden, weight, ranks = inputs.hidden, inputs.weight, resolve_group(group)
    validation.check_group_device(ranks, hidden)
    # This check goes first: if one rank failed another check, the other ranks would wait for it.
    if agreement.is_wanted(options):
        agreement.check_ranks(ranks, inputs, options)
    validation.check_hidden_and_weight(hidden, weight)
    rank, world_size = group_rank(ranks), group_size(ranks)
    validation.check_segments(options, world_size)
    shard = validation.check_shard(vocab_shard, weight, rank, world_size)
    return Validated(ranks, shard, validation.check_tensors(inputs, options, shard, world_size))


def prepare(
    inputs: Inputs,
    options: LossOptions,
    group: Group | DeviceMesh | None,
    vocab_shard: VocabShard | None,
    quantized_weight: QuantizedWeight | StepQuantizer | None,
    *,
    record: bool,  # a backward may follow
    entropy: bool = False,  # compute the entropy, whatever the options say
    backward_is_next: bool = False,  # see Plan
    is_extended: bool = False,  # hidden is a view of its first rows: see `Extension`
) -> tuple[Call, Finish]:
    """Validates the arguments of a public function; picks the tokens and the backend.

    Raises:
        ValueError: an argument is not supported; the message says which.
    """
    hidden, weight, targets, _, token_weight, class_weight, grad_weight_into, _ = inputs
    checked = inputs
    if is_extended:
        # The checks compare shapes, and the view lacks rows.
        checked = inputs._replace(hidden=hidden[:1].expand(len(targets), -1))
    ranks, shard, shape = validate(checked, options, group, vocab_shard)
    if quantized_weight is not None:
        quantized_weight.check(weight, shard.num_classes, options)

    plan = plan_of(
        hidden,
        targets.numel(),
        options,
        ranks,
        shard,
        # Below FULL_ORDER tokens the filter's threshold grows with their number. Ignored tokens of
        # an extension must not raise it.
        ordered_tokens=len(hidden) if is_extended else None,
        entropy=entropy,
        has_quantized=quantized_weight is not None,
    )
    with torch.no_grad():
        picked = pick_tokens(targets, options, functools.partial(plan.backend.pick, shard=shard))
        validation.check_target_range(
            picked.targets, shard.vocab_size, options.ignore_index, picked.in_range
        )
        terms = TokenLoss.of(picked, options, token_weight, class_weight, hidden)
    if backward_is_next:
        plan = replace(plan, backward_is_next=True)
    call = Call(
        plan=plan,
        rows=picked.rows,
        local_targets=narrow(local_targets_of(picked, shard), shard.vocab_size),
        count=picked.count,
        device_type=hidden.device.type,
        class_weight=slice_of(class_weight, shard),
        quantized=quantized_weight.rows if isinstance(quantized_weight, QuantizedWeight) else None,
        grad_weight_into=grad_weight_into,
        tail_mass="tail_mass" in options.stats,
        record=record,
        quantize_once=quantized_weight.rows
        if isinstance(quantized_weight, StepQuantizer)
        else None,
    )
    return call, Finish(terms, picked, shape, options, shard.vocab_size)


def differentiates(value: object) -> bool:
    """Tells whether a backward may ask for the gradient of `value`; False if it is no tensor."""
    return torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad


def scale_for(
    temperature: Tensor | None, picked: PickedTokens, options: LossOptions, hidden: Tensor
) -> Tensor | None:
    """Returns the factor of each token's logits, [N]; None: 1.

    Raises:
        ValueError: a temperature is out of range; on a GPU a device-side assertion fails instead.
    """
    if temperature is None:
        return None
    # Only `token_logprobs` passes a temperature, and it never sets these options.
    assert options.logits == "full" and options.gradient != "in_forward"
    assert options.label_smoothing == 0
    scale = scale_of_tokens(temperature, picked, options.shift, accumulate_dtype(hidden.dtype))
    validation.check_scale(scale.detach(), options.logit_scale)
    return scale


_CAST = (torch.bfloat16, torch.float16, torch.float32)


def cast_by_autocast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Casts hidden and weight to autocast's dtype within an autocast region.

    As in autocast, float64, integers and other dtypes stay.
    """
    if not isinstance(hidden, Tensor) or not isinstance(weight, Tensor):
        return hidden, weight
    return _cast(hidden), _cast(weight)


def _cast(tensor: Tensor) -> Tensor:
    dtype = operand_dtype(tensor)
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def operand_dtype(tensor: Tensor) -> torch.dtype:
    """Returns the dtype to which `cast_by_autocast` casts hidden or weight."""
    device = tensor.device.type
    # The meta device has no autocast, and is refused later.
    if device == "meta" or tensor.dtype not in _CAST or not torch.is_autocast_enabled(device):
        return tensor.dtype
    return torch.get_autocast_dtype(device)


def local_targets_of(picked: PickedTokens, shard: VocabShard) -> Tensor:
    if picked.local_targets is not None:
        return picked.local_targets
    # A shard of the whole vocabulary holds every target: `check_target_range` has seen them.
    has_all = shard.num_classes == shard.vocab_size
    local = picked.targets if has_all else shard.local_targets(picked.targets)
    counts = picked.counts
    return local if counts is None else local.masked_fill(~counts, -1)


def narrow(indices: Tensor, size: int) -> Tensor:
    """Casts int64 indices below `size` to int32 where they fit."""
    return indices.int() if size < 2**31 else indices


def slice_of(class_weight: Tensor | None, shard: VocabShard) -> Tensor | None:
    if class_weight is None:
        return None
    return class_weight[shard.start : shard.start + shard.num_classes]
