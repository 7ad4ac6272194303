"""What a patched head returns in place of logits, until someone looks at them."""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class DeferredLogits:
    """scale * (hidden @ weight.T), not computed yet.

    The loss takes hidden and weight from here; so do, where nothing is differentiated, the largest
    logits and their indices, by the loss's kernel, which multi-token prediction's metric wants.
    Whoever else asks for anything, an attribute, an operator, a torch function, gets that of the
    logits, which are then made by Megatron's own forward, once.
    """

    def __init__(
        self, layer: Any, hidden: Tensor, weight: Tensor | None, gather: bool | None, scale: float
    ) -> None:
        self.layer, self.hidden, self.weight = layer, hidden, weight
        self.gather, self.scale = gather, scale
        self._logits: Tensor | None = None

    def materialize(self) -> Tensor:
        """[s, b, V / tp], or [s, b, V] where the head was asked to gather."""
        logits = self._logits
        if logits is None:
            logits, _ = self.layer(
                self.hidden,
                weight=self.weight,
                runtime_gather_output=self.gather,
                logits_wanted=True,
            )
            logits = self._logits = logits if self.scale == 1 else logits * self.scale
        return logits

    @property
    def _gathers(self) -> bool:
        return self.layer.gather_output if self.gather is None else self.gather

    @property
    def shape(self) -> torch.Size:
        """Of the logits, without making them."""
        size = self.layer.tp_group.size()
        length = self.hidden.shape[0] * (size if self.layer.sequence_parallel else 1)
        columns = self.layer.output_size_per_partition * (size if self._gathers else 1)
        return torch.Size((length, *self.hidden.shape[1:-1], columns))

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
        """Of each token, for no gradient, and on this rank's columns."""
        asked = (args == (-1,) and not kwargs) or (not args and kwargs == {"dim": -1})
        split = self.layer.tp_group.size() > 1 and self._gathers
        return asked and not torch.is_grad_enabled() and self._logits is None and not split

    def _largest(self) -> tuple[Tensor, Tensor]:
        found, _ = self.layer(
            self.hidden, weight=self.weight, logit_scale=self.scale, largest_wanted=True
        )
        return found

    def __mul__(self, factor: Any) -> Any:
        # muP's multiplier of the logits.
        if isinstance(factor, numbers.Real):
            scale = self.scale * float(factor)
            return DeferredLogits(self.layer, self.hidden, self.weight, self.gather, scale)
        return self.materialize() * factor

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        # Protocols are asked for by such names: copying, pickling, arrays.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    def __repr__(self) -> str:
        return f"DeferredLogits(hidden={tuple(self.hidden.shape)}, scale={self.scale})"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if function in (torch.max, torch.argmax) and isinstance(args[0], cls):
            return getattr(args[0], function.__name__)(*args[1:], **(kwargs or {}))
        args, kwargs = pytree.tree_map_only(
            DeferredLogits, lambda x: x.materialize(), (args, kwargs or {})
        )
        return function(*args, **kwargs)


def _delegated(name: str) -> Any:
    def method(self: DeferredLogits, *args: Any) -> Any:
        return getattr(self.materialize(), name)(*args)

    method.__name__ = name
    return method


# Python looks for these in the class.
for _name in (
    *("getitem", "setitem", "len", "iter", "neg", "abs", "add", "radd", "sub", "rsub"),
    *("truediv", "rtruediv", "pow", "matmul", "rmatmul", "lt", "le", "gt", "ge"),
):
    setattr(DeferredLogits, f"__{_name}__", _delegated(f"__{_name}__"))
