"""Handlers of torch's functions for deferred logits: they return deferred logits or the loss.

A handler returns NotImplemented where its function needs the logits themselves.
"""

from __future__ import annotations

import copy
import inspect
import math
import numbers
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel.distributed import _DDPSink
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from cce_dist import LossOptions, linear_cross_entropy
from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.options import keywords_of
from cce_dist.integrations.transformers.adapters import AdapterGrad, Logits
from cce_dist.integrations.transformers.expression import Expression, comes_from_wrapper
from cce_dist.integrations.transformers.logits import DeferredLogits, handles

# pyright takes them for their values.
_requires_grad: Any = Tensor.requires_grad
_dtype: Any = Tensor.dtype


def _changed(
    logits: DeferredLogits, new: Expression | None, dtype: torch.dtype | None = None
) -> Any:
    if new is None:
        return NotImplemented
    result = DeferredLogits(logits.call, new, dtype or logits.dtype)
    result.is_cast = logits.is_cast
    return result


@handles(Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul)
def _multiply(left: Any, right: Any) -> Any:
    logits, other = (left, right) if isinstance(left, DeferredLogits) else (right, left)
    if isinstance(other, numbers.Real):
        return _changed(logits, logits.expression.times(float(other)))
    if _is_columns(logits, other):
        dtype = torch.promote_types(logits.dtype, other.dtype)
        return _changed(logits, logits.expression.times_columns(other), dtype)
    return NotImplemented


@handles(Tensor.div, Tensor.__truediv__, torch.div)
def _divide(left: Any, right: Any) -> Any:
    if isinstance(right, numbers.Real) and right != 0:
        return _multiply(left, 1 / float(right))
    return NotImplemented


@handles(Tensor.add, Tensor.__add__, Tensor.__radd__, torch.add)
def _add(left: Any, right: Any) -> Any:
    logits, other = (left, right) if isinstance(left, DeferredLogits) else (right, left)
    is_columns = _is_columns(logits, other)
    if not is_columns and (not isinstance(other, DeferredLogits) or other.shape != logits.shape):
        return NotImplemented
    dtype = torch.promote_types(logits.dtype, other.dtype)
    if is_columns:
        # The caller may write there before the logits are computed.
        return _changed(logits, logits.expression.plus_columns(other.clone()), dtype)
    return _changed(logits, logits.expression.plus(other.expression), dtype)


@handles(Tensor.sub, Tensor.__sub__, torch.sub)
def _subtract(left: Any, right: Any) -> Any:
    # DoRA takes the bias off.
    return _add(left, -right) if _is_columns(left, right) else NotImplemented


@handles(Tensor.tanh, torch.tanh)
def _tanh(logits: DeferredLogits) -> Any:
    return _changed(logits, logits.expression.tanh())


@handles(Tensor.to)
def _to(
    logits: DeferredLogits,
    *args: Any,
    device: Any = None,
    dtype: torch.dtype | None = None,
    non_blocking: bool = False,
) -> Any:
    """Changes the dtype, to another float dtype. Logits of another device are not known."""
    for value in args:
        if isinstance(value, torch.dtype):
            dtype = value
        elif isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, (str, int, torch.device)) and not isinstance(value, bool):
            device = value
    stays = device is None or torch.empty(0, device=device).device == logits.device
    if not stays or not (dtype is None or dtype.is_floating_point):
        return NotImplemented
    return _cast(logits, dtype or logits.dtype)


@handles(Tensor.float)
def _float(logits: DeferredLogits) -> Any:
    return _cast(logits, torch.float32)


@handles(Tensor.bfloat16)
def _bfloat16(logits: DeferredLogits) -> Any:
    return _cast(logits, torch.bfloat16)


@handles(Tensor.half)
def _half(logits: DeferredLogits) -> Any:
    return _cast(logits, torch.float16)


def _cast(logits: DeferredLogits, dtype: torch.dtype) -> Any:
    if dtype == logits.dtype:
        return logits
    result = _changed(logits, logits.expression, dtype)
    result.is_cast = True
    return result


@handles(Tensor.detach, torch.detach)
def _detach(logits: DeferredLogits) -> Any:
    # DeepSpeed's ZeRO-3 detaches what its root returns.
    return _view(logits, replace(logits.expression, detached=True))


