"""launch/*.sbatch under a stand-in for Slurm (launchers/), whose nodes are this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.launch_jobs import ROOT, launch_environment, write_config
from tests.support.nodes import free_port
from tests.support.torchrun import read_losses, run_forked_training

# Four processes import torch, on a machine that may be busy.
pytestmark = pytest.mark.timeout(180)

STEPS = 3


@pytest.fixture(scope="module")
def one_node(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of tp 2, of ranks of which nothing is known but their places."""
    folder = tmp_path_factory.mktemp("one-node")
    code, output = run_forked_training(
        2, write_config(folder, steps=STEPS, batch=4, tp=2, timeout_s=60.0)
    )
    assert code == 0, output
    return read_losses(folder / "runs" / "tiny")


# Two nodes of a rank each. The first is two agents of torchrun's. Several of srun's tasks are on a
# node in tests/distributed/test_distributed_commands.py.
@pytest.mark.parametrize("script", ["torchrun", "srun"])
def test_sbatch(script: str, one_node: list[float], tmp_path: Path) -> None:
    # No rank fails: whoever writes the report of a job on a busy machine is waited for.
    config = write_config(tmp_path, steps=1, batch=4, timeout_s=60.0)
    environment = launch_environment(TP=2, CONFIG=config, PORT=free_port())
    stand_ins = Path(__file__).parent / "launchers"
    environment["PATH"] = f"{stand_ins}{os.pathsep}{environment['PATH']}"
    options = ["--ntasks-per-node=1", "--gpus-per-node=1"]
    command = ["sbatch", *options, f"launch/slurm-{script}.sbatch", "--steps", str(STEPS)]
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
    assert "2 ranks on cpu, dp 1, tp 2" in done.stdout
    assert read_losses(tmp_path / "runs" / "tiny") == pytest.approx(one_node, abs=1e-6)
