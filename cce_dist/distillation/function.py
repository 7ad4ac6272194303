"""The steps of a distillation over the ranks, as an autograd function of the student's tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import torch
from torch import Tensor

from cce_dist.algorithm.call import Call, GradWeight, pad_bias, require_in_memory
from cce_dist.algorithm.once import once_differentiable, outside_autocast
from cce_dist.algorithm.plan import Plan
from cce_dist.backends.choose import TORCH, choose_backend, repeated
from cce_dist.core.stats import Stats, logaddexp_parts
from cce_dist.core.types import Head, Tokens
from cce_dist.distillation.divergences import Divergence, Divergences, Sums
from cce_dist.distillation.sweep import (
    FirstPass,
    Pair,
    Upstream,
    first_pass,
    gradients,
    second_pass,
)
from cce_dist.frontend.inputs import Extension
from cce_dist.frontend.reduction import PickedTokens, TokenLoss
from cce_dist.options import Backend, LossOptions, require_choice, require_finite
from cce_dist.ranks.gather import all_gather, require, require_same_sizes
from cce_dist.ranks.merge_header import NUM_DIGITS, RULE, digits_of, encode, flaw, is_sound

if TYPE_CHECKING:
    from cce_dist.backends.triton.teacher.tiles import TileKernels

# Memory of the tiles that kernels read, over the default workspace: every tile takes a dozen
# launches, and with more of them a GPU waits for the host.
TILES_ROOM = 1.5


# The student's hidden, weight and bias.
Student = tuple[Tensor, Tensor, Tensor | None]


class Teacher(NamedTuple):
    """The teacher's tensors, none of which has a gradient, and the options of its logits."""

    hidden: Tensor  # [n, D_teacher], rows as the student's
    weight: Tensor  # [V_local, D_teacher], without padding
    bias: Tensor | None  # [V_local]
    softcap: float | None
    logit_scale: float


@dataclass(frozen=True)
class Objective:
    divergences: Divergences
    temperature: float
    alpha: float
    screens: bool = False  # the teacher's logits, where kernels compute both heads and it pays
    # Where no kernel computes both heads, kernels compute what follows the products.
    takes_tiles: bool = False


# The default of `beta`, which divergences without a mixture have, too.
UNUSED_BETA = 0.5


def objective_of(divergence: str, beta: float, temperature: float, alpha: float) -> Objective:
    require_choice("divergence", divergence, get_args(Divergence))
    beta, alpha = require_finite("beta", beta), require_finite("alpha", alpha, minimum=0)
    if not 0 < beta < 1:
        raise ValueError(f"beta must lie in (0, 1), got {beta!r}")
    if divergence != "jsd" and beta != UNUSED_BETA:
        raise ValueError(
            f"beta={beta!r} has no effect with divergence={divergence!r}; use "
            'divergence="jsd", or leave beta out'
        )
    if alpha > 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha!r}")
    temperature = require_finite("temperature", temperature)
    if temperature <= 0:
        raise ValueError(f"temperature must be > 0, got {temperature!r}")
    return Objective(Divergences(divergence, beta), temperature, alpha)  # pyright: ignore[reportArgumentType]


def backends_of(
    options: LossOptions, objective: Objective, teacher_weight: object
) -> tuple[LossOptions, Backend]:
    """Returns the options, with backend "torch" where no kernel computes both heads; and there the
    backend of what follows the products of a tile.

    Raises:
        ValueError: kernels were asked for, which take no float64.
    """
    is_wide = getattr(teacher_weight, "dtype", None) == torch.float64
    if is_wide and options.backend == "triton":
        raise ValueError(
            'backend="triton" of linear_distillation needs a teacher in bf16, fp16 or fp32, got '
            "float64"
        )
    of_heads = objective.divergences.is_filtered and options.gradient == "filtered"
    if of_heads and not is_wide:
        return options, "torch"
    return replace(options, backend="torch"), "torch" if is_wide else options.backend


def takes_tiles(backend: Backend, hidden: Tensor) -> bool:
    """Tells whether kernels compute what follows the products of a tile.

    Raises:
        ValueError: `backend` names kernels, and they cannot run.
    """
    if backend == "torch":
        return False
    return choose_backend(LossOptions(backend=backend), hidden, 1, 1) is not TORCH


class Computed(NamedTuple):
    """Each token's values, and what makes a loss of them."""

    value: Tensor  # [N], the divergence
    nll: Tensor | None  # [N], where alpha > 0
    terms: TokenLoss
    picked: PickedTokens
    shape: torch.Size  # targets'
    screened: Tensor | None = None  # [] bool: the teacher's logits are; None: they are not
    loss: Tensor | None = None  # [], by gradient="in_forward"; None: `value` and `nll` make it
    extension: Extension | None = None  # `value` and `nll` have its tokens

    def of_tokens(self, values: Tensor, shift: int) -> Tensor:
        """Returns values of the tokens of `value` in targets' (shifted) shape, 0 elsewhere."""
        if self.extension is None:
            return self.picked.scatter_to_shape(values, self.shape, shift)
        size = torch.Size((self.extension.size,))
        return self.extension.cut(self.picked.scatter_to_shape(values, size, 0))


