"""The steps of a recorded call, and their repetition with other memory."""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from cce_dist.backends.triton.launch import driver
from cce_dist.backends.triton.launch.driver import Address, Descriptor, NotReady, Ready
from cce_dist.core.streams import on_device, side_stream


class Place(NamedTuple):
    """A tensor within a numbered memory of the recording."""

    number: int
    offset: int  # bytes
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Whole(NamedTuple):
    """A tensor that is all of a memory, as it is allocated."""

    number: int


class Record(NamedTuple):
    """A dataclass or named tuple of the result, its tensors replaced by their places."""

    kind: type
    names: tuple[str, ...]
    parts: list[Any]

    def filled(self, play: Play) -> Any:
        parts = [_result(part, play) for part in self.parts]
        if issubclass(self.kind, tuple):
            return self.kind(*parts)
        record = object.__new__(self.kind)
        for name, part in zip(self.names, parts, strict=True):
            object.__setattr__(record, name, part)
        return record


class Pool(NamedTuple):
    """One allocation for all small memories."""

    num_bytes: int  # a multiple of every dtype's size
    zero_bytes: int  # zeros at its start
    offsets: list[tuple[int, int]]  # memory, and its bytes from the start


class Play:
    """One repetition: the addresses of its memories, and the tensors that hold them."""

    def __init__(self, device: torch.device, num_memories: int, pool: Pool) -> None:
        self.device = device
        self.addresses = [0] * num_memories
        self.pool = torch.empty(pool.num_bytes, dtype=torch.uint8, device=device)
        start = self.pool.data_ptr()
        for number, offset in pool.offsets:
            self.addresses[number] = start + offset
        self.bases: list[Tensor | None] = [None] * num_memories
        self.sides: dict[int, Any] = {}
        self.stream = self.hooks = None
        if device.type == "cuda":
            # A stream's object costs as much as a launch, and only side streams need it.
            self.stream = torch._C._cuda_getCurrentRawStream(device.index)
            self.hooks = _hooks()
            driver.enter_context(device.index)
            if pool.zero_bytes:
                driver.zero(start, pool.zero_bytes, self.stream)
        elif pool.zero_bytes:
            self.pool[: pool.zero_bytes].zero_()

    def stream_of(self, side: int | None) -> int | None:
        """Returns the handle of the caller's stream, or of a side stream; None: not on a GPU."""
        if side is None or self.stream is None:
            return self.stream
        return self.sides[side].cuda_stream

    def tensor(self, place: Place) -> Tensor:
        number, offset, shape, stride, dtype = place
        base = self.bases[number]
        if base is None:
            base, offset = self.pool, offset + self.addresses[number] - self.pool.data_ptr()
        if base.dtype != dtype:
            # Flat, a memory has any dtype; an input keeps its strides.
            base = (base.flatten() if base.is_contiguous() else base).view(dtype)
        # An input may begin anywhere in its storage; addresses are relative to it.
        start = base.storage_offset() + offset // dtype.itemsize
        if base.shape == shape and base.stride() == stride and base.storage_offset() == start:
            return base
        return base.as_strided(shape, stride, start)


class Step(Protocol):
    def run(self, play: Play) -> None: ...


class Allocation(NamedTuple):
    """An allocation of one memory."""

    number: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def run(self, play: Play) -> None:
        # torch.empty takes half as long again.
        new = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=play.device)
        play.bases[self.number], play.addresses[self.number] = new, new.data_ptr()


class Release(NamedTuple):
    """The end of memories that no later step uses."""

    numbers: list[int]

    def run(self, play: Play) -> None:
        for number in self.numbers:
            play.bases[number] = None


