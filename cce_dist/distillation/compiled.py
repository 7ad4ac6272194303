"""`linear_distillation` within torch.compile, and of fake tensors.

The compiler traces validation and reductions. It does not look into the operators of this file:
`Distill` or `DistillByKernels`, forward and backward, collectives included.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from cce_dist.algorithm.plan import Plan
from cce_dist.algorithm.saved import take_apart
from cce_dist.backends.protocol import Scores
from cce_dist.backends.torch.pick import pick_on_device
from cce_dist.core.types import accumulate_dtype
from cce_dist.distillation.by_kernels import DistillByKernels
from cce_dist.distillation.divergences import Divergences
from cce_dist.distillation.function import Computed, Distill, Objective, Teacher, takes_tiles
from cce_dist.distillation.teacher import teacher_of
from cce_dist.frontend import validation
from cce_dist.frontend.compiled import bind, refuse_mpi
from cce_dist.frontend.compiled_operators import (
    BOUND,
    OperatorContext,
    apart,
    call_of,
    like_needed,
    needed_of,
    padded,
)
from cce_dist.frontend.inputs import Inputs
from cce_dist.frontend.prepare import differentiates, local_targets_of, narrow
from cce_dist.frontend.reduction import TokenLoss, pick_tokens
from cce_dist.options import Backend, LossOptions
from cce_dist.python_numbers import constant
from cce_dist.vocab_shard import VocabShard

# The first tensors that both autograd functions save: hidden, weight, bias, the teacher's three.
NUM_INPUTS = 6


@dataclass(frozen=True)
class Bound:
    """The arguments of a compiled call that are no tensors; operators know them by a string key."""

    of_loss: str  # the key of options, group and shard
    objective: Objective
    of_teacher: tuple[float | None, float]  # softcap and scale

    def plan(self, hidden: Tensor, num_tokens: int) -> Plan:
        return BOUND[self.of_loss].plan(hidden, num_tokens, [False] * 4)

    def teacher(self, tensors: tuple[Tensor, Tensor, Tensor | None]) -> Teacher:
        return Teacher(*tensors, *self.of_teacher)

    def scores_like(self, plan: Plan, size: int, weight: Tensor) -> Scores | None:
        if not is_by_kernels(plan):
            return None
        columns = plan.shard.num_classes
        return plan.backend.scores_like(size, columns, weight, has_teacher=True)


_BOUND: dict[str, Bound] = {}


def is_by_kernels(plan: Plan) -> bool:
    return plan.backend.forward_of_heads is not None


def num_vectors(plan: Plan, objective: Objective) -> int:
    """Returns the number of vectors of tokens that the autograd function saves."""
    return 3 if is_by_kernels(plan) and not objective.divergences.has_mean else 4


@torch.compiler.assume_constant_result
def _bind(key: str, objective: tuple[Any, ...], of_teacher: tuple[float | None, float]) -> str:
    """Makes the key of a compiled call, once, when the call is traced.

    Args: objective: divergence, beta, temperature, alpha, screens, takes_tiles.
    """
    name, beta, *others = objective
    bound = Bound(key, Objective(Divergences(name, beta), *others), of_teacher)
    distillation = f"{key} {objective} {of_teacher}"
    _BOUND[distillation] = bound
    return distillation


@torch.compiler.assume_constant_result
def _takes_kernels(key: str, dtype: torch.dtype, device: str) -> bool:
    hidden = torch.empty(1, 1, dtype=dtype, device=device)
    return is_by_kernels(BOUND[key].plan(hidden, 1, [False] * 4))


@torch.compiler.assume_constant_result
def _takes_tiles(backend: Backend, dtype: torch.dtype, device: str) -> bool:
    return takes_tiles(backend, torch.empty(1, 1, dtype=dtype, device=device))


def compute(
    inputs: Inputs,
    of_teacher: tuple[Tensor, Tensor, Tensor | None],
    logits: tuple[float | None, float],
    options: LossOptions,
    group: Any,
    vocab_shard: VocabShard | None,
    objective: Objective,
    of_tiles: Backend,
) -> Computed:
    """Traces `loss.compute`, or runs it on fake tensors.

    Results and gradients of fake tensors have shapes alone. Collectives of fake tensors: none.
    """
    hidden, weight, targets, bias, token_weight = inputs[:5]
    refuse_mpi(group)
    validation.check_hidden_and_weight(hidden, weight)
    key, shard, size = bind(weight, options, group, vocab_shard)
    shape = validation.check_tensors(inputs, options, shard, size)
    screens = objective.screens
    teacher = teacher_of(hidden, *of_teacher, weight.shape[0], shard, logits, screens)
    picked = pick_tokens(targets, options, pick_on_device)
    assert picked.rows is not None and picked.count is not None
    validation.check_target_range(picked.targets, shard.vocab_size, options.ignore_index)
    terms = TokenLoss.of(picked, options, token_weight, None, hidden)
    flat, local = hidden.reshape(-1, hidden.shape[-1]), local_targets_of(picked, shard)
    needs = [differentiates(x) for x in (hidden, weight, bias)]
    alpha, divergences = objective.alpha, objective.divergences
    # Two temperatures are two softmaxes of the student, and kernels compute one.
    apart_nll = alpha > 0 and objective.temperature != 1
    if apart_nll and _takes_kernels(key, hidden.dtype, hidden.device.type):
        alpha = 0.0
    numbers = map(constant, (divergences.beta, objective.temperature, alpha))
    tiles = _takes_tiles(of_tiles, hidden.dtype, hidden.device.type)
    of_objective = (divergences.name, *numbers, screens, tiles)
    of_logits = (constant(teacher.softcap), constant(teacher.logit_scale))
    value, nll, screened, _, _ = torch.ops.cce_dist.distill(
        flat,
        weight,
        bias,
        *teacher[:3],
        picked.rows,
        local,
        picked.count,
        needs,
        _bind(key, of_objective, of_logits),
    )
    if alpha != objective.alpha:
        tokens = (picked.rows, narrow(local, shard.vocab_size), picked.count)
        of_nll = torch.ops.cce_dist.two_pass(
            flat, weight, bias, None, None, *tokens, [*needs, False], key
        )
        nll = of_nll[0]
    return Computed(value, nll if objective.alpha else None, terms, picked, shape, screened)


@torch.library.custom_op(
    "cce_dist::distill",
    mutates_args=(),
    schema="(Tensor hidden, Tensor weight, Tensor? bias, Tensor teacher_hidden, "
    "Tensor teacher_weight, Tensor? teacher_bias, Tensor rows, Tensor local_targets, "
    "Tensor count, bool[] needs, str key) -> (Tensor, Tensor, Tensor, Tensor[], Tensor[])",
)
def distill(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    rows: Tensor,
    local_targets: Tensor,
    count: Tensor,
    needs: list[bool],
    key: str,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Runs the forward of `Distill` or `DistillByKernels`.

    Returns: divergence, nll (empty without alpha), `Computed.screened`, the vectors for the
        backward, and the scores' tensors. Each vector is [N] over all tokens, first the tokens
        that count.
    """
    bound, size = _BOUND[key], len(rows)
    plan = bound.plan(hidden, size)
    call = call_of(plan, None, rows, local_targets, count, any(needs))
    ctx: Any = OperatorContext(needs)
    teacher = bound.teacher((teacher_hidden, teacher_weight, teacher_bias))
    function = DistillByKernels if is_by_kernels(plan) else Distill
    with torch.autocast(hidden.device.type, enabled=False):
        outputs = function.forward(ctx, hidden, weight, bias, teacher, call, bound.objective)
    value, nll, screened = outputs
    if screened is None:
        screened = hidden.new_zeros((), dtype=torch.bool)
    first, last = NUM_INPUTS, NUM_INPUTS + num_vectors(plan, bound.objective)
    vectors = [padded(x, size) for x in ctx.saved_tensors[first:last]]
    state = list(ctx.saved_tensors[last:]) if any(needs) else []
    outputs = [padded(value, size), value.new_empty(0) if nll is None else padded(nll, size)]
    value, nll, *others = apart([*outputs, *vectors, *state])
    return value, nll, screened, others[: len(vectors)], others[len(vectors) :]


