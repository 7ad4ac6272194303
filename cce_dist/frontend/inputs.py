"""The arguments of one call of the loss, which the layers above the backends pass on."""

from __future__ import annotations

import contextlib
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from cce_dist.options import Filter, LossOptions, Screen


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


_HASHED = {bool, int, float, str, tuple, type(None), Filter, Screen}


def options_of(**options: object) -> LossOptions:
    """Returns LossOptions with these values. Equal values are checked once: the checks take as long
    as some launches."""
    # The compiler traces no cache. A tensor may change its value, and a tuple may lack a hash.
    hashed = not torch.compiler.is_compiling()
    if hashed and _HASHED.issuperset(map(type, options.values())):
        with contextlib.suppress(TypeError):
            return _checked_once(**options)
    return LossOptions(**options)  # pyright: ignore[reportArgumentType]


@functools.lru_cache(maxsize=256, typed=True)
def _checked_once(**options: object) -> LossOptions:
    return LossOptions(**options)  # pyright: ignore[reportArgumentType]
