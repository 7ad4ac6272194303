"""Loops of the kernels that Triton would compile to something else than Python runs.

Triton 3.6 and 3.9 take a variable for one that a loop does not change if its next value is the very
value that it had before the loop: `a = b = x`, and in the loop `a = b`. Nothing fails, and the
interpreter computes what was meant.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[4] / "cce_dist/backends/triton/kernels"


def assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr | None]]:
    """Names and what they become; None: something else than an expression of their own."""
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id, None
    if not isinstance(statement, ast.Assign):
        return
    for target in statement.targets:
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        values = statement.value.elts if isinstance(statement.value, ast.Tuple) else ()
        for i, name in enumerate(names):
            if isinstance(name, ast.Name):
                same_length = len(values) == len(names)
                whole = None if isinstance(target, ast.Tuple) else statement.value
                yield name.id, values[i] if same_length else whole


def lost_values(body: list[ast.stmt], same: dict[str, object]) -> Iterator[str]:
    """Assignments in loops whose value was the variable's own before the loop.

    Args: same: a mark of each name's value; names of one value have one mark.
    """
    for statement in body:
        for name, value in assigned(statement):
            source = value.id if isinstance(value, ast.Name) else None
            same[name] = object() if source is None else same.setdefault(source, object())
        if isinstance(statement, ast.If):
            # Either branch may run: what both leave alone is as it was.
            yield from lost_values(statement.body, dict(same))
            yield from lost_values(statement.orelse, dict(same))
            for inner in ast.walk(statement):
                if isinstance(inner, ast.stmt) and inner is not statement:
                    same |= {name: object() for name, _ in assigned(inner)}
        if isinstance(statement, ast.For | ast.While):
            before, changed = dict(same), set[str]()
            for inner in statement.body:
                for name, value in assigned(inner):
                    if isinstance(value, ast.Name) and value.id not in changed:
                        mark = before.get(name)
                        if mark is not None and mark is before.get(value.id):
                            yield f"{statement.lineno}: {ast.unparse(inner)}"
                    changed.add(name)
            yield from lost_values(statement.body, dict(same))
            same |= {name: object() for name in changed}


def lost_in(source: str) -> list[str]:
    functions = [each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef)]
    return [line for function in functions for line in lost_values(function.body, {})]


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.name)
def test_no_loop_loses_a_value(path: Path) -> None:
    assert lost_in(path.read_text()) == []


def test_what_a_loop_loses_is_seen() -> None:
    rotated = """
def kernel(x):
    earliest = x + 1
    before = earliest
    merged = {start}
    for i in range(3):
        earliest = before
        before = merged
        merged = merged + i
"""
    assert lost_in(rotated.format(start="earliest")) == [
        "6: earliest = before",
        "6: before = merged",
    ]
    assert lost_in(rotated.format(start="x")) == ["6: earliest = before"]
    assert lost_in(rotated.replace("before = earliest", "before = x - 1").format(start="x")) == []
    reset = "def kernel(x):\n    a = x\n    while x > 0:\n        x = x - 1\n        a = x\n"
    assert lost_in(reset) == []
