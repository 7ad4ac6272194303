"""Deferred logits: a patched head returns them, and the first read computes them."""

from __future__ import annotations

import contextlib
import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megatron_patch.errors import PatchError


def version_of(tensor: Tensor) -> int:
    """Returns the number of writes that autograd has counted; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


@dataclass(frozen=True)
class HeadCall:
    """A call of the output layer that is not computed yet.

    Args:
        gathers: the call's runtime_gather_output.
        version: hidden's autograd version at the call.
        scale: a factor of the logits.
        records: autograd recorded at the call.
        infers: inference_mode was on at the call.
    """

    layer: Any
    hidden: Tensor  # [s, b, h]; under sequence parallelism this rank's [s / tp, b, h]
    weight: Tensor | None
    gathers: bool | None
    version: int
    scale: float = 1.0
    records: bool = field(default_factory=torch.is_grad_enabled)
    infers: bool = field(default_factory=torch.is_inference_mode_enabled)

    def require_same(self) -> None:
        """Checks that logits computed now equal logits computed at the call.

        Raises:
            PatchError: the values or the gradient would differ.
        """
        # Outside of inference_mode only a Function's forward has this switched off.
        hides = not torch._C._is_fwd_grad_enabled() and not torch.is_inference_mode_enabled()
        if self.records and hides:
            raise PatchError(
                "logits of the output layer must not be an argument of a torch.autograd.Function "
                "(such as a loss or a checkpoint), where autograd cannot record their computation: "
                "call compute_language_model_loss, or pass logits.clone()"
            )
        if version_of(self.hidden) != self.version:
            raise PatchError(
                "the output layer's input must not change in place after the call of the output "
                "layer, since the loss is computed from it: change a copy, or change it before"
            )

    @contextlib.contextmanager
    def as_called(self) -> Iterator[None]:
        """Restores the call's autograd modes: code within it records as the call would have."""
        with contextlib.ExitStack() as stack:
            if torch.is_inference_mode_enabled() != self.infers:
                stack.enter_context(torch.inference_mode(self.infers))
            stack.enter_context(torch.set_grad_enabled(self.records))
            yield


class DeferredLogits(Tensor):
    """scale * (hidden @ weight.T), not computed yet.

    The loss reads hidden and weight from this object and makes no logits. Without gradients the
    largest logits and their indices come from the loss's kernel: multi-token prediction's metric
    reads them. Any other attribute, operator or torch function makes the logits, once, by
    Megatron's own forward. After that the loss uses these logits too: the caller may have changed
    them.
    """

    call: HeadCall
    _logits: Tensor | None

    def __new__(cls, call: HeadCall) -> DeferredLogits:
        # The stand-in has no memory and no shape: a request for either goes to the logits.
        hidden = call.hidden
        self = Tensor._make_wrapper_subclass(cls, (), dtype=hidden.dtype, device=hidden.device)
        self.call, self._logits = call, None
        return self

    @classmethod
    def of(
        cls, layer: Any, hidden: Tensor, weight: Tensor | None, gathers: bool | None
    ) -> DeferredLogits:
        return cls(HeadCall(layer, hidden, weight, gathers, version_of(hidden)))

    @property
    def is_computed(self) -> bool:
        return self._logits is not None

    def materialize(self) -> Tensor:
        """Returns the logits: [s, b, V / tp], or [s, b, V] where the head was asked to gather."""
        call, logits = self.call, self._logits
        if logits is None:
            call.require_same()
            with call.as_called():
                logits, _ = call.layer(
                    call.hidden,
                    weight=call.weight,
                    runtime_gather_output=call.gathers,
                    logits_wanted=True,
                )
                logits = self._logits = logits if call.scale == 1 else logits * call.scale
        return logits

    @property
    def _gathers(self) -> bool:
        return self.call.layer.gather_output if self.call.gathers is None else self.call.gathers

    @property
    def shape(self) -> torch.Size:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Returns the shape of the logits without computing them."""
        if self._logits is not None:
            return self._logits.shape
        layer, hidden = self.call.layer, self.call.hidden
        size = layer.tp_group.size()
        length = hidden.shape[0] * (size if layer.sequence_parallel else 1)
        columns = layer.output_size_per_partition * (size if self._gathers else 1)
        return torch.Size((length, *hidden.shape[1:-1], columns))

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def max(self, *args: Any, **kwargs: Any) -> Any:
        if self._wants_largest(args, kwargs):
            return torch.return_types.max(self._largest())
        return self.materialize().max(*args, **kwargs)

    def argmax(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._wants_largest(args, kwargs):
            return self._largest()[1]
        return self.materialize().argmax(*args, **kwargs)

    def _wants_largest(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Tells whether a call asks for each token's largest logit, without a gradient."""
        asked = (args == (-1,) and not kwargs) or (not args and kwargs == {"dim": -1})
        split = self.call.layer.tp_group.size() > 1 and self._gathers
        return asked and not torch.is_grad_enabled() and self._logits is None and not split

    def _largest(self) -> tuple[Tensor, Tensor]:
        call = self.call
        call.require_same()
        output, _ = call.layer(
            call.hidden, weight=call.weight, logit_scale=call.scale, largest_wanted=True
        )
        return output

    def __mul__(self, other: Any) -> Any:
        # muP multiplies the logits by a number.
        if self._logits is None and isinstance(other, numbers.Real):
            scale = self.call.scale * float(other)
            if 0 < scale < math.inf:
                records = self.call.records and torch.is_grad_enabled()
                return DeferredLogits(replace(self.call, scale=scale, records=records))
        return self.materialize() * other

    def __rmul__(self, other: Any) -> Any:
        return self * other

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"DeferredLogits(hidden={tuple(self.call.hidden.shape)}, scale={self.call.scale})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.max, torch.argmax) and isinstance(args[0], cls):
            return getattr(args[0], func.__name__)(*args[1:], **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(
            DeferredLogits, lambda x: x.materialize(), (args, kwargs or {})
        )
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise PatchError(
            f"{func} got the output layer's logits where torch functions are switched off, so that "
            "they cannot be computed: pass logits.clone()"
        )
