"""Repetition of calls: the second call of a kind is recorded, and later ones play the recording.

A kind is all that the host decides by: options, and every tensor's shape, stride, dtype, device and
alignment. docs/design/host.md#recordings.
"""

from __future__ import annotations

import functools
import operator
from collections import OrderedDict
from collections.abc import Callable
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch as dispatch

from cce_dist.backends.protocol import ColumnFilter, Room
from cce_dist.backends.triton.launch.recording import Recorder, Unrecordable, Watch
from cce_dist.backends.triton.launch.start import is_compiling_only
from cce_dist.backends.triton.launch.steps import Recording
from cce_dist.core.observer import described_by, observer, same_by_identity
from cce_dist.core.records import names_of
from cce_dist.core.types import Wanted
from cce_dist.options import LossOptions, Screen
from cce_dist.vocab_shard import VocabShard

if TYPE_CHECKING:
    from collections.abc import Iterator

# The most kinds that a function remembers: batches of ever new sizes must not fill the memory.
MOST_KINDS = 256
# Values and records without tensors, which a kind compares whole.
_PLAIN = {bool, int, float, str, type(None), torch.dtype, torch.device}
_PLAIN |= {Wanted, ColumnFilter, LossOptions, Room, Screen, VocabShard}


# What `_take` says of classes whose values are described whole, and of tensors.
_WHOLE, _TENSOR = "whole", "tensor"
_functions: list[Replayed] = []


def forget_recordings() -> None:
    """Forgets all kinds of calls, and the process groups that they refer to."""
    for function in _functions:
        function.kinds.clear()


class _Kind(Enum):
    SEEN = "one call so far"
    UNRECORDABLE = "a recording cannot repeat it"


class Replayed:
    """A function of records of tensors, whose later calls of a kind play a recording.

    Args:
        function: its launches and operators follow from its arguments' shapes and options alone.
        consume: drops the arguments' references to memory that the call uses up.
        comes_again: the first call of a kind is recorded, and not the second: it will come again.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        consume: Callable[..., None] = lambda *args: None,
        comes_again: bool = False,
    ) -> None:
        self.function, self.consume, self.comes_again = function, consume, comes_again
        self.kinds: OrderedDict[Any, _Kind | Recording] = OrderedDict()
        functools.update_wrapper(self, function)
        _functions.append(self)

    def __call__(self, *args: Any) -> Any:
        inputs: list[Tensor] = []
        key = None
        # Other dispatch modes want to see every operator.
        if not dispatch._len_torch_dispatch_stack() and not is_compiling_only():
            key = _key_of(args, inputs)
        if key is None:
            return self.function(*args)
        kind = self.kinds.get(key)
        if isinstance(kind, Recording):
            self.consume(*args)
            return kind.play(inputs)
        if kind is _Kind.SEEN or (kind is None and self.comes_again):
            return self._record(key, inputs, args)
        if kind is None:
            self._remember(key, _Kind.SEEN)
        return self.function(*args)

    def _record(self, key: Any, inputs: list[Tensor], args: tuple[Any, ...]) -> Any:
        new = Recorder(inputs)
        with _recording(new):
            result = self.function(*args)
        try:
            recording, result = new.finish(result)
            self._remember(key, recording)
        except Unrecordable:
            self._remember(key, _Kind.UNRECORDABLE)
        return result

    def _remember(self, key: Any, kind: _Kind | Recording) -> None:
        self.kinds[key] = kind
        while len(self.kinds) > MOST_KINDS:
            self.kinds.popitem(last=False)


@contextmanager
def _recording(new: Recorder) -> Iterator[None]:
    token = observer.set(new)
    try:
        with Watch(new):
            yield
    finally:
        observer.reset(token)


def _key_of(args: tuple[Any, ...], inputs: list[Tensor]) -> Any:
    """Returns the kind of a call, and collects its tensors; None: there are objects without one."""
    parts: list[Any] = []
    if not _describe(args, parts, inputs) or not inputs:
        return None
    pointers = [tensor.data_ptr() for tensor in inputs]
    parts += [pointer % 16 for pointer in pointers]
    if len(set(pointers)) < len(pointers):
        # Which inputs are one and the same memory.
        parts += map(pointers.index, pointers)
    return tuple(parts)


def _describe(values: tuple[Any, ...], parts: list[Any], inputs: list[Tensor]) -> bool:
    """Appends the kind of each value; returns False if one has none."""
    for value in values:
        take = _take(type(value))
        if take is _WHOLE:
            parts.append(value)
        elif take is _TENSOR:
            if value.is_nested or not value.numel() or value.layout is not torch.strided:
                return False
            if value.is_neg():
                return False  # checks refuse it
            inputs.append(value)
            parts += (value.shape, value.stride(), value.dtype, value.device)
        elif take is None:
            return False
        else:
            kind = type(value)
            parts.append(value.func if kind is functools.partial else kind)
            if not _describe(take(value), parts, inputs):
                return False
    return True


@functools.cache
def _take(kind: type) -> Any:
    """Returns how the kind of a call describes an object of this class: `_WHOLE`, `_TENSOR`, or a
    function that returns the values to describe; None: unknown, so the call is not recorded."""
    if kind in _PLAIN or issubclass(kind, tuple(same_by_identity)):
        return _WHOLE
    if kind in (Tensor, nn.Parameter):
        return _TENSOR
    if kind in described_by:
        return described_by[kind]
    if kind is functools.partial:
        return lambda value: (*value.args, *value.keywords.values())
    if kind is tuple:
        return lambda value: (len(value), *value)
    names = names_of(kind)
    if names is None or len(names) < 2:
        return None if names is None else lambda value: tuple(getattr(value, x) for x in names)
    return operator.attrgetter(*names)
