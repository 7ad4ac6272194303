"""Methods that replace those of a head and its model."""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_patch.deferred import DeferredLogits
from megatron_patch.errors import PatchError
from megatron_patch.head import MARK, HeadFunction, head_loss, largest_logits
from megatron_patch.options import PatchOptions
from megatron_patch.refusals import why_changed, why_overridden
from megatron_patch.seams import LOSS, Seams
from megatron_patch.stock import why_not_stock

# Arguments of ColumnParallelLinear.forward.
_OF_MEGATRON = {"input_", "weight", "runtime_gather_output"}


@dataclass
class Patched:
    """The state of one patched head.

    Args:
        is_stock: Megatron's own functions have run beside the patch, with the same results.
        compute: in place of the loss, as long as `computing` lasts.
    """

    options: PatchOptions
    seams: Seams
    is_stock: bool = False
    compute: HeadFunction | None = None


def options_of(layer: Any) -> PatchOptions | None:
    """Returns a head's options; None: the head is Megatron's."""
    patched = vars(layer).get(MARK)
    return None if patched is None else patched.options


@contextmanager
def computing(layer: Any, compute: HeadFunction) -> Iterator[None]:
    """Within it the model of a patched head has `compute` in place of its loss."""
    patched: Patched = vars(layer)[MARK]
    before, patched.compute = patched.compute, compute
    try:
        yield
    finally:
        patched.compute = before


def put(model: Any, layer: Any, options: PatchOptions, seams: Seams) -> None:
    """Replaces methods of the instances; their classes stay as they are."""
    setattr(layer, MARK, Patched(options, seams))
    layer.forward = types.MethodType(_head_forward, layer)
    layer._call_impl = types.MethodType(_head_call, layer)
    model.compute_language_model_loss = types.MethodType(_model_loss, model)


def take_away(model: Any, layer: Any) -> None:
    del layer.forward, layer._call_impl, model.compute_language_model_loss
    delattr(layer, MARK)


def _defer(
    self: Any,
    input_: Tensor,
    weight: Tensor | None = None,
    runtime_gather_output: bool | None = None,
) -> DeferredLogits | None:
    """Returns deferred logits for Megatron's call of a head; None: the head's forward must run."""
    gathers = self.gather_output if runtime_gather_output is None else runtime_gather_output
    if gathers and not (self.training and torch.is_grad_enabled()):
        return None
    _require_unchanged(self)
    return DeferredLogits.of(self, input_, weight, runtime_gather_output)


def _require_unchanged(layer: Any) -> None:
    """Checks a patched head.

    Raises:
        PatchError: since `apply` something was added to the head that the patch would leave out.
    """
    patched: Patched = vars(layer)[MARK]
    reason = why_changed(layer, patched.seams, patched.options)
    ours = {"forward": _head_forward, "_call_impl": _head_call}
    for name, function in ours.items():
        if getattr(vars(layer).get(name), "__func__", None) is not function:
            reason = f"{name} of output_layer was replaced after apply(): call remove() before that"
    if reason is not None:
        raise PatchError(f"the loss cannot do without logits: {reason}")


def _head_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replaces the function that nn.Module.__call__ calls.

    A deferred call runs no hooks: FSDP's hooks wrap the head's input to observe its gradient, and
    must do so once.
    """
    # Other keywords are those of `_head_forward`, by which the patch itself calls the head.
    deferred = _defer(self, *args, **kwargs) if kwargs.keys() <= _OF_MEGATRON else None
    return type(self)._call_impl(self, *args, **kwargs) if deferred is None else (deferred, None)


def _head_forward(
    self: Any,
    input_: Tensor,
    weight: Tensor | None = None,
    runtime_gather_output: bool | None = None,
    *,
    labels: Tensor | None = None,  # [s, b]: compute the loss
    logit_scale: float = 1.0,
    logits_wanted: bool = False,
    largest_wanted: bool = False,
    model: Any = None,  # the model that asks for the loss
    compute: HeadFunction | None = None,  # with labels: in place of the loss
) -> tuple[Any, Tensor | None]:
    """Replaces ColumnParallelLinear.forward, and computes the loss, too.

    So the loss goes through the layer's __call__: hooks that bring the weight
    (overlap_param_gather, FSDP) run before it.
    """
    patched: Patched = vars(self)[MARK]
    used_weight = self.weight if weight is None else weight
    if labels is not None:
        _require_stock(model, self, used_weight)
        args = (self, input_, used_weight, labels, logit_scale, patched.options)
        return (head_loss if compute is None else compute)(*args), None
    if largest_wanted:
        return largest_logits(self, input_, used_weight, logit_scale, patched.options), None
    # Compiled modules call their forward directly.
    deferred = None if logits_wanted else _defer(self, input_, weight, runtime_gather_output)
    if deferred is not None:
        return deferred, None
    return type(self).forward(self, input_, weight, runtime_gather_output)


def _model_loss(self: Any, labels: Tensor, logits: Any) -> Tensor:
    """Replaces compute_language_model_loss: labels [b, s] -> loss [b, s] fp32.

    Raises:
        PatchError: since `apply` something was added to the model that the patch would leave out;
            or the logits are computed already, and Megatron's loss cannot follow the options.
    """
    patched: Patched | None = vars(self.output_layer).get(MARK)
    if patched is None:
        raise PatchError(
            f"{type(self).__name__}: output_layer was replaced after apply(), by a "
            f"{type(self.output_layer).__qualname__}: apply the patch after that, or run without it"
        )
    reason = why_overridden(self, {LOSS: patched.seams.loss})
    if reason is not None:
        raise PatchError(f"{type(self).__name__}: {reason}")
    if isinstance(logits, DeferredLogits) and not logits.is_computed:
        call = logits.call
        call.require_same()
        with torch.set_grad_enabled(call.records and torch.is_grad_enabled()):
            loss, _ = call.layer(
                call.hidden,
                weight=call.weight,
                labels=labels.transpose(0, 1).contiguous(),
                logit_scale=call.scale,
                model=self,
                compute=patched.compute,
            )
            return loss.transpose(0, 1).contiguous()
    _require_plain(patched)
    values = logits.materialize() if isinstance(logits, DeferredLogits) else logits
    return type(self).compute_language_model_loss(self, labels, values)


def _require_plain(patched: Patched) -> None:
    values = {name: getattr(patched.options, name) for name in ("softcap", "vocab_size")}
    wanted = {name: f"{name}={value!r}" for name, value in values.items() if value is not None}
    if patched.compute is not None:
        wanted = {"distillation": "distillation"}
    for name, described in wanted.items():
        raise PatchError(
            f"{described} needs a loss without logits, but the model has computed its logits "
            f"(something reads or changes them between output_layer and {LOSS}, or the head "
            f"gathers them), and Megatron's loss has no {name}: drop {name}, or leave the logits "
            "alone"
        )


def _require_stock(model: Any, layer: Any, weight: Tensor) -> None:
    """Compares the patch with Megatron's functions, once for a model.

    Raises:
        PatchError: the functions of Megatron that the patch replaces give other values.
    """
    patched: Patched = vars(layer)[MARK]
    if not patched.is_stock:
        reason = why_not_stock(model, layer, weight, patched.seams)
        if reason is not None:
            raise PatchError(f"{type(model).__name__}: {reason}")
        patched.is_stock = True
