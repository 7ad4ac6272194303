"""The table of `cce-dist bench heads`, and what it comes to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.evidence.markdown import table

from .heads import HEADS, KINDS_OF_ALL, STEPS

SHOWN = ("filtered", "screened")
LARGE_VOCABULARY = 100_000

Row = Mapping[str, str]
# A head, a number of tokens, and a kind of inputs.
Cell = tuple[str, int, str]


def describe(rows: Sequence[Row]) -> str:
    """Returns Markdown: the table, a line for each head and number of tokens, and its conclusions.

    A number is the fastest exact peer's time over ours. Inputs that were not measured leave a cell
    empty; "-": no exact peer could run.
    """
    cells: dict[Cell, dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row["head"], int(row["N"]), row["inputs"]), {})[row["method"]] = row
    ratios = {
        (cell, method): float(ratio)
        for cell, by_method in cells.items()
        for method in SHOWN
        if method in by_method and (ratio := by_method[method]["times_faster"])
    }
    return "\n".join([_table(cells, ratios), "", *_conclusions(cells, ratios), *_failures(rows)])


def _table(
    cells: Mapping[Cell, Mapping[str, Row]], ratios: Mapping[tuple[Cell, str], float]
) -> str:
    kinds = _sorted({kind for _, _, kind in cells}, (*KINDS_OF_ALL, *STEPS))
    heads = _sorted({head for head, _, _ in cells}, HEADS)
    columns = [(kind, method) for kind in kinds for method in SHOWN]

    def text(cell: Cell, method: str) -> str:
        if (cell, method) in ratios:
            return f"{ratios[cell, method]:.2f}"
        row = cells.get(cell, {}).get(method)
        return "" if row is None else "failed" if row["failed"] else "-"

    sizes = {
        head: f"{row['V']}, {row['D']}" for (head, _, _), m in cells.items() for row in m.values()
    }
    lines = [
        [head, sizes[head], f"{tokens:,}", *(text((head, tokens, k), m) for k, m in columns)]
        for head in heads
        for tokens in sorted({tokens for name, tokens, _ in cells if name == head})
    ]
    least = [
        _number(min, [r for (cell, m), r in ratios.items() if (cell[2], m) == column])
        for column in columns
    ]
    names = [f"{kind}, {method}" for kind, method in columns]
    return table(["head", "V, D", "tokens", *names], [*lines, ["least", "", "", *least]])


def _conclusions(
    cells: Mapping[Cell, Mapping[str, Row]], ratios: Mapping[tuple[Cell, str], float]
) -> list[str]:
    large = {cell for cell, rows in cells.items() if int(_any(rows)["V"]) >= LARGE_VOCABULARY}
    lines = []
    for method in SHOWN:
        mine = {cell: ratio for (cell, name), ratio in ratios.items() if name == method}
        for title, prefixes in (("captured", ("step-",)), ("captured and zipf", ("step-", "zipf"))):
            some = [r for cell, r in mine.items() if cell in large and cell[2].startswith(prefixes)]
            lines.append(
                f"- {method}, V >= {LARGE_VOCABULARY:,}, {title}: median "
                f"{_number(statistics.median, some)}, least {_number(min, some)} of {len(some)}"
            )
        slow = [f"{_name(cell)} {ratio:.2f}" for cell, ratio in mine.items() if round(ratio, 2) < 1]
        lines.append(f"- {method} below 1.00: {'; '.join(slow) or 'nowhere'}")
    slower = [
        f"{_name(cell)} {ratio / ratios[cell, 'filtered']:.2f}"
        for (cell, method), ratio in ratios.items()
        if method == "screened" and round(ratio / ratios.get((cell, "filtered"), ratio), 2) < 1
    ]
    return [*lines, f"- screened slower than filtered: {'; '.join(slower) or 'nowhere'}"]


def _failures(rows: Iterable[Row]) -> list[str]:
    """Returns a line for each method and reason, with the cells where it failed."""
    cells: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["failed"]:
            name = _name((row["head"], int(row["N"]), row["inputs"]))
            cells.setdefault((row["method"], row["failed"]), []).append(name)
    return [
        f"- {method} failed in {len(names)} cells, first {names[0]}: {reason}"
        for (method, reason), names in cells.items()
    ]


def _sorted(names: Iterable[str], order: Sequence[str]) -> list[str]:
    """Returns the names in that order, then the others."""
    places = {name: place for place, name in enumerate(order)}
    return sorted(names, key=lambda name: (places.get(name, len(places)), name))


def _number(function: Callable[[list[float]], float], ratios: list[float]) -> str:
    return f"{function(ratios):.2f}" if ratios else "-"


def _name(cell: Cell) -> str:
    return "{} {:,} {}".format(*cell)


def _any(rows: Mapping[str, Row]) -> Row:
    return next(iter(rows.values()))
