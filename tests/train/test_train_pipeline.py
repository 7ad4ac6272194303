"""Training over pipelines: losses and gradients of one process, whatever the layout."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cce_dist.train.checkpoint import newest_checkpoint
from cce_dist.train.config.pipeline import Layout
from cce_dist.train.config.schema import TrainConfig
from cce_dist.train.errors import ConfigError
from cce_dist.train.pipeline.step import check_split_backward, planned_times
from tests.support.torchrun import (
    read_losses,
    run_forked_training,
    started_training,
    write_config,
)

# A job starts processes that import torch; see tests/train/test_train_job.py.
pytestmark = pytest.mark.timeout(180)

STEPS, EVERY = 6, 4
TIMEOUT_S = 8.0
SPREAD = {"vocab_over_pipeline": True}
PLANNED = {"schedule": "vocab_1f1b", **SPREAD}
JOB = {
    "model": {"layers": 4},
    "parallel": {"timeout_s": 30},
    # A clipped gradient would hide a factor.
    "optimizer": {"lr": 0.02, "warmup": 3, "schedule": "constant", "clip": None},
    "checkpoint": {"every": EVERY},
    "steps": STEPS,
    "log_every": 5,
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a folder; cache and runs of all jobs go there."""
    return tmp_path_factory.mktemp("pipeline")


def train(out: Path, num_ranks: int, name: str, *arguments: str, **changes: Any) -> list[float]:
    config = write_config(out, name, JOB, **changes)
    code, output = run_forked_training(num_ranks, config, *arguments)
    assert code == 0, output
    assert "Warning" not in output
    return read_losses(out / name)


def saved(out: Path, name: str) -> dict[str, Tensor]:
    """Returns the weights and AdamW's moments after the last step."""
    checkpoint = newest_checkpoint(out / name / "checkpoints")
    assert checkpoint is not None and checkpoint.step == STEPS
    file = out / f"{name}.pt"
    dcp_to_torch_save(checkpoint.folder, file)
    state = torch.load(file)
    return {**state["model"], **state["optimizer"]}


def grad_norms(out: Path, name: str) -> list[float]:
    lines = (out / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["grad_norm"] for line in lines]


@pytest.fixture(scope="module")
def whole(out: Path) -> dict[bool, dict[str, Any]]:
    """Trains in one process; returns the untied and the tied run."""
    runs = {}
    for tied in (False, True):
        name = f"whole-{tied}"
        losses = train(out, 0, name, model={"tied": tied})
        assert losses[-1] < losses[0] - 0.3
        runs[tied] = {"losses": losses, "norms": grad_norms(out, name), "saved": saved(out, name)}
    return runs


def report_rows(folder: Path) -> dict[str, str]:
    report = (folder / "report.md").read_text()
    return dict(line.strip("| ").split(" | ") for line in report.splitlines() if " | " in line)


@pytest.mark.parametrize(
    ("num_ranks", "tied", "parallel"),
    [
        # Each schedule occurs, and the head in both places: see the test below, too.
        pytest.param(2, False, {"schedule": "gpipe"}, id="gpipe"),
        pytest.param(2, True, {"schedule": "1f1b", **SPREAD}, id="1f1b-spread-tied"),
        # The first and the last stage are on the same rank.
        pytest.param(2, True, {"schedule": "zbv"}, id="zbv-tied"),
        # Stages are uneven, and the last stage has no layer, only the norm.
        pytest.param(4, False, {"pp": 4, "layers_per_stage": [1, 2, 1, 0], **PLANNED}, id="pp4"),
        pytest.param(
            4,
            False,
            {"tp": 2, "sequence_parallel": True, "schedule": "interleaved", **SPREAD},
            id="sp-interleaved-spread",
        ),
        pytest.param(
            4,
            True,
            {"tp": 2, "sequence_parallel": True, "schedule": "zero_bubble"},
            id="sp-zero_bubble-tied",
        ),
        pytest.param(4, True, {"dp": 2, **PLANNED}, id="dp-planned-tied"),
        pytest.param(4, False, {"dp": 2, "schedule": "looped"}, id="dp-looped"),
    ],
)
def test_pipeline_trains_as_one_process_does(
    out: Path,
    whole: dict[bool, dict[str, Any]],
    request: pytest.FixtureRequest,
    num_ranks: int,
    tied: bool,
    parallel: dict[str, Any],
) -> None:
    name = request.node.callspec.id
    given = {"pp": 2, **parallel}
    batch = 8 // given.pop("dp", 1)
    losses = train(out, num_ranks, name, model={"tied": tied}, parallel=given, batch=batch)
    require_as(whole[tied], out, name, losses)


def require_as(right: dict[str, Any], out: Path, name: str, losses: list[float]) -> None:
    assert losses == pytest.approx(right["losses"], abs=1e-5)
    assert grad_norms(out, name) == pytest.approx(right["norms"], rel=1e-5)
    tensors = saved(out, name)
    assert tensors.keys() == right["saved"].keys()
    for key, value in right["saved"].items():
        error = (tensors[key].double() - value.double()).norm()
        assert float(error) <= 1e-4 * float(value.double().norm()), key