class Launch:
    """A launch of a kernel.

    Args:
        compiled: the kernel's binary; None in the interpreter.
        values: every parameter's value, where the kernel is compiled; else the arguments, the named
            ones last. Tensors and descriptors are filled in.
        names: of the named arguments.
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
        side: int | None,
    ) -> None:
        self.kernel, self.compiled, self.grid, self.side = kernel, compiled, grid, side
        self.names = names
        # As `CompiledKernel.run` takes them: grid, stream, binary, hooks, values.
        binary = () if compiled is None else (compiled.function, compiled.packed_metadata)
        head = [] if compiled is None else [*grid, None, *binary, None, None, None]
        self.args = [*head, *values]
        self.first = len(head)
        self.places = [(self.first + at, place) for at, place in places]
        self.pointers = [(at, place.number, place.offset) for at, place in self.places]
        self.descriptors = [(self.first + at, *about) for at, *about in descriptors]
        # None: no play yet; False: the driver cannot start this launch by itself.
        self.ready: Ready | Literal[False] | None = None

    def run(self, play: Play) -> None:
        if self.compiled is None:
            self._interpret(play)
            return
        if play.hooks is None and self.ready is not False:
            ready = self.ready
            if ready is None:
                ready = self.ready = self._prepare(play)
            if ready and ready.start(play.addresses, play.stream_of(self.side)):
                return
        args, addresses = self.args.copy(), play.addresses
        for at, number, offset in self.pointers:
            args[at] = addresses[number] + offset
        for at, kind, state, place in self.descriptors:
            args[at] = _descriptor(kind, state, _Address(addresses[place.number] + place.offset))
        args[3] = stream = play.stream_of(self.side)
        if play.hooks is not None:
            values = args[self.first :]
            args[6:9] = self.compiled.launch_metadata(self.grid, stream, *values), *play.hooks
        self.compiled.run(*args)

    def _prepare(self, play: Play) -> Ready | Literal[False]:
        values = self.args[self.first :]
        for at, number, offset in self.pointers:
            values[at - self.first] = Address(number, offset)
        for at, kind, state, place in self.descriptors:
            number, offset = place.number, place.offset
            base = _Address(play.addresses[number] + offset)
            descriptor = _descriptor(kind, state, base)
            values[at - self.first] = Descriptor(Address(number, offset), descriptor)
        try:
            return Ready(self.compiled, self.grid, values)
        except NotReady:
            return False

    def _interpret(self, play: Play) -> None:
        args = self.args.copy()
        for at, place in self.places:
            args[at] = play.tensor(place)
        for at, kind, state, place in self.descriptors:
            args[at] = _descriptor(kind, state, play.tensor(place))
        first = len(args) - len(self.names)
        self.kernel[self.grid](*args[:first], **dict(zip(self.names, args[first:], strict=True)))


class _Address:
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
    if any(getattr(hook, "calls", hook) for hook in (enter, leave)):
        return enter, leave
    return None


class Zero(NamedTuple):
    """Zeros in all of a contiguous tensor."""

    place: Place
    side: int | None

    def run(self, play: Play) -> None:
        number, offset, shape, _, dtype = self.place
        stream = play.stream_of(self.side)
        if stream is None:
            play.tensor(self.place).zero_()
        else:
            num_bytes = math.prod(shape) * dtype.itemsize
            driver.zero(play.addresses[number] + offset, num_bytes, stream)


class Operator:
    """An operator of torch, or a collective."""

    def __init__(
        self,
        function: Any,
        args: tuple[Any, ...],
        named: dict[str, Any],
        makes: list[tuple[int, int]],  # the place of a result, and the number of its memory
        single: bool,  # it returns one tensor, and no tuple
        side: int | None,
    ) -> None:
        self.function, self.args, self.named = function, args, named
        self.makes, self.single, self.side = makes, single, side

    def run(self, play: Play) -> None:
        if self.side is None or play.stream is None:
            self._run(play)
            return
        with torch.cuda.stream(play.sides[self.side]):
            self._run(play)

    def _run(self, play: Play) -> None:
        args = [_filled(value, play) for value in self.args]
        named = {name: _filled(value, play) for name, value in self.named.items()}
        result = self.function(*args, **named)
        for at, number in self.makes:
            base = play.bases[number] = result if self.single else result[at]
            play.addresses[number] = base.data_ptr()


def _filled(value: Any, play: Play) -> Any:
    if isinstance(value, Place):
        return play.tensor(value)
    if isinstance(value, Record):
        return value.filled(play)
    if isinstance(value, tuple | list):
        return [_filled(each, play) for each in value]
    return value


class Fork(NamedTuple):
    """A side stream waits for the calling stream. Launches of this number then go there."""

    number: int
    first: bool  # as of `start_on_side_stream`

    def run(self, play: Play) -> None:
        if play.stream is not None:
            side = play.sides[self.number] = side_stream(play.device, play.stream, self.first)
            driver.wait(play.device.index, side.cuda_stream, play.stream)


class Join(NamedTuple):
    """The calling stream waits for a side stream."""

    number: int

    def run(self, play: Play) -> None:
        if play.stream is not None:
            driver.wait(play.device.index, play.stream, play.sides[self.number].cuda_stream)


@dataclass(frozen=True)
class Recording:
    """A call's steps."""

    device: torch.device
    num_memories: int  # inputs first
    steps: list[Step]
    pool: Pool
    result: Any  # with a `Place` or `Whole` for each tensor

    def play(self, inputs: list[Tensor]) -> Any:
        """Repeats the call with other inputs, of the same shapes, strides, dtypes and alignment.

        Args: inputs: emptied, so that memory that nobody else holds is freed after its last use.
        """
        with on_device(self.device):
            return self._play(inputs)

    def _play(self, inputs: list[Tensor]) -> Any:
        play = Play(self.device, self.num_memories, self.pool)
        for number, tensor in enumerate(inputs):
            play.bases[number] = tensor
            play.addresses[number] = tensor.data_ptr()
        inputs.clear()
        for step in self.steps:
            step.run(play)
        return _result(self.result, play)


def _result(value: Any, play: Play) -> Any:
    if isinstance(value, Whole):
        return play.bases[value.number]
    if isinstance(value, Place):
        return play.tensor(value)
    if isinstance(value, Record):
        return value.filled(play)
    if type(value) in (tuple, list):
        return type(value)(_result(each, play) for each in value)
    return value


def has_place(value: Any) -> bool:
    if isinstance(value, Place | Whole | Record):
        return True
    return type(value) in (tuple, list) and any(map(has_place, value))


def is_mutable(kind: type) -> bool:
    about = getattr(kind, "__dataclass_params__", None)
    return about is not None and not about.frozen
