"""The page of all records: docs/evidence.md with its figures, or one HTML file.

The same records give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, get_args

from benchmarks.evidence.howto import HOW_TO
from benchmarks.evidence.page import (
    Block,
    Heading,
    Page,
    Points,
    Section,
    Words,
    html,
    markdown,
    provenance,
    settings_of,
)
from benchmarks.evidence.records import FOLDER, Kind, Record, read_records
from benchmarks.evidence.show import (
    show_classes,
    show_convergence,
    show_end_to_end,
    show_fidelity,
    show_probabilities,
)
from benchmarks.evidence.show.glance import glance
from benchmarks.evidence.show.show_pooled import summary_rows, together
from benchmarks.evidence.show.wanted import missing

TITLE = "Evidence: does it train the same, and what does it buy?"
HEAD = "<!-- Written by `cce-dist report` from docs/evidence/*.json: change those, not this. -->"


class Shown(NamedTuple):
    question: str
    blocks: Callable[[Record], list[Block]]
    # Takes all records of the kind; shows where our methods are better, and where worse.
    summary: Callable[[Sequence[Record]], list[Block]]


def _training(records: Sequence[Record]) -> list[Block]:
    return show_convergence.summary(records, summary_rows(records))


KINDS: dict[Kind, Shown] = {
    "convergence": Shown("Does a model train the same?", show_convergence.blocks, _training),
    "fidelity": Shown(
        "How far are the gradients from right?", show_fidelity.blocks, show_fidelity.summary
    ),
    "probabilities": Shown(
        "How sparse is a softmax?", show_probabilities.blocks, lambda records: []
    ),
    "end-to-end": Shown(
        "What does it buy in a training job?", show_end_to_end.blocks, show_end_to_end.summary
    ),
    "classes": Shown(
        "And a classifier that is no language model?", show_classes.blocks, show_classes.summary
    ),
}


def page_of(records: Sequence[Record]) -> Page:
    ordered = sorted(records, key=lambda record: (get_args(Kind).index(record.kind), record.name))
    sections = [
        Section("In one table", glance(ordered)),
        _summary(ordered),
        Section("What is missing", [_missing(ordered)]),
    ]
    for kind, shown in KINDS.items():
        blocks: list[Block] = []
        if kind == "convergence":
            for pooled in together(_of(ordered, kind)):
                blocks += [Heading(pooled.title), *pooled.blocks]
        for record in _of(ordered, kind):
            head = (Heading(record.title), provenance(record), settings_of(record))
            blocks += [*head, *shown.blocks(record)]
        nothing = Words(f"No record of kind {kind} yet.")
        sections.append(Section(shown.question, blocks or [nothing]))
    sections.append(Section("How to make these numbers", HOW_TO))
    return Page(TITLE, sections)


def _of(records: Sequence[Record], kind: Kind) -> list[Record]:
    return [record for record in records if record.kind == kind]


def _missing(records: Sequence[Record]) -> Block:
    gaps = missing(records)
    return Points(gaps) if gaps else Words("Nothing of what was asked for.")


def _summary(records: Sequence[Record]) -> Section:
    blocks: list[Block] = [
        Words(
            "Worked out from the rows below: our methods against the dense loss and against other "
            "libraries. **What is bold is worse than that.**"
        )
    ]
    for kind, shown in KINDS.items():
        if summary := shown.summary(_of(records, kind)):
            blocks += [Heading(shown.question), *summary]
    nothing = Words("Nothing recorded.")
    return Section("Wins and losses", blocks if len(blocks) > 1 else [nothing])


def write_report(folder: Path = FOLDER, html_path: Path | None = None) -> list[Path]:
    """Writes folder.md, its figures in folder/figures, and the HTML page; returns the pages' paths.

    Figures that no record needs any more are removed.

    Raises:
        RecordError: a record is broken.
    """
    page = page_of(read_records(folder))
    text, figures = markdown(page, HEAD)
    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    for old in pictures.glob("*.svg"):
        if old.name not in figures:
            old.unlink()
    for name, picture in figures.items():
        (pictures / name).write_text(picture, encoding="utf8")
    written = [folder.with_suffix(".md")]
    written[0].write_text(text, encoding="utf8")
    if html_path is not None:
        html_path.parent.mkdir(parents=True, exist_ok=True)
        html_path.write_text(html(page), encoding="utf8")
        written.append(html_path)
    return written