def test_pipeline_resumes_bitwise_and_in_another_layout(
    out: Path, whole: dict[bool, dict[str, Any]]
) -> None:
    first = {"parallel": {"pp": 2, "schedule": "zbv", **SPREAD}}
    losses = train(out, 2, "first", **first)
    require_as(whole[False], out, "first", losses)
    shutil.copytree(out / "first", out / "moved")
    shutil.copytree(out / "whole-True", out / "spread")
    for name in ("first", "moved", "spread"):
        shutil.rmtree(out / name / "checkpoints" / f"step_{STEPS:08d}")
    assert train(out, 2, "first", "--resume", **first) == losses
    assert train(out, 0, "moved", "--resume") == pytest.approx(whole[False]["losses"], abs=1e-5)
    layout = {"pp": 2, "tp": 2, "microbatches": 4, **PLANNED}
    moved = train(out, 4, "spread", "--resume", model={"tied": True}, parallel=layout)
    assert moved[:EVERY] == whole[True]["losses"][:EVERY]
    require_as(whole[True], out, "spread", moved)


def test_pipeline_in_bfloat16_and_beside_dense(out: Path) -> None:
    changes: dict[str, Any] = {"dtype": "bfloat16", "model": {"tied": True}}
    alone = train(out, 0, "alone-bf16", **changes)
    parallel = {"pp": 2, "microbatches": 4, **PLANNED}
    losses = train(out, 2, "bf16", "--compare", "dense", parallel=parallel, **changes)
    # The ranks exchange a tied embedding's rows in bf16.
    assert losses == pytest.approx(alone, abs=5e-3)
    assert losses == pytest.approx(read_losses(out / "bf16" / "dense"), abs=0.05)
    rows = report_rows(out / "bf16")
    assert rows["ranks"] == "2 x cpu, dp 1, pp 2, tp 1"
    planned = "vocab_1f1b, 4 microbatches, layers of stages 2+2, head on all pipeline ranks"
    assert rows["pipeline"] == planned
    assert abs(float(rows["difference"].split()[0])) < 1e-2
    assert len(rows["peak memory by pipeline rank"].split(", ")) == 2
    assert "logits [32, 301]" in rows["the same with dense logits"]
    output = (out / "bf16.out").read_text()
    assert f"pipeline: {planned}" in output
    assert "1f1b, 4 microbatches, layers of stages 2+2, head on the last stage" in output


def test_pipeline_signal_saves_and_exits(out: Path) -> None:
    parallel = {"pp": 2, "timeout_s": TIMEOUT_S, **SPREAD}
    config = write_config(
        out, "stops", JOB, parallel=parallel, steps=10**6, checkpoint={"every": 0}
    )
    with started_training(2, config) as job:
        job.wait_for_step(3)
        os.kill(job.rank_pids()[1], signal.SIGTERM)
        code, output = job.finish(30)
    assert code == 0, output
    checkpoint = newest_checkpoint(out / "stops" / "checkpoints")
    assert checkpoint is not None and checkpoint.step == len(read_losses(out / "stops"))


def layout(**parallel: Any) -> Layout:
    config = {"model": {"layers": 10}, "batch": 8, "parallel": {"pp": 4, **parallel}}
    return TrainConfig.model_validate(config).layout()


def test_layout_places_stages() -> None:
    even = layout()
    assert [list(held) for held in even.layers] == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    assert (even.stages_of(1), even.last_rank) == ([1], 3)
    looped = layout(schedule="interleaved")
    assert (looped.stages_of(1), looped.last_rank, looped.num_stages) == ([1, 5], 3, 8)
    v = layout(schedule="zbv", layers_per_stage=[0, 2, 1, 2, 1, 2, 2, 0])
    assert (v.stages_of(0), v.stages_of(1), v.last_rank) == ([0, 7], [1, 6], 0)
    assert [len(held) for held in v.layers] == [0, 2, 1, 2, 1, 2, 2, 0]


@pytest.mark.parametrize("schedule", ["zero_bubble", "zbv"])
def test_split_backward_needs_a_torch_that_can(
    monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    def check(version: str, **parallel: Any) -> None:
        monkeypatch.setattr(torch, "__version__", version)
        check_split_backward(TrainConfig.model_validate({"parallel": {"pp": 2, **parallel}}))

    with pytest.raises(ConfigError, match=rf"parallel.schedule={schedule} .*needs torch 2.13, got"):
        check("2.12.0+cu130", schedule=schedule)
    check("2.12.0+cu130", schedule=schedule, vocab_over_pipeline=True)
    check("2.12.0+cu130", schedule="1f1b")
    check("2.13.0", schedule=schedule)


def test_planned_times_are_those_of_the_products() -> None:
    config = {"model": {"layers": 8}, "batch": 8, "parallel": {"pp": 4, "tp": 2, **PLANNED}}
    given = TrainConfig.model_validate(config)
    times = planned_times(given, given.layout())
    dim, length, vocab_size = 192, 256, 16384
    # A layer has queries, keys, values and output, two maps to 512 channels, one back; attention.
    layer = 4 * dim**2 + 3 * dim * 512 + length * dim
    assert times.forward == pytest.approx(2 * layer, rel=0.01)
    assert times.statistics == vocab_size * dim / 8
