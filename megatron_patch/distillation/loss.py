"""The distillation loss of two patched models that share their tensor-parallel ranks.

    losses = megatron_patch.distillation_loss(
        student, teacher, ids, positions, mask, labels=labels, temperature=2.0
    )

Each model runs by its own forward. In the call of its loss a patched model hands over the input of
its output layer: the teacher's is kept, and the student's loss is the divergence from it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from cce_dist import VocabShard, linear_distillation
from megatron_patch.errors import PatchError
from megatron_patch.head import IGNORED, HeadFunction, add_to_main_grad, classes_of
from megatron_patch.options import PatchOptions
from megatron_patch.replaced import computing, options_of
from megatron_patch.seams import LOSS

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tvd"]


@dataclass(frozen=True)
class TeacherHead:
    """One microbatch's input of a teacher's output layer, and that layer's weight."""

    hidden: Tensor  # [s, b, h_teacher]; under sequence parallelism [s / tp, b, h_teacher]
    weight: Tensor  # [V / tp, h_teacher]
    scale: float  # a factor of the logits
    softcap: float | None


def distillation_loss(
    student: nn.Module,
    teacher: nn.Module | None,
    *inputs: object,
    labels: Tensor,  # [b, s]
    divergence: Divergence = "forward_kl",
    beta: float = 0.5,
    temperature: float = 1.0,
    alpha: float = 0.0,
    **keywords: object,
) -> Tensor:
    """Runs both models and computes each token's distillation loss by `linear_distillation`; no
    rank makes logits of either.

    softcap is each model's own, as `apply` has set it. vocab_size, gradient, backend and
    workspace_bytes are those of the student, and so is logits, which says how the teacher's are
    computed. Rows of padding are classes unless vocab_size is set.

    Args:
        student: a patched model, wrapped or not. On a pipeline stage without its head the result is
            that of student(...), and the teacher does not run.
        teacher: a patched model, wrapped or not, frozen, in evaluation mode, with all its layers on
            each rank of the student's tensor-parallel group; None on a stage without the head. It
            runs under no_grad. Hidden size and dtype may differ from the student's.
        inputs, keywords: arguments of both models' forward, such as tokens, positions and mask.
        labels: each at the position that predicts it; a label that is no class, such as -100, gets
            loss and gradient 0. With alpha=0 labels say only which tokens count.
        divergence, beta, temperature, alpha: as in `linear_distillation`; there is no factor
            temperature^2.
    Returns:
        [b, s] fp32, as the model gives with labels; the same bits on every tensor-parallel rank.
    Raises:
        PatchError: a model is not patched, or the two do not fit; the message says which.
        ValueError: an argument is not supported; the message says which.
    Collectives: those of both models' bodies, and of `linear_distillation` over the student's
        tensor-parallel group. The weight's gradient comes by autograd in the weight's dtype, and
        with gradient accumulation fusion is then added to main_grad.
    """
    learner = _language_model("student", student)
    if not learner.post_process:
        return student(*inputs, labels=labels, **keywords)
    if labels is None:
        raise ValueError("labels must be given to megatron_patch.distillation_loss, got None")
    if teacher is None:
        raise ValueError("teacher must be a model where the student has its head, got None")
    tutor = _language_model("teacher", teacher)
    _require_teacher(teacher, tutor)
    _require_pair(learner, tutor, divergence)
    heads: list[TeacherHead] = []
    with torch.no_grad():
        _run("teacher", (teacher, tutor), _keep(heads), *inputs, labels=labels, **keywords)
    compute = functools.partial(
        head_distillation,
        teacher=heads[0],
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        alpha=alpha,
    )
    return _run("student", (student, learner), compute, *inputs, labels=labels, **keywords)


def head_distillation(
    layer: Any,
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,  # [s, b]
    scale: float,
    options: PatchOptions,
    *,
    teacher: TeacherHead,
    divergence: Divergence,
    beta: float,
    temperature: float,
    alpha: float,
) -> Tensor:
    """Computes each token's distillation loss: [s, b] fp32. Args: as in `head_loss`."""
    size, rank = layer.tp_group.size(), layer.tp_group.rank()
    shard = VocabShard.even(weight.shape[0], rank, size, options.vocab_size)
    loss = linear_distillation(
        hidden,
        add_to_main_grad(layer, weight),
        teacher.hidden,
        teacher.weight.detach(),
        classes_of(labels, shard),
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        alpha=alpha,
        group=layer.tp_group if size > 1 else None,
        vocab_shard=shard,
        sequence_parallel=layer.sequence_parallel,
        softcap=options.softcap,
        teacher_softcap=teacher.softcap,
        logit_scale=scale,
        teacher_logit_scale=teacher.scale,
        ignore_index=IGNORED,
        reduction="none",
        gradient=options.gradient,  # pyright: ignore[reportArgumentType]
        logits=options.loss.logits,
        backend=options.loss.backend,
        workspace_bytes=options.workspace_bytes,
    )
    assert isinstance(loss, Tensor)
    return loss


