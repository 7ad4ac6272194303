"""The operators of a compiled loss: `two_pass.forward` and `backward`, collectives included.

The forward returns tensors for the backward, so that the compiler can keep them or compute them
again. The compiler's stand-ins for tensors have shapes alone: `_state_like` makes stand-ins for the
forward's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cce_dist.algorithm import two_pass as steps
from cce_dist.algorithm.call import Call
from cce_dist.algorithm.plan import Plan, plan_of, wanted_of
from cce_dist.algorithm.saved import put_together, take_apart
from cce_dist.algorithm.two_pass import Needs, Once, Selection, State, plain_outputs
from cce_dist.backends.protocol import Scores
from cce_dist.core.stats import Stats
from cce_dist.core.types import Upstream, accumulate_dtype
from cce_dist.options import LossOptions
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group


# Bytes at which the compiler takes each operator's result to begin.
ALIGNED = 16


@dataclass(frozen=True)
class Bound:
    """The arguments of a compiled call that are no tensors; operators know them by a string key."""

    options: LossOptions
    group: Group | None
    shard: VocabShard

    def plan(self, hidden: Tensor, num_tokens: int, needs: list[bool]) -> Plan:
        """Makes the plan of a call.

        Args: needs: whether hidden, weight, bias and scale need a gradient, in this order.
        """
        options, group, shard = self.options, self.group, self.shard
        return plan_of(hidden, num_tokens, options, group, shard, entropy=needs[3])


BOUND: dict[str, Bound] = {}


def has_plain(options: LossOptions) -> tuple[bool, ...]:
    """Tells for each statistic whether a call computes it.

    Returns: sum_p2, max_logit, target_is_argmax, mean_logit, m2_logit, screened, tail mass.
    """
    wanted = wanted_of(options)
    some = wanted.correct or wanted.moments
    moments = wanted.moments
    has = (wanted.sum_p2, some, wanted.correct, moments, moments, wanted.screened)
    return (*has, "tail_mass" in options.stats)


class OperatorContext:
    """A stand-in for the context of an autograd function, in an operator that calls it."""

    def __init__(self, needs: list[bool]) -> None:
        self.needs_input_grad = tuple(needs)
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, _: bool) -> None: ...

    def mark_non_differentiable(self, *_: Tensor) -> None: ...


def call_of(
    plan: Plan,
    class_weight: Tensor | None,
    rows: Tensor,
    local_targets: Tensor,
    count: Tensor,
    record: bool,
) -> Call:
    device_count: Tensor | None = count
    if not plan.backend.traits.counts_on_device:
        known = int(count)
        rows, local_targets, device_count = rows[:known], local_targets[:known], None
    return Call(
        plan=plan,
        rows=rows,
        local_targets=local_targets,
        count=device_count,
        device_type=rows.device.type,
        class_weight=class_weight,
        quantized=None,
        grad_weight_into=None,
        tail_mass="tail_mass" in plan.options.stats,
        record=record,
    )


def _of_known(scale: Tensor | None, call: Call) -> Tensor | None:
    """Cuts the scale to the tokens of the call."""
    return None if scale is None else scale[: call.local_targets.shape[0]]


def padded(values: Tensor, size: int) -> Tensor:
    short = size - values.shape[0]
    return values if short == 0 else torch.cat([values, values.new_zeros(short)])


@torch.library.custom_op(
    "cce_dist::two_pass",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor? scale, Tensor? class_weight, "
    "Tensor rows, Tensor local_targets, Tensor count, bool[] needs, str key) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor[], Tensor[])",
)
def two_pass(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    class_weight: Tensor | None,
    rows: Tensor,
    local_targets: Tensor,
    count: Tensor,
    needs: list[bool],
    key: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Runs `two_pass.forward`.

    Returns: nll, lse, smooth_logit, entropy, others, and the backward's state. Each vector is [N]
        over all tokens, first the tokens that count; it is empty if the call does not compute it.
    """
    bound, size = BOUND[key], len(rows)
    plan = bound.plan(hidden, size, needs)
    call = call_of(plan, class_weight, rows, local_targets, count, any(needs))
    scale = _of_known(scale, call)
    with torch.autocast(hidden.device.type, enabled=False):
        out = steps.forward(hidden, weight, bias, scale, call, Needs(*needs))
    stats, lse = out.stats, out.stats.lse
    vectors = (stats.nll, lse, stats.smooth_logit, stats.entropy)
    nothing = lse.new_empty(0)
    outputs = [nothing if x is None else padded(x, size) for x in vectors]
    plain = plain_outputs(stats, out.tail_mass)
    others = [padded(x, size) for x in plain if x is not None]
    state: list[Tensor] = []
    if out.state is not None and plan.backend.traits.counts_on_device:
        selection = out.state.selection
        scores = selection.scores if selection.kept is None else selection.kept.scores
        rest = [] if stats.lse_rest is None else [stats.lse_rest]
        state = [stats.target_logit, *rest, *take_apart(scores)[1]]
    tensors = apart([*outputs, *others, *state])
    end = 4 + len(others)
    return (*tensors[:4], tensors[4:end], tensors[end:])  # pyright: ignore[reportReturnType]


def apart(tensors: list[Tensor]) -> list[Tensor]:
    """Copies each tensor that shares memory with an earlier one: operators may not return views.
    Copies each that does not begin at ALIGNED bytes, too: compiled loops take it to do so."""
    seen: set[int] = set()
    out = []
    for tensor in tensors:
        memory = tensor.untyped_storage().data_ptr()
        is_aligned = tensor.storage_offset() * tensor.itemsize % ALIGNED == 0
        out.append(tensor if memory not in seen and is_aligned else tensor.clone())
        seen.add(memory)
    return out


