"""Findings of commands, on the terminal and in files, and refusals of arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Columns of output to a file, such as a log of torchrun.
WIDTH = 80
JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Write the findings here; - prints nothing but them.")
]


@contextmanager
def refusals() -> Iterator[None]:
    """Turns errors of arguments and of files into a line on stderr and exit code 2."""
    try:
        yield
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None


def check_output(option: str, path: Path | None) -> None:
    """Checks that a file can be written; None and "-", for stdout, always pass.

    Raises:
        ValueError: the file, or the first existing folder above it, cannot be written.
    """
    if path is None or str(path) == "-":
        return
    # By os.path: Path's methods raise for paths that this user may not see.
    if os.path.isdir(path):
        raise ValueError(f"{option} must name a file, got the folder {path}")
    existing = path
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if existing != path and not os.path.isdir(existing):
        raise ValueError(f"{option} must lie in a folder, got {path}: {existing} is a file")
    if not os.access(existing, os.W_OK):
        raise ValueError(f"{option} must be writable, got {path}: {existing} is not")


def write_output(option: str, path: Path, text: str) -> None:
    """Writes a file, and the folders above it.

    Raises:
        ValueError: the file cannot be written, although it has passed `check_output`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{option} cannot be written, got {path}: {error.strerror}") from None


def hand_over(findings: dict[str, Any], path: Path | None, show: Callable[[], None]) -> None:
    """Prints the findings if the path of --json is "-"; else shows them, and writes the file.

    Raises: as `write_output`.
    """
    text = json.dumps(findings, indent=1)
    if str(path) == "-":
        typer.echo(text)
        return
    show()
    if path is not None:
        write_output("--json", path, text + "\n")


def table_of(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str = "",
    caption: str = "",
    left: int = 0,  # columns that are not of numbers
) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, caption=caption)
    for index, column in enumerate(columns):
        justify = "left" if index < left else "right"
        table.add_column(column, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def console_of_tables() -> Console:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)
