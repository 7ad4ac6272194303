"""A divergence by kernels: passes over both heads, and a backward of the columns that matter."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cce_dist.algorithm.call import Call, GradWeight, pad_bias
from cce_dist.algorithm.once import once_differentiable, outside_autocast
from cce_dist.algorithm.plan import Plan
from cce_dist.algorithm.saved import put_together, take_apart
from cce_dist.backends.choose import repeated
from cce_dist.backends.protocol import (
    BackwardRequest,
    ColumnFilter,
    ForwardRequest,
    Mixture,
    Room,
    Scores,
    TeacherPart,
    TeacherStats,
)
from cce_dist.core.stats import Stats, split_lse
from cce_dist.core.types import Head, Tokens, Upstream
from cce_dist.distillation.divergences import Sums
from cce_dist.distillation.function import (
    Objective,
    Student,
    Teacher,
    merge,
    require_equal_sizes,
    tile_kernels,
    unpacked,
)
from cce_dist.distillation.sweep import FirstPass
from cce_dist.frontend.inputs import Extension
from cce_dist.options import Screen
from cce_dist.ranks.gather import all_gather, gather_bounds
from cce_dist.ranks.transport import group_size


@dataclass(frozen=True)
class _Heads:
    """Both models' tokens and heads, with logits over the temperature."""

    tokens: Tokens
    head: Head
    teacher: tuple[Tokens, Head]
    rule: ColumnFilter
    screen: Screen | None  # of the teacher's logits; None: they are full
    reverse: bool  # the student's probabilities weigh log ratios: not the KL(teacher || student)
    beta: float | None  # of Jensen-Shannon; None: a KL
    room: Room

    @classmethod
    def of(
        cls,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Teacher,
        call: Call,
        objective: Objective,
    ) -> _Heads:
        """Gathers both models' tokens under sequence parallelism."""
        plan, T = call.plan, objective.temperature
        if not objective.alpha:
            # Without cross-entropy no column has to be kept for its target.
            call = replace(call, local_targets=torch.full_like(call.local_targets, -1))
        tokens, head = call.tokens(hidden), call.head(weight, bias)
        of_teacher, _ = plan.gather_hidden(teacher.hidden, defer_fill=False)
        scale = teacher.logit_scale / T
        screen = None
        # All ranks decide alike. Where every column is kept, logits are full, as of the loss.
        share = head.vocab_size // group_size(plan.group)
        of_call = len(tokens), share, teacher.weight.shape[1]
        if objective.screens and plan.filters and plan.backend.gains_by_screening(*of_call):
            screen = Screen()
        teacher_head = Head(
            teacher.weight, teacher.bias, None, head.vocab_size, teacher.softcap, scale
        )
        return cls(
            tokens=tokens,
            head=replace(head, logit_scale=head.logit_scale / T),
            teacher=(replace(tokens, hidden=of_teacher), teacher_head),
            rule=ColumnFilter(plan.threshold, False, plan.options.filter.tail, plan.options.draws),
            screen=screen,
            reverse=objective.divergences.has_mean,
            beta=objective.divergences.beta if objective.divergences.passes == 2 else None,
            room=plan.room(tokens, head),
        )

    def request(self, plan: Plan, lses: tuple[Tensor, Tensor] | None = None) -> ForwardRequest:
        """Returns the request of step 1. Args: lses: of both, merged, for Jensen-Shannon."""
        bounds = mixture = None
        if self.beta is not None and lses is not None:
            mixture = Mixture(self.beta, *lses)
        elif group_size(plan.group) > 1:
            bounds = functools.partial(gather_bounds, group=plan.group)
        of_heads = self.rule, self.screen, bounds, None, self.room
        return ForwardRequest(plan.wanted, *of_heads, reverse=self.reverse, mixture=mixture)

    def warm_up(
        self, call: Call, weight: torch.dtype, needs: tuple[bool, ...], *, of_nll: bool
    ) -> None:
        """Lets the backend compile all kernels at once, before the first step. No collectives.

        Args:
            needs: whether hidden, weight and bias need a gradient.
            of_nll: the loss depends on nll.
        """
        expected = call.expect(self.tokens, weight, needs)
        expected = replace(expected, of_lse=not self.reverse, of_nll=of_nll)
        lses = self.tokens.hidden.new_empty(2, len(self.tokens), dtype=torch.float32)
        request, teacher = self.request(call.plan, (lses[0], lses[1])), self.teacher
        call.plan.backend.warm_up(self.tokens, self.head, request, expected, teacher)

    def forward(self, plan: Plan) -> tuple[FirstPass, Scores | None]:
        """Takes step 1 of both heads; for Jensen-Shannon of one after the other, without scores.
        Collectives: those of `sharded.forward` before its merge, of both."""
        if self.beta is None:
            out = self._of_heads(plan, self.request(plan))
            return self._sums(out.student, out.teacher_lse, out.kl, out.full), out.scores
        request = ForwardRequest(plan.wanted, None, None, None, None, self.room)
        student, _ = plan.backend.forward(self.tokens, self.head, request)
        teacher, _ = plan.backend.forward(*self.teacher, request)
        return self._sums(student, teacher.whole_lse, torch.zeros_like(student.lse), None), None

    def _sums(
        self, student: Stats, teacher_lse: Tensor, kl: Tensor, full: Tensor | None
    ) -> FirstPass:
        wide = any(x.weight.dtype == torch.float32 for x in (self.head, self.teacher[1]))
        numbers = (student.whole_lse, teacher_lse, kl, student.target_logit)
        if wide:
            numbers = (x.double() for x in numbers)
        lse, teacher_lse, kl, target_logit = numbers
        return FirstPass(Sums(lse, teacher_lse, kl), lse, target_logit, full)

    def second_pass(self, plan: Plan, merged: FirstPass) -> tuple[Tensor, Tensor, Scores | None]:
        """Returns Jensen-Shannon of each token, the student's mean log ratio to the mixture, [N]
        each, and the scores. Collectives: one all-gather of 8 N bytes."""
        lse, teacher_lse = merged.sums[:2]
        # The backward's kernels take log p without the rest of Y, and so must the mean slope: of a
        # difference all columns' gradients would have a part.
        request = self.request(plan, (lse, teacher_lse.float().to(lse.dtype)))
        out = self._of_heads(plan, request)
        value, mean = all_gather(out.kl.contiguous(), plan.group).sum(0)
        return value, mean, out.scores

    def _of_heads(self, plan: Plan, request: ForwardRequest) -> TeacherStats:
        forward_of_heads = plan.backend.forward_of_heads
        assert forward_of_heads is not None
        return forward_of_heads(self.tokens, self.head, self.teacher, request)


