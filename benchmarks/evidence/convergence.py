"""Whether a loss trains as the dense one does: differences in units of the spread between seeds.

The runs of a seed differ in the loss alone, so that differences are taken seed by seed.
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
# A spread of so few seeds is itself uncertain: that at a step is of all evaluations between
# 1 / NEIGHBOURS and NEIGHBOURS times the step.
NEIGHBOURS = 2
# In units of the spread.
WITHIN = 1.0


@dataclass(frozen=True)
class Verdict:
    """
    Args:
        within: whether the difference to dense is at most one spread everywhere; None: unknown,
            and `reason` says why.
        worst: the largest difference in units of the spread, with its sign.
        error: its standard error, in the same units; None: of a single seed.
        step, group: where that is.
        at_end, rarest_at_end: the difference of all tokens and of the rarest tenth at the end.
        share_within: of all evaluations and groups.
    """

    within: bool | None
    reason: str = ""
    worst: float = 0.0
    error: float | None = None
    step: int = 0
    group: str = ALL
    at_end: float = 0.0
    rarest_at_end: float | None = None
    share_within: float = 0.0

    def __str__(self) -> str:
        if self.within is None:
            return f"unknown: {self.reason}"
        where = "all tokens" if self.group == ALL else describe_group(self.group)
        text = "yes" if self.within else "**no**"
        if not self.within:
            text += f", within at {self.share_within:.0%} of all places"
        return f"{text}; at most {self.at_most} ({where}, step {self.step})"

    @property
    def at_most(self) -> str:
        """`worst` with its error, for a reader."""
        error = "" if self.error is None else f" ± {self.error:.2f}"
        return f"{self.worst:+.2f}{error}"


@dataclass(frozen=True, eq=False)
class Case:
    """All runs of one vocabulary from one start.

    Args:
        steps: after which held-out text was evaluated.
        losses: by method and seed, then by step, the row of nats by group.
        runs: by method and seed the row of part "run", which says why where it has failed.
        text: by group the row of part "text".
    """

    vocab_size: int
    start: str
    steps: tuple[int, ...]
    losses: Mapping[tuple[str, int], Mapping[int, Row]]
    runs: Mapping[tuple[str, int], Row]
    text: Mapping[str, Row]

    @property
    def methods(self) -> list[str]:
        """In the order in which they were run."""
        return list(dict.fromkeys(method for method, _ in self.runs))

    @property
    def groups(self) -> list[str]:
        """Those that held-out tokens are in."""
        some = next(iter(self.losses.values()), {})
        first = next(iter(some.values()), {})
        return [group for group in GROUPS if group in first]

    def is_itself(self, method: str) -> bool:
        """Not so of screened logits that no step of any run had: those trained with full ones."""
        shares = [
            row.get("screened_share") for (name, _), row in self.runs.items() if name == method
        ]
        known = [share for share in shares if share is not None]
        return not known or any(known)

    def seeds(self, method: str) -> list[int]:
        return sorted(seed for name, seed in self.losses if name == method)

    def loss(self, method: str, seed: int, step: int, group: str = ALL) -> float:
        """Nats per token."""
        value = self.losses[method, seed][step][group]
        assert isinstance(value, float | int)
        return float(value)

    def mean(self, method: str, step: int, group: str = ALL) -> float:
        return statistics.fmean(self.loss(method, seed, step, group) for seed in self.seeds(method))

    def deviation(self, method: str, step: int, group: str = ALL) -> float:
        """Between seeds; 0 of one alone."""
        values = [self.loss(method, seed, step, group) for seed in self.seeds(method)]
        return statistics.stdev(values) if len(values) > 1 else 0.0

    def spread(self, step: int, group: str = ALL) -> float:
        """Of dense between seeds, around this step; the root of the mean variance."""
        if (step, group) not in self._spreads:
            around = [x for x in self.steps if x and step / NEIGHBOURS <= x <= step * NEIGHBOURS]
            variances = [self.deviation(REFERENCE, x, group) ** 2 for x in around]
            self._spreads[step, group] = math.sqrt(statistics.fmean(variances))
        return self._spreads[step, group]

    @functools.cached_property
    def _spreads(self) -> dict[tuple[int, str], float]:
        """Those asked for so far: a page asks for each a hundred times."""
        return {}

    def difference(self, method: str, step: int, group: str = ALL) -> float:
        """To dense, the mean over the seeds that both have; positive is worse."""
        return statistics.fmean(self._differences(method, step, group))

    def standard_error(self, method: str, step: int, group: str = ALL) -> float | None:
        """Of that mean, by how much the seeds' own differences differ; None: of a single one."""
        found = self._differences(method, step, group)
        return statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None

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
        """Why a run of it has failed; "" where none has."""
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
    """Of a method's differences to dense at a step, in a group; step 0 is before any."""
    places = [(step, group) for step in steps if step for group in groups]
    found = {place: in_spreads(*place) for place in places}
    step, group = max(found, key=lambda place: abs(found[place]))
    num_within = sum(abs(value) <= WITHIN for value in found.values())
    return Verdict(
        within=num_within == len(found),
        worst=found[step, group],
        error=error_in_spreads(step, group),
        step=step,
        group=group,
        at_end=found[steps[-1], ALL],
        rarest_at_end=found.get((steps[-1], RAREST)),
        share_within=num_within / len(found),
    )


def over(difference: float, spread: float) -> float:
    """`difference` in units of `spread`; where that is none, none or infinite."""
    if difference == 0:
        return 0.0
    return difference / spread if spread else math.copysign(math.inf, difference)


def cases_of(record: Record) -> list[Case]:
    """In the order of the vocabularies, then random weights before the checkpoint.

    Of two rows of one run the later counts: a failed run may have been tried again.
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
    """For a reader."""
    named = {
        ALL: "all tokens",
        "1": "tenth 1, the most frequent",
        RAREST: "tenth 10, the rarest",
        NEVER: "ids never trained on",
    }
    return named.get(group, f"tenth {group}")
