"""Report of a benchmark's rows: a table on the terminal, a CSV file, a JSON file, plots."""

from __future__ import annotations

import csv
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .methods import METHODS

Cells = Mapping[str, Any]

# In plots, rows with the same values of CASE share a panel, and our methods have a colour.
CASE = ("inputs", "N", "ignored", "V", "D", "dtype")
OURS_COLOUR, PEER_COLOUR = "#c23b22", "#4a6fa5"


# Formats of the columns of floats; other names that end with _ms have ".2f", and the rest ".1e".
FORMATS = {
    name: spec
    for spec, names in {
        ".0f": "over_gradients_mib peak_extra_mib sent_mib tokens_per_s",
        ".1f": "calls seconds seconds_to_loss",
        ".2f": "of_bound of_dense of_fastest_peer of_matmul of_roofline peak_gib times_faster "
        "with_communication",
        ".3f": "kernel_ms of_sum",
        ".4f": "clipped entropy first_reward kept kl last_reward least_kept least_kept_alone "
        "mean_loss most_kept most_kept_alone reward",
        ".3g": "tflop_per_s",
    }.items()
    for name in names.split()
}


def format_cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    text = format(value, FORMATS.get(name, ".2f" if name.endswith("_ms") else ".1e"))
    return text.removeprefix("-") if float(text) == 0 else text


def percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median and the 10th and 90th percentile in milliseconds."""
    # Repeat a single time: quantiles() needs two.
    values = sorted(1e3 * second for second in seconds) * (2 if len(seconds) == 1 else 1)
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return {"median_ms": statistics.median(values), "p10_ms": deciles[0], "p90_ms": deciles[-1]}


def show(title: str, rows: Sequence[Cells], console: Console) -> None:
    """Prints the rows as a table; columns that are empty in every row are left out."""
    names = [name for name in rows[0] if any(format_cell(name, row[name]) != "" for row in rows)]
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(names):
        table.add_column(name, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(format_cell(name, row[name]) for name in names))
    console.print(table)


def write_csv(path: Path, rows: Sequence[Cells], common: Mapping[str, str]) -> None:
    """Writes the rows as CSV, a line for each; every line repeats `common` (machine, command)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf8") as file:
        writer = csv.DictWriter(file, [*rows[0], *common])
        writer.writeheader()
        for row in rows:
            cells = {name: format_cell(name, value) for name, value in row.items()}
            writer.writerow({**cells, **common})


def write_json(path: Path, rows: Sequence[Cells], common: Mapping[str, str]) -> None:
    """Writes {**common, "rows": [...]} as JSON, with numbers unrounded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**common, "rows": list(rows)}, indent=1) + "\n", encoding="utf8")


def plot(rows: Sequence[Cells], folder: Path) -> list[Path]:
    """Writes folder/time-error.png and folder/time-memory.png from rows of loss and gradients."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [row for row in rows if row["part"] == "loss+grad" and not row["failed"]]

    def error(row: Cells) -> float | None:
        if row["grad_hidden_error"] is None:
            return None
        return max(row["grad_hidden_error"], row["grad_weight_error"])

    paths = [folder / "time-error.png", folder / "time-memory.png"]
    _draw(drawn, error, "larger relative error of the two gradients", paths[0])
    _draw(drawn, lambda row: row["peak_extra_mib"], "peak extra memory, MiB", paths[1])
    return paths


def _draw(
    rows: Sequence[Cells], value: Callable[[Cells], float | None], label: str, path: Path
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ours = [method.name for method in METHODS.values() if method.is_ours]
    cases = list(dict.fromkeys(tuple(row[name] for name in CASE) for row in rows))
    figure = Figure(figsize=(7 * max(len(cases), 1), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for number, case in enumerate(cases):
        axes = figure.add_subplot(1, len(cases), number + 1)
        for place, row in enumerate(sorted(rows, key=lambda row: row["median_ms"])):
            height = value(row)
            if tuple(row[name] for name in CASE) != case or not height:
                continue
            colour = OURS_COLOUR if row["method"] in ours else PEER_COLOUR
            axes.scatter(row["median_ms"], height, color=colour, s=24)
            # Methods often share time and error: shift the labels so that they don't overlap.
            axes.annotate(
                row["method"],
                (row["median_ms"], height),
                xytext=(4, (3, -10, 13)[place % 3]),
                textcoords="offset points",
                fontsize=7,
                color=colour,
            )
        axes.set(xscale="log", yscale="log", xlabel="loss and gradients, ms", ylabel=label)
        axes.set_title(", ".join(f"{n} {v}" for n, v in zip(CASE, case, strict=True)), fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)


class Report:
    """Rows of one case (inputs and shape) after another; files always have all rows so far."""

    def __init__(
        self,
        machine: Mapping[str, str],
        csv_path: Path | None = None,
        json_path: Path | None = None,
        plots: Path | None = None,
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
        """Replaces the rows of the current case, and writes all files."""
        self.current = (description, rows)
        if self.csv_path is not None:
            write_csv(self.csv_path, self.rows, self.machine)
        if self.json_path is not None:
            write_json(self.json_path, self.rows, self.machine)

    def say(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False)

    def finish_case(self, shown: Sequence[Cells] | None = None) -> None:
        """Shows the rows of the current case, or those `shown` in their place, and ends it."""
        if self.current is None:
            return
        description, rows = self.current
        rows = rows if shown is None else shown
        self.cases.append(self.current)
        self.current = None
        title = ", ".join(f"{key} {value}" for key, value in description.items())
        failures = [
            (row.get("method") or row["loss"], row["failed"]) for row in rows if row.get("failed")
        ]
        if shown := [row for row in rows if not row.get("failed")]:
            show(title, shown, self.console)
        for name, reason in failures:
            self.say(f"{name} failed: {reason}")
        self.say(", ".join(f"{key} {value}" for key, value in self.machine.items()))
        if self.plots is not None:
            plot(self.rows, self.plots)
