"""Deferred logits: a patched head returns them, the loss reads them, and the first other read
computes them."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.utils import _pytree as pytree

from cce_dist.integrations.errors import PatchError
from cce_dist.integrations.log import logger
from cce_dist.integrations.transformers.expression import (
    DONE,
    IN_HEAD,
    IN_MODEL,
    Expression,
    Finish,
    HeadCall,
    version_of,
)

# Answered by the stand-in itself, which has the logits' shape and device. FSDP asks the outputs of
# its root for the last three.
ATTRIBUTES = ("shape", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta")
ATTRIBUTES += ("is_nested", "is_sparse", "is_quantized", "is_leaf", "_base", "grad_fn")
METADATA: set[Any] = {
    *(getattr(Tensor, name).__get__ for name in ATTRIBUTES),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex),
    torch.numel,
}
# They give out the logits' memory, and nobody counts the writes there.
_MEMORY = ("numpy", "__array__", "__dlpack__", "data_ptr", "storage", "untyped_storage")
_data: Any = Tensor.data
EXPOSE: set[Any] = {_data.__get__, _data.__set__, *(getattr(Tensor, name) for name in _MEMORY)}
GRADIENTS: set[Any] = {Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad}
# What functions of torch make of deferred logits, and the keywords that a handler knows. It
# returns NotImplemented where its function needs the logits themselves.
HANDLERS: dict[Any, tuple[Callable[..., Any], frozenset[str]]] = {}


Function = TypeVar("Function", bound=Callable[..., Any])


def not_compiled(function: Function) -> Function:
    """Keeps torch.compile out of a function, which it could not trace."""
    disable: Any = torch.compiler.disable
    return disable(function)


def handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a handler of functions of torch."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        names = frozenset(inspect.signature(handler).parameters)
        HANDLERS.update(dict.fromkeys(functions, (handler, names)))
        return handler

    return register


class DeferredLogits(Tensor):
    """Logits that nobody has computed yet: shape, dtype and device are known, memory there is none.

    The model's scale, softcap, slices and reshapes are remembered, and `F.cross_entropy` becomes
    `linear_cross_entropy`. After the model's forward any other read computes the logits, once.
    """

    call: HeadCall
    expression: Expression
    is_view: bool  # of other logits, whose memory it would share
    is_cast: bool  # to its dtype, by the model or a reader
    _logits: Tensor | None

    def __new__(cls, call: HeadCall, expression: Expression, dtype: torch.dtype) -> DeferredLogits:
        hidden = expression.products[0].hidden
        shape = (*hidden.shape[:-1], call.num_classes)
        # Logits that are made under no_grad have no gradient where they are read either.
        if not torch.is_grad_enabled():
            expression = replace(expression, detached=True)
        # An autograd Function asks C++ whether its inputs need a gradient, not `wants_grad`.
        wants_grad = _wants_grad(call, expression) and not call.is_zero3
        self = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=hidden.device, requires_grad=wants_grad
        )
        if wants_grad:
            with torch._C.DisableTorchFunctionSubclass():
                self.register_hook(functools.partial(_refuse_grad, call.model))
        self.call, self.expression, self._logits = call, expression, None
        self.is_view = self.is_cast = False
        return self

    @property
    def is_computed(self) -> bool:
        return self._logits is not None

    @property
    def is_of_function(self) -> bool:
        """Tells whether an autograd Function returned it, whose backward would be left out."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.grad_fn is not None

    @property
    def wants_grad(self) -> bool:
        return _wants_grad(self.call, self.expression)

    def compute(self, finish: Finish) -> Tensor:
        """Returns the result of `finish` for this expression, with the head's own products."""
        call, expression = self.call, self.expression
        if call.is_edited and self.is_view:
            raise PatchError(
                f"the logits of {call.model} were written to in place, or .data, .numpy() or the "
                "like gave their memory out, after a part of them was taken that is not computed: "
                "use outputs.logits.clone() for that"
            )
        (output,) = expression.products
        # The head gets what the model gave it: a head, or a hook of it, may look at a token's
        # neighbours. Tokens are taken afterwards.
        origin = output.origin or output
        origin.require_same()

        def finish_head(head: Expression) -> Tensor:
            for change in output.changes:
                head = head.of_rows(change)
            whole = expression.with_head(head)
            if whole is None:
                raise PatchError(
                    f"{call.model} cannot be patched: its head's output has a softcap of its own"
                )
            return finish(whole)

        with torch.set_grad_enabled(torch.is_grad_enabled() and not expression.detached):
            return call.compute(origin.hidden, finish_head)

    def materialize(self) -> Tensor:
        """Returns the logits, [..., V]; computes them at the first call."""
        if self._logits is None:
            # The first reader may be under no_grad, and a later one may not.
            records = not self.expression.detached
            with torch.inference_mode(False), torch.set_grad_enabled(records), _unseen():
                if all(x.weight is not None for x in self.expression.products):
                    logits = self.expression.logits(self.dtype)
                else:
                    logits = self.compute(lambda whole: whole.logits(self.dtype))
                # The head may be on another device than the model's output.
                self._logits = logits.to(self.device)
        return self._logits

    @property
    def full_dtype(self) -> torch.dtype:
        """Returns the dtype of a cast; without a cast the expected dtype, or the head's if that is
        wider: a head may cast its output, or a hook its input."""
        with torch._C.DisableTorchFunctionSubclass():
            expected = self.dtype
        head_dtype = self.call.head_dtype
        if self.is_cast or head_dtype is None:
            return expected
        return torch.promote_types(expected, head_dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        state = "computed" if self.is_computed else "nobody has computed them"
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype}: {state})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise PatchError(
            f"{func} got logits that are not computed, where torch functions are switched off (in "
            "an autograd Function or a gather of nn.DataParallel): pass outputs.logits.clone(), or "
            "start one process for each GPU, as torchrun does"
        )