@distill.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, *others: Any) -> tuple[Any, ...]:
    _, teacher_weight, _, rows, _, _, needs, key = others
    bound, size = _BOUND[key], rows.shape[0]
    plan = bound.plan(hidden, size)
    dtypes = [accumulate_dtype(x.dtype) for x in (hidden, teacher_weight)]
    dtype = torch.promote_types(*dtypes)

    def vector(is_wanted: bool = True, dtype: torch.dtype = dtype) -> Tensor:
        return hidden.new_empty(size if is_wanted else 0, dtype=dtype)

    scores = bound.scores_like(plan, size, weight) if any(needs) else None
    kernels, torchs = is_by_kernels(plan), not bound.objective.takes_tiles
    wide = weight.dtype == torch.float32 or teacher_weight.dtype == torch.float32
    of_sums = torch.float64 if wide or (torchs and not kernels) else dtype
    # Log-sum-exps, two of them first: see `Sums`. The third number is none, nor, of kernels of both
    # heads, is the fourth.
    dtypes = [of_sums, of_sums, dtype, dtype if kernels else of_sums]
    vectors = [vector(dtype=x) for x in dtypes[: num_vectors(plan, bound.objective)]]
    flag = hidden.new_empty((), dtype=torch.bool)
    return vector(), vector(bound.objective.alpha > 0), flag, vectors, take_apart(scores)[1]


