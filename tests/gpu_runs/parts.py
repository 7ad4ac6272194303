"""--part K/N: the K-th of N parts of the tests, cut so that the parts take about equally long."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# Mean seconds of a function's tests on a GPU: `python -m tests.gpu_runs --write-seconds` writes it.
SECONDS = Path(__file__).parent / "seconds.json"
# Until they are measured: a test that compiles kernels, one over several ranks, any other.
COMPILES, OVER_RANKS, OTHERWISE = 8.0, 20.0, 0.5


def parse_part(text: str) -> tuple[int, int]:
    """Returns (K, N) of "K/N"."""
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--part must be K/N with 1 <= K <= N, such as 1/4, got {text!r}")
    return int(number), int(count)


def read_seconds() -> dict[str, float]:
    return json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}


def write_seconds(records: list[dict[str, Any]]) -> None:
    """Writes the mean seconds of each function's tests that passed, of a ledger's records."""
    seconds: dict[str, list[float]] = {}
    for record in records:
        if record["outcome"] == "passed":
            seconds.setdefault(function_of(record["test"]), []).append(record["seconds"])
    means = {name: round(sum(each) / len(each), 1) for name, each in sorted(seconds.items())}
    SECONDS.write_text(json.dumps(means, indent=1) + "\n", encoding="utf-8")


def function_of(test: str) -> str:
    return test.partition("[")[0]


def seconds_of(item: pytest.Item, measured: dict[str, float]) -> float:
    """Returns a test's measured seconds, or an estimate by its markers and its place."""
    function = function_of(item.nodeid)
    if function in measured:
        return measured[function]
    if item.get_closest_marker("multigpu"):
        return OVER_RANKS
    callspec = getattr(item, "callspec", None)
    place = callspec and callspec.params.get("place")
    compiles = item.get_closest_marker("gpu") if place is None else place.compiles
    return COMPILES if compiles else OTHERWISE


def cut(tests: Sequence[tuple[str, float]], number: int, count: int) -> set[int]:
    """Returns the indices of the tests in part `number` of `count`.

    A file whose tests take less than half a part's time stays whole; a longer one is cut between
    two of its tests. The longest piece goes first, to the part that has the least.

    Args: tests: the id and the seconds of each.
    """
    half = sum(seconds for _, seconds in tests) / count / 2
    pieces: list[tuple[float, list[int]]] = []
    files: dict[str, list[int]] = {}
    for index, (test, _) in enumerate(tests):
        files.setdefault(test.partition("::")[0], []).append(index)
    for indices in files.values():
        total = 0.0
        numbered: dict[int, list[int]] = {}
        for index in indices:
            numbered.setdefault(int(total / half) if half else 0, []).append(index)
            total += tests[index][1]
        pieces += [(sum(tests[x][1] for x in piece), piece) for piece in numbered.values()]
    parts: list[tuple[float, list[int]]] = [(0.0, []) for _ in range(count)]
    for seconds, piece in sorted(pieces, key=lambda each: (-each[0], each[1])):
        lightest = min(range(count), key=lambda part: parts[part][0])
        total, members = parts[lightest]
        parts[lightest] = (total + seconds, members + piece)
    return set(parts[number - 1][1])
