"""Stand-ins for functions that make blocks, for functions of a block, and for products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cce_dist.testing.interpreter.mends import hardware_exp2
from cce_dist.testing.interpreter.operators import between
from cce_dist.testing.interpreter.ops import (
    NUMPY_DTYPES,
    POINTERS,
    UNKNOWN,
    Function,
    Makers,
    Plan,
    Tools,
    by_bits,
    dtype_of,
    like_of,
    plan_of,
    sign_of,
)

# Functions of triton.language and of its `math`.
ELEMENTWISE: dict[str, Function] = {
    "exp2": hardware_exp2,
    "log2": np.log2,
    "floor": np.floor,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
}


def functions(tools: Tools) -> Makers:
    """Returns stand-ins for functions of triton.language."""
    makers: Makers = {
        "arange": lambda slow: _arange(tools, slow),
        "dot": lambda slow: _dot(tools, slow),
        "fma": lambda slow: _fma(tools, slow),
        "full": lambda slow: _full(tools, slow),
        "maximum": lambda slow: between(tools, slow, (np.maximum, np.fmax)),
        "minimum": lambda slow: between(tools, slow, (np.minimum, np.fmin)),
        "num_programs": lambda slow: _of_grid(tools, slow, "grid_dim"),
        "program_id": lambda slow: _of_grid(tools, slow, "grid_idx"),
        "where": lambda slow: _where(tools, slow),
    }
    for name, compute in ELEMENTWISE.items():
        makers[name] = lambda slow, c=compute: _elementwise(tools, slow, c)
    return makers


def methods(tools: Tools) -> Makers:
    """Returns stand-ins for methods of a tensor."""
    return {
        "to": lambda slow: _to(tools, slow),
        "__getitem__": lambda slow: _getitem(tools, slow),
        "__neg__": lambda slow: _operator(tools, slow, np.subtract, 0),
        "__invert__": lambda slow: _operator(tools, slow, np.bitwise_xor, -1),
    }


def sort_of(tools: Tools, slow: Function) -> Function:
    """Returns the stand-in of `sort`, for which Triton compares and swaps in many steps."""
    tensor = tools.core.tensor

    def sort(x: Any, dim: Any = None, descending: Any = False) -> Any:
        if type(x) is not tensor or len(x.type.sizes) != 1 or dim is not None or descending:
            return slow(x, dim, descending)
        return tools.tensor_of(np.sort(x.handle.data), like_of(x))

    return sort


def _arange(tools: Tools, slow: Function) -> Function:
    constexpr, known = tools.core.constexpr, {}

    def arange(start: Any, end: Any, _semantic: Any = None) -> Any:
        key = (
            start.value if type(start) is constexpr else start,
            end.value if type(end) is constexpr else end,
        )
        if key not in known:
            result = slow(start, end)
            # The array is shared from here on.
            result.handle.data.flags.writeable = False
            known[key] = result.handle.data, like_of(result)
        return tools.tensor_of(*known[key])

    return arange


def _full(tools: Tools, slow: Function) -> Function:
    """Returns the stand-in that fills a block with a number."""
    constexpr, known = tools.core.constexpr, {}

    def full(shape: Any, value: Any, dtype: Any, _semantic: Any = None) -> Any:
        number = value.value if type(value) is constexpr else value
        if type(number) not in (int, float) or type(dtype) is not tools.core.dtype:
            return slow(shape, value, dtype)
        sizes = shape.value if type(shape) is constexpr else shape
        sizes = tuple([size.value if type(size) is constexpr else size for size in sizes])
        key = (sizes, type(number), number, sign_of(number), dtype.name)
        if key not in known:
            result = slow(shape, value, dtype)
            known[key] = result.handle.data.copy(), like_of(result)
            return result
        data, like = known[key]
        return tools.tensor_of(data.copy(), like)

    return full


def _of_grid(tools: Tools, slow: Function, name: str) -> Function:
    builder, constexpr = tools.interpreter.interpreter_builder, tools.core.constexpr
    known: dict[int, Any] = {}

    def of_grid(axis: Any, _semantic: Any = None) -> Any:
        axis = axis.value if type(axis) is constexpr else axis
        if axis not in known:
            result = slow(axis)
            known[axis] = like_of(result)
            return result
        return tools.tensor_of(np.array([getattr(builder, name)[axis]], np.int32), known[axis])

    return of_grid


def _dot(tools: Tools, slow: Function) -> Function:
    """Returns the stand-in that adds a product to `acc`; `input_precision` changes nothing."""
    tensor, builder = tools.core.tensor, tools.interpreter.interpreter_builder
    plans: dict[Any, Any] = {}

    def dot(input: Any, other: Any, acc: Any = None, _semantic: Any = None, **options: Any) -> Any:
        precision = options.get("input_precision")
        precision = getattr(precision, "value", precision)
        if type(acc) is not tensor or not options.keys() <= {"input_precision"}:
            return slow(input, other, acc, **options)
        key = (input.type.code, other.type.code, acc.type.code, precision)
        if key not in plans:
            result = slow(input, other, acc, **options)
            plans[key] = like_of(result)
            return result
        handle = builder.create_dot(input.handle, other.handle, acc.handle, None, 0)
        return tools.tensor_of(handle.data, plans[key])

    return dot


def _elementwise(tools: Tools, slow: Function, compute: Function) -> Function:
    return _unary(tools, slow, lambda x: compute if x.dtype.name in NUMPY_DTYPES else None)


def _operator(tools: Tools, slow: Function, compute: Function, value: int) -> Function:
    """Returns the stand-in of an operator that Triton computes as 0 - x, or as x ^ -1."""

    def compute_for(x: Any) -> Function | None:
        dtype = dtype_of(x)
        if dtype is None or dtype is POINTERS:
            return None
        number, apply = np.array([value]).astype(dtype), by_bits(tools, compute, x)
        return lambda data: apply(number, data)

    return _unary(tools, slow, compute_for)


def _unary(tools: Tools, slow: Function, compute_for: Callable[[Any], Function | None]) -> Function:
    """Returns the stand-in of a function of one block.

    Args:
        compute_for: gives NumPy's function for a block of this type; None: there is none.
    """
    tensor, plans = tools.core.tensor, {}

    def operate(x: Any, _semantic: Any = None) -> Any:
        if type(x) is not tensor:
            return slow(x)
        plan = plans.get(x.type.code, UNKNOWN)
        if plan is UNKNOWN:
            result, compute = slow(x), compute_for(x)
            plans[x.type.code] = None if compute is None else plan_of(compute, (x,), None, result)
            return result
        data = x.handle.data
        if plan is None or data.dtype is not plan.dtypes[0] or not data.flags.c_contiguous:
            return slow(x)
        return tools.tensor_of(plan.compute(data), plan.like)

    return operate


def _where(tools: Tools, slow: Function) -> Function:
    tensor, constexpr = tools.core.tensor, tools.core.constexpr
    number, typed_number, tensor_of = tools.number, tools.typed_number, tools.tensor_of
    plans: dict[Any, Any] = {}

    def as_tensor(value: Any, other_operand: Any) -> Any:
        if type(value) is tensor:
            return value
        if type(value) not in (int, float):
            return None
        if type(other_operand) is tensor:
            dtype = other_operand.dtype
            return None if dtype.is_ptr() else typed_number(value, dtype.name)
        return number(value) if type(other_operand) is type(value) else None

    def where(condition: Any, x: Any, y: Any, _semantic: Any = None) -> Any:
        one = x.value if type(x) is constexpr else x
        other = y.value if type(y) is constexpr else y
        left, right = as_tensor(one, other), as_tensor(other, one)
        if left is None or right is None or type(condition) is not tensor:
            return slow(condition, x, y)
        key = (condition.type.code, left.type.code, right.type.code)
        plan = plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            result = slow(condition, x, y)
            same = left.dtype.name == right.dtype.name and condition.dtype.name == "int1"
            plans[key] = plan_of(np.where, (condition, left, right), None, result) if same else None
            return result
        if plan is None:
            return slow(condition, x, y)
        data = condition.handle.data, left.handle.data, right.handle.data
        for each, dtype in zip(data, plan.dtypes, strict=True):
            if each.dtype is not dtype or (plan.fills and not each.flags.c_contiguous):
                return slow(condition, x, y)
        return tensor_of(np.where(*data), plan.like)

    return where


def _fma(tools: Tools, slow: Function) -> Function:
    """Returns the stand-in of fma(x, y, z) of tensors of one dtype, and of numbers."""
    tensor, constexpr, typed_number = tools.core.tensor, tools.core.constexpr, tools.typed_number
    handle, builder = tools.interpreter.TensorHandle, tools.interpreter.interpreter_builder
    plans: dict[Any, Any] = {}

    def plan_for(operands: tuple[Any, ...], result: Any) -> Plan | None:
        dtype = operands[0].dtype
        if any(each.dtype.name != dtype.name for each in operands):
            return None

        def compute(*data: Any) -> Any:
            return builder.create_fma(*[handle(each, dtype) for each in data]).data

        return plan_of(compute, operands, None, result)

    def fma(x: Any, y: Any, z: Any, _semantic: Any = None) -> Any:
        values = [each.value if type(each) is constexpr else each for each in (x, y, z)]
        names = [each.dtype.name for each in values if type(each) is tensor]
        operands = tuple(
            [
                typed_number(each, names[0]) if names and type(each) in (int, float) else each
                for each in values
            ]
        )
        if any(type(each) is not tensor for each in operands):
            return slow(x, y, z)
        # A number has not always the dtype of the tensors.
        key = tuple([(x.type.code, type(each)) for x, each in zip(operands, values, strict=True)])
        plan = plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            result = slow(x, y, z)
            plans[key] = plan_for(operands, result)
            return result
        if plan is None:
            return slow(x, y, z)
        data = [each.handle.data for each in operands]
        for each, dtype in zip(data, plan.dtypes, strict=True):
            # The result's layout depends on those of all three.
            if each.dtype is not dtype or not each.flags.c_contiguous:
                return slow(x, y, z)
        return tools.tensor_of(plan.compute(*data), plan.like)

    return fma


def _to(tools: Tools, slow: Function) -> Function:
    """Returns the stand-in of x.to(dtype), also with `bitcast`."""
    plans: dict[Any, Any] = {}

    def plan_for(x: Any, dtype: Any, bitcast: bool, result: Any) -> Plan | None:
        to = NUMPY_DTYPES.get(dtype.name)
        if to is None or dtype.name == "int1" or dtype_of(x) in (None, POINTERS):
            return None
        if bitcast:
            return plan_of(lambda data: data.view(to), (x,), None, result)
        return plan_of(lambda data: data.astype(to), (x,), None, result)

    def to(
        self: Any,
        dtype: Any,
        *extra_args: Any,
        bitcast: Any = False,
        _semantic: Any = None,
        **extra_options: Any,
    ) -> Any:
        if (
            extra_args
            or extra_options
            or type(bitcast) is not bool
            or type(dtype) is not tools.core.dtype
        ):
            return slow(self, dtype, *extra_args, bitcast=bitcast, **extra_options)
        if self.dtype is dtype:
            return self
        key = (self.type.code, dtype.code, bitcast)
        plan = plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            result = slow(self, dtype, bitcast=bitcast)
            plans[key] = plan_for(self, dtype, bitcast, result)
            return result
        if plan is None or self.handle.data.dtype is not plan.dtypes[0]:
            return slow(self, dtype, bitcast=bitcast)
        return tools.tensor_of(plan.compute(self.handle.data), plan.like)

    return to


def _getitem(tools: Tools, slow: Function) -> Function:
    """Returns the stand-in of x[:, None] and the like."""
    plans: dict[Any, Any] = {}

    def getitem(self: Any, slices: Any, _semantic: Any = None) -> Any:
        if type(slices) is not tuple:
            return slow(self, slices)
        key = (self.type.code, *[each is None for each in slices])
        plan = plans.get(key)
        if plan is None:
            result = slow(self, slices)
            plans[key] = result.handle.data.shape, like_of(result)
            return result
        shape, like = plan
        return tools.tensor_of(self.handle.data.reshape(shape), like)

    return getitem
