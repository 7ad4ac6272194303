"""The arguments of one call of the loss, which the layers above the backends pass on."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
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
class Extension:
    """Ignored tokens behind a call's tokens, so that calls of similar lengths play one recording.

    Hidden has no rows for them: kernels read no row of an ignored token.
    docs/design/host.md#numbers-of-tokens.
    """

    shape: torch.Size  # targets'
    shift: int  # of the caller's options; the extended call has none
    size: int  # the number of all tokens
    num_rows: int  # of the view of hidden, the same for all calls of this size; at most all rows

    @classmethod
    def of(cls, inputs: Inputs, options: LossOptions) -> Extension | None:
        """Returns the extension of a call by kernels of one rank. None: the number of its tokens is
        a size, the call needs all rows of hidden, or an argument is wrong: a later check names it.
        """
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

    def extend(self, inputs: Inputs, options: LossOptions) -> Inputs:
        """Returns the inputs in one dim, moved by `shift`."""
        token_weight, temperature = inputs.token_weight, inputs.temperature
        return inputs._replace(
            hidden=self.view_rows(inputs.hidden),
            targets=self._moved(inputs.targets, options.ignore_index),
            token_weight=None if token_weight is None else self._moved(token_weight, 0),
            temperature=None if temperature is None else self._moved(temperature, 1),
        )

    def view_rows(self, hidden: Tensor) -> Tensor:
        """Returns the first rows, [num_rows, D]: the others follow in memory."""
        rows = hidden.reshape(-1, hidden.shape[-1])
        # A kernel's copy of rows whose elements lie apart would lack the rows behind the view.
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        if self.num_rows == 1 and rows.stride() != (rows.shape[1], 1):
            # torch forgets the distance of rows when it reshapes a view of one row. A clone has
            # these strides where `contiguous` returns a column as it is.
            rows = rows.clone(memory_format=torch.contiguous_format)
        return rows[: self.num_rows]

    def _moved(self, values: Tensor, fill: int) -> Tensor:
        return self.put_back(values[..., self.shift :], fill)

    def put_back(self, values: Tensor, fill: int = 0) -> Tensor:
        """Returns values that `cut` would return as [size], with `fill` elsewhere."""
        new = values.new_full((self.size,), fill)
        self.cut(new).copy_(values)
        return new

    def put_back_all(self, grads: Iterable[Tensor | None]) -> list[Tensor | None]:
        """Returns gradients by results as `put_back` does, and those without dims as they are."""
        return [x if x is None or not x.dim() else self.put_back(x) for x in grads]

    def cut(self, values: Tensor) -> Tensor:
        """Returns values of each token, [size], in targets' (shifted) shape: a view."""
        values = values[: self.shape.numel()].view(self.shape)
        return values[..., : max(self.shape[-1] - self.shift, 0)] if self.shift else values

    def cut_all(self, results: Iterable[Tensor]) -> list[Tensor]:
        """Returns the results as `cut` does, and those without dims as they are."""
        return [self.cut(each) if each.dim() else each for each in results]


def _is_of_tokens(value: object, hidden: Tensor) -> bool:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return False
    return value.shape == hidden.shape[:-1] and value.device == hidden.device


def extended(
    inputs: Inputs, options: LossOptions, group: Group | None
) -> tuple[Inputs, LossOptions, Extension | None]:
    """Returns the arguments with ignored tokens behind the others, and their extension; or the
    arguments as they are, and None."""
    extension = None if group_size(group) > 1 else Extension.of(inputs, options)
    if extension is None or not goes_to_kernels(options, inputs.hidden):
        return inputs, options, None
    return extension.extend(inputs, options), _without_shift(options), extension


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
