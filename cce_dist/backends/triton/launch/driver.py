"""Launches by the CUDA driver, with parameters that lie ready in memory; zeros and waits by it.

Triton's launcher reads all arguments at every launch, which takes longer than the driver's own work
if they are 40 to 100. A played launch has the same arguments each time, but for addresses.
docs/design/host.md#launches.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

# Triton's types of numbers, as `struct` packs them.
_NUMBERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q"}
_NUMBERS |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
_ADDRESS_BYTES, _DESCRIPTOR_BYTES = 8, 128
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_WITHOUT_TIMES = 2  # CU_EVENT_DISABLE_TIMING
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
# Triton's launcher passes two addresses more: memory that it allocates for some kernels.
_MOST_SCRATCH = 2


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, of a number."""

    _fields_ = [("id", ctypes.c_uint), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


class Address(NamedTuple):
    """An argument that differs from play to play: an address within a numbered memory."""

    number: int
    offset: int  # bytes


class Descriptor(NamedTuple):
    """A tensor descriptor whose base differs from play to play."""

    address: Address
    descriptor: Any  # with the base of one play


class NotReady(Exception):
    """This launch is left to Triton's launcher."""


class Ready:
    """A launch whose parameters lie in memory, in the order of Triton's signature.

    Args:
        compiled: the kernel's binary.
        values: every argument, `Address` and `Descriptor` among them.
    Raises:
        NotReady: the driver expects other parameters, or is older than CUDA 12.4.
    """

    def __init__(self, compiled: Any, grid: tuple[int, int, int], values: Sequence[Any]) -> None:
        about = compiled.metadata
        special = ("global_scratch_size", "profile_scratch_size", "launch_pdl")
        if any(getattr(about, name, 0) for name in special) or 0 in grid:
            raise NotReady("a kernel with memory of its own, an early start, or no programs")
        if getattr(about, "num_ctas", 1) != 1:
            raise NotReady("a kernel on clusters")
        self._lock = threading.Lock()
        self._function = ctypes.c_void_p(compiled.function)
        self._start = _driver().cuLaunchKernelEx
        attribute = _Attribute(_COOPERATIVE, 0, (1,))
        is_cooperative = bool(getattr(about, "launch_cooperative_grid", False))
        block = (32 * about.num_warps, 1, 1)
        self._config = _Config(
            grid, block, about.shared, None, ctypes.pointer(attribute), int(is_cooperative)
        )
        self._config_at = ctypes.byref(self._config)
        parts, moves = _parts(compiled, values)
        starts = _starts(self._function, [len(part) for part in parts])
        size = starts[-1] + _DESCRIPTOR_BYTES
        memory = ctypes.create_string_buffer(size + _DESCRIPTOR_BYTES)
        # A descriptor lies at a multiple of 64 bytes.
        first = -(-ctypes.addressof(memory) // _DESCRIPTOR_BYTES) * _DESCRIPTOR_BYTES
        for part, start in zip(parts, starts, strict=False):
            ctypes.memmove(first + start, part, len(part))
        self._memory = memory, attribute
        self._parameters = (ctypes.c_void_p * len(starts))(*[first + start for start in starts])
        words = (ctypes.c_uint64 * (size // _ADDRESS_BYTES)).from_address(first)
        self._words = words
        self._addresses: list[tuple[int, int, int]] = []
        self._descriptors: list[tuple[ctypes.c_void_p, int, int]] = []
        for at, move in moves:
            if isinstance(move, Address):
                self._addresses.append((starts[at] // _ADDRESS_BYTES, move.number, move.offset))
            else:
                place, (number, offset) = ctypes.c_void_p(first + starts[at]), move.address
                self._descriptors.append((place, number, offset))
        self._bases = [-1] * len(self._descriptors)

    def start(self, addresses: Sequence[int], stream: int) -> bool:
        """Starts the kernel on a stream; returns False if another thread is just starting it.

        Args: addresses: of all memories of the play.
        Raises:
            RuntimeError: the driver reports an error, which may be an earlier kernel's.
        """
        words, bases = self._words, self._bases
        # Both threads would write their addresses to one place.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            for at, number, offset in self._addresses:
                words[at] = addresses[number] + offset
            for i, (place, number, offset) in enumerate(self._descriptors):
                base = addresses[number] + offset
                if base != bases[i]:
                    bases[i] = -1
                    _check(_driver().cuTensorMapReplaceAddress(place, ctypes.c_void_p(base)))
                    bases[i] = base
            self._config.stream = stream
            _check(self._start(self._config_at, self._function, self._parameters, None))
        finally:
            self._lock.release()
        return True


def enter_context(device: int) -> None:
    """Gives this thread a CUDA context, if it has none: a thread gets one by its first kernel, or
    its first new memory."""
    driver, context = _driver(), ctypes.c_void_p()
    driver.cuCtxGetCurrent(ctypes.byref(context))
    if not context.value:
        _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        _check(driver.cuCtxSetCurrent(context))


def zero(address: int, num_bytes: int, stream: int) -> None:
    """Fills memory with zeros, on a stream."""
    size, on = ctypes.c_size_t(num_bytes), ctypes.c_void_p(stream)
    _check(_driver().cuMemsetD8Async(ctypes.c_uint64(address), ctypes.c_ubyte(0), size, on))


class _Event:
    """An event of one thread, on its current device."""

    def __init__(self) -> None:
        self.handle, self._destroy = ctypes.c_void_p(), _driver().cuEventDestroy_v2
        _check(_driver().cuEventCreate(ctypes.byref(self.handle), _WITHOUT_TIMES))

    def __del__(self) -> None:
        self._destroy(self.handle)


class _Events(threading.local):
    """This thread's event of each device."""

    def __init__(self) -> None:
        self.by_device: dict[int, _Event] = {}


_events = _Events()


def wait(device: int, stream: int, other: int) -> None:
    """Makes a stream wait for the work of another one so far."""
    event = _events.by_device.get(device)
    if event is None:
        event = _events.by_device[device] = _Event()
    # The event may be recorded again as soon as the stream's wait is in order.
    _check(_driver().cuEventRecord(event.handle, ctypes.c_void_p(other)))
    _check(_driver().cuStreamWaitEvent(ctypes.c_void_p(stream), event.handle, 0))


def _parts(
    compiled: Any, values: Sequence[Any]
) -> tuple[list[bytes], list[tuple[int, Address | Descriptor]]]:
    """Returns the bytes of each parameter, and which of them are addresses and descriptors."""
    kinds = list(compiled.src.signature.values())
    if len(kinds) != len(values):
        raise NotReady("the signature has other arguments")
    metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    parts: list[bytes] = []
    moves: list[tuple[int, Address | Descriptor]] = []
    for kind, value in zip(kinds, values, strict=True):
        if kind == "constexpr":
            continue
        if isinstance(value, Descriptor):
            moves.append((len(parts), value))
            parts += _descriptor_parts(value.descriptor, next(metas, None))
        elif isinstance(value, Address):
            if kind[0] != "*":
                raise NotReady(f"an address is of type {kind}")
            moves.append((len(parts), value))
            parts.append(bytes(_ADDRESS_BYTES))
        elif kind in _NUMBERS and isinstance(value, bool | int | float):
            parts.append(_packed(_NUMBERS[kind], value))
        else:
            raise NotReady(f"a parameter is of type {kind}")
    return parts, moves


def _packed(code: str, value: float) -> bytes:
    try:
        return struct.pack("=" + code, value)
    except (struct.error, OverflowError) as error:
        raise NotReady(f"a number does not fit: {error}") from error


def _descriptor_parts(descriptor: Any, meta: Any) -> list[bytes]:
    """Returns the parameters of a descriptor: the driver's 128 bytes, sizes and strides."""
    from triton.backends.nvidia import driver

    if meta is None:
        raise NotReady("Triton passes a descriptor as an address, sizes and strides")
    try:
        new, *numbers = driver.make_tensordesc_arg(descriptor, meta)
    except (AttributeError, TypeError) as error:
        raise NotReady(f"this Triton makes descriptors otherwise: {error}") from error
    content = _content_of(new)
    if struct.pack("Q", descriptor.base.data_ptr()) not in content:
        raise NotReady("this Triton keeps descriptors otherwise")
    dims = len(descriptor.shape)
    sizes = [_packed("i", number) for number in numbers[:dims]]
    return [content, *sizes, *(_packed("q", number) for number in numbers[dims:])]


def _content_of(descriptor: Any) -> bytes:
    """Returns the driver's bytes, the end of Triton's object."""
    at = id(descriptor) + type(descriptor).__basicsize__ - _DESCRIPTOR_BYTES
    return ctypes.string_at(at, _DESCRIPTOR_BYTES) if at > id(descriptor) else b""


def _starts(function: ctypes.c_void_p, sizes: Sequence[int]) -> list[int]:
    """Returns where each parameter starts, in bytes, those of Triton's own memory included.

    Raises:
        NotReady: the kernel's parameters have other sizes.
    """
    info = getattr(_driver(), "cuFuncGetParamInfo", None)
    if info is None:
        raise NotReady("the driver does not tell a kernel's parameters")
    start, size = ctypes.c_size_t(), ctypes.c_size_t()
    starts: list[int] = []
    real_sizes: list[int] = []
    out = ctypes.byref(start), ctypes.byref(size)
    while not (code := info(function, ctypes.c_size_t(len(starts)), *out)):
        starts.append(start.value)
        real_sizes.append(size.value)
    scratch = real_sizes[len(sizes) :]
    is_known = len(scratch) <= _MOST_SCRATCH and set(scratch) <= {_ADDRESS_BYTES}
    if code != _INVALID_VALUE or real_sizes[: len(sizes)] != list(sizes) or not is_known:
        raise NotReady(f"the kernel's parameters have {real_sizes} bytes, expected {list(sizes)}")
    return starts


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _check(code: int) -> None:
    """Raises: RuntimeError: a function of the driver has failed."""
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"CUDA error {code}: {(text.value or b'').decode()}")
