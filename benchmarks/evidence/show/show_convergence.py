"""Page of the records of kind "convergence"."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.evidence.convergence import (
    ALL,
    NEVER,
    RAREST,
    REFERENCE,
    WITHIN,
    Case,
    Pool,
    Verdict,
    cases_of,
    describe_group,
    pools_of,
)
from benchmarks.evidence.figures import Chart, Curve
from benchmarks.evidence.markdown import number, table
from benchmarks.evidence.methods import OURS, look_of, title_of
from benchmarks.evidence.records import Record

TITLE = "Does a model train the same?"
# The method whose gradients are right to rounding.
CONTROL = "exact"
STARTS = {"random": "from random weights", "checkpoint": "from a checkpoint, on other text"}
SHOWN = (ALL, RAREST, NEVER)
# Standard errors from 0 beyond which chance puts a difference in 1 % of cases, by the degrees of
# freedom (Student's t): three seeds take far more than nine.
DEGREES = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
VALUES = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.36, 3.17, 2.95, 2.85, 2.75)
CRITICAL: dict[int, float] = dict(zip(DEGREES, VALUES, strict=True))
HOW_TO_READ = (
    "Differences to dense are means over seeds, in nats of held-out text after the last step, ± "
    "their standard error; runs of one seed differ only in the loss. **Bold**: chance gives such a "
    "difference in less than 1 % of cases (Student's t). A *spread* is the standard deviation of "
    "dense's seeds, a *place* an evaluation in a group of tokens. Within a spread is not equal, "
    f"and three seeds decide little: by rounding alone `{CONTROL}` mostly leaves the spread "
    "somewhere."
)


def introduction(records: Sequence[Record]) -> list[str]:
    """Returns what all runs say together, with a table for each start."""
    pools = pools_of(records)
    parts = [_sentence(pool, method) for pool in pools for method in pool.methods]
    sentences = " ".join(part for part in parts if part)
    parts = [sentences or "No two vocabularies have been run with the same settings."]
    parts.append(HOW_TO_READ)
    for start, words in STARTS.items():
        rows = [
            [title_of(method), str(pool.num_seeds(method)), *_cells(pool, method)]
            for pool in pools
            if pool.start == start
            for method in pool.methods
        ]
        if rows:
            parts += [
                f"All vocabularies together, {words}:",
                table(("method", "seeds", *_COLUMNS), rows),
            ]
    return parts


def _sentence(pool: Pool, method: str) -> str:
    if method != "filtered":
        return ""
    end = pool.steps[-1]
    parts = []
    for group in (ALL, RAREST):
        if group in pool.groups:
            chance = "" if _is_told_apart(pool, method, group) else " (perhaps chance)"
            parts.append(f"{_difference(pool, method, group)} nats in {_of_group(group)}{chance}")
    return (
        f"{STARTS[pool.start].capitalize()}, `{method}` is after {end} steps "
        f"{' and '.join(parts)} ({pool.num_seeds(method)} seeds)."
    )


def _of_group(group: str) -> str:
    return "the rarest tenth of the text" if group == RAREST else describe_group(group)


def section(record: Record) -> list[str]:
    parts = []
    for case in cases_of(record):
        alone = Pool((case,), tuple(case.methods))
        rows = []
        for method in case.methods:
            if not case.seeds(method):
                continue
            compared = method != REFERENCE and not case.why_not(method)
            rows.append(
                [
                    title_of(method),
                    str(len(case.seeds(method))),
                    f"{case.mean(method, case.steps[-1]):.4f}",
                    *(_cells(alone, method) if compared else [""] * len(_COLUMNS)),
                    *(_mean_of(case, method, key) for key in ("median_step_ms", "peak_gib")),
                ]
            )
        columns = ("method", "seeds", "held-out loss", *_COLUMNS, "ms a step", "peak GiB")
        parts += [_conclusion(case, alone), table(columns, rows)]
    return parts


def _mean_of(case: Case, method: str, key: str) -> str:
    values = case.cells(method, key)
    return number(sum(values) / len(values)) if values else ""


def _conclusion(case: Case, alone: Pool) -> str:
    """Returns what the runs of a case say of our methods."""
    sentences = [f"**V={case.vocab_size}, {STARTS[case.start]}.**"]
    farthest = []
    for method in (method for method in case.methods if method in OURS):
        if not case.is_itself(method):
            sentences.append(f"{title_of(method)}: full logits in every step, no logit screened.")
        elif reason := case.why_not(method):
            sentences.append(f"{title_of(method)} did not run: {reason}.")
        else:
            farthest.append(f"{title_of(method)} {_at_most(alone.verdict(method))}")
    if farthest:
        sentences.append(f"Farthest from dense, in spreads: {', '.join(farthest)}.")
    if case.compares(CONTROL) and abs(worst := alone.verdict(CONTROL).worst) > WITHIN:
        sentences.append(
            f"`{CONTROL}`, which leaves nothing out, is so far by rounding alone: these runs "
            f"decide nothing that is smaller than {abs(worst):.2f} spreads."
        )
    return " ".join(sentences)


_COLUMNS = (
    *(f"{describe_group(group)}, nats" for group in SHOWN),
    "farthest, in spreads",
    "where",
    "places within one",
)


def _cells(runs: Pool, method: str) -> list[str]:
    """Returns a method's cells under _COLUMNS."""
    cells = []
    for group in SHOWN:
        text = _difference(runs, method, group) if group in runs.groups else ""
        bold = text and _is_told_apart(runs, method, group)
        cells.append(f"**{text}**" if bold else text)
    verdict = runs.verdict(method)
    where = f"{describe_group(verdict.group)}, step {verdict.step}"
    return [*cells, _at_most(verdict), where, f"{verdict.share_within:.0%}"]


def _at_most(verdict: Verdict) -> str:
    error = "" if verdict.error is None else f" ± {verdict.error:.2f}"
    return f"{verdict.worst:+.2f}{error}"


def _difference(runs: Pool, method: str, group: str) -> str:
    end = runs.steps[-1]
    error = runs.standard_error(method, end, group)
    return f"{runs.difference(method, end, group):+.4f}" + (
        "" if error is None else f" ± {error:.4f}"
    )


def _is_told_apart(runs: Pool, method: str, group: str) -> bool:
    end = runs.steps[-1]
    error = runs.standard_error(method, end, group)
    if error is None:
        return False
    freedom = runs.num_seeds(method) - len(runs.cases)
    critical = CRITICAL[max(known for known in CRITICAL if known <= freedom)]
    return abs(runs.difference(method, end, group)) > critical * error


def figures(records: Sequence[Record]) -> dict[str, list[Chart]]:
    """Returns the charts of the pooled runs: differences to dense at the end, by group."""
    charts = []
    pools = pools_of(records)
    for start, words in STARTS.items():
        curves = [
            _curve(pool, method) for pool in pools if pool.start == start for method in pool.methods
        ]
        if curves:
            x, y = "tenths, the most frequent ids first", "difference to dense, in spreads"
            scales, names = ("linear", "symlog"), pools[0].groups
            charts.append(Chart(words, x, y, curves, scales, names, shade=(-1.0, 1.0)))
    return {"convergence": charts} if charts else {}


def _curve(pool: Pool, method: str) -> Curve:
    differences = [pool.in_spreads(method, pool.steps[-1], group) for group in pool.groups]
    points = [(float(place), value) for place, value in enumerate(differences)]
    return Curve(
        title_of(method), [point for point in points if math.isfinite(point[1])], look_of(method)
    )
