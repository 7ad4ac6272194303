"""Page of the records of kind "probabilities": figure 3 of Cut Cross-Entropy."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.evidence.figures import Chart, Curve
from benchmarks.evidence.markdown import number, table, value_of
from benchmarks.evidence.methods import Look
from benchmarks.evidence.records import Record, Row

TITLE = "How sparse is a softmax?"
COLOURS = ("#808080", "#3a86c8", "#2a9d6f", "#b58a1a", "#d9542b", "#9b5fd0", "#d0559b", "#8a9a2a")
SHARES = {
    "entries": "entries",
    "columns": "columns of 128 tokens",
    "tiles": "tiles",
    "tiles_sorted": "tiles, sorted",
    "tiles_computed": "computed",
}


def introduction(records: Sequence[Record]) -> list[str]:
    parts = []
    for record in records:
        last = _of(record, "sparsity")[-1:]
        parts += [
            f"{record.title}: at {_name(row)} {_percent(row, 'entries')} of the softmax's entries "
            f"reach {number(row.get('threshold'))}, and {_percent(row, 'columns')} of the columns "
            f"of 128 tokens; {_percent(row, 'mass')} of the mass lies in the entries."
            for row in last
        ]
    return [
        *parts,
        "Figure 3 of Cut Cross-Entropy (arXiv:2411.09009) on models of ours: each token's softmax "
        "sorted, and the mean over tokens at each rank. The paper, whose models are trained for "
        "far longer, finds less than 0.02 % of the entries at 2^-12 or above, about 50 ranks. "
        "*Computed*: tiles of 128 x 128 that a filter by tiles must compute with the ids sorted by "
        "their mean logit.",
    ]


def section(record: Record) -> list[str]:
    rows = [
        [
            _name(row),
            number(row.get("rank")),
            *(_percent(row, key) for key in SHARES),
            number(row.get("mass")),
            number(row.get("per_token_median")),
            number(row.get("per_token_most")),
        ]
        for row in _of(record, "sparsity")
    ]
    ends = ("mass in them", "a token's, median", "most")
    return [table(("inputs", "rank", *SHARES.values(), *ends), rows)] if rows else []


def figures(records: Sequence[Record]) -> dict[str, list[Chart]]:
    figures = {}
    for record in records:
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in _of(record, "curve"):
            point = value_of(row, "rank"), value_of(row, "mean_probability")
            if min(point) > 0:
                curves.setdefault(_name(row), []).append(point)
        lines = [
            Curve(name, sorted(points), Look(COLOURS[place % len(COLOURS)], marker=""))
            for place, (name, points) in enumerate(curves.items())
        ]
        title = "Sorted probabilities, means over tokens"
        figures[record.name] = [Chart(title, "rank", "probability", lines, ("log", "log"))]
    return figures


def _of(record: Record, part: str) -> list[Row]:
    return [row for row in record.rows if row["part"] == part]


def _percent(row: Row, key: str) -> str:
    return f"{100 * value_of(row, key):.3g} %" if key in row else ""


def _name(row: Row) -> str:
    return f"step {row['step']}" if "step" in row else str(row["inputs"])
