"""Fidelity of gradients: each method over its thresholds against float64, by token frequency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.evidence.records import Cell, Record, make_record
from benchmarks.fidelity.candidates import Candidate, shares_kept
from benchmarks.fidelity.tenths import ALL, Group, compare_groups, groups_of, products_by_row
from cce_dist.bench.golden import Gradients, golden_gradients, gradients
from cce_dist.bench.inputs import BenchInputs
from cce_dist.bench.loss import Settings, bench_loss
from cce_dist.bench.methods import Method
from cce_dist.bench.report import Cells

GOLDEN = "float64"
Row = dict[str, Any]


def bench_fidelity(
    inputs: BenchInputs,
    candidates: Sequence[Candidate],
    *,
    tenths: bool = True,
    repeats: int = 10,
    timeout_seconds: float = 0.0,
    failed: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Returns a row for each group of tokens: first those of float64, then each candidate's.

    Errors are relative Frobenius errors against float64; the error of the weight's update is
    `tenths.update_error`. A cosine distance is 1 - cosine, a norm ratio is over float64's norm.
    `kept` is the share of pairs of a column and a block of 128 tokens whose true mass reaches the
    threshold. `screened` is False if 8 bits were not enough and the call was computed in full. Loss
    error, shares and times are in the row of group "all" alone. Rows of "float64" describe each
    group, and give its share of the squared norm of the whole gradient. Ignored tokens are removed
    first. A method that fails has one row, which says why.

    Args:
        tenths: also measures groups by the frequency of tokens; needs `inputs.token_counts`.
        timeout_seconds: time to import, compile and run a method; 0: no bound.
        failed: names of candidates that are not to be run, each with the reason to report.
    Raises:
        ValueError: `tenths` is set and the inputs have no counts.
        RuntimeError: a method failed that may not.
        DeviceLostError: a method broke the CUDA context.
    """
    inputs = inputs.without_ignored()
    groups = groups_of(inputs, tenths)
    measured = _measure(
        inputs, candidates, Settings(repeats, timeout_seconds=timeout_seconds), failed or {}, say
    )
    golden = golden_gradients(inputs)
    rows, lost = _golden_rows(golden, groups), set()
    for candidate in candidates:
        about: Row = {"method": candidate.method}
        if candidate.keep is not None:
            default = candidate.default or None
            about |= {"threshold": candidate.keep, "by": "mass", "default": default}
        cells = measured[candidate.name]
        if "failed" in cells:
            if candidate.method not in lost:
                rows.append({**about, "group": ALL, **cells})
            lost.add(candidate.method)
            continue
        compared: dict[str, Row] = compare_groups(
            gradients(candidate.build(), inputs), golden, groups
        )
        compared[ALL] |= cells
        rows += [{**about, "group": name, **each} for name, each in compared.items()]
    return rows


def _measure(
    inputs: BenchInputs,
    candidates: Sequence[Candidate],
    settings: Settings,
    failed: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, Row]:
    """Returns what is known of all tokens together, or why it is not, by the candidate's name."""

    def save(rows: Sequence[Cells]) -> None:
        last = rows[-1]
        errors = [
            f"{key} {last[f'{key}_error'] or 0:.1e}" for key in ("grad_hidden", "grad_weight")
        ]
        say(f"{last['method']}: {last['failed'] or ', '.join(errors)}")

    # As peers: the error of a large threshold is a result, and no reason to stop.
    methods = [
        Method(candidate.name, "peer", lambda _, each=candidate: each.build())
        for candidate in candidates
    ]
    loss_rows = bench_loss(inputs, methods, settings, save=save, failed=failed)
    by_name = {row["method"]: row for row in loss_rows}
    keeps = [candidate.keep for candidate in candidates if candidate.keep is not None]
    kept = dict(zip(keeps, shares_kept(inputs, keeps), strict=True))
    measured = {}
    for candidate in candidates:
        row = by_name[candidate.name]
        if row["failed"] and not candidate.may_fail:
            raise RuntimeError(f"{candidate.name}: {row['failed']}")
        known = {
            "kept": None if candidate.keep is None else kept[candidate.keep],
            "screened": {"yes": True, "no": False}.get(row["screened"]),
            **{name: row[name] for name in ("loss_error", "tail_mass", "repeats")},
            **{name: row[name] for name in ("median_ms", "p10_ms", "p90_ms")},
        }
        measured[candidate.name] = {"failed": row["failed"]} if row["failed"] else known
    return measured


def _golden_rows(golden: Gradients, groups: Sequence[Group]) -> list[Row]:
    squares = [products_by_row(grad, grad)[:, 2] for grad in (golden.hidden, golden.weight)]
    totals = [float(square.sum()) or 1.0 for square in squares]
    rows = []
    for group in groups:
        least, most = group.times or (None, None)
        rows.append(
            {
                "method": GOLDEN,
                "group": group.name,
                "num_tokens": int(group.tokens.sum()),
                "num_ids": int(group.ids.sum()),
                "times_least": least,
                "times_most": most,
                "grad_hidden_share": float(squares[0][group.tokens].sum()) / totals[0],
                "grad_weight_share": float(squares[1][group.ids].sum()) / totals[1],
            }
        )
    return rows


def record_of(
    inputs: BenchInputs,
    rows: Sequence[Row],
    machine: Mapping[str, str],
    settings: Mapping[str, Cell],
    *,
    name: str,
    title: str,
) -> Record:
    """Returns a record of one capture's rows; others of its training run can be added to it.

    Args:
        settings: the command's settings, beside those of the capture.
        title: the record's title; empty: sizes and device.
    """
    cells: dict[str, Cell] = {**inputs.description, **inputs.training}
    about = {"inputs": cells.pop("inputs"), "step": cells.pop("step", None)}
    seed = cells.pop("seed", None)
    sizes = ", ".join(f"{key}={cells[key]}" for key in ("V", "D", "N"))
    return make_record(
        "fidelity",
        name,
        title or f"{sizes}, {cells['dtype']}: {machine['device']}",
        machine,
        seeds=() if seed is None else (int(seed),),
        settings={**cells, **settings},
        rows=[{**about, **row} for row in rows],
    )
