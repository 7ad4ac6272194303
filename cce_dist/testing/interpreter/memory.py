"""Stand-ins for loads and stores, which copy blocks by NumPy.

Triton's loads and stores copy element by element, 20 ns each; NumPy takes 3 ns (2 cores of an EPYC,
128 x 64 of fp32).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from cce_dist.testing.interpreter.ops import UNKNOWN, Function, Makers, Tools, like_of, sign_of

# Triton's loads and stores are faster for fewer elements.
SMALL = 96
# Options for a compiler alone.
HINTS = {"cache_modifier", "eviction_policy", "volatile"}
ADDRESSES = 2**47


def memory_functions(tools: Tools) -> Makers:
    """Returns stand-ins for triton.language's load and store.

    The builder's masked loads and stores, and its loads by a descriptor, are replaced at once.
    """
    builder, native = tools.interpreter.interpreter_builder, tools.interpreter._interpreter
    read, write = _reading(native), _writing(native)
    masked_load = builder.create_masked_load

    def as_bools(mask: Any) -> Any:
        # Up to Triton 3.8 a descriptor's mask has no handle. A comparison of numbers gives an
        # int32 mask, which Triton 3.9 refuses.
        data = mask if isinstance(mask, np.ndarray) else mask.data
        return data if data.dtype == np.bool_ else data.astype(np.bool_)

    def create_masked_load(ptrs: Any, mask: Any, other: Any, *args: Any, **hints: Any) -> Any:
        holds = as_bools(mask)
        if other is None:
            handle = tools.interpreter.TensorHandle(holds, tools.interpreter.tl.int1)
            return masked_load(ptrs, handle, other, *args, **hints)
        dtype = ptrs.get_element_ty()
        data = read(ptrs.data, holds, other.data, tools.interpreter._get_np_dtype(dtype))
        return tools.interpreter.TensorHandle(data, dtype)

    def create_masked_store(ptrs: Any, value: Any, mask: Any, *args: Any, **hints: Any) -> Any:
        return write(ptrs.data, value.data, as_bools(mask))

    builder.create_masked_load = create_masked_load
    builder.create_masked_store = create_masked_store
    builder.create_descriptor_load = _descriptor_load(tools, builder.create_descriptor_load)
    return {
        "load": lambda slow: _load(tools, slow, read),
        "store": lambda slow: _store(tools, slow, write),
    }


def _memory() -> Callable[[Any], Any]:
    """Returns a function that gives this process's memory as an array, from its second element on.

    Pass the array to no function that may raise: a traceback's repr would read all of it.
    """
    known: dict[Any, Any] = {}

    def memory_of(dtype: Any) -> Any:
        if dtype not in known:
            size = dtype.itemsize
            interface = {
                "data": (size, False),
                "shape": (ADDRESSES // size - 1,),
                "typestr": dtype.str,
                "version": 3,
            }
            known[dtype] = np.asarray(SimpleNamespace(__array_interface__=interface))
        return known[dtype]

    return memory_of


def _indices(pointers: Any, size: int) -> Any:
    """Returns indices into `_memory`; None if a pointer is no multiple of the size."""
    if size == 1:
        return pointers.view(np.int64) - 1
    if (pointers & (size - 1)).any():
        return None
    indices = (pointers >> (size.bit_length() - 1)).view(np.int64)
    indices -= 1
    return indices


def _reading(native: Any) -> Function:
    memory_of = _memory()
    small: dict[Any, Any] = {}

    def read_all(pointers: Any, dtype: Any) -> Any:
        if pointers.size > SMALL:
            indices = _indices(pointers, dtype.itemsize)
            if indices is not None:
                return memory_of(dtype).take(indices)
        key = (pointers.shape, dtype)
        if key not in small:
            small[key] = np.ones(pointers.shape, np.bool_), np.zeros(pointers.shape, dtype)
        return native.load(pointers, *small[key], dtype)

    def read(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Reads; `other` may be a single element."""
        if mask is None or mask.all():
            return read_all(pointers, dtype)
        values = np.empty(pointers.shape, dtype)
        values[...] = 0 if other is None else other
        if mask.shape != pointers.shape:
            mask = np.broadcast_to(mask, pointers.shape)
        if pointers.size > SMALL:
            values[mask] = read_all(pointers[mask], dtype)
            return values
        return native.load(pointers, mask, values, dtype)

    return read


def _writing(native: Any) -> Function:
    memory_of = _memory()

    def write(pointers: Any, values: Any, mask: Any) -> None:
        """Writes values; of several values for one pointer the last stays."""
        if mask is not None and mask.all():
            mask = None
        if values.shape != pointers.shape:
            values = np.broadcast_to(values, pointers.shape)
        if mask is not None and mask.shape != pointers.shape:
            mask = np.broadcast_to(mask, pointers.shape)
        if pointers.size > SMALL:
            kept = slice(None) if mask is None else mask.ravel()
            indices = _indices(pointers.ravel()[kept], values.dtype.itemsize)
            if indices is not None:
                memory_of(values.dtype)[indices] = values.ravel()[kept]
                return
        native.store(pointers, values, np.ones(pointers.shape, np.bool_) if mask is None else mask)

    return write


