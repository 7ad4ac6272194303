"""Layouts that the planner finds, what binds them, and those that it refuses."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from cce_dist.planner.cost.hardware import GIB, HARDWARE
from cce_dist.planner.cost.job import Job
from cce_dist.planner.models.model import Model
from cce_dist.planner.models.presets import find_model
from cce_dist.planner.plan import even_layout, make_plan
from cce_dist.planner.search import (
    best_plan,
    largest_microbatch,
    largest_of_layouts,
    nearest_that_fits,
    vocab_pays,
)
from tests.planner.plan_jobs import GEMMA, H200, LLAMA, PIPE, SMALL


def test_layouts_are_found() -> None:
    dense = best_plan(GEMMA, replace(PIPE, loss="dense"), H200)
    assert dense.layout[-1] < 3 and sum(dense.layout) == 26
    assert dense.seconds < 0.75 * make_plan(GEMMA, replace(PIPE, loss="dense"), H200).seconds
    ours = best_plan(GEMMA, replace(PIPE, loss="filtered"), H200)
    assert ours.layout == (7, 7, 7, 5)
    assert ours.seconds < 0.85 * dense.seconds
    virtual = best_plan(LLAMA, replace(PIPE, chunks=2), H200)
    assert len(virtual.layout) == 8 and sum(virtual.layout) == 32
    assert virtual.seconds < best_plan(LLAMA, PIPE, H200).seconds


def test_layouts_make_room_where_memory_is_short() -> None:
    job = replace(PIPE, microbatch=3, loss="filtered")
    free = best_plan(LLAMA, job, H200)
    small = replace(H200, memory=0.97 * free.peak / H200.usable)
    assert not make_plan(LLAMA, job, small, free.layout).fits
    squeezed = best_plan(LLAMA, job, small)
    assert squeezed.fits and squeezed.layout[0] < free.layout[0]


def test_largest_microbatch() -> None:
    plan = best_plan(LLAMA, PIPE, H200)
    count = largest_microbatch(plan)
    assert count >= 1 and plan.fits
    for microbatch, fits in ((count, True), (count + 1, False)):
        job = replace(PIPE, microbatch=microbatch)
        assert make_plan(LLAMA, job, H200, plan.layout).fits is fits
    assert largest_microbatch(make_plan(find_model("llama3-70b"), Job(), H200)) == 0


@pytest.mark.parametrize(
    "job", [replace(PIPE, pp=3, loss="dense"), replace(PIPE, pp=3, loss="exact", vocab_over="pp")]
)
def test_largest_of_layouts(job: Job) -> None:
    """Beside every layout of 8 layers on 3 stages."""
    small = replace(H200, memory=16 * GIB)
    count = largest_of_layouts(SMALL, job, small)
    assert count > max(1, largest_microbatch(make_plan(SMALL, job, small, (3, 3, 2))))
    every = [(a, b, 8 - a - b) for a in range(9) for b in range(1, 9 - a)]
    for microbatch, fits in ((count, True), (count + 1, False)):
        larger = replace(job, microbatch=microbatch)
        plans = [make_plan(SMALL, larger, small, layout) for layout in every]
        assert any(plan.fits for plan in plans) is fits
    assert largest_of_layouts(SMALL, job, small, below=count) == count - 1
    assert largest_of_layouts(SMALL, job, replace(H200, memory=GIB)) == 0


def test_largest_microbatch_that_ranks_can_share() -> None:
    job = Job(sequence=4001, tp=2, microbatch=2, sequence_parallel=True)
    assert largest_of_layouts(SMALL, job, H200) % 2 == 0 < largest_of_layouts(SMALL, job, H200)
    assert largest_microbatch(make_plan(SMALL, job, H200)) % 2 == 0


def test_whether_the_vocabulary_over_the_pipeline_pays() -> None:
    # A head of eight layers' time, deep pipeline, many microbatches.
    wide = Model(classes=512000, dim=2048, layers=16, mlp_dim=8192, heads=16, kv_heads=16)
    pays = vocab_pays(wide, Job(pp=8, microbatches=128, loss="exact"), H200)
    assert pays is not None and pays.speedup > 1.5 and pays.verdict.startswith("yes: ")
    pays = vocab_pays(LLAMA, PIPE, H200)
    assert pays is not None and pays.speedup < 1 and pays.verdict.startswith("no: ")
    assert pays.last.job.loss == "filtered" and pays.over.job.vocab_over == "pp"
    both = vocab_pays(LLAMA, replace(PIPE, tp=2, loss="exact"), H200)
    assert both is not None and both.over.job.head_ranks == 8
    assert vocab_pays(LLAMA, Job(loss="exact"), H200) is None


@pytest.mark.parametrize("microbatches", [128, 1024])
def test_a_plan_for_many(microbatches: int) -> None:
    """1,024 GPUs, 128 stages, half a million classes; all that the command asks of the planner."""
    model = Model(classes=524288, dim=8192, layers=256, mlp_dim=28672, heads=64, kv_heads=8)
    job = Job(sequence=8192, pp=128, dp=8, microbatches=microbatches, recompute="full")
    job = replace(job, loss="exact", vocab_over="pp", distributed_optimizer=True)
    start = time.process_time()
    plan = best_plan(model, job, H200)
    pays = vocab_pays(model, job, H200, best=plan)
    assert largest_of_layouts(model, job, H200) >= largest_microbatch(plan) >= 1
    # 2 s and 5 s; of the processor, whatever else it has to do.
    assert time.process_time() - start < 20
    assert pays is not None and pays.over is plan
    assert job.gpus == 1024 and plan.fits
    assert max(rank.in_flight for rank in plan.ranks) <= min(microbatches, 128 + 3)


def test_what_binds() -> None:
    assert "its head takes" in make_plan(GEMMA, replace(PIPE, loss="dense"), H200).binds
    assert make_plan(find_model("llama3-70b"), Job(), H200).binds.startswith("memory: rank 0 needs")
    few = make_plan(LLAMA, replace(PIPE, microbatches=1, loss="none"), H200)
    assert few.binds.startswith("the bubble: ")


def test_nearest_that_fits() -> None:
    big = find_model("llama3-70b")
    smaller = nearest_that_fits(LLAMA, Job(microbatch=64, pp=4), H200)
    count = largest_of_layouts(LLAMA, Job(microbatch=64, pp=4), H200)
    assert smaller.fits == f"--microbatch {count}" and 1 < count < 64
    long = Job(sequence=131072, microbatches=64)
    for job, hardware in ((Job(), H200), (long, HARDWARE["a100"])):
        changes = nearest_that_fits(big, job, hardware).fits
        assert changes is not None
        values: dict[str, Any] = {}
        for change in changes.removeprefix("--").split(" --"):
            name, _, value = change.replace("-", "_").partition(" ")
            values[name] = int(value) if value.isdigit() else value or True
        assert best_plan(big, replace(job, **values), hardware).fits
    none = nearest_that_fits(big, Job(), replace(H200, memory=GIB))
    assert none.fits is None
    assert none.tried == "--tp 8 --pp 64 --cp 16 --sequence-parallel --recompute full"


def test_nearest_that_fits_instead_of_a_layout() -> None:
    job, asked = replace(PIPE, microbatch=2, loss="native"), (23, 1, 1, 1)
    h100 = HARDWARE["h100"]
    assert not make_plan(GEMMA, job, h100, asked).fits
    found = nearest_that_fits(GEMMA, job, h100, asked).fits
    assert found == "--layout " + ",".join(map(str, best_plan(GEMMA, job, h100).layout))
    found = nearest_that_fits(GEMMA, replace(job, microbatch=32), h100, asked).fits
    count = largest_of_layouts(GEMMA, job, h100)
    assert found == f"--microbatch {count}, without --layout" and 2 <= count < 32


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 0}, "tp must be an integer >= 1, got 0"),
        ({"microbatch": 1.5}, "microbatch must be an integer >= 1, got 1.5"),
        ({"loss": "dens"}, r"loss must be one of .*got 'dens'"),
        ({"recompute": "some"}, r"recompute must be one of .*got 'some'"),
        ({"cp": 3}, "sequence must be a multiple of 2 . cp, 6, got 4096; the nearest is 4098"),
        ({"dp": 4, "ep": 3}, "ep must divide dp . cp, 4, got 3; the nearest is 2"),
        ({"vocab_over": "pp", "pp": 2}, r"loss must be one of \('exact', 'filtered'\) with"),
        (
            {"loss": "exact", "schedule": "vocab"},
            "vocab_over must be 'pp' or 'pp-tp' under schedule 'vocab', got 'last'",
        ),
        ({"schedule": "zbv"}, "chunks must be 2 under schedule 'zbv', got 1"),
        ({"schedule": "1f1b", "chunks": 2}, "chunks must be 1 under schedule '1f1b', got 2"),
        (
            {"loss": "exact", "vocab_over": "pp", "pp": 2, "chunks": 2},
            "chunks must be 1 under schedule 'vocab', got 2; 'interleaved' has 2 or more",
        ),
    ],
)
def test_bad_jobs_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Job(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tp": 3}, "tp must divide the model's 32 heads, got 3; the nearest is 2"),
        ({"pp": 40}, r"must be <= 34, the model's 32 layers and two .* got 40 . 1 = 40; .* is 34"),
        ({"pp": 8, "chunks": 8}, r"got 8 . 8 = 64; the largest pp with these chunks is 4"),
        ({"pp": 1, "chunks": 35}, r"got 1 . 35 = 35; even pp 1 can have no more than 34 chunks"),
        ({"dp": 2, "ep": 2}, "ep must divide the model's 0 experts, got 2; the nearest is 1"),
        (
            {"tp": 32, "sequence": 4001, "sequence_parallel": True},
            "must be a multiple of tp, 32, under sequence parallelism, got 4001; the nearest is 40",
        ),
    ],
)
def test_models_that_cannot_be_cut_are_refused(values: dict[str, Any], message: str) -> None:
    # Tokens of a rank, not of a sequence.
    make_plan(LLAMA, Job(tp=32, sequence=4000, sequence_parallel=True, cp=5), H200)
    with pytest.raises(ValueError, match=message):
        make_plan(LLAMA, Job(**values), H200)


def test_tp_of_fewer_heads_of_keys() -> None:
    """Megatron's rule: each rank has as many, or as many ranks have the same one."""
    model = replace(SMALL, heads=24, kv_heads=4, mlp_dim=768, head_dim=64)
    for tp in (1, 2, 4, 8, 12, 24):
        make_plan(model, Job(tp=tp), H200)
    for tp, near in ((3, 2), (6, 4)):
        message = f"4 heads of keys and values or be a multiple of them, got {tp}; the nearest is"
        with pytest.raises(ValueError, match=f"{message} {near}"):
            make_plan(model, Job(tp=tp), H200)


def test_bad_layouts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"4 stages .* of 32 layers in all, got 4 of 31: \[8"):
        make_plan(LLAMA, PIPE, H200, (8, 8, 8, 7))
    with pytest.raises(ValueError, match=r"got 3 of 32: .* an even one is \[8, 8, 8, 8\]"):
        make_plan(LLAMA, PIPE, H200, (8, 8, 16))
    assert even_layout(26, 4) == (7, 7, 6, 6)
    # The embedding and the head may have a stage each.
    assert even_layout(4, 5) == (1, 1, 1, 1, 0)
    assert even_layout(4, 6) == (0, 1, 1, 1, 1, 0)
