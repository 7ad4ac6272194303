"""The loss outside of the compiler: one function of all its inputs, with one backward.

`forward` goes from the arguments to the results, `backward` from the results' gradients to the
inputs'. Neither records autograd's graph, so that where kernels compute, later calls of a kind play
a recording: docs/design/host.md#recordings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,
    _top_saved_tensors_default_hooks,
)

from cce_dist.algorithm import in_forward, two_pass
from cce_dist.algorithm.call import Call, require_in_memory
from cce_dist.algorithm.in_forward import Computed, Objective
from cce_dist.algorithm.once import is_asked_for, once_differentiable, without_autocast
from cce_dist.algorithm.saved import put_together, take_apart
from cce_dist.algorithm.two_pass import Needs, Once, State, plain_outputs
from cce_dist.backends.choose import plays, repeated
from cce_dist.backends.protocol import LossKernels
from cce_dist.core.observer import observer, same_by_identity
from cce_dist.core.records import Packed
from cce_dist.core.stats import Stats
from cce_dist.core.types import Upstream
from cce_dist.frontend import agreement
from cce_dist.frontend.inputs import Extension, Inputs, extended
from cce_dist.frontend.prepare import differentiates, prepare, scale_for
from cce_dist.frontend.quantized import QuantizedWeight, StepQuantizer
from cce_dist.frontend.reduction import Finish, LossOutput, TokenLoss, gathered, grad_of_taken
from cce_dist.options import LossOptions
from cce_dist.ranks.transport import resolve_group
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cce_dist.ranks.transport import Group


class Differentiated(NamedTuple):
    """Whether a backward may ask for the gradients of these inputs."""

    hidden: bool
    weight: bool
    bias: bool
    token_weight: bool
    temperature: bool

    @classmethod
    def of(cls, inputs: Inputs) -> Differentiated:
        tensors = inputs.hidden, inputs.weight, inputs.bias, inputs.token_weight, inputs.temperature
        return cls(*map(differentiates, tensors))

    @property
    def by_steps(self) -> Needs:
        return Needs(self.hidden, self.weight, self.bias, self.temperature)


@dataclass(frozen=True)
class Saved:
    """The tensors and options of a backward."""

    state: State
    terms: TokenLoss
    counts: Tensor | None  # of `PickedTokens`
    shape: torch.Size  # targets'


@dataclass(frozen=True)
class SavedInForward:
    """The tensors and options of a backward of gradient="in_forward"."""

    call: Call
    terms: TokenLoss


class Frame:
    """A `Saved` or `SavedInForward` without its tensors. All plays of a recorded forward return the
    same Frame."""

    def __init__(self, saved: object, needs: Differentiated) -> None:
        self.saved, self.needs = saved, needs
        self.is_recorded = observer.get() is not None


same_by_identity.append(Frame)


class Forward(NamedTuple):
    """The results of `forward`, and the state for a backward; None if there can be no backward."""

    results: Tensor | LossOutput
    frame: Frame | None = None
    saved: Packed = Packed(())
    once: Once | Computed | None = None


def compute(
    inputs: Inputs,
    options: LossOptions,
    group: Group | DeviceMesh | None,
    vocab_shard: VocabShard | None,
    quantized_weight: QuantizedWeight | StepQuantizer | None,
) -> Tensor | LossOutput:
    """Computes the loss of plain tensors eagerly, from the arguments of `prepare`."""
    hidden, weight, needs = inputs.hidden, inputs.weight, Differentiated.of(inputs)
    ranks, extension = resolve_group(group), None
    if plays(options, hidden, weight) and not agreement.is_wanted(options):
        if isinstance(quantized_weight, QuantizedWeight):
            # A recording compares no versions.
            quantized_weight.check(weight, len(quantized_weight.rows.values), options)
        inputs, options, extension = extended(inputs, options, ranks)
        arguments = inputs, options, ranks, vocab_shard, quantized_weight
        with without_autocast(hidden.device.type):
            done = _forward(*arguments, needs, extension is not None)
    else:
        done = forward(inputs, options, ranks, vocab_shard, quantized_weight, needs)
    if done.frame is None and extension is None:
        return done.results
    structure, results = take_apart(done.results)
    if done.frame is not None:
        tensors = hidden, weight, inputs.bias, inputs.token_weight, inputs.temperature
        results = _Results.apply(*tensors, done, results, inputs.grad_weight_into, extension)
    elif extension is not None:
        results = extension.cut_all(results)
    return put_together(structure, iter(results))


def forward(
    inputs: Inputs,
    options: LossOptions,
    group: Group | None,
    vocab_shard: VocabShard | None,
    quantized_weight: QuantizedWeight | StepQuantizer | None,
    needs: Differentiated,
    is_extended: bool = False,  # as in `prepare`
) -> Forward:
    """Computes the results, and the state for a backward. Collectives: the loss's forward."""
    call, finish = prepare(
        inputs,
        options,
        group,
        vocab_shard,
        quantized_weight,
        record=any(needs),
        entropy=needs.temperature,
        backward_is_next=True,
        is_extended=is_extended,
    )
    sums_nll = finish.terms.is_nll and options.reduction != "none"
    # `LossKernels` don't read `Stats.lse_rest`.
    sums_nll = sums_nll and inputs.weight.dtype != torch.float32
    call = replace(call, plan=replace(call.plan, sums_nll=sums_nll))
    one_pass = options.gradient == "in_forward" and any(needs)
    with torch.no_grad(), without_autocast(inputs.hidden.device.type):
        results, saved, once = (_one_pass if one_pass else _two_pass)(inputs, call, finish, needs)
    if saved is None:
        return Forward(results)
    structure, tensors = take_apart(saved)
    return Forward(results, Frame(structure, needs), Packed(tuple(tensors)), once)


