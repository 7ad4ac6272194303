"""Work beside the caller's stream, on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def start_aside(
    device: torch.device, run: Callable[[], object], *, first: bool = True
) -> Callable[[], None]:
    """Runs `run`, which allocates nothing, beside what the current stream is given next; on a CPU
    at once.

    Args: first: its kernels' programs come before those of the current stream that have not begun.
    Returns: what makes the current stream wait for it, to be called whatever happens. Until then
    the memory of what it reads and writes has to stay; what `run` holds does.
    """
    if device.type != "cuda":
        run()
        return lambda: None
    caller = torch.cuda.current_stream(device)
    aside = _aside(device, caller.cuda_stream, -1 if first else 0)

    def wait(_holds: object = run) -> None:
        caller.wait_stream(aside)

    aside.wait_stream(caller)
    try:
        with torch.cuda.stream(aside):
            run()
    except BaseException:
        # What it did begin has the memory that its caller is about to give up.
        wait()
        raise
    return wait


@functools.cache
def _aside(device: torch.device, of: int, priority: int) -> torch.cuda.Stream:
    """One for each stream that calls: what a CUDA graph captures beside one is no other's."""
    return torch.cuda.Stream(device, priority=priority)
