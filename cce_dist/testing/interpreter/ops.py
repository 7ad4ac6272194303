"""Stand-ins for operations on blocks and numbers, each of which is one call of NumPy.

Triton's operations go through a dozen functions for decisions that depend on the operands' types
alone. Here Triton computes the first result for each pair of types. NumPy computes the further
results, if it gave the same bits in the same layout for the first one.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

# Dtypes that the interpreter computes with in NumPy: not bf16, nor floats of 8 bits.
NUMPY_DTYPES = {
    "int1": np.dtype(np.bool_),
    **{name: np.dtype(name) for name in ("int8", "int16", "int32", "int64")},
    **{name: np.dtype(name) for name in ("uint8", "uint16", "uint32", "uint64")},
    "fp16": np.dtype(np.float16),
    "fp32": np.dtype(np.float32),
    "fp64": np.dtype(np.float64),
}
FLOATS = ("fp16", "fp32")
POINTERS = np.dtype(np.uint64)
UNKNOWN = object()

Function = Callable[..., Any]


def divided(left: Any, right: Any) -> Any:
    """Divides integers as Triton does, rounding towards 0."""
    return (left - np.fmod(left, right)) // right


# By the names of a tensor's methods, less the underscores.
ARITHMETIC: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": divided,
    "mod": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
}
# Up to Triton 3.8 comparisons turn a number into a tensor whatever the other operand is.
COMPARISONS: dict[str, Function] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


class Plan(NamedTuple):
    """The computation of a result from operands of certain types."""

    compute: Function
    dtypes: tuple[Any, ...]  # NumPy's, of the operands
    casts: tuple[Any, ...] | None  # to which they are converted first
    # Triton fills a block with a number operand before it computes. Without that block the result
    # has another layout, if the other operand is not in C's order.
    fills: bool
    like: tuple[Any, ...]  # `like_of` the result


class Rules(NamedTuple):
    """Rules of arithmetic that differ between releases of Triton."""

    compares_in_dtype: bool  # a number takes the other operand's dtype in comparisons, too: 3.9
    skips_nan: bool  # the larger of NaN and a number is the number: 3.8
    wraps_bits: bool  # int1 is a number of one bit, and NumPy's bool is none: 3.9


class Tools(NamedTuple):
    interpreter: Any
    core: Any
    rules: Rules
    tensor_of: Function
    number: Function
    typed_number: Function


def make_tools(interpreter: Any, core: Any) -> Tools:
    _add_codes(core)
    return Tools(
        interpreter,
        core,
        _rules(interpreter, core),
        _tensor_of(interpreter, core),
        _number(interpreter),
        _typed_number(interpreter, core),
    )


def _rules(interpreter: Any, core: Any) -> Rules:
    """Finds the rules of this Triton, each by an operation."""
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    maximum = inspect.unwrap(core.maximum)
    half, nan = (semantic.scalar_constant(float("nan"), core.dtype(name)) for name in FLOATS)
    bit = interpreter.TensorHandle(np.ones(1, np.bool_), core.int1)
    return Rules(
        compares_in_dtype=maximum(half, 0.5, _semantic=semantic).dtype.name == "fp16",
        skips_nan=not np.isnan(maximum(nan, 0.5, _semantic=semantic).handle.data[0]),
        wraps_bits=not builder.create_add(bit, bit).data[0],
    )


Makers = dict[str, Callable[[Function], Function]]


def operators(tools: Tools) -> Makers:
    """Returns stand-ins for a tensor's methods of two operands."""
    makers: Makers = {}
    for name, compute in ARITHMETIC.items():
        is_division = name in ("truediv", "floordiv", "mod")
        for method, swaps in ((f"__{name}__", False), (f"__r{name}__", True)):
            makers[method] = lambda slow, c=compute, s=swaps, d=is_division: _binary(
                tools, slow, c, swaps=s, is_division=d
            )
    for name, compute in COMPARISONS.items():
        makers[f"__{name}__"] = lambda slow, c=compute: _binary(tools, slow, c, compares=True)
    return makers


def _add_codes(core: Any) -> None:
    """Gives types a `code`, a number that equal types share."""
    codes: dict[Any, int] = {}

    class Code:
        def __get__(self, instance: Any, owner: Any) -> int:
            key: Any = instance.name
            if instance.is_block():
                key = (instance.element_ty.name, instance.sizes)
            # From here on `code` is an attribute of this type.
            code = vars(instance)["code"] = codes.setdefault(key, len(codes))
            return code

    core.dtype.code = Code()


