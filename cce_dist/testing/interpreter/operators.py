"""Stand-ins for operators of a tensor and another tensor, or a number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cce_dist.testing.interpreter.ops import (
    NUMPY_DTYPES,
    POINTERS,
    UNKNOWN,
    Function,
    Makers,
    Plan,
    Tools,
    by_bits,
    plan_of,
)

# Results that an operator keeps for each pair of types.
MOST_KNOWN = 4096


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


class PlanWithNumber(NamedTuple):
    """The plan of an operator whose other operand is always the same number."""

    compute: Function
    dtype: Any  # NumPy's, of `self`
    cast: Any
    fills: bool
    like: tuple[Any, ...]
    known: dict[Any, Any] | None
    data: Any  # of the number, as `compute` takes it


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
    tensor, constexpr, tensor_of = tools.core.tensor, tools.core.constexpr, tools.tensor_of
    plans: dict[Any, Any] = {}

    def make_plan(self: Any, operand: Any, result: Any) -> Plan | None:
        left, right = (operand, self) if swaps else (self, operand)
        plan = _plan_of_two(tools, compute, left, right, result, is_division)
        # Triton copies the operand of a shift, and a copy may have another layout.
        if plan is not None and compute is np.right_shift:
            plan = plan._replace(fills=True)
        return plan

    makes_number = compares and not tools.rules.compares_in_dtype
    as_tensor = _as_tensor(tools, makes_number, is_division)
    with_number = _with_number(tensor_of, slow, swaps, as_tensor, make_plan)

    def operate(self: Any, other: Any, _semantic: Any = None) -> Any:
        if type(other) is not tensor:
            value = other.value if type(other) is constexpr else other
            if type(value) is int or type(value) is float:
                return with_number(self, value, other)
            return slow(self, other)
        left, right = (other, self) if swaps else (self, other)
        key = (left.type.code, right.type.code)
        plan = plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            result = slow(self, other)
            plans[key] = make_plan(self, other, result)
            return result
        if plan is None:
            return slow(self, other)
        compute_it, (left_dtype, right_dtype), casts, fills, like, number, known = plan
        first, second = left.handle.data, right.handle.data
        if first.dtype is not left_dtype or second.dtype is not right_dtype:
            return slow(self, other)
        if fills and not (first.flags.c_contiguous and second.flags.c_contiguous):
            return slow(self, other)
        values = None
        if known is not None:
            values = (first.item(), second.item())
            if values in known:
                return known[values]
        if casts is not None:
            first = first if casts[0] is None else first.astype(casts[0])
            second = second if casts[1] is None else second.astype(casts[1])
        if number == 0:
            first = first.reshape(())
        elif number == 1:
            second = second.reshape(())
        result = tensor_of(compute_it(first, second), like)
        return result if known is None else _remember(known, values, result)

    return operate


def _as_tensor(tools: Tools, makes_number: bool, is_division: bool) -> Function:
    """Returns a function that gives Triton's tensor of a number that meets another operand."""

    def as_tensor(value: Any, other_operand: Any) -> Any:
        if makes_number or other_operand.dtype.is_ptr():
            return tools.number(value)
        if is_division and other_operand.dtype.name == "fp16":
            return None
        return tools.typed_number(value, other_operand.dtype.name)

    return as_tensor


def _with_number(
    tensor_of: Function, slow: Function, swaps: bool, as_tensor: Function, make_plan: Function
) -> Function:
    """Returns the stand-in of an operator for a tensor and a number."""
    plans: dict[Any, Any] = {}

    def plan_of_number(self: Any, value: Any, result: Any) -> PlanWithNumber | None:
        operand = as_tensor(value, self)
        plan = None if operand is None else make_plan(self, operand, result)
        if operand is None or plan is None:
            return None
        at = 0 if swaps else 1
        data, casts = operand.handle.data, plan.casts or (None, None)
        if casts[at] is not None:
            data = data.astype(casts[at])
        if plan.number == at:
            data = data.reshape(())
        of_self = (plan.dtypes[1 - at], casts[1 - at], plan.fills)
        return PlanWithNumber(plan.compute, *of_self, plan.like, plan.known, data)

    def operate(self: Any, value: Any, other: Any) -> Any:
        # `repr` tells -0.0 from 0.0, which are equal.
        key = (self.type.code, type(value), value or repr(value))
        plan = plans.get(key, UNKNOWN)
        if plan is UNKNOWN:
            result = slow(self, other)
            plans[key] = plan_of_number(self, value, result)
            return result
        if plan is None:
            return slow(self, other)
        compute, dtype, cast, fills, like, known, number = plan
        data = self.handle.data
        if data.dtype is not dtype or (fills and not data.flags.c_contiguous):
            return slow(self, other)
        of_self = None
        if known is not None:
            of_self = data.item()
            if of_self in known:
                return known[of_self]
        if cast is not None:
            data = data.astype(cast)
        result = tensor_of(compute(number, data) if swaps else compute(data, number), like)
        return result if known is None else _remember(known, of_self, result)

    return operate


def _remember(known: dict[Any, Any], key: Any, result: Any) -> Any:
    """Keeps the result of an operation on whole numbers, which index arithmetic repeats."""
    if len(known) >= MOST_KNOWN:
        known.clear()
    # The array is shared from here on.
    result.handle.data.flags.writeable = False
    known[key] = result
    return result


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