@two_pass.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    class_weight: Tensor | None,
    rows: Tensor,
    local_targets: Tensor,
    count: Tensor,
    needs: list[bool],
    key: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    bound, size = BOUND[key], rows.shape[0]
    dtype, wanted = accumulate_dtype(hidden.dtype), wanted_of(bound.options)

    def vector(is_wanted: bool = True) -> Tensor:
        return hidden.new_empty(size if is_wanted else 0, dtype=dtype)

    others = [vector() for has in has_plain(bound.options) if has]
    smooth, entropy = vector(wanted.smooth_logit), vector(wanted.entropy or needs[3])
    state = _state_like(hidden, weight, size, bound, needs) if any(needs) else []
    return vector(), vector(), smooth, entropy, others, state


def _state_like(
    hidden: Tensor, weight: Tensor, size: int, bound: Bound, needs: list[bool]
) -> list[Tensor]:
    """Returns stand-ins for the forward's state.

    The torch backend has no state here: it would have a row for each token that counts, and a
    compiler cannot know their number. Its backward computes the forward again, on every rank.
    """
    plan = bound.plan(hidden, size, needs)
    if not plan.backend.traits.counts_on_device:
        return []
    scores = _scores_like(plan, size, weight)
    # The target logit, and `Stats.lse_rest` of fp32 inputs.
    vectors = 2 if weight.dtype == torch.float32 else 1
    of_tokens = [hidden.new_empty(size, dtype=torch.float32) for _ in range(vectors)]
    return [*of_tokens, *take_apart(scores)[1]]


def _scores_like(plan: Plan, size: int, weight: Tensor) -> Scores | None:
    if not plan.filters:
        return None
    return plan.backend.scores_like(size, plan.shard.num_classes, weight)


@torch.library.custom_op(
    "cce_dist::two_pass_backward",
    mutates_args=(),
    schema="(Tensor? grad_nll, Tensor? grad_lse, Tensor? grad_smooth, Tensor? grad_entropy, "
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor? scale, Tensor? class_weight, "
    "Tensor rows, Tensor local_targets, Tensor count, Tensor lse, Tensor entropy, Tensor[] state, "
    "bool[] needs, str key) -> Tensor[]",
)
def two_pass_backward(
    grad_nll: Tensor | None,
    grad_lse: Tensor | None,
    grad_smooth: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    class_weight: Tensor | None,
    rows: Tensor,
    local_targets: Tensor,
    count: Tensor,
    lse: Tensor,
    entropy: Tensor,
    state: list[Tensor],
    needs: list[bool],
    key: str,
) -> list[Tensor]:
    """Runs `two_pass.backward`. Returns the gradients that hidden, weight, bias and scale need."""
    bound = BOUND[key]
    plan = bound.plan(hidden, len(rows), needs)
    call = call_of(plan, class_weight, rows, local_targets, count, record=True)
    known = _of_known(scale, call)
    by_vectors = (grad_nll, grad_lse, grad_smooth, grad_entropy)
    if not plan.backend.traits.counts_on_device:
        size = call.local_targets.shape[0]
        by_vectors = tuple(None if x is None else x[:size] for x in by_vectors)
    tensors, upstream, once = (hidden, weight, bias), Upstream(*by_vectors), Once()
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        if state:
            target_logit, *of_scores = state
            rest = of_scores.pop(0) if weight.dtype == torch.float32 else None
            # The state has only the tensors of the scores.
            like = _scores_like(plan, len(rows), torch.empty_like(weight, device="meta"))
            selection, _ = take_apart(Selection(like, None))
            selection = put_together(selection, iter(of_scores))
            entropies = entropy if plan.wanted.entropy else None
            stats = Stats(lse, target_logit, entropy=entropies, lse_rest=rest)
            saved = State(call, known, stats, selection)
        else:
            out = steps.forward(*tensors, known, call, Needs(*needs))
            assert out.state is not None and out.once is not None
            saved, once = out.state, out.once
        grads = steps.backward(*tensors, saved, once, upstream, Needs(*needs))
    by_scale = None if grads.scale is None else padded(grads.scale, len(rows))
    return needed_of((*tensors, scale), (*grads[:3], by_scale), needs)


def needed_of(
    inputs: tuple[Tensor | None, ...], grads: Sequence[Tensor | None], needs: list[bool]
) -> list[Tensor]:
    """Returns the gradients of the inputs that need one; zeros where a backward gave None."""
    return [
        torch.zeros_like(x) if grad is None else grad
        for x, grad, need in zip(inputs, grads, needs, strict=True)
        if need and x is not None
    ]


def like_needed(inputs: tuple[Any, ...], needs: list[bool]) -> list[Tensor]:
    """Returns stand-ins for the gradients of `needed_of`."""
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, need in zip(inputs, needs, strict=True)
        if need
    ]


@two_pass_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return like_needed(arguments[4:8], arguments[-2])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, needs, key = inputs
    _, lse, _, entropy, _, state = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, lse, entropy, *state)
    ctx.needs, ctx.key = needs, key


def _backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
    *upstream, _, _ = grads
    # The first ten are the eight tensor inputs, lse and entropy.
    saved = ctx.saved_tensors
    tensors, state = saved[:10], list(saved[10:])
    grads_in_order = iter(
        torch.ops.cce_dist.two_pass_backward(*upstream, *tensors, state, ctx.needs, ctx.key)
    )
    input_grads = [next(grads_in_order) if need else None for need in ctx.needs]
    return (*input_grads, *(None for _ in range(6)))


two_pass.register_autograd(_backward, setup_context=_setup)
