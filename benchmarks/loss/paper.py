"""New measurements of tables 1, A1 and A2 of Cut Cross-Entropy, arXiv:2411.09009."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.loss import Settings, measure_all
from cce_dist.bench.machine import Part
from cce_dist.bench.methods import Method
from cce_dist.bench.report import Cells, Report, format_cell

PARTS: tuple[Part, ...] = ("loss", "gradient", "loss+grad")


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper.

    Args:
        ignored_fraction: ignored share of the targets. The paper's text has about 0.64: its dense
            time falls from 208 to 75 ms if ignored tokens are removed first.
    """

    shapes: tuple[str, ...]
    ignored_fraction: float = 0.0
    compact: bool = False


TABLES = {
    "1": PaperTable(("gemma2-2b",)),
    "A1": PaperTable(("gemma2-2b",), ignored_fraction=0.64, compact=True),
    "A2": PaperTable(("gemma2-9b", "gemma2-27b", "llama3-8b", "mistral-nemo", "phi3.5-mini")),
}


@dataclass(frozen=True)
class PaperCase:
    table: str
    name: str  # the files' name, without suffix
    make: Callable[[], BenchInputs]


def bench_paper(
    cases: Sequence[PaperCase],
    methods: Sequence[Method],
    settings: Settings,
    machine: Mapping[str, str],
    folder: Path,
    *,
    failed: Mapping[str, str] | None = None,
) -> list[Path]:
    """Writes folder/<name>.csv, .json and .md for each case; returns the paths of the .md files."""
    written = []
    for case in cases:
        table = TABLES[case.table]
        csv_path, json_path = (folder / f"{case.name}.{suffix}" for suffix in ("csv", "json"))
        report = Report(machine, csv_path, json_path, None)
        chosen = replace(settings, parts=PARTS, compact=table.compact)
        measure_all(
            [case.make], methods, chosen, report, failed or {}, labels={"table": case.table}
        )
        path = folder / f"{case.name}.md"
        path.write_text(markdown(report.rows, machine), encoding="utf8")
        written.append(path)
    return written


def markdown(rows: Sequence[Cells], machine: Mapping[str, str]) -> str:
    """Returns a table with the paper's columns, and beside them the errors.

    The paper's columns are memory and time of the loss, of the gradient, and of both.
    """
    first = rows[0]
    lines = [
        f"Table {first['table']}: {first['inputs']}, N={first['N']} ({first['ignored']} ignored), "
        f"V={first['V']}, D={first['D']}, {first['dtype']}. {machine['device']}, torch "
        f"{machine['torch']}, {machine['date']}. `{machine['command']}`",
        "",
        "| method | loss MiB | ms | gradient MiB | ms | loss+grad MiB | ms | of roofline "
        "| grad_hidden | grad_weight |",
        "|" + "---|" * 10,
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        parts = {row["part"]: row for row in rows if row["method"] == method}
        any_part = next(iter(parts.values()))
        if any_part["failed"]:
            reason = any_part["failed"].replace("|", "\\|")
            lines.append(f"| {method} | failed: {reason} |" + " |" * 8)
            continue
        cells = [method]
        for part in PARTS:
            for name in ("peak_extra_mib", "median_ms"):
                cells.append(_cell(parts.get(part), name))
        cells.append(_cell(parts.get("loss+grad"), "of_roofline"))
        cells += [_cell(any_part, name) for name in ("grad_hidden_error", "grad_weight_error")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Cells | None, name: str) -> str:
    return "" if row is None else format_cell(name, row[name])
