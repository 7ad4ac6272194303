"""Ranks that come and go: the vocabulary is split anew from the checkpoint, the losses stay."""

from __future__ import annotations

import copy
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from cce_dist.train.config.fit_to_ranks import fit_to_ranks
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.errors import ConfigError
from tests.support.agents import ElasticJob, elastic_job
from tests.support.torchrun import kill, read_losses, run_forked_training

# Sums over ranks have another order with other ranks; the optimizer amplifies the difference.
SAME_MATHS = 1e-4


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Writes a configuration with 301 ids, which neither 2 nor 4 ranks divide."""
    (tmp_path / "text.txt").write_text(Path(json.__file__).read_text())
    values = {
        "run": {"name": "run", "out": str(tmp_path)},
        "data": {
            "paths": [str(tmp_path / "text.txt")],
            "vocab_size": 301,
            "sequence_length": 16,
            "cache": str(tmp_path / "cache"),
        },
        "model": {"dim": 16, "layers": 1, "heads": 2},
        # A killed rank is gone at once. The timeout is long, so that no living rank looks silent.
        "parallel": {"timeout_s": 20},
        "optimizer": {"lr": 0.003, "warmup": 3, "schedule": "constant"},
        "checkpoint": {"every": 5},
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    return path


def train(num_ranks: int, config: Path, name: str, *arguments: str) -> list[float]:
    code, output = run_forked_training(num_ranks, config, "--run.name", name, *arguments)
    assert code == 0, output
    return read_losses(config.parent / name)


def wait_for_step(job: ElasticJob, folder: Path, step: int, seconds: float = 100.0) -> None:
    deadline = time.monotonic() + seconds
    while len(read_losses(folder)) < step:
        assert time.monotonic() < deadline, job.output.read_text()
        time.sleep(0.01)


def starts(output: str) -> list[tuple[int, str]]:
    """Returns each attempt's number of ranks, and the rest of its line, which names dp and tp."""
    attempts = []
    for line in output.splitlines():
        if " ranks on cpu, " in line:
            before, after = line.split(" ranks on cpu, ")
            attempts.append((int(before.split()[-1]), after))
    return attempts


def stop(job: ElasticJob) -> None:
    """Stops a job by the signal that makes all ranks save and leave."""
    ranks = job.rank_pids(0)
    assert ranks, job.output.read_text()
    os.kill(ranks[0], signal.SIGTERM)
    deadline = time.monotonic() + 30
    while job.rank_pids(0):
        assert time.monotonic() < deadline, job.output.read_text()
        time.sleep(0.01)


@pytest.mark.timeout(240)
def test_train_restarts_over_a_store_that_has_been_used(config: Path, tmp_path: Path) -> None:
    folder, endless = tmp_path / "run", ("--parallel.tp", "2", "--steps", "1000000")
    command = ["train", str(config), "--resume", *endless]
    with elastic_job(command, tmp_path / "output", num_nodes=1, share_store=True) as job:
        job.add_node()
        for attempt in (1, 2):
            while len(starts(job.output.read_text())) < attempt:
                wait_for_step(job, folder, len(read_losses(folder)) + 1)
            wait_for_step(job, folder, len(read_losses(folder)) + 6)
            if attempt == 1:
                kill(job.rank_pids(0)[1])
        stop(job)
        output = job.output.read_text()
    assert [size for size, _ in starts(output)] == [2, 2], output
    losses = read_losses(folder)
    steps = ("--parallel.tp", "2", "--steps", str(len(losses)))
    assert losses == train(2, config, "undisturbed", *steps)


