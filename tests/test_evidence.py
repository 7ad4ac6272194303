"""Records, what is concluded from them, and the report: docs/evidence.md is what they render to."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from evidence_records import STEPS, classes, convergence, end_to_end, every_kind, fidelity, loss_at
from typer.testing import CliRunner

from benchmarks.evidence.charts import Axis, Chart, Line, svg
from benchmarks.evidence.convergence import ALL, RAREST, cases_of
from benchmarks.evidence.frequency import frequency_tenths, name_of
from benchmarks.evidence.page import Block, Points, Table, Words, html
from benchmarks.evidence.records import (
    Cell,
    Record,
    RecordError,
    append_rows,
    make_record,
    read_record,
    read_records,
    write_record,
)
from benchmarks.evidence.report import HEAD, markdown, page_of, write_report
from benchmarks.evidence.show import show_classes, show_convergence, show_end_to_end, show_fidelity
from benchmarks.evidence.show.glance import glance
from benchmarks.evidence.show.wanted import missing
from cce_dist.cli import app

ROOT = Path(__file__).parent.parent


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
    assert [found.name for found in read_records(tmp_path, "classes")] == ["classes"]
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
    found = append_rows(replace(record, rows=({"a": 2},), seeds=(1,), date="later"), tmp_path)
    assert (found.rows, found.seeds, found.date) == (({"a": 1}, {"a": 2}), (0, 1), record.date)
    assert read_records(tmp_path) == [found]
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
    assert verdict.rarest_at_end == pytest.approx(0.8 * 11 / 12)
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


def tables(blocks: Sequence[Block]) -> list[Table]:
    return [block for block in blocks if isinstance(block, Table)]


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


def test_glance() -> None:
    """One row a method, ratios over dense."""
    records = every_kind()
    second = replace(convergence({"dense": 0.0, "filtered": 0.02}, vocab=65536), name="second")
    words, table = glance([*records, replace(second, settings=records[0].settings)])
    assert isinstance(table, Table) and isinstance(words, Words)
    rows = {row[0]: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}
    assert list(rows)[:2] == ["dense", "**filtered**"] and "liger" in rows
    ours, training = rows["**filtered**"], "trains as dense: spreads between seeds, at most"
    # 0.4 spreads of one vocabulary, 2 of the other.
    assert ours[training] == "no: 1.20, 6 seeds"
    assert ours["time of loss and gradients"] == "0.35"
    assert ours["error of the hidden gradient"] == "0.39"
    assert ours["tokens/s of a whole step"] == "0.80" and ours["largest batch"] == "3.1"
    assert rows["dense"]["largest batch"] == "1" and rows["liger"]["largest batch"] == "1.0"
    # A method that did not run is none.
    assert not any("screened" in name for name in rows)
    on_cpu = [replace(record, machine={"device": "AMD"}) for record in records]
    assert glance([*records, *on_cpu])[1] == glance(records)[1]
    (nothing,) = glance([])
    assert isinstance(nothing, Words)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "docs/evidence").glob("convergence-*.json")), ids=lambda path: path.stem
)
def test_recorded_runs_begin_with_the_same_weights(path: Path) -> None:
    """Runs are appended: one that went on elsewhere may have trained a checkpoint of its own."""
    first: dict[tuple[Any, ...], set[float]] = {}
    for row in json.loads(path.read_text())["rows"]:
        if row.get("part") == "curve" and row["step"] == 0:
            seed = row["seed"] if row["start"] == "random" else None
            first.setdefault((row["vocab"], row["start"], seed), set()).add(row["all"])
    assert first and all(max(found) - min(found) < 2e-3 for found in first.values()), first


def test_each_gradient_is_compared_by_itself() -> None:
    """A better hidden gradient does not hide a worse one of the weight, nor all rows the rarest."""
    factors = {"all": 0.5, "10": 3.0}
    rows = tuple(
        {**row, "grad_weight_error": 3e-3 * factors.get(str(row["group"]), 1.0)}
        if row["method"] == "filtered" and row["step"] == 10
        else {**row, "grad_weight_error": 3e-3}
        for row in fidelity().rows
    )
    (found,) = tables(show_fidelity.summary([replace(fidelity(), rows=rows)]))
    (row,) = [row for row in found.rows if row[:2] == ["filtered", "dense"]]
    # At step 1000 the weight's is a tie.
    assert row[2:] == ["0.35", "0.391", "0.5 to 1", "1; **3** at step 10"]


def test_logits_that_were_never_screened_are_no_comparison() -> None:
    made = convergence({"dense": 0.0, "filtered": 0.0}, vocab=500)
    rows = [row for row in made.rows if row.get("method") != "screened"]
    as_screened = [
        {**row, "method": "screened", **({"screened_share": 0.0} if row["part"] == "run" else {})}
        for row in rows
        if row.get("method") == "filtered"
    ]
    distance, time = tables(show_convergence.summary([replace(made, rows=(*rows, *as_screened))]))
    assert [row[-2:] for row in distance.rows] == [
        ["+0.00 ± 0.00", "**full logits in every step**"]
    ]
    assert [row[-2:] for row in time.rows] == [["1.00", ""]]


def test_cosines_are_shown_by_tenth() -> None:
    shown = page_of([fidelity()])
    text, _ = markdown(shown, HEAD)
    (head,) = {line for line in text.splitlines() if line.startswith("| 1 - cosine | of the |")}
    assert head.count("tenth") == 10
    assert len([line for line in text.splitlines() if "filtered | weight gradient |" in line]) == 2


def test_fidelity_tells_screened_from_refused() -> None:
    found: dict[str, Cell] = {"inputs": "step-10", "step": 10, "method": "screened", "group": "all"}
    found |= {"by": "mass", "median_ms": 1.0, "grad_hidden_error": 1e-9, "grad_weight_error": 1e-9}
    rows = [{**found, "threshold": 2.0**-10, "default": True, "screened": False}]
    rows.append({**found, "threshold": 2.0**-6, "screened": True})
    record = fidelity()
    kept = [row for row in record.rows if row["method"] != "screened"]
    record = replace(record, rows=(*kept, *rows))
    listed = show_fidelity.summary([record])
    assert not any("screened" in row[0] for table in tables(listed) for row in table.rows)
    assert listed[-1] == Words("**filtered, screened logits: full logits at step 10**")
    (points,) = [x for x in show_fidelity.blocks(record) if isinstance(x, Points)]
    assert points.items == [
        "filtered, screened logits: 8 bits were not enough at 1 of 2 thresholds (9.77e-04), where "
        "logits are full"
    ]


@pytest.mark.parametrize("records", [every_kind(), []], ids=["every kind", "none"])
def test_write_report(records: list[Record], tmp_path: Path) -> None:
    folder, page = tmp_path / "evidence", tmp_path / "page.html"
    folder.mkdir()
    for record in records:
        write_record(record, folder)
    (folder / "figures").mkdir()
    (folder / "figures" / "old.svg").write_text("")
    written = write_report(folder, page)
    first = {path: path.read_bytes() for path in (*written, *folder.rglob("*.svg"))}
    assert folder / "figures" / "old.svg" not in first
    write_report(folder, page)
    assert first == {path: path.read_bytes() for path in (*written, *folder.rglob("*.svg"))}
    text = written[0].read_text()
    for record in records:
        assert f"`{record.command}`" in text and record.title in page.read_text()
    for name in re.findall(r'src="evidence/([^"]*)"', text):
        assert (folder / name).exists()
    if not records:
        assert text.count("no record at all") == 5


def test_html_asks_nothing_of_the_network() -> None:
    page = html(page_of(every_kind()))
    assert not re.search(r"src=|href=\"(?!#)|url\(|@import|<script", page)
    assert re.findall(r"https?://[^\"<\s]*", page) == ["http://www.w3.org/2000/svg"] * page.count(
        "<svg"
    )
    assert "prefers-color-scheme:dark" in page and 'name="viewport"' in page


def test_html_has_a_list_of_contents() -> None:
    page = html(page_of(every_kind()))
    wanted, found = (
        re.findall(pattern, page) for pattern in (r'href="#([^"]*)"', r' id="([^"]*)"')
    )
    assert wanted == found and len(set(found)) == len(found) > 10


def test_svg() -> None:
    lines = [
        Line("a < b", [(1, 1e-3), (10, 1e-1)], "red", band=[(1, 1e-4, 1e-2), (10, 1e-2, 1)]),
        Line("c", [(5, 0.2)], "blue", marker="diamond", joined=False),
        Line("nothing", []),
    ]
    chart = Chart("A & B", Axis("x"), Axis("y", "log"), lines, verticals=[(3, "here")])
    root = ElementTree.fromstring(svg(chart, alone=True))
    assert root.get("aria-label") == "A & B"
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"a < b", "c", "0.01", "here"} <= set(texts) and "nothing" not in texts
    signed = Chart("", Axis("x", names=("all", "1")), Axis("y", "signed"), [
        Line("d", [(0, -150.0), (1, 0.5)])
    ])  # fmt: skip
    texts = [element.text for element in ElementTree.fromstring(svg(signed, alone=False)).iter()]
    assert {"-100", "-10", "-1", "0", "all", "1"} <= set(texts)


def test_missing() -> None:
    gaps = missing(every_kind())
    assert "**convergence**, V=32768 from random weights: 3 seeds of in_forward (0), " in gaps[0]
    assert "**fidelity**: steps 0, 100, 5000" in gaps
    # One of its peers has failed.
    assert "**end-to-end**, on one GPU: cce" in gaps
    assert "**end-to-end**: on four GPUs" in gaps
    on_cpu = [replace(record, machine={"device": "AMD, 2 cores"}) for record in every_kind()]
    assert missing(on_cpu)[0] == "**convergence**: no record from a GPU"


def test_missing_where_no_step_was_screened() -> None:
    record = convergence({"dense": 0.0, "screened": 0.0})
    sentence = (
        "**convergence**, V=32768 from random weights: of screened every step was refused, and "
        "computed in full"
    )
    for share, expected in ((0.0, True), (0.5, False)):
        rows = [
            {**row, "screened_share": share} if row.get("method") == "screened" else row
            for row in record.rows
        ]
        gaps = missing([replace(record, rows=rows)])
        assert (sentence in gaps) == expected
        assert not any("screened (" in gap for gap in gaps if "V=32768 from random" in gap)


def test_evidence_page_is_what_the_records_render_to() -> None:
    folder = ROOT / "docs" / "evidence"
    text, figures = markdown(page_of(read_records(folder)), HEAD)
    hint = "run `cce-dist report` and commit what it writes"
    assert (ROOT / "docs" / "evidence.md").read_text() == text, hint
    found = {path.name: path.read_text() for path in (folder / "figures").glob("*.svg")}
    assert found == figures, hint
    assert sum(path.stat().st_size for path in folder.rglob("*.*") if path.is_file()) < 5e6