def _descriptor_load(tools: Tools, slow: Function) -> Function:
    """Returns the stand-in that loads a matrix's block by rows; Triton reads element by element."""
    pad_zero = tools.interpreter._ir.PADDING_OPTION.PAD_ZERO

    def descriptor_load(desc: Any, indices: Any, *hints: Any, **more_hints: Any) -> Any:
        rounds = getattr(desc, "round_f32_to_tf32", False)
        if rounds or desc.ndim != 2 or getattr(desc, "padding", pad_zero) != pad_zero:
            return slow(desc, indices, *hints, **more_hints)
        element = desc.base.dtype.element_ty
        dtype = tools.interpreter._get_np_dtype(element)
        offsets = [int(index.data.item()) for index in indices]
        assert offsets[-1] * dtype.itemsize % 16 == 0, "block offset start must be 16-byte aligned"
        starts = [max(0, offset) for offset in offsets]
        sizes = [
            min(int(size.data.item()), offset + block) - start
            for size, offset, block, start in zip(
                desc.shape, offsets, desc.block_shape, starts, strict=True
            )
        ]
        values = np.zeros(desc.block_shape, dtype)
        if min(sizes) > 0:
            strides = [int(stride.data.item()) * dtype.itemsize for stride in desc.strides]
            address = int(desc.base.data.item())
            for start, stride in zip(starts, strides, strict=True):
                address += start * stride
            interface = {
                "data": (address, False),
                "shape": tuple(sizes),
                "strides": tuple(strides),
                "typestr": dtype.str,
                "version": 3,
            }
            rows, columns = (
                slice(start - offset, start - offset + size)
                for start, offset, size in zip(starts, offsets, sizes, strict=True)
            )
            values[rows, columns] = np.asarray(SimpleNamespace(__array_interface__=interface))
        return tools.interpreter.TensorHandle(values, element)

    return descriptor_load


def _shapes_agree(shape: Any, *others: Any) -> bool:
    """Tells whether `others` broadcast to `shape`, and leave `shape` as it is."""
    return all(
        each is None
        or each.size == 1
        or (
            len(each.shape) == len(shape)
            and all(one in (1, size) for one, size in zip(each.shape, shape, strict=True))
        )
        for each in others
    )


def _access(tools: Tools, run: Function) -> Function:
    """Returns a function that calls `run`, or Triton's function where `run` may differ from it.

    Args:
        run: loads or stores, given NumPy's pointers, operand and mask, and the plan.
    """
    tensor, constexpr = tools.core.tensor, tools.core.constexpr
    semantic = tools.interpreter.interpreter_semantic
    plans: dict[Any, Any] = {}
    numbers: dict[Any, Any] = {}
    kinds = (tensor, int, float, type(None))

    def data_of(operand: Any) -> Any:
        return operand.handle.data if type(operand) is tensor else None

    def code_of(operand: Any) -> Any:
        return operand.type.code if type(operand) is tensor else type(operand)

    def plan_of(pointer: Any, operand: Any, mask: Any, result: Any) -> Any:
        """Returns the elements' dtype, Triton's and NumPy's, and `like_of` a load's result."""
        dtype, shape = pointer.dtype.element_ty, pointer.handle.data.shape
        agree = _shapes_agree(shape, data_of(operand), data_of(mask))
        if dtype.is_block() or dtype.name == "int1" or not agree:
            return None
        if getattr(result, "handle", None) is None:
            return dtype, None, None
        is_whole = result.handle.data.shape == shape
        np_dtype = tools.interpreter._get_np_dtype(dtype)
        return (dtype, np_dtype, like_of(result)) if is_whole else None

    def element_of(operand: Any, dtype: Any) -> Any:
        """Returns an operand in the dtype of the elements, rounded as Triton does."""
        if type(operand) is tensor:
            same = operand.dtype.name == dtype.name
            return (operand if same else semantic.cast(operand, dtype)).handle.data
        if operand is None:
            return None
        key = (type(operand), operand, sign_of(operand), dtype.name)
        if key not in numbers:
            numbers[key] = semantic.cast(tools.number(operand), dtype).handle.data
        return numbers[key]

    def access(pointer: Any, operand: Any, mask: Any, options: Any, slow: Function) -> Any:
        if type(operand) is constexpr:
            operand = operand.value
        if (
            type(pointer) is not tensor
            or type(operand) not in kinds
            or (type(mask) is not tensor and mask is not None)
            or (options and not options.keys() <= HINTS)
        ):
            return slow()
        key = (pointer.type.code, code_of(operand), code_of(mask))
        plan = plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            result = slow()
            plans[key] = plan_of(pointer, operand, mask, result)
            return result
        holds = data_of(mask)
        if plan is None or (holds is not None and holds.dtype != np.bool_):
            return slow()
        return run(pointer.handle.data, element_of(operand, plan[0]), holds, plan)

    return access


def _load(tools: Tools, slow: Function, read: Function) -> Function:
    def run(pointers: Any, other: Any, mask: Any, plan: Any) -> Any:
        return tools.tensor_of(read(pointers, mask, other, plan[1]), plan[2])

    access = _access(tools, run)

    def load(
        pointer: Any, mask: Any = None, other: Any = None, _semantic: Any = None, **options: Any
    ) -> Any:
        return access(pointer, other, mask, options, lambda: slow(pointer, mask, other, **options))

    return load


def _store(tools: Tools, slow: Function, write: Function) -> Function:
    access = _access(tools, lambda pointers, value, mask, _: write(pointers, value, mask))

    def store(
        pointer: Any, value: Any, mask: Any = None, _semantic: Any = None, **options: Any
    ) -> Any:
        return access(pointer, value, mask, options, lambda: slow(pointer, value, mask, **options))

    return store
