"""The steps of a recorded call, and their repetition with other memory."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.launch import driver
from cce_dist.backends.triton.launch.driver import Address, Descriptor, NotReady
from cce_dist.backends.triton.launch.memory import Layout, Memory, Place
from cce_dist.core.records import Packed, Packing
from cce_dist.core.streams import on_device, side_stream


class Play:
    """One repetition: its tensors, their addresses, and its streams."""

    def __init__(self, recording: Recording, inputs: list[Tensor]) -> None:
        self.device = recording.device
        self.bases: list[Tensor | None] = [*inputs, *([None] * recording.num_new)]
        # As C reads them.
        self.addresses = array("Q", [x.data_ptr() for x in inputs] + [0] * recording.num_new)
        self.streams, self.sides, self.hooks = array("Q"), [], None
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            # A stream's object costs as much as a launch, and only side streams need it.
            caller = torch._C._cuda_getCurrentRawStream(self.device.index)
            self.sides = [side_stream(self.device, caller, first) for first in recording.forks]
            self.streams = array("Q", [caller, *(side.cuda_stream for side in self.sides)])
            self.hooks = _hooks()

    def tensor(self, place: Place) -> Tensor:
        (memory, offset, (shape, stride, dtype)) = place
        base = self.bases[memory.base]
        assert base is not None
        if base.dtype != dtype:
            # Flat, a memory has any dtype; an input keeps its strides.
            base = (base.flatten() if base.is_contiguous() else base).view(dtype)
        # An input may begin anywhere in its storage; addresses are relative to it.
        start = base.storage_offset() + (memory.start + offset) // dtype.itemsize
        if base.shape == shape and base.stride() == stride and base.storage_offset() == start:
            return base
        return base.as_strided(shape, stride, start)

    def address(self, place: Place) -> int:
        return self.addresses[place.memory.base] + place.memory.start + place.offset


class Step(Protocol):
    def run(self, play: Play) -> None: ...


class Allocation(NamedTuple):
    """An allocation of one tensor of the play."""

    base: int
    layout: Layout

    def run(self, play: Play) -> None:
        shape, stride, dtype = self.layout
        # torch.empty takes half as long again.
        new = torch.empty_strided(shape, stride, dtype=dtype, device=play.device)
        play.bases[self.base], play.addresses[self.base] = new, new.data_ptr()


class Release(NamedTuple):
    """The end of tensors that no later step uses."""

    bases: list[int]

    def run(self, play: Play) -> None:
        for number in self.bases:
            play.bases[number] = None


class Launch:
    """A launch of a kernel.

    Args:
        compiled: the kernel's binary; None in the interpreter.
        values: every parameter's value, where the kernel is compiled; else the arguments, the named
            ones last. Tensors and descriptors are filled in.
        names: of the named arguments.
        stream: 0 the calling one, n + 1 that of fork n.
    """

    def __init__(
        self,
        kernel: Any,
        compiled: Any,
        grid: tuple[int, int, int],
        values: list[Any],
        names: tuple[str, ...],
        places: Sequence[tuple[int, Place]],
        descriptors: Sequence[tuple[int, type, dict[str, Any], Place]],
        stream: int,
    ) -> None:
        self.kernel, self.compiled, self.grid, self.stream = kernel, compiled, grid, stream
        self.values, self.names = values, names
        self.places, self.descriptors = places, descriptors

    def run(self, play: Play) -> None:
        """Starts the kernel by Triton."""
        values = self.values.copy()
        if self.compiled is None:
            self._interpret(play, values)
            return
        for at, place in self.places:
            values[at] = play.address(place)
        for at, kind, state, place in self.descriptors:
            values[at] = _descriptor(kind, state, _Base(play.address(place)))
        stream, compiled = play.streams[self.stream], self.compiled
        hooks: tuple[Any, ...] = (None, None, None)
        if play.hooks is not None:
            hooks = compiled.launch_metadata(self.grid, stream, *values), *play.hooks
        # As Triton takes them: grid, stream, binary, hooks, values.
        binary = compiled.function, compiled.packed_metadata
        compiled.run(*self.grid, stream, *binary, *hooks, *values)

    def by_driver(self, play: Play) -> driver.BatchStep:
        """Raises: NotReady: only Triton can start this kernel."""
        values = self.values.copy()
        for at, place in self.places:
            values[at] = _address(place)
        for at, kind, state, place in self.descriptors:
            descriptor = _descriptor(kind, state, _Base(play.address(place)))
            values[at] = Descriptor(_address(place), descriptor)
        return driver.launch_of(self.compiled, self.grid, values, self.stream)

    def _interpret(self, play: Play, values: list[Any]) -> None:
        for at, place in self.places:
            values[at] = play.tensor(place)
        for at, kind, state, place in self.descriptors:
            values[at] = _descriptor(kind, state, play.tensor(place))
        first = len(values) - len(self.names)
        self.kernel[self.grid](
            *values[:first], **dict(zip(self.names, values[first:], strict=True))
        )


def _address(place: Place) -> Address:
    return Address(place.memory.base, place.memory.start + place.offset)


class _Base:
    """An address, for a descriptor that asks its tensor for it."""

    __slots__ = ("address",)

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


def _descriptor(kind: type, state: dict[str, Any], base: object) -> Any:
    """Returns a tensor descriptor, without the checks that the recorded one has passed."""
    descriptor = object.__new__(kind)
    descriptor.__dict__.update(state)
    descriptor.base = base
    return descriptor


def _hooks() -> tuple[Any, Any] | None:
    """Returns the hooks around every launch, which profilers set; None: there are none."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
        return enter, leave
    return None


