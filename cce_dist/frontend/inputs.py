"""The arguments of one call of the loss, which the layers above the backends pass on."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from cce_dist.backends.choose import goes_to_kernels
from cce_dist.options import Filter, LossOptions, Screen
from cce_dist.ranks.transport import group_size

if TYPE_CHECKING:
    from cce_dist.ranks.transport import Group


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


@dataclass(frozen=True)
class Rounding:
    """Ignored tokens at the end of a call's tokens: calls of almost as many tokens then play one
    recording. Hidden has no rows for them, as kernels read no row of an ignored token.
    docs/design/host.md#numbers-of-tokens.
    """

    shape: torch.Size  # targets'
    shift: int
    size: int  # of the tokens, with those at the end
    num_rows: int  # of hidden that the call shows: no more than there are

    @classmethod
    def of(cls, inputs: Inputs, options: LossOptions) -> Rounding | None:
        """Returns the rounding of a call by kernels of one rank. None: the number of its tokens is
        round, the call needs all rows of hidden, or a check is to name a wrong shape."""
        hidden, targets = inputs.hidden, inputs.targets
        if hidden.is_nested or not hidden.numel():
            return None
        shape = hidden.shape[:-1]
        number = shape.numel()
        # At most a sixteenth more tokens, or fifteen.
        step = max(16, 1 << max(number.bit_length() - 5, 0))
        size = -(-number // step) * step
        needs_rows = options.invariant or options.sequence_parallel
        if size == number or needs_rows or options.gradient == "in_forward":
            return None
        for value in (targets, inputs.token_weight, inputs.temperature):
            if value is not None and not _is_of_tokens(value, hidden):
                return None
        if not shape or targets.dtype != torch.int64:
            return None
        return cls(shape, options.shift, size, max(1, size - step))

    def inputs(self, inputs: Inputs, options: LossOptions) -> Inputs:
        """Returns the inputs in one dim, moved by `shift`."""
        token_weight, temperature = inputs.token_weight, inputs.temperature
        return inputs._replace(
            hidden=self.hidden(inputs.hidden),
            targets=self._extended(inputs.targets, options.ignore_index),
            token_weight=None if token_weight is None else self._extended(token_weight, 0),
            temperature=None if temperature is None else self._extended(temperature, 1),
        )

    def hidden(self, hidden: Tensor) -> Tensor:
        """Returns the first rows, [num_rows, D]: the others follow in memory."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        # Kernels would copy the rows whose elements lie apart, and no row behind them.
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        return rows[: self.num_rows]

    def _extended(self, values: Tensor, fill: int) -> Tensor:
        """Returns values of targets' shape as [size], moved by `shift` towards the front."""
        new = values.new_full((self.size,), fill)
        self.cut(new).copy_(values[..., self.shift :])
        return new

    def cut(self, values: Tensor) -> Tensor:
        """Returns values of each token, [size], in targets' (shifted) shape: a view."""
        values = values[: self.shape.numel()].view(self.shape)
        return values[..., : max(self.shape[-1] - self.shift, 0)] if self.shift else values


def _is_of_tokens(value: object, hidden: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return False
    return value.shape == hidden.shape[:-1] and value.device == hidden.device


def rounded(
    inputs: Inputs, options: LossOptions, group: Group | None
) -> tuple[Inputs, LossOptions, Rounding | None]:
    """Returns the arguments of a call whose number of tokens is round, and how it was rounded."""
    if group_size(group) > 1 or not goes_to_kernels(options, inputs.hidden):
        return inputs, options, None
    rounding = Rounding.of(inputs, options)
    if rounding is None:
        return inputs, options, None
    return rounding.inputs(inputs, options), _without_shift(options), rounding


@functools.lru_cache(maxsize=256)
def _without_shift(options: LossOptions) -> LossOptions:
    return replace(options, shift=0) if options.shift else options


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
