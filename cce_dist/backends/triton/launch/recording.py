"""A recording of a call: its memory, its kernels and its operators, in order.

The host decides by shapes and options alone, and never by values. So a later call with the same
shapes and options starts the same kernels, with other addresses. It takes them from the recording,
which costs a fraction of the time in which the call itself prepares them.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from cce_dist.backends.triton.launch.arrange import arranged
from cce_dist.backends.triton.launch.memory import Layout, Memory, Place
from cce_dist.backends.triton.launch.steps import (
    Launch,
    Operator,
    Pack,
    Record,
    Recording,
    Step,
    Wait,
    Zero,
    has_place,
    is_mutable,
)
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.core.observer import Arguments, observer
from cce_dist.core.phases import in_phase
from cce_dist.core.records import Packed, handed_out, names_of

aten = torch.ops.aten
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
_ZEROS = {aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default}
# Operators for which the host waits: they return a number, or a shape that depends on values.
_WAIT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Unrecordable(Exception):
    """The call does something that a recording cannot repeat."""


def _noted(record: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Lets a step that cannot be recorded end the recording, and not the call."""

    @functools.wraps(record)
    def note(*args: Arguments.args, **named: Arguments.kwargs) -> None:
        recorder: Any = args[0]
        if recorder.flaw is None:
            try:
                record(*args, **named)
            except Unrecordable as reason:
                recorder.flaw = str(reason)

    return note