@handles(Tensor.clone)
def _clone(logits: DeferredLogits) -> Any:
    # DDP clones what its module returns, and then takes the original, which has no graph.
    return (
        _changed(logits, logits.expression) if _is_called_by(_DDPSink.forward) else NotImplemented
    )


def _is_called_by(function: Callable[..., Any]) -> bool:
    """Tells whether a function is among the dozen nearest callers."""
    frame, code = inspect.currentframe(), getattr(function, "__code__", None)
    for _ in range(12):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code


@handles(Tensor.contiguous)
def _contiguous(logits: DeferredLogits) -> Any:
    return logits


@handles(Tensor.view, Tensor.reshape, torch.reshape)
def _reshape(logits: DeferredLogits, *sizes_or_dtype: Any, shape: Any = None) -> Any:
    values = sizes_or_dtype if shape is None else (shape,)
    sizes = list(values[0]) if values and isinstance(values[0], (tuple, list)) else list(values)
    # A view by dtype.
    if not sizes or not all(isinstance(x, int) for x in sizes):
        return NotImplemented
    num_classes = logits.shape[-1]
    if sizes[-1] == -1 and math.prod(sizes[:-1]) * num_classes == logits.numel():
        sizes[-1] = num_classes
    if sizes[-1] != num_classes:
        return NotImplemented
    return _of_rows(logits, lambda x: x.reshape(*sizes[:-1], x.shape[-1]))


@handles(Tensor.flatten, torch.flatten)
def _flatten(logits: DeferredLogits, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = logits.dim() - 1
    if end_dim % logits.dim() == last and start_dim % logits.dim() != last:
        return NotImplemented
    return _of_rows(logits, lambda x: x.flatten(start_dim, end_dim))


@handles(Tensor.squeeze, torch.squeeze)
def _squeeze(logits: DeferredLogits, dim: Any = None) -> Any:
    dim = tuple(range(logits.dim() - 1)) if dim is None else dim
    dims = dim if isinstance(dim, tuple) else (dim,)
    if any(x % logits.dim() == logits.dim() - 1 for x in dims):
        return NotImplemented
    return _of_rows(logits, lambda x: x.squeeze(dim))


@handles(Tensor.__getitem__)
def _getitem(logits: DeferredLogits, index: Any) -> Any:
    """Takes tokens: an index that leaves the vocabulary whole."""
    indices = index if isinstance(index, tuple) else (index,)
    reaches = sum(_num_dims(x) for x in indices) == logits.dim()
    if reaches or any(x is Ellipsis for x in indices):
        last = indices[-1]
        whole = isinstance(last, slice) and last in (slice(None), slice(0, None))
        if not whole and (reaches or last is not Ellipsis):
            return NotImplemented
    # The caller may write to a mask or a list before the logits are computed.
    index = copy.deepcopy(index)
    return _of_rows(logits, lambda x: x[index])


def _num_dims(index: Any) -> int:
    """Returns the number of dims that an index takes."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    if isinstance(index, (int, slice)):
        return 1
    mask = torch.as_tensor(index)
    return mask.dim() if mask.dtype in (torch.bool, torch.uint8) else 1


@handles(_requires_grad.__get__)
def _needs_grad(logits: DeferredLogits) -> bool:
    return logits.wants_grad


@handles(_dtype.__get__)
def _dtype_of(logits: DeferredLogits) -> torch.dtype:
    return logits.full_dtype


@handles(Tensor.register_hook)
def _register_hook(logits: DeferredLogits, hook: Any) -> RemovableHandle:
    """Returns a handle of nothing: FSDP's hooks of its root's outputs wait for the first gradient,
    the loss's."""
    if not comes_from_wrapper(hook):
        _retain_grad(logits)
    return RemovableHandle(OrderedDict())


@handles(Tensor.retain_grad)
def _retain_grad(logits: DeferredLogits) -> None:
    raise PatchError(
        f"the loss of {logits.call.model} makes no gradient of its logits, which retain_grad, "
        "register_hook and autograd.grad ask for: switch the patch off with remove(model)"
    )


@handles(torch.autograd.grad)
def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    is_grads_batched: bool = False,
    allow_unused: bool | None = None,
    materialize_grads: bool = False,
) -> Any:
    """Refuses a gradient by logits. Logits that have one by something else are computed."""
    for x in pytree.tree_leaves(inputs):
        if isinstance(x, DeferredLogits):
            _retain_grad(x)
    return NotImplemented


