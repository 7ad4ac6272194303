"""Table A3 of Cut Cross-Entropy by `cce-dist plan paper`."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cce_dist.cli import plan as cli_plan
from cce_dist.cli.main import app
from cce_dist.planner.models.model import PAPER, Model
from cce_dist.planner.models.paper import PRINTED, deviation

# What their owners publish.
PARAMETERS = {
    "GPT2": 124_439_808,
    "GPT Neo (1.3B)": 1_315_575_808,
    "GPT Neo (2.7B)": 2_651_307_520,
    "Gemma (2B)": 2_506_172_416,
    "Gemma 2 (2B)": 2_614_341_888,
    "Gemma 2 (27B)": 27_227_128_320,
    "Llama 2 (7B)": 6_738_415_616,
    "Llama 2 (13B)": 13_015_864_320,
    "Llama 3 (8B)": 8_030_261_248,
    "Llama 3 (70B)": 70_553_706_496,
    "Mistral 7B": 7_241_732_096,
    "Mixtral 8x7B": 46_702_792_704,
    "Phi 1.5": 1_418_270_720,
    "Phi3 Medium": 13_960_238_080,
    "Qwen1.5 (7B)": 7_721_324_544,
}


@pytest.mark.parametrize("name", PAPER)
def test_parameters(name: str) -> None:
    assert PAPER[name].parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", PRINTED)
def test_every_column_is_the_printed_one(name: str) -> None:
    off = deviation(name)
    assert off.mb <= 0.5 and off.tokens <= 0.5 and off.increase < 0.05


def test_the_command(tmp_path: Path) -> None:
    rows, picture = tmp_path / "a3.csv", tmp_path / "sub" / "figure-1.png"
    result = CliRunner().invoke(app, ["plan", "paper", "--csv", str(rows), "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    assert "all 15 rows are the printed ones, but for rounding" in result.output
    with rows.open(newline="") as file:
        found = {row["model"]: row for row in csv.DictReader(file)}
    assert list(found) == list(PRINTED)
    assert found["Gemma 2 (2B)"]["logits MB"] == "64000"
    assert found["Gemma 2 (2B)"]["increase"] == "9.5"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_table_fits_80_columns() -> None:
    result = CliRunner().invoke(app, ["plan", "paper"], env={"COLUMNS": "80"})
    assert max(map(len, result.output.splitlines())) <= 80
    assert "\u2026" not in result.output
    for text in (*PRINTED, "27,227,128,320", "activations MB", "batch before", "69,845,595"):
        assert text in result.output


def test_a_row_that_is_off_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(PAPER["GPT2"], layers=13)
    for module in (cli_plan, __import__("cce_dist.planner.models.paper", fromlist=["PAPER"])):
        monkeypatch.setitem(module.PAPER, "GPT2", wrong)
    result = CliRunner().invoke(app, ["plan", "paper"])
    assert result.exit_code == 1
    assert "further from the print than rounding: GPT2" in result.output


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, "layers must be >= 1, got 0"),
        ({"heads": 12, "kv_heads": 5}, "kv_heads must divide heads, 12, got 5"),
        ({"heads": 5, "kv_heads": 5}, "heads must divide dim, 64, got 5: set head_dim"),
        ({"rows": 99}, "rows must be >= classes, 100, got 99"),
    ],
)
def test_bad_models_are_refused(values: dict[str, int], message: str) -> None:
    right = {"classes": 100, "dim": 64, "layers": 2, "mlp_dim": 128, "heads": 4, "kv_heads": 2}
    with pytest.raises(ValueError, match=message):
        Model(**(right | values))
