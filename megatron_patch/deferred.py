"""What a patched head returns in place of logits, until someone looks at them."""

from __future__ import annotations

import numbers
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


class DeferredLogits:
    """scale * (hidden @ weight.T), not computed yet.

    The loss takes hidden and weight from here. Whoever else asks for anything, an attribute, an
    operator, a torch function, gets that of the logits, which are then made by Megatron's own
    forward, once.
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
