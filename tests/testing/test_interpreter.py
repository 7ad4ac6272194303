"""What stands in for operations of Triton's interpreter gives its bits, laid out as its are."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

from cce_dist.testing import TRITON_CPU, Case, gaussian_inputs, run_case

pytestmark = pytest.mark.interpreter

ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift")
COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
DTYPES = ("int1", "int32", "uint32", "int64", "float16", "float32")
# As they come from loads, from x[:, None] and x[None, :], x.T and a broadcast; and a number.
LAYOUTS = ("plain", "column", "row", "transposed", "spread", "scalar")
NUMBERS = (0, 1, -1, 3, 2**31, 2**40, 0.0, -0.0, 0.3, 1e30, float("inf"), float("nan"))


@pytest.fixture(scope="module")
def interpreter() -> Any:
    """Once a launch has put everything in its place."""
    from triton.runtime import interpreter

    run_case(None, Case(gaussian_inputs(7, 30, 8, generator=torch.Generator())).at(TRITON_CPU))
    return interpreter


def block(interpreter: Any, dtype: str, layout: str, *, seed: int = 2) -> Any:
    tl = interpreter.tl
    of = getattr(tl, dtype)
    shape = {"column": (8, 1), "row": (1, 4), "spread": (8, 1), "scalar": (1,)}.get(layout, (8, 4))
    np_dtype = interpreter._get_np_dtype(of)
    draw = np.random.default_rng(seed)
    if np_dtype.kind == "f":
        data = draw.standard_normal(shape).astype(np_dtype)
        data.flat[0] = draw.choice([np.nan, np.inf, -0.0, 1.5])
    else:
        data = draw.integers(0 if np_dtype.kind in "bu" else -9, 9, shape).astype(np_dtype)
    if layout == "transposed":
        data = np.ascontiguousarray(data.T).T
    if layout == "spread":
        data = np.broadcast_to(data, (8, 4))
    type_ = of if layout == "scalar" else tl.block_type(of, list(data.shape))
    return tl.tensor(interpreter.TensorHandle(data, of), type_)


def described(result: Any) -> Any:
    """All that later operations can tell of it. One to come may tell how a block lies."""
    data = result.handle.data
    return result.type, result.dtype, data.dtype, data.shape, data.strides, data.tobytes()


def check(stands_in: Any, *operands: Any, **how: Any) -> None:
    """Twice: the first time Triton's own is called."""
    try:
        with np.errstate(all="ignore"):
            expected = described(stands_in.__wrapped__(*operands, **how))
    except Exception as error:
        with pytest.raises(type(error)):
            stands_in(*operands, **how)
        return
    for _ in range(2):
        with np.errstate(all="ignore"):
            assert described(stands_in(*operands, **how)) == expected


def pairs_of_layouts(is_same: bool) -> list[tuple[str, str]]:
    layouts = LAYOUTS if is_same else ("plain", "column", "transposed", "scalar")
    return list(itertools.product(layouts, layouts))


@pytest.mark.parametrize("name", [*ARITHMETIC, "rshift", *COMPARISONS])
@pytest.mark.parametrize("left", DTYPES)
def test_stand_in_of_an_operator(interpreter: Any, left: str, name: str) -> None:
    method = getattr(interpreter.tl.tensor, f"__{name}__")
    for right in DTYPES:
        for one, other in pairs_of_layouts(left == right):
            operands = block(interpreter, left, one, seed=1), block(interpreter, right, other)
            check(method, *operands)
    # Results of whole numbers are kept, by the operands' values.
    for seed in (1, 5, 9, 1):
        number = block(interpreter, left, "scalar", seed=seed)
        check(method, number, block(interpreter, left, "scalar"))
        check(method, number, 3)
    for one, number in itertools.product(LAYOUTS, NUMBERS):
        check(method, block(interpreter, left, one), number)
        if name in ARITHMETIC:
            reflected = getattr(interpreter.tl.tensor, f"__r{name}__")
            check(reflected, block(interpreter, left, one), number)


@pytest.mark.parametrize("left", DTYPES)
def test_stand_in_of_a_function(interpreter: Any, left: str) -> None:
    tl = interpreter.tl
    for one in LAYOUTS:
        operand = block(interpreter, left, one)
        for name in ("__neg__", "__invert__"):
            check(getattr(tl.tensor, name), operand)
        for name in ("exp2", "log2", "floor", "sqrt"):
            check(getattr(tl, name), operand)
        for index in ((None, slice(None)), (slice(None), None), (None, None, slice(None))):
            check(tl.tensor.__getitem__, operand, index)
        for dtype in (*DTYPES, "bfloat16"):
            for bitcast in (False, True):
                check(tl.tensor.to, operand, getattr(tl, dtype), bitcast=bitcast)
        for number in (0, 3, 0.5, float("nan")):
            check(tl.maximum, operand, number)
            check(tl.minimum, number, operand)
    for right, (one, other) in itertools.product(DTYPES, pairs_of_layouts(True)):
        operands = block(interpreter, left, one, seed=1), block(interpreter, right, other)
        check(tl.maximum, *operands)
        for layout in ("plain", "column", "transposed", "scalar"):
            check(tl.where, block(interpreter, "int1", layout), *operands)
            if left.startswith("float"):
                check(tl.fma, *operands, block(interpreter, left, layout, seed=2))
    for one, number in itertools.product(LAYOUTS, (0, 3, 0.5)):
        operand = block(interpreter, left, one)
        check(tl.where, block(interpreter, "int1", "plain"), operand, number)
        if left.startswith("float"):
            check(tl.fma, operand, block(interpreter, left, "scalar"), number)
            check(tl.fma, number, operand, -0.0)


