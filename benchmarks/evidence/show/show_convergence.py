"""Report section of a record of kind "convergence"."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from benchmarks.evidence.charts import Axis, Chart, Line
from benchmarks.evidence.convergence import (
    ALL,
    NEVER,
    RAREST,
    REFERENCE,
    Case,
    cases_of,
    describe_group,
)
from benchmarks.evidence.findings import marked
from benchmarks.evidence.methods import OURS, look_of, title_of
from benchmarks.evidence.page import Block, Figures, Points, Table, Words, number
from benchmarks.evidence.records import Record

# The method whose gradients are right to rounding.
CONTROL = "exact"
STARTS = {"random": "from random weights", "checkpoint": "from a checkpoint, on other text"}


def blocks(record: Record) -> list[Block]:
    result: list[Block] = [
        Words(
            "Each seed has its own first weights (from a checkpoint: the same) and its own order "
            "of the text, the same for every method. Differences to dense are means over seeds, "
            "in units of the spread: the standard deviation between the seeds of dense. "
            "**Within the spread** means at most one of it at every evaluation, in every tenth of "
            "the text by the frequency of its tokens. `exact` leaves nothing out: what it differs "
            "by is rounding, grown in training. After a ± is the standard error of a mean "
            "difference, from the differences of its seeds, which have all else in common: it "
            "shows differences that are far smaller than the spread, and which of them are chance."
        )
    ]
    for place, case in enumerate(cases_of(record), 1):
        result += _case_blocks(record, place, case)
    return result


def summary(records: Sequence[Record], pooled: Sequence[Sequence[str]] = ()) -> list[Block]:
    """Returns tables of our methods: difference to dense in training, and time of a step.

    Args:
        pooled: rows of pooled runs for the first table.
    """
    cases = [(record, case) for record in records for case in cases_of(record)]
    cases.sort(key=lambda each: (each[1].vocab_size, each[1].start != "random"))
    rows = [
        [*_about(record, case), *(_distance(case, name) for name in OURS)] for record, case in cases
    ]
    rows = [*map(list, pooled), *(row for row in rows if any(row[2:]))]
    times = [
        [*_about(record, case), *(_step_time(case, name) for name in OURS)]
        for record, case in cases
    ]
    times = [row for row in times if any(row[2:])]
    result: list[Block] = []
    if rows:
        result.append(
            Words(
                f"In a row in which `{CONTROL}` is outside the spread, too, whose gradients are "
                "right to rounding, nothing smaller than that is decided."
            )
        )
        result.append(Table(("to dense, at most, in spreads", "runs", *map(title_of, OURS)), rows))
    if times:
        result.append(
            Words(
                "A whole step's time, of dense's; runs side by side share a GPU, so that what a "
                "job buys is better seen below."
            )
        )
        result.append(Table(("a step's time", "runs", *map(title_of, OURS)), times))
    return result


def _about(record: Record, case: Case) -> list[str]:
    seeds = len(case.seeds(REFERENCE))
    return [f"V={case.vocab_size} {STARTS[case.start]}, {seeds} seeds", f"`{record.name}`"]


def _distance(case: Case, method: str) -> str:
    if method not in case.methods:
        return ""
    if not case.is_itself(method):
        return marked("full logits in every step", True)
    verdict = case.verdict(method)
    if verdict.within is None:
        return marked(f"did not run: {verdict.reason}", True)
    return marked(verdict.at_most, not verdict.within)


def _step_time(case: Case, method: str) -> str:
    ratio = _step_ratio(case, method) if case.is_itself(method) else None
    return marked(f"{ratio:.2f}", float(f"{ratio:.2f}") > 1) if ratio else ""


def _step_ratio(case: Case, method: str) -> float | None:
    ours, dense = (_mean_of(case, name, "median_step_ms") for name in (method, REFERENCE))
    return ours / dense if ours and dense else None


def _case_blocks(record: Record, place: int, case: Case) -> list[Block]:
    title = f"V={case.vocab_size}, {STARTS[case.start]}"
    short = f"V={case.vocab_size}, {case.start}"
    trained = [method for method in case.methods if case.seeds(method)]
    result: list[Block] = [Words(f"**{title}**{_sizes(case)}")]
    result.append(_table(case))
    verdicts = [
        f"{title_of(method)}: within the spread of dense: {case.verdict(method)}"
        + _screened(case, method)
        for method in case.methods
        if method != REFERENCE
    ]
    if verdicts:
        result.append(Points(verdicts))
    control = case.verdict(CONTROL) if CONTROL in case.methods else None
    if control is not None and control.within is False:
        result.append(
            Words(
                f"**These runs decide nothing that is smaller than {abs(control.worst):.2f} "
                f"spreads:** so far `{CONTROL}` itself is from dense, by rounding alone."
            )
        )
    if trained:
        result.append(Figures(f"{record.name}-{place}", _charts(case, trained, short)))
        result.append(_perplexities(case, trained))
    return result


def _screened(case: Case, method: str) -> str:
    """Returns the share of screened steps as text; other steps computed their logits in full."""
    share = _mean_of(case, method, "screened_share")
    return "" if share is None else f"; logits were screened in {share:.1%} of its steps"


def _sizes(case: Case) -> str:
    if not case.text:
        return ""
    tokens = sum(int(row["num_trained"] or 0) for row in case.text.values())
    held_out = sum(int(row["num_held_out"] or 0) for row in case.text.values())
    return f": {tokens / 1e6:.2f} M tokens to train on, {held_out} held out"


def _table(case: Case) -> Table:
    columns = (
        "method",
        "seeds",
        "held-out loss",
        "between seeds",
        "to dense",
        "in spreads",
        "rarest tenth, in spreads",
        "never seen, in spreads",
        "ms a step",
        "peak GiB",
    )
    rows = []
    for method in case.methods:
        if case.failure(method):
            # The points below the table give the reason.
            rows.append([title_of(method), "none", *[""] * (len(columns) - 2)])
            continue
        end = case.steps[-1]
        seeds = case.seeds(method)
        row = [title_of(method), str(len(seeds)), f"{case.mean(method, end):.4f}"]
        row.append(f"{case.deviation(method, end):.4f}" if len(seeds) > 1 else "")
        compared = method != REFERENCE and case.verdict(method).within is not None
        row.append(_with_error(case, method, end) if compared else "")
        for group in (ALL, RAREST, NEVER):
            known = compared and group in case.groups
            row.append(f"{case.in_spreads(method, end, group):+.2f}" if known else "")
        row += [number(_mean_of(case, method, key)) for key in ("median_step_ms", "peak_gib")]
        rows.append(row)
    return Table(columns, rows)


def _with_error(case: Case, method: str, step: int) -> str:
    error = case.standard_error(method, step)
    after = "" if error is None else f" ± {error:.4f}"
    return f"{case.difference(method, step):+.4f}{after}"


def _mean_of(case: Case, method: str, key: str) -> float | None:
    values = [row.get(key) for (name, _), row in case.runs.items() if name == method]
    numbers = [float(value) for value in values if isinstance(value, int | float)]
    return sum(numbers) / len(numbers) if numbers else None


def _charts(case: Case, methods: list[str], title: str) -> list[Chart]:
    steps = [step for step in case.steps if step]
    curves = []
    for method in methods:
        look = look_of(method)
        points = [(step, case.mean(method, step)) for step in steps]
        band = [
            (x, y - case.deviation(method, x), y + case.deviation(method, x)) for x, y in points
        ]
        name = title_of(method)
        curves.append(Line(name, points, look.colour, band, dashed=look.dashed))
    charts = [
        Chart(
            f"{title}: held-out loss",
            Axis("step"),
            Axis("nats per token"),
            curves,
        )
    ]
    compared = [
        method
        for method in methods
        if method != REFERENCE and case.verdict(method).within is not None
    ]
    if not compared:
        return charts
    shade = (-1.0, 1.0, "spread of dense")
    over_steps = [_difference(case, method, steps, ALL) for method in compared]
    rarest = [_difference(case, method, steps, RAREST) for method in compared]
    places = range(len(case.groups))
    by_group = []
    for method in compared:
        look = look_of(method)
        values = (case.in_spreads(method, steps[-1], group) for group in case.groups)
        points = _finite(zip(places, values, strict=True))
        by_group.append(
            Line(title_of(method), points, look.colour, dashed=look.dashed, marker=look.marker)
        )
    spreads = Axis("difference to dense, in spreads", "signed")
    charts.append(Chart(f"{title}: all tokens", Axis("step"), spreads, over_steps, shade))
    if RAREST in case.groups:
        charts.append(Chart(f"{title}: rarest tenth", Axis("step"), spreads, rarest, shade))
    tenths = Axis("tenths, the most frequent ids first", names=case.groups)
    charts.append(Chart(f"{title}: at the end", tenths, spreads, by_group, shade))
    return charts


def _difference(case: Case, method: str, steps: list[int], group: str) -> Line:
    look = look_of(method)
    if group not in case.groups:
        return Line(title_of(method), ())
    points = _finite((step, case.in_spreads(method, step, group)) for step in steps)
    return Line(title_of(method), points, look.colour, dashed=look.dashed, marker=look.marker)


def _finite(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if math.isfinite(y)]


def _perplexities(case: Case, methods: list[str]) -> Table:
    columns = ["perplexity at the end", "ids", "held out", *map(title_of, methods)]
    rows = []
    for group in case.groups:
        text = case.text.get(group, {})
        counts = [number(text.get(key)) for key in ("num_ids", "num_held_out")]
        cells = [f"{math.exp(case.mean(name, case.steps[-1], group)):.5g}" for name in methods]
        rows.append([describe_group(group), *counts, *cells])
    return Table(columns, rows)
