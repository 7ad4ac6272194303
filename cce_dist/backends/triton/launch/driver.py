"""Batches of launches, zeros and waits that one call of C hands to the CUDA driver.

Triton's launcher reads all arguments at every launch, which takes longer than the driver's own work
if they are 40 to 100. A played launch has the same arguments each time, but for addresses: they lie
ready in memory, and batch.c fills in the addresses. docs/design/host.md#launches.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

import ctypes
import functools
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cce_dist.core.slower import warn_slower

# Triton's types of numbers, as `struct` packs them.
_NUMBERS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q"}
_NUMBERS |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q", "fp32": "f", "fp64": "d"}
_ADDRESS_BYTES, _DESCRIPTOR_BYTES = 8, 128
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_WITHOUT_TIMES = 2  # CU_EVENT_DISABLE_TIMING
_INVALID_VALUE = 1  # CUDA_ERROR_INVALID_VALUE
# Triton's launcher passes two addresses more: memory that it allocates for some kernels.
_MOST_SCRATCH = 2
# batch.c has the same numbers, and the same structures.
_LAUNCH, _ZERO, _WAIT = range(3)
_MOST_BYTES, _MOST_PARAMETERS = 4096, 512
_NO_CONTEXT = -1
_FUNCTIONS = (
    *("cuCtxGetCurrent", "cuLaunchKernelEx", "cuTensorMapReplaceAddress", "cuMemsetD8Async"),
    *("cuEventRecord", "cuStreamWaitEvent"),
)


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


class _Address(ctypes.Structure):
    """batch.c's Address."""

    _fields_ = [("base", ctypes.c_int32), ("at", ctypes.c_int32), ("offset", ctypes.c_int64)]


class BatchStep(ctypes.Structure):
    """batch.c's Step. It keeps alive what its pointers point to."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "stream", "other", "num_parameters")),
        *((name, ctypes.c_int32) for name in ("num_addresses", "num_descriptors")),
        ("num_bytes", ctypes.c_int64),
        ("function", ctypes.c_void_p),
        ("config", ctypes.POINTER(_Config)),
        ("bytes", ctypes.c_char_p),
        ("starts", ctypes.POINTER(ctypes.c_int32)),
        ("addresses", ctypes.POINTER(_Address)),
    ]


class Address(NamedTuple):
    """An address that differs from play to play."""

    base: int  # the number of a play's tensor
    offset: int  # bytes


class Descriptor(NamedTuple):
    """A tensor descriptor whose base differs from play to play."""

    address: Address
    descriptor: Any  # with the base of one play


class NotReady(Exception):
    """This launch is left to Triton's launcher."""


def launch_of(
    compiled: Any, grid: tuple[int, int, int], values: Sequence[Any], stream: int
) -> BatchStep:
    """Returns the launch of a kernel, for a `Batch`.

    Args:
        compiled: the kernel's binary.
        values: every argument, in the order of Triton's signature, `Address` and `Descriptor` among
            them.
        stream: its number among a play's streams.
    Raises:
        NotReady: the driver expects other parameters, or is older than CUDA 12.4.
    """
    about = compiled.metadata
    special = ("global_scratch_size", "profile_scratch_size", "launch_pdl")
    if any(getattr(about, name, 0) for name in special) or 0 in grid:
        raise NotReady("a kernel with memory of its own, an early start, or no programs")
    if getattr(about, "num_ctas", 1) != 1:
        raise NotReady("a kernel on clusters")
    parts, moves = _parts(compiled, values)
    starts = _starts(ctypes.c_void_p(compiled.function), [len(part) for part in parts])
    # Triton's own addresses come last, and stay 0.
    content = bytearray(starts[-1] + _DESCRIPTOR_BYTES)
    if len(content) > _MOST_BYTES or len(starts) > _MOST_PARAMETERS:
        raise NotReady(f"{len(starts)} parameters of {len(content)} bytes")
    for part, start in zip(parts, starts, strict=False):
        content[start : start + len(part)] = part
    plain = [(at, to) for at, to in moves if isinstance(to, Address)]
    of_descriptors = [(at, to.address) for at, to in moves if isinstance(to, Descriptor)]
    addresses = [_Address(to.base, starts[at], to.offset) for at, to in (*plain, *of_descriptors)]
    is_cooperative = bool(getattr(about, "launch_cooperative_grid", False))
    attribute = ctypes.pointer(_Attribute(_COOPERATIVE, 0, (1,)))
    block = (32 * about.num_warps, 1, 1)
    config = _Config(grid, block, about.shared, None, attribute, int(is_cooperative))
    return BatchStep(
        kind=_LAUNCH,
        stream=stream,
        num_parameters=len(starts),
        num_addresses=len(addresses),
        num_descriptors=len(of_descriptors),
        num_bytes=len(content),
        function=compiled.function,
        config=ctypes.pointer(config),
        bytes=bytes(content),
        starts=(ctypes.c_int32 * len(starts))(*starts),
        addresses=(_Address * len(addresses))(*addresses),
    )


