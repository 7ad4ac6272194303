"""Triton's interpreter without work whose result it has already, or throws away.

It takes most of the tests' time, and most of its own time goes to this.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any


@functools.cache
def speed_up_interpreter() -> None:
    """From here on a launch in this process computes the same bits, in about a third of the time.

    Does nothing where Triton is absent, or compiles.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton import knobs

    if not knobs.runtime.interpret:
        return
    from triton.language import core
    from triton.runtime import interpreter as triton_interpreter

    interpreter: Any = triton_interpreter
    # Each sum and product of int32 is made in int64 too, and compared with the limits of int32;
    # what was found is looked at with `debug` alone, which the interpreter never sets.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    interpreter._patch_attr = _calling_directly(interpreter)
    interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype)
    types: Any = core
    types.block_type.__init__ = _remembering_shapes(types.block_type.__init__)
    types.tensor.__init__ = _sharing_shapes(types.tensor.__init__)
    types.dtype.__eq__ = _equal_to_itself(types.dtype.__eq__)
    types._unwrap_if_constexpr = _unwrapping_constants(types._unwrap_if_constexpr, core)
    broadcast_less = _broadcasting_less(interpreter, types.block_type)
    interpreter.interpreter_semantic.broadcast_impl_value = broadcast_less


def _patching_once(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Replaces the builtins of a kernel's triton.language by interpreted ones, for good.

    The interpreter's own version does so at each launch and at each call of a device function, and
    from Triton 3.6 on takes it back after each launch.
    """
    import triton.language as tl
    from triton.language import core

    nothing_to_restore = SimpleNamespace(restore=lambda: None)
    patched: set[tuple[bool, bool]] = set()

    @functools.cache
    def namespaces_of(function: Any) -> tuple[bool, bool]:
        values = function.__globals__.values()
        return any(value is tl for value in values), any(value is core for value in values)

    def patch_once(function: Any) -> Any:
        namespaces = namespaces_of(function)
        if namespaces not in patched:
            patch_lang(function)
            patched.add(namespaces)
        return nothing_to_restore

    return patch_once


def _calling_directly(interpreter: Any) -> Callable[..., None]:
    """Replaces one builtin by itself with its argument `_semantic`, which need not be checked."""

    def patch(owner: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        function = inspect.unwrap(member)
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        setattr(owner, name, call)

    return patch


def _remembering(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtype of Triton's; the interpreter's own version makes the whole table anew."""
    remembered = functools.cache(np_dtype)

    def np_dtype_of(dtype: Any) -> Any:
        # A block has its element's. Pointers have no hash.
        scalar = dtype.scalar
        return np_dtype(scalar) if scalar.is_ptr() else remembered(scalar)

    return np_dtype_of


def _remembering_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Of a block's type: its shape is checked, counted and written out the first time alone."""
    made: dict[Any, dict[str, Any]] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if not all(type(size) is int for size in sizes):
            make(self, element_ty, shape)
            return
        key = (element_ty.name, sizes)
        if key not in made:
            make(self, element_ty, shape)
            made[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        vars(self).update(made[key], element_ty=element_ty)

    return make_block_type


def _sharing_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Of a tensor: those of one shape share the constants that say so."""
    made: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in made:
            make(self, handle, type)
            made[sizes] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = made[sizes]

    return make_tensor


def _broadcasting_less(interpreter: Any, block_type: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Two operands brought to one shape; nothing is done where they have it, as most do."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    broadcast = semantic.broadcast_impl_value

    def expanded(operand: Any, sizes: list[int]) -> Any:
        if list(operand.type.shape) == sizes:
            return operand
        handle = builder.create_broadcast(operand.handle, sizes)
        return semantic.tensor(handle, block_type(operand.type.scalar, sizes))

    def broadcast_impl_value(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if lhs.type.is_block() != rhs.type.is_block():
            return broadcast(lhs, rhs)
        if not lhs.type.is_block():
            return lhs, rhs
        left, right = list(lhs.type.shape), list(rhs.type.shape)
        if left == right:
            return lhs, rhs
        if len(left) != len(right) or any(
            one != other and 1 not in (one, other) for one, other in zip(left, right, strict=True)
        ):
            return broadcast(lhs, rhs)
        sizes = [max(pair) for pair in zip(left, right, strict=True)]
        return expanded(lhs, sizes), expanded(rhs, sizes)

    return broadcast_impl_value


def _equal_to_itself(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Of types, which exist once, most of them: their names need not be compared."""
    return lambda self, other: self is other or equal(self, other)


def _unwrapping_constants(unwrap: Callable[[Any], Any], core: Any) -> Callable[[Any], Any]:
    """The value of a constant; what is neither one nor a sequence is itself, and is asked first."""
    sequences = (list, tuple, core.tuple)

    def unwrap_if_constexpr(value: Any) -> Any:
        if isinstance(value, core.constexpr):
            return value.value
        return unwrap(value) if isinstance(value, sequences) else value

    return unwrap_if_constexpr
