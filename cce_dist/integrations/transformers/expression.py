"""Logits as an expression of hidden states and weights, and what the logits of a call share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from cce_dist import LossOptions
from cce_dist.integrations.errors import PatchError

IN_HEAD, IN_MODEL, DONE = "in the head", "in the model", "done"


@dataclass
class HeadCall:
    """What the logits of one forward share.

    Args:
        model: the patched model's class name, for messages.
        options: the loss's options; what the model itself decides is read from its own operators.
        dtype: of autocast; None: it is off.
        stage: IN_HEAD, then IN_MODEL: each operator on the logits must have a form that the loss
            knows; then DONE.
        said: what this model's user has been told already.
        group: a mesh whose ranks share the vocabulary; None: the head is whole.
    """

    model: str
    options: LossOptions
    said: set[str]
    dtype: torch.dtype | None = None
    stage: str = IN_HEAD
    group: Any = None
    num_losses: int = 0


@dataclass(frozen=True)
class Product:
    """factor * (hidden @ weight.T), and the versions of both when the head was called."""

    hidden: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    factor: float = 1.0
    versions: tuple[int, int] = field(default=(0, 0))

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor) -> Product:
        return cls(hidden, weight, versions=(_version(hidden), _version(weight)))

    def require_same(self) -> None:
        """Checks that neither has changed in place: logits computed now are those of the call.

        Raises:
            PatchError: one of them has changed.
        """
        for name, tensor, old in zip(
            ("hidden states", "weight"), (self.hidden, self.weight), self.versions, strict=True
        ):
            if _version(tensor) != old:
                raise PatchError(
                    f"the head's {name} changed in place after the head was called, so that its "
                    "logits cannot be computed any more: read them before (outputs.logits.clone())"
                )


@dataclass(frozen=True)
class Expression:
    """outer * cap(sum of products + sum of biases), cap = tanh or nothing.

    Without a cap `outer` is 1: factors are in the products and biases.
    """

    products: tuple[Product, ...]
    biases: tuple[tuple[Tensor, float], ...] = ()  # [V] and a factor
    capped: bool = False
    outer: float = 1.0

    def times(self, factor: float) -> Expression | None:
        """Returns the expression times a number; None: it has no such form."""
        if not math.isfinite(factor) or factor == 0:
            return None
        if self.capped:
            return replace(self, outer=self.outer * factor)
        return replace(
            self,
            products=tuple(replace(x, factor=x.factor * factor) for x in self.products),
            biases=tuple((bias, old * factor) for bias, old in self.biases),
        )

    def times_columns(self, columns: Tensor) -> Expression | None:
        """Returns the expression times [V] or [1, V], as DoRA's magnitudes are."""
        if self.capped or columns.numel() != columns.shape[-1]:
            return None
        flat = columns.reshape(-1)
        return replace(
            self,
            # A product whose weight is made here cannot change in place.
            products=tuple(
                replace(Product.of(x.hidden, x.weight * flat[:, None]), factor=x.factor)
                for x in self.products
            ),
            biases=tuple((bias * flat, factor) for bias, factor in self.biases),
        )

    def plus(self, other: Expression) -> Expression | None:
        if self.capped or other.capped:
            return None
        products = list(self.products)
        for new in other.products:
            # DoRA multiplies the same hidden states by two weights.
            same = [x for x in products if x.hidden is new.hidden]
            if same:
                old = same[0]
                weight = old.weight * old.factor + new.weight * new.factor
                products[products.index(old)] = Product.of(new.hidden, weight)
            else:
                products.append(new)
        return replace(self, products=tuple(products), biases=self.biases + other.biases)

    def plus_columns(self, columns: Tensor) -> Expression | None:
        if self.capped or columns.numel() != columns.shape[-1]:
            return None
        return replace(self, biases=(*self.biases, (columns.reshape(-1), 1.0)))

    def tanh(self) -> Expression | None:
        return None if self.capped else replace(self, capped=True)

    def of_rows(self, change: Callable[[Tensor], Tensor]) -> Expression:
        """Applies a change of the tokens, which keeps the last dim, to each product's hidden."""
        return replace(
            self,
            products=tuple(
                Product(y := change(x.hidden), x.weight, x.factor, (_version(y), x.versions[1]))
                for x in self.products
            ),
        )

    def logits(self, dtype: torch.dtype) -> Tensor:
        """Computes the logits, as the head and the model's operators after it do."""
        total: Any = None
        for product in self.products:
            product.require_same()
            part = _multiply(product.hidden, product.weight)
            part = part if product.factor == 1 else part * product.factor
            total = part if total is None else total + part
        for bias, factor in self.biases:
            whole = bias.full_tensor() if isinstance(bias, DTensor) else bias
            total = total + (whole if factor == 1 else whole * factor)
        if self.capped:
            total = torch.tanh(total) * self.outer
        return total.to(dtype)

    def arguments(self) -> dict[str, Any]:
        """Returns hidden, weight, bias, logit_scale and softcap of `linear_cross_entropy`.

        Several products become one, of hidden states and weights side by side.
        """
        for product in self.products:
            product.require_same()
        first = self.products[0]
        scale = first.factor
        hidden, weight = first.hidden, first.weight
        if len(self.products) > 1:
            dtype = weight.dtype
            parts = [
                x.hidden if x.factor == scale else x.hidden * (x.factor / scale)
                for x in self.products
            ]
            hidden = torch.cat([x.to(dtype) for x in parts], dim=-1)
            weight = torch.cat([x.weight.to(dtype) for x in self.products], dim=-1)
        bias = None
        for each, factor in self.biases:
            each = each if factor == scale else each * (factor / scale)
            bias = each if bias is None else bias + each
        arguments: dict[str, Any] = {"hidden": hidden, "weight": weight, "bias": bias}
        if not self.capped:
            return {**arguments, "logit_scale": scale}
        return {**arguments, "logit_scale": self.outer * scale, "softcap": 1 / scale}


def _multiply(hidden: Tensor, weight: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return F.linear(hidden, weight)
    whole = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    product: Any = F.linear(whole, weight)
    return product.full_tensor()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