class Zero(NamedTuple):
    """Zeros in all of a contiguous tensor."""

    place: Place
    stream: int

    def run(self, play: Play) -> None:
        if not self.stream or not play.on_gpu:
            play.tensor(self.place).zero_()
            return
        with torch.cuda.stream(play.sides[self.stream - 1]):
            play.tensor(self.place).zero_()

    def by_driver(self, play: Play) -> driver.BatchStep:
        shape, _, dtype = self.place.layout
        num_bytes = math.prod(shape) * dtype.itemsize
        return driver.zero_of(_address(self.place), num_bytes, self.stream)


class Wait(NamedTuple):
    """A stream waits for the work of another one so far."""

    stream: int
    other: int

    def run(self, play: Play) -> None:
        if play.on_gpu:
            caller = torch.cuda.current_stream(play.device)
            streams = [caller, *play.sides]
            streams[self.stream].wait_stream(streams[self.other])

    def by_driver(self, play: Play) -> driver.BatchStep:
        return driver.wait_of(self.stream, self.other)


class Operator:
    """An operator of torch, or a collective."""

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        named: dict[str, Any],
        makes: list[tuple[int, Memory]],  # the place of a result, and its memory
        single: bool,  # it returns one tensor, and no tuple
        stream: int,
    ) -> None:
        self.function, self.args, self.named = function, args, named
        self.makes, self.single, self.stream = makes, single, stream

    def run(self, play: Play) -> None:
        if not self.stream or not play.on_gpu:
            self._run(play)
            return
        with torch.cuda.stream(play.sides[self.stream - 1]):
            self._run(play)

    def _run(self, play: Play) -> None:
        args = [_filled(value, play) for value in self.args]
        named = {name: _filled(value, play) for name, value in self.named.items()}
        result = self.function(*args, **named)
        for at, memory in self.makes:
            new = play.bases[memory.base] = result if self.single else result[at]
            play.addresses[memory.base] = new.data_ptr()


class Steps:
    """Launches, zeros and waits, without a step of another kind between them."""

    def __init__(self, steps: list[Launch | Zero | Wait]) -> None:
        self.steps = steps
        # Runs of steps that go to the driver at once, and launches that only Triton can start.
        self.by_driver: Sequence[driver.Batch | Launch | Zero | Wait] | None = None

    def run(self, play: Play) -> None:
        if not play.on_gpu or play.hooks is not None or not driver.has_extension():
            for step in self.steps:
                step.run(play)
            return
        if self.by_driver is None:
            self.by_driver = self._batches(play)
        for part in self.by_driver:
            if isinstance(part, driver.Batch):
                arrays = play.addresses.buffer_info()[0], play.streams.buffer_info()[0]
                part.run(play.device.index, *arrays)
            else:
                part.run(play)

    def _batches(self, play: Play) -> list[driver.Batch | Launch]:
        parts: list[driver.Batch | Launch] = []
        batch: list[driver.BatchStep] = []
        for step in self.steps:
            try:
                batch.append(step.by_driver(play))
            except NotReady:
                assert isinstance(step, Launch)
                parts += [driver.Batch(batch), step] if batch else [step]
                batch = []
        return [*parts, driver.Batch(batch)] if batch else parts


class Record(NamedTuple):
    """A dataclass or named tuple, its tensors replaced by their places."""

    kind: type
    names: tuple[str, ...]
    parts: list[Any]

    def filled(self, play: Play) -> Any:
        parts = [_filled(part, play) for part in self.parts]
        if issubclass(self.kind, tuple):
            return self.kind(*parts)
        record = object.__new__(self.kind)
        for name, part in zip(self.names, parts, strict=True):
            object.__setattr__(record, name, part)
        return record


@dataclass(eq=False)
class Pack:
    """The places of a `Packed` of the result."""

    places: list[Place]
    packing: Packing | None = None  # None: all tensors are apart
    base: int = -1  # the number of its allocation

    def filled(self, play: Play) -> Packed:
        apart = [x for x in self.places if x.memory.base != self.base]
        tensors = [play.tensor(place) for place in apart]
        if self.packing is not None:
            memory = play.bases[self.base]
            assert memory is not None
            tensors = [memory, *tensors]
        return Packed(tuple(tensors), self.packing)


def _filled(value: Any, play: Play) -> Any:
    """Returns a value with tensors for its places."""
    if isinstance(value, Place):
        return play.tensor(value)
    if isinstance(value, Record | Pack):
        return value.filled(play)
    if type(value) in (tuple, list):
        return type(value)(_filled(each, play) for each in value)
    return value


@dataclass(frozen=True)
class Recording:
    """A call's steps."""

    device: torch.device
    num_new: int  # tensors that a play makes; its inputs come before them
    forks: list[bool]  # one for each use of a side stream: `first` of `start_on_side_stream`
    steps: list[Step]
    result: Any  # with a `Place` for each tensor

    def play(self, inputs: list[Tensor]) -> Any:
        """Repeats the call with other inputs, of the same shapes, strides, dtypes and alignment.

        Args: inputs: emptied, so that memory that nobody else holds is freed after its last use.
        """
        # The recorded call had no_grad, too: while autograd records, torch refuses `out=`.
        with on_device(self.device), torch.no_grad():
            play = Play(self, inputs)
            inputs.clear()
            for step in self.steps:
                step.run(play)
            return _filled(self.result, play)


def has_place(value: Any) -> bool:
    if isinstance(value, Place | Record | Pack):
        return True
    return type(value) in (tuple, list) and any(map(has_place, value))


def is_mutable(kind: type) -> bool:
    about = getattr(kind, "__dataclass_params__", None)
    return about is not None and not about.frozen
