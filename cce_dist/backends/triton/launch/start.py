"""The start of every kernel, and the parallel compilation before a first call.

A launch waits until its kernel is compiled, and the next kernel's compilation begins after that
launch: some twenty compilations, one after the other. So a call with a new key first goes through
forward and backward of a few tokens within `compile_only`, which starts no kernel, but compiles and
loads all of them on the host's cores.
"""

# Triton types a kernel's arguments as its compiler sees them.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cce_dist.backends.triton.launch.loading import build_one_at_a_time, load_one_at_a_time, turn
from cce_dist.backends.triton.launch.tiles import interpreted
from cce_dist.core.observer import Arguments, Observer, observer
from cce_dist.core.slower import warn_slower
from cce_dist.core.streams import on_device


@dataclass
class Compilation:
    """A kernel's compilation by `compile_only`."""

    name: str
    result: Any  # a CompiledKernel, or its FutureKernel
    future: Future[Any] | None  # of a FutureKernel, which forgets it after an error
    # Of the compilation, or of the load; known when both are done.
    error: BaseException | None = None

    @property
    def kernel(self) -> Any:
        """Returns the compiled kernel; None if it could not be compiled."""
        is_future = isinstance(self.result, triton.FutureKernel)
        return self.result.kernel if is_future else self.result

    def finish(self, device: torch.device) -> None:
        """Loads the kernel, unless it is loaded, and notes what went wrong."""
        if self.kernel is None:
            self.error = self.future and self.future.exception()
            return
        try:
            _load(self.kernel, device)
        except Exception as error:
            self.error = error


def _load(kernel: Any, device: torch.device) -> None:
    """Loads a compiled kernel onto the device, and compiles and loads the host's code that launches
    it."""
    with torch.cuda.device(device):
        _ = kernel.run


# Kernels whose compilation takes seconds, the longest first.
LONGEST = (
    *("hopper_exact_kernel", "filtered_kernel", "hopper_teacher_kernel", "hopper_forward_kernel"),
    *("forward_kernel", "exact_columns_kernel", "exact_products_kernel"),
    *("exact_logits_kernel", "sort_kernel", "marks_kernel", "similar_kernel"),
)


@dataclass
class _LongestFirst(Executor):
    """Collects compilations, and starts them in the order of `LONGEST`: the longest would else end
    last, since Python builds one kernel's code at a time."""

    device: torch.device
    compilations: list[Compilation] = field(default_factory=list)
    # A kernel's place in the order, what compiles it, and its result.
    waiting: list[tuple[int, Callable[[], Any], Future[Any]]] = field(default_factory=list)

    def compile(self, kernel: Any, *args: object, **named: object) -> None:
        self.place = LONGEST.index(kernel.__name__) if kernel.__name__ in LONGEST else len(LONGEST)
        result = kernel.warmup(*args, **named)
        future = result.future if isinstance(result, triton.FutureKernel) else None
        self.compilations.append(Compilation(kernel.__name__, result, future))

    def submit(self, fn: Callable[..., Any], /, *args: object, **named: object) -> Future[Any]:
        result: Future[Any] = Future()
        self.waiting.append((self.place, functools.partial(fn, *args, **named), result))
        return result

    def start(self, pool: Executor) -> None:
        for place, compile_kernel, result in sorted(self.waiting, key=lambda task: task[0]):
            pool.submit(self._compile_and_load, place, compile_kernel, result)

    def _compile_and_load(
        self, place: int, compile_kernel: Callable[[], Any], result: Future[Any]
    ) -> None:
        turn.set(place)
        try:
            kernel = compile_kernel()
        except BaseException as error:
            result.set_exception(error)
            return
        result.set_result(kernel)
        # `Compilation.finish` meets the error again.
        with contextlib.suppress(Exception):
            _load(kernel, self.device)


# What the current `compile_only` compiles; None: kernels are started.
_compiling: ContextVar[_LongestFirst | None] = ContextVar("cce_dist_compiling", default=None)


