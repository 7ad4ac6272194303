"""`cce-dist train` and the example under srun and mpirun: the losses that torchrun gives."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cce_dist.testing.forks import fork_context
from tests.distributed.distributed_places import slurm_place
from tests.support.nodes import free_port
from tests.support.torchrun import (
    Place,
    read_losses,
    run_forked_training,
    run_placed_training,
    write_config,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two ranks and four steps."""
    folder = tmp_path_factory.mktemp("launched")
    changes = {"parallel": {"tp": "all"}, "checkpoint": {"every": 0}}
    return write_config(folder, **changes, steps=4, batch=4)


@pytest.fixture(scope="module")
def by_torchrun(config: Path) -> list[float]:
    code, output = run_forked_training(2, config, "--run.name", "torchrun")
    assert code == 0, output
    return read_losses(config.parent / "torchrun")


def test_train_under_srun(config: Path, by_torchrun: list[float]) -> None:
    port = free_port()
    places = [slurm_place(rank, 2, port) for rank in range(2)]
    code, output = run_placed_training(places, config, "--run.name", "slurm")
    assert code == 0, output
    assert read_losses(config.parent / "slurm") == by_torchrun


def test_train_says_what_contradicts_in_the_environment(config: Path) -> None:
    place = {**slurm_place(1, 2, 1), "WORLD_SIZE": 4}
    code, output = run_placed_training([place], config)
    assert code == 2
    assert output.startswith("error: WORLD_SIZE must be what SLURM_STEP_NUM_TASKS says, 2, got 4")
    assert "Traceback" not in output


@pytest.mark.timeout(120)
def test_train_under_mpirun(config: Path, by_torchrun: list[float]) -> None:
    pytest.importorskip("mpi4py")
    # A wheel's, beside the interpreter; another MPI's may come first on the PATH.
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent))
    if mpirun is None:
        pytest.skip("needs mpirun in the environment of mpi4py: pip install mpich")
    train = ["-m", "mpi4py", "-m", "cce_dist", "train", str(config), "--run.name", "mpi"]
    done = subprocess.run(
        [mpirun, "-n", "2", sys.executable, *train],
        cwd=ROOT,
        env=dict(os.environ, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    assert read_losses(config.parent / "mpi") == by_torchrun


def run_example(place: Place, source: str, output: Path) -> None:
    os.environ.update({name: str(value) for name, value in place.items()}, CUDA_VISIBLE_DEVICES="")
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        exec(compile(source, "docs/guide/ranks.md", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()


def test_the_example_gives_one_loss(tmp_path: Path) -> None:
    sources = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guide/ranks.md").read_text(), re.S)
    (source,) = (each for each in sources if "init(" in each)
    outputs = []
    for size in (1, 3):
        output = tmp_path / str(size)
        port = free_port()
        places: list[Place] = [slurm_place(rank, size, port) for rank in range(size)]
        processes = [
            fork_context().Process(target=run_example, args=(place, source, output))
            for place in places
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(30)
        assert [process.exitcode for process in processes] == [0] * size
        outputs.append(output.read_text())
    assert outputs[0].startswith("1 ranks by slurm: ")
    assert outputs[1] == outputs[0].replace("1 ranks", "3 ranks")
