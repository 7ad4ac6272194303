"""The vocabulary over all ranks under schedules that know nothing of it, simulated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cce_dist.cli.main import app
from cce_dist.planner.cost.job import SOFTWARE, Job
from cce_dist.planner.flags import megatron_flags
from cce_dist.planner.orders.measured import predict_file
from cce_dist.planner.orders.predict import StageTimes, predict
from cce_dist.planner.orders.timeline import Task
from cce_dist.planner.plan import make_plan
from cce_dist.planner.search import on_last_stage, over_pipeline, vocab_pays
from tests.planner.plan_jobs import GEMMA, H200, LLAMA

JOB = Job(pp=4, microbatches=16, loss="filtered", vocab_over="pp", software=SOFTWARE["torch"])
SHAPES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zbv", 2)]


def even(ranks: int, chunks: int = 1, **more: Any) -> StageTimes:
    """A microbatch's F and B take 1 and 2 on a rank, S and T 0.3 and 0.9."""
    stages = ranks * chunks
    return StageTimes(
        (1 / chunks,) * stages,
        (2 / chunks,) * stages,
        **{"statistics": (0.3,) * ranks, "gradients": (0.9,) * ranks, "chunks": chunks} | more,
    )


@pytest.mark.parametrize(("name", "chunks"), SHAPES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 16), (4, 8), (8, 64)])
def test_the_head_is_work_of_all_ranks(
    name: str, chunks: int, ranks: int, microbatches: int
) -> None:
    """Without latencies the last stage always has something to do: F, B, S and T of every
    microbatch, and the way to it and back."""
    found = predict(even(ranks, chunks), microbatches, schedule=name, chunks=chunks)
    assert found.busy == pytest.approx([4.2 * microbatches] * ranks)
    way = found.seconds - 4.2 * microbatches
    if chunks == 1:
        assert way == pytest.approx(3.0 * (ranks - 1))
    else:
        # As without a head.
        stages = StageTimes((1 / chunks,) * ranks * chunks, (2 / chunks,) * ranks * chunks)
        alone = predict(stages, microbatches, schedule=name, chunks=chunks)
        assert way == pytest.approx(alone.seconds - 3.0 * microbatches)
    assert found.closed_form is None


def test_microbatches_are_served_one_by_one() -> None:
    """By hand: two ranks, two microbatches, latencies."""
    times = even(2, latency=0.25, head_latency=0.5)
    found = predict(times, 2, schedule="gpipe")
    spans = {(rank, span.task): span for rank in (0, 1) for span in found.timeline.ranks[rank]}
    # F of both ranks 0 to 1 and 1.25 to 2.25; a broadcast; S in the midst of F of the next.
    assert spans[1, Task("F", 0)].end == 2.25
    for rank in (0, 1):
        assert (spans[rank, Task("S", 0)].start, spans[rank, Task("S", 0)].end) == (2.75, 3.05)
        assert spans[rank, Task("T", 0)].start == pytest.approx(3.55)
        # The next one after the sum and a broadcast, though its hidden states are there before.
        assert spans[rank, Task("S", 1)].start == pytest.approx(4.45 + 0.5 + 0.5)
    # Interrupted by S alone.
    assert spans[1, Task("F", 1)].end == pytest.approx(3.25 + 0.3)
    # After the sum; interrupted by S and T of the next.
    back = spans[1, Task("B", 0)]
    assert (back.start, back.end) == (pytest.approx(4.95), pytest.approx(6.95 + 0.3 + 0.9))
    assert found.busy == pytest.approx([8.4, 8.4])


def test_one_f_one_b_waits_for_each_collective() -> None:
    """The last stage has nothing else to do, the planned order has."""
    slow = even(4, head_latency=0.2)
    found = predict(slow, 16)
    assert found.seconds == pytest.approx(16 * (4.2 + 3 * 0.2) + 9)
    planned = predict(slow, 16, schedule="vocab")
    assert planned.seconds < found.seconds - 16 * 0.2
    # As has GPipe, whose head goes through beside later forwards.
    assert predict(slow, 16, schedule="gpipe").seconds < found.seconds - 16 * 0.2


