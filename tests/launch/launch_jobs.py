"""A job of moments for the scripts in launch/, and the environment to start them in."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# A rank may be held up for seconds where tests share two cores.
TIMEOUT_S = 20.0


def write_config(folder: Path, *, steps: int, batch: int, **parallel: Any) -> Path:
    """A config file of 128 tokens a step and data-parallel rank, over text of the standard library;
    its run's folder is `folder`/runs/tiny."""
    config: dict[str, Any] = {
        "run": {"name": "tiny", "out": str(folder / "runs")},
        "data": {
            "paths": [argparse.__file__],
            "megabytes": 0.05,
            "vocab_size": 301,
            "sequence_length": 16,
            "cache": str(folder / "cache"),
        },
        "model": {"dim": 32, "layers": 1, "heads": 2},
        "parallel": {"timeout_s": TIMEOUT_S, **parallel},
        "optimizer": {"lr": 0.01, "warmup": 3, "schedule": "constant"},
        "checkpoint": {"every": 0},
        "steps": steps,
        "batch": batch,
    }
    path = folder / "tiny.json"
    path.write_text(json.dumps(config))
    return path


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


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return opened.getsockname()[1]
