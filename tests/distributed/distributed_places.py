"""Where a launcher puts a rank, for tests of how ranks join."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from cce_dist.distributed.launchers import TORCH, Launch, read_launch
from tests.support.torchrun import Place

PATIENCE = timedelta(seconds=20)


def launch_of(rank: int = 0, size: int = 1, *, launcher: Any = "mpich", **known: Any) -> Launch:
    names = read_launch({"PMI_RANK": "0", "PMI_SIZE": "1"}).variables
    names = names if launcher == "mpich" else TORCH
    return Launch(launcher, names, rank, size, None, None, **known)


def slurm_place(rank: int, size: int, port: int) -> Place:
    return {
        "SLURM_JOB_ID": 4711,
        "SLURM_STEP_ID": 0,
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": rank,
        "SLURM_NODEID": 0,
        "SLURM_NTASKS": size,
        "SLURM_STEP_NUM_TASKS": size,
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "localhost",
        # Other jobs on this machine would have other ids; other runs of this test have not.
        "MASTER_PORT": port,
    }
