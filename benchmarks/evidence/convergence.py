"""Differences in training between a loss and dense, in units of the spread between seeds.

Runs of one seed differ only in the loss. The difference is taken seed by seed. Runs that differ
only in their vocabulary are pooled: more seeds for one question.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.evidence.records import Record, Row

REFERENCE = "dense"
# All held-out tokens, the tenths from the most frequent ids to the rarest, ids never trained on.
ALL, RAREST, NEVER = "all", "10", "never"
GROUPS = (ALL, *(str(tenth) for tenth in range(1, 11)), NEVER)
# The spread of so few seeds is itself uncertain. The spread at a step therefore averages over all
# evaluations between 1 / NEIGHBOURS and NEIGHBOURS times the step.
NEIGHBOURS = 2
# Largest difference, in units of the spread, that counts as within it.
WITHIN = 1.0


@dataclass(frozen=True, eq=False)
class Case:
    """All runs of one vocabulary from one start.

    Args:
        steps: steps after which held-out text was evaluated.
        losses: for each method and seed, then for each step, the row of nats by group.
        runs: for each method and seed the row of part "run"; a failed run's row says why.
        date: of the record, ISO.
    """

    vocab_size: int
    start: str
    steps: tuple[int, ...]
    losses: Mapping[tuple[str, int], Mapping[int, Row]]
    runs: Mapping[tuple[str, int], Row]
    date: str

    @property
    def methods(self) -> list[str]:
        """Returns all methods in the order in which they were run."""
        return list(dict.fromkeys(method for method, _ in self.runs))

    @property
    def groups(self) -> list[str]:
        """Returns the groups that have held-out tokens."""
        some = next(iter(self.losses.values()), {})
        first = next(iter(some.values()), {})
        return [group for group in GROUPS if group in first]

    def cells(self, method: str, key: str) -> list[float]:
        """Returns the numbers that a method's runs have under a key."""
        values = [row.get(key) for (name, _), row in self.runs.items() if name == method]
        return [float(value) for value in values if isinstance(value, float | int)]

    def is_itself(self, method: str) -> bool:
        """Tells whether the method trained as its name says.

        False for screened logits if no step of any run was screened: full logits trained the
        model then.
        """
        shares = self.cells(method, "screened_share")
        return not shares or any(shares)

    def seeds(self, method: str) -> list[int]:
        return sorted(seed for name, seed in self.losses if name == method)

    def shared_seeds(self, method: str) -> list[int]:
        return sorted(set(self.seeds(method)) & set(self.seeds(REFERENCE)))

    def loss(self, method: str, seed: int, step: int, group: str = ALL) -> float:
        """Returns a run's nats per held-out token."""
        value = self.losses[method, seed][step][group]
        assert isinstance(value, float | int)
        return float(value)

    def mean(self, method: str, step: int, group: str = ALL) -> float:
        return statistics.fmean(self.loss(method, seed, step, group) for seed in self.seeds(method))

    def differences(self, method: str, step: int, group: str) -> list[float]:
        """Returns the difference to dense of each seed that both have; positive is worse."""
        return [
            self.loss(method, seed, step, group) - self.loss(REFERENCE, seed, step, group)
            for seed in self.shared_seeds(method)
        ]

    @functools.cached_property
    def spreads(self) -> dict[tuple[int, str], float]:
        """Dense's deviation between seeds by step and group: the root of the mean variance around
        a step."""
        steps = [step for step in self.steps if step]
        variances = {(x, group): self._variance(x, group) for x in steps for group in self.groups}
        spreads = {}
        for step, group in variances:
            around = [x for x in steps if step / NEIGHBOURS <= x <= step * NEIGHBOURS]
            spreads[step, group] = math.sqrt(statistics.fmean(variances[x, group] for x in around))
        return spreads

    def _variance(self, step: int, group: str) -> float:
        values = [self.loss(REFERENCE, seed, step, group) for seed in self.seeds(REFERENCE)]
        return statistics.variance(values) if len(values) > 1 else 0.0

    def why_not(self, method: str) -> str:
        """Returns why the method can't be compared with dense; "" if it can be."""
        for (name, _), run in self.runs.items():
            if name == method and "failed" in run:
                return str(run["failed"])
        if len(self.seeds(REFERENCE)) < 2:
            return "a spread takes two seeds of dense"
        return "" if self.shared_seeds(method) else "no seed that dense has, too"

    def compares(self, method: str) -> bool:
        is_other = method != REFERENCE and method in self.methods
        return is_other and self.is_itself(method) and not self.why_not(method)


@dataclass(frozen=True)
class Verdict:
    """How far a method trains from dense.

    Args:
        worst: the largest difference in units of the spread, with its sign.
        error: standard error of `worst` in the same units; None: there is a single seed.
        step, group: place of `worst`.
        share_within: share of all evaluations and groups whose difference is within one spread.
    """

    worst: float
    error: float | None
    step: int
    group: str
    share_within: float


