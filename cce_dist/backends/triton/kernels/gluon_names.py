"""Functions of Gluon whose names differ between releases of Triton."""

# Each release has one of two names.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Waits for the warps that run the same function. Triton 3.7 renamed it.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
# Starts a copy of a tile from global to shared memory. Triton 3.8 renamed it.
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
# Starts a copy of a tile from shared to global memory. Triton 3.8 renamed it.
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
# Returns another view of shared memory. Triton has taken the underscore from its name.
memory_as = getattr(gl.shared_memory_descriptor, "reinterpret", None)
memory_as = memory_as or gl.shared_memory_descriptor._reinterpret