@dataclass
class Recorder:
    """Records what the current thread does until `finish`.

    Args: inputs: the tensors that the call reads or writes, in the order of `Recording.play`.
    """

    inputs: Sequence[Tensor]
    steps: list[Step] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)  # inputs first
    flaw: str | None = None  # why there is no recording; None: there is one so far
    _memory_of: dict[int, Memory] = field(default_factory=dict)  # a storage's
    # While these exist, no new storage has the identity of one that was freed.
    _identities: list[StorageWeakRef] = field(default_factory=list)
    _stream: int = 0  # 0 the calling one, n + 1 that of fork n
    _phases: list[Any] = field(default_factory=list)  # those that the call is in
    _forks: list[bool] = field(default_factory=list)  # `first` of each
    _side_uses: list[list[Memory]] = field(default_factory=list)  # of each fork
    _packs: list[Pack] = field(default_factory=list)  # of the result
    _plain: set[Memory] = field(default_factory=set)  # of the result's other tensors
    _once: dict[Memory, None] = field(default_factory=dict)  # of the result's mutable records

    def __post_init__(self) -> None:
        ends: list[tuple[int, int, int]] = []
        for tensor in self.inputs:
            start, stop = _extent(tensor)
            self.memories.append(Memory(len(ends), num_bytes=stop - start))
            ends.append((tensor.untyped_storage()._cdata, start, stop))
        self._extents = ends
        for number, (storage, start, stop) in enumerate(ends):
            for other, begin, end in ends[:number]:
                whole = (start, stop) == (begin, end)
                if storage == other and start < end and begin < stop and not whole:
                    self.flaw = "two inputs overlap in part"

    def place_of(self, tensor: Tensor) -> Place:
        """Returns the place of a tensor within a known memory.

        Raises:
            Unrecordable: the memory is neither an input's nor one that the call has made.
        """
        storage, pointer = tensor.untyped_storage()._cdata, tensor.data_ptr()
        known = self._memory_of.get(storage)
        if known is None:
            for number, (of, start, stop) in enumerate(self._extents):
                if of == storage and start <= pointer < stop:
                    known, offset = self.memories[number], pointer - start
                    break
            else:
                raise Unrecordable("a kernel takes a tensor of an earlier call")
        else:
            offset = tensor.storage_offset() * tensor.element_size()
        self._use(known)
        return Place(known, offset, _layout_of(tensor))

    def _use(self, memory: Memory) -> None:
        memory.last_use = len(self.steps)
        if self._stream:
            self._side_uses[self._stream - 1].append(memory)

    def _add(self, tensor: Tensor, allocate: bool) -> Memory:
        """Adds the memory of a new tensor."""
        if tensor.device != self.inputs[0].device:
            raise Unrecordable(f"the call has memory on {tensor.device}, too")
        storage, now = tensor.untyped_storage(), len(self.steps)
        self._identities.append(StorageWeakRef(storage))
        num_bytes, layout = storage.nbytes(), None
        if allocate:
            layout = _layout_of(tensor)
            if not tensor.is_contiguous() or tensor.nbytes != num_bytes:
                layout = Layout((num_bytes // tensor.element_size(),), (1,), tensor.dtype)
        new = self._memory_of[storage._cdata] = Memory(
            len(self.memories), 0, now, num_bytes, now, layout
        )
        self.memories.append(new)
        return new

    @_noted
    def launch(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        args: tuple[Any, ...],
        named: dict[str, Any],
        compiled: Any,
    ) -> None:
        names: tuple[str, ...] = ()
        if interpreted():
            values, names = [*args, *named.values()], tuple(named)
        else:
            parameters = kernel.signature.parameters
            bound = kernel.signature.bind(
                *args, **{name: value for name, value in named.items() if name in parameters}
            )
            bound.apply_defaults()
            values = list(bound.arguments.values())
        places, descriptors = [], []
        for at, value in enumerate(values):
            if isinstance(value, Tensor):
                places.append((at, self.place_of(value)))
                values[at] = None
            elif type(value).__name__ == "TensorDescriptor":
                state = {**vars(value), "base": None}
                descriptors.append((at, type(value), state, self.place_of(value.base)))
                values[at] = None
        self.steps.append(
            Launch(
                kernel,
                compiled,
                (*grid, 1, 1)[:3],
                values,
                names,
                places,
                descriptors,
                self._stream,
            )
        )

    @_noted
    def operator(self, function: Any, args: Any, named: dict[str, Any], result: Any) -> None:
        """Records an operator of torch, unless it only makes a view."""
        if not _WAIT.isdisjoint(function.tags):
            raise Unrecordable(f"the host waits for {function}")
        results = [result] if isinstance(result, Tensor) else result
        results = results if isinstance(results, tuple | list) else []
        if function in _ALLOCATIONS:
            self._add(results[0], allocate=True)
            return
        before = {x.untyped_storage()._cdata for x in _tensors((args, tuple(named.values())))}
        new = [
            (at, x)
            for at, x in enumerate(results)
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in before
        ]
        if results and not new and not function._schema.is_mutable:
            return
        if function is aten.zero_.default and args[0].is_contiguous():
            self.steps.append(Zero(self.place_of(args[0]), self._stream))
            return
        if function in _ZEROS:
            memory = self._add(results[0], allocate=True)
            memory.zeroed_by = len(self.steps)
            self.steps.append(Zero(self.place_of(results[0]), self._stream))
            return
        args, named = self._with_places(args), self._with_places(named)
        if any(tensor.storage_offset() for _, tensor in new):
            raise Unrecordable(f"{function} returns a part of its memory")
        makes = [(at, self._add(tensor, allocate=False)) for at, tensor in new]
        single = isinstance(result, Tensor)
        self.steps.append(Operator(function, args, named, makes, single, self._stream))

    def _with_places(self, value: Any, place_of: Callable[[Tensor], Any] | None = None) -> Any:
        """Returns a value with places for its tensors. A record without any stays as it is."""
        place_of, kind = place_of or self.place_of, type(value)
        if isinstance(value, Tensor):
            return place_of(value)
        if kind is Packed and place_of == self._place_of_result:
            return self._pack(value)
        names = names_of(kind)
        if names is not None:
            mutable = is_mutable(kind)
            if kind in handed_out and place_of == self._place_of_once:
                place_of = self._place_of_result
            elif mutable and kind not in handed_out and place_of == self._place_of_result:
                # Its reader takes the tensors out, and drops them after use.
                place_of = self._place_of_once
            parts = [self._with_places(getattr(value, name), place_of) for name in names]
            stays = not mutable and not any(map(has_place, parts))
            return value if stays else Record(kind, names, parts)
        if kind in (tuple, list):
            return kind(self._with_places(each, place_of) for each in value)
        if kind is dict:
            return {name: self._with_places(each, place_of) for name, each in value.items()}
        return value

    def fork(self, first: bool) -> int:
        """Records that a side stream waits for the current one. Returns the fork's number, in which
        launches are until `end_fork`."""
        self._forks.append(first)
        self._side_uses.append([])
        self._stream = len(self._forks)
        self.steps.append(Wait(self._stream, 0))
        return self._stream - 1

    def end_fork(self) -> None:
        self._stream = 0

    def join(self, fork: int) -> None:
        """Records that the current stream waits for a side stream."""
        for memory in self._side_uses[fork]:
            self._use(memory)
        self.steps.append(Wait(0, fork + 1))

    def call(self, function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a collective that writes to its arguments, or a check, and records the call."""
        # What is within it is no step.
        token = observer.set(None)
        try:
            with _disable_current_modes():
                result = function(*args, **named)
        finally:
            observer.reset(token)
        self._call(function, args, named, result)
        return result

    def enter_phase(self, phase: Any) -> None:
        self._phases.append(phase)

    def leave_phase(self) -> None:
        self._phases.pop()

    @_noted
    def _call(
        self, function: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any
    ) -> None:
        if result is not None:
            raise Unrecordable("a collective does not wait")
        if self._phases:
            # A play reports the phase in which it waits for other ranks: its begin once, as the
            # call does, however many collectives the phase has.
            function = self._phases[-1](function)
            self._phases[-1] = in_phase(self._phases[-1].name, begins=False)
        places = self._with_places(args), self._with_places(named)
        self.steps.append(Operator(function, *places, [], True, self._stream))

    def finish(self, result: Any) -> tuple[Recording, Any]:
        """Returns the recording of a call with this result; and the result, packed as those of
        the recording's plays are.

        Raises:
            Unrecordable: a recording cannot repeat the call.
        """
        if self.flaw is not None:
            raise Unrecordable(self.flaw)
        outputs = self._with_places(result, self._place_of_result)
        of_result = self._packs, self._plain, self._once
        steps, num_bases = arranged(self.steps, self.memories, *of_result)
        recording = Recording(
            device=self.inputs[0].device,
            num_new=num_bases - len(self.inputs),
            forks=self._forks,
            steps=steps,
            result=outputs,
        )
        return recording, _packed(result, iter(self._packs))

    def _pack(self, packed: Packed) -> Pack:
        self._packs.append(Pack([self.place_of(tensor) for tensor in packed.unpacked()]))
        return self._packs[-1]

    def _place_of_result(self, tensor: Tensor) -> Place:
        place = self.place_of(tensor)
        self._plain.add(place.memory)
        return place

    def _place_of_once(self, tensor: Tensor) -> Place:
        place = self.place_of(tensor)
        self._once[place.memory] = None
        return place


def _packed(result: Any, packs: Iterator[Pack]) -> Any:
    if isinstance(result, Packed):
        packing = next(packs).packing
        return result if packing is None else packing.pack(result.unpacked())
    if type(result) is tuple:
        return tuple(_packed(each, packs) for each in result)
    if isinstance(result, tuple) and names_of(type(result)) is not None:
        return type(result)(*(_packed(each, packs) for each in result))
    return result


def _layout_of(tensor: Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype)


class Watch(TorchDispatchMode):
    """Hands every operator of torch to a recorder."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler for this, which takes seconds.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.recorder.operator(func, args, kwargs or {}, result)
        return result


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for each in value for tensor in _tensors(each)]
    return []


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the first address of a tensor's elements, and the address after the last one."""
    span = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return start, start + (span + 1) * tensor.element_size()