class Distill(torch.autograd.Function):
    """Outputs: each token's divergence, [N]; nll at temperature 1 if alpha > 0, else None; None for
    `Computed.screened`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: Teacher,
        call: Call,
        objective: Objective,
    ):
        ctx.call, ctx.objective = call, objective
        run = _played_forward if objective.takes_tiles else _forward
        value, nll, vectors = run((hidden, weight, bias), teacher, call, objective)
        ctx.softcap_and_scale = teacher[3:5]
        ctx.save_for_backward(hidden, weight, bias, *teacher[:3], *vectors)
        ctx.set_materialize_grads(False)
        return value, nll, None

    @staticmethod
    @once_differentiable
    @outside_autocast
    def backward(ctx: Any, *grads: Tensor | None):
        student, teacher, saved = unpacked(ctx)
        of_call = teacher, ctx.call, ctx.objective
        run = _played_backward if ctx.objective.takes_tiles else _backward
        out = run(student, *of_call, saved, grads[:2], ctx.needs_input_grad[:3])
        return *out, None, None, None


def unpacked(ctx: Any) -> tuple[Student, Teacher, tuple[Tensor, ...]]:
    """Returns the student's and the teacher's tensors, and the others that a forward has saved.

    Raises:
        RuntimeError: a weight's memory was freed.
    """
    # Once: checkpointing without reentry refuses a second time, and other hooks copy once more.
    hidden, weight, bias, *saved = ctx.saved_tensors
    teacher = Teacher(*saved[:3], *ctx.softcap_and_scale)
    require_in_memory(weight)
    require_in_memory(teacher.weight, "teacher_weight")
    return (hidden, weight, bias), teacher, tuple(saved[3:])


def _forward(
    student: Student, teacher: Teacher, call: Call, objective: Objective
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Returns each token's divergence and nll, and the numbers of each token that the backward
    needs. Collectives: those of `merge` and `value_and_mean`."""
    require_equal_sizes(student[0], teacher, call)
    pair = pair_of(*student, teacher, call, objective)
    first, has_targets = first_pass(pair), pair.has_targets
    of_pair = pair.divergences, call.plan, pair.kernels, pair.dtype
    merged = merge(first, *of_pair, has_targets=has_targets)
    value, mean = value_and_mean(pair, merged.sums, call.plan)
    nll = (merged.lse - merged.target_logit).to(pair.dtype) if has_targets else None
    # The caller may write to a value, and its backward reads the mean.
    return value.clone(), nll, (merged.sums.student, merged.sums.teacher, mean, merged.lse)


def _backward(
    student: Student,
    teacher: Teacher,
    call: Call,
    objective: Objective,
    vectors: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],  # [N] by divergence and nll
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients by hidden, weight, bias. Collectives: the sum of the hidden one's."""
    hidden, weight, bias = student
    student_lse, teacher_lse, mean, lse = vectors
    of_divergence, of_nll = grads
    if of_divergence is None:
        of_divergence = torch.zeros_like(mean)
    pair = pair_of(*student, teacher, call, objective)
    target = GradWeight.prepare(call, weight, needs[1])
    part, of_bias = gradients(
        pair,
        Sums(student_lse, teacher_lse, mean),
        mean,
        lse,
        # The gradient of a sum is an expanded scalar: its elements share one number in memory.
        Upstream(of_divergence.contiguous(), None if of_nll is None else of_nll.contiguous()),
        hidden=needs[0],
        weight=target.into,
        bias=needs[2],
    )
    grad_hidden = None
    if part is not None:
        total = call.plan.hidden_sum(pair.student, hidden.dtype)
        part = part if not total.is_local else part.to(total.part_dtype)
        grad_hidden = total.of_tokens(part, pair.student.rows).to(hidden.dtype)
    return grad_hidden, target.returned, pad_bias(of_bias, bias)


# Tiles take a dozen launches each.
_played_forward, _played_backward = repeated(_forward), repeated(_backward)


def value_and_mean(pair: Pair, sums: Sums, plan: Plan) -> tuple[Tensor, Tensor]:
    """Returns each token's divergence and the mean slope of `Divergences.derivative`, [N].

    Args: sums: merged. Collectives: with two passes one all-gather of 2 N numbers.
    """
    if pair.divergences.passes == 1:
        return (kl := sums.kl.to(pair.dtype)), kl
    terms = second_pass(pair, sums)
    if plan.group is not None:
        terms = all_gather(terms, plan.group).sum(0)
    return terms[0], terms[1]


