"""launch/*.sbatch under a stand-in for Slurm (tests/launchers/), whose nodes are this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from launch_jobs import ROOT, free_port, launch_environment, write_config

from cce_dist.testing.torchrun import read_losses, run_forked_training

# Six processes import torch, on a machine that may be busy.
pytestmark = pytest.mark.timeout(180)

STEPS = 3


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of dp 2 x tp 2, ranks of which nothing is known but their places."""
    folder = tmp_path_factory.mktemp("one-node")
    code, output = run_forked_training(4, write_config(folder, steps=STEPS, batch=4, tp=2))
    assert code == 0, output
    return read_losses(folder / "runs" / "tiny")


# The first is two agents of torchrun's, each with two ranks.
@pytest.mark.parametrize(
    ("script", "tasks_per_node"),
    [
        pytest.param("slurm-torchrun.sbatch", 1, id="torchrun"),
        pytest.param("slurm-srun.sbatch", 2, id="srun"),
    ],
)
def test_sbatch(script: str, tasks_per_node: int, tmp_path: Path, one_node: list[float]) -> None:
    config = write_config(tmp_path, steps=1, batch=4)
    environment = launch_environment(TP=2, CONFIG=config, PORT=free_port())
    stand_ins = Path(__file__).parent / "launchers"
    environment["PATH"] = f"{stand_ins}{os.pathsep}{environment['PATH']}"
    options = [f"--ntasks-per-node={tasks_per_node}", "--gpus-per-node=2"]
    command = ["sbatch", *options, f"launch/{script}", "--steps", str(STEPS)]
    done = subprocess.run(
        [str(stand_ins / command[0]), *command[1:]],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stdout
    assert "4 ranks on cpu, dp 2, tp 2" in done.stdout
    assert read_losses(tmp_path / "runs" / "tiny") == pytest.approx(one_node, abs=1e-6)