def like_of(tensor: Any) -> tuple[Any, ...]:
    """Returns all that a tensor has beside its data."""
    # Triton gives a comparison's handle the dtype of its left operand. A plan serves comparisons of
    # other dtypes as well, and a block of bits that are called fp32 knows no `&`.
    of_handle = tensor.dtype if tensor.dtype.name == "int1" else tensor.handle.dtype
    return of_handle, tensor.type, tensor.dtype, tensor.numel, tensor.shape


def _tensor_of(interpreter: Any, core: Any) -> Function:
    """Returns a function that makes a tensor without the checks of its and its handle's class."""
    tensor, handle_class, new = core.tensor, interpreter.TensorHandle, object.__new__

    def tensor_of(data: Any, like: Any) -> Any:
        handle, block = new(handle_class), new(tensor)
        handle.data, handle.attr, block.handle = data, {}, handle
        handle.dtype, block.type, block.dtype, block.numel, block.shape = like
        return block

    return tensor_of


def _number(interpreter: Any) -> Function:
    """Returns a function that gives Triton's tensor of a number, the same for equal numbers."""

    @functools.lru_cache(maxsize=None, typed=True)
    def number(value: Any, sign: float) -> Any:
        scalar = interpreter.interpreter_semantic.to_tensor(value)
        scalar.handle.data.flags.writeable = False
        return scalar

    return lambda value: number(value, sign_of(value))


def _typed_number(interpreter: Any, core: Any) -> Function:
    """Returns a function that gives the tensor of a number in the other operand's dtype.

    It gives None if Triton's arithmetic makes no such tensor.
    """

    @functools.lru_cache(maxsize=None, typed=True)
    def typed_number(value: Any, name: str, sign: float) -> Any:
        if name not in NUMPY_DTYPES or name == "int1":
            return None
        dtype = core.dtype(name)
        if dtype.is_int():
            limits = np.iinfo(NUMPY_DTYPES[name])
            if type(value) is float or not limits.min <= value <= limits.max:
                return None
        scalar = interpreter.interpreter_semantic.scalar_constant(value, dtype)
        scalar.handle.data.flags.writeable = False
        return scalar

    return lambda value, name: typed_number(value, name, sign_of(value))


def sign_of(value: float) -> float:
    """Returns what tells -0.0 from 0.0, which are equal, in the key of a number."""
    return math.copysign(1.0, value)


def dtype_of(operand: Any) -> Any:
    """Returns NumPy's dtype of a tensor; None if NumPy cannot compute with it."""
    if operand.dtype.is_ptr():
        return POINTERS
    return NUMPY_DTYPES.get(operand.dtype.name)


def _same_bits(computed: Any, expected: Any) -> bool:
    return (
        computed.dtype == expected.dtype
        and computed.shape == expected.shape
        and computed.strides == expected.strides
        and computed.tobytes() == expected.tobytes()
    )


def by_bits(tools: Tools, compute: Function, *operands: Any) -> Function:
    """Returns NumPy's function by which Triton computes with operands of such types."""
    if not tools.rules.wraps_bits or any(each.dtype.name != "int1" for each in operands):
        return compute

    def of_bits(*data: Any) -> Any:
        # `astype` keeps the layout of a broadcast block.
        broadcast = np.broadcast_arrays(*data)
        return (compute(*[each.astype(np.int8) for each in broadcast]) & 1).astype(np.bool_)

    return of_bits


def plan_of(
    compute: Function, operands: tuple[Any, ...], casts: tuple[Any, ...] | None, result: Any
) -> Plan | None:
    """Returns a plan that gives `result`; None if NumPy does not give it."""
    dtypes = tuple([dtype_of(operand) for operand in operands])
    data = [operand.handle.data for operand in operands]
    if any(each.dtype is not dtype for each, dtype in zip(data, dtypes, strict=True)):
        return None
    are_blocks = {operand.type.is_block() for operand in operands}
    if casts is not None:
        data = [
            each if to is None else each.astype(to) for each, to in zip(data, casts, strict=True)
        ]
    try:
        computed = compute(*data)
    except TypeError:
        return None
    # The layout of pointers does not matter: a load is in C's order.
    is_pointer = result.dtype.is_ptr()
    same = np.array_equal if is_pointer else _same_bits
    if not same(computed, result.handle.data):
        return None
    fills = len(are_blocks) > 1 and not is_pointer
    return Plan(compute, dtypes, casts, fills, like_of(result))


