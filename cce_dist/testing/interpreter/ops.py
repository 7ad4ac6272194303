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
Makers = dict[str, Callable[[Function], Function]]


class Plan(NamedTuple):
    """The computation of a result from operands of certain types."""

    compute: Function
    dtypes: tuple[Any, ...]  # NumPy's, of the operands
    casts: tuple[Any, ...] | None  # to which they are converted first
    # Triton fills a block with a number operand before it computes. Without that block the result
    # has another layout, if the other operand is not in C's order.
    fills: bool
    like: tuple[Any, ...]  # `like_of` the result
    number: int | None  # the operand that is a number beside a block
    known: dict[Any, Any] | None  # results by the operands' values, if both are whole numbers


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
    are_blocks = [operand.type.is_block() for operand in operands]
    number_beside_block = len(operands) == 2 and len(set(are_blocks)) == 2
    if casts is not None:
        data = [
            each if to is None else each.astype(to) for each, to in zip(data, casts, strict=True)
        ]
    number = are_blocks.index(False) if number_beside_block else None
    if number is not None:
        # NumPy adds a number without a dim to a block in 0.3 us, and with one in 0.8 us.
        data[number] = data[number].reshape(())
    try:
        computed = compute(*data)
    except TypeError:
        return None
    # The layout of pointers does not matter: a load is in C's order.
    is_pointer = result.dtype.is_ptr()
    same = np.array_equal if is_pointer else _same_bits
    if not same(computed, result.handle.data):
        return None
    fills = len(set(are_blocks)) > 1 and not is_pointer
    is_whole = not any(are_blocks) and all(operand.dtype.is_int() for operand in operands)
    known = {} if is_whole and len(operands) == 2 else None
    return Plan(compute, dtypes, casts, fills, like_of(result), number, known)
