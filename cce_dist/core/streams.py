"""Work beside the caller's stream, on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def start_on_side_stream(
    device: torch.device, run: Callable[[], object], *, first: bool = True
) -> Callable[[], None]:
    """Runs `run`, which allocates nothing, beside the current stream's later work; on a CPU
    at once.

    Args: first: its kernels' programs come before those of the current stream that have not begun.
    Returns: a function that makes the current stream wait for `run`. Call it whatever happens.
    Until then the memory that `run` reads and writes has to stay; the memory that it holds does.
    """
    if device.type != "cuda":
        run()
        return lambda: None
    caller = torch.cuda.current_stream(device)
    side = _side_stream(device, caller.cuda_stream, -1 if first else 0)

    def wait(_holds: object = run) -> None:
        caller.wait_stream(side)

    side.wait_stream(caller)
    try:
        with torch.cuda.stream(side):
            run()
    except BaseException:
        # Kernels that `run` has started use memory that the caller is about to give up.
        wait()
        raise
    return wait


@functools.cache
def _side_stream(device: torch.device, of: int, priority: int) -> torch.cuda.Stream:
    """Returns a side stream for each stream that calls: CUDA graphs capture them apart."""
    return torch.cuda.Stream(device, priority=priority)
