"""Page of the records of kind "fidelity"."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.evidence.convergence import GROUPS
from benchmarks.evidence.figures import Chart, Curve
from benchmarks.evidence.markdown import number, table, value_of
from benchmarks.evidence.methods import look_of, title_of
from benchmarks.evidence.records import Record, Row

TITLE = "How far are the gradients from right?"
DENSE = "dense"
GRADIENTS = {"grad_hidden": "hidden gradient", "grad_weight": "weight gradient"}


class Measured(NamedTuple):
    """Time and errors of a method at its own threshold; refused 8-bit logits have none."""

    milliseconds: float
    hidden: float  # errors over all tokens
    weight: float
    rarest: float  # error of the weight's rows of the rarest tenth; 0: unknown


# The numbers by which methods are compared, and their names.
ASPECTS: Mapping[str, Callable[[Measured], float]] = {
    "time of loss and gradients": lambda measured: measured.milliseconds,
    "error of the hidden gradient": lambda measured: measured.hidden,
    "error of the weight gradient": lambda measured: measured.weight,
    "error of the weight's rows of the rarest tenth": lambda measured: measured.rarest,
}


def introduction(records: Sequence[Record]) -> list[str]:
    parts = [f"{record.title}: {sentence}" for record in records if (sentence := _sentence(record))]
    parts.append(
        "Errors are relative, in the Frobenius norm, against gradients in float64. The tables have "
        "each method at its own threshold, over dense: below 1 is better; dense's row is absolute "
        "(ms, errors). Other thresholds are in the figures, and with cosines and all tenths in the "
        "rows. Figures show the last captured step: down and to the left is better."
    )
    return parts


def _sentence(record: Record) -> str:
    """Returns the range of `filtered`'s numbers over dense's, over the steps of training."""
    parts = []
    for name, value in ASPECTS.items():
        ratios = [
            value(by_method["filtered"]) / value(by_method[DENSE])
            for by_method in measured_of(record).values()
            if {"filtered", DENSE} <= by_method.keys() and value(by_method[DENSE])
        ]
        if ratios:
            parts.append(f"{name} {min(ratios):.2f} to {max(ratios):.2f}")
    return f"`filtered`, over dense: {'; '.join(parts)}." if parts else ""


def section(record: Record) -> list[str]:
    measured = measured_of(record)
    methods = list(dict.fromkeys(method for each in measured.values() for method in each))
    parts = []
    for name, value in ASPECTS.items():
        rows = []
        for method in methods:
            cells = [_cell(each, method, value) for each in measured.values()]
            if any(cells):
                rows.append([title_of(method), *cells])
        if rows:
            parts.append(table((name, *measured), rows))
    failed = {
        title_of(str(row["method"])): str(row["failed"]) for row in record.rows if "failed" in row
    }
    parts += [f"{method} did not run: {reason}." for method, reason in failed.items()]
    refused = [_name(row) for row in record.rows if _is_default(row) and not _was_screened(row)]
    if refused:
        parts.append(
            f"{title_of('screened')}: 8 bits were not enough at {', '.join(refused)}; logits were "
            "computed in full, and the cell is empty."
        )
    return parts


def _cell(
    by_method: Mapping[str, Measured], method: str, value: Callable[[Measured], float]
) -> str:
    if method not in by_method or not value(by_method[method]):
        return ""
    error = value(by_method[method])
    if method == DENSE or DENSE not in by_method:
        return number(error)
    return f"{error / value(by_method[DENSE]):.2f}"


def measured_of(record: Record) -> dict[str, dict[str, Measured]]:
    """Returns the numbers of each method, by moment of training, then by method."""
    steps = {_name(row): int(row.get("step") or 0) for row in record.rows}
    moments = sorted(steps, key=lambda name: (steps[name], name))
    return {
        moment: _measured([row for row in record.rows if _name(row) == moment])
        for moment in moments
    }


def _measured(rows: Sequence[Row]) -> dict[str, Measured]:
    by_method = {}
    for row in rows:
        keys = ("median_ms", "grad_hidden_error", "grad_weight_error")
        if _is_default(row) and _was_screened(row) and all(key in row for key in keys):
            milliseconds, hidden, weight = (value_of(row, key) for key in keys)
            rarest = _in_rarest(rows, row)
            by_method[str(row["method"])] = Measured(milliseconds, hidden, weight, rarest)
    return by_method


def _is_default(row: Row) -> bool:
    return row.get("group") == "all" and ("threshold" not in row or row.get("default") is True)


def _was_screened(row: Row) -> bool:
    return row.get("screened") is not False


def _name(row: Row) -> str:
    return f"step {row['step']}" if "step" in row else str(row["inputs"])


def _in_rarest(rows: Sequence[Row], of: Row) -> float:
    """Returns the weight gradient's error in the rows of the rarest tenth; 0: unknown."""
    for row in rows:
        same = all(row.get(key) == of.get(key) for key in ("method", "threshold"))
        if same and row.get("group") == "10":
            return value_of(row, "grad_weight_error")
    return 0.0


def figures(records: Sequence[Record]) -> dict[str, list[Chart]]:
    figures = {}
    for record in records:
        moment = list(measured_of(record))[-1]
        rows = [row for row in record.rows if _name(row) == moment]
        figures[record.name] = [
            *(_over_time(rows, key, f"{moment}: {name}") for key, name in GRADIENTS.items()),
            _by_group(rows, f"{moment}: weight gradient by frequency"),
        ]
    return figures


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["method"]) for row in rows if "grad_weight_error" in row))


def _over_time(rows: Sequence[Row], gradient: str, title: str) -> Chart:
    """Returns the error over the time, a curve for each method over its thresholds."""
    curves = []
    for method in _methods(rows):
        mine = [row for row in rows if row["method"] == method and row.get("group") == "all"]
        mine.sort(key=lambda row: value_of(row, "threshold"))
        points = [(value_of(row, "median_ms"), value_of(row, f"{gradient}_error")) for row in mine]
        points = [point for point in points if min(point) > 0]
        curves.append(Curve(title_of(method), points, look_of(method)))
    return Chart(title, "milliseconds", "relative error", curves, ("log", "log"))


def _by_group(rows: Sequence[Row], title: str) -> Chart:
    groups = [group for group in GROUPS if any(row.get("group") == group for row in rows)]
    curves = []
    for method in _methods(rows):
        points = [
            (float(groups.index(str(row["group"]))), value_of(row, "grad_weight_error"))
            for row in rows
            if row["method"] == method
            and ("threshold" not in row or row.get("default") is True)
            and value_of(row, "grad_weight_error") > 0
        ]
        curves.append(Curve(title_of(method), sorted(points), look_of(method)))
    x = "tenths, the most frequent ids first"
    return Chart(title, x, "relative error", curves, ("linear", "log"), groups)
