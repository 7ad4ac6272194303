"""Report section of all records of kind "convergence" together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.evidence.convergence import ALL, NEVER, RAREST, describe_group
from benchmarks.evidence.findings import marked
from benchmarks.evidence.methods import OURS, title_of
from benchmarks.evidence.page import Block, Table, Words
from benchmarks.evidence.pooled import Pool, pools_of
from benchmarks.evidence.records import Record
from benchmarks.evidence.show.show_convergence import STARTS


class Together(NamedTuple):
    title: str
    blocks: list[Block]


def together(records: Sequence[Record]) -> list[Together]:
    """Returns a part for each device that has records which differ only in their vocabulary."""
    by_device: dict[str, list[Pool]] = {}
    for pool in pools_of(records):
        by_device.setdefault(pool.device, []).append(pool)
    return [
        Together(f"All vocabularies together: {device}", _blocks(pools))
        for device, pools in by_device.items()
    ]


def _blocks(pools: Sequence[Pool]) -> list[Block]:
    blocks: list[Block] = [
        Words(
            "The runs below, of which those from one start differ in the vocabulary alone. A "
            "difference to dense is the mean of the vocabularies' differences, the spread the root "
            "of the mean variance between seeds of dense, and what is after a ± the standard error "
            "of the mean. More seeds than each vocabulary's own decide more; what is another way "
            "round at each vocabulary would cancel, so theirs are below."
        )
    ]
    for pool in pools:
        blocks += [Words(f"**{_title(pool)}**"), _table(pool)]
    return blocks


def _title(pool: Pool) -> str:
    sizes = ", ".join(map(str, pool.vocab_sizes))
    return f"V={sizes}, {STARTS[pool.start]}"


def _table(pool: Pool) -> Table:
    places = (len(pool.steps) - (0 in pool.steps)) * len(pool.groups)
    columns = [
        "method",
        "seeds",
        "to dense at the end",
        "in spreads",
        "rarest tenth, in spreads",
        "never seen, in spreads",
        "at most, in spreads",
        "where",
        f"within one spread, of {places} places",
    ]
    rows, end = [], pool.steps[-1]
    for method in pool.methods:
        verdict = pool.verdict(method)
        error = pool.standard_error(method, end)
        after = "" if error is None else f" ± {error:.4f}"
        row = [title_of(method), str(pool.num_seeds(method))]
        row.append(f"{pool.difference(method, end):+.4f}{after}")
        for group in (ALL, RAREST, NEVER):
            known = group in pool.groups
            row.append(f"{pool.in_spreads(method, end, group):+.2f}" if known else "")
        row += [verdict.at_most, f"{describe_group(verdict.group)}, step {verdict.step}"]
        row.append(str(round(verdict.share_within * places)))
        rows.append(row)
    return Table(columns, rows)


def summary_rows(records: Sequence[Record]) -> list[list[str]]:
    """Returns rows for show_convergence.summary, one for each device, settings and start."""
    by_setting: dict[tuple[str, str, str], list[Pool]] = {}
    for pool in pools_of(records):
        by_setting.setdefault((pool.device, pool.settings, pool.start), []).append(pool)
    rows = []
    for (device, _, start), pools in by_setting.items():
        cells = {name: _distance(pool, name) for pool in pools for name in pool.methods}
        about = [f"**all vocabularies** {STARTS[start]}, {device.split(',')[0]}", "together"]
        rows.append([*about, *(cells.get(name, "") for name in OURS)])
    return rows


def _distance(pool: Pool, method: str) -> str:
    verdict = pool.verdict(method)
    return marked(f"{verdict.at_most}, {pool.num_seeds(method)} seeds", not verdict.within)
