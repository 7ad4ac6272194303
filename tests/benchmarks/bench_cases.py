"""Shapes and calls that the benchmarks' tests share."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from typer.testing import CliRunner

from cce_dist.bench.report import Cells
from cce_dist.cli.main import app

TINY = ["--shape", "64x500x16", "--repeats", "3"]


OURS = ["filtered", "exact", "in_forward"]


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def refuse(*arguments: str) -> str:
    """The error's text, without the box that it is drawn in."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2, result.output
    return " ".join(result.output.replace("│", " ").split())


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf8") as file:
        return list(csv.DictReader(file))


def named(rows: Sequence[Cells]) -> dict[str, Cells]:
    return {row["method"]: row for row in rows}


def write_texts(folder: Path) -> None:
    """Makes a folder of six short texts, to train on."""
    text = Path(argparse.__file__).read_text()
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(text[3000 * number : 3000 * (number + 1)])