@dataclass(frozen=True, eq=False)
class Pool:
    """Cases of different vocabularies with the same device, settings and start; or a single case.

    Args:
        cases: one case for each vocabulary, the smallest vocabulary first.
        methods: methods that are taken from these cases; each case can compare them with dense.
    """

    cases: tuple[Case, ...]
    methods: tuple[str, ...]

    @property
    def start(self) -> str:
        return self.cases[0].start

    @property
    def steps(self) -> tuple[int, ...]:
        return self.cases[0].steps

    @property
    def groups(self) -> list[str]:
        """Returns the groups that all cases have."""
        first, *rest = (case.groups for case in self.cases)
        return [group for group in first if all(group in other for other in rest)]

    def num_seeds(self, method: str) -> int:
        """Returns how many seeds the method shares with dense, over all vocabularies."""
        return sum(len(case.shared_seeds(method)) for case in self.cases)

    def difference(self, method: str, step: int, group: str = ALL) -> float:
        """Returns the difference to dense in nats: the mean of the vocabularies' means."""
        means = (statistics.fmean(case.differences(method, step, group)) for case in self.cases)
        return statistics.fmean(means)

    def standard_error(self, method: str, step: int, group: str = ALL) -> float | None:
        """Returns the standard error of `difference`; None if a vocabulary has a single seed."""
        every = [case.differences(method, step, group) for case in self.cases]
        if min(map(len, every)) < 2:
            return None
        return math.sqrt(sum(statistics.variance(each) / len(each) for each in every)) / len(every)

    def spread(self, step: int, group: str = ALL) -> float:
        """Returns dense's deviation between seeds: the root of the vocabularies' mean variance."""
        return math.sqrt(statistics.fmean(case.spreads[step, group] ** 2 for case in self.cases))

    def in_spreads(self, method: str, step: int, group: str = ALL) -> float:
        """Returns `difference` in units of the spread; a spread of 0 gives 0 or infinity."""
        difference, spread = self.difference(method, step, group), self.spread(step, group)
        if difference == 0:
            return 0.0
        return difference / spread if spread else math.copysign(math.inf, difference)

    def verdict(self, method: str) -> Verdict:
        """Returns the verdict on a method that can be compared with dense.

        Step 0 comes before training and does not count.
        """
        places = [(step, group) for step in self.steps if step for group in self.groups]
        differences = {place: self.in_spreads(method, *place) for place in places}
        worst = max(differences, key=lambda place: abs(differences[place]))
        error, spread = self.standard_error(method, *worst), self.spread(*worst)
        num_within = sum(abs(value) <= WITHIN for value in differences.values())
        return Verdict(
            differences[worst],
            error / spread if error is not None and spread else None,
            *worst,
            num_within / len(differences),
        )


def cases_of(record: Record) -> list[Case]:
    """Returns a record's cases by vocabulary; random weights come before the checkpoint.

    If a run has two rows, the later one counts: a failed run may have been tried again.
    """
    rows: dict[tuple[int, bool, str], list[Row]] = {}
    for row in record.rows:
        if row["part"] in ("run", "curve"):
            start = str(row["start"])
            rows.setdefault((int(row["vocab"] or 0), start != "random", start), []).append(row)
    return [_case(key[0], key[2], rows[key], record.date) for key in sorted(rows)]


def _case(vocab_size: int, start: str, rows: Sequence[Row], date: str) -> Case:
    losses: dict[tuple[str, int], dict[int, Row]] = {}
    runs: dict[tuple[str, int], Row] = {}
    for row in rows:
        run = str(row["method"]), int(row["seed"] or 0)
        if row["part"] == "run":
            runs[run] = row
        else:
            losses.setdefault(run, {})[int(row["step"] or 0)] = row
    steps = tuple(sorted({step for evaluated in losses.values() for step in evaluated}))
    return Case(vocab_size, start, steps, losses, runs, date)


def pools_of(records: Sequence[Record]) -> list[Pool]:
    """Returns pools of cases with the same device, settings and start.

    A method is in a pool if at least two vocabularies have it. For each vocabulary, the case with
    the most seeds of the method is taken, of several the newest. Methods that come from the same
    cases share a pool.
    """
    alike: dict[tuple[str, str, str], dict[int, list[Case]]] = {}
    for record in records:
        device, settings = record.machine.get("device", ""), json.dumps(dict(record.settings))
        for case in cases_of(record):
            by_size = alike.setdefault((device, settings, case.start), {})
            by_size.setdefault(case.vocab_size, []).append(case)
    pools = []
    for by_size in alike.values():
        methods: dict[tuple[Case, ...], list[str]] = {}
        alternatives = [by_size[size] for size in sorted(by_size)]
        every = [name for cases in alternatives for case in cases for name in case.methods]
        for method in dict.fromkeys(every):
            able = [[case for case in cases if case.compares(method)] for cases in alternatives]
            chosen = tuple(
                max(cases, key=lambda case: (len(case.shared_seeds(method)), case.date))
                for cases in able
                if cases
            )
            if len(chosen) > 1:
                methods.setdefault(chosen, []).append(method)
        pools += [Pool(cases, tuple(names)) for cases, names in methods.items()]
    return pools


def describe_group(group: str) -> str:
    """Returns a group's name for a reader."""
    named = {ALL: "all tokens", RAREST: "tenth 10, the rarest", NEVER: "ids never trained on"}
    return {"1": "tenth 1, the most frequent", **named}.get(group, f"tenth {group}")
