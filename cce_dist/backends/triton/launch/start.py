"""The start of every kernel; and the first call, which compiles them all side by side.

A kernel's launch waits for its compilation, and the next kernel's compilation for the launch: some
twenty, one after the other. So the first call of its kind begins with `compile_only`: it goes
through forward and backward of a few tokens, starts no kernel, and compiles and loads each of them
on all of the host's cores.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch
import triton

from cce_dist.backends.triton.launch.loading import load_one_at_a_time

# Kernels that `compile_only` compiles.
_compiled: ContextVar[list[Any] | None] = ContextVar("cce_dist_compiled", default=None)


def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Returns `kernel[grid]`; within `compile_only` a function that only compiles it."""
    load_one_at_a_time()
    compiled, options = _compiled.get(), _options()
    if compiled is None:
        return functools.partial(kernel[grid], **options) if options else kernel[grid]
    return lambda *args, **named: compiled.append(
        kernel.warmup(*args, grid=grid, **options, **named)
    )


@functools.cache
def _options() -> dict[str, bool]:
    """Returns options of every kernel. Triton 3.9 warns where it is left to decide whether to
    fuse."""
    language = getattr(getattr(triton, "knobs", None), "language", None)
    return {"enable_fp_fusion": True} if hasattr(language, "fp_fusion_enabled") else {}


def is_compiling_only() -> bool:
    """Tells whether kernels write nothing, so that there are no numbers to take for indices."""
    return _compiled.get() is not None


@functools.cache
def can_compile_only() -> bool:
    """Triton 3.4 compiles in the launch alone; 3.5 also apart, but an error would never end it."""
    mode = getattr(triton, "AsyncCompileMode", None)
    return mode is not None and "ignore_errors" in inspect.signature(mode).parameters


@contextlib.contextmanager
def compile_only(device: torch.device) -> Iterator[None]:
    """Keeps `start` from starting anything within it. It ends when every kernel is compiled, and
    loaded.

    What cannot be compiled, or loaded, is left to its launch, which says why.
    """
    compiled: list[Any] = []
    token = _compiled.set(compiled)
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(min(16, workers or 1), "cce_dist compiles") as executor:
        try:
            with triton.AsyncCompileMode(executor, ignore_errors=True):
                yield
        finally:
            _compiled.reset(token)
        kernels = {id(kernel): kernel for kernel in map(_kernel_of, compiled)}
        list(executor.map(functools.partial(_load, device=device), kernels.values()))


def _kernel_of(compiled: Any) -> Any:
    """Returns the kernel that `warmup` compiled; None: it could not be compiled."""
    return compiled.kernel if isinstance(compiled, triton.FutureKernel) else compiled


def _load(kernel: Any, device: torch.device) -> None:
    """Loads a kernel into the device; and the host's code that launches it, which takes a compiler
    too."""
    if kernel is not None:
        with torch.cuda.device(device), contextlib.suppress(Exception):
            _ = kernel.run
