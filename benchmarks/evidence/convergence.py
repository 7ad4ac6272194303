"""Differences in training between a loss and dense, in units of the spread between seeds.

Runs of one seed differ only in the loss. The difference is taken seed by seed.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True)
class Verdict:
    """The answer to whether a method trains as dense does.

    Args:
        within: whether the difference to dense is at most one spread everywhere; None: unknown,
            and `reason` says why.
        worst: the largest difference in units of the spread, with its sign.
        error: standard error of `worst` in the same units; None: there is a single seed.
        step, group: place of `worst`.

        share_within: share of all evaluations and groups whose difference is within one spread.
    """

    within: bool | None
    reason: str = ""
    worst: float = 0.0
    error: float | None = None
    step: int = 0
    group: str = ALL

    share_within: float = 0.0


@dataclass(frozen=True, eq=False)
class Case:
    """All runs of one vocabulary from one start.

    Args:
        steps: steps after which held-out text was evaluated.
        losses: for each method and seed, then for each step, the row of nats by group.
        runs: for each method and seed the row of part "run"; a failed run's row says why.
        text: for each group the row of part "text".
    """

    vocab_size: int
    start: str
    steps: tuple[int, ...]
    losses: Mapping[tuple[str, int], Mapping[int, Row]]
    runs: Mapping[tuple[str, int], Row]
    text: Mapping[str, Row]

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

    def is_itself(self, method: str) -> bool:
        """Tells whether the method trained as its name says.

        False for screened logits if no step of any run was screened: full logits trained the
        model then.
        """
        shares = [
            row.get("screened_share") for (name, _), row in self.runs.items() if name == method
        ]
        known = [share for share in shares if share is not None]
        return not known or any(known)

    def seeds(self, method: str) -> list[int]:
        return sorted(seed for name, seed in self.losses if name == method)

    def loss(self, method: str, seed: int, step: int, group: str = ALL) -> float:
        """Returns a run's nats per held-out token."""
        value = self.losses[method, seed][step][group]
        assert isinstance(value, float | int)
        return float(value)

    def mean(self, method: str, step: int, group: str = ALL) -> float:
        return statistics.fmean(self.loss(method, seed, step, group) for seed in self.seeds(method))

    def deviation(self, method: str, step: int, group: str = ALL) -> float:
        """Returns the standard deviation between a method's seeds; 0 for a single seed."""
        values = [self.loss(method, seed, step, group) for seed in self.seeds(method)]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def spread(self, step: int, group: str = ALL) -> float:
        """Returns dense's deviation between seeds: the root of the mean variance around a step."""
        if (step, group) not in self._spreads:
            around = [x for x in self.steps if x and step / NEIGHBOURS <= x <= step * NEIGHBOURS]
            variances = [self.deviation(REFERENCE, x, group) ** 2 for x in around]
            self._spreads[step, group] = math.sqrt(statistics.fmean(variances))
        return self._spreads[step, group]

    @functools.cached_property
    def _spreads(self) -> dict[tuple[int, str], float]:
        """Spreads computed so far: a page asks for each of them a hundred times."""
        return {}

    def difference(self, method: str, step: int, group: str = ALL) -> float:
        """Returns the mean difference to dense over the seeds that both have; positive is worse."""
        return statistics.fmean(self._differences(method, step, group))

    def standard_error(self, method: str, step: int, group: str = ALL) -> float | None:
        """Returns the standard error of `difference`, from the seeds' own; None: a single seed."""
        differences = self._differences(method, step, group)
        if len(differences) < 2:
            return None
        return statistics.stdev(differences) / math.sqrt(len(differences))

    def _differences(self, method: str, step: int, group: str) -> list[float]:
        seeds = set(self.seeds(method)) & set(self.seeds(REFERENCE))
        return [
            self.loss(method, seed, step, group) - self.loss(REFERENCE, seed, step, group)
            for seed in sorted(seeds)
        ]

    def in_spreads(self, method: str, step: int, group: str = ALL) -> float:
        return over(self.difference(method, step, group), self.spread(step, group))

    def error_in_spreads(self, method: str, step: int, group: str) -> float | None:
        error, spread = self.standard_error(method, step, group), self.spread(step, group)
        return error / spread if error is not None and spread else None

    def failure(self, method: str) -> str:
        """Returns why a run of the method failed; "" if none failed."""
        return next(
            (
                str(run["failed"])
                for (name, _), run in self.runs.items()
                if name == method and "failed" in run
            ),
            "",
        )

    def verdict(self, method: str) -> Verdict:
        if failure := self.failure(method):
            return Verdict(None, failure)
        shared = set(self.seeds(method)) & set(self.seeds(REFERENCE))
        if len(self.seeds(REFERENCE)) < 2:
            return Verdict(None, "a spread takes two seeds of dense")
        if not shared:
            return Verdict(None, "no seed that dense has, too")
        return verdict_of(
            self.steps,
            self.groups,
            functools.partial(self.in_spreads, method),
            functools.partial(self.error_in_spreads, method),
        )