class DistillByKernels(torch.autograd.Function):
    """Outputs: as `Distill`, and `Computed.screened`; alpha > 0 needs temperature 1."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Teacher,
        call: Call,
        objective: Objective,
        extension: Extension | None = None,
    ):
        needs = ctx.needs_input_grad[:3]
        models = _viewed((hidden, weight, bias), teacher, extension)
        out = _played_forward(*models, call, objective, needs)
        ctx.call, ctx.objective, ctx.softcap_and_scale = call, objective, teacher[3:5]
        ctx.extension = extension
        ctx.scores, tensors = take_apart(out.scores)
        ctx.save_for_backward(hidden, weight, bias, *teacher[:3], *out.vectors, *tensors)
        ctx.set_materialize_grads(False)
        if out.screened is not None:
            ctx.mark_non_differentiable(out.screened)
        return out.value, out.nll, out.screened

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor | None):
        if grads[0] is None and grads[1] is None:
            return (None,) * 7
        student, teacher, saved = unpacked(ctx)
        number = 3 + int(ctx.objective.divergences.has_mean)
        scores = put_together(ctx.scores, iter(saved[number:]))
        of_call, needs = (ctx.call, ctx.objective), ctx.needs_input_grad[:3]
        models, saved = _viewed(student, teacher, ctx.extension), (saved[:number], scores)
        by_hidden, *others = _played_backward(*models, *of_call, saved, grads[:2], needs)
        if by_hidden is not None:
            by_hidden = by_hidden[: len(student[0])]
        return by_hidden, *others, None, None, None, None


def _viewed(
    student: Student, teacher: Teacher, extension: Extension | None
) -> tuple[Student, Teacher]:
    """Returns both models with hidden states as kernels see them."""
    if extension is None:
        return student, teacher
    hidden, weight, bias = student
    of_teacher = teacher._replace(hidden=extension.view_rows(teacher.hidden))
    return (extension.view_rows(hidden), weight, bias), of_teacher


class _Results(NamedTuple):
    """The results of a forward, and what its backward needs."""

    value: Tensor  # [N]
    nll: Tensor | None
    screened: Tensor | None
    # Both lses, as in `Sums`; the target's logit; of all but forward KL the student's mean log
    # ratio: [N] each.
    vectors: tuple[Tensor, ...]
    scores: Scores | None


def _forward(
    student: Student, teacher: Teacher, call: Call, objective: Objective, needs: tuple[bool, ...]
) -> _Results:
    """Collectives: those of `_Heads.forward`, `merge` and `_Heads.second_pass`."""
    hidden, weight, bias = student
    plan, has_targets = call.plan, objective.alpha > 0
    require_equal_sizes(hidden, teacher, call)
    heads = _Heads.of(hidden, weight, bias, teacher, call, objective)
    if any(needs):
        heads.warm_up(call, weight.dtype, needs, of_nll=has_targets)
    local, scores = heads.forward(plan)
    # A rank without columns has no kernel of both heads, and merges as the others do.
    kernels = tile_kernels(objective)
    merged = merge(local, objective.divergences, plan, kernels, has_targets=has_targets)
    value = mean = merged.sums.kl.float()
    if heads.beta is not None:
        value, mean, scores = heads.second_pass(plan, merged)
    vectors = [merged.sums.student, merged.sums.teacher, merged.target_logit.float()]
    if heads.reverse:
        # The caller may write to the value, which a KL's mean is.
        vectors.append(mean.clone() if mean is value else mean)
    nll = (merged.lse - merged.target_logit).float() if has_targets else None
    if nll is not None and call.count is not None:
        counts = torch.arange(len(nll), device=nll.device) < call.count
        nll = nll.where(counts, 0)
    screened = None if merged.full is None else (merged.full == 0).view(())
    return _Results(value, nll, screened, tuple(vectors), scores)


def _backward(
    student: Student,
    teacher: Teacher,
    call: Call,
    objective: Objective,
    saved: tuple[tuple[Tensor, ...], Scores | None],  # see `_Results`
    grads: tuple[Tensor | None, ...],  # [N] by divergence and nll
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients by hidden, weight, bias. Collectives: the sum of the hidden one's."""
    hidden, weight, bias = student
    (lse, teacher_lse, target_logit, *mean), scores = saved
    rest = of_teacher_rest = None
    if lse.dtype == torch.float64:
        (lse, rest), of_teacher_rest = split_lse(lse), split_lse(teacher_lse)[1]
    of_divergence, of_nll = grads
    heads = _Heads.of(hidden, weight, bias, teacher, call, objective)
    backend, plan = call.plan.backend, call.plan
    target = GradWeight.prepare(call, weight, needs[1])
    kept = part = None
    if scores is not None:
        of_rule = heads.rule, heads.room
        kept = backend.keep(heads.tokens, heads.head, scores, lse, *of_rule)
    stats, upstream = Stats(lse, target_logit, lse_rest=rest), Upstream(nll=of_nll)
    if of_divergence is not None and heads.reverse:
        # The KL is minus the student's entropy relative to the teacher. Jensen-Shannon's
        # derivative is that of 1 - beta times the KL to a mixture which stays as it is.
        part = TeacherPart(*heads.teacher, teacher_lse, None, heads.beta)
        stats = replace(stats, entropy=-mean[0])
        if of_teacher_rest is not None and heads.beta is None:
            # The kernel's log p lacks it.
            stats = replace(stats, entropy=of_teacher_rest - mean[0])
        share = 1.0 if heads.beta is None else 1.0 - heads.beta
        upstream = replace(upstream, entropy=-share * of_divergence)
    elif of_divergence is not None:
        # d KL / da = q - p: q is the derivative of the student's lse.
        part = TeacherPart(*heads.teacher, teacher_lse, -of_divergence)
        upstream = replace(upstream, lse=of_divergence)
    request = BackwardRequest(
        stats=stats,
        upstream=upstream,
        kept=kept,
        hidden=plan.hidden_sum(heads.tokens, hidden.dtype) if needs[0] else None,
        weight=target.into,
        bias=needs[2],
        store=None,
        room=heads.room,
        teacher=None if kept is None else part,
    )
    out = backend.backward(heads.tokens, heads.head, request)
    grad_hidden = None if out.hidden is None else out.hidden.to(hidden.dtype)
    return grad_hidden, target.returned, pad_bias(out.bias, bias)


_played_forward, _played_backward = repeated(_forward), repeated(_backward)
