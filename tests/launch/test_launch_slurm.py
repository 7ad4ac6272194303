"""launch/*.sbatch under a stand-in for Slurm (launchers/), whose nodes are this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.launch_jobs import ROOT, launch_environment, write_config
from tests.support.nodes import free_port
from tests.support.torchrun import read_losses, run_forked_training

# Six processes import torch, on a machine that may be busy.
pytestmark = pytest.mark.timeout(180)

STEPS = 3


def one_node(folder: Path, ranks: int) -> list[float]:
    """Losses of tp 2, of ranks of which nothing is known but their places."""
    folder.mkdir()
    code, output = run_forked_training(
        ranks, write_config(folder, steps=STEPS, batch=4, tp=2, timeout_s=60.0)
    )
    assert code == 0, output
    return read_losses(folder / "runs" / "tiny")


# Two nodes. The first is two agents of torchrun's with a rank each.
@pytest.mark.parametrize(
    ("script", "tasks_per_node", "gpus_per_node"),
    [
        pytest.param("slurm-torchrun.sbatch", 1, 1, id="torchrun"),
        pytest.param("slurm-srun.sbatch", 2, 2, id="srun"),
    ],
)
def test_sbatch(script: str, tasks_per_node: int, gpus_per_node: int, tmp_path: Path) -> None:
    # No rank fails: whoever writes the report of a job on a busy machine is waited for.
    config = write_config(tmp_path, steps=1, batch=4, timeout_s=60.0)
    environment = launch_environment(TP=2, CONFIG=config, PORT=free_port())
    stand_ins = Path(__file__).parent / "launchers"
    environment["PATH"] = f"{stand_ins}{os.pathsep}{environment['PATH']}"
    options = [f"--ntasks-per-node={tasks_per_node}", f"--gpus-per-node={gpus_per_node}"]
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
    ranks = 2 * gpus_per_node
    assert f"{ranks} ranks on cpu, dp {gpus_per_node}, tp 2" in done.stdout
    expected = one_node(tmp_path / "one-node", ranks)
    assert read_losses(tmp_path / "runs" / "tiny") == pytest.approx(expected, abs=1e-6)
