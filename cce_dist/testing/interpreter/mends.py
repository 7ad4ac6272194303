"""Corrections of the interpreters of Triton's releases: of errors that their compilers do not have,
and of an instruction that flushes small numbers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

# The least number of fp32 that has all its digits.
LEAST_NORMAL = np.finfo(np.float32).tiny


def hardware_exp2(x: Any) -> Any:
    """Computes 2^x, but 0 below 2^-126, as `ex2.approx.ftz`, to which Triton compiles `exp2`."""
    result = np.exp2(x)
    return np.where(result < LEAST_NORMAL, result.dtype.type(0), result)


def mend_interpreter(interpreter: Any, version: tuple[int, ...]) -> None:
    """Corrects the interpreter of this `version` of Triton, in this process from here on."""
    builder = interpreter.interpreter_builder
    builder.create_exp2 = lambda x: builder.unary_op(x, hardware_exp2)
    if version < (3, 6):
        descriptor = interpreter.TensorDescHandle
        descriptor.validate = _checking_bytes(descriptor.validate)
    if version >= (3, 9):
        reduction = interpreter.ReduceOps
        for name in dir(builder):
            if name.startswith("create_fcmp"):
                setattr(builder, name, _comparing_bf16(interpreter, getattr(builder, name)))
        reduction.min_max = _of_nothing_but_nan(reduction.min_max)


def _checking_bytes(validate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Makes a descriptor check the alignment of its strides in bytes.

    Triton up to 3.5 takes their number of elements for bytes.
    """

    def validate_in_bytes(self: Any) -> None:
        size = self.base.dtype.element_ty.primitive_bitwidth // 8
        in_bytes = [SimpleNamespace(data=stride.data * size) for stride in self.strides[:-1]]
        validate(SimpleNamespace(**vars(self) | {"strides": [*in_bytes, self.strides[-1]]}))

    return validate_in_bytes


def _comparing_bf16(interpreter: Any, compare: Callable[..., Any]) -> Callable[..., Any]:
    """Compares bf16 as numbers.

    Triton 3.9 turns a number that is compared with bf16 into bf16, too. It then compares the
    uint16 in which NumPy holds the bits.
    """
    bf16, fp32 = interpreter.tl.bfloat16, interpreter.tl.float32

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != bf16:
            return operand
        bits = operand.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), fp32)

    return lambda lhs, rhs: compare(widened(lhs), widened(rhs))


def _of_nothing_but_nan(min_max: Callable[..., Any]) -> Callable[..., Any]:
    """Gives the first index as that of the largest if all values are NaN; Triton 3.9 raises."""

    def first_of_nan(index_of: Callable[..., Any]) -> Callable[..., Any]:
        def index(data: Any, *, axis: Any, keepdims: bool) -> Any:
            all_nan = np.isnan(data).all(axis=axis, keepdims=True)
            return index_of(np.where(all_nan, 0, data), axis=axis, keepdims=keepdims)

        return index

    def min_max_of_any(self: Any, input: Any, val_reduce_op: Any, idx_reduce_op: Any = None) -> Any:
        index = None if idx_reduce_op is None else first_of_nan(idx_reduce_op)
        return min_max(self, input, val_reduce_op, index)

    return min_max_of_any