def pair_of(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    teacher: Teacher,
    call: Call,
    objective: Objective,
) -> Pair:
    """Gathers both models' tokens under sequence parallelism."""
    tokens, head, plan = call.tokens(hidden), call.head(weight, bias), call.plan
    tokens = replace(tokens, local_targets=tokens.local_targets.long())
    of_teacher, _ = plan.gather_hidden(teacher.hidden, defer_fill=False)
    room = plan.workspace_bytes(len(tokens), head)
    vocab_size, divergences = plan.shard.vocab_size, objective.divergences
    kernels = None
    if objective.takes_tiles:
        kernels = tile_kernels(objective)
        if plan.options.workspace_bytes is None:
            room = int(TILES_ROOM * room)
    return Pair(
        student=tokens,
        head=head,
        teacher=Tokens(of_teacher, tokens.rows, tokens.local_targets),
        teacher_head=Head(
            teacher.weight, teacher.bias, None, vocab_size, teacher.softcap, teacher.logit_scale
        ),
        divergences=divergences,
        temperature=objective.temperature,
        has_targets=objective.alpha > 0,
        workspace_bytes=room,
        kernels=kernels,
    )


def tile_kernels(objective: Objective) -> TileKernels:
    # Triton may be missing elsewhere.
    from cce_dist.backends.triton.teacher.tiles import TileKernels

    divergences = objective.divergences
    return TileKernels(divergences.name, divergences.beta, objective.temperature)


def require_equal_sizes(hidden: Tensor, teacher: Teacher, call: Call) -> None:
    """Checks that all ranks are about to send tensors of the same sizes. Collectives: those of
    `gather.require_same_sizes`."""
    sizes = {
        "rows of hidden": len(hidden),
        "D of hidden": hidden.shape[1],
        "D of teacher_hidden": teacher.hidden.shape[1],
        "tokens to compute (not ignored)": len(call.local_targets),
    }
    require_same_sizes(sizes, hidden.device, call.plan.group)


def merge(
    local: FirstPass,
    divergences: Divergences,
    plan: Plan,
    kernels: TileKernels | None,
    dtype: torch.dtype = torch.float32,
    *,
    has_targets: bool,
    checks: bool = True,
) -> FirstPass:
    """Merges the ranks' sums; all ranks get the same bits.

    Args:
        kernels: merge fp32 sums in one launch; eager torch merges others, in dozens.
        dtype: of the logits.
        checks: that the ranks' rows are those of one softmax, in eager torch in dozens more.
    Collectives: one all-gather of 9 + K N numbers, K = 3, or 5 with targets; without checks K N.
        They have the dtype of `Pair.dtype_of_sums`.
    """
    if plan.group is None:
        return local
    sums, full = local.rows, local.full
    if sums is None:
        of_targets = (local.lse, local.target_logit) if has_targets else ()
        sums = torch.stack([*local.sums, *of_targets])
    if sums.dtype != torch.float32:
        kernels = None
    if not checks:
        parts = all_gather(sums, plan.group, begins=True)
        if kernels is None:
            return _merged(parts, divergences, full, dtype)
        return FirstPass.of_rows(kernels.merge(parts), full)
    full = None if full is None else full.to(sums.dtype)
    header = plan.shard, sums.numel()
    if kernels is None:
        full = sums.new_ones(1) if full is None else full
        message = torch.cat([encode(*header, sums), full, sums.flatten()])
    else:
        message = kernels.pack(sums, full, digits_of(*header))
    messages = all_gather(message, plan.group, begins=True)
    headers, full = messages[:, :NUM_DIGITS], messages[:, NUM_DIGITS].sum(0, keepdim=True)
    if kernels is None:
        parts = messages[:, NUM_DIGITS + 1 :].view(len(messages), *sums.shape)
        lse = parts[:, 3 if has_targets else 0]
        stats = Stats(lse, parts[:, 4] if has_targets else torch.zeros_like(lse))
        merged, sound = _merged(parts, divergences, full, dtype), is_sound(headers, stats, None)
    else:
        rows, sound = kernels.merge_messages(messages, len(sums))
        merged = FirstPass.of_rows(rows, full)
    require(sound, flaw, RULE, headers)
    return merged


def _merged(
    rows: Tensor,  # [W, K, N]
    divergences: Divergences,
    full: Tensor | None,
    dtype: torch.dtype,
) -> FirstPass:
    student, teacher, kl, *others = rows.transpose(0, 1)
    sums = divergences.merge(Sums(student, teacher, kl), dtype)
    if not others:
        return FirstPass(sums, sums.student, torch.zeros_like(sums.student), full)
    return FirstPass(sums, logaddexp_parts(others[0]), others[1].sum(0), full)
