"""Checks of one rank, and their joining into rows for all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import Any, Literal

from cce_dist.train.errors import first_line

Status = Literal["ok", "skipped", "warning", "failure"]
# From the best to the worst; only a failure fails the whole.
STATUSES: tuple[Status, ...] = ("skipped", "ok", "warning", "failure")


@dataclass(frozen=True)
class Check:
    """A row of the report.

    Args:
        observed, expected, remedy: sentences; `expected` and `remedy` may be empty.
        numbers: measurements, for scripts; `share` is an error over the allowed error.
    """

    name: str
    status: Status
    observed: str
    _: KW_ONLY
    expected: str = ""
    remedy: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Returns the report's row: its key "found" is `observed`."""
        return {"found" if key == "observed" else key: x for key, x in asdict(self).items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Check:
        """Returns the check whose `as_json` is `row`."""
        return cls(**{"observed" if key == "found" else key: x for key, x in row.items()})


def make_check(
    name: str,
    good: bool,
    observed: str,
    *,
    expected: str,
    remedy: str,
    otherwise: Status = "failure",
    numbers: Mapping[str, Any] | None = None,
) -> Check:
    """Returns an ok row if `good`; if not, a row of status `otherwise` with its remedy."""
    status, remedy = ("ok", "") if good else (otherwise, remedy)
    return Check(name, status, observed, expected=expected, remedy=remedy, numbers=numbers or {})


def worst(checks: Iterable[Check]) -> Status:
    """Returns the worst status of the checks, "ok" where none is worse."""
    statuses: list[Status] = ["ok", *(check.status for check in checks)]
    return max(statuses, key=STATUSES.index)


def guarded(
    name: str, function: Callable[..., list[Check] | Check | None], *args: Any
) -> list[Check]:
    """Makes a check or several; an exception becomes a failure, so that other checks still run."""
    try:
        result = function(*args)
        return result if isinstance(result, list) else [result] if result else []
    except Exception as error:
        remedy = "if nothing above explains it, report it with this output"
        text = first_line(error)
        return [Check(name, "failure", text, expected="no exception", remedy=remedy)]


def name_ranks(ranks: Sequence[int]) -> str:
    """Writes "rank 3" or "ranks 0-3, 7"; the ranks are in order."""
    # In a run of consecutive ranks, rank less place is the same.
    groups = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(texts)}"


def ranks_by_value(values: Mapping[int, Any]) -> dict[Any, list[int]]:
    """Returns the ranks of each value, in the order of the values' first ranks."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return ranks


def across_ranks(everywhere: Sequence[Sequence[Check]]) -> list[Check]:
    """Joins the ranks' checks of each name into a row, in the order in which names first occur.

    A row has the worst check, and names its ranks unless all ranks observed the same.
    """
    by_name: dict[str, dict[int, Check]] = {}
    for rank, checks in enumerate(everywhere):
        for check in checks:
            by_name.setdefault(check.name, {})[rank] = check
    return [_joined(by_rank, len(everywhere)) for by_rank in by_name.values()]


def _joined(by_rank: Mapping[int, Check], num_ranks: int) -> Check:
    status = max((check.status for check in by_rank.values()), key=STATUSES.index)
    bad = {rank: check for rank, check in by_rank.items() if check.status == status}
    # Among equally bad ranks, show the largest error.
    shown = max(bad.values(), key=lambda check: check.numbers.get("share", 0.0))
    if len({check.observed for check in by_rank.values()}) == 1 and len(by_rank) == num_ranks:
        return shown
    alike = ranks_by_value({rank: check.observed for rank, check in bad.items()})
    if "share" in shown.numbers and len(bad) == num_ranks:
        worst_ranks = name_ranks(alike[shown.observed])
        return replace(shown, observed=f"{shown.observed} (worst: {worst_ranks})")
    lines = [f"{name_ranks(ranks)}: {text}" for text, ranks in list(alike.items())[:4]]
    if len(alike) > len(lines):
        lines.append(f"... and {len(alike) - len(lines)} more")
    return replace(shown, observed="\n".join(lines))
