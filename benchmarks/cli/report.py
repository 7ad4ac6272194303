"""`cce-dist report`: makes the evidence's pages of the records in docs/notebook/data/evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cce_dist.needs.extras import need_modules

RECORDS = Path("docs/notebook/data/evidence")


def report(
    records: Annotated[Path, typer.Option(help="Folder of the records.")] = RECORDS,
    pages: Annotated[Path, typer.Option(help="Folder to write the pages into.")] = Path(
        "docs/notebook/evidence"
    ),
    pictures: Annotated[Path, typer.Option(help="Folder to draw the pictures into.")] = Path(
        "docs/pictures"
    ),
) -> None:
    """Make docs/notebook/evidence and docs/pictures of the records in docs/notebook/data.

    The records are in the repository, not in an installed package: start in a checkout of it. The
    same records give the same pages. Exits with 2 where there is no record, or a broken one.
    """
    from benchmarks.evidence.pictures import write_pictures
    from benchmarks.evidence.records import RecordError
    from benchmarks.evidence.report import write_report

    need_modules("matplotlib")
    if not any(records.rglob("*.json")):
        here = "which has none" if records.is_dir() else f"no folder in {Path.cwd()}"
        raise typer.BadParameter(
            f"--records must be a folder of records (*.json), got {records}, {here}: start in a "
            f"checkout of the repository, whose {RECORDS} has them, or name their folder"
        )
    try:
        paths = write_report(records, pages)
        if records == RECORDS:
            paths += write_pictures(records, pictures)
    except RecordError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        text = f"pages and figures cannot all be written to {pages}: {error.strerror}"
        typer.echo(f"error: {text}", err=True)
        raise typer.Exit(1) from None
    for path in paths:
        typer.echo(path)
