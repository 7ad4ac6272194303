"""Report section of a record of kind "classes": a classifier that is no language model."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.evidence.charts import Axis, Chart, Line
from benchmarks.evidence.findings import is_tie, marked
from benchmarks.evidence.methods import OURS, look_of, title_of
from benchmarks.evidence.page import Block, Figures, Table, Words, number
from benchmarks.evidence.records import Record, Row

COMPARED = {"median_ms": "time", "peak_mib": "memory"}


def blocks(record: Record) -> list[Block]:
    result: list[Block] = [
        Words(
            "Recognising instances among many classes: *top1* is the share of fresh views that are "
            "recognised among all classes. Loss and gradients, timed alone, are of one batch."
        )
    ]
    training = _of(record, "training")
    charts = []
    methods = list(dict.fromkeys(str(row["method"]) for row in training))
    for key, title in (("top1", "share recognised"), ("loss", "loss")):
        lines = []
        for method in methods:
            mine = [row for row in training if row["method"] == method and key in row]
            points = [(_value(row, "views"), _value(row, key)) for row in mine]
            look = look_of(method)
            lines.append(Line(title_of(method), points, look.colour, dashed=look.dashed))
        if any(line.points for line in lines):
            charts.append(Chart(title, Axis("views shown"), Axis(title), lines))
    if charts:
        result.append(Figures(record.name, charts))
    if training:
        columns = ("step", "views", "seconds", "loss", "top1")
        rows = []
        for method in methods:
            last = [row for row in training if row["method"] == method][-1]
            rows.append([title_of(method), *(number(last.get(key), 4) for key in columns)])
        result.append(Table(("at the end", *columns), rows))
    compared = _of(record, "loss")
    if compared:
        keys = ("median_ms", "peak_mib", "loss", "grad_hidden_error", "grad_weight_error")
        rows = [
            [
                title_of(str(row["method"])),
                *(
                    str(row["failed"]) if "failed" in row and not place else number(row.get(key))
                    for place, key in enumerate(keys)
                ),
            ]
            for row in compared
        ]
        names = ("ms", "peak MiB", "loss", "hidden gradient, to dense", "weight gradient, to dense")
        result.append(Table(("loss and gradients", *names), rows))
    return result


def summary(records: Sequence[Record]) -> list[Block]:
    """Returns a table of our methods' time and memory, relative to dense."""
    rows_shown = []
    for record in records:
        rows = {str(row["method"]): row for row in _of(record, "loss") if "failed" not in row}
        dense = rows.get("dense")
        for name in (name for name in rows if name in OURS and dense is not None):
            cells = []
            for key in COMPARED:
                ours, theirs = _value(rows[name], key), _value(dense or {}, key)
                ratio = ours / theirs if ours and theirs else None
                worse = ratio is not None and ratio > 1 and not is_tie(ratio)
                cells.append("" if ratio is None else marked(f"{ratio:.3g}", worse))
            rows_shown.append([record.title, title_of(name), *cells])
    columns = ("of dense's", "method", *COMPARED.values())
    return [Table(columns, rows_shown)] if rows_shown else []


def _of(record: Record, part: str) -> list[Row]:
    return [row for row in record.rows if row["part"] == part]


def _value(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, float | int) else 0.0
