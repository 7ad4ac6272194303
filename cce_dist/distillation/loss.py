"""`linear_distillation`, the divergence of two models' softmaxes without logits."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from cce_dist.algorithm.call import Call
from cce_dist.algorithm.once import without_autocast
from cce_dist.algorithm.plan import Plan, plan_of
from cce_dist.core.tracing import is_fake, is_traced, unseen_by_checkpointing
from cce_dist.distillation.by_kernels import DistillByKernels
from cce_dist.distillation.divergences import Divergence
from cce_dist.distillation.function import (
    Computed,
    Distill,
    Objective,
    backends_of,
    objective_of,
    takes_tiles,
)
from cce_dist.distillation.in_forward import DistillInForward
from cce_dist.distillation.teacher import local_teacher, teacher_logits, teacher_of
from cce_dist.frontend import validation
from cce_dist.frontend.eager import compute as compute_loss
from cce_dist.frontend.inputs import Inputs, extended, options_of
from cce_dist.frontend.prepare import differentiates, enter, local_targets_of, narrow, validate
from cce_dist.frontend.reduction import PickedTokens, TokenLoss, gathered, pick_tokens
from cce_dist.options import (
    Backend,
    Filter,
    GradientMode,
    LogitsMode,
    LossOptions,
    Reduction,
    Screen,
    require_choice,
    require_factor,
    require_stats,
)
from cce_dist.python_numbers import constant
from cce_dist.ranks.transport import group_size, resolve_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cce_dist.ranks.transport import Group
    from cce_dist.vocab_shard import VocabShard

TokenStat = Literal["divergence", "nll"]
DistillationStat = Literal["divergence", "nll", "screened"]
# No class is it.
NOTHING_IGNORED = -100


class DistillationOutput(NamedTuple):
    """The loss, and the values of each token that were asked for; others are None.

    Values have targets' (shifted) shape, fp32 (float64 for float64 inputs), 0 at ignored tokens.
    """

    loss: Tensor
    # Nats, at `temperature`. Differentiable, unless the gradient is "in_forward"; so is the next.
    divergence: Tensor | None = None
    nll: Tensor | None = None  # of the target at temperature 1
    screened: Tensor | None = None  # [] bool: all ranks' teacher logits were computed in 8 bits


def linear_distillation(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V_local, D]
    teacher_hidden: Tensor,  # [..., D_teacher]
    teacher_weight: Tensor,  # [V_local or more, D_teacher]
    targets: Tensor | None = None,  # [...] int64
    *,
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    alpha: float = 0.0,
    group: Group | DeviceMesh | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    bias: Tensor | None = None,  # [V_local]
    teacher_bias: Tensor | None = None,  # [rows of teacher_weight]
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    token_weight: Tensor | None = None,  # targets' shape
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    shift: int = 0,
    gradient: GradientMode = "filtered",
    filter: Filter = Filter(),  # noqa: B008 - frozen
    logits: LogitsMode = "full",
    stats: tuple[DistillationStat, ...] = (),
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
) -> Tensor | DistillationOutput:
    """Divergence of a student's softmax from a teacher's, over hidden @ weight.T of each; no logits
    [N, V] exist in memory.

    With p the teacher's and q the student's probabilities at `temperature`, the loss of a token is

        (1 - alpha) D(p, q) + alpha nll,        nll of the target, at temperature 1

    without a factor temperature^2. Gradients are by hidden, weight and bias. On a GPU Triton
    kernels compute both KLs in one pass and "jsd" in two, with filtered gradients. All else has
    gradients of every column: products by torch, tile by tile, the rest by kernels or, elsewhere
    than on a GPU and for float64, by eager torch. docs/design/distillation.md.

    Args:
        teacher_hidden: of the same tokens; D and dtype may differ from hidden's.
        teacher_weight: this rank's rows of the same ids as weight's; further rows are padding, on
            the last rank, or as many as weight has.
        targets: tokens with `ignore_index` are left out; None, with alpha=0: all tokens count.
        divergence: "forward_kl" KL(p || q), "reverse_kl" KL(q || p), "jsd" beta KL(p || m) +
            (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, or "tvd" sum_v |p_v - q_v| / 2.
        beta: of "jsd" alone, in (0, 1).
        temperature: > 0, divides both models' logits, after softcap and scale.
        alpha: share of the target's cross-entropy, in [0, 1].
        stats: "divergence", "nll" and "screened"; nll needs alpha > 0.
        gradient: "filtered" lets the kernels replace columns where both models have little mass by
            the product of their marginals, but not for "tvd"; "exact" computes every column.
            "in_forward" does so within the forward, and multiplies both heads once: the logits of a
            chunk of tokens stay until their gradients are there. A column of a token takes 8 bytes
            for both models, 12 with a softcap of the student. A chunk takes what fits the
            workspace, which must be the same on all ranks; by default 512 MiB, or an eleventh of
            the tokens if that is more. It needs a scalar loss; within torch.compile it is "exact".
        filter: of "filtered", `Filter` without `eps`. It keeps columns by the sum of both models'
            mass; for reverse KL by the student's mass plus the size of the sum over the block of
            q log(q / p), for "jsd" plus that of q log(q / m).
        logits: "screened" lets the kernels compute the teacher's logits in 8 bits, and those of
            columns of much mass exactly; for forward KL with filtered gradients, of a teacher in
            bf16 or fp16. Logits are full without kernels, where 8 bits would err too much, and
            where quantising the teacher's weight would take longer than it saves
            (docs/guide/modes.md#when-a-call-is-computed-in-full, D: the teacher's): the statistic
            "screened" says which. Screening holds some (V_local + N) (D_teacher + 8) bytes more in
            the forward.
        backend: "auto", "torch", or "triton", which takes no float64.
        group, vocab_shard, sequence_parallel, token_weight, ignore_index, reduction, shift,
            workspace_bytes: as in `linear_cross_entropy`; with sequence_parallel both hidden states
            are this rank's slices.
    Returns:
        The loss in fp32 (float64 if a model is): []; for reduction "none" targets' (shifted)
        shape. A DistillationOutput if `stats` is not empty.
    Raises:
        ValueError: an argument is not supported; the message says which. So are teacher tensors
            that require grad.
        RuntimeError: a backward through divergence or nll with gradient="in_forward".
    DTensors: as in `linear_cross_entropy`; the teacher's lie as the student's do.
    Collectives on `group`: forward one all-gather of 12 N + 36 bytes (20 N + 36 with alpha), and
        one of 8 N for "jsd" and "tvd"; for KLs kernels eight of 4 N before it. Without kernels, or
        if a model is fp32, the first has twice the bytes. Backward those of
        `linear_cross_entropy`. With alpha and a temperature that is not 1 kernels also take those
        of `linear_cross_entropy` for the nll. With sequence_parallel all-gathers of both hidden
        states in forward and backward. "in_forward" takes all of them in the forward, the
        all-gathers of sums for each chunk, the others once, and before them one of 8 bytes.
    Errors: on Hopper, in 16 bits and without softcaps, a token's KL is off by some 1e-4 nats, "jsd"
        by 2e-5, and may be below 0 between nearly equal models; gradients do not depend on it. With
        screened logits it is off by some 1e-3 nats, and gradients err by some 2e-3 to 5e-3 more.
    Determinism: the loss is bitwise equal on all ranks and from run to run.
    """
    objective = objective_of(divergence, beta, temperature, alpha)
    require_choice("gradient", gradient, get_args(GradientMode))
    require_stats(stats, get_args(DistillationStat))
    ignore_index = NOTHING_IGNORED if targets is None else ignore_index
    targets = checked_targets(targets, hidden, objective, stats, sequence_parallel, group)
    inputs = Inputs(hidden, weight, targets, bias, token_weight)
    options, objective, of_logits = _checked(
        objective,
        (teacher_softcap, teacher_logit_scale),
        sequence_parallel=sequence_parallel,
        ignore_index=ignore_index,
        reduction=reduction,
        shift=shift,
        softcap=softcap,
        logit_scale=logit_scale,
        gradient=gradient,
        filter=filter,
        logits=logits,
        backend=backend,
        workspace_bytes=workspace_bytes,
    )
    inputs, options, group, vocab_shard, parts = enter(inputs, options, group, vocab_shard)
    of_teacher = (teacher_hidden, teacher_weight, teacher_bias)
    of_teacher = local_teacher(hidden, weight, *of_teacher, parts)
    options, of_tiles = backends_of(options, objective, of_teacher[1])
    arguments = (inputs, of_teacher, of_logits, options, group, vocab_shard, objective, of_tiles)
    if is_traced():
        # The module imports the compiler, which a tracing caller has imported already.
        from cce_dist.distillation.compiled import compute as trace

        computed = trace(*arguments)
    else:
        with unseen_by_checkpointing():
            if is_fake(inputs.hidden):
                from cce_dist.distillation.compiled import compute as trace

                computed = trace(*arguments)
            else:
                computed = compute(*arguments)
    result = output_of(computed, (reduction, options.shift, stats, alpha))
    return result if parts is None else parts.wrap(result)


def compute(
    inputs: Inputs,
    of_teacher: tuple[Tensor, Tensor, Tensor | None],
    logits: tuple[float | None, float],  # the teacher's softcap and scale
    options: LossOptions,
    group: Group | DeviceMesh | None,
    vocab_shard: VocabShard | None,
    objective: Objective,
    of_tiles: Backend,
) -> Computed:
    """Computes each token's values of plain tensors eagerly.

    Args: of_tiles: the backend of what follows the products of a tile.
    """
    hidden, weight, _, bias = inputs[:4]
    ranks, shard, shape = validate(inputs, options, group, vocab_shard)
    teacher = teacher_of(hidden, *of_teacher, len(weight), shard, logits, objective.screens)
    objective = replace(objective, takes_tiles=takes_tiles(of_tiles, hidden))
    # Two temperatures are two softmaxes of the student.
    is_twice = bool(objective.alpha) and objective.temperature != 1
    extension = None
    if not is_twice:
        inputs, options, extension = extended(inputs, options, ranks)
    of_tokens = inputs.hidden, inputs.targets.numel(), options, ranks, shard
    plan = plan_of(*of_tokens, ordered_tokens=extension and extension.num_rows)
    pick = functools.partial(plan.backend.pick, shard=shard)
    picked = pick_tokens(inputs.targets, options, pick)
    of_range = (shard.vocab_size, options.ignore_index, picked.in_range)
    validation.check_target_range(picked.targets, *of_range)
    terms = TokenLoss.of(picked, options, inputs.token_weight, None, hidden)
    call, flat = _call_of(plan, picked, hidden), hidden.reshape(-1, hidden.shape[-1])
    with without_autocast(hidden.device.type):
        tensors = flat, weight, bias, teacher, call
        if options.gradient == "in_forward":
            needs = tuple(differentiates(x) for x in tensors[:3])
            loss, value, nll = DistillInForward.apply(*tensors, objective, terms, needs)
            return Computed(value, nll, terms, picked, shape, loss=loss)
        if plan.backend.forward_of_heads is None:
            value, nll, screened = Distill.apply(*tensors, objective)
        elif not is_twice:
            value, nll, screened = DistillByKernels.apply(*tensors, objective, extension)
        else:
            value, _, screened = DistillByKernels.apply(*tensors, replace(objective, alpha=0.0))
            nll = _nll(inputs, options, ranks, shard, picked.rows)
    return Computed(value, nll, terms, picked, shape, screened, extension=extension)


def _call_of(plan: Plan, picked: PickedTokens, hidden: Tensor) -> Call:
    return Call(
        plan=plan,
        rows=picked.rows,
        # A copy: the caller may fill the targets' memory anew before the backward.
        local_targets=narrow(local_targets_of(picked, plan.shard), plan.shard.vocab_size),
        count=picked.count,
        device_type=hidden.device.type,
        class_weight=None,
        quantized=None,
        grad_weight_into=None,
        tail_mass=False,
        record=True,
    )


def _nll(
    inputs: Inputs,
    options: LossOptions,
    group: Group | None,
    shard: VocabShard,
    rows: Tensor | None,  # [N] int64
) -> Tensor:
    """Returns the nll of the tokens in `rows`, [N]."""
    options = replace(options, reduction="none")
    losses = compute_loss(inputs._replace(token_weight=None), options, group, shard, None)
    assert isinstance(losses, Tensor)
    return gathered(losses, rows, inputs.targets.shape, options.shift)


def check_options(options: Mapping[str, object]) -> None:
    """Checks keywords of `linear_distillation` that are no tensors, before a call.

    Raises:
        ValueError: a value is not allowed.
    """
    signature = inspect.signature(linear_distillation).parameters
    values: dict[str, Any] = {name: x.default for name, x in signature.items()} | dict(options)
    of_objective = (values[name] for name in ("divergence", "beta", "temperature", "alpha"))
    of_teacher = values["teacher_softcap"], values["teacher_logit_scale"]
    names = (signature.keys() & LossOptions.__dataclass_fields__) - {"stats"}
    _checked(objective_of(*of_objective), of_teacher, **{name: values[name] for name in names})


def _checked(
    objective: Objective, of_teacher: tuple[Any, Any], **options: object
) -> tuple[LossOptions, Objective, tuple[float | None, float]]:
    """Returns the options of the student's logits, which are always full; the objective, which
    knows whether the teacher's are screened; and softcap and scale of the teacher's.

    Args: of_teacher: softcap and scale as the caller gave them.
    Raises:
        ValueError: a value is not allowed.
    """
    checked, of_logits = options_of(**options, screen=Screen()), teacher_logits(*of_teacher)
    if checked.filter.eps is not None:
        raise ValueError(
            "filter of linear_distillation must keep columns by mass, got "
            f"eps={checked.filter.eps!r}: use Filter.keep"
        )
    filters = checked.filter != Filter() and checked.filters
    if checked.gradient == "in_forward" and (filters or checked.logits != "full"):
        name = "filter" if filters else "logits"
        raise ValueError(
            f"{name}={getattr(checked, name)!r} of linear_distillation has no effect with "
            'gradient="in_forward", which computes every column of full logits: use '
            f'gradient="filtered", or leave {name} out'
        )
    scales = {
        "logit_scale": constant(checked.logit_scale),
        "teacher_logit_scale": constant(of_logits[1]),
    }
    for name, scale in scales.items():
        text = f"{name}={scale!r} / temperature={objective.temperature!r}"
        require_factor(text, scale / objective.temperature)
    if checked.logits == "full":
        return checked, objective, of_logits
    if objective.divergences.name != "forward_kl":
        raise ValueError(
            'logits="screened" of linear_distillation needs divergence="forward_kl", got '
            f'{objective.divergences.name!r}; use logits="full"'
        )
    return replace(checked, logits="full"), replace(objective, screens=True), of_logits


def output_of(
    computed: Computed,
    options: tuple[Reduction, int, tuple[DistillationStat, ...], float],
) -> Tensor | DistillationOutput:
    value, nll, terms, *_, screened, loss, _ = computed
    reduction, shift, stats, alpha = options
    if loss is None:
        each = value if nll is None else (1 - alpha) * value + alpha * nll
        each = terms.per_token(each, each, None, slice(None))
        loss = computed.of_tokens(each, shift) if reduction == "none" else each.sum()
    if not stats:
        return loss
    if screened is None and "screened" in stats:
        screened = torch.zeros((), dtype=torch.bool, device=value.device)
    values = {"divergence": value, "nll": nll}
    return DistillationOutput(
        loss,
        **{
            name: computed.of_tokens(x, shift)
            for name, x in values.items()
            if x is not None and name in stats
        },
        screened=screened if "screened" in stats else None,
    )


def checked_targets(
    targets: Tensor | None,
    hidden: Tensor,
    objective: Objective,
    stats: tuple[DistillationStat, ...],
    split: bool,
    group: object,
) -> Tensor:
    """Returns the targets; None stands for tokens that all count.

    Args: split: sequence_parallel.
    Raises:
        ValueError: `stats` or `objective` need targets that are not there.
    """
    if "nll" in stats and objective.alpha == 0:
        raise ValueError('stats "nll" needs alpha > 0, got alpha=0')
    if targets is not None:
        return targets
    if objective.alpha:
        raise ValueError(f"targets must be given with alpha={objective.alpha!r}, got None")
    return no_targets(hidden, split, group)


def no_targets(hidden: Tensor, split: bool, group: object) -> Tensor:
    """Returns targets for tokens that all count, with `NOTHING_IGNORED`: any class will do."""
    hidden = validation.require_tensor("hidden", hidden)
    shape = list(hidden.shape[:-1])
    if split and shape:
        shape[0] *= group_size(resolve_group(group))  # pyright: ignore[reportArgumentType]
    return torch.zeros(shape, dtype=torch.int64, device=hidden.device)
