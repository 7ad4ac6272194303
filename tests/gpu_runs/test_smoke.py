"""The smoke tests exist, and name each kernel, option and dtype: what a CPU can say of them.

Whether a kernel is launched, and whether an option reaches it, only a run on a GPU shows.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from cce_dist import linear_cross_entropy, token_logprobs
from cce_dist.options import (
    EightBitDtype,
    Filter,
    GradientMode,
    LogitsMode,
    Reduction,
    Screen,
    Stat,
)
from cce_dist.testing import Place
from tests.gpu_runs.kernels import kernels_in
from tests.gpu_runs.smoke import LAUNCHES, SMOKE, is_smoke

ROOT = Path(__file__).parents[2]
# Words of the tests for options that they pass through helpers.
STANDS_FOR = {"main_grad": "grad_weight_into", "vocab_size": "vocab_shard"}


def functions_in(collector: pytest.Collector) -> Iterator[pytest.Function]:
    for child in collector.collect():
        if isinstance(child, pytest.Function):
            yield child
        elif isinstance(child, pytest.Collector):
            yield from functions_in(child)


@pytest.fixture(scope="module")
def smoke_tests(request: pytest.FixtureRequest) -> list[pytest.Function]:
    paths = sorted({function.partition("::")[0] for function in SMOKE})
    modules = [pytest.Module.from_parent(request.session, path=ROOT / path) for path in paths]
    functions = [function for module in modules for function in functions_in(module)]
    return [function for function in functions if is_smoke(function.nodeid) and on_gpu(function)]


def parameters_of(test: pytest.Function) -> dict[str, Any]:
    return test.callspec.params if hasattr(test, "callspec") else {}


def on_gpu(test: pytest.Function) -> bool:
    place = parameters_of(test).get("place")
    return bool((place and place.device == "cuda") or test.get_closest_marker("gpu"))


def words_in(value: object) -> Iterator[str]:
    """Yields the strings in nested values, keys and the names of fields that are no defaults."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from (*words_in(key), *words_in(each))
    elif isinstance(value, tuple | list):
        for each in value:
            yield from words_in(each)
    elif isinstance(value, Filter | Screen):
        for field in fields(value):
            if getattr(value, field.name) != field.default:
                yield from (field.name, *words_in(getattr(value, field.name)))


def words_of(test: pytest.Function) -> set[str]:
    """Returns the words of a test's code and parameters, and of the tables that they name."""
    parameters = parameters_of(test)
    words = set(words_in(parameters))
    for table in vars(test.module).values():
        if isinstance(table, dict):
            for value in parameters.values():
                if isinstance(value, str) and value in table:
                    words |= set(words_in(table[value]))
    words |= words_of_code(test.function, vars(test.module))
    return words | {STANDS_FOR[word] for word in words if word in STANDS_FOR}


def words_of_code(function: Callable[..., Any], names: dict[str, Any]) -> set[str]:
    """Returns the words of a function's code, of what it names of its module, and so on."""
    words: set[str] = set()
    functions = [inspect.unwrap(function)]
    # The loop goes on to functions that it appends.
    for each in functions:
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
            if isinstance(node, ast.keyword) and node.arg:
                words.add(node.arg)
            elif isinstance(node, ast.Constant):
                words |= set(words_in(node.value))
            elif isinstance(node, ast.Name):
                value = names.get(node.id)
                if inspect.isfunction(value) and value.__globals__ is names:
                    functions += [value] * (value not in functions)
                elif not is_table(value):
                    words |= set(words_in(value))
    return words


def is_table(value: object) -> bool:
    """Tells whether a value has an entry for each of several tests: a mapping of mappings."""
    return isinstance(value, dict) and all(isinstance(x, dict | tuple) for x in value.values())


def test_each_entry_is_a_test(smoke_tests: list[pytest.Function]) -> None:
    counts: Counter[tuple[str, str]] = Counter()
    for test in smoke_tests:
        function = test.nodeid.partition("[")[0]
        counts.update((function, part) for part in SMOKE[function] or ("",) if part in test.nodeid)
    entries = [(function, part) for function, parts in SMOKE.items() for part in parts or ("",)]
    assert [entry for entry in entries if not counts[entry]] == []


def test_each_kernel_is_in_a_smoke_test() -> None:
    assert set(LAUNCHES) <= set(SMOKE)
    assert {kernel for kernels in LAUNCHES.values() for kernel in kernels} == kernels_in()


def test_each_option_is_in_a_smoke_test(smoke_tests: list[pytest.Function]) -> None:
    words = set().union(*map(words_of, smoke_tests))
    functions = (linear_cross_entropy, token_logprobs)
    options = {name for function in functions for name in inspect.signature(function).parameters}
    options |= {field.name for kind in (Filter, Screen) for field in fields(kind)}
    options -= {"hidden", "weight", "targets"}
    choices = (Reduction, GradientMode, LogitsMode, EightBitDtype, Stat)
    values = {value for choice in choices for value in get_args(choice)} - {"mean", "full", "auto"}
    assert (options | values) - words == set()


def test_each_dtype_of_each_backend_is_in_a_smoke_test(smoke_tests: list[pytest.Function]) -> None:
    pairs: set[tuple[str, str]] = set()
    for test in smoke_tests:
        parameters = parameters_of(test)
        place = parameters.get("place")
        if isinstance(place, Place):
            pairs |= {(place.backend, x) for x in parameters.values() if isinstance(x, str)}
    narrow = ("fp32", "bf16", "fp16", "int8", "e4m3")
    expected = {(backend, dtype) for backend in ("triton", "torch") for dtype in narrow}
    assert expected | {("torch", "float64")} <= pairs
