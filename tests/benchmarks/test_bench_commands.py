"""Commands that profile, compile and capture: each runs once on a tiny shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import first_call
from cce_dist.bench.inputs import Shape, make_inputs
from cce_dist.testing.forks import run_module
from tests.benchmarks.bench_cases import invoke, read_csv, refuse
from tests.support.torchrun import run_forked


def broken(*given: Any) -> Any:
    raise RuntimeError("no such luck")


def test_bench_profile_command(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    tiny = ["--shape", "64x300x80", "--device", "cpu", "--dtype", "float32", "--repeats", "3"]
    chosen = [
        "--method",
        "dense",
        "--method",
        "exact",
        "--extra",
        f"luckless={__name__}:broken",
    ]
    invoke("profile", *tiny, *chosen, "--most", "4", "--csv", str(path))
    rows = read_csv(path)
    of_dense = [row for row in rows if row["method"] == "dense"]
    call, total, *kernels, others = of_dense
    assert (call["kernel"], total["kernel"]) == ("a call", "all of them")
    assert len(kernels) == 4 and others["kernel"].endswith(" others")
    taken = [float(row["kernel_ms"]) for row in kernels]
    assert taken == sorted(taken, reverse=True) and float(call["kernel_ms"]) > 0
    # Rounded to a microsecond each.
    assert abs(sum(taken) + float(others["kernel_ms"]) - float(total["kernel_ms"])) < 4e-3
    # Logits, and a product for each gradient.
    products = [row for row in kernels if row["kernel"] == "aten::mm"]
    assert float(products[0]["calls"]) == 3
    (luckless,) = [row for row in rows if row["method"] == "luckless"]
    assert "no such luck" in luckless["failed"] and luckless["kernel"] == ""


def test_bench_profile_refuses_a_part_that_is_none() -> None:
    assert "part must be among" in refuse("profile", "--device", "cpu", "--part", "all")


def test_bench_first_call_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(call: list[str], cache: str) -> dict[str, float]:
        """In a fork, which has imported torch; tests/test_install.py starts the command itself."""
        variables = {"TRITON_CACHE_DIR": cache}
        done = run_module(first_call.__name__, call, tmp_path, environment=variables)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    monkeypatch.setattr(first_call, "_in_a_process", start)
    path = tmp_path / "first.csv"
    tiny = ["--shape", "64x300x16", "--device", "cpu", "--dtype", "float32"]
    invoke("first-call", *tiny, "--gradient", "exact", "--csv", str(path))
    rows = read_csv(path)
    assert [row["kernel_cache"] for row in rows] == ["empty", "filled"]
    assert all(row["method"] == "exact" for row in rows)
    assert all(0 <= float(row["seconds_to_loss"]) <= float(row["seconds"]) for row in rows)
    assert "gradient must be one of" in refuse("first-call", *tiny, "--gradient", "approximate")
    assert "dtype must name a torch dtype" in refuse(
        "first-call", "--device", "cpu", "--dtype", "float33"
    )


def test_bench_capture_command(tmp_path: Path) -> None:
    sizes = ["--vocab", "300", "--dim", "16", "--layers", "1", "--megabytes", "0.2"]
    run = ["--batch", "2", "--sequence-length", "16", "--tokens", "32", "--out", str(tmp_path)]
    # A process of its own, since training joins a process group.
    command = ("bench", "capture", *sizes, *run, "--step", "0", "--step", "2")
    code, output = run_forked(0, tmp_path / "out", *command)
    assert code == 0, output
    start, trained = (torch.load(tmp_path / f"step-{n}.pt", weights_only=True) for n in (0, 2))
    assert start["hidden"].shape == (32, 16)
    assert start["weight"].shape == (300, 16)
    assert torch.equal(start["targets"], trained["targets"])
    assert not torch.equal(start["weight"], trained["weight"])
    assert [stored["training"]["step"] for stored in (start, trained)] == [0, 2]
    counts = trained["token_counts"]
    assert counts.shape == (300,)
    assert int(counts.sum()) == trained["training"]["text_tokens"]
    made = make_inputs(str(tmp_path / "step-2.pt"), Shape(20, 0, 0), dtype=torch.bfloat16)
    assert made.description["N"] == 20
    assert made.weight.dtype == torch.bfloat16
    assert made.token_counts is not None and torch.equal(made.token_counts, counts)
    assert made.training["batch"] == 2
