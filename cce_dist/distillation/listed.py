"""Distillation from a teacher's list of ids and log-probabilities at each token."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from cce_dist.core.types import accumulate_dtype
from cce_dist.distillation.columns import Columns
from cce_dist.distillation.divergences import Divergence
from cce_dist.distillation.function import Computed, Objective
from cce_dist.distillation.loss import (
    NOTHING_IGNORED,
    DistillationOutput,
    TokenStat,
    checked_targets,
    no_targets,
    objective_of,
    output_of,
)
from cce_dist.frontend.dtensor import is_dtensor
from cce_dist.frontend.inputs import Inputs, options_of
from cce_dist.frontend.listed import (
    Listed,
    candidate_logprobs,
    check_candidates,
    list_tokens,
    local_of,
)
from cce_dist.frontend.prepare import operand_dtype
from cce_dist.frontend.reduction import LossOutput, PickedTokens, TokenLoss, shifted
from cce_dist.frontend.validation import require_no_tangent, require_tensor
from cce_dist.logprobs import (
    LARGEST_K,
    UNSCREENED,
    GradientOfEach,
    over_temperature,
    token_logprobs,
)
from cce_dist.loss import compute_loss
from cce_dist.options import (
    Backend,
    Filter,
    LossOptions,
    Reduction,
    require_choice,
    require_stats,
)
from cce_dist.ranks.gather import require

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cce_dist.ranks.transport import Group
    from cce_dist.vocab_shard import VocabShard

Rest = Literal["class", "left_out"]
# A teacher's probabilities may sum to 1 plus this, by their dtype's bytes.
SUM_ERRORS = {2: 1e-2, 4: 1e-3, 8: 1e-3}


class TeacherLogprobs(NamedTuple):
    """A teacher's log-probabilities of K ids at each token, or soft labels: `listed_distillation`.

    Rows are hidden's tokens, with sequence_parallel those of all ranks. Every rank passes the same
    lists. An entry of log-probability -inf is padding: its id is any id of the vocabulary.
    """

    ids: Tensor  # [..., K] int64 in [0, vocab_size); a token's ids differ, but for padding
    logprobs: Tensor  # [..., K] natural logs at the distillation's temperature, any float dtype


@torch.no_grad()
def teacher_topk(
    hidden: Tensor,  # [..., D_teacher]
    weight: Tensor,  # [V_local, D_teacher]
    k: int,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,  # [V_local]
    group: Group | DeviceMesh | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
) -> TeacherLogprobs:
    """Returns a teacher's k most probable ids of every token, with their log-probabilities in the
    softmax over the whole vocabulary at `temperature`; no logits [N, V] exist in memory.

    Every rank gets all tokens' lists, fp32 (float64 for float64 inputs), by falling probability. If
    the vocabulary has fewer than k ids, padding follows them. Not differentiable.

    Args:
        hidden, weight, bias, softcap, logit_scale: the teacher's. Padded rows of weight are ids as
            others are, unless vocab_shard marks them as padding.
        k: in [1, 128].
        temperature: > 0; that of `listed_distillation`.
        group, vocab_shard, sequence_parallel, backend, workspace_bytes: as in `token_logprobs`.
    Raises:
        ValueError: an argument is not supported; the message says which.
    Collectives: those of `token_logprobs` with top_k, forward.
    """
    if type(k) is not int or not 1 <= k <= LARGEST_K:
        raise ValueError(f"k must be an int in [1, {LARGEST_K}], got {k!r}")
    if isinstance(temperature, Tensor):
        raise ValueError(f"temperature must be a number, got {type(temperature)}")
    listed = token_logprobs(
        hidden,
        weight,
        no_targets(hidden, sequence_parallel, group),
        temperature=temperature,
        top_k=k,
        bias=bias,
        group=group,
        vocab_shard=vocab_shard,
        sequence_parallel=sequence_parallel,
        softcap=softcap,
        logit_scale=logit_scale,
        backend=backend,
        workspace_bytes=workspace_bytes,
    )
    # Rounding may put a log-probability above 0.
    ids, logprobs = local_of(listed.top_ids), local_of(listed.top_logprobs).clamp_max(0)
    return TeacherLogprobs(ids.clamp_min(0), logprobs)


def listed_distillation(
    hidden: Tensor,  # [..., D]
    weight: Tensor,  # [V_local, D]
    teacher: TeacherLogprobs,  # [..., K] each
    targets: Tensor | None = None,  # [...] int64
    *,
    rest: Rest = "class",
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    alpha: float = 0.0,
    group: Group | DeviceMesh | None = None,
    vocab_shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    bias: Tensor | None = None,  # [V_local]
    softcap: float | None = None,
    logit_scale: float = 1.0,
    token_weight: Tensor | None = None,  # targets' shape
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    shift: int = 0,
    stats: tuple[TokenStat, ...] = (),
    gradient: GradientOfEach = "filtered",
    filter: Filter = Filter(),  # noqa: B008 - frozen
    backend: Backend = "auto",
    workspace_bytes: int | None = None,
) -> Tensor | DistillationOutput:
    """`linear_distillation` from a teacher that is listed: its K log-probabilities at each token,
    of `teacher_topk` or of a server, or soft labels. No logits [N, V] exist in memory.

    The divergence is that of p, the teacher's listed probabilities, and of q, the student's
    probabilities of the same ids in its softmax over the whole vocabulary at `temperature`, made
    into distributions by `rest`:

    - "class": all ids outside are one more class, of mass 1 - sum p and 1 - sum q. With all ids
      listed this is `linear_distillation`. Soft labels, sum p = 1, give forward KL its value over
      the whole vocabulary.
    - "left_out": p and q are divided by their sums. The student's mass outside has no gradient.

    A mass outside is uncertain by the rounding of the sum, some 2^-20 in fp32 (float64: 2^-49). The
    student's counts as that where it is less, and so does the teacher's in reverse KL: no sum makes
    a value or a gradient infinite or NaN. A teacher's sum above 1 by rounding is divided out.

    With "class" the divergence's derivative by 1 - sum q is cut to 16 in bf16, 128 in fp16, 2^13 in
    fp32 and 2^42 in float64. That concerns forward KL, where the teacher gives the ids outside more
    than 16 times the student's mass: the pull on them is then weaker than the derivative, since
    rounding of the backward's products would leave more than the cut takes. Values are not cut.

    Args:
        teacher: rows belong to hidden's tokens, also with `shift`: row t is what the teacher
            predicts from the tokens up to t. Rows at tokens that are left out are not read.
        targets: tokens with `ignore_index` are left out; None, with alpha=0: all tokens count.
        rest: "class" or "left_out".
        temperature: > 0, divides the student's logits; the teacher's log-probabilities have it.
        gradient, filter, backend: as in `token_logprobs`.
        divergence, beta, alpha, stats, token_weight, ignore_index, reduction, shift, group,
            vocab_shard, sequence_parallel, workspace_bytes: as in `linear_distillation`; DTensors
            and torch.compile as in `linear_cross_entropy`.
    Returns:
        As `linear_distillation`, in fp32 (float64 for a float64 student).
    Raises:
        ValueError: an argument is not supported; the message says which. So are ids outside the
            vocabulary or twice at a token, log-probabilities that are NaN or above 0, that sum to
            more than 1 by more than rounding or require grad, and with "left_out" a row of padding
            alone. On a GPU a device-side assertion fails where values are wrong.
    Collectives, determinism: those of `token_logprobs` with candidates; with alpha > 0 and a
        temperature other than 1 also those of one `linear_cross_entropy`.
    """
    objective = objective_of(divergence, beta, temperature, alpha)
    require_choice("rest", rest, get_args(Rest))
    require_choice("gradient", gradient, get_args(GradientOfEach))
    require_stats(stats, get_args(TokenStat))
    ignore_index = NOTHING_IGNORED if targets is None else ignore_index
    targets = checked_targets(targets, hidden, objective, stats, sequence_parallel, group)
    options = options_of(
        sequence_parallel=sequence_parallel,
        ignore_index=ignore_index,
        reduction=reduction,
        shift=shift,
        softcap=softcap,
        logit_scale=logit_scale,
        gradient=gradient,
        filter=filter,
        screen=UNSCREENED,
        backend=backend,
        workspace_bytes=workspace_bytes,
    )
    targets = require_tensor("targets", targets)
    # Lists belong to hidden's tokens, and so do the targets from here on.
    if shift and not targets.dim():
        raise ValueError(
            f"shift={shift} goes along the last dim of targets, and targets [] have none"
        )
    targets = shifted(targets, shift, ignore_index)
    inputs = Inputs(hidden, weight, targets, bias, token_weight)
    where = (group, vocab_shard)
    listed = list_tokens(inputs, _at_hidden(options, temperature), *where)
    ids, logprobs = _check_teacher(teacher, listed, rest, accumulate_dtype(hidden.dtype))
    unweighted = inputs._replace(token_weight=None)
    columns = Columns(objective.divergences, rest == "class", operand_dtype(hidden))
    value, nll = _values(unweighted, options, where, listed, columns, (ids, logprobs), objective)
    counts = listed.counts
    picked = PickedTokens(listed.targets, None, counts.sum(dtype=torch.int32).view(1), counts)
    terms = TokenLoss.of(picked, options, local_of(token_weight), None, hidden)
    computed = Computed(value, nll, terms, picked, listed.shape)
    return listed.wrap(
        output_of(computed, (reduction, shift, stats, alpha))  # pyright: ignore[reportArgumentType]
    )


def _at_hidden(options: LossOptions, temperature: float, *stats: str) -> LossOptions:
    """Returns the options of a loss of each token at a temperature, whose targets are shifted."""
    scale = over_temperature(options.logit_scale, temperature)
    return replace(options, shift=0, reduction="none", logit_scale=scale, stats=stats)


def _values(
    inputs: Inputs,
    options: LossOptions,
    where: tuple[Group | DeviceMesh | None, VocabShard | None],
    listed: Listed,
    columns: Columns,
    teacher: tuple[Tensor, Tensor],
    objective: Objective,
) -> tuple[Tensor, Tensor | None]:
    """Computes each token's divergence and, if alpha > 0, nll, [N], 0 at tokens that do not
    count."""
    ids, logprobs = teacher
    result = compute_loss(inputs, _at_hidden(options, objective.temperature, "lse"), *where)
    assert isinstance(result, LossOutput) and result.lse is not None
    lse, nll = (local_of(x).reshape(-1) for x in (result.lse, result.loss))
    student, leaves_out = candidate_logprobs(listed, ids, lse, nll, lambda x: x), ~listed.counts
    value = columns.compute(student.masked_fill(leaves_out[:, None], 0), logprobs)
    value = value.masked_fill(leaves_out, 0)
    if objective.alpha == 0:
        return value, None
    nll = result.loss
    if objective.temperature != 1:
        nll = compute_loss(inputs, _at_hidden(options, 1.0), *where)
    return value, local_of(nll).reshape(-1)


def _check_teacher(
    teacher: TeacherLogprobs, listed: Listed, rest: Rest, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Checks the lists; returns them as [N, K], logprobs in `dtype`, 0 at tokens that do not count.

    Raises:
        ValueError: an argument is not supported; the message says which.
    """
    if not isinstance(teacher, TeacherLogprobs):
        raise ValueError(f"teacher must be a TeacherLogprobs(ids, logprobs), got {type(teacher)}")
    ids = check_candidates(teacher.ids, listed, "teacher.ids")
    if not ids.shape[1]:
        raise ValueError("teacher.ids must list at least one id at each token, got K=0")
    logprobs = require_tensor("teacher.logprobs", teacher.logprobs)
    if is_dtensor(logprobs):
        raise ValueError(
            "teacher.logprobs must be a plain tensor, the same on every rank, got a DTensor"
        )
    if logprobs.shape != teacher.ids.shape:
        raise ValueError(
            f"teacher.logprobs must have teacher.ids' shape {list(teacher.ids.shape)}, got "
            f"{list(logprobs.shape)}"
        )
    if not logprobs.is_floating_point() or logprobs.dtype.itemsize not in SUM_ERRORS:
        raise ValueError(
            f"teacher.logprobs must be fp32, float64, bf16 or fp16, got {logprobs.dtype}"
        )
    if logprobs.device != ids.device:
        raise ValueError(
            f"teacher.logprobs must be on teacher.ids' device {ids.device}, got {logprobs.device}"
        )
    require_no_tangent(logprobs)
    if logprobs.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "teacher.logprobs must not require grad: listed_distillation has gradients by the "
            "student's tensors alone; pass detach()"
        )
    flat = logprobs.reshape(ids.shape).to(dtype)
    flat = flat.where(listed.counts[:, None], 0)
    _check_values(ids, flat, listed.counts, rest, SUM_ERRORS[logprobs.dtype.itemsize])
    return ids, flat


