"""Kernels that several threads start: each is loaded once, and no two at a time.

Threads that load are warm-up's, autograd's beside the caller's, a pipeline's server beside the
main one, and torch.compile's. Triton guards nothing of it:

- Up to 3.6 it makes a C extension for each kernel's launcher, all of one module name. To load one
  that the process has had gives the module that bears the name now: that of another kernel, if its
  thread came between. The launch then fails for its number of arguments, or starts a kernel with
  the wrong ones.
- A kernel whose launcher is there counts as loaded before its function is.
"""

# These attributes of Triton are in all versions from 3.4 to 3.9.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import threading
from types import ModuleType
from typing import Any

from triton.compiler import CompiledKernel
from triton.runtime import build

_LOCK = "_cce_dist_lock"
_one_module = threading.Lock()


@functools.cache
def load_one_at_a_time() -> None:
    """Puts locks around what Triton loads in this process, whoever asks for it; once."""
    load, init = build._load_module_from_path, CompiledKernel._init_handles

    @functools.wraps(load)
    def load_module(name: str, path: str) -> ModuleType:
        with _one_module:
            module = load(name, path)
            # The module itself is the one that the next load of this name fills.
            copy = ModuleType(name)
            vars(copy).update(vars(module))
            return copy

    @functools.wraps(init)
    def init_handles(self: Any) -> None:
        if self.function is not None:
            return
        # One thread's lock is every thread's: setdefault is atomic. A failed load is tried again.
        with vars(self).setdefault(_LOCK, threading.RLock()):
            init(self)

    build._load_module_from_path = load_module
    CompiledKernel._init_handles = init_handles
    # 3.4 asks for the handles wherever `run` is read.
    if isinstance(vars(CompiledKernel).get("run"), property):
        CompiledKernel.run = property(_run_of)


def _run_of(kernel: Any) -> Any:
    if kernel.function is None:
        kernel._init_handles()
    return kernel._run
