"""Every benchmark runs once on a tiny shape, and refuses to time what is wrong."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from cce_dist.bench import loss as bench_loss_module
from cce_dist.bench.filter import bench_filter
from cce_dist.bench.inputs import make_inputs
from cce_dist.bench.loss import bench_loss, errors, golden_gradients, gradients, methods
from cce_dist.bench.table import median_and_spread
from cce_dist.cli import app

TINY = ["--tokens", "64", "--vocab", "500", "--dim", "16"]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("inputs", ["gaussian", "zipf"])
def test_bench_loss_command(inputs: str, tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    arguments = ["bench", "loss", *TINY, "--inputs", inputs, "--repeats", "3", "--csv", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    rows = read_csv(path)
    assert [row["method"] for row in rows][:4] == ["dense", "filtered", "exact", "in_forward"]
    assert all(float(row["median_ms"]) > 0 for row in rows)
    assert rows[0]["of_dense"] == "1.00"
    assert rows[0]["inputs"] == inputs
    assert rows[0]["V"] == "500"
    assert rows[0]["command"].startswith("cce-dist")
    assert {"date", "device", "torch", "commit"} <= set(rows[0])


def test_bench_filter_command(tmp_path: Path) -> None:
    path = tmp_path / "filter.csv"
    arguments = ["bench", "filter", *TINY, "--share", "1", "--share", "0", "--csv", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    dense, one, zero = read_csv(path)
    assert dense["keep / uniform mass"] == "dense"
    assert float(one["tail mass"]) > float(zero["tail mass"]) == 0
    assert zero["kept"] == "100.0 %"


def test_bench_loss_refuses_wrong_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    real = methods()

    def half(*inputs: torch.Tensor) -> torch.Tensor:
        return 0.5 * real["exact"](*inputs)

    monkeypatch.setattr(bench_loss_module, "methods", lambda only: {**real, "exact": half})
    with pytest.raises(RuntimeError, match=r"exact: grad_hidden_error is .* nothing was timed"):
        bench_loss(make_inputs("gaussian", 32, 100, 8), repeats=3)


def test_bench_inputs_refuse_unknown_kind() -> None:
    with pytest.raises(ValueError, match=r"inputs must be one of .* or a file, got 'nonsense'"):
        make_inputs("nonsense", 1, 1, 1)
    with pytest.raises(ValueError, match=r"methods must be among .* got \['fastest'\]"):
        methods(["fastest"])
    result = CliRunner().invoke(app, ["bench", "loss", *TINY, "--dtype", "bf17"])
    assert result.exit_code == 2
    assert "bf17" in result.output


def test_golden_gradients_are_those_of_autograd() -> None:
    inputs = make_inputs("zipf", 130, 300, 8)
    wide = inputs.to(torch.float64, torch.device("cpu"))
    found = errors(gradients(methods()["dense"], wide), golden_gradients(inputs, chunk=64))
    assert max(found.values()) < 1e-12


def test_stored_inputs(tmp_path: Path) -> None:
    made = make_inputs("gaussian", 8, 32, 4)
    stored = {"hidden": made.hidden, "weight": made.weight, "targets": made.targets}
    torch.save(stored, tmp_path / "step-5.pt")
    loaded = make_inputs(str(tmp_path / "step-5.pt"), 1, 1, 1)
    assert loaded.kind == "step-5"
    assert torch.equal(loaded.hidden, made.hidden)
    assert bench_filter(loaded, [1.0])[0]["kept"] == "100.0 %"


def test_median_and_spread() -> None:
    found = median_and_spread([0.001 * i for i in range(1, 12)])
    assert found == {"median_ms": "6.0", "p10_ms": "2.0", "p90_ms": "10.0"}
