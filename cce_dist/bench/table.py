"""A benchmark's rows as a CSV file and as a table on the terminal."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

Row = Mapping[str, str]


def median_and_spread(seconds: Sequence[float]) -> dict[str, str]:
    """Median and the 10th and 90th percentile, in milliseconds."""
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    return {
        "median_ms": f"{1e3 * statistics.median(seconds):.1f}",
        "p10_ms": f"{1e3 * deciles[0]:.1f}",
        "p90_ms": f"{1e3 * deciles[-1]:.1f}",
    }


def show(title: str, rows: Sequence[Row], console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def write_csv(path: Path, rows: Sequence[Row], common: Mapping[str, str]) -> None:
    """One line a row; what all rows share (machine, shape, command) stands in every line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, [*rows[0], *common])
        writer.writeheader()
        writer.writerows({**row, **common} for row in rows)
