"""Commands that a checkout has, and an installed package sends its users to a checkout for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import cce_dist
from benchmarks.cli.app import app as checkout_app
from cce_dist.cli.main import app
from cce_dist.needs.checkout import EXPERIMENTS, REPORT, find_checkout
from cce_dist.testing.forks import run_module
from tests.launch.launch_jobs import ROOT


def test_what_help_lists_is_what_the_checkout_has() -> None:
    group: Any = typer.main.get_command(checkout_app)
    helps = {name: command.help for name, command in group.commands.items()}
    assert {name: " ".join(text.split("\n\n")[0].split()) for name, text in helps.items()} == {
        **EXPERIMENTS,
        **REPORT,
    }


def test_the_checkout_is_that_of_the_package(tmp_path: Path) -> None:
    assert find_checkout() == ROOT
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").write_text("raise RuntimeError('somebody else')")
    command = ("bench", "first-call", "--help")
    done = run_module("cce_dist", command, tmp_path, path=[tmp_path])
    assert done.returncode == 0, done.stderr
    assert "cce-dist bench first-call [OPTIONS]" in done.stdout


@pytest.mark.parametrize("words", ["bench converge --help", "report", "bench train x --record y"])
def test_an_installed_package_says_where_a_command_is(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in site-packages, where another package has left its own benchmarks.
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(cce_dist, "__file__", str(tmp_path / "cce_dist" / "__init__.py"))
    assert find_checkout() is None
    done = CliRunner().invoke(app, words.split(), prog_name="cce-dist")
    command = " ".join(word for word in words.split() if word not in ("--help", "x", "y"))
    assert done.exit_code == 2
    assert done.output == (
        f"error: `cce-dist {command}` is in the repository and in its source archive alone: start "
        f"`python -m cce_dist {command}` in the folder of one of them\n"
    )
    # A shell completes a command line without an error.
    group: Any = typer.main.get_command(app)
    context = group.make_context("cce-dist", ["report"], resilient_parsing=True)
    assert group.resolve_command(context, ["report"])[0] == "report"
