"""A command that could not write what it found says so before it looks for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cce_dist.cli import app
from cce_dist.cli_output import check_output


def test_check_output_accepts_what_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "there.json").touch()
    for name in ("there.json", "new.json", "new/folders/new.json"):
        check_output("--json", tmp_path / name)
    check_output("--json", None)
    check_output("--json", Path("-"))
    assert [path.name for path in tmp_path.iterdir()] == ["there.json"]


def test_check_output_refuses_a_folder_that_is_not_writable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=r"--json must be writable, got .*x.json: .* is not"):
        check_output("--json", tmp_path / "x.json")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["doctor", "--json"], id="doctor"),
        pytest.param(["eval", "no-run", "no-text", "--json"], id="eval"),
        pytest.param(["report", "--html"], id="report"),
    ],
)
def test_commands_refuse_what_cannot_be_written(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in {
        tmp_path: "must name a file, got the folder",
        tmp_path / "file" / "x": "must lie in a folder, got",
    }.items():
        done = CliRunner().invoke(app, [*command, str(path)])
        said = " ".join(done.output.replace("│", " ").split())
        assert done.exit_code == 2, done.output
        assert f"{command[-1]} {message}" in said
