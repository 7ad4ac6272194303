"""Functions of Gluon whose names differ between releases of Triton, or that some lack."""

# Each release has one of two names, and an operation's arguments are as its compiler sees them.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, ir
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


@builtin
def async_add(tensor_desc, coord, src, _semantic=None):
    """Starts to add a tile of shared memory to global memory: `async_atomic_add` of Triton 3.8."""
    place = _semantic._convert_to_ir_values(coord, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, tensor_desc.handle, place, src.handle)
