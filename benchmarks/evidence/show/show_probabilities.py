"""Report section of a record of kind "probabilities": figure 3 of Cut Cross-Entropy."""

from __future__ import annotations

from benchmarks.evidence.charts import Axis, Chart, Line
from benchmarks.evidence.page import Block, Figures, Table, Words, number
from benchmarks.evidence.records import Record, Row

COLOURS = ("grey", "blue", "green", "amber", "red", "purple", "pink", "olive")
# The paper: fewer than this share of the softmax's entries reach 2^-12 (arXiv:2411.09009, 4.3).
CLAIMED_SHARE = 0.0002


def blocks(record: Record) -> list[Block]:
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in record.rows:
        if row["part"] == "curve":
            point = _value(row, "rank"), _value(row, "mean_probability")
            if min(point) > 0:
                curves.setdefault(_name(row), []).append(point)
    sparse = [row for row in record.rows if row["part"] == "sparsity"]
    lines = [
        Line(name, sorted(points), COLOURS[place % len(COLOURS)])
        for place, (name, points) in enumerate(curves.items())
    ]
    thresholds = dict.fromkeys(_value(row, "threshold") for row in sparse)
    # Mark the rank of the last step, whose model is trained the longest.
    ranks = [(_value(row, "rank"), f"rank {row['rank']}") for row in sparse[-1:] if row.get("rank")]
    chart = Chart(
        "Sorted probabilities, means over tokens",
        Axis("rank", "log"),
        Axis("probability", "log"),
        lines,
        verticals=ranks,
        horizontals=[(value, f"threshold {value:.2g}") for value in thresholds],
    )
    result: list[Block] = [
        Words(
            "Figure 3 of Cut Cross-Entropy (arXiv:2411.09009) on models of ours: each token's "
            "softmax sorted, and the mean over tokens at each rank. The paper finds less than "
            "0.02 % of the entries at 2^-12 or above, about 50 ranks. *Computed*: tiles of 128 x "
            "128 that a filter by tiles must compute with the ids sorted by their mean logit."
        ),
        Figures(record.name, [chart]),
    ]
    if sparse:
        result.append(_table(sparse))
    return result


def _table(rows: list[Row]) -> Table:
    shares = ("entries", "columns", "tiles", "tiles_sorted", "tiles_computed")
    names = ("entries", "columns of 128 tokens", "tiles", "tiles, sorted", "computed")
    cells = []
    for row in rows:
        share = _value(row, "entries")
        cells.append(
            [
                _name(row),
                number(row.get("threshold")),
                number(row.get("rank")),
                *(f"{100 * _value(row, key):.3g} %" if key in row else "" for key in shares),
                number(row.get("mass")),
                number(row.get("per_token_median")),
                number(row.get("per_token_most")),
                "yes" if share < CLAIMED_SHARE else "no",
            ]
        )
    ends = ("mass in them", "a token's, median", "most", "below 0.02 %")
    return Table(("inputs", "threshold", "rank", *names, *ends), cells)


def _name(row: Row) -> str:
    return f"step {row['step']}" if "step" in row else str(row["inputs"])


def _value(row: Row, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, float | int) else 0.0