def start(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """Returns `kernel[grid]`; within `compile_only`, a function that only compiles the kernel."""
    load_one_at_a_time()
    compiling, options = _compiling.get(), _options()
    if compiling is None:
        launch = functools.partial(kernel[grid], **options) if options else kernel[grid]
        launch, recorder = _on_its_device(launch), observer.get()
        return launch if recorder is None else _recorded(launch, kernel, grid, recorder)
    return functools.partial(compiling.compile, kernel, grid=grid, **options)


def _on_its_device(launch: Callable[Arguments, Any]) -> Callable[Arguments, Any]:
    def launch_there(*args: Arguments.args, **named: Arguments.kwargs) -> Any:
        tensors = (getattr(value, "base", value) for value in (*args, *named.values()))
        device = next((x.device for x in tensors if isinstance(x, Tensor)), None)
        with on_device(device) if device is not None else contextlib.nullcontext():
            return launch(*args, **named)

    return launch_there


def _recorded(
    launch: Callable[Arguments, Any], kernel: Any, grid: tuple[int, ...], recorder: Observer
) -> Callable[Arguments, Any]:
    def launch_and_note(*args: Arguments.args, **named: Arguments.kwargs) -> Any:
        # Triton's interpreter may compute by torch's operators, which are no steps.
        with _disable_current_modes():
            compiled = launch(*args, **named)
        recorder.launch(kernel, grid, args, named, compiled)
        return compiled

    return launch_and_note


@functools.cache
def _options() -> dict[str, bool]:
    """Returns the options of every kernel. Triton 3.9 warns if nobody tells it whether to fuse
    multiplications with additions."""
    language = getattr(getattr(triton, "knobs", None), "language", None)
    return {"enable_fp_fusion": True} if hasattr(language, "fp_fusion_enabled") else {}


def is_compiling_only() -> bool:
    """Tells whether kernels are not started: their outputs then hold no valid indices."""
    return _compiling.get() is not None


@functools.cache
def can_compile_only() -> bool:
    """Tells whether this Triton can compile without a launch. 3.4 cannot; 3.5 can, but would wait
    forever after an error."""
    mode = getattr(triton, "AsyncCompileMode", None)
    return mode is not None and "ignore_errors" in inspect.signature(mode).parameters


# A key for each set of kernels that this process has compiled side by side.
_compiled: set[Hashable] = set()


def compile_together(key: Hashable, device: torch.device, go_through: Callable[[], object]) -> None:
    """Compiles all kernels that a function starts, the first time that it is called with a key."""
    # Within `compile_only` the call itself compiles.
    if key in _compiled or interpreted() or is_compiling_only():
        return
    if torch.cuda.is_current_stream_capturing():
        return
    if not can_compile_only():
        warn_slower(
            f"triton {triton.__version__} compiles a first call's kernels one after the other, in "
            "twice the time; 3.6 and later compile them side by side"
        )
        return
    _compiled.add(key)
    try:
        # Triton keeps a kernel for the device that is current when it compiles.
        with on_device(device), compile_only(device), torch.no_grad():
            go_through()
    except BaseException:
        _compiled.discard(key)
        raise


@contextlib.contextmanager
def _garbage_waits() -> Iterator[None]:
    """Python's collector does not run: it walks through all objects of the process and holds up all
    threads, and what compilations allocate calls it, in the middle of the longest one's Python."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _make_ready(executor: Executor) -> None:
    """Lets Triton make its key, a hash of some 400 MB, while it compiles its driver's module of C.
    Each takes a third of a second, once in a process, and by itself one would follow the other."""
    # A Triton that has it elsewhere makes it later.
    make_key = getattr(triton.runtime.cache, "triton_key", None)
    if make_key is not None:
        key = executor.submit(make_key)
        _ = triton.runtime.driver.active
        key.result()


@contextlib.contextmanager
def compile_only(device: torch.device) -> Iterator[list[Compilation]]:
    """Makes `start` compile kernels and not start them; ends when all are compiled and loaded.

    A kernel that cannot be compiled or loaded is skipped: its launch will say why, and so does the
    list of compilations, each binary once, that the context returns.
    """
    build_one_at_a_time()
    compiling = _LongestFirst(device)
    compiled = compiling.compilations
    token = _compiling.set(compiling)
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = min(16, workers or 1)
    with _garbage_waits(), ThreadPoolExecutor(threads, "cce_dist compiles") as executor:
        try:
            if device.type == "cuda":
                _make_ready(executor)
            with triton.AsyncCompileMode(compiling, ignore_errors=True):
                try:
                    yield compiled
                finally:
                    compiling.start(executor)
        finally:
            _compiling.reset(token)
        compiled[:] = {id(each.result): each for each in compiled}.values()
        list(executor.map(functools.partial(Compilation.finish, device=device), compiled))
