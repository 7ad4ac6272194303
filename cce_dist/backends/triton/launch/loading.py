"""Locks around Triton's building and loading of kernels, which several threads may start at once.

Threads that load kernels: warm-up's, autograd's, a pipeline's server's, torch.compile's, and the
main one. Triton itself has no locks:

- Up to 3.6, Triton makes a C extension for each kernel's launcher, all with one module name.
  Loading an extension for the second time returns the module that bears the name at that moment;
  another thread may just have loaded another kernel's. The launch then fails on its number of
  arguments, or passes the wrong arguments.
- A kernel with a launcher counts as loaded even if its function is not loaded yet.
"""

# These attributes of Triton are in all versions from 3.4 to 3.9.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import threading
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from triton.compiler import CompiledKernel, code_generator
from triton.runtime import build

from cce_dist.core.observer import Arguments

_LOCK = "_cce_dist_lock"
_one_module = threading.Lock()


@functools.cache
def load_one_at_a_time() -> None:
    """Puts locks around every load of a kernel in this process, the first time it is called."""
    load, init = build._load_module_from_path, CompiledKernel._init_handles

    @functools.wraps(load)
    def load_module(name: str, path: str) -> ModuleType:
        with _one_module:
            module = load(name, path)
            # A copy: the next load under this name fills the same module object.
            copy = ModuleType(name)
            vars(copy).update(vars(module))
            return copy

    @functools.wraps(init)
    def init_handles(self: Any) -> None:
        if self.function is not None:
            return
        # setdefault is atomic, so all threads get one lock. A failed load is tried again.
        with vars(self).setdefault(_LOCK, threading.RLock()):
            init(self)

    build._load_module_from_path = load_module
    CompiledKernel._init_handles = init_handles
    # In Triton 3.4 every read of `run` initialises the handles.
    if isinstance(vars(CompiledKernel).get("run"), property):
        CompiledKernel.run = property(_run_of)


# The turn of this thread's compilation; lower ones go first.
turn: ContextVar[int] = ContextVar("cce_dist_turn", default=0)


class InTurn:
    """A lock that goes to the waiting thread of the lowest `turn`."""

    def __init__(self) -> None:
        self._changed, self._is_held = threading.Condition(), False
        self._waiting: list[int] = []

    def __enter__(self) -> None:
        mine = turn.get()
        with self._changed:
            self._waiting.append(mine)
            try:
                self._changed.wait_for(lambda: not self._is_held and min(self._waiting) == mine)
                self._is_held = True
            finally:
                # An interrupted thread must not hold up the others.
                self._waiting.remove(mine)
                self._changed.notify_all()

    def __exit__(self, *error: object) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()


@functools.cache
def build_one_at_a_time() -> None:
    """From now on, lets one thread at a time turn a kernel's Python into Triton's IR. Threads that
    share Python's lock would all end late, and the compilation of each kernel would start late."""
    build: Any = code_generator.ast_to_ttir
    lock = InTurn()

    @functools.wraps(build)
    def ast_to_ttir(*args: Arguments.args, **named: Arguments.kwargs) -> Any:
        with lock:
            return build(*args, **named)

    code_generator.ast_to_ttir = ast_to_ttir


def _run_of(kernel: Any) -> Any:
    if kernel.function is None:
        kernel._init_handles()
    return kernel._run
