"""The report: docs/evidence.md is what the records render to."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.evidence.charts import Axis, Chart, Line, svg
from benchmarks.evidence.page import Points, Table, Words, html
from benchmarks.evidence.records import (
    Cell,
    Record,
    read_records,
    write_record,
)
from benchmarks.evidence.report import HEAD, markdown, page_of, write_report
from benchmarks.evidence.show import show_convergence, show_fidelity
from benchmarks.evidence.show.glance import glance
from benchmarks.evidence.show.wanted import missing
from tests.benchmarks.evidence_records import convergence, every_kind, fidelity, tables

ROOT = Path(__file__).parents[2]


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