def test_a_tied_embedding_is_before_and_after() -> None:
    plain, tied = even(4, head_latency=0.1), even(4, head_latency=0.1, embedding=(0.05,) * 4)
    found, alone = predict(tied, 8), predict(plain, 8)
    assert found.seconds - alone.seconds == pytest.approx(2 * 8 * 0.15, abs=0.11)
    assert sum(found.busy) - sum(alone.busy) == pytest.approx(4 * 2 * 8 * 0.05)
    first = min(span.start for span in found.timeline.ranks[0] if span.task.kind == "F")
    assert first == pytest.approx(8 * 0.15)


@pytest.mark.parametrize(("name", "chunks"), SHAPES)
@pytest.mark.parametrize("model", [GEMMA, LLAMA], ids=["tied", "untied"])
def test_plans(model: Any, name: str, chunks: int) -> None:
    job = replace(JOB, schedule=name, chunks=chunks)
    plan = make_plan(model, job, H200)
    last = make_plan(model, replace(job, vocab_over="last"), H200)
    planned = make_plan(model, replace(job, schedule="auto", chunks=1), H200)
    assert [rank.in_flight for rank in plan.ranks] == [rank.in_flight for rank in last.ranks]
    assert sum(rank.parameters for rank in plan.ranks) == pytest.approx(model.parameters, rel=1e-3)
    assert sum(rank.flops for rank in plan.ranks) == pytest.approx(
        sum(rank.flops for rank in planned.ranks)
    )
    for rank in plan.ranks:
        # The gradient in fp32, at least.
        assert rank.memory.head >= 4 * model.num_rows * model.dim / 4
    # Rows of a tied embedding, of all microbatches but those in flight.
    hidden = 2.0 * job.tokens * model.dim
    started = {"gpipe": 16, "1f1b": 4}.get(name)
    if started is not None:
        rows = (16 - started) * hidden * model.tied
        assert plan.ranks[0].memory.buffers == last.ranks[0].memory.buffers + rows
    assert plan.ranks[-1].memory.buffers == last.ranks[-1].memory.buffers


def test_jobs_beside_it() -> None:
    zbv = replace(JOB, schedule="zbv", chunks=2)
    assert on_last_stage(zbv).schedule == "zbv" and on_last_stage(zbv).chunks == 2
    assert over_pipeline(zbv).schedule_name == "vocab" and over_pipeline(zbv).chunks == 1
    pays = vocab_pays(LLAMA, replace(JOB, schedule="1f1b"), H200)
    assert pays is not None and pays.planned is not None
    assert pays.over.job.schedule_name == "1f1b" and pays.last.job.vocab_over == "last"
    assert pays.planned.job.schedule_name == "vocab" and pays.planned.seconds < pays.over.seconds
    with pytest.raises(ValueError, match=r"schedule must be 'vocab' in megatron_patch .* '1f1b'"):
        megatron_flags(LLAMA, replace(JOB, schedule="1f1b"), (8, 8, 8, 8))
    with pytest.raises(ValueError, match="must be 'pp' or 'pp-tp' under schedule 'vocab'"):
        Job(pp=4, schedule="vocab")


def test_the_command_names_the_planned_order() -> None:
    arguments = ["plan", "model", "gemma2-2b", "--pp", "4", "--microbatches", "16", "--loss"]
    arguments += ["filtered", "--vocab-over", "pp", "--software", "torch", "--schedule", "1f1b"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "1f1b, loss filtered over pp" in result.output
    assert "the planned order instead: yes: 1." in result.output
    result = CliRunner().invoke(app, [*arguments, "--json", "-"])
    found = json.loads(result.output)
    assert found["planned_order_instead"]["verdict"].startswith("yes: ")
    assert found["vocab_over_pipeline"]["over_pipeline"]["step_seconds"] == found["step_seconds"]
    assert found["megatron_flags"] is None and max(x["in_flight"] for x in found["ranks"]) == 4


def test_measured_times(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    given = {
        "forward": [0.5] * 4,
        "backward": [1] * 4,
        "statistics": [0.3, 0.3],
        "gradients": [0.9, 0.9],
        "microbatches": 16,
        "chunks": 2,
        "schedule": "zbv",
    }
    file.write_text(json.dumps(given))
    assert predict_file(file).seconds == predict(even(2, 2), 16, schedule="zbv", chunks=2).seconds
    with pytest.raises(ValueError, match="chunks must be those of the times, 2, got 1"):
        predict(even(2, 2), 16)
