"""Records, and what is concluded from them."""

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

from benchmarks.evidence.convergence import ALL, RAREST, Pool, cases_of
from benchmarks.evidence.records import (
    Record,
    RecordError,
    append_rows,
    make_record,
    read_record,
    read_records,
    write_record,
)
from benchmarks.evidence.show import show_convergence, show_end_to_end
from benchmarks.fidelity.tenths import name_of, tenths_of
from cce_dist.cli.main import app
from tests.benchmarks.evidence_records import STEPS, convergence, end_to_end, fidelity, loss_at

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
    write_record(end_to_end(), tmp_path)
    assert [stored.name for stored in read_records(tmp_path)] == ["end-to-end", "fidelity"]
    assert read_records(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"kind": "speed"}, "kind: Input should be 'convergence', ", id="kind"),
        pytest.param({"name": "A b"}, "name: String should match pattern .*, got 'A b'", id="name"),
        pytest.param({"title": ""}, "title: String should have at least 1 .*, got ''", id="title"),
        pytest.param({"seeds": (0.5,)}, "seeds.0: Input should be .* integer, got 0.5", id="seeds"),
        pytest.param({"rows": [{"a": math.nan}]}, r"rows.0.a.* finite number, got nan", id="nan"),
        pytest.param({"rows": [{"a": [1]}]}, r"rows.0.a.* valid number, got \[1\]", id="list"),
        pytest.param({"settings": {"a": {}}}, "settings.a.* valid number, got {}", id="settings"),
    ],
)
def test_record_refuses(change: dict, message: str) -> None:
    record = end_to_end()
    machine = {**record.machine, "date": "d", "commit": "c", "command": "x"}
    fields = {"kind": "fidelity", "name": "a", "title": "A", "machine": machine, **change}
    with pytest.raises(RecordError, match=message):
        make_record(**fields)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(lambda text: text[:-20], "Invalid JSON", id="half"),
        pytest.param(lambda text: text.replace(": 1,", ": 2,", 1), "schema: .* got 2", id="schema"),
        pytest.param(lambda text: text.replace('"schema": 1,', ""), "schema: .*requ", id="none"),
        pytest.param(lambda text: text.replace('"title"', '"tilte"'), "title: .*requ", id="field"),
        pytest.param(lambda text: text.replace('"title"', '"a": 1, "title"'), "a: Un", id="more"),
        pytest.param(lambda text: text.replace('"step":0', '"step":NaN'), "finite", id="nan"),
        pytest.param(lambda text: "[]", "should be an object, got ", id="list"),
    ],
)
def test_read_record_refuses(spoil: Callable[[str], str], message: str, tmp_path: Path) -> None:
    path = write_record(convergence({"dense": 0.0}), tmp_path)
    path.write_text(spoil(path.read_text()))
    with pytest.raises(RecordError, match=message) as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    # The command says the same.
    result = CliRunner().invoke(app, ["report", "--records", str(tmp_path)])
    assert result.exit_code == 2


def test_append_rows(tmp_path: Path) -> None:
    record = replace(end_to_end(), rows=({"a": 1},), seeds=(0,))
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
    assert [path.name for path in tmp_path.iterdir()] == ["end-to-end.json"]


def test_make_record() -> None:
    with pytest.raises(RecordError, match="commit: String should have at least 1 character"):
        make_record("fidelity", "a", "A", {"date": "d", "command": "c"})


def test_tenths_of() -> None:
    # Twice as many of each id as of the one before; 9 never.
    tenths = tenths_of(np.array([*(2 ** np.arange(9)), 0]))
    # The last has half of all, the one before a quarter: their middles are at 0.25 and 0.625.
    assert tenths[8] == 3 and tenths[7] == 7 and tenths[0] == 10
    assert [name_of(tenth) for tenth in tenths[-3:]] == ["7", "3", "never"]


def alone(record: Record) -> Pool:
    """The runs of a record that has a single case."""
    (case,) = cases_of(record)
    return Pool((case,), tuple(case.methods))


def test_verdict_within_the_spread() -> None:
    runs = alone(convergence({"dense": 0.0, "filtered": 0.008, "no-tail": 0.02}))
    end = STEPS[-1]
    # Seeds are 0.01 apart, so that the standard deviation is that at every step.
    assert runs.spread(end) == pytest.approx(0.01)
    assert runs.difference("filtered", end, RAREST) == pytest.approx(0.008 * 11 / 12)
    # The seeds differ by themselves; each differs from its own dense by the same.
    assert runs.standard_error("filtered", end) == pytest.approx(0, abs=1e-12)
    verdict = runs.verdict("filtered")
    assert verdict.worst == pytest.approx(0.8) and verdict.share_within == 1
    assert (verdict.step, verdict.group) == (end, "never")
    assert runs.in_spreads("filtered", end, RAREST) == pytest.approx(0.8 * 11 / 12)
    outside = runs.verdict("no-tail")
    assert outside.worst == pytest.approx(2.0)
    assert 0 < outside.share_within < 1
    (case,) = runs.cases
    assert case.why_not("screened") == "ValueError: not here"
    compared = [name for name in case.methods if case.compares(name)]
    assert compared == ["filtered", "no-tail"]


