"""A job of moments for the scripts in launch/, and the environment to start them in."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from tests.support import torchrun

ROOT = Path(__file__).parents[2]
# A rank may be held up for seconds where tests share two cores.
TIMEOUT_S = 20.0


def write_config(folder: Path, *, steps: int, batch: int, **parallel: Any) -> Path:
    """A config file of 128 tokens a step and data-parallel rank, over text of the standard library;
    its run's folder is `folder`/runs/tiny."""
    return torchrun.write_config(
        folder,
        "tiny",
        run={"out": str(folder / "runs")},
        data={"megabytes": 0.05},
        model={"dim": 32, "layers": 1},
        parallel={"timeout_s": TIMEOUT_S, **parallel},
        optimizer={"lr": 0.01, "warmup": 3, "schedule": "constant"},
        checkpoint={"every": 0},
        steps=steps,
        batch=batch,
    )


def launch_environment(**knobs: object) -> dict[str, str]:
    """This process's, with its Python first on PATH, the CPU alone, and `knobs`."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in knobs.items()},
    }