def test_stand_ins_keep_the_sign_of_zero(interpreter: Any) -> None:
    """0.0 and -0.0 are equal, and so are keys of them."""
    tl, memory = interpreter.tl, torch.ones(1)
    for number in (0.0, -0.0):
        check(tl.full, [4], number, tl.float32)
        signs = []
        # Triton's own first; some releases have no -0.0.
        for store in (tl.store.__wrapped__, tl.store, tl.store):
            store(at(interpreter, memory, np.zeros(1, np.int64)), number)
            signs.append(math.copysign(1, memory.item()))
        assert len(set(signs)) == 1


@pytest.mark.parametrize("size", [2, 64])
def test_stand_in_of_a_sort(interpreter: Any, size: int) -> None:
    tl, data = interpreter.tl, np.random.default_rng(0).permutation(size).astype(np.int32)
    of = tl.tensor(interpreter.TensorHandle(data, tl.int32), tl.block_type(tl.int32, [size]))
    result, right = tl.sort(of), tl.sort.__wrapped__(of)
    assert result.type == right.type and np.array_equal(result.handle.data, right.handle.data)
    assert np.array_equal(tl.sort(of, descending=True).handle.data, np.sort(data)[::-1])


def at(interpreter: Any, memory: torch.Tensor, indices: np.ndarray) -> Any:
    """Pointers to elements of `memory`."""
    tl = interpreter.tl
    of = tl.pointer_type({4: tl.float32, 2: tl.float16}[memory.element_size()])
    data = (memory.data_ptr() + indices * memory.element_size()).astype(np.uint64)
    return tl.tensor(interpreter.TensorHandle(data, of), tl.block_type(of, list(indices.shape)))


def test_stand_in_of_a_mask_of_numbers(interpreter: Any) -> None:
    """As Triton leaves the result of a comparison of numbers, spread over a block."""
    tl = interpreter.tl
    mask = block(interpreter, "int1", "plain")
    check(tl.tensor.__and__, mask, mask)
    handle = interpreter.TensorHandle(mask.handle.data.astype(np.int32), tl.int32)
    of_numbers = tl.tensor(handle, mask.type)
    check(tl.tensor.__and__, mask, of_numbers)
    check(tl.tensor.__invert__, of_numbers)
    check(tl.where, of_numbers, block(interpreter, "float32", "plain"), 0.0)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_stand_in_of_a_comparison_leaves_bits(interpreter: Any, dtype: str) -> None:
    """Triton gives the bits the dtype of the left operand. A stand-in that remembered fp32, after
    the guard's kernel had compared floats, broke each later forward in the process."""
    number = block(interpreter, dtype, "scalar")
    for _ in range(2):
        both = (number <= number) & (number >= number)
    assert both.handle.dtype.name == "int1"


def test_stand_in_of_a_load_of_what_is_not_aligned(interpreter: Any) -> None:
    tl = interpreter.tl
    memory = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    aligned = at(interpreter, memory, np.arange(512).reshape(64, 8))
    check(tl.load, aligned)
    handle = interpreter.TensorHandle(aligned.handle.data + np.uint64(1), aligned.handle.dtype)
    check(tl.load, tl.tensor(handle, aligned.type))


@pytest.mark.parametrize("holds", ["all", "some", "none", "rows", "no_mask"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
@pytest.mark.parametrize("rows", [2, 64], ids=["few", "many"])
def test_stand_in_of_loads_and_stores(
    interpreter: Any, rows: int, dtype: torch.dtype, holds: str
) -> None:
    tl = interpreter.tl
    memory = torch.randn(rows * 8 + 1, generator=torch.Generator().manual_seed(0)).to(dtype)[1:]
    draw = np.random.default_rng(0)
    # Some twice: the last that is stored stays.
    indices = draw.integers(0, rows * 8, (rows, 8))
    shape = (rows, 1) if holds == "rows" else (rows, 8)
    data = {"all": np.ones(shape, bool), "none": np.zeros(shape, bool)}.get(holds)
    data = draw.integers(0, 2, shape).astype(bool) if data is None else data
    if holds == "some":
        # What is not loaded need not exist.
        indices = np.where(data, indices, -(2**40))
    mask = None
    if holds != "no_mask":
        of = tl.block_type(tl.int1, list(shape))
        mask = tl.tensor(interpreter.TensorHandle(data, tl.int1), of)
    values = memory.flip(0).numpy()[: rows * 8].reshape(8, rows).T
    name = tl.float16 if dtype == torch.float16 else tl.float32
    value = tl.tensor(interpreter.TensorHandle(values, name), tl.block_type(name, [rows, 8]))
    for pointers in (indices, np.asfortranarray(indices)):
        pointer = at(interpreter, memory, pointers)
        for other in (None, 0.3, 7) if mask is not None else (None,):
            check(tl.load, pointer, mask, other)
            # Triton's way ends in the same function: what it reads is looked at, too.
            if mask is not None and other is not None:
                there = memory.numpy()[np.where(data, indices, 0)]
                expected = np.where(data, there, there.dtype.type(other))
                np.testing.assert_array_equal(tl.load(pointer, mask, other).handle.data, expected)
    left = []
    for store in (tl.store.__wrapped__, tl.store, tl.store):
        for what in (value, 0.3):
            own = memory.clone()
            store(at(interpreter, own, indices), what, mask)
            left.append(own)
    assert all(torch.equal(one, left[number % 2]) for number, one in enumerate(left))
