"""The pages of the evidence: one for each kind of record, made from docs/notebook/data/evidence."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import get_args

from benchmarks.evidence.figures import write_figure
from benchmarks.evidence.markdown import provenance
from benchmarks.evidence.records import FOLDER, Kind, Record, read_records
from benchmarks.evidence.show import (
    show_convergence,
    show_distillation,
    show_end_to_end,
    show_fidelity,
)

PAGES = Path("docs/notebook/evidence")
HEAD = "<!-- Written by `cce-dist report` from {records}: change those, not this. -->"
# Each module has a TITLE, introduction(records), section(record) and figures(records).
KINDS: dict[Kind, ModuleType] = {
    "convergence": show_convergence,
    "fidelity": show_fidelity,
    "end-to-end": show_end_to_end,
    "distillation": show_distillation,
}
assert tuple(KINDS) == get_args(Kind)


def page_of(kind: Kind, records: Sequence[Record], rows: Path = Path(".")) -> str:
    """Returns the page of the records of a kind: what they say together, then each of them.

    Args:
        rows: the records' folder, from the page.
    """
    shown = KINDS[kind]
    pictures = shown.figures(records)
    parts = [HEAD.format(records=rows.as_posix()), f"# {shown.TITLE}"]
    parts += shown.introduction(records)
    names = {record.name for record in records}
    parts += [_picture(name) for name in pictures if name not in names]
    for record in records:
        parts += [f"## {record.name}", f"{record.title}.", *shown.section(record)]
        if record.name in pictures:
            parts.append(_picture(record.name))
        parts += provenance(record, rows / kind / f"{record.name}.json")
    return "\n\n".join(map(_wrapped, parts)) + "\n"


def _wrapped(part: str) -> str:
    """Returns a paragraph in lines; tables, lists, commands and pictures stay as they are."""
    if part.startswith(("|", "!", "    ", "- ", "#", "<")):
        return part
    return textwrap.fill(part, 120, break_long_words=False, break_on_hyphens=False)


def _picture(name: str) -> str:
    return f"![{name}](figures/{name}.svg)"


def write_report(folder: Path = FOLDER, pages: Path = PAGES) -> list[Path]:
    """Writes a page for each kind that has records, and pages/figures; returns the pages' paths.

    Figures that no record needs any more are removed.

    Raises:
        RecordError: a record is broken.
    """
    records = read_records(folder)
    rows = Path(os.path.relpath(folder, pages))
    written, drawn = [], set()
    for kind in KINDS:
        mine = [record for record in records if record.kind == kind]
        if not mine:
            continue
        path = pages / f"{kind}.md"
        pages.mkdir(parents=True, exist_ok=True)
        path.write_text(page_of(kind, mine, rows), encoding="utf8")
        written.append(path)
        for name, charts in KINDS[kind].figures(mine).items():
            write_figure(pages / "figures" / f"{name}.svg", charts)
            drawn.add(f"{name}.svg")
    for old in (pages / "figures").glob("*.svg"):
        if old.name not in drawn:
            old.unlink()
    return written
