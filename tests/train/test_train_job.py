"""The whole job as users start it: layouts, checkpoints, interruptions, failures, the report."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cce_dist.train.checkpoint import Checkpoint, check_resumable, newest_checkpoint
from cce_dist.train.config.schema import ParallelConfig, TrainConfig
from cce_dist.train.errors import ConfigError
from cce_dist.train.job import move_aside
from cce_dist.train.progress import Display
from cce_dist.train.ranks import connect
from tests.support import torchrun
from tests.support.torchrun import (
    is_running,
    kill,
    read_losses,
    run_forked,
    run_forked_training,
    run_training,
    started_training,
)

# A job starts processes that import torch, which takes a while on a loaded machine with fewer cores
# than ranks. The bounds in the tests are much tighter.
pytestmark = pytest.mark.timeout(180)

TIMEOUT_S = 8.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder with the cache of all jobs."""
    return tmp_path_factory.mktemp("train")


def write_config(shared: Path, out: Path, name: str, **changes: Any) -> Path:
    defaults = {
        "data": {"cache": str(shared / "cache")},
        "parallel": {"timeout_s": TIMEOUT_S},
        # With a constant rate, the first steps of a longer run are the same.
        "optimizer": {"lr": 0.01, "warmup": 3, "schedule": "constant"},
        "checkpoint": {"every": 5},
        "steps": 12,
        "log_every": 5,
    }
    return torchrun.write_config(out, name, defaults, **changes)


def run(
    num_ranks: int, config: Path, *arguments: str, by: Callable[..., tuple[int, str]] = run_training
) -> tuple[list[float], str]:
    code, output = by(num_ranks, config, *arguments)
    assert code == 0, output
    written = json.loads(config.read_text())["run"]
    return read_losses(Path(written["out"]) / written["name"]), output


@pytest.fixture(scope="module")
def alone(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[float]]:
    """Trains in one process without torchrun; returns losses by `tied`."""
    out = tmp_path_factory.mktemp("alone")
    losses = {}
    for tied in (False, True):
        config = write_config(shared, out, f"tied-{tied}", model={"tied": tied})
        losses[tied] = run(0, config, by=run_forked_training)[0]
    assert losses[False] != losses[True]
    assert losses[False][-1] < losses[False][0] - 0.3
    return losses


@pytest.mark.parametrize(
    ("num_ranks", "tp", "sequence_parallel", "tied"),
    # test_train_pipeline.py has tied heads of data-parallel ranks.
    [
        pytest.param(2, 2, True, True, id="tp2-sequence_parallel-tied"),
        pytest.param(4, 2, True, False, id="dp2-tp2-sequence_parallel"),
        pytest.param(3, 3, False, True, id="tp3-tied"),
    ],
)
def test_train_layout_does_not_change_the_loss(
    shared: Path,
    tmp_path: Path,
    alone: dict[bool, list[float]],
    num_ranks: int,
    tp: int,
    sequence_parallel: bool,
    tied: bool,
) -> None:
    config = write_config(
        shared,
        tmp_path,
        "layout",
        model={"tied": tied},
        parallel={"tp": tp, "sequence_parallel": sequence_parallel},
        batch=8 * tp // num_ranks,
    )
    # Here the environment alone gives ranks their places; in other tests torchrun does.
    losses, _ = run(num_ranks, config, by=run_forked_training)
    # fp32 sums have another order; a few optimizer steps amplify the difference.
    assert losses == pytest.approx(alone[tied], abs=1e-4)


def test_train_resume_after_kill_is_bitwise_the_same(shared: Path, tmp_path: Path) -> None:
    def make_config(name: str) -> Path:
        return write_config(
            shared,
            tmp_path,
            name,
            parallel={"tp": 2, "sequence_parallel": True},
            steps=42,
            # Checkpoints are so frequent that the kill may well fall into a save.
            checkpoint={"every": 3},
        )

    whole, _ = run(2, make_config("whole"), by=run_forked_training)
    config = make_config("killed")
    with started_training(2, config) as job:
        job.wait_for_step(12)
        pids = job.rank_pids()
        assert len(pids) == 2
        # The launcher is killed, too: no process gets a chance to clean up.
        for pid in (job.launcher.pid, *pids.values()):
            kill(pid)
        job.finish(30)
    killed_at = len(read_losses(job.run_dir))
    assert 12 <= killed_at < 42
    resumed, output = run(2, config, "--resume", by=run_forked_training)
    resumed_after = int(re.findall(r"after step (\d+)", output)[0])
    assert killed_at - 6 < resumed_after <= killed_at and resumed_after % 3 == 0
    assert resumed == whole
    steps = sorted(path.name for path in (job.run_dir / "checkpoints").iterdir())
    assert steps == ["step_00000039", "step_00000042"], "only the last two, and nothing partial"