def _keep(heads: list[TeacherHead]) -> HeadFunction:
    """Returns a function that keeps a head's input and gives losses of 0, which nobody reads."""

    def keep(
        layer: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: float,
        options: PatchOptions,
    ) -> Tensor:
        heads.append(TeacherHead(hidden, weight, scale, options.softcap))
        return hidden.new_zeros(labels.shape)

    return keep


def _run(
    name: str,
    models: tuple[nn.Module, Any],  # as it was passed, and the language model within
    compute: HeadFunction,
    *inputs: object,
    **keywords: object,
) -> Tensor:
    """Runs a model with `compute` in place of its loss.

    Raises:
        PatchError: the model did not ask for its loss once.
    """
    model, language_model = models
    count = 0

    def counted(*args: Any) -> Any:
        nonlocal count
        count += 1
        return compute(*args)

    with computing(language_model.output_layer, counted):
        output = model(*inputs, **keywords)
    if count != 1:
        raise PatchError(
            f"{name} must compute one loss by {LOSS} in a forward with labels, "
            f"{type(language_model).__name__} computed {count}"
        )
    return output


def _language_model(name: str, model: Any) -> Any:
    """Returns the language model in a model that may be wrapped."""
    if not isinstance(model, nn.Module):
        raise PatchError(f"{name} must be one module, got {type(model)}")
    for module in model.modules():
        if hasattr(module, LOSS) and hasattr(module, "post_process"):
            return module
    raise PatchError(
        f"{name} must be, or wrap, a Megatron LanguageModule, got {type(model).__name__}"
    )


def _require_teacher(teacher: nn.Module, tutor: Any) -> None:
    """Checks what concerns the teacher alone.

    Raises:
        PatchError: the teacher cannot be one.
    """
    if not (tutor.pre_process and tutor.post_process):
        raise PatchError(
            "teacher must have all its layers on each rank of the student's last pipeline stage, "
            f"got a stage with pre_process={tutor.pre_process}, "
            f"post_process={tutor.post_process}: build it without pipeline parallelism"
        )
    trained = next((name for name, x in teacher.named_parameters() if x.requires_grad), None)
    if trained is not None:
        raise PatchError(
            f"teacher must not require grad, got {trained} that does: call "
            "teacher.requires_grad_(False)"
        )
    if any(x.training for x in teacher.modules()):
        raise PatchError(
            "teacher must be in evaluation mode, got training mode, whose dropout and router "
            "losses would take part: call teacher.eval()"
        )
    is_sharded = any(isinstance(x, FSDPModule) for x in teacher.modules())
    if is_sharded or any(hasattr(x, "__fsdp_param__") for x in teacher.parameters()):
        raise PatchError(
            "teacher must not be under FSDP, which frees the head's weight before the student's "
            "backward reads it: shard the teacher by tensor parallelism alone"
        )


def _require_pair(learner: Any, tutor: Any, divergence: str) -> None:
    """Checks that both heads lie on the same ranks, in the same way.

    Raises:
        PatchError: they do not, or `linear_distillation` has no meaning for the options.
    """
    layers, options = {}, {}
    for name, model in (("student", learner), ("teacher", tutor)):
        layer = layers[name] = model.output_layer
        patched = options[name] = options_of(layer)
        if patched is None:
            raise PatchError(
                f"megatron_patch.distillation_loss needs a patched {name}: call "
                "megatron_patch.apply(model), or apply() before it is built, without "
                f"vocab_over_pipeline; got {type(layer).__qualname__} without the patch"
            )
        if getattr(model.config, "mtp_num_layers", None):
            raise PatchError(
                f"{name} must not have heads of multi-token prediction, got "
                f"mtp_num_layers={model.config.mtp_num_layers}: build it without them"
            )
    if options["student"].check_ranks:
        raise PatchError(
            "check_ranks=True has no distillation: apply the patch to the student without it"
        )
    if options["student"].logits == "screened" and divergence != "forward_kl":
        raise PatchError(
            f"logits='screened' has no distillation but of 'forward_kl', got {divergence!r}: apply "
            "the patch to the student with logits='full', without --logits"
        )
    size = options["student"].vocab_size
    values = {
        "tensor-parallel ranks": lambda x: dist.get_process_group_ranks(layers[x].tp_group),
        "sequence_parallel": lambda x: layers[x].sequence_parallel,
        "vocab_size of megatron_patch.apply": lambda x: options[x].vocab_size,
    }
    if size is None or layers["student"].tp_group.size() > 1:
        values["rows of the output layer on a rank"] = lambda x: layers[x].output_size_per_partition
    for what, value_of in values.items():
        theirs, ours = value_of("teacher"), value_of("student")
        if theirs != ours:
            raise PatchError(f"teacher must have the student's {what} {ours!r}, got {theirs!r}")
