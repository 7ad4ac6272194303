"""Page of the records of kind "classes": a classifier that is no language model."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.evidence.figures import Chart, Curve
from benchmarks.evidence.markdown import number, table, value_of
from benchmarks.evidence.methods import look_of, title_of
from benchmarks.evidence.records import Record, Row

TITLE = "And a classifier that is no language model?"
TRAINED = {"step": "step", "seconds": "seconds", "loss": "loss", "top1": "share recognised"}
TIMED = {
    "median_ms": "ms",
    "peak_mib": "peak MiB",
    "grad_hidden_error": "hidden gradient, to dense",
    "grad_weight_error": "weight gradient, to dense",
}


def introduction(records: Sequence[Record]) -> list[str]:
    parts = []
    for record in records:
        rows = {str(row["method"]): row for row in _of(record, "loss") if "failed" not in row}
        if {"filtered", "dense"} <= rows.keys():
            time, memory = (
                value_of(rows["filtered"], key) / value_of(rows["dense"], key)
                for key in ("median_ms", "peak_mib")
            )
            parts.append(
                f"{record.title}: `filtered` takes {time:.2f} times dense's time in {memory:.2f} "
                "of its memory."
            )
    return [
        *parts,
        "Recognising instances among many classes: the share of fresh views that are recognised "
        "among all classes. Loss and gradients, timed alone, are of one batch.",
    ]


def section(record: Record) -> list[str]:
    last = {str(row["method"]): row for row in _of(record, "training")}
    rows = [
        [title_of(method), *(number(row.get(key), 4) for key in TRAINED)]
        for method, row in last.items()
    ]
    parts = [table(("at the end", *TRAINED.values()), rows)] if rows else []
    rows = [
        [title_of(str(row["method"])), *(number(row.get(key)) for key in TIMED)]
        for row in _of(record, "loss")
        if "failed" not in row
    ]
    return [*parts, table(("loss and gradients", *TIMED.values()), rows)] if rows else parts


def figures(records: Sequence[Record]) -> dict[str, list[Chart]]:
    figures = {}
    for record in records:
        training = _of(record, "training")
        methods = dict.fromkeys(str(row["method"]) for row in training)
        figures[record.name] = [
            Chart(
                name,
                "views shown",
                name,
                [
                    Curve(
                        title_of(method),
                        [
                            (value_of(row, "views"), value_of(row, key))
                            for row in training
                            if row["method"] == method and key in row
                        ],
                        look_of(method),
                    )
                    for method in methods
                ],
            )
            for key, name in (("top1", "share recognised"), ("loss", "loss"))
        ]
    return figures


def _of(record: Record, part: str) -> list[Row]:
    return [row for row in record.rows if row["part"] == part]
