"""`cce-dist bench ranks`, over gloo, started as its users start it."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cce_dist.bench.rank_methods import choose_rank_methods
from cce_dist.cli import app
from cce_dist.testing.torchrun import ROOT


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "-m", "cce_dist", "bench", "ranks", "--device", "cpu"]
    environment = dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="")
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.run(
        [*command, "--dtype", "float32", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


@pytest.mark.timeout(180)
def test_ranks_are_measured_beside_one(tmp_path: Path) -> None:
    path = tmp_path / "ranks.csv"
    arguments = ("--shape", "64x512x16", "--repeats", "3", "--peers", "cce", "--csv", str(path))
    done = bench("--inputs", "zipf-shuffled", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    with path.open() as file:
        rows = list(csv.DictReader(file))
    measured = [row for row in rows if not row["failed"]]
    places = [(row["ranks"], row["sequence_parallel"]) for row in measured]
    assert places == [("1", ""), ("2", ""), ("2", "yes")] * 3 + [("1", ""), ("2", "")]
    for row in measured:
        assert float(row["median_ms"]) > 0 and float(row["times_faster"]) > 0
        assert max(float(row["grad_hidden_error"]), float(row["grad_weight_error"])) < 2e-6
        assert row["command"].startswith("torchrun --nproc-per-node 2 -m cce_dist bench ranks")
    # Not installed here: said, rather than left out.
    assert {row["method"]: row["failed"][:7] for row in rows if row["failed"]} == {"cce": "rank 0:"}
    assert done.stdout.count("zipf-shuffled, N 64") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--size", "2", "--shape", "8x32x4"), "size must divide the number of ranks, 1"),
        (("--method", "fast"), "methods and peers must be among"),
    ],
)
def test_refusals(arguments: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "ranks", "--device", "cpu", *arguments])
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("│", " ").split())


def test_rank_methods_by_name() -> None:
    assert [method.name for method in choose_rank_methods((), "cce,verl")] == [
        "filtered",
        "exact",
        "in_forward",
        "dense",
        "cce",
        "verl",
    ]
    assert [method.name for method in choose_rank_methods(["exact"], "none")] == ["exact"]
