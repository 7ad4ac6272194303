"""What a run logs beside metrics.jsonl: TensorBoard's events, and the picture of its losses."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cce_dist.__main__ import main
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.metrics import append_metrics, open_events, read_metrics
from cce_dist.train.progress import StepRecord
from cce_dist.train.report.run import Evaluation, Memory, plot_losses, write_report
from tests.support.torchrun import run_forked, run_forked_training, write_config

pytestmark = pytest.mark.timeout(180)


def read_events(run_dir: Path) -> dict[str, dict[int, float]]:
    """Reads TensorBoard's scalars as TensorBoard does; returns each one's values by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir))
    events.Reload()
    scalars = {}
    for name in events.Tags()["scalars"]:
        values = events.Scalars(name)
        scalars[name] = {each.step: each.value for each in values}
        assert len(scalars[name]) == len(values), "a step twice"
    return scalars


def test_train_logs_to_tensorboard(tmp_path: Path) -> None:
    """Two ranks log, and one that resumes them goes on; a run may begin to log when it resumes."""
    # With a constant rate a longer run may resume a shorter one.
    config = write_config(tmp_path, steps=3, batch=2, optimizer={"schedule": "constant"})
    folder = tmp_path / "run"
    code, output = run_forked_training(2, config, "--log", "tensorboard")
    assert code == 0, output
    assert len(list(folder.glob("events.*"))) == 1, "the main rank alone writes"
    code, output = run_forked_training(
        0, config, *("--resume", "--log=tensorboard", "--steps", "5", "--batch", "4")
    )
    assert code == 0, output
    events, records = read_events(folder), read_metrics(folder)
    held_out = events.pop("held_out_loss")
    assert list(held_out) == [3, 5]
    reported = re.search(r"held-out loss \| (\S+) nats", (folder / "report.md").read_text())
    assert reported is not None and held_out[5] == pytest.approx(float(reported[1]), abs=2e-6)
    assert events.keys() == set().union(*records) - {"step"}
    for name, values in events.items():
        expected = {record["step"]: record[name] for record in records if name in record}
        assert values == pytest.approx(expected, rel=1e-6), name
    code, output = run_forked_training(0, config, "--resume", "--steps", "6", "--batch", "4")
    assert code == 0, output
    assert "loss" in read_events(folder) and 6 not in read_events(folder)["loss"]


def test_append_metrics_repeats_the_events_of_steps_after_a_checkpoint(tmp_path: Path) -> None:
    def log(loss: float, steps: Sequence[int]) -> None:
        events = open_events(tmp_path, steps[0] - 1)
        for step in steps:
            record = StepRecord(step, loss, 3.0, 4, 5.0, 6.0, peak_memory_of_pp=[7, 8])
            append_metrics(tmp_path, record, events)
        # Each step is on the disk before the next one, as after a kill.
        assert read_events(tmp_path)["loss"][steps[-1]] == loss
        events.close()

    log(1.0, (1, 2, 3))
    log(2.0, (2, 3, 4))
    events = read_events(tmp_path)
    assert events["loss"] == {1: 1.0, 2: 2.0, 3: 2.0, 4: 2.0}
    assert events["peak_memory_of_pp/1"] == dict.fromkeys((1, 2, 3, 4), 8.0)


def run_without_tensorboard(arguments: Sequence[str]) -> None:
    modules: Any = sys.modules
    modules["tensorboard"] = None
    sys.argv[1:] = arguments
    main()


def test_train_names_the_extra_of_tensorboard(tmp_path: Path) -> None:
    arguments = ("train", str(write_config(tmp_path)), "--log", "tensorboard")
    output = tmp_path / "output"
    code, said = run_forked(2, output, *arguments, run=run_without_tensorboard)
    assert code == 2 and not (tmp_path / "run").exists()
    (line,) = said.splitlines()
    assert "error: `cce-dist train` needs tensorboard, which is not installed: pip install" in line
    assert line.endswith("[tensorboard]'")


def test_plot_losses_shows_the_held_out_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figures.append(figure))
    records = [{"step": step, "loss": 5.0 - step} for step in (1, 2, 3)]
    plot_losses(tmp_path / "loss.png", "run", records, [], 2.5)
    (axes,) = figures[0].axes
    curve, level = axes.lines
    assert list(curve.get_ydata()) == [4.0, 3.0, 2.0]
    assert set(level.get_ydata()) == {2.5}
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "cce_dist",
        "held out, after the last step",
    ]


def test_write_report_of_a_run_that_changed_or_lost_its_metrics(tmp_path: Path) -> None:
    ranks = SimpleNamespace(world_size=1, dp=1, pp=1, tp=1, device=SimpleNamespace(type="cpu"))
    job: Any = SimpleNamespace(config=TrainConfig(), ranks=ranks)
    evaluation = Evaluation(2.0, 2.0, Memory(1, 1), None, 8, 8)
    dense = tmp_path / "dense"
    dense.mkdir()
    # Step 2 was trained by another number of pipeline ranks, and step 1 has been removed.
    for step, places in ((2, [2**20, 2**21]), (3, [2**20, 2**21, 2**22])):
        loss = 5.0 - step
        append_metrics(tmp_path, StepRecord(step, loss, 3.0, 2**22, 5.0, 6.0, places))
        append_metrics(dense, StepRecord(step - 1, loss + 1.25, 3.0, 2**22, 5.0, 6.0))
    report = write_report(job, tmp_path, evaluation, dense)
    assert "| final loss (step 3) | 2.0000 nats, 1.00 lower |" in report
    assert "| peak memory by pipeline rank | 1.0 MiB, 2.0 MiB, 4.0 MiB |" in report
    assert "| largest difference of the curves | 2.50e-01 nats in step 2 |" in report
    append_metrics(tmp_path, StepRecord(4, 3.5, 3.0, 2**22, 5.0, 6.0))
    report = write_report(job, tmp_path, evaluation, dense)
    assert "| final loss (step 4) | 3.5000 nats, 0.50 higher |" in report
    (tmp_path / "metrics.jsonl").unlink()
    report = write_report(job, tmp_path, evaluation, dense)
    assert "held-out loss" in report and "final loss (step" not in report
