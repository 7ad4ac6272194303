"""Report section of a record of kind "fidelity"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.evidence.charts import Axis, Chart, Line
from benchmarks.evidence.convergence import GROUPS, describe_group
from benchmarks.evidence.findings import is_tie, marked, span
from benchmarks.evidence.methods import ABLATIONS, OURS, look_of, title_of
from benchmarks.evidence.page import Block, Figures, Points, Table, Words, number
from benchmarks.evidence.records import Cell, Record, Row

# The reference; its rows say how many tokens a group has.
GOLDEN = "float64"
GRADIENTS = {"grad_hidden": "hidden gradient", "grad_weight": "weight gradient"}


class Measured(NamedTuple):
    """Time and errors of a method at its own threshold; refused 8-bit logits have none."""

    milliseconds: float
    hidden: float  # errors over all tokens
    weight: float
    rarest: float | None  # error of the weight's rows of the rarest tenth


def blocks(record: Record) -> list[Block]:
    result: list[Block] = [
        Words(
            "Errors are relative, in the Frobenius norm, against gradients in float64. A curve is "
            "a method over its threshold; the mark is the threshold that it takes by itself. "
            "Down and to the left is better."
        )
    ]
    charts = [
        chart for name in _moments(record) for chart in _time_error(_of(record.rows, name), name)
    ]
    if charts:
        result.append(Figures(f"{record.name}-time", charts))
    by_group = [
        chart for name in _moments(record) for chart in _by_group(_of(record.rows, name), name)
    ]
    if by_group:
        result.append(Figures(f"{record.name}-groups", by_group))
    for name in _moments(record):
        result += [Words(f"**{name}**"), _table(_of(record.rows, name))]
        failed = [
            f"{title_of(str(row['method']))} did not run: {row['failed']}"
            for row in _of(record.rows, name)
            if "failed" in row
        ]
        if failed:
            result.append(Points(failed))
        if (cosines := _cosines(_of(record.rows, name))) is not None:
            result.append(cosines)
        if in_full := _in_full(_of(record.rows, name)):
            result.append(Points(in_full))
    return result


def _in_full(rows: Sequence[Row]) -> list[str]:
    """Returns a sentence for each method whose 8-bit logits were refused at some thresholds.

    The method's rows at these thresholds show full logits.
    """
    asked = [row for row in rows if "screened" in row]
    sentences = []
    for method in dict.fromkeys(str(row["method"]) for row in asked):
        mine = [row for row in asked if row["method"] == method]
        refused = [number(row.get("threshold")) for row in mine if not row["screened"]]
        if refused:
            sentences.append(
                f"{title_of(method)}: 8 bits were not enough at {len(refused)} of {len(mine)} "
                f"thresholds ({', '.join(refused)}), where logits are full"
            )
    return sentences


# The numbers by which methods are compared, and their names.
ASPECTS: Mapping[str, Callable[[Measured], float | None]] = {
    "time": lambda measured: measured.milliseconds,
    "error of the hidden gradient": lambda measured: measured.hidden,
    "of the weight gradient": lambda measured: measured.weight,
    "of its rows of the rarest tenth": lambda measured: measured.rarest,
}


def summary(records: Sequence[Record]) -> list[Block]:
    """Returns tables of our methods over every other: time, and the error of each gradient.

    Each method has its own threshold.
    """
    result: list[Block] = []
    for record in records:
        measured = measured_of(record)
        methods = list(dict.fromkeys(method for each in measured.values() for method in each))
        rivals = [method for method in methods if method not in (*OURS, *ABLATIONS)]
        rows = [
            [title_of(ours), title_of(rival), *_compared(measured, ours, rival)]
            for ours in OURS
            if ours in methods
            for rival in rivals
        ]
        if rows:
            result += [Words(record.title), Table(("ours", "over", *ASPECTS), rows)]
        refused = [
            _name(row) for row in record.rows if _is_default(row) and row.get("screened") is False
        ]
        if refused:
            text = f"{title_of('screened')}: full logits at {_joined(refused)}"
            result.append(Words(marked(text, True)))
    return result


def _compared(measured: Mapping[str, Mapping[str, Measured]], ours: str, rival: str) -> list[str]:
    """Returns a cell for each aspect: the ratios where ours is no worse, then those where it is.

    If ours is worse only at some moments of training, the cell names them.
    """
    cells = []
    for value in ASPECTS.values():
        ratios = {
            name: first / second
            for name, by_method in measured.items()
            if ours in by_method and rival in by_method
            if (first := value(by_method[ours])) and (second := value(by_method[rival]))
        }
        worse = {name: ratio for name, ratio in ratios.items() if ratio > 1 and not is_tie(ratio)}
        better = [ratio for name, ratio in ratios.items() if name not in worse]
        parts = [span(better)] if better else []
        if worse:
            at = f" at {_joined(worse)}" if better else ""
            parts.append(marked(span(worse.values()), True) + at)
        cells.append("; ".join(parts))
    return cells


def _joined(moments: Iterable[str]) -> str:
    """Returns the moments as text, such as "steps 10, 100"."""
    names = list(moments)
    numbers = [name.removeprefix("step ") for name in names]
    if len(names) < 2 or any(name == number for name, number in zip(names, numbers, strict=True)):
        return ", ".join(names)
    return f"steps {', '.join(numbers)}"


def measured_of(record: Record) -> dict[str, dict[str, Measured]]:
    """Returns the numbers of each method, by moment of training, then by method."""
    return {name: _measured(_of(record.rows, name)) for name in _moments(record)}


def _measured(rows: Sequence[Row]) -> dict[str, Measured]:
    by_method = {}
    for row in rows:
        errors = [row.get(f"{name}_error") for name in GRADIENTS]
        values = [row.get("median_ms"), *errors]
        if row.get("screened") is False:
            continue
        if _is_default(row) and all(isinstance(value, float | int) for value in values):
            milliseconds, hidden, weight = (float(value or 0) for value in values)
            rarest = _in_rarest(rows, row)
            rare = float(rarest) if isinstance(rarest, float | int) else None
            by_method[str(row["method"])] = Measured(milliseconds, hidden, weight, rare)
    return by_method


def _is_default(row: Row) -> bool:
    return row.get("group") == "all" and ("threshold" not in row or row.get("default") is True)


def _moments(record: Record) -> list[str]:
    """Returns the names of the captured inputs in the order of their steps."""
    steps = {_name(row): int(row.get("step") or 0) for row in record.rows}
    return sorted(steps, key=lambda name: (steps[name], name))


def _name(row: Row) -> str:
    return f"step {row['step']}" if "step" in row else str(row["inputs"])


def _of(rows: Sequence[Row], moment: str) -> list[Row]:
    return [row for row in rows if _name(row) == moment]


def _methods(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["method"]) for row in rows if row["method"] != GOLDEN))


def _time_error(rows: Sequence[Row], moment: str) -> list[Chart]:
    charts = []
    for name, title in GRADIENTS.items():
        lines = []
        for method in _methods(rows):
            look = look_of(method)
            mine = [
                row
                for row in rows
                if row["method"] == method and row.get("group") == "all" and "median_ms" in row
            ]
            mine.sort(key=lambda row: _number_of(row, "threshold"))
            points = _points(mine, "median_ms", f"{name}_error")
            default = _points(
                [row for row in mine if _is_default(row)], "median_ms", f"{name}_error"
            )
            shown = title_of(method)
            if len(points) > 1:
                lines.append(Line(shown, points, look.colour, dashed=look.dashed))
            lines.append(Line(shown, default, look.colour, marker=look.marker, joined=False))
        if any(line.points for line in lines):
            time, error = Axis("milliseconds", "log"), Axis(f"error of the {title}", "log")
            charts.append(Chart(f"{moment}: {title}", time, error, lines))
    return charts


def _by_group(rows: Sequence[Row], moment: str) -> list[Chart]:
    groups = [group for group in GROUPS if any(row.get("group") == group for row in rows)]
    if len(groups) < 2:
        return []
    charts = []
    for name, title in GRADIENTS.items():
        lines = []
        for method in _methods(rows):
            look = look_of(method)
            points = [
                (float(groups.index(str(row["group"]))), _number_of(row, f"{name}_error"))
                for row in rows
                if row["method"] == method
                and ("threshold" not in row or row.get("default") is True)
                and _number_of(row, f"{name}_error") > 0
            ]
            points.sort()
            line = Line(title_of(method), points, look.colour, (), look.dashed, look.marker)
            lines.append(line)
        tenths = Axis("tenths, the most frequent ids first", names=groups)
        error = Axis(f"error of the {title}", "log")
        charts.append(Chart(f"{moment}: {title} by frequency", tenths, error, lines))
    return charts


def _points(rows: Sequence[Row], x: str, y: str) -> list[tuple[float, float]]:
    """Returns the points that a logarithmic chart can show."""
    points = [(_number_of(row, x), _number_of(row, y)) for row in rows]
    return [point for point in points if min(point) > 0]


def _number_of(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, float | int) else 0.0


def _table(rows: Sequence[Row]) -> Table:
    """Returns a table of each method at its own threshold; its last column is the rarest tenth."""
    columns = {
        "threshold": "threshold",
        "kept": "kept",
        "tail_mass": "tail mass",
        "median_ms": "ms",
        "grad_hidden_error": "hidden",
        "grad_weight_error": "weight",
        "grad_hidden_cosine_distance": "1 - cosine, hidden",
        "grad_weight_cosine_distance": "1 - cosine, weight",
        "grad_weight_norm_ratio": "weight's norm over float64's",
    }
    cells_by_row = []
    for row in rows:
        if _is_default(row) and row["method"] != GOLDEN and "failed" not in row:
            cells = [number(row.get(key)) for key in columns]
            rarest = number(_in_rarest(rows, row))
            cells_by_row.append([title_of(str(row["method"])), *cells, rarest])
    last = f"weight, {describe_group('10')}"
    return Table(("method", *columns.values(), last), cells_by_row)


def _in_rarest(rows: Sequence[Row], of: Row) -> Cell:
    """Returns the weight gradient's error in the rows of the rarest tenth."""
    for row in rows:
        same = all(row.get(key) == of.get(key) for key in ("method", "threshold"))
        if same and row.get("group") == "10":
            return row.get("grad_weight_error")
    return None


def _cosines(rows: Sequence[Row]) -> Table | None:
    """Returns a table of 1 - cosine by tenth of the ids, for each method at its own threshold."""
    groups = [group for group in GROUPS if any(row.get("group") == group for row in rows)]
    if len(groups) < 2:
        return None
    cells_by_row = []
    for method in _methods(rows):
        for name, title in GRADIENTS.items():
            cells = {
                str(row["group"]): number(row.get(f"{name}_cosine_distance"))
                for row in rows
                if row["method"] == method
                and ("threshold" not in row or row.get("default") is True)
                and "failed" not in row
            }
            if cells:
                cells_by_row.append(
                    [title_of(method), title, *(cells.get(group, "") for group in groups)]
                )
    return Table(("1 - cosine", "of the", *map(describe_group, groups)), cells_by_row)
