"""Pools of runs that differ only in their vocabulary: more seeds for one question."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.evidence.convergence import (
    ALL,
    REFERENCE,
    Case,
    Verdict,
    cases_of,
    over,
    verdict_of,
)
from benchmarks.evidence.records import Record


@dataclass(frozen=True, eq=False)
class Pool:
    """Cases of several vocabularies with the same device, settings and start.

    Args:
        settings: the records' settings as text.
        cases: one case for each vocabulary, the smallest vocabulary first.
        methods: methods that are taken from these cases; each case can compare them with dense.
    """

    device: str
    settings: str
    start: str
    cases: tuple[Case, ...]
    methods: tuple[str, ...]

    @property
    def vocab_sizes(self) -> list[int]:
        return [case.vocab_size for case in self.cases]

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
        return sum(num_shared(case, method) for case in self.cases)

    def difference(self, method: str, step: int, group: str = ALL) -> float:
        """Returns the difference to dense in nats: the mean of the vocabularies' differences."""
        return statistics.fmean(case.difference(method, step, group) for case in self.cases)

    def standard_error(self, method: str, step: int, group: str = ALL) -> float | None:
        """Returns the standard error of `difference`; None if a vocabulary has a single seed."""
        squares = []
        for case in self.cases:
            error = case.standard_error(method, step, group)
            if error is None:
                return None
            squares.append(error**2)
        return math.sqrt(sum(squares)) / len(squares)

    def spread(self, step: int, group: str = ALL) -> float:
        """Returns dense's deviation between seeds: the root of the vocabularies' mean variance."""
        return math.sqrt(statistics.fmean(case.spread(step, group) ** 2 for case in self.cases))

    def in_spreads(self, method: str, step: int, group: str = ALL) -> float:
        return over(self.difference(method, step, group), self.spread(step, group))

    def error_in_spreads(self, method: str, step: int, group: str = ALL) -> float | None:
        error, spread = self.standard_error(method, step, group), self.spread(step, group)
        return error / spread if error is not None and spread else None

    def verdict(self, method: str) -> Verdict:
        return verdict_of(
            self.steps,
            self.groups,
            functools.partial(self.in_spreads, method),
            functools.partial(self.error_in_spreads, method),
        )


def pools_of(records: Sequence[Record]) -> list[Pool]:
    """Returns pools of cases with the same device, settings and start.

    A method is in a pool if at least two vocabularies have it. For each vocabulary, the case with
    the most seeds of the method is taken. Methods that come from the same cases share a pool.
    """
    cases_by_key: dict[tuple[str, str, str], dict[int, list[Case]]] = {}
    for record in records:
        device, settings = record.machine.get("device", ""), json.dumps(dict(record.settings))
        for case in cases_of(record):
            cases = cases_by_key.setdefault((device, settings, case.start), {})
            cases.setdefault(case.vocab_size, []).append(case)
    return [
        Pool(device, settings, start, cases, tuple(methods))
        for (device, settings, start), by_size in cases_by_key.items()
        for cases, methods in _by_cases([by_size[size] for size in sorted(by_size)])
    ]


def _by_cases(alternatives: Sequence[Sequence[Case]]) -> list[tuple[tuple[Case, ...], list[str]]]:
    """Returns sets of cases, each with the methods that are taken from exactly these cases.

    Args:
        alternatives: the cases of each vocabulary.
    """
    every = dict.fromkeys(
        method for cases in alternatives for case in cases for method in case.methods
    )
    sets: list[tuple[tuple[Case, ...], list[str]]] = []
    for method in every:
        comparable = [
            [case for case in cases if _can_compare(case, method)] for cases in alternatives
        ]
        chosen = tuple(
            max(cases, key=lambda case: num_shared(case, method)) for cases in comparable if cases
        )
        if len(chosen) < 2:
            continue
        together = next((methods for cases, methods in sets if cases == chosen), None)
        if together is None:
            sets.append((chosen, [method]))
        else:
            together.append(method)
    return sets


def _can_compare(case: Case, method: str) -> bool:
    known = method != REFERENCE and method in case.methods and case.is_itself(method)
    return known and case.verdict(method).within is not None


def num_shared(case: Case, method: str) -> int:
    """Returns how many seeds of the method dense has too."""
    return len(set(case.seeds(method)) & set(case.seeds(REFERENCE)))