def _wants_grad(call: HeadCall, expression: Expression) -> bool:
    hidden = any(x.hidden.requires_grad for x in expression.products)
    return not expression.detached and (hidden or call.trains)


def _unseen() -> contextlib.AbstractContextManager[object]:
    """Hides tensors that autograd saves from hooks, such as those of a checkpoint around the reader
    of logits: it would miss them when it runs the reader once more. Where there are none, autograd
    finds out whether a saved tensor has changed, which no hook does."""
    if _top_saved_tensors_default_hooks(False) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _refuse_grad(model: str, grad: Tensor | None) -> None:
    """Raises where an autograd Function gives a gradient of logits that are not computed: nothing
    is behind them."""
    if grad is not None:
        raise PatchError(
            "an autograd Function, such as checkpoint's with use_reentrant=True, got the logits of "
            f"{model}, which are not computed, and its gradient would be lost: pass it "
            "outputs.logits.clone()"
        )


@not_compiled
def _apply(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Applies a function of torch to arguments of which some are deferred logits.

    Raises:
        PatchError: the model's own forward uses an operator that the loss cannot follow.
    """
    if func in METADATA:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    deferred = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, DeferredLogits)]
    if any(x.is_of_function for x in deferred):
        raise PatchError(
            f"{deferred[0].call.model} cannot be patched: its head is called within an autograd "
            "Function, such as a checkpoint's; give that use_reentrant=False"
        )
    handler, names = HANDLERS.get(func, (None, frozenset()))
    # Of logits that are computed the loss makes no gradient either.
    is_deferred = func in GRADIENTS or not any(x.is_computed for x in deferred)
    if handler and kwargs.keys() <= names and is_deferred:
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    name = getattr(func, "__name__", str(func))
    call = deferred[0].call
    if call.stage is IN_MODEL:
        raise PatchError(
            f"{call.model} cannot be patched: its forward applies {name} to its logits, and the "
            "loss that needs no logits knows scales, softcap, bias, slices of tokens and "
            "F.cross_entropy; switch the patch off with remove(model)"
        )
    # DoRA computes its weight's norm from a product of its own, of other rows.
    in_head = call.stage is IN_HEAD and any(x.shape[:-1] == call.rows for x in deferred)
    reader = "its head" if in_head else name
    is_told = reader in call.said or not (in_head or call.stage is DONE)
    if not is_told and not all(x.is_computed for x in deferred):
        call.said.add(reader)
        logger.warning(
            "%s: logits %s are computed, since %s reads them", call.model, deferred[0].shape, reader
        )
    versions = [(x, version_of(x.materialize())) for x in deferred]
    args, kwargs = pytree.tree_map_only(DeferredLogits, lambda x: x.materialize(), (args, kwargs))
    result = func(*args, **kwargs)
    written = [x for x, version in versions if version_of(x.materialize()) != version]
    if written:
        _count_write(call, name, written)
    elif func in EXPOSE and call.stage is DONE:
        call.is_edited = True
    elif func in EXPOSE and in_head:
        raise PatchError(
            f"{call.model} cannot be patched: its head takes the memory of its logits, by .data, "
            ".numpy() or the like, and may write there"
        )
    return result


def _count_write(call: HeadCall, name: str, written: list[DeferredLogits]) -> None:
    """Takes note of a write to logits.

    Raises:
        PatchError: their other readers would not see it.
    """
    if call.stage is IN_HEAD:
        raise PatchError(
            f"{call.model} cannot be patched: its head writes to its logits in place, by {name}"
        )
    parts = [x for x in written if x.is_view]
    for part in parts:
        part._logits = None
    if parts:
        raise PatchError(
            f"{name} would write to a part of the logits of {call.model} alone, not to the "
            "logits themselves: write to a clone"
        )
    call.is_edited = True