def _two_pass(
    inputs: Inputs, call: Call, finish: Finish, needs: Differentiated
) -> tuple[Tensor | LossOutput, Saved | None, Once | None]:
    scale = scale_for(inputs.temperature, finish.picked, finish.options, inputs.hidden)
    flat = inputs.hidden.reshape(-1, inputs.hidden.shape[-1])
    out = two_pass.forward(flat, inputs.weight, inputs.bias, scale, call, needs.by_steps)
    stats = out.stats
    plain = list(plain_outputs(stats, out.tail_mass))
    kernels = _loss_kernels(call)
    if kernels is None:
        vectors = stats.nll, stats.lse, stats.smooth_logit, stats.entropy
        results = finish.result(*vectors, plain)
    else:
        loss = kernels.total(stats.lse, stats.target_logit, finish.terms.denominator)
        results = finish.with_stats(loss, stats.lse, stats.entropy, plain)
    if out.state is None:
        return results, None, None
    return results, Saved(out.state, finish.terms, finish.picked.counts, finish.shape), out.once


def _one_pass(
    inputs: Inputs, call: Call, finish: Finish, needs: Differentiated
) -> tuple[Tensor | LossOutput, SavedInForward, Computed]:
    hidden, weight, bias = inputs.hidden, inputs.weight, inputs.bias
    flat, objective = hidden.reshape(-1, hidden.shape[-1]), _objective(call, finish.terms)
    out = in_forward.forward(flat, weight, bias, call, objective, needs.by_steps)
    plain = list(plain_outputs(out.stats, out.tail_mass))
    results = finish.with_stats(out.loss, out.stats.lse, out.stats.entropy, plain)
    left = replace(call, grad_weight_into=None)
    return results, SavedInForward(left, finish.terms), out.computed


def _loss_kernels(call: Call) -> LossKernels | None:
    return call.plan.backend.loss_kernels if call.plan.sums_nll else None