@torch.library.custom_op(
    "cce_dist::distill_backward",
    mutates_args=(),
    schema="(Tensor? grad_divergence, Tensor? grad_nll, Tensor hidden, Tensor weight, "
    "Tensor? bias, Tensor teacher_hidden, Tensor teacher_weight, Tensor? teacher_bias, "
    "Tensor rows, Tensor local_targets, Tensor count, Tensor[] vectors, Tensor[] state, "
    "bool[] needs, str key) -> Tensor[]",
)
def distill_backward(
    grad_divergence: Tensor | None,
    grad_nll: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    teacher_bias: Tensor | None,
    rows: Tensor,
    local_targets: Tensor,
    count: Tensor,
    vectors: list[Tensor],
    state: list[Tensor],
    needs: list[bool],
    key: str,
) -> list[Tensor]:
    """Runs the backward. Returns the gradients that hidden, weight and bias need."""
    bound = _BOUND[key]
    plan = bound.plan(hidden, len(rows))
    call = call_of(plan, None, rows, local_targets, count, record=True)
    known = len(call.local_targets)
    upstream = [None if x is None else x[:known] for x in (grad_divergence, grad_nll)]
    like = bound.scores_like(plan, len(rows), torch.empty_like(weight, device="meta"))
    of_teacher = (teacher_hidden, teacher_weight, teacher_bias)
    ctx: Any = SimpleNamespace(
        saved_tensors=(
            *(hidden, weight, bias, *of_teacher),
            *(x[:known] for x in vectors),
            *state,
        ),
        needs_input_grad=tuple(needs),
        call=call,
        objective=bound.objective,
        softcap_and_scale=bound.of_teacher,
        scores=take_apart(like)[0],
        extension=None,
    )
    function = DistillByKernels if is_by_kernels(plan) else Distill
    grads = function.backward(ctx, *upstream)
    return needed_of((hidden, weight, bias), grads[:3], needs)


@distill_backward.register_fake
def _(*arguments: Any) -> list[Tensor]:
    return like_needed(arguments[2:5], arguments[-2])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    *tensors, needs, key = inputs
    *_, vectors, state = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *vectors, *state)
    ctx.needs, ctx.key, ctx.num_vectors = needs, key, len(vectors)


def _backward(ctx: Any, of_divergence: Any, of_nll: Any, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    tensors, kept = saved[:9], list(saved[9:])
    vectors, state = kept[: ctx.num_vectors], kept[ctx.num_vectors :]
    grads = iter(
        torch.ops.cce_dist.distill_backward(
            of_divergence, of_nll, *tensors, vectors, state, ctx.needs, ctx.key
        )
    )
    return (*(next(grads) if need else None for need in ctx.needs), *(None for _ in range(8)))


distill.register_autograd(_backward, setup_context=_setup)
