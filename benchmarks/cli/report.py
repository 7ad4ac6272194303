"""`cce-dist report`: makes a page of the records in docs/evidence."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cce_dist.cli.output import check_output


def report(
    records: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("docs/evidence"),
    html: Annotated[
        Path | None, typer.Option(help="Also write one file for a browser, with all figures in it.")
    ] = None,
) -> None:
    """Make docs/evidence.md, with its figures, of the records in docs/evidence.

    The records are in the repository, not in an installed package: start in a checkout of it. The
    same records give the same bytes. Exits with 2 where there is no record, or a broken one.
    """
    from benchmarks.evidence.records import RecordError
    from benchmarks.evidence.report import write_report

    if not any(records.glob("*.json")):
        here = "which has none" if records.is_dir() else f"no folder in {Path.cwd()}"
        raise typer.BadParameter(
            f"--records must be a folder of records (*.json), got {records}, {here}: start in a "
            "checkout of the repository, whose docs/evidence has them, or name their folder"
        )
    try:
        check_output("--html", html)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        paths = write_report(records, html)
    except RecordError as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        where = records.with_suffix(".md")
        text = f"{where} and its figures cannot all be written: {error.strerror}"
        typer.echo(f"error: {text}", err=True)
        raise typer.Exit(1) from None
    for path in paths:
        typer.echo(path)
