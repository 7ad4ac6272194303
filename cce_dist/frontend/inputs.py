"""The tensors of one call of the loss, which the layers above the backends pass on."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Inputs(NamedTuple):
    """The tensor arguments of `linear_cross_entropy`, and the temperature of `token_logprobs`."""

    hidden: Tensor  # [..., D]
    weight: Tensor  # [V_local, D]
    targets: Tensor  # [...] int64
    bias: Tensor | None = None  # [V_local]
    token_weight: Tensor | None = None  # targets' shape
    class_weight: Tensor | None = None  # [V]
    grad_weight_into: Tensor | None = None  # [V_local, D]
    temperature: Tensor | None = None  # targets' shape; with full logits, no label smoothing
