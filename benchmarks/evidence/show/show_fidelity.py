"""Page of the records of kind "fidelity"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.evidence.convergence import GROUPS
from benchmarks.evidence.figures import Chart, Curve
from benchmarks.evidence.markdown import number, table, value_of
from benchmarks.evidence.methods import look_of, title_of
from benchmarks.evidence.records import Record, Row

TITLE = "How far are the gradients from right?"
DENSE = "dense"
GRADIENTS = {"grad_hidden": "hidden gradient", "grad_weight": "weight gradient"}


# The numbers by which methods are compared: their names, and the group and key of each.
ASPECTS = {
    "time of loss and gradients": ("all", "median_ms"),
    "error of the hidden gradient": ("all", "grad_hidden_error"),
    "error of the weight gradient": ("all", "grad_weight_error"),
    "error of the weight's rows of the rarest tenth": ("10", "grad_weight_error"),
}
# A method's numbers at its own threshold; refused 8-bit logits have none.
Measured = dict[str, float]


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
    for aspect in ASPECTS:
        ratios = [
            by_method["filtered"].get(aspect, 0.0) / by_method[DENSE][aspect]
            for by_method in measured_of(record).values()
            if "filtered" in by_method and by_method.get(DENSE, {}).get(aspect)
        ]
        if ratios:
            parts.append(f"{aspect} {min(ratios):.2f} to {max(ratios):.2f}")
    return f"`filtered`, over dense: {'; '.join(parts)}." if parts else ""


def section(record: Record) -> list[str]:
    measured = measured_of(record)
    methods = dict.fromkeys(method for each in measured.values() for method in each)
    parts = []
    for aspect in ASPECTS:
        rows = []
        for method in methods:
            cells = [_cell(each, method, aspect) for each in measured.values()]
            if any(cells):
                rows.append([title_of(method), *cells])
        if rows:
            parts.append(table((aspect, *measured), rows))
    failed = {
        title_of(str(row["method"])): str(row["failed"]) for row in record.rows if "failed" in row
    }
    parts += [f"{method} did not run: {reason}." for method, reason in failed.items()]
    refused = [moment for moment, _ in _refused(record)]
    if refused:
        parts.append(
            f"{title_of('screened')}: 8 bits were not enough at {', '.join(refused)}; logits were "
            "computed in full, and the cell is empty."
        )
    return parts


def _cell(by_method: Mapping[str, Measured], method: str, aspect: str) -> str:
    value, dense = (by_method.get(name, {}).get(aspect) for name in (method, DENSE))
    if not value:
        return ""
    return number(value) if method == DENSE or not dense else f"{value / dense:.2f}"


def measured_of(record: Record) -> dict[str, dict[str, Measured]]:
    """Returns the numbers of each method, by moment of training, then by method."""
    steps = {_name(row): int(row.get("step") or 0) for row in record.rows}
    measured: dict[str, dict[str, Measured]] = {
        moment: {} for moment in sorted(steps, key=lambda name: (steps[name], name))
    }
    refused = _refused(record)
    for row in record.rows:
        moment, method = _name(row), str(row["method"])
        for aspect, (group, key) in ASPECTS.items():
            is_it = _is_default(row) and row["group"] == group and key in row
            if is_it and (moment, method) not in refused:
                measured[moment].setdefault(method, {})[aspect] = value_of(row, key)
    return measured


def _refused(record: Record) -> list[tuple[str, str]]:
    """Returns moments and methods at which 8 bits were not enough."""
    return [
        (_name(row), str(row["method"]))
        for row in record.rows
        if _is_default(row) and row.get("screened") is False
    ]


def _is_default(row: Row) -> bool:
    return "threshold" not in row or row.get("default") is True


def _name(row: Row) -> str:
    return f"step {row['step']}" if "step" in row else str(row["inputs"])


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
            and _is_default(row)
            and value_of(row, "grad_weight_error") > 0
        ]
        curves.append(Curve(title_of(method), sorted(points), look_of(method)))
    x = "tenths, the most frequent ids first"
    return Chart(title, x, "relative error", curves, ("linear", "log"), groups)