@pytest.mark.timeout(300)
def test_train_while_a_node_is_lost_and_comes_back(config: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ["train", str(config), "--resume", "--parallel.tp", "all", "--steps", "1000000"]
    with elastic_job(command, tmp_path / "output") as job:
        job.add_node()
        lost = job.add_node()
        wait_for_step(job, folder, 8)
        job.lose_node(lost)
        reached = len(read_losses(folder))
        wait_for_step(job, folder, reached + 3)
        # The new node's restart count begins at 0; the count of the node that stayed goes on.
        job.add_node()
        while len(starts(job.output.read_text())) < 3:
            wait_for_step(job, folder, len(read_losses(folder)) + 1)
        wait_for_step(job, folder, len(read_losses(folder)) + 3)
        stop(job)
        output = job.output.read_text()
    assert [size for size, _ in starts(output)] == [4, 2, 4], output
    losses = read_losses(folder)
    undisturbed = train(
        4, config, "undisturbed", "--parallel.tp", "all", "--steps", f"{len(losses)}"
    )
    assert losses == pytest.approx(undisturbed, abs=SAME_MATHS)


@pytest.mark.timeout(240)
def test_train_resume_with_another_dp(config: Path, tmp_path: Path) -> None:
    # tests/train/test_train_job.py does so with tp; here tp stays, and `batch` follows dp.
    arguments = ("--parallel.tp", "2", "--global_batch", "8")
    whole = train(2, config, "whole", *arguments, "--steps", "9")
    for number, num_ranks in enumerate((4, 2, 4), 1):
        losses = train(num_ranks, config, "parts", *arguments, "--resume", f"--steps={3 * number}")
        assert len(losses) == 3 * number
    assert losses == pytest.approx(whole, abs=SAME_MATHS)
    saved = sorted((tmp_path / "parts" / "checkpoints").iterdir())[-1]
    info = json.loads((saved / "run.json").read_text())
    assert (info["dp"], info["config"]["batch"]) == (2, 4)


@pytest.mark.parametrize(
    ("values", "num_ranks", "expected"),
    [
        ({}, 8, {}),
        ({"batch": 3}, 8, {"batch": 3}),
        ({"parallel": {"tp": "all"}}, 8, {"parallel": {"tp": 8}}),
        ({"parallel": {"tp": "all", "pp": 2}}, 8, {"parallel": {"tp": 4, "pp": 2}}),
        (
            {"parallel": {"tp": 2}, "global_batch": 12},
            8,
            {"parallel": {"tp": 2}, "batch": 3, "global_batch": None},
        ),
        (
            {"parallel": {"tp": "all"}, "global_batch": 12},
            8,
            {"parallel": {"tp": 8}, "batch": 12, "global_batch": None},
        ),
        # fit_to_ranks leaves invalid values to validation, which describes them.
        ({"parallel": [1]}, 8, {"parallel": [1]}),
        (
            {"parallel": {"tp": 0}, "global_batch": 12},
            8,
            {"parallel": {"tp": 0}, "global_batch": 12},
        ),
        (
            {"parallel": {"tp": 3}, "global_batch": "x"},
            8,
            {"parallel": {"tp": 3}, "global_batch": "x"},
        ),
    ],
    ids=str,
)
def test_fit_to_ranks(values: dict[str, Any], num_ranks: int, expected: dict[str, Any]) -> None:
    before = copy.deepcopy(values)
    assert fit_to_ranks(values, num_ranks) == expected
    assert values == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"parallel": {"tp": "al"}}, "parallel.tp must be an integer >= 1 or all, got 'al'"),
        (
            {"parallel": {"tp": "all", "pp": 3}},
            "parallel.pp x parallel.tp must divide the number of ranks, got pp=3 and tp=all on 8",
        ),
        (
            {"parallel": {"tp": 3}, "global_batch": 12},
            "parallel.tp must divide the number of ranks, got tp=3 on 8 ranks",
        ),
        (
            {"global_batch": 12, "batch": 2},
            "exclude each other, got global_batch=12 and batch=2: leave one of them out",
        ),
        (
            {"global_batch": 12},
            "must be a multiple of the number of data-parallel ranks, 8, got 12: use 8 or 16",
        ),
        ({"global_batch": 3}, "the number of data-parallel ranks, 8, got 3: use 8"),
    ],
    ids=str,
)
def test_fit_to_ranks_refuses(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fit_to_ranks(values, 8)
    assert message in str(caught.value)


def test_train_config_takes_no_global_batch() -> None:
    with pytest.raises(ValueError, match="global_batch is for load_config"):
        TrainConfig(global_batch=8)