def test_spread_is_of_the_evaluations_around() -> None:
    record = convergence({"dense": 0.0})
    # Seeds that are apart in the last evaluation alone.
    rows = [
        {**row, ALL: 5.0 + (0.4 * row["seed"] if row["step"] == 80 else 0.0)}
        if row["part"] == "curve"
        else row
        for row in record.rows
    ]
    runs = alone(replace(record, rows=tuple(rows)))
    assert runs.spread(20, ALL) == 0
    # Those of steps 40, 60 and 80.
    variance = statistics.variance([0.0, 0.4, 0.8])
    assert runs.spread(80, ALL) == pytest.approx(math.sqrt(variance / 3))


def test_standard_error_is_of_the_seeds_own_differences() -> None:
    record = convergence({"dense": 0.0, "filtered": 0.0})
    rows = tuple(
        {**row, ALL: float(row[ALL] or 0) + (0.01, 0.02, 0.06)[int(row["seed"] or 0)]}
        if row["part"] == "curve" and row["method"] == "filtered"
        else row
        for row in record.rows
    )
    record = replace(record, rows=rows)
    error = statistics.stdev([0.01, 0.02, 0.06]) / math.sqrt(3)
    assert alone(record).standard_error("filtered", STEPS[-1]) == pytest.approx(error)
    text = "\n".join(show_convergence.section(record))
    # Two standard errors of three seeds: may be chance, and is not bold.
    assert f"| +0.0300 ± {error:.4f} |" in text
    assert f"| +3.00 ± {100 * error:.2f} | all tokens, step" in text


def test_a_comparison_needs_seeds() -> None:
    runs = alone(convergence({"dense": 0.0, "filtered": 0.0}, seeds=1))
    (case,) = runs.cases
    assert "two seeds" in case.why_not("filtered")
    assert runs.standard_error("filtered", 80) is None
    assert case.loss("dense", 0, 0) == pytest.approx(loss_at(0, ALL, 0))


def test_convergence_says_what_did_not_run() -> None:
    record = convergence({"dense": 0.0, "exact": 0.001, "filtered": 0.5, "cce": 0.9})
    conclusion, table = show_convergence.section(record)
    assert "screened logits did not run: ValueError: not here." in conclusion
    # Only ours are concluded on.
    assert "Farthest from dense, in spreads: exact +0.10 ± 0.00, filtered +50.00" in conclusion
    assert "decide nothing" not in conclusion
    assert "| Apple cce | 3 |" in table


def test_three_seeds_take_more_standard_errors_than_nine() -> None:
    for seeds, bold in ((3, False), (9, True)):
        record = convergence({"dense": 0.0, "filtered": 0.0}, seeds=seeds)
        rows = tuple(
            {**row, ALL: float(row[ALL] or 0) + 0.02 + 0.01 * (int(row["seed"] or 0) % 3)}
            if row["part"] == "curve" and row["method"] == "filtered"
            else row
            for row in record.rows
        )
        # 5.2 and 10.4 standard errors.
        text = "\n".join(show_convergence.section(replace(record, rows=rows)))
        assert ("| **+0.0300 ± " in text) == bold


def test_undecided_where_exact_is_outside() -> None:
    conclusion, _ = show_convergence.section(convergence({"dense": 0.0, "exact": 0.02}))
    assert "decide nothing that is smaller than 2.00 spreads" in conclusion


def test_introductions_mark_what_is_worse() -> None:
    _, compared, _ = show_end_to_end.introduction([end_to_end()])
    assert compared == (
        "- Made up end-to-end: filtered trains 1.07 times liger at batch 8; **0.71 times liger at "
        "batch 16**; 1.07 times liger at each one's largest."
    )


def test_steps_of_one_machine_and_commit_are_compared() -> None:
    """Of two records: a run that was made apart finds the others' dense beside it."""
    both = end_to_end()
    ours = replace(both, rows=tuple(row for row in both.rows if row["loss"] == "filtered"))
    theirs = replace(both, rows=tuple(row for row in both.rows if row["loss"] != "filtered"))
    assert show_end_to_end.introduction([ours, replace(theirs, title="Others")])[1].startswith(
        "- Made up end-to-end and Others: filtered trains 1.07 times liger at batch 8"
    )
    _, apart, _ = show_end_to_end.introduction([ours, replace(theirs, commit="another")])
    assert apart == "No two losses have been run together."
