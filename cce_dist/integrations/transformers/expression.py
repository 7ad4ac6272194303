"""Logits as an expression of hidden states and weights, and the state that they share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from cce_dist import LossOptions
from cce_dist.integrations.errors import PatchError

# Makes a result of the products of a head, within the head's forward.
Finish: TypeAlias = "Callable[[Expression], Tensor]"
# Takes or reshapes tokens: [..., D] -> [..., D].
Rows: TypeAlias = Callable[[Tensor], Tensor]
IN_HEAD, IN_MODEL, DONE = "in the head", "in the model", "done"


@dataclass
class HeadCall:
    """State that all logits of one forward share.

    Args:
        model: the patched model's class name, for messages.
        options: the loss's options; what the model itself decides is read from its own operators.
        said: what this model's user has been told already.
        compute: calls the head with hidden states, and returns the result of a `Finish`.
        num_classes: V.
        trains: a parameter of the head has a gradient.
        stage: IN_MODEL, where each operator on the logits must have a form that the loss knows,
            but for the head's own ones, IN_HEAD; then DONE.
        dtype: of autocast; None: it is off.
        head_dtype: of what the head returns, which is known when it has been called; the deferred
            logits of its output have hidden's dtype, or autocast's.
        is_edited: a reader has written to the logits in place, or has got their memory.
        is_zero3: DeepSpeed's ZeRO-3 passes the model's output through functions and hooks of its
            own, which neither read the logits nor give a gradient of them.
        group: a mesh whose ranks share the vocabulary; None: the head is whole.
        num_losses: losses of this call that were computed without logits.
        gradient: the mode of the last of them: each token's loss has "filtered" for "in_forward".
        rows: shape without D of what the head got, if its own forward runs.
    """

    model: str
    options: LossOptions
    said: set[str]
    compute: Callable[[Tensor, Finish], Tensor]
    num_classes: int = 0
    trains: bool = False
    stage: str = IN_MODEL
    dtype: torch.dtype | None = None
    head_dtype: torch.dtype | None = None
    is_edited: bool = False
    is_zero3: bool = False
    group: Any = None
    num_losses: int = 0
    gradient: str = ""
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Product:
    """factor * (hidden @ weight.T); without a weight: factor * the head's output for hidden.

    Args:
        origin: without a weight, what the head was called with, before `changes` took tokens of
            it; None: that is hidden itself.
    """

    hidden: Tensor  # [..., D]
    weight: Tensor | None  # [V, D]
    factor: float = 1.0
    version: int = 0
    origin: Product | None = None
    changes: tuple[Rows, ...] = ()

    @classmethod
    def of(cls, hidden: Tensor, weight: Tensor | None = None, factor: float = 1.0) -> Product:
        return cls(hidden, weight, factor, version_of(hidden))

    def of_rows(self, change: Rows) -> Product:
        self.require_same()
        new = Product.of(change(self.hidden), self.weight, self.factor)
        if self.weight is not None:
            return new
        return replace(new, origin=self.origin or self, changes=(*self.changes, change))

    def require_same(self) -> None:
        """Checks that hidden has not changed since: logits computed now are those of the call.

        Raises:
            PatchError: it has.
        """
        if version_of(self.hidden) != self.version:
            raise PatchError(
                "the head's hidden states changed in place after the head was called, so that its "
                "logits cannot be computed any more: change a copy, or read the logits before"
            )


@dataclass(frozen=True)
class Expression:
    """outer * cap(sum of products + sum of biases), cap = tanh or nothing.

    Without a cap `outer` is 1: factors are in the products and biases. `detached`: autograd does
    not record it.
    """

    products: tuple[Product, ...]
    biases: tuple[tuple[Tensor, float], ...] = ()  # [V] and a factor
    capped: bool = False
    outer: float = 1.0
    detached: bool = False

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
        if self.capped or any(x.weight is None for x in self.products):
            return None
        flat = columns.reshape(-1)
        return replace(
            self,
            products=tuple(
                Product.of(x.hidden, x.weight * flat[:, None], x.factor)
                for x in self.products
                if x.weight is not None
            ),
            biases=tuple((bias * flat, factor) for bias, factor in self.biases),
        )

    def plus(self, other: Expression) -> Expression | None:
        if self.capped or other.capped or self.detached != other.detached:
            return None
        products = list(self.products)
        for new in other.products:
            # DoRA multiplies the same hidden states by two weights.
            old = next((x for x in products if x.hidden is new.hidden), None)
            if new.weight is None or any(x.weight is None for x in products):
                return None
            if old is None:
                products.append(new)
            else:
                assert old.weight is not None
                weight = old.weight * old.factor + new.weight * new.factor
                products[products.index(old)] = Product.of(new.hidden, weight)
        return replace(self, products=tuple(products), biases=self.biases + other.biases)

    def plus_columns(self, columns: Tensor, factor: float = 1.0) -> Expression | None:
        """Returns the expression plus factor * [V] or [1, V]."""
        if self.capped:
            return None
        return replace(self, biases=(*self.biases, (columns.reshape(-1), factor)))

    def tanh(self) -> Expression | None:
        return None if self.capped else replace(self, capped=True)

    def of_rows(self, change: Rows) -> Expression:
        """Applies a change of the tokens, which keeps the last dim, to each product's hidden."""
        return replace(self, products=tuple(x.of_rows(change) for x in self.products))

    def with_head(self, head: Expression) -> Expression | None:
        """Returns the expression with the products of the head in the place of its output."""
        (output,) = self.products
        result = head if output.factor == 1 else head.times(output.factor)
        for bias, factor in self.biases:
            result = result and result.plus_columns(bias, factor)
        if self.capped:
            result = result and result.tanh()
        return result and result.times(self.outer)

    def logits(self, dtype: torch.dtype) -> Tensor:
        """Computes the logits, as the head and the model's operators after it do."""
        total: Any = None
        for product in self.products:
            assert product.weight is not None
            part = _multiply(product.hidden, product.weight)
            part = part if product.factor == 1 else part * product.factor
            total = part if total is None else total + part
        for bias, factor in self.biases:
            whole = bias.full_tensor() if isinstance(bias, DTensor) else bias
            total = total + (whole if factor == 1 else whole * factor)
        if self.capped:
            total = torch.tanh(total) * self.outer
        return total.to(dtype)

    def adapters(self) -> list[tuple[Tensor, Tensor]]:
        """Returns hidden states and weight of adapters that train beside a frozen head, in which
        case `arguments` has a weight that needs no gradient; empty: there are none such."""
        first, *others = self.products
        frozen = first.weight is not None and not first.weight.requires_grad
        if not others or not frozen or not torch.is_grad_enabled():
            return []
        scaled = (x.factor / first.factor for x in others)
        return [
            (x.hidden if factor == 1 else x.hidden * factor, x.weight)
            for x, factor in zip(others, scaled, strict=True)
            if x.weight is not None and x.weight.requires_grad
        ]

    def arguments(self) -> dict[str, Any]:
        """Returns hidden, weight, bias, logit_scale and softcap of `linear_cross_entropy`.

        Several products become one, of hidden states and weights side by side.
        """
        scale = self.products[0].factor
        weight: Any = self.products[0].weight
        hidden: Any = _widened(self.products[0].hidden, weight)
        if len(self.products) > 1:
            weights = [x.weight for x in self.products if x.weight is not None]
            parts = [
                x.hidden if x.factor == scale else x.hidden * (x.factor / scale)
                for x in self.products
            ]
            hidden = torch.cat([x.to(weight.dtype) for x in parts], dim=-1)
            weight = torch.cat([x.to(weight.dtype) for x in weights], dim=-1)
        bias = None
        for each, factor in self.biases:
            each = each if factor == scale else each * (factor / scale)
            bias = each if bias is None else bias + each
        arguments: dict[str, Any] = {"hidden": hidden, "weight": weight, "bias": bias}
        if not self.capped:
            return {**arguments, "logit_scale": scale}
        # tanh is odd.
        return {**arguments, "logit_scale": self.outer * scale, "softcap": 1 / abs(scale)}


WRAPPERS = ("torch", "deepspeed", "transformers", "accelerate")
WRAPPERS += ("lightning", "lightning_fabric", "pytorch_lightning")


def comes_from_wrapper(hook: Any) -> bool:
    """Tells a hook of FSDP, DeepSpeed and their like, which know what they get, from a user's."""
    hook = getattr(hook, "func", hook)
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return module.split(".")[0] in WRAPPERS


def version_of(tensor: Tensor) -> int:
    """Returns the number of writes that autograd has counted; 0 for inference tensors."""
    return 0 if tensor.is_inference() else tensor._version


def _widened(hidden: Tensor, weight: Tensor) -> Tensor:
    """Returns hidden in the weight's dtype if that is wider: DoRA's fp32 magnitudes make an fp32
    weight of a 16-bit one."""
    return hidden.to(torch.promote_types(hidden.dtype, weight.dtype))


def _multiply(hidden: Tensor, weight: Tensor) -> Tensor:
    hidden = _widened(hidden, weight)
    if not isinstance(weight, DTensor):
        return F.linear(hidden, weight)
    whole = DTensor.from_local(hidden, weight.device_mesh, [Replicate()], run_check=False)
    product: Any = F.linear(whole, weight)
    return product.full_tensor()
