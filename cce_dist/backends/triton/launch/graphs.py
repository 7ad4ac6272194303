"""CUDA graphs of launches and fills, whose addresses change from play to play.

One call starts all of a graph's kernels. The graph is captured once. The driver then tells each
kernel's parameters, and a later play replaces the addresses among them that are not its own.
docs/design/host.md#graphs.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from cce_dist.backends.triton.launch.steps import Launch, Play, Step, Zero

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads go on meanwhile
# CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY: side streams keep theirs
_NODE_PRIORITY = 8
_ADDRESS_BYTES, _DESCRIPTOR_BYTES = 8, 128


class Uncapturable(RuntimeError):
    """These steps cannot become a graph here, or a graph cannot start."""


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),  # the address of each parameter
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = [
        ("address", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint),
        ("element_bytes", ctypes.c_uint),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    ]


@dataclass
class _Node:
    """A node of the graph, and where its addresses are.

    Args:
        words, descriptors: each address in `parameters`: its memory, and the bytes from its start.
        keeps: what `parameters` points to.
    """

    handle: ctypes.c_void_p
    parameters: _Kernel | _Memset
    words: list[tuple[ctypes.c_uint64, int, int]]
    descriptors: list[tuple[ctypes.c_void_p, int, int]]
    keeps: object = None
    # Takes the addresses of the node's memories out of all addresses; and those that it has now.
    take: Any = field(init=False)
    addresses: Any = field(init=False)

    def __post_init__(self) -> None:
        numbers = {number for _, number, _ in [*self.words, *self.descriptors]}
        self.take = operator.itemgetter(*numbers)


class Graph:
    """A graph of steps, captured with the addresses of a play.

    Raises:
        Uncapturable: the driver cannot capture them, or a parameter is not where it should be.
    """

    def __init__(self, work: Sequence[Step], play: Play) -> None:
        self._lock = threading.Lock()
        self._context = ctypes.c_void_p()
        _call("cuCtxGetCurrent", ctypes.byref(self._context))
        # The nodes' handles are valid as long as the graph is.
        graph, self._nodes = _captured(work, play)
        for node in self._nodes:
            node.addresses = node.take(play.addresses)
        weakref.finalize(self, _driver().cuGraphDestroy, graph).atexit = False
        self._executable = ctypes.c_void_p()
        _call(
            "cuGraphInstantiateWithFlags",
            *(ctypes.byref(self._executable), graph, ctypes.c_ulonglong(_NODE_PRIORITY)),
        )
        end = weakref.finalize(self, _driver().cuGraphExecDestroy, self._executable)
        end.atexit = False

    def launch(self, play: Play) -> None:
        """Starts the steps with the addresses, and on the stream, of a play."""
        addresses = play.addresses
        # A call of the driver lets other threads run.
        with self._lock:
            for node in self._nodes:
                if node.take(addresses) != node.addresses:
                    self._move(node, addresses)
            # A thread of autograd may have no context yet.
            _call("cuCtxSetCurrent", self._context)
            _call("cuGraphLaunch", self._executable, ctypes.c_void_p(play.stream))

    def _move(self, node: _Node, addresses: list[int]) -> None:
        """Replaces the addresses of a node. Its launches so far keep theirs."""
        for word, number, offset in node.words:
            word.value = addresses[number] + offset
        for descriptor, number, offset in node.descriptors:
            address = ctypes.c_void_p(addresses[number] + offset)
            _call("cuTensorMapReplaceAddress", descriptor, address)
        args = self._executable, node.handle, ctypes.byref(node.parameters)
        if isinstance(node.parameters, _Kernel):
            _call("cuGraphExecKernelNodeSetParams_v2", *args)
        else:
            _call("cuGraphExecMemsetNodeSetParams", *args, self._context)
        node.addresses = node.take(addresses)


@functools.cache
def _driver() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Uncapturable(str(error)) from error


@functools.cache
def _function(name: str) -> Any:
    function = getattr(_driver(), name, None)
    if function is None:
        raise Uncapturable(f"the driver has no {name}")
    return function


def _call(name: str, *args: Any) -> None:
    """Calls a function of the driver.

    Raises:
        Uncapturable: the driver has no such function, or the function fails.
    """
    code = _function(name)(*args)
    if code:
        raise Uncapturable(f"{name} returned {code}")


_one_capture = threading.Lock()


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _captured(work: Sequence[Step], play: Play) -> tuple[ctypes.c_void_p, list[_Node]]:
    """Returns a graph of these steps, and its nodes with addresses."""
    stream, caller = _capture_stream(play.device), play.caller
    assert caller is not None
    graph, handle = ctypes.c_void_p(), ctypes.c_void_p(stream.cuda_stream)
    with _one_capture, torch.cuda.stream(stream):
        play.use_stream(stream)
        try:
            _call("cuStreamBeginCapture_v2", handle, _THREAD_LOCAL)
            try:
                nodes = [each for step in work for each in _added(step, play, stream)]
            except Exception as error:
                raise Uncapturable(f"a step cannot be captured: {error}") from error
            finally:
                code = _driver().cuStreamEndCapture(handle, ctypes.byref(graph))
        finally:
            play.use_stream(caller)
    if code:
        raise Uncapturable(f"cuStreamEndCapture returned {code}")
    try:
        return graph, [_node(step, node, play.addresses) for step, node in nodes]
    except BaseException:
        _driver().cuGraphDestroy(graph)
        raise


def _added(
    step: Step, play: Play, stream: torch.cuda.Stream
) -> list[tuple[Launch | Zero, ctypes.c_void_p]]:
    """Adds a step to a capture, and returns it with its node if it has addresses."""
    if not isinstance(step, Launch | Zero):
        step.run(play)
        return []
    on = stream if step.side is None else play.sides[step.side]
    if isinstance(step, Launch):
        step.run(play)
    else:
        _zero(step, play, on)
    return [(step, _last_node(on))]


def _zero(step: Zero, play: Play, stream: torch.cuda.Stream) -> None:
    """Adds zeros to a capture: torch's own operator has parameters that only torch knows."""
    number, offset, shape, _, dtype = step.place
    _call(
        "cuMemsetD8Async",
        ctypes.c_uint64(play.addresses[number] + offset),
        ctypes.c_ubyte(0),
        ctypes.c_size_t(math.prod(shape) * dtype.itemsize),
        ctypes.c_void_p(stream.cuda_stream),
    )


def _last_node(stream: torch.cuda.Stream) -> ctypes.c_void_p:
    """Returns the node that the last call on a capturing stream has added."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    nodes, graph, count = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
    out = map(ctypes.byref, (status, number, graph, nodes, count))
    _call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream.cuda_stream), *out)
    if count.value != 1 or not nodes.value:
        raise Uncapturable(f"a launch added {count.value} nodes")
    return ctypes.c_void_p(ctypes.c_void_p.from_address(nodes.value).value)


def _node(step: Launch | Zero, handle: ctypes.c_void_p, addresses: list[int]) -> _Node:
    if isinstance(step, Zero):
        memset = _Memset()
        _call("cuGraphMemsetNodeGetParams", handle, ctypes.byref(memset))
        number, offset = step.place.number, step.place.offset
        if memset.address != addresses[number] + offset:
            raise Uncapturable("zeros are elsewhere")
        word = ctypes.c_uint64.from_buffer(memset, _Memset.address.offset)
        return _Node(handle, memset, [(word, number, offset)], [])
    scratch = ("global_scratch_size", "profile_scratch_size")
    if any(getattr(step.compiled.metadata, name, 0) for name in scratch):
        raise Uncapturable("Triton allocates memory for a kernel")
    kernel = _Kernel()
    _call("cuGraphKernelNodeGetParams_v2", handle, ctypes.byref(kernel))
    values = _copied(kernel)
    pointers = (ctypes.c_void_p * len(values))(*[at for at, _, _ in values])
    kernel.parameters = ctypes.addressof(pointers)
    words, descriptors = _places(step, values, addresses)
    return _Node(handle, kernel, words, descriptors, keeps=(values, pointers))


def _copied(kernel: _Kernel) -> list[tuple[int, int, object]]:
    """Returns a copy of each parameter: its address, its bytes, and the memory that holds it."""
    if not kernel.parameters:
        raise Uncapturable("a kernel has no list of parameters")
    function = ctypes.c_void_p(kernel.function or kernel.kernel)
    info = _function("cuFuncGetParamInfo")
    pointers = (ctypes.c_void_p * 4096).from_address(kernel.parameters)
    start, size = ctypes.c_size_t(), ctypes.c_size_t()
    out = ctypes.byref(start), ctypes.byref(size)
    values: list[tuple[int, int, object]] = []
    # It fails for the number of parameters.
    while info(function, ctypes.c_size_t(len(values)), *out) == 0:
        memory = ctypes.create_string_buffer(size.value + 64)
        # A descriptor lies at a multiple of 64 bytes.
        at = -(-ctypes.addressof(memory) // 64) * 64
        ctypes.memmove(at, pointers[len(values)], size.value)
        values.append((at, size.value, memory))
    return values


_Places = list[tuple[Any, int, int]]


def _places(
    step: Launch, values: Sequence[tuple[int, int, object]], addresses: list[int]
) -> tuple[_Places, _Places]:
    """Returns where the words and the descriptors of a launch are among its parameters, which have
    the order of its arguments."""
    words: _Places = []
    descriptors: _Places = []
    expected = iter(step.addresses())
    number, offset, is_descriptor = next(expected, (0, 0, False))
    sought = len(step.addresses())
    for at, size, _ in values:
        if len(words) + len(descriptors) == sought:
            break
        if is_descriptor and size == _DESCRIPTOR_BYTES:
            descriptors.append((ctypes.c_void_p(at), number, offset))
        elif (
            not is_descriptor
            and size == _ADDRESS_BYTES
            and ctypes.c_uint64.from_address(at).value == addresses[number] + offset
        ):
            words.append((ctypes.c_uint64.from_address(at), number, offset))
        else:
            continue
        number, offset, is_descriptor = next(expected, (0, 0, False))
    if len(words) + len(descriptors) < sought:
        raise Uncapturable("an address is not among a kernel's parameters")
    return words, descriptors
