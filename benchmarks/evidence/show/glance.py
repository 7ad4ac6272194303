"""The table of all methods: differences in training, errors of gradients, time and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.evidence.convergence import REFERENCE
from benchmarks.evidence.findings import span
from benchmarks.evidence.methods import ABLATIONS, OURS, title_of
from benchmarks.evidence.page import Block, Table, Words
from benchmarks.evidence.pooled import Pool, pools_of
from benchmarks.evidence.records import Kind, Record, Row
from benchmarks.evidence.show import show_end_to_end, show_fidelity
from benchmarks.evidence.show.show_fidelity import ASPECTS
from benchmarks.evidence.show.wanted import is_on_gpu

# The order in which one would try the methods.
FIRST = (REFERENCE, "filtered", "screened", "in_forward", "exact", *ABLATIONS)
Cells = Mapping[str, str]


def glance(records: Sequence[Record]) -> list[Block]:
    """Returns the table, from GPUs' records if there are any; kinds without records are absent."""
    chosen = [record for record in records if is_on_gpu(record)] or list(records)
    columns: dict[str, Cells] = {}
    sources = []
    pools = pools_of(_of(chosen, "convergence"))
    if pools:
        columns["trains as dense: spreads between seeds, at most"] = _training(pools)
        sources.append("training, of all vocabularies together")
    fidelity = _of(chosen, "fidelity")
    if fidelity:
        longest = max(fidelity, key=lambda record: len(show_fidelity.measured_of(record)))
        columns |= _gradients(longest)
        sources.append(f"loss and gradients alone, of `{longest.name}`")
    for title, rows in _fewest_ranks(_of(chosen, "end-to-end")):
        columns |= _steps(rows)
        sources.append(f"whole steps, of {title}")
    methods = {name for cells in columns.values() for name, cell in cells.items() if cell}
    if not methods:
        return [Words("Nothing that methods can be compared by.")]
    ordered = [name for name in FIRST if name in methods | {REFERENCE}]
    ordered += sorted(methods - set(ordered), key=title_of)
    rows = [
        [
            f"**{title_of(name)}**" if name in OURS else title_of(name),
            *(cells.get(name, "") for cells in columns.values()),
        ]
        for name in ordered
    ]
    return [
        Words(
            "Ours in bold. Ratios are over dense: below 1 is better of errors and time, above 1 "
            "of tokens and batch; a range is over the steps of training, at each method's own "
            f"threshold. From the sections below: {'; '.join(sources)}."
        ),
        Table(("", *columns), rows),
    ]


def _of(records: Sequence[Record], kind: Kind) -> list[Record]:
    return [record for record in records if record.kind == kind]


def _training(pools: Sequence[Pool]) -> Cells:
    pools_by_method: dict[str, list[Pool]] = {}
    for pool in pools:
        for method in pool.methods:
            pools_by_method.setdefault(method, []).append(pool)
    cells = {}
    for method, mine in pools_by_method.items():
        verdicts = [pool.verdict(method) for pool in mine]
        seeds = sum(pool.num_seeds(method) for pool in mine)
        word = "yes" if all(verdict.within for verdict in verdicts) else "no"
        worst = max(abs(verdict.worst) for verdict in verdicts)
        cells[method] = f"{word}: {worst:.2f}" if worst < 10 else f"{word}: {worst:.0f}"
        cells[method] += f", {seeds} seeds"
    return cells


def _gradients(record: Record) -> dict[str, Cells]:
    measured = show_fidelity.measured_of(record)
    columns: dict[str, Cells] = {}
    for aspect, value in ASPECTS.items():
        ratios: dict[str, list[float]] = {}
        for by_method in measured.values():
            dense = value(by_method[REFERENCE]) if REFERENCE in by_method else None
            for method, each in by_method.items():
                if dense and (mine := value(each)) and method != REFERENCE:
                    ratios.setdefault(method, []).append(mine / dense)
        cells = {method: span(values, ".2f") for method, values in ratios.items()}
        name = "time of loss and gradients" if aspect == "time" else aspect
        columns[name] = {REFERENCE: "1", **cells}
    return columns


def _fewest_ranks(records: Sequence[Record]) -> list[tuple[str, list[Row]]]:
    """Returns the comparable rows, dense among them, of the fewest ranks: one set of rows or none.

    The set comes with its title.
    """

    def ranks(rows: Sequence[Row]) -> int:
        return min(show_end_to_end.ranks_of(row) for row in rows)

    sets = show_end_to_end.together(records)
    sets = [each for each in sets if any(row["loss"] == REFERENCE for row in each[1])]
    return sorted(sets, key=lambda each: (ranks(each[1]), -len(each[1])))[:1]


def _steps(rows: Sequence[Row]) -> dict[str, Cells]:
    """Returns the columns of whole steps.

    Tokens per second are those at the batch that most losses have, dense among them; of several
    such batches the largest.
    """
    batches = reversed(show_end_to_end.batches_of(rows))
    by_batch = (show_end_to_end.speeds(rows, batch) for batch in batches)
    same = max((each for each in by_batch if REFERENCE in each), key=len, default={})
    return {
        "tokens/s of a whole step": _over_dense(same, ".2f"),
        "largest batch": _over_dense(show_end_to_end.at_largest(rows, "batch"), ".1f"),
    }


def _over_dense(values: Mapping[str, float], digits: str) -> Cells:
    dense = values.get(REFERENCE)
    if not dense:
        return {}
    return {
        name: "1" if name == REFERENCE else f"{value / dense:{digits}}"
        for name, value in values.items()
    }