def _objective(call: Call, terms: TokenLoss) -> Objective:
    kernels, ones = _loss_kernels(call), None

    def objective(stats: Stats, at: slice) -> tuple[Tensor, Upstream]:
        nonlocal ones
        if kernels is None:
            lse_and_smooth = stats.lse, stats.smooth_logit
            total = terms.per_token(stats.nll, *lse_and_smooth, at).sum()
            return total, terms.upstream(*lse_and_smooth, at)
        ones = stats.lse.new_ones(()) if ones is None else ones
        total = kernels.total(stats.lse, stats.target_logit, terms.denominator)
        return total, Upstream(kernels.share_gradient(ones, stats.lse, terms.denominator))

    return objective


# hidden, weight, bias; token_weight and temperature, None if they need no gradient
DifferentiatedInputs: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


class ResultGrads(NamedTuple):
    """The upstream gradients, by each result; None: 0."""

    loss: Tensor | None  # [] or targets' (shifted) shape, as the next two
    lse: Tensor | None
    entropy: Tensor | None


def backward(
    frame: Frame,
    inputs: DifferentiatedInputs,
    packed: Packed,  # `Forward.saved`
    once: Once | Computed,
    grads: ResultGrads,
    grad_weight_into: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients by hidden, [N, D] of all tokens, weight, bias, token_weight and
    temperature. Collectives: the loss's backward."""
    saved = put_together(frame.saved, iter(packed.unpacked()))
    if isinstance(once, Computed):
        return _backward_one_pass(saved, frame.needs, inputs, once, grads, grad_weight_into)
    return _backward_two_pass(saved, frame.needs, inputs, once, grads, grad_weight_into)


def _backward_two_pass(
    saved: Saved,
    needs: Differentiated,
    inputs: DifferentiatedInputs,
    once: Once,
    grads: ResultGrads,
    grad_weight_into: Tensor | None,
) -> tuple[Tensor | None, ...]:
    hidden, weight, bias, token_weight, temperature = inputs
    state, terms = saved.state, saved.terms
    options, rows, stats = state.call.plan.options, state.call.rows, state.stats

    def by_token(grad: Tensor | None) -> Tensor | None:
        """Returns the gradient by a result of each token, [N]."""
        return None if grad is None else gathered(grad, rows, saved.shape, options.shift)

    def by_taken(grad: Tensor, values: Tensor) -> Tensor:
        return grad_of_taken(grad, values, rows, saved.counts, options.shift)

    by_token_weight = by_temperature = None
    upstream, lse = Upstream(), by_token(grads.lse)
    by_loss = grads.loss if options.reduction != "none" else by_token(grads.loss)
    kernels = _loss_kernels(state.call)
    if by_loss is not None and kernels is not None:
        upstream = Upstream(kernels.share_gradient(by_loss, stats.lse, terms.denominator))
    elif by_loss is not None:
        lse_and_smooth = stats.lse, stats.smooth_logit
        upstream = terms.upstream(*lse_and_smooth, grad=by_loss)
        if token_weight is not None:
            each = terms.grad_of_token_weight(stats.nll, *lse_and_smooth, by_loss)
            by_token_weight = by_taken(each, token_weight)
    if lse is not None and upstream.lse is not None:
        lse = lse + upstream.lse
    lse = upstream.lse if lse is None else lse
    upstream = replace(upstream, lse=lse, entropy=by_token(grads.entropy))
    flat = hidden.reshape(-1, hidden.shape[-1])
    out = two_pass.backward(
        flat, weight, bias, state, once, upstream, needs.by_steps, grad_weight_into
    )
    if temperature is not None and out.scale is not None and state.scale is not None:
        # The scale is 1 / temperature.
        by_temperature = by_taken(-out.scale * state.scale.square(), temperature)
    return out.hidden, out.weight, out.bias, by_token_weight, by_temperature


def _backward_one_pass(
    saved: SavedInForward,
    needs: Differentiated,
    inputs: DifferentiatedInputs,
    computed: Computed,
    grads: ResultGrads,
    grad_weight_into: Tensor | None,
) -> tuple[Tensor | None, ...]:
    for name, grad in (("lse", grads.lse), ("entropy", grads.entropy)):
        if grad is not None:
            raise RuntimeError(
                f'stats "{name}" cannot be differentiated with gradient="in_forward", whose '
                'forward computes the gradients; use gradient="filtered" or "exact"'
                + (", or the option z_loss" if name == "lse" else "")
            )
    assert grads.loss is not None
    hidden, weight, bias, *_ = inputs
    call = replace(saved.call, grad_weight_into=grad_weight_into)
    flat, objective = hidden.reshape(-1, hidden.shape[-1]), _objective(call, saved.terms)
    out = in_forward.backward(
        flat, weight, bias, call, computed, objective, grads.loss, needs.by_steps
    )
    return out.hidden, out.weight, out.bias, None, None


_forward = repeated(forward)
# It runs only after a recorded forward, so its kind will come again: record the first call.
_backward = repeated(backward, consume=lambda *args: args[3].clear(), comes_again=True)


class _Results(torch.autograd.Function):
    """The results of a forward, as functions of its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_weight: Tensor | None,
        temperature: Tensor | None,
        done: Forward,
        results: list[Tensor],
        grad_weight_into: Tensor | None,
        extension: Extension | None,
    ):
        ctx.frame, ctx.once, ctx.buffer = done.frame, done.once, grad_weight_into
        ctx.has, ctx.has_failed, ctx.extension = _has(done.results), False, extension
        token_weight = token_weight if ctx.needs_input_grad[3] else None
        temperature = temperature if ctx.needs_input_grad[4] else None
        saved = done.saved
        if _top_saved_tensors_default_hooks(False) is not None:
            # Checkpointing compares the number of tensors that its forwards save, and only some of
            # them may be played.
            saved = Packed(saved.unpacked())
        ctx.packing = saved.packing
        ctx.save_for_backward(hidden, weight, bias, token_weight, temperature, *saved.tensors)
        ctx.set_materialize_grads(False)
        results = results if extension is None else extension.cut_all(results)
        # A view that a function returns could not be written in place.
        results = [each.detach() if each._is_view() else each for each in results]
        ctx.mark_non_differentiable(*results[sum(ctx.has) :])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None):
        tensors = ctx.saved_tensors
        inputs, saved = tensors[:5], Packed(tensors[5:], ctx.packing)
        # A second backward over a retained graph finds no memory in `once`.
        once, buffer, ctx.once = ctx.once, ctx.buffer, type(ctx.once)()
        if not _get_current_graph_task_keep_graph():
            # A loss must not keep the caller's buffer alive after the backward. Autograd would free
            # a saved tensor, but hooks would put a copy in its place.
            ctx.buffer = None
        if ctx.has_failed:
            raise RuntimeError(
                "a backward of this loss failed, and grad_weight_into may hold part of its "
                "gradient: zero the buffer, and compute the loss again"
            )
        if all(grad is None for grad in grads):
            return (None,) * 9
        ctx.has_failed = buffer is not None
        if buffer is not None and not is_asked_for(ctx, 1):
            buffer = None
        if isinstance(once, Once) or once.is_used:
            require_in_memory(inputs[1])
        hidden, extension = inputs[0], ctx.extension
        if extension is not None:
            inputs = extension.view_rows(hidden), *inputs[1:]
            grads = tuple(extension.put_back_all(grads))
        in_order, run = iter(grads), _backward if ctx.frame.is_recorded else backward
        by_results = ResultGrads(*(next(in_order) if has else None for has in ctx.has))
        with without_autocast(hidden.device.type):
            by_hidden, *others = run(ctx.frame, inputs, saved, once, by_results, buffer)
        if by_hidden is not None:
            by_hidden = by_hidden[: hidden.shape[:-1].numel()].view(hidden.shape)
        ctx.has_failed = False
        return (by_hidden, *others, None, None, None, None)


def _has(results: Tensor | LossOutput) -> tuple[bool, bool, bool]:
    """Tells which of the fields of `ResultGrads`, the first of the results, there are."""
    if isinstance(results, Tensor):
        return True, False, False
    return True, results.lse is not None, results.entropy is not None
