"""Records, what is concluded from them, and the report: docs/evidence.md is what they render to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.evidence.convergence import ALL, RAREST, cases_of
from benchmarks.evidence.frequency import frequency_tenths, name_of
from benchmarks.evidence.page import Points
from benchmarks.evidence.records import (
    RecordError,
    append_rows,
    make_record,
    read_record,
    read_records,
    write_record,
)
from benchmarks.evidence.report import HEAD, markdown, page_of
from benchmarks.evidence.show import show_classes, show_convergence, show_end_to_end, show_fidelity
from cce_dist.cli.main import app
from tests.benchmarks.evidence_records import (
    STEPS,
    classes,
    convergence,
    end_to_end,
    fidelity,
    loss_at,
    tables,
)

ROOT = Path(__file__).parents[2]


def test_write_record(tmp_path: Path) -> None:
    record = fidelity()
    rounded = replace(record, rows=({"a": 1 / 3, "b": None, "c": 12345678, "d": True},))
    path = write_record(rounded, tmp_path)
    assert read_record(path).rows == ({"a": 0.333333, "c": 12345678, "d": True},)
    # A line a row, so that a diff shows what was measured anew.
    assert json.dumps({"a": 0.333333, "c": 12345678, "d": True}, separators=(",", ":")) in (
        path.read_text().splitlines()
    )
    write_record(classes(), tmp_path)
    assert [stored.name for stored in read_records(tmp_path, "classes")] == ["classes"]
    assert read_records(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"kind": "speed"}, "kind must be among", id="kind"),
        pytest.param({"name": "A b"}, "name must be lower-case words", id="name"),
        pytest.param({"commit": ""}, "commit must be text, got ''", id="commit"),
        pytest.param({"seeds": (0.5,)}, "seeds must be integers", id="seeds"),
        pytest.param({"rows": ({"a": math.nan},)}, r"rows\[0\].a must be finite", id="nan"),
        pytest.param({"rows": ({"a": [1]},)}, r"rows\[0\].a must be text, a number", id="list"),
        pytest.param({"settings": {"a": {}}}, "settings.a must be text", id="settings"),
    ],
)
def test_record_refuses(change: dict, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        replace(classes(), **change)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda text: text[:-20], "must be a record in JSON", id="half"),
        pytest.param(lambda text: text.replace(": 1,", ": 2,", 1), "schema 1, got 2", id="schema"),
        pytest.param(lambda text: text.replace('"title"', '"tilte"'), "unknown", id="field"),
        pytest.param(lambda text: text.replace('"step":0', '"step":NaN'), "finite", id="nan"),
        pytest.param(lambda text: "[]", "schema 1, got None", id="list"),
    ],
)
def test_read_record_refuses(spoil: Callable[[str], str], message: str, tmp_path: Path) -> None:
    path = write_record(classes(), tmp_path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(RecordError, match=message) as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    # The command says the same.
    result = CliRunner().invoke(app, ["report", "--records", str(tmp_path)])
    assert result.exit_code == 2


def test_append_rows(tmp_path: Path) -> None:
    record = replace(classes(), rows=({"a": 1},), seeds=(0,))
    append_rows(record, tmp_path)
    appended = append_rows(replace(record, rows=({"a": 2},), seeds=(1,), date="later"), tmp_path)
    assert (appended.rows, appended.seeds, appended.date) == (
        ({"a": 1}, {"a": 2}),
        (0, 1),
        record.date,
    )
    assert read_records(tmp_path) == [appended]
    with pytest.raises(RecordError, match="commit was '0123abc', got 'else'"):
        append_rows(replace(record, commit="else"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["classes.json"]


def test_make_record() -> None:
    with pytest.raises(RecordError, match="commit must be text"):
        make_record("classes", "a", "A", {"date": "d", "command": "c"})


def test_frequency_tenths() -> None:
    # Twice as many of each id as of the one before; 9 never.
    tokens = np.repeat(np.arange(9), 2 ** np.arange(9))
    tenths = frequency_tenths(tokens, 10)
    # The last has half of all, the one before a quarter: their middles are at 0.25 and 0.625.
    assert tenths[8] == 3 and tenths[7] == 7 and tenths[0] == 10
    assert [name_of(tenth) for tenth in tenths[-3:]] == ["7", "3", "never"]


def test_verdict_within_the_spread() -> None:
    (case,) = cases_of(convergence({"dense": 0.0, "filtered": 0.008, "no-tail": 0.02}))
    end = STEPS[-1]
    # Seeds are 0.01 apart, so that the standard deviation is that at every step.
    assert case.spread(end) == pytest.approx(0.01)
    assert case.difference("filtered", end, RAREST) == pytest.approx(0.008 * 11 / 12)
    # The seeds differ by themselves; each differs from its own dense by the same.
    assert case.standard_error("filtered", end) == pytest.approx(0, abs=1e-12)
    verdict = case.verdict("filtered")
    assert verdict.within and verdict.worst == pytest.approx(0.8)
    assert (verdict.step, verdict.group) == (end, "never")
    assert case.in_spreads("filtered", end, RAREST) == pytest.approx(0.8 * 11 / 12)
    assert str(verdict) == "yes; at most +0.80 ± 0.00 (ids never trained on, step 80)"
    outside = case.verdict("no-tail")
    assert outside.within is False and outside.worst == pytest.approx(2.0)
    assert 0 < outside.share_within < 1 and "**no**" in str(outside)
    assert case.verdict("screened").reason == "ValueError: not here"


def test_spread_is_of_the_evaluations_around() -> None:
    record = convergence({"dense": 0.0})
    # Seeds that are apart in the last evaluation alone.
    rows = [
        {**row, ALL: 5.0 + (0.4 * row["seed"] if row["step"] == 80 else 0.0)}
        if row["part"] == "curve"
        else row
        for row in record.rows
    ]
    (case,) = cases_of(replace(record, rows=tuple(rows)))
    assert case.spread(20, ALL) == 0
    assert case.spread(80, ALL) == pytest.approx(0.4 / math.sqrt(3))
    assert case.deviation("dense", 80) == pytest.approx(statistics.stdev([0.0, 0.4, 0.8]))


def test_standard_error_is_of_the_seeds_own_differences() -> None:
    record = convergence({"dense": 0.0, "filtered": 0.0})
    rows = tuple(
        {**row, ALL: float(row[ALL] or 0) + (0.01, 0.02, 0.06)[int(row["seed"] or 0)]}
        if row["part"] == "curve" and row["method"] == "filtered"
        else row
        for row in record.rows
    )
    record = replace(record, rows=rows)
    (case,) = cases_of(record)
    error = statistics.stdev([0.01, 0.02, 0.06]) / math.sqrt(3)
    assert case.standard_error("filtered", STEPS[-1]) == pytest.approx(error)
    text, _ = markdown(page_of([record]), HEAD)
    assert f"| +0.0300 ± {error:.4f} | +3.00 |" in text
    assert f"at most +3.00 ± {100 * error:.2f} (all tokens" in text


def test_verdict_needs_seeds() -> None:
    (case,) = cases_of(convergence({"dense": 0.0, "filtered": 0.0}, seeds=1))
    assert case.verdict("filtered").within is None
    assert "two seeds" in str(case.verdict("filtered"))
    assert case.standard_error("filtered", 80) is None
    assert case.loss("dense", 0, 0) == pytest.approx(loss_at(0, ALL, 0))


def test_convergence_says_how_often_logits_were_screened() -> None:
    record = convergence({"dense": 0.0, "filtered": 0.0})
    rows = tuple(
        {**row, "screened_share": (0.0, 0.25, 0.5)[int(row["seed"] or 0)]}
        if row["part"] == "run" and row["method"] == "filtered"
        else row
        for row in record.rows
    )
    points = [x for x in show_convergence.blocks(replace(record, rows=rows)) if type(x) is Points]
    (verdicts,) = points
    assert any("logits were screened in 25.0% of its steps" in text for text in verdicts.items)


def test_convergence_summary() -> None:
    offsets = {"dense": 0.0, "exact": 0.001, "filtered": 0.5, "no-tail": 0.9, "cce": 0.9}
    distance, time = tables(show_convergence.summary([convergence(offsets)]))
    # Neither a part switched off nor a peer is one of ours.
    ours = ("exact", "in_forward", "filtered", "filtered, screened logits")
    assert distance.columns == ("to dense, at most, in spreads", "runs", *ours)
    (row,) = distance.rows
    assert row[:3] == ["V=32768 from random weights, 3 seeds", "`convergence`", "+0.10 ± 0.00"]
    assert row[3:] == ["", "**+50.00 ± 0.00**", "**did not run: ValueError: not here**"]
    # Steps of 20.1 and 70 ms beside dense's 20.
    assert time.rows == [[*row[:2], "**1.01**", "", "**3.50**", ""]]


def test_undecided_where_exact_is_outside() -> None:
    record = convergence({"dense": 0.0, "exact": 0.02, "filtered": 0.03})
    text, _ = markdown(page_of([record]), HEAD)
    assert "decide nothing that is smaller than 2.00 spreads" in text
    assert "| **+2.00 ± 0.00** |  | **+3.00 ± 0.00** |" in text


def test_summaries_mark_what_is_worse() -> None:
    (speed,) = tables(show_end_to_end.summary([end_to_end()]))
    (row,) = speed.rows
    assert row[:2] == ["Made up end-to-end", "filtered"]
    assert row[2].startswith("1.07 (liger, batch 8); **0.71 (liger, batch 16)**")
    assert row[3:] == ["3.12 (dense)", "1.07 (liger)"]
    record = end_to_end()
    ties = [
        {**row, "tokens_per_s": 5.0 if row["loss"] == "filtered" else 5.01} for row in record.rows
    ]
    (tied,) = tables(show_end_to_end.summary([replace(record, rows=tuple(ties))]))
    assert not any("**" in cell for cell in tied.rows[0])
    (other,) = tables(show_classes.summary([classes()]))
    assert other.rows == [["Made up classes", "filtered", "**1.25**", "0.025"]]
    (gradients,) = tables(show_fidelity.summary([fidelity()]))
    rows = {(row[0], row[1]): row[2:] for row in gradients.rows}
    assert rows["filtered", "dense"][:2] == ["0.35", "0.391"]
    assert not any("**" in cell for row in gradients.rows for cell in row)
    # A peer that our loss is slower than.
    slower = replace(
        fidelity(),
        rows=tuple(
            {**row, "median_ms": 7.0} if row["method"] == "dense" and "median_ms" in row else row
            for row in fidelity().rows
        ),
    )
    (found,) = tables(show_fidelity.summary([slower]))
    assert {row[1]: row[2] for row in found.rows}["dense"] == "**3**"


def test_steps_of_one_machine_and_commit_are_compared() -> None:
    """Of two records: a run that was made apart finds the others' dense beside it."""
    both = end_to_end()
    ours = replace(both, rows=tuple(row for row in both.rows if row["loss"] == "filtered"))
    theirs = replace(both, rows=tuple(row for row in both.rows if row["loss"] != "filtered"))
    (found,) = tables(show_end_to_end.summary([ours, replace(theirs, title="Others")]))
    (row,) = found.rows
    assert row[0] == "Made up end-to-end and Others" and row[3] == "3.12 (dense)"
    assert show_end_to_end.summary([ours, replace(theirs, commit="another")]) == []
