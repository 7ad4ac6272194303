"""A command that could not write what it found says so before it looks for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cce_dist.cli.main import app
from cce_dist.cli.output import check_output, write_output


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


def test_check_output_of_a_path_that_cannot_be_looked_at(tmp_path: Path) -> None:
    # As of a folder that this user may not search, Path's methods raise for it.
    check_output("--json", tmp_path / (300 * "x"))
    with pytest.raises(ValueError, match=r"--json cannot be written, got .*: File name too long"):
        write_output("--json", tmp_path / (300 * "x"), "")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["doctor", "--json"], id="doctor"),
        pytest.param(["eval", "no-run", "no-text", "--json"], id="eval"),
    ],
)
def test_commands_refuse_what_cannot_be_written(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, message in {
        tmp_path: "must name a file, got the folder",
        tmp_path / "file" / "x": "must lie in a folder, got",
    }.items():
        done = CliRunner().invoke(app, [*command, str(path)])
        error_lines = " ".join(done.output.replace("│", " ").split())
        assert done.exit_code == 2, done.output
        assert f"{command[-1]} {message}" in error_lines


def test_write_output(tmp_path: Path) -> None:
    write_output("--json", tmp_path / "new" / "x.json", "{}")
    assert (tmp_path / "new" / "x.json").read_text() == "{}"
    with pytest.raises(ValueError, match="--json cannot be written, got /dev/full: No space left"):
        write_output("--json", Path("/dev/full"), "{}")


def test_doctor_whose_findings_cannot_be_written() -> None:
    done = CliRunner().invoke(app, ["doctor", "--seconds", "0", "--json", "/dev/full"])
    assert done.exit_code == 1
    assert "error: --json cannot be written, got /dev/full: No space left" in done.output


def test_report_outside_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments, message in {
        (): f"got docs/notebook/data/evidence, no folder in {tmp_path}: start in a checkout",
        ("--records", "."): "got ., which has none: start in a checkout",
    }.items():
        done = CliRunner().invoke(app, ["report", *arguments])
        assert done.exit_code == 2
        error_lines = " ".join(done.output.replace("│", " ").split())
        assert "".join(message.split()) in "".join(error_lines.split()), error_lines
    assert not list(tmp_path.iterdir())
