"""`cce-dist report`: the evidence of docs/evidence as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_output import check_output


def report(
    records: Annotated[Path, typer.Option(help="Folder of the records.")] = Path("docs/evidence"),
    html: Annotated[
        Path | None, typer.Option(help="Also one file for a browser, with all figures in it.")
    ] = None,
) -> None:
    """Make docs/evidence.md, with its figures, of the records in docs/evidence.

    The same records give the same bytes. Exits with 2 where a record is broken.
    """
    from .evidence.records import RecordError
    from .evidence.report import write_report

    if not records.is_dir():
        raise typer.BadParameter(f"records must be a folder, got {str(records)!r}")
    try:
        check_output("--html", html)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        paths = write_report(records, html)
    except RecordError as error:
        raise typer.BadParameter(str(error)) from None
    for path in paths:
        typer.echo(path)
