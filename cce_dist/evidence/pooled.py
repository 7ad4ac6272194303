"""Runs that differ in their vocabulary alone, taken together: more seeds for one question."""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .convergence import ALL, REFERENCE, Case, Verdict, cases_of, over, verdict_of
from .records import Record


@dataclass(frozen=True, eq=False)
class Pool:
    """
    Args:
        device: that all were made on.
        start: of all.
        cases: of a vocabulary each, the smallest first.
    """

    device: str
    start: str
    cases: tuple[Case, ...]

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

    @property
    def methods(self) -> list[str]:
        """Those that can be compared with dense at every vocabulary."""
        return [
            method
            for method in self.cases[0].methods
            if method != REFERENCE
            and all(
                method in case.methods and case.verdict(method).within is not None
                for case in self.cases
            )
        ]

    def num_seeds(self, method: str) -> int:
        """That it shares with dense, of all vocabularies."""
        return sum(len(set(case.seeds(method)) & set(case.seeds(REFERENCE))) for case in self.cases)

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
    """From each start, of the records of one device and the same settings that have at least two
    vocabularies; of two cases of one vocabulary the one with more seeds of dense."""
    found: dict[tuple[str, str, str], dict[int, Case]] = {}
    for record in records:
        device, settings = record.machine.get("device", ""), json.dumps(dict(record.settings))
        for case in cases_of(record):
            cases = found.setdefault((device, settings, case.start), {})
            other = cases.get(case.vocab_size)
            if other is None or len(case.seeds(REFERENCE)) > len(other.seeds(REFERENCE)):
                cases[case.vocab_size] = case
    return [
        Pool(device, start, tuple(case for _, case in sorted(cases.items())))
        for (device, _, start), cases in found.items()
        if len(cases) > 1
    ]