def _plan_of_two(
    tools: Tools, compute: Function, left: Any, right: Any, result: Any, is_division: bool
) -> Plan | None:
    semantic = tools.interpreter.interpreter_semantic
    if left.dtype.is_ptr() or right.dtype.is_ptr():
        if compute is not np.add or not left.dtype.is_ptr() or not right.dtype.is_int():
            return None
        return plan_of(_adding_to_pointers(left.dtype), (left, right), None, result)
    if left.dtype.name == right.dtype.name:
        if is_division and left.dtype.name == "fp16":
            return None
        return plan_of(by_bits(tools, compute, left, right), (left, right), None, result)
    if is_division:
        return None
    computed = semantic.computation_type_impl(left.dtype, False, right.dtype, False, False)
    to = NUMPY_DTYPES.get(computed.name)
    if to is None or computed.name == "int1":
        return None
    casts = tuple([None if each.dtype.name == computed.name else to for each in (left, right)])
    return plan_of(compute, (left, right), casts, result)


def _adding_to_pointers(dtype: Any) -> Function:
    size = max(1, dtype.element_ty.primitive_bitwidth // 8)

    def add(pointers: Any, offsets: Any) -> Any:
        steps = offsets.astype(POINTERS)
        if size > 1:
            steps *= size
        return pointers + steps

    return add


def _binary(
    tools: Tools,
    slow: Function,
    compute: Function,
    *,
    swaps: bool = False,
    compares: bool = False,
    is_division: bool = False,
) -> Function:
    """Returns the stand-in of an operator; `swaps`: `self` is the right operand."""
    tensor, constexpr = tools.core.tensor, tools.core.constexpr
    number, typed_number, tensor_of = tools.number, tools.typed_number, tools.tensor_of
    makes_numbers = compares and not tools.rules.compares_in_dtype
    plans: dict[Any, Any] = {}

    def as_tensor(value: Any, other_operand: Any) -> Any:
        if type(value) is constexpr:
            value = value.value
        if type(value) not in (int, float):
            return None
        if makes_numbers or other_operand.dtype.is_ptr():
            return number(value)
        if is_division and other_operand.dtype.name == "fp16":
            return None
        return typed_number(value, other_operand.dtype.name)

    def operate(self: Any, other: Any, _semantic: Any = None) -> Any:
        operand = other if type(other) is tensor else as_tensor(other, self)
        if operand is None:
            return slow(self, other)
        left, right = (operand, self) if swaps else (self, operand)
        key = (left.type.code, right.type.code)
        plan = plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            result = slow(self, other)
            plan_of_pair = _plan_of_two(tools, compute, left, right, result, is_division)
            # Triton copies the operand of a shift, and a copy may have another layout.
            if plan_of_pair is not None and compute is np.right_shift:
                plan_of_pair = plan_of_pair._replace(fills=True)
            plans[key] = plan_of_pair
            return result
        if plan is None:
            return slow(self, other)
        compute_it, (left_dtype, right_dtype), casts, fills, like = plan
        first, second = left.handle.data, right.handle.data
        if first.dtype is not left_dtype or second.dtype is not right_dtype:
            return slow(self, other)
        if fills and not (first.flags.c_contiguous and second.flags.c_contiguous):
            return slow(self, other)
        if casts is not None:
            first = first if casts[0] is None else first.astype(casts[0])
            second = second if casts[1] is None else second.astype(casts[1])
        return tensor_of(compute_it(first, second), like)

    return operate


def between(tools: Tools, slow: Function, choices: tuple[Function, Function]) -> Function:
    """Returns the stand-in of `maximum` or `minimum`.

    Args:
        choices: NumPy's functions; the first keeps NaN, the second skips it.
    """
    tensor = tools.core.tensor
    compute = choices[tools.rules.skips_nan]
    operate = _binary(tools, slow, compute, compares=True)
    operate_swapped = _binary(tools, lambda y, x: slow(x, y), compute, swaps=True, compares=True)

    def choose(
        x: Any, y: Any, *extra_args: Any, _semantic: Any = None, **extra_options: Any
    ) -> Any:
        if extra_args or extra_options:
            return slow(x, y, *extra_args, **extra_options)
        if type(x) is tensor:
            return operate(x, y)
        return operate_swapped(y, x) if type(y) is tensor else slow(x, y)

    return choose
