"""Students of dense logits and of ours: differences beside the spread between seeds.

Runs of one vocabulary, divergence and seed differ in the method alone. The difference is taken seed
by seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.evidence.records import Row

DENSE, REORDERED, OURS = "dense", "reordered", "ours"
# Columns of an evaluation that methods are compared by, and their names for a reader.
QUANTITIES = {"all": "loss", "kl": "KL"}


@dataclass(frozen=True)
class Comparison:
    """A quantity of held-out text, in nats, after some steps.

    Args:
        values: for each method its value by seed.
    """

    vocab: int
    divergence: str
    step: int
    quantity: str
    values: Mapping[str, Mapping[int, float]]

    def of(self, method: str) -> list[float]:
        return list(self.values.get(method, {}).values())

    def mean(self, method: str) -> float | None:
        return statistics.fmean(self.of(method)) if self.of(method) else None

    def deviation(self, method: str) -> float | None:
        """Returns the standard deviation between seeds; None: there are fewer than two."""
        return statistics.stdev(self.of(method)) if len(self.of(method)) > 1 else None

    def differences(self, method: str = OURS) -> list[float]:
        """Returns a method's values less dense's, of each seed that both have: above 0 is worse."""
        dense, values = (self.values.get(name, {}) for name in (DENSE, method))
        return [values[seed] - dense[seed] for seed in sorted(set(values) & set(dense))]

    @property
    def in_spreads(self) -> float | None:
        """Returns ours: the mean difference over dense's deviation between seeds, if both exist."""
        differences, spread = self.differences(), self.deviation(DENSE)
        return statistics.fmean(differences) / spread if differences and spread else None


def comparisons_of(rows: Sequence[Row], *, last_step: bool = False) -> list[Comparison]:
    """Returns comparisons by vocabulary, divergence, quantity and step, for steps after the first.

    Args:
        rows: of a record of kind "distillation". If a run has been tried twice, the later counts.
        last_step: compare after the last step alone.
    """
    values: dict[tuple[int, str, str, int], dict[str, dict[int, float]]] = {}
    curves = [row for row in rows if row["part"] == "curve" and row["step"]]
    last = max((int(row["step"] or 0) for row in curves), default=0)
    for row in curves:
        step = int(row["step"] or 0)
        if last_step and step != last:
            continue
        for quantity in QUANTITIES:
            key = (int(row["vocab"] or 0), str(row["divergence"]), quantity, step)
            by_seed = values.setdefault(key, {}).setdefault(str(row["method"]), {})
            by_seed[int(row["seed"] or 0)] = float(row[quantity] or 0)
    return [
        Comparison(vocab, divergence, step, quantity, each)
        for (vocab, divergence, quantity, step), each in sorted(values.items())
    ]


def summarize(rows: Sequence[Row], *, last_step: bool = True) -> list[dict[str, str]]:
    """Returns the comparisons as rows of a table, with text in the cells."""
    return [
        {
            "V": str(each.vocab),
            "divergence": each.divergence,
            "held-out": QUANTITIES[each.quantity],
            "step": str(each.step),
            "seeds": str(len(each.differences())),
            "dense": _number(each.mean(DENSE), ".4f"),
            "dense's spread": _number(each.deviation(DENSE), ".4f"),
            "ours": _number(each.mean(OURS), ".4f"),
            "ours' spread": _number(each.deviation(OURS), ".4f"),
            "ours - dense": _number(_mean(each.differences()), "+.5f"),
            "by seed": _by_seed(each.differences()),
            "in spreads": _number(each.in_spreads, "+.2f"),
            "reordered - dense by seed": _by_seed(each.differences(REORDERED)),
        }
        for each in comparisons_of(rows, last_step=last_step)
    ]


def times_of(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Returns rows of a table of each method's steps: medians of seeds, and why runs failed."""
    runs: dict[tuple[int, str, str], dict[int, Row]] = {}
    for row in rows:
        if row["part"] == "run":
            key = (int(row["vocab"] or 0), str(row["divergence"]), str(row["method"]))
            runs.setdefault(key, {})[int(row["seed"] or 0)] = row
    return [
        {
            "V": str(vocab),
            "divergence": divergence,
            "method": method,
            "runs": str(len(by_seed)),
            "parameters": str(next(iter(by_seed.values()))["parameters"]),
            "step_ms": _number(_median(by_seed, "median_step_ms"), ".2f"),
            "peak_gib": _number(_median(by_seed, "peak_gib"), ".2f"),
            "why not": "; ".join(str(row["failed"]) for row in by_seed.values() if "failed" in row),
        }
        for (vocab, divergence, method), by_seed in sorted(runs.items())
    ]


def _median(runs: Mapping[int, Row], key: str) -> float | None:
    values = [value for row in runs.values() if isinstance(value := row.get(key), float | int)]
    return statistics.median(values) if values else None


def _by_seed(differences: Sequence[float]) -> str:
    return " ".join(f"{value:+.4f}" for value in differences)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)