def test_train_resume_with_another_tp(
    shared: Path, tmp_path: Path, alone: dict[bool, list[float]]
) -> None:
    config = write_config(shared, tmp_path, "moved", parallel={"tp": 2})
    first, _ = run(2, config, "--steps", "6", by=run_forked_training)
    assert first == pytest.approx(alone[False][:6], abs=1e-5)
    resume = ("--resume", "--parallel.tp", "1")
    resumed, output = run(0, config, *resume, by=run_forked_training)
    assert "after step 6" in output
    assert resumed[:6] == first
    assert resumed == pytest.approx(alone[False], abs=1e-5)


def test_train_resume_refuses_another_run(shared: Path, tmp_path: Path) -> None:
    config = write_config(shared, tmp_path, "changed", steps=2)
    run(0, config, by=run_forked_training)
    changes = ("--optimizer.lr", "0.5", "--batch", "4", "--log_every", "1")
    code, output = run_forked_training(0, config, "--resume", *changes)
    assert code == 2
    assert "optimizer.lr was 0.01, got 0.5" in output
    assert "batch x data-parallel ranks was 8, got 4 x 1" in output
    assert "log_every" not in output and "Traceback" not in output


def test_check_resumable_takes_a_checkpoint_from_before_a_key(tmp_path: Path) -> None:
    config = TrainConfig()
    values = config.model_dump(mode="json")
    del values["loss"]["filter"]["draw"]
    older = Checkpoint(tmp_path, step=1, dp=1, data_key="", cache=None, config=values)
    check_resumable(older, config, 1)
    values["loss"]["filter"]["tail"] = False
    with pytest.raises(ConfigError, match=r"loss\.filter\.tail was False, got True"):
        check_resumable(older, config, 1)


def test_a_run_that_has_not_ended_is_left_alone(shared: Path, tmp_path: Path) -> None:
    config = write_config(shared, tmp_path, "same", steps=10**6, checkpoint={"every": 0})
    with started_training(1, config) as job:
        for more in ((), ("--resume",)):
            job.wait_for_step(len(read_losses(job.run_dir)) + 2)
            code, output = run_forked(0, tmp_path / "second.out", "train", str(config), *more)
            assert code == 2, output
            assert "run.name must be that of no job that is running, got 'same'" in output
        job.wait_for_step(len(read_losses(job.run_dir)) + 2)
    assert [path.name for path in tmp_path.iterdir() if "previous" in path.name] == []


def test_move_aside_keeps_the_earlier_runs(tmp_path: Path) -> None:
    display = Display(is_main=False)
    move_aside(tmp_path / "run", display)
    for number in (1, 2):
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").write_text(str(number))
        move_aside(tmp_path / "run", display)
        kept = tmp_path / f"run.previous-{number}" / "metrics.jsonl"
        assert kept.read_text() == str(number)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        pytest.param(None, "data.paths: cannot read", id="no such file"),
        pytest.param("A few words.", "the text must", id="too few tokens"),
    ],
)
@pytest.mark.parametrize("is_earlier", [True, False], ids=["earlier run", "first run"])
def test_a_text_that_is_refused_leaves_the_folder_of_the_run(
    shared: Path, tmp_path: Path, text: str | None, rule: str, is_earlier: bool
) -> None:
    config, path = write_config(shared, tmp_path, "same"), tmp_path / "a.txt"
    if is_earlier:
        (tmp_path / "same" / "checkpoints").mkdir(parents=True)
    if text is not None:
        path.write_text(text)
    before = sorted(tmp_path.rglob("*"))
    command = ("train", str(config), "--data", str(path))
    code, output = run_forked(0, tmp_path / "output.txt", *command)
    assert code == 2 and rule in output, output
    assert sorted({*tmp_path.rglob("*")} - {tmp_path / "output.txt"}) == before


@pytest.mark.parametrize(
    ("number", "to_ranks"),
    [
        pytest.param(signal.SIGINT, False, id="SIGINT to torchrun"),
        pytest.param(signal.SIGTERM, True, id="SIGTERM to one rank"),
    ],
)
def test_train_signal_saves_and_exits(
    shared: Path, tmp_path: Path, number: signal.Signals, to_ranks: bool
) -> None:
    config = write_config(
        shared, tmp_path, "signal", parallel={"tp": 2}, steps=10**6, checkpoint={"every": 0}
    )
    with started_training(2, config) as job:
        job.wait_for_step(5)
        pids = job.rank_pids()
        began = time.monotonic()
        os.kill(pids[1] if to_ranks else job.launcher.pid, number)
        code, output = job.finish(30)
        assert time.monotonic() - began < 20
    # torchrun counts its own signal as a failure; a rank that was asked to stop ends with 0.
    assert code == (0 if to_ranks else 1), output
    steps = len(read_losses(job.run_dir))
    assert f"stopped after step {steps}" in output and "--resume" in output
    assert not any(is_running(pid) for pid in pids.values())
    checkpoint = newest_checkpoint(job.run_dir / "checkpoints")
    assert checkpoint is not None and checkpoint.step == steps


