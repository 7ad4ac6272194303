"""Runs that differ in their vocabulary alone, taken together: more seeds for one question."""

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
    """
    Args:
        device: that all were made on.
        settings: of all, as text.
        start: of all.
        cases: of a vocabulary each, the smallest first.
        methods: those that are taken from these cases, which all can compare them with dense.
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
        """Those that all have."""
        first, *rest = (case.groups for case in self.cases)
        return [group for group in first if all(group in other for other in rest)]

    def num_seeds(self, method: str) -> int:
        """That it shares with dense, of all vocabularies."""
        return sum(num_shared(case, method) for case in self.cases)

    def difference(self, method: str, step: int, group: str = ALL) -> float:
        """To dense, nats: the mean over the vocabularies of their seeds' mean."""
        return statistics.fmean(case.difference(method, step, group) for case in self.cases)

    def standard_error(self, method: str, step: int, group: str = ALL) -> float | None:
        """Of that mean, from each vocabulary's own; None: of one there is a single seed."""
        squares = []
        for case in self.cases:
            error = case.standard_error(method, step, group)
            if error is None:
                return None
            squares.append(error**2)
        return math.sqrt(sum(squares)) / len(squares)

    def spread(self, step: int, group: str = ALL) -> float:
        """Of dense between seeds: the root of the vocabularies' mean variance."""
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
    """From each start, of the records of one device and the same settings: methods that at least
    two vocabularies have. A method is taken of each vocabulary from the case that has most seeds
    of it; methods that thereby are of the same cases stand together."""
    found: dict[tuple[str, str, str], dict[int, list[Case]]] = {}
    for record in records:
        device, settings = record.machine.get("device", ""), json.dumps(dict(record.settings))
        for case in cases_of(record):
            cases = found.setdefault((device, settings, case.start), {})
            cases.setdefault(case.vocab_size, []).append(case)
    return [
        Pool(device, settings, start, cases, tuple(methods))
        for (device, settings, start), by_size in found.items()
        for cases, methods in _by_cases([by_size[size] for size in sorted(by_size)])
    ]


def _by_cases(alternatives: Sequence[Sequence[Case]]) -> list[tuple[tuple[Case, ...], list[str]]]:
    """Methods that two vocabularies have a comparable case of, by the cases they are taken from."""
    every = dict.fromkeys(
        method for cases in alternatives for case in cases for method in case.methods
    )
    found: list[tuple[tuple[Case, ...], list[str]]] = []
    for method in every:
        comparable = [
            [case for case in cases if _can_compare(case, method)] for cases in alternatives
        ]
        chosen = tuple(
            max(cases, key=lambda case: num_shared(case, method)) for cases in comparable if cases
        )
        if len(chosen) < 2:
            continue
        together = next((methods for cases, methods in found if cases == chosen), None)
        if together is None:
            found.append((chosen, [method]))
        else:
            together.append(method)
    return found


def _can_compare(case: Case, method: str) -> bool:
    known = method != REFERENCE and method in case.methods and case.is_itself(method)
    return known and case.verdict(method).within is not None


def num_shared(case: Case, method: str) -> int:
    """Seeds of a method that dense has too."""
    return len(set(case.seeds(method)) & set(case.seeds(REFERENCE)))
