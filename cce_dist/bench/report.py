"""Where a benchmark's rows go: terminal, CSV, JSON, plots."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from .table import Cells, show, write_csv, write_json


class Report:
    """Rows of one case (inputs and shape) after another; files always hold all there are."""

    def __init__(
        self,
        machine: Mapping[str, str],
        csv_path: Path | None,
        json_path: Path | None,
        plots: Path | None,
    ) -> None:
        self.machine = machine
        self.csv_path, self.json_path, self.plots = csv_path, json_path, plots
        self.cases: list[tuple[Mapping[str, str | int], Sequence[Cells]]] = []
        self.current: tuple[Mapping[str, str | int], Sequence[Cells]] | None = None
        self.console = Console(width=None if sys.stdout.isatty() else 220)

    @property
    def rows(self) -> list[Cells]:
        cases = [*self.cases, self.current] if self.current else self.cases
        return [{**row, **description} for description, rows in cases for row in rows]

    def add(self, description: Mapping[str, str | int], rows: Sequence[Cells]) -> None:
        """Replace the rows of the case that is being measured, and write all files."""
        self.current = (description, rows)
        if self.csv_path is not None:
            write_csv(self.csv_path, self.rows, self.machine)
        if self.json_path is not None:
            write_json(self.json_path, self.rows, self.machine)

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False)

    def finish_case(self) -> None:
        """Show the case that was measured."""
        if self.current is None:
            return
        description, rows = self.current
        self.cases.append(self.current)
        self.current = None
        title = ", ".join(f"{key} {value}" for key, value in description.items())
        failures = [
            (row.get("method") or row["loss"], row["failed"]) for row in rows if row.get("failed")
        ]
        if shown := [_shown(row) for row in rows if not row.get("failed")]:
            show(title, shown, self.console)
        for name, reason in failures:
            self.say(f"{name} failed: {reason}")
        self.say(", ".join(f"{key} {value}" for key, value in self.machine.items()))
        if self.plots is not None:
            from .plots import plot

            plot(self.rows, self.plots)


def _shown(row: Cells) -> Cells:
    return {name: value for name, value in row.items() if name != "failed"}
