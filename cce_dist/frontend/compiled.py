"""The loss within torch.compile, and of fake tensors.

The compiler traces validation and reductions. It does not look into the operators of
`compiled_operators` between them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cce_dist.algorithm.plan import wanted_of
from cce_dist.backends.torch.pick import pick_on_device
from cce_dist.core.tracing import is_traced
from cce_dist.frontend import validation
from cce_dist.frontend.compiled_operators import BOUND, Bound, has_plain
from cce_dist.frontend.inputs import Inputs
from cce_dist.frontend.prepare import differentiates, local_targets_of, narrow, scale_for, slice_of
from cce_dist.frontend.quantized import QuantizedWeight, StepQuantizer
from cce_dist.frontend.reduction import Finish, LossOutput, TokenLoss, pick_tokens
from cce_dist.options import Filter, LossOptions, Screen
from cce_dist.python_numbers import constant
from cce_dist.ranks.transport import group_rank, group_size, is_over_mpi, resolve_group
from cce_dist.vocab_shard import VocabShard

OPTIONS = tuple(LossOptions.__dataclass_fields__)
NESTED = {
    name: (kind, tuple(kind.__dataclass_fields__))
    for name, kind in {"filter": Filter, "screen": Screen}.items()
}


@torch.compiler.assume_constant_result
def _bind(
    group: Any, shard: Any, num_rows: int, option_values: tuple[Any, ...]
) -> tuple[str, int, int, int, int]:
    """Makes the key of a compiled call, once, when the call is traced.

    Dataclasses come as tuples of their values: this function cannot read the tracer's stand-ins for
    dataclasses.

    Args: option_values: the values of LossOptions, in the order of its fields.
    Returns: the key; start, stop and vocab_size of the shard; the number of ranks.
    """
    values = dict(zip(OPTIONS, option_values, strict=True))
    for name, (kind, _) in NESTED.items():
        if isinstance(values[name], tuple):
            values[name] = kind(*values[name])
    options = LossOptions(**values)
    # torch 2.13 traces with a stand-in for the group.
    group = resolve_group(getattr(group, "real_obj", group))
    for name, instead in {
        "keep_logits": "the compiler decides what stays in memory from the forward to the backward",
        "check_ranks": "leave it out, the environment's CCE_DIST_CHECK_RANKS too",
    }.items():
        if getattr(options, name):
            raise ValueError(f"{name} must be False within torch.compile: {instead}")
    if options.gradient == "in_forward":
        # A backward gives the same gradients, and the forward need not keep them.
        every = not options.filters
        filter_ = Filter() if every else options.filter
        options = replace(options, gradient="exact" if every else "filtered", filter=filter_)
    rank, size = group_rank(group), group_size(group)
    validation.check_segments(options, size)
    rows = torch.empty(num_rows, 0, device="meta")
    shard = VocabShard(*shard) if isinstance(shard, tuple) else shard
    shard = validation.check_shard(shard, rows, rank, size)
    key = f"{'' if group is None else group.group_name!r} {shard} {options}"
    BOUND[key] = Bound(options, group, shard)
    return key, shard.start, shard.stop, shard.vocab_size, size


def refuse_mpi(group: Any) -> None:
    if is_over_mpi(group):
        where = "within torch.compile and of fake tensors"
        raise ValueError(f"group must be a ProcessGroup {where}, got an MPIGroup")


def bind(
    weight: Tensor, options: LossOptions, group: Any, vocab_shard: VocabShard | None
) -> tuple[str, VocabShard, int]:
    """Returns the key of a compiled call, its shard and the number of ranks."""
    bounds: Any = vocab_shard
    if isinstance(vocab_shard, VocabShard):
        bounds = (vocab_shard.start, vocab_shard.stop, vocab_shard.vocab_size)
    # `range` turns a symbol into a number. The size is a symbol after heads of several sizes have
    # been compiled.
    num_rows = len(range(weight.shape[0]))
    key, start, stop, vocab_size, size = _bind(group, bounds, num_rows, _option_values(options))
    return key, VocabShard(start, stop, vocab_size), size


def compute(
    inputs: Inputs,
    options: LossOptions,
    group: Any,
    vocab_shard: VocabShard | None,
    quantized_weight: QuantizedWeight | StepQuantizer | None,
) -> Tensor | LossOutput:
    """Computes the same as `eager.compute`, under a tracer or on fake tensors.

    Results and gradients of fake tensors have shapes alone. Collectives of fake tensors: none.
    """
    hidden, weight, targets, bias, token_weight, class_weight, into, temperature = inputs
    refuse_mpi(group)
    if is_traced():
        _refuse_tensors(quantized_weight, into)
    else:
        # Fake tensors have no values to compare and no memory to keep.
        options = replace(options, keep_logits=None, check_ranks=False)
    validation.check_hidden_and_weight(hidden, weight)
    key, shard, size = bind(weight, options, group, vocab_shard)
    vocab_size = shard.vocab_size
    shape = validation.check_tensors(inputs, options, shard, size)
    picked = pick_tokens(targets, options, pick_on_device)
    assert picked.rows is not None and picked.count is not None
    validation.check_target_range(picked.targets, vocab_size, options.ignore_index)
    terms = TokenLoss.of(picked, options, token_weight, class_weight, hidden)
    scale = scale_for(temperature, picked, options, hidden)
    returned_weight = weight if into is None else None
    needs = [differentiates(x) for x in (hidden, returned_weight, bias, temperature)]
    nll, lse, smooth, entropy, others, _ = torch.ops.cce_dist.two_pass(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        scale,
        slice_of(class_weight, shard),
        picked.rows,
        narrow(local_targets_of(picked, shard), vocab_size),
        picked.count,
        needs,
        key,
    )
    wanted = wanted_of(options)
    finish = Finish(terms, picked, shape, options, vocab_size)
    return finish.result(
        nll,
        lse,
        smooth if wanted.smooth_logit else None,
        entropy if wanted.entropy else None,
        _plain(list(others), options),
    )


def _option_values(options: LossOptions) -> tuple[Any, ...]:
    """Returns the values of all options in order; filter and screen become tuples of values."""
    values = []
    for name in OPTIONS:
        value = getattr(options, name)
        if name in NESTED and isinstance(value, NESTED[name][0]):
            value = tuple(constant(getattr(value, field)) for field in NESTED[name][1])
        values.append(constant(value))
    return tuple(values)


def _refuse_tensors(quantized_weight: Any, grad_weight_into: Tensor | None) -> None:
    if quantized_weight is not None:
        raise ValueError("quantized_weight must be None within torch.compile")
    if grad_weight_into is not None:
        why = "a backward may not write into the caller's tensors"
        raise ValueError(f"grad_weight_into must be None within torch.compile, where {why}")


def _plain(others: list[Tensor], options: LossOptions) -> list[Tensor | None]:
    """Detaches the statistics: a tracer takes all outputs of an operator for differentiable."""
    return [others.pop(0).detach() if has else None for has in has_plain(options)]