def _check_values(ids: Tensor, logprobs: Tensor, counts: Tensor, rest: Rest, error: float) -> None:
    """Checks rows [N, K] at tokens that count."""
    rule = "teacher.logprobs must be natural logarithms of probabilities, at most 0"
    require(
        (logprobs <= error).all(),
        lambda: f"{rule}, got values up to {float(logprobs.max())}",
        rule,
    )
    total = logprobs.exp().sum(1)
    rule = "teacher.logprobs must be of probabilities that sum to at most 1 at each token"
    require(
        (~counts | (total <= 1 + error)).all(),
        lambda: f"{rule}, got sums up to {float(total[counts].max())}",
        rule,
    )
    if rest == "left_out":
        rule = 'teacher.logprobs must have a value above -inf at each token with rest="left_out"'
        require(
            (total > 0).all(),
            lambda: f"{rule}, got {int((total == 0).sum())} tokens without",
            rule,
        )
    # Each entry of padding, and of a token that does not count, has a number of its own.
    place = torch.arange(ids.shape[1], device=ids.device)
    real = (logprobs > -torch.inf) & counts[:, None]
    in_order = ids.where(real, -1 - place).sort(1).values
    again = in_order[:, 1:] == in_order[:, :-1]
    rule = "teacher.ids must differ from one another at each token, but for padding"
    require(
        ~again.any(), lambda: f"{rule}, got {int(in_order[:, 1:][again][0])} more than once", rule
    )
