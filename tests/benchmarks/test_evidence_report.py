"""The report: docs/notebook/evidence is what the records render to."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.evidence.figures import Chart, Curve, write_figure
from benchmarks.evidence.methods import Look
from benchmarks.evidence.records import FOLDER, Cell, Record, read_records, write_record
from benchmarks.evidence.report import KINDS, PAGES, page_of, write_report
from benchmarks.evidence.show import show_convergence, show_fidelity
from tests.benchmarks.evidence_records import convergence, every_kind, fidelity

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "path", sorted((ROOT / FOLDER / "convergence").glob("*.json")), ids=lambda path: path.stem
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
        if "failed" not in row
    )
    record = replace(fidelity(), rows=rows)
    text = "\n".join(show_fidelity.section(record))
    found = re.findall(r"\| (time|error) [^|]*\| step 10 \| step 1000 \|", text)
    assert found == ["time", "error", "error", "error"]
    assert re.findall(r"\| filtered \| (\S+) \| (\S+) \|", text) == [
        ("0.35", "0.35"),
        ("0.39", "0.39"),
        ("0.50", "1.00"),
        ("3.00", "1.00"),
    ]
    (about, *_) = show_fidelity.introduction([record])
    assert "error of the weight's rows of the rarest tenth 1.00 to 3.00" in about


def test_a_loss_that_is_slower_than_dense_shows_so() -> None:
    rows = tuple(
        {**row, "median_ms": 7.0} if row["method"] == "dense" and "median_ms" in row else row
        for row in fidelity().rows
    )
    assert "| filtered | 3.00 |" in "\n".join(show_fidelity.section(replace(fidelity(), rows=rows)))


def test_logits_that_were_never_screened_are_no_comparison() -> None:
    record = convergence({"dense": 0.0, "filtered": 0.0}, vocab=500)
    rows = [row for row in record.rows if row.get("method") != "screened"]
    as_screened = [
        {**row, "method": "screened", **({"screened_share": 0.0} if row["part"] == "run" else {})}
        for row in rows
        if row.get("method") == "filtered"
    ]
    text = "\n".join(show_convergence.section(replace(record, rows=(*rows, *as_screened))))
    assert "screened logits: full logits in every step" in text
    assert "Farthest from dense, in spreads: filtered +0.00 ± 0.00." in text


def test_fidelity_tells_screened_from_refused() -> None:
    row: dict[str, Cell] = {"inputs": "step-10", "step": 10, "method": "screened", "group": "all"}
    row |= {"by": "mass", "median_ms": 1.0, "grad_hidden_error": 1e-9, "grad_weight_error": 1e-9}
    refused = {**row, "threshold": 2.0**-10, "default": True, "screened": False}
    screened = {**row, "threshold": 2.0**-6, "screened": True}
    kept = [row for row in fidelity().rows if row["method"] != "screened"]
    record = replace(fidelity(), rows=(*kept, refused, screened))
    text = "\n".join(show_fidelity.section(record))
    assert "| screened logits |" not in text
    assert "screened logits: 8 bits were not enough at step 10; logits were computed in full" in (
        text
    )


@pytest.mark.parametrize("records", [every_kind(), []], ids=["every kind", "none"])
def test_write_report(records: list[Record], tmp_path: Path) -> None:
    folder, pages = tmp_path / "data", tmp_path / "pages"
    for record in records:
        write_record(record, folder / record.kind)
    (pages / "figures").mkdir(parents=True)
    (pages / "figures" / "old.svg").write_text("")
    written = write_report(folder, pages)
    assert [path.stem for path in written] == [record.kind for record in records]
    first = {path: path.read_bytes() for path in pages.rglob("*.*")}
    assert pages / "figures" / "old.svg" not in first
    write_report(folder, pages)
    assert first == {path: path.read_bytes() for path in pages.rglob("*.*")}
    for record, path in zip(records, written, strict=True):
        text = path.read_text()
        assert f"    {record.command}" in text and record.title in text
        links = re.findall(r"\]\(([^)]*)\)", text)
        assert f"../data/{record.kind}/{record.name}.json" in links
        assert all((pages / link).exists() for link in links)


def test_write_figure(tmp_path: Path) -> None:
    curves = [
        Curve("a < b", [(1, 1e-3), (10, 1e-1)], Look("#ff0000")),
        Curve("nothing", [], Look("#00ff00")),
    ]
    chart = Chart("A & B", "x", "y", curves, ("linear", "log"), shade=(1e-3, 1e-2))
    named = Chart("", "x", "y", [Curve("c", [(0, -150.0), (1, 0.5)], Look("#0000ff"))],
                  ("linear", "symlog"), names=("all", "1"))  # fmt: skip
    path = tmp_path / "new" / "figure.svg"
    write_figure(path, [chart, named])
    texts = {element.text for element in ElementTree.parse(path).iter()}
    assert {"A & B", "a < b", "c", "all"} <= texts and "nothing" not in texts


def test_evidence_pages_are_what_the_records_render_to() -> None:
    hint = "run `cce-dist report` and commit what it writes"
    pages, records = ROOT / PAGES, read_records(ROOT / FOLDER)
    rows = Path(os.path.relpath(FOLDER, PAGES))
    drawn = set()
    for kind in KINDS:
        mine = [record for record in records if record.kind == kind]
        page = pages / f"{kind}.md"
        # A kind whose command has not been run yet has no page.
        assert page.exists() == bool(mine), hint
        if not mine:
            continue
        assert page.read_text() == page_of(kind, mine, rows), hint
        drawn |= {f"{name}.svg" for name in KINDS[kind].figures(mine)}
    # Not byte by byte: another version of matplotlib draws the same otherwise.
    assert {path.name for path in (pages / "figures").iterdir()} == drawn, hint
    sizes = [path.stat().st_size for path in (ROOT / FOLDER).rglob("*.*") if path.is_file()]
    assert sum(sizes) < 5e6