def zero_of(address: Address, num_bytes: int, stream: int) -> BatchStep:
    """Returns zeros in a memory, for a `Batch`."""
    place = (_Address * 1)(_Address(address.base, 0, address.offset))
    return BatchStep(kind=_ZERO, stream=stream, num_bytes=num_bytes, addresses=place)


def wait_of(stream: int, other: int) -> BatchStep:
    """Returns a stream's wait for the work of another one so far, for a `Batch`."""
    return BatchStep(kind=_WAIT, stream=stream, other=other)


class Batch:
    """Steps that one call hands to the driver.

    Args: steps: of `launch_of`, `zero_of` and `wait_of`.
    """

    def __init__(self, steps: Sequence[BatchStep]) -> None:
        table = (BatchStep * len(steps))(*steps)
        # The table keeps what its steps point to.
        self._keeps = table, steps
        self._head = _table(), ctypes.addressof(table), len(steps)
        self._waits = any(step.kind == _WAIT for step in steps)
        self._run = extension().run

    def run(self, device: int, addresses: int, streams: int) -> None:
        """Runs the steps on the current device.

        Args:
            device: its number.
            addresses: where the addresses of the play's tensors are, 8 bytes each.
            streams: where the streams' handles are, 8 bytes each.
        Raises:
            RuntimeError: the driver reports an error, which may be an earlier kernel's.
        """
        event = _events.of(device).handle.value if self._waits else 0
        code = self._run(*self._head, addresses, streams, event)
        if code == _NO_CONTEXT:
            _enter_context(device)
            code = self._run(*self._head, addresses, streams, event)
        if code:
            _check(code)


@functools.cache
def extension() -> Any:
    """Returns batch.c as a module. Triton compiles it, and keeps it in its cache."""
    from triton.backends import nvidia
    from triton.runtime.build import compile_module_from_src

    here = Path(__file__)
    include = str(Path(str(nvidia.__file__)).with_name("include"))
    text = here.with_name("batch.c").read_text()
    return compile_module_from_src(src=text, name="cce_dist_batch", include_dirs=[include])


@functools.cache
def has_extension() -> bool:
    """Tells whether there is a module of batch.c; warns if not: an image may have Triton's binaries
    and no C compiler."""
    try:
        extension()
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        warn_slower(
            "Triton starts kernels one by one, which costs the host twice the time, since there is "
            "no C module by which calls are repeated; install gcc, set CC, or fill the cache by "
            f"`cce-dist compile` where a compiler is: {error}"
        )
        return False
    return True


_tables: list[Any] = []  # they must outlive every call


@functools.cache
def _table() -> int:
    """Returns the address of batch.c's Driver."""
    functions = [getattr(_driver(), name) for name in _FUNCTIONS]
    at = [ctypes.cast(function, ctypes.c_void_p).value for function in functions]
    _tables.append((ctypes.c_void_p * len(at))(*at))
    return ctypes.addressof(_tables[-1])


def _enter_context(device: int) -> None:
    """Gives this thread a CUDA context: torch gives it one by its first kernel, or its first new
    memory."""
    driver, context = _driver(), ctypes.c_void_p()
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(driver.cuCtxSetCurrent(context))


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
        self._by_device: dict[int, _Event] = {}

    def of(self, device: int) -> _Event:
        event = self._by_device.get(device)
        if event is None:
            event = self._by_device[device] = _Event()
        return event


_events = _Events()


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