def test_train_names_the_rank_that_dies(shared: Path, tmp_path: Path) -> None:
    """test_faults.py has a rank that is stopped."""
    bound_s = 15.0
    config = write_config(
        *(shared, tmp_path, "failing"), parallel={"tp": 2}, steps=10**6, checkpoint={"every": 0}
    )
    with started_training(2, config) as job:
        job.wait_for_step(5)
        pids = job.rank_pids()
        began = time.monotonic()
        kill(pids[1])
        code, output = job.finish(bound_s + 30)
        assert time.monotonic() - began < bound_s, output
    assert code != 0
    assert f"error: rank 1 (pid {pids[1]} on " in output
    assert "last seen in step" in output
    assert not any(is_running(pid) for pid in pids.values())


def test_train_ends_when_the_launcher_dies(shared: Path, tmp_path: Path) -> None:
    config = write_config(shared, tmp_path, "orphans", parallel={"tp": 2}, steps=10**6)
    with started_training(2, config) as job:
        job.wait_for_step(5)
        pids = job.rank_pids()
        kill(job.launcher.pid)
        deadline = time.monotonic() + 10
        try:
            while any(is_running(pid) for pid in pids.values()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            for pid in pids.values():
                kill(pid)


def test_train_bad_input_is_one_message(shared: Path, tmp_path: Path) -> None:
    text = tmp_path / "x.jsonl"
    text.write_text('{"text": "a"}\n{"txt": "b"}\n')
    config = write_config(shared, tmp_path, "bad")
    code, output = run_training(2, config, "--data", str(text))
    assert code != 0
    message = f"error: {text}:2: each object must have a field"
    assert output.count(message) == 1
    # torchrun's own traceback is there; none may come from the job.
    assert "cce_dist/train" not in output


def test_connect_refuses_ranks_that_tp_does_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp must divide .*, got tp=3 on 1 ranks"):
        connect(ParallelConfig(tp=3))


def test_train_diverging_says_so(shared: Path, tmp_path: Path) -> None:
    config = write_config(shared, tmp_path, "diverging", optimizer={"lr": 1e30, "warmup": 0})
    code, output = run_forked_training(0, config)
    assert code == 1
    assert "lower optimizer.lr" in output and "Traceback" not in output


def test_train_report_beside_dense(shared: Path, tmp_path: Path) -> None:
    config = write_config(
        shared,
        tmp_path,
        "report",
        parallel={"tp": 2, "sequence_parallel": True},
        loss={"z_loss": 1e-3, "softcap": 5.0, "logit_scale": 2.0},
        data={"vocab_size": 5000},
    )
    losses, output = run(2, config, "--compare", "dense")
    folder = tmp_path / "report"
    dense = read_losses(folder / "dense")
    assert losses == pytest.approx(dense, abs=1e-4)
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    report = (folder / "report.md").read_text()
    rows = dict(line.strip("| ").split(" | ") for line in report.splitlines() if " | " in line)
    assert abs(float(rows["difference"].split()[0])) < 1e-5
    assert float(rows["final loss (step 12)"].split()[0]) == pytest.approx(losses[-1], abs=1e-4)
    assert "largest difference of the curves" in rows
    assert "measured" in rows["memory of the head, forward and backward"]
    assert "logits [64, 5000]" in rows["the same with dense logits"]
    assert report in output
    assert "of data.vocab_size=5000: the ids above stay unused" in output
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert {"step", "loss", "tokens_per_s", "peak_memory", "lr", "grad_norm"} <= records[0].keys()
    assert [r["step"] for r in records if "tail_mass" in r] == [1, 5, 10, 12]


@pytest.mark.parametrize(("max_kept", "screened"), [(1.0, True), (0.0, False)])
def test_train_says_which_steps_were_screened(
    shared: Path, tmp_path: Path, max_kept: float, screened: bool
) -> None:
    config = write_config(
        shared,
        tmp_path,
        "screened",
        dtype="bfloat16",
        loss={"logits": "screened", "filter": {"keep": 0.1}, "screen": {"max_kept": max_kept}},
        parallel={"tp": 1},
        steps=6,
    )
    losses, output = run(0, config, by=run_forked_training)
    assert losses[-1] < losses[0]
    lines = (tmp_path / "screened" / "metrics.jsonl").read_text().splitlines()
    screened_of = {record["step"]: record.get("screened") for record in map(json.loads, lines)}
    assert screened_of == dict.fromkeys(range(1, 7)) | dict.fromkeys((1, 5, 6), screened)
    report = (tmp_path / "screened" / "report.md").read_text()
    assert f"logged steps whose logits were screened | {3 if screened else 0} of 3" in report
    assert ("not screened" in output) is not screened
