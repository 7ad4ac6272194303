"""Gradients of a rank's rows, summed over a step's microbatches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cce_dist.backends.protocol import WeightGrad
from cce_dist.core.types import accumulate_dtype


class RowGradients:
    """Sums of gradients of weight [V_local, D] and bias [V_local], without padding rows.

    The sums are in fp32 or float64. `finish` adds them to the parameters' .grad, which may have 16
    bits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, num_classes: int) -> None:
        self.weight, self.bias, self.num_classes = weight, bias, num_classes
        self._rows: Tensor | None = None  # [num_classes, D]
        self._bias: Tensor | None = None
        self._is_elsewhere = False

    def place(self) -> WeightGrad | None:
        """Returns the place for a microbatch's part of the sum; None for a frozen weight."""
        accumulate = self._rows is not None
        if self._rows is None and self.weight.requires_grad:
            self._rows = self._make(torch.empty)
        return None if self._rows is None else WeightGrad(self._rows, accumulate)

    def add_bias(self, grad: Tensor) -> None:
        self._bias = grad if self._bias is None else self._bias + grad

    def add_to_rows(self, rows: Tensor, values: Tensor) -> None:
        """Adds values [n, D] to the gradient of rows [n], for an embedding tied to the weight."""
        if self._rows is None:
            self._rows = self._make(torch.zeros)
        # torch sorts by row first, so that sums are the same from run to run.
        self._rows.index_put_((rows,), values.to(self._rows.dtype), accumulate=True)

    def add_into(self, rows: Tensor) -> None:
        """Sums the weight's gradient in `rows` until `finish`, and leaves weight.grad alone.

        Args: rows: [V_local, D] fp32 or float64, such as Megatron's main_grad.
        """
        assert rows.dtype == accumulate_dtype(self.weight.dtype) and self._rows is None
        self._rows, self._is_elsewhere = rows[: self.num_classes], True

    @torch.no_grad()
    def finish(self, divide_by: int) -> None:
        """Adds the sums to weight.grad and bias.grad."""
        rows, bias, is_elsewhere = self._rows, self._bias, self._is_elsewhere
        self.forget()
        if rows is not None and not is_elsewhere:
            padded = rows
            if len(rows) < len(self.weight):
                padded = rows.new_zeros(self.weight.shape)
                padded[: len(rows)] = rows
            _add_grad(self.weight, padded, divide_by)
        if bias is not None and self.bias is not None:
            padding = bias.new_zeros(len(self.bias) - len(bias))
            _add_grad(self.bias, torch.cat([bias, padding]), divide_by)

    def forget(self) -> None:
        self._rows = self._bias = None
        self._is_elsewhere = False

    def _make(self, make: Callable[..., Tensor]) -> Tensor:
        weight = self.weight
        dtype = accumulate_dtype(weight.dtype)
        return make(self.num_classes, weight.shape[1], dtype=dtype, device=weight.device)


def _add_grad(parameter: Tensor, grad: Tensor, divide_by: int) -> None:
    grad = (grad.div_(divide_by) if divide_by != 1 else grad).to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad
