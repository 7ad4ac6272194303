"""Side streams, whose kernels overlap those of the caller's stream; the device of kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from cce_dist.core.observer import observer


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one, if it is not: Triton starts kernels on the current one, and a
    model over several GPUs of one process has its head on another."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def start_on_side_stream(
    device: torch.device, work: Callable[[], object], *, first: bool = True
) -> Callable[[], None]:
    """Calls `work` on a side stream, where its kernels overlap the current stream's later work. On
    a CPU it is called at once, and nothing overlaps.

    Args:
        work: launches kernels, and allocates no memory.
        first: the kernels' programs come before those of the current stream that have not started.
    Returns: a function that makes the current stream wait for the kernels. Call it also after an
    error. Until then the memory that the kernels read and write must not be freed; the function
    keeps `work`, and all that `work` refers to.
    """
    seen_by = observer.get()
    if seen_by is None:
        return _start(device, work, first)
    fork = seen_by.fork(first)
    try:
        wait = _start(device, work, first)
    finally:
        seen_by.end_fork()

    def wait_and_note() -> None:
        wait()
        seen_by.join(fork)

    return wait_and_note


def _start(device: torch.device, work: Callable[[], object], first: bool) -> Callable[[], None]:
    if device.type != "cuda":
        work()
        return lambda: None
    caller = torch.cuda.current_stream(device)
    side = side_stream(device, caller.cuda_stream, first)

    def wait(_keeps: object = work) -> None:
        caller.wait_stream(side)

    side.wait_stream(caller)
    try:
        with torch.cuda.stream(side):
            work()
    except BaseException:
        # Kernels that `work` has launched use memory that the caller is about to free.
        wait()
        raise
    return wait


def side_stream(device: torch.device, caller: int, first: bool) -> torch.cuda.Stream:
    """Returns the side stream of a calling stream, each its own: CUDA graphs capture them apart.

    Args:
        caller: the calling stream's handle.
        first: as of `start_on_side_stream`.
    """
    return _side_stream(device, caller, -1 if first else 0)


@functools.cache
def _side_stream(device: torch.device, caller: int, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)