Difference = Callable[[int, str], float]


def verdict_of(
    steps: Sequence[int],
    groups: Sequence[str],
    in_spreads: Difference,
    error_in_spreads: Callable[[int, str], float | None],
) -> Verdict:
    """Returns the verdict on a method from its differences to dense.

    Args:
        steps: steps of the evaluations; step 0 comes before training and does not count.
        in_spreads, error_in_spreads: difference and standard error at a step, in a group.
    """
    places = [(step, group) for step in steps if step for group in groups]
    differences = {place: in_spreads(*place) for place in places}
    step, group = max(differences, key=lambda place: abs(differences[place]))
    num_within = sum(abs(value) <= WITHIN for value in differences.values())
    return Verdict(
        within=num_within == len(differences),
        worst=differences[step, group],
        error=error_in_spreads(step, group),
        step=step,
        group=group,
        share_within=num_within / len(differences),
    )


def over(difference: float, spread: float) -> float:
    """Returns `difference` in units of `spread`; a spread of 0 gives 0 or infinity."""
    if difference == 0:
        return 0.0
    return difference / spread if spread else math.copysign(math.inf, difference)


def cases_of(record: Record) -> list[Case]:
    """Returns a record's cases by vocabulary; random weights come before the checkpoint.

    If a run has two rows, the later one counts: a failed run may have been tried again.
    """
    keys = {(int(row["vocab"]), str(row["start"])) for row in _of(record.rows, "run")}
    return [
        _case(record, vocab, start)
        for vocab, start in sorted(keys, key=lambda key: (key[0], key[1] != "random"))
    ]


def _case(record: Record, vocab_size: int, start: str) -> Case:
    mine = [
        row for row in record.rows if (row.get("vocab"), row.get("start")) == (vocab_size, start)
    ]
    losses: dict[tuple[str, int], dict[int, Row]] = {}
    for row in _of(mine, "curve"):
        losses.setdefault((str(row["method"]), int(row["seed"])), {})[int(row["step"])] = row
    return Case(
        vocab_size=vocab_size,
        start=start,
        steps=tuple(sorted({int(row["step"]) for row in _of(mine, "curve")})),
        losses=losses,
        runs={(str(row["method"]), int(row["seed"])): row for row in _of(mine, "run")},
        text={str(row["group"]): row for row in _of(mine, "text")},
    )


def _of(rows: Sequence[Row], part: str) -> list[dict]:
    return [dict(row) for row in rows if row.get("part") == part]


def describe_group(group: str) -> str:
    """Returns a group's name for a reader."""
    named = {
        ALL: "all tokens",
        "1": "tenth 1, the most frequent",
        RAREST: "tenth 10, the rarest",
        NEVER: "ids never trained on",
    }
    return named.get(group, f"tenth {group}")
