"""Markdown of the evidence's pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.evidence.records import Record, Row


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def number(value: object, digits: int = 3) -> str:
    """Returns a table's cell for `value`; an empty one for None."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    if value == 0 or 0.01 <= abs(value) < 10**digits:
        return f"{value:.{digits}g}"
    return f"{value:.{digits - 1}e}" if abs(value) < 0.01 else f"{value:.0f}"


def value_of(row: Row, key: str) -> float:
    """Returns a row's number; 0 where it has none."""
    value = row.get(key)
    return float(value) if isinstance(value, float | int) else 0.0


def provenance(record: Record, rows: Path) -> list[str]:
    """Returns the paragraphs that say where a record's numbers come from.

    Args:
        rows: the record's file, from the page.
    """
    machine = ", ".join(
        text if key == "device" else f"{key} {text}" for key, text in record.machine.items()
    )
    seeds = ", ".join(map(str, record.seeds)) or "none"
    settings = ", ".join(f"{key} {value}" for key, value in record.settings.items()) or "none"
    return [
        f"{machine}; commit {record.commit}, {record.date}; seeds: {seeds}; settings: {settings}; "
        f"[rows]({rows.as_posix()}).",
        f"    {record.command}",
    ]
