"""Replaces the divergences of TRL's DistillationTrainer and experimental GKDTrainer.

DistillationTrainer calls `apply` of an autograd function with hidden states. GKDTrainer makes both
models' logits in `compute_loss`: there both heads defer theirs, and the loss reads hidden states.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from cce_dist import LossOptions, linear_cross_entropy, linear_distillation
from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.log import logger
from cce_dist.integrations.options import keywords_of
from cce_dist.integrations.transformers.expression import Expression
from cce_dist.integrations.transformers.head import Deferral
from cce_dist.integrations.transformers.logits import DeferredLogits, not_compiled
from cce_dist.integrations.transformers.patch import model_in

KERNELS, FUNCTION = "trl.kernels.chunked_divergence", "ChunkedDivergenceFunction"
GKD, TRAINER = "trl.experimental.gkd.gkd_trainer", "GKDTrainer"
ARGUMENTS = {
    "forward": (
        "ctx student_hidden student_weight student_bias teacher_hidden teacher_weight "
        "teacher_bias beta temperature student_logit_scale student_final_logit_softcapping "
        "teacher_logit_scale teacher_final_logit_softcapping"
    ),
    "compute_loss": "self model inputs return_outputs num_items_in_batch",
    "generalized_jsd_loss": (
        "student_logits teacher_logits labels beta temperature reduction num_items_in_batch"
    ),
}
IGNORED = -100
# Reductions of GKDTrainer's loss that need no value of each class.
REDUCTIONS = ("batchmean", "sum")


class Distillation:
    """The replacements, from `install` to `remove`.

    Args: version: of TRL, for messages.
    """

    def __init__(self, options: LossOptions, version: str) -> None:
        self.options, self.version = options, version
        self.is_on, self.calls = True, 0
        self.said: set[str] = set()
        self.replaced: list[tuple[type, str, Any, Any]] = []

    # -- the switch --------------------------------------------------------------------------------

    def install(self) -> None:
        """Replaces what this TRL has; a trainer whose functions are others keeps them, and the log
        says so."""
        methods = ("compute_loss", "generalized_jsd_loss")
        function = self._class_of(KERNELS, FUNCTION, "DistillationTrainer", ("forward",))
        trainer = self._class_of(GKD, TRAINER, TRAINER, methods)
        if function is not None:
            self.divergence = function.apply
            self._replace(function, "apply", staticmethod(not_compiled(self.apply)))
        if trainer is not None:
            self.compute_loss, self.of_logits = (getattr(trainer, name) for name in methods)
            self._replace(trainer, "compute_loss", self._deferring())
            self._replace(trainer, "generalized_jsd_loss", staticmethod(self.generalized_jsd_loss))

    def remove(self) -> None:
        """Gives TRL its own functions back; what others keep of these calls TRL's from now on."""
        self.is_on = False
        for owner, name, old, new in self.replaced:
            if vars(owner).get(name) is not new:
                continue
            if old is None:
                delattr(owner, name)
            else:
                setattr(owner, name, old)

    def _replace(self, owner: type, name: str, new: Any) -> None:
        self.replaced.append((owner, name, vars(owner).get(name), new))
        setattr(owner, name, new)

    def _class_of(self, module: str, name: str, trainer: str, methods: tuple[str, ...]) -> Any:
        """Returns a class of TRL whose methods have the known arguments; else None, which is
        logged."""
        try:
            with warnings.catch_warnings():
                # Whoever has not asked for trl.experimental needs no warning about it.
                warnings.simplefilter("ignore")
                owner = getattr(importlib.import_module(module), name)
            for method in methods:
                arguments = " ".join(inspect.signature(getattr(owner, method)).parameters)
                if arguments != ARGUMENTS[method]:
                    expected = f"{name}.{method} must have the arguments ({ARGUMENTS[method]})"
                    raise AttributeError(f"{expected}, got ({arguments})")
            if "apply" in vars(owner):
                raise AttributeError(f"other code has replaced {name}.apply")
        except (ImportError, AttributeError) as error:
            self._keeps(trainer, f"TRL {self.version}: {error}")
            return None
        return owner

    def _keeps(self, trainer: str, reason: str) -> None:
        if reason not in self.said:
            self.said.add(reason)
            logger.warning("%s keeps TRL's own loss: %s", trainer, reason)

    def _count(self, trainer: str, instead: str, keywords: dict[str, Any]) -> None:
        """Counts a loss; a trainer's first one is logged."""
        self.calls += 1
        if trainer not in self.said:
            self.said.add(trainer)
            logger.info(
                "cce_dist.linear_distillation, %s, gradient %r, logits %r, computes the loss of "
                "TRL %s's %s in place of %s; cce_dist.integrations.trl.remove() switches it off",
                *(keywords["divergence"], keywords["gradient"], keywords.get("logits", "full")),
                *(self.version, trainer, instead),
            )

    def _keywords(self, beta: float, *, of_tokens: bool) -> dict[str, Any]:
        """Returns options of `linear_distillation`. TRL's beta between 0 and 1 is its `beta`. Args:
        of_tokens: see `keywords_of`."""
        keywords = keywords_of(self.options, of_tokens=of_tokens)
        keywords = {x: keywords[x] for x in ("gradient", "filter", "backend", "workspace_bytes")}
        if beta == 0:
            return {**keywords, "divergence": "forward_kl", "logits": self.options.logits}
        if beta == 1:
            return {**keywords, "divergence": "reverse_kl"}
        return {**keywords, "divergence": "jsd", "beta": beta}

    # -- DistillationTrainer -----------------------------------------------------------------------

    def apply(
        self,
        student_hidden: Tensor,  # [N, D]
        student_weight: Tensor,  # [V, D]
        student_bias: Tensor | None,  # [V]
        teacher_hidden: Tensor,  # [N, D_teacher]
        teacher_weight: Tensor,  # [V, D_teacher]
        teacher_bias: Tensor | None,  # [V]
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Computes each token's divergence and the student's entropy, fp32 [N], as TRL's function
        does. The entropy, which TRL logs, has no gradient and takes a forward of its own."""
        reason = self._why_not(student_weight, teacher_weight)
        if reason is not None:
            self._keeps("DistillationTrainer", reason)
        if reason is not None or not self.is_on:
            return self.divergence(
                *(student_hidden, student_weight, student_bias),
                *(teacher_hidden, teacher_weight, teacher_bias),
                *(beta, temperature, student_logit_scale, student_final_logit_softcapping),
                *(teacher_logit_scale, teacher_final_logit_softcapping),
            )
        student_weight = in_memory_until_the_backward(student_weight, student_hidden)
        scale, softcap = in_our_order(student_logit_scale, student_final_logit_softcapping, 1.0)
        teacher_scale, teacher_softcap = in_our_order(
            teacher_logit_scale, teacher_final_logit_softcapping, 1.0
        )
        keywords = self._keywords(beta, of_tokens=True)
        self._count("DistillationTrainer", f"{KERNELS}.{FUNCTION}", keywords)
        divergence: Any = linear_distillation(
            student_hidden,
            student_weight,
            teacher_hidden.detach(),
            in_memory_until_the_backward(teacher_weight, teacher_hidden).detach(),
            bias=student_bias,
            teacher_bias=None if teacher_bias is None else teacher_bias.detach(),
            softcap=softcap,
            teacher_softcap=teacher_softcap,
            logit_scale=scale,
            teacher_logit_scale=teacher_scale,
            temperature=temperature,
            reduction="none",
            **keywords,
        )
        with torch.no_grad():
            output: Any = linear_cross_entropy(
                student_hidden,
                student_weight,
                student_hidden.new_zeros(len(student_hidden), dtype=torch.int64),
                bias=student_bias,
                softcap=softcap,
                logit_scale=scale / temperature,
                reduction="none",
                stats=("entropy",),
                **keywords_of(self.options, of_tokens=True),
            )
        return divergence.float(), output.entropy.float()

    def _why_not(self, student: Tensor, teacher: Tensor) -> str | None:
        """Says why TRL's own function is to be taken; None: it is not."""
        if hasattr(student, "ds_id") or hasattr(teacher, "ds_id"):
            return "DeepSpeed's ZeRO-3 has split its models' heads"
        return None

    # -- GKDTrainer --------------------------------------------------------------------------------

    def _deferring(self) -> Any:
        """Returns GKDTrainer's `compute_loss`, with heads that defer their logits in it."""
        original = self.compute_loss

        @functools.wraps(original)
        def compute_loss(
            trainer: Any,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            rest = (inputs, return_outputs, num_items_in_batch)
            if not self.is_on or self._is_another(trainer):
                return original(trainer, model, *rest)
            student = trainer.accelerator.unwrap_model(model)
            deferrals = [self._deferral(student)]
            teacher = self._deferral(trainer.teacher_model)
            if teacher.head is not deferrals[0].head:
                deferrals.append(teacher)
            with ExitStack() as stack:
                for deferral in deferrals:
                    deferral.begin()
                    stack.callback(deferral.end)
                if student is model:
                    return original(trainer, model, *rest)
                # DDP has to see the loss leave the forward, not the logits.
                from trl.models.utils import _ForwardRedirection

                run = functools.partial(original, trainer)
                return _ForwardRedirection()(model, student, run, student, *rest)

        return compute_loss

    def _is_another(self, trainer: Any) -> bool:
        """Tells a trainer whose loss has to stay TRL's own, or a user's."""
        name, reason = type(trainer).__name__, None
        if type(trainer).generalized_jsd_loss != self.generalized_jsd_loss:
            reason = f"{name} has a generalized_jsd_loss of its own"
        elif trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            reason = "FSDP or DeepSpeed may have freed its heads' weights after the forward"
        if reason is not None:
            self._keeps(name, reason)
        return reason is not None

    def _deferral(self, model: Any) -> Deferral:
        model = model_in(model)
        return Deferral(
            model.get_output_embeddings(), type(model).__name__, self.options, self.said
        )

    def generalized_jsd_loss(
        self,
        student_logits: Tensor,  # [B, T, V]
        teacher_logits: Tensor,  # [B, T, V]
        labels: Tensor | None = None,  # [B, T]
        beta: float = 0.5,
        temperature: float = 1.0,
        reduction: str = "batchmean",
        num_items_in_batch: Any = None,
    ) -> Tensor:
        """Computes GKDTrainer's loss of deferred logits without making them; that of other logits
        by TRL's function."""
        deferred = student_logits, teacher_logits
        is_deferred = all(isinstance(x, DeferredLogits) and not x.is_computed for x in deferred)
        if is_deferred and (num_items_in_batch is not None or reduction in REDUCTIONS):
            keywords = self._keywords(beta, of_tokens=False)
            keywords |= {"temperature": temperature, "reduction": "sum"}
            instead = f"{GKD}.{TRAINER}.generalized_jsd_loss"
            self._count(TRAINER, instead, keywords)
            targets = None if labels is None else torch.where(labels == IGNORED, IGNORED, 0)
            loss = _of_deferred(*deferred, targets, keywords)
            if num_items_in_batch is not None:
                count: Any = num_items_in_batch
                count = count.to(loss.device) if isinstance(count, Tensor) else count
            elif reduction == "sum":
                return loss
            elif targets is None:
                count = max(len(student_logits), 1)
            else:
                count = (targets != IGNORED).sum().clamp_min(1)
            return loss / count
        logits = (x.materialize() if isinstance(x, DeferredLogits) else x for x in deferred)
        options = (labels, beta, temperature, reduction, num_items_in_batch)
        return self.of_logits(*logits, *options)


def _of_deferred(
    student: Any, teacher: Any, targets: Tensor | None, keywords: dict[str, Any]
) -> Tensor:
    """Returns `linear_distillation` of two models' deferred logits, each within its head's call."""

    def of_student(whole: Expression) -> Tensor:
        arguments, has_grad = whole.arguments(), torch.is_grad_enabled()

        def of_teacher(other: Expression) -> Tensor:
            for call in (student.call, teacher.call):
                if call.group is not None:
                    raise PatchError(
                        f"the head of {call.model} must be whole on each rank in GKDTrainer, got "
                        f"one split over {call.group}: cce_dist.integrations.trl.remove()"
                    )
            of_other = {
                f"teacher_{name}": x.detach() if isinstance(x, Tensor) else x
                for name, x in other.arguments().items()
            }
            # The teacher's own forward is without gradients.
            with torch.set_grad_enabled(has_grad):
                loss: Any = linear_distillation(
                    targets=targets, ignore_index=IGNORED, **arguments, **of_other, **keywords
                )
            return loss

        return teacher.compute(of_teacher)

    return student.compute(of_student)


def in_our_order(
    logit_scale: float, softcap: float | None, temperature: float
) -> tuple[float, float | None]:
    """Returns logit_scale and softcap of `linear_cross_entropy`.

    TRL's logits are softcap tanh(logit_scale x / softcap) / temperature, with x = E . C + bias; the
    loss has logit_scale softcap tanh(x / softcap).
    """
    if softcap is not None and logit_scale != 0:
        softcap = softcap / abs(logit_scale)
    return logit_scale / temperature, softcap


def in_memory_until_the_backward(weight: Tensor, hidden: Tensor) -> Tensor:
    """Returns the weight in hidden's dtype, as an alias.

    DeepSpeed's ZeRO-3 empties the parameter after the forward, but not the memory of an alias.
    """
    if not torch.is_autocast_enabled(hidden.device.type):
        weight = weight.to(hidden.dtype)
    return weight.view_as(weight)
