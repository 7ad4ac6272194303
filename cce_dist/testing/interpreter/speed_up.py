"""Triton's interpreter without work whose result is known already, or is thrown away.

Tests spend most of their time in the interpreter, and it spends most of its time on such work.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cce_dist.testing.interpreter.blocks import functions, methods, sort_of
from cce_dist.testing.interpreter.memory import memory_functions
from cce_dist.testing.interpreter.mends import mend_interpreter
from cce_dist.testing.interpreter.operators import operators
from cce_dist.testing.interpreter.ops import Tools, make_tools


@functools.cache
def speed_up_interpreter() -> None:
    """Makes launches in this process compute the same bits in about an eighth of the time.

    Some products differ: where NumPy's rounding depends on a product's place in a block, torch
    computes products, and rounds equal ones alike. Without Triton, or where it compiles, this does
    nothing.
    """
    if importlib.util.find_spec("triton") is None:
        return
    from triton import __version__, knobs

    if not knobs.runtime.interpret:
        return
    from triton.language import core
    from triton.runtime import interpreter as triton_interpreter

    interpreter: Any = triton_interpreter
    # Each sum and product of int32 is computed in int64, too, and compared with the limits of
    # int32. Only `debug` uses the comparison, and the interpreter never sets `debug`.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    if not _rounds_alike(np.matmul) and _rounds_alike(_by_torch):
        builder.create_dot = _multiplying_by_torch(interpreter, builder.create_dot)
    interpreter._patch_lang = _patching_once(interpreter._patch_lang)
    mend_interpreter(interpreter, tuple(map(int, __version__.split(".")[:2])))
    executor = interpreter.GridExecutor
    executor.__call__ = _without_warnings(executor.__call__)
    if not torch.cuda.is_available():
        # Tensors are on the host already.
        executor._init_args_hst = lambda self, args, kwargs: (args, kwargs)
        executor._restore_args_dev = lambda self, *args: None
    interpreter.inspect = SimpleNamespace(**vars(inspect) | _of_known_signatures())
    interpreter.tl.str_to_ty = functools.cache(interpreter.tl.str_to_ty)
    types: Any = core
    block = types.block_type
    block.__init__ = _remembering_shapes(block.__init__)
    types.tensor.__init__ = _sharing_shapes(types.tensor.__init__)
    interpreter._get_np_dtype = _remembering_dtypes(interpreter._get_np_dtype)
    tools = make_tools(interpreter, types)
    language = interpreter.tl
    language.sort = functools.wraps(language.sort)(sort_of(tools, language.sort))
    interpreter._patch_attr = _calling_directly(interpreter, _stand_ins(interpreter, types, tools))


def _rounds_alike(multiply: Callable[[Any, Any], Any]) -> bool:
    """Tells whether equal rows times equal columns are equal, as on tensor cores.

    OpenBLAS's kernels for processors without AVX-512 add up in another order at a block's end.
    """
    draw = np.random.default_rng(0)
    for rows, inner, columns in ((16, 32, 32), (64, 64, 64), (128, 64, 128)):
        row, column = draw.standard_normal((2, inner), np.float32)
        products = multiply(np.tile(row, (rows, 1)), np.tile(column, (columns, 1)).T)
        if (products != products[0, 0]).any():
            return False
    return True


def _by_torch(left: Any, right: Any) -> Any:
    return torch.matmul(torch.from_numpy(left), torch.from_numpy(right)).numpy()


def _multiplying_by_torch(interpreter: Any, create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a builder's `create_dot` that computes products in fp32 by torch, not by NumPy."""
    is_float = {np.dtype(np.float16), np.dtype(np.float32)}

    def in_numpy(operand: Any) -> Any:
        if operand.dtype.primitive_bitwidth == 8 and operand.dtype.is_floating():
            to = interpreter.tl.float16
            return interpreter._convert_float(operand.data, operand.dtype, to, None).view(
                np.float16
            )
        return operand.data

    def dot(a: Any, b: Any, d: Any, *precision_args: Any) -> Any:
        left, right = in_numpy(a), in_numpy(b)
        if d.data.dtype != np.float32 or not {left.dtype, right.dtype} <= is_float:
            return create_dot(a, b, d, *precision_args)
        product = _by_torch(left.astype(np.float32), right.astype(np.float32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    return dot


def _patching_once(patch_lang: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a `_patch_lang` that makes a kernel's triton.language interpreted, once for good.

    The interpreter's version does so at each launch and at each call of a device function. From
    Triton 3.6 on it undoes that after each launch.
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


def _stand_ins(interpreter: Any, core: Any, tools: Tools) -> Callable[[Any, str, Any], Any]:
    """Returns a function that gives the stand-in of a member of triton.language or its tensor.

    A member without a stand-in stays.
    """
    of_tensors = {**operators(tools), **methods(tools)}
    of_language = {**functions(tools), **memory_functions(tools)}

    def stand_in(owner: Any, name: str, slow: Any) -> Any:
        is_language = owner is core or owner is interpreter.tl
        makers = of_tensors if owner is core.tensor else of_language if is_language else {}
        if name not in makers:
            return slow
        stand_in_for_slow = makers[name](slow)
        vars(stand_in_for_slow)["__wrapped__"] = slow
        return stand_in_for_slow

    return stand_in


def _without_warnings(launch: Callable[..., None]) -> Callable[..., None]:
    """Silences NumPy's warnings: kernels compute log2(0) = -inf and the like on purpose."""

    def launch_quietly(self: Any, *args: Any, **kwargs: Any) -> None:
        with np.errstate(all="ignore"):
            launch(self, *args, **kwargs)

    return launch_quietly


def _of_known_signatures() -> dict[str, Callable[..., Any]]:
    """Returns functions of `inspect` that look at each function only the first time."""
    signature_of = functools.cache(inspect.signature)

    def call_args(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = signature_of(function).bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.arguments

    return {"getcallargs": call_args, "getfullargspec": functools.cache(inspect.getfullargspec)}


def _calling_directly(interpreter: Any, stand_in: Callable[..., Any]) -> Callable[..., None]:
    """Returns a `_patch_attr` that replaces a builtin by its stand-in.

    A builtin without one gets its argument `_semantic` without a check.
    """

    def patch(owner: Any, name: str, member: Any, builder: Any, *scope: Any) -> None:
        function = inspect.unwrap(member)
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return function(*args, **kwargs)

        setattr(owner, name, stand_in(owner, name, call))

    return patch


def _remembering_dtypes(numpy_dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Gives NumPy's dtype of a type by the name of its elements; Triton makes a table a call."""
    known: dict[str, Any] = {}

    def dtype_of(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = numpy_dtype_of(of)
        return known[name]

    return dtype_of


def _remembering_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Makes block types check, count and print a shape only the first time."""
    known: dict[Any, dict[str, Any]] = {}

    def make_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
        if not all(type(size) is int for size in sizes):
            make(self, element_ty, shape)
            self.sizes = tuple(self.shape)
            return
        key = (element_ty.name, sizes)
        if key not in known:
            make(self, element_ty, shape)
            known[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
            known[key]["sizes"] = sizes
        vars(self).update(known[key], element_ty=element_ty)

    return make_block_type


def _sharing_shapes(make: Callable[..., None]) -> Callable[..., None]:
    """Makes tensors of a shape share the constants that hold the shape."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = type.sizes if type.is_block() else ()
        if sizes not in known:
            make(self, handle, type)
            known[sizes] = self.numel, self.shape
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = known[sizes]

    return make_tensor
