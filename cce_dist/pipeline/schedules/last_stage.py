"""The loss on the last stage of a pipeline, under torch.distributed.pipelining."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cce_dist.distillation import linear_distillation
from cce_dist.distillation.loss import check_options
from cce_dist.loss import linear_cross_entropy
from cce_dist.options import LossOptions
from cce_dist.pipeline.schedules.torch_schedules import stages_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class LastStageLoss:
    """`loss_fn` of a schedule whose last stage ends before the LM head.

    Args:
        weight: [V_local, D], this rank's rows on the last stage. Under a schedule that splits its
            backward (zero bubble, ZBV, DualPipeV) weight and `bias` must be parameters of the last
            stage's module: torch then makes gradients of no other tensors.
        group: the last stage's tensor-parallel ranks, which share the vocabulary; None: one rank.
        teacher: called without gradients with a microbatch's targets, its token ids under shift=1;
            returns a teacher's hidden states [..., D_teacher] of the same tokens. The loss is then
            `linear_distillation`, whose teacher_weight is one of `options`.
        options: keywords of `linear_cross_entropy`, or with `teacher` of `linear_distillation`;
            `bias` is one of them. reduction is "mean" or "sum".
    Raises:
        ValueError: a schedule has no use for an option, or an option would count twice; in a call,
            the schedule would lose the weight's gradient.
    A schedule with scale_grads=True divides the gradients of its stages' parameters by the number
    of microbatches. It divides weight's only if weight is such a parameter.
    """

    def __init__(
        self,
        weight: Tensor,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        teacher: Callable[[Tensor], Tensor] | None = None,
        **options: object,
    ) -> None:
        if options.get("reduction") == "none" or options.get("stats"):
            raise ValueError(
                "reduction must be 'mean' or 'sum' and stats empty, since a schedule calls "
                f"backward on the result of loss_fn, got {options}"
            )
        if options.get("grad_weight_into") is not None:
            raise ValueError(
                "grad_weight_into must be None: a schedule without static input_args and "
                "output_args calls loss_fn and its backward once more than there are microbatches"
            )
        # A keyword that the loss does not have is refused here, and not in the first step.
        known = inspect.signature(linear_cross_entropy if teacher is None else linear_distillation)
        known.bind(None, weight, None, group=group, **options)
        # So is a value that is not allowed: other stages would wait for this one.
        if teacher is not None:
            check_options(options)
        else:
            fields = LossOptions.__dataclass_fields__
            known_options: Any = {name: options[name] for name in options if name in fields}
            LossOptions(**known_options)
        self.weight, self.group, self.teacher = weight, group, teacher
        self.options: dict[str, Any] = options

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self._check_schedule(_calling_schedule())
        tensors, options = (output, self.weight), {**self.options, "group": self.group}
        if self.teacher is None:
            loss = linear_cross_entropy(*tensors, target, **options)
        else:
            with torch.no_grad():
                hidden = self.teacher(target)
            loss = linear_distillation(*tensors, hidden, targets=target, **options)
        assert isinstance(loss, Tensor)
        return loss

    def _check_schedule(self, schedule: Any) -> None:
        if schedule is None or not _splits_backward(schedule):
            return
        last = [stage for stage in stages_of(schedule) if stage.is_last]
        known = {id(x) for stage in last for x in stage.submod.parameters()}
        for name, tensor in {"weight": self.weight, "bias": self.options.get("bias")}.items():
            if tensor is None or not tensor.requires_grad or id(tensor) in known:
                continue
            raise ValueError(
                f"{name} must be a parameter of the last stage's module under "
                f"{type(schedule).__name__}, which splits its backward and makes gradients of the "
                f"stages' parameters alone: the {name}'s would be lost"
            )


def _calling_schedule() -> Any:
    """Finds the schedule that calls a loss_fn, by the call's frames; None: no schedule calls it."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "_n_microbatches") and hasattr(caller, "_loss_fn"):
            return caller
        frame = frame.f_back
    return None


def _splits_backward(schedule: Any) -> bool:
    # A schedule that is loaded from a file may have the second alone.
    names = "pipeline_order", "pipeline_order_with_comms"
    orders = (getattr(schedule, name, None) or {} for name in names)
    actions = (x for each in orders for order in each.values() for x in order)
    return any(x is not None and x.computation_type.name == "BACKWARD_INPUT" for x in actions)