@handles(F.cross_entropy)
def _cross_entropy(
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Any = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Computes F.cross_entropy without logits: [] or targets' shape, in the logits' dtype."""
    is_plain = isinstance(input, DeferredLogits) and not isinstance(target, DeferredLogits)
    if size_average is not None or reduce is not None or not is_plain:
        return NotImplemented
    # One class a token: [N, V] and [N]. Probabilities, and classes in dim 1, are left to torch.
    if target.dtype.is_floating_point or (input.dim(), target.dim()) != (2, 1):
        return NotImplemented
    call = input.call

    def finish(whole: Expression) -> Tensor:
        arguments = whole.arguments()
        targets = target.to(arguments["hidden"].device)
        adapters = whole.adapters()
        is_plain = weight is None and label_smoothing == 0 and call.group is None
        beside = bool(adapters) and is_plain
        keywords = keywords_of(call.options, of_tokens=beside or reduction == "none")
        call.gradient = keywords["gradient"]
        if beside:
            counted = targets, ignore_index, reduction
            return _beside_frozen(arguments, adapters, *counted, call.options, keywords)
        loss: Any = linear_cross_entropy(
            targets=targets,
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
            class_weight=weight,
            group=call.group,
            **keywords,
            **arguments,
        )
        return loss

    # Autocast computes cross_entropy in fp32.
    in_autocast = torch.is_autocast_enabled(input.device.type)
    loss = input.compute(finish)
    if loss.dtype not in (torch.float32, torch.float64):
        raise PatchError(
            f"{call.model} cannot be patched: a wrapper of its head, such as FSDP with an "
            f"output_dtype, casts the loss to {loss.dtype}; leave the head's outputs in fp32"
        )
    call.num_losses += 1
    return loss.to(input.device, dtype=loss.dtype if in_autocast else input.dtype)


def _beside_frozen(
    arguments: dict[str, Any],
    adapters: list[tuple[Tensor, Tensor]],
    targets: Tensor,
    ignore_index: int,
    reduction: str,
    options: LossOptions,
    keywords: dict[str, Any],
) -> Tensor:
    """Computes the loss of a frozen head with adapters; the weight has no gradient as a whole."""
    arguments = {**arguments, "weight": arguments["weight"].detach()}
    output: Any = linear_cross_entropy(
        targets=targets,
        ignore_index=ignore_index,
        reduction="none",
        stats=("lse",),
        **keywords,
        **arguments,
    )
    bias = arguments["bias"]
    logits = Logits(
        arguments["hidden"].detach(),
        arguments["weight"],
        None if bias is None else bias.detach(),
        arguments["logit_scale"],
        arguments.get("softcap"),
    )
    states, weights = zip(*adapters, strict=True)
    of_tokens = output.loss + AdapterGrad.apply(
        logits,
        options.workspace_for(len(targets)),
        torch.where(targets == ignore_index, -1, targets),
        *(output.lse.detach(), output.loss.detach()),
        *(x.detach() for x in states),
        *weights,
    )
    if reduction == "none":
        return of_tokens
    if reduction == "sum":
        return of_tokens.sum()
    return of_tokens.sum() / (targets != ignore_index).sum().clamp(min=1)


def _of_rows(logits: DeferredLogits, change: Callable[[Tensor], Tensor]) -> Any:
    return _view(logits, logits.expression.of_rows(change))


def _view(logits: DeferredLogits, new: Expression) -> DeferredLogits:
    result = _changed(logits, new)
    result.is_view = True
    return result


def _is_columns(logits: Any, value: Any) -> bool:
    """Tells whether a tensor has one number for each class of deferred logits."""
    return (
        isinstance(logits, DeferredLogits)
        and isinstance(value, Tensor)
        and not isinstance(value, DeferredLogits)
        and 0 < value.dim() <= logits.dim()
        and value.shape[-1] == value.numel() == logits.shape[-1]
    )
