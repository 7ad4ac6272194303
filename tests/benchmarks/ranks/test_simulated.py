"""`bench ranks --simulate`: ranks one after the other compute what ranks of a job do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks.ranks.played_group import Asked, UnknownResultError, played_group, results_of
from benchmarks.ranks.simulated import Group, simulate_ranks
from cce_dist import VocabShard
from cce_dist.bench.golden import GRADIENT_ERRORS, Gradients, LossFunction, gradients
from cce_dist.bench.inputs import Shape, make_inputs
from cce_dist.bench.methods import METHODS, Method
from cce_dist.bench.rank_methods import Place, Setup
from cce_dist.cli.main import app
from cce_dist.testing import shared_pool

SHAPE = Shape(128, 4608, 16)


def of_a_rank(group: Any, backend: Any, method: str) -> Gradients:
    inputs = make_inputs("zipf", SHAPE)
    place = Place(group, VocabShard.chunked(SHAPE.vocab_size, group.rank(), group.size()))
    function = METHODS[method].build(Setup(backend, place=place))
    return gradients(function, replace(inputs, weight=inputs.weight[place.rows]))


@pytest.mark.interpreter
@pytest.mark.parametrize("method", ["filtered", "exact", "dense"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gradients_have_the_bits_of_a_job(backend: Any, method: str) -> None:
    group = Group(METHODS[method], make_inputs("zipf", SHAPE), 2, backend, [], [])
    group.learn()
    job = shared_pool().run(2, of_a_rank, backend, method)
    for rank, right in enumerate(job):
        with group.rank(rank, is_whole=True) as function:
            # The group plays a call's results once more in the next call.
            for _ in range(2):
                found = gradients(function, group.part(rank))
                for name in ("loss", "hidden", "weight"):
                    assert torch.equal(getattr(found, name), getattr(right, name)), name
    assert not dist.is_initialized()
    if (backend, method) == ("triton", "filtered"):
        # Bounds of each token's lse travel before the merge.
        assert sum(each.kind == "all_gather" for each in group.called) >= 5


def test_each_rank_has_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    sizes = ("--simulate", "3", "--simulate", "2", "--repeats", "3", "--method", "filtered")
    shape = ("--shape", "256x4608x32", "--inputs", "zipf", "--dtype", "float32", "--device", "cpu")
    run = CliRunner().invoke(app, ["bench", "ranks", *shape, *sizes, "--json", str(path)])
    assert run.exit_code == 0, run.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["ranks"], row["rank"]) for row in rows] == [
        *((1, "0"), (1, "slowest"), (2, "0"), (2, "1"), (2, "slowest")),
        *((3, name) for name in ("0", "1", "2", "slowest")),
    ]
    for row in rows:
        assert row["kernel_ms"] > 0 and row["call_ms"] > 0
        assert all(row[name] < 2e-6 for name in GRADIENT_ERRORS)
    one, *several = (row for row in rows if row["rank"] == "slowest")
    for row in several:
        slowest = max(x["kernel_ms"] for x in rows if x["ranks"] == row["ranks"])
        assert row["kernel_ms"] == slowest and row["communication_ms"] > 0
        assert row["times_faster"] == pytest.approx(one["kernel_ms"] / slowest)
        assert row["with_communication"] < row["times_faster"]
    # By a ring: the sum of the hidden gradient is most of it.
    part = 256 * 32 * 4 / 2**20
    assert several[1]["sent_mib"] == pytest.approx(4 / 3 * part, rel=0.35)


def test_results_of_collectives() -> None:
    def result(kind: str) -> list[list[float]]:
        asked = [Asked(kind, torch.arange(4.0) + 10 * rank) for rank in range(2)]
        return [each.tolist() for each in results_of(asked)]

    assert result("all_gather") == [[0, 1, 2, 3, 10, 11, 12, 13]] * 2
    assert result("all_reduce") == [[10, 12, 14, 16]] * 2
    largest = [Asked("all_reduce", torch.tensor([1.0, sign]), True) for sign in (-2.0, 2.0)]
    assert [each.tolist() for each in results_of(largest)] == [[1, 2]] * 2
    assert result("reduce_scatter") == [[10, 12], [14, 16]]
    sent = {kind: Asked(kind, torch.zeros(8)).moved(4) for kind in ("all_gather", "all_reduce")}
    assert sent == {"all_gather": 96, "all_reduce": 48}
    assert Asked("reduce_scatter", torch.zeros(8)).moved(4) == 24
    with pytest.raises(RuntimeError, match="all ranks must call the same collective"):
        results_of([Asked("all_reduce", torch.zeros(2)), Asked("all_reduce", torch.zeros(3))])


def test_other_reductions_are_refused() -> None:
    with played_group(0, 2, [], torch.device("cpu"), is_whole=False) as group:
        with pytest.raises(NotImplementedError, match="sums and maxima, got"):
            dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MIN, group=group)
        with pytest.raises(UnknownResultError):
            dist.all_reduce(torch.ones(2), group=group)


def alone(builder: Any) -> Method:
    return replace(METHODS["exact"], name="odd", builder=builder)


def test_ranks_that_do_not_meet() -> None:
    """A real job would wait forever."""

    def odd(setup: Setup) -> LossFunction:
        loss = METHODS["exact"].build(setup)

        def call(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if setup.place is not None and setup.place.rank:
                dist.all_reduce(torch.zeros(1), group=setup.group)
            return loss(hidden, weight, targets)

        return call

    inputs = make_inputs("zipf", Shape(64, 512, 16))
    with pytest.raises(RuntimeError, match=r"the same collective|only some ranks"):
        simulate_ranks(inputs, [alone(odd)], [2], repeats=3)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["3"], "must divide the number of classes, 512, got 3", id="classes"),
        pytest.param(["2", "--size", "2"], "size must not be given with simulate", id="size"),
        pytest.param(["2", "--peers", "cce"], "simulate takes no peers, got", id="peers"),
    ],
)
def test_refusals(arguments: list[str], message: str) -> None:
    command = ["bench", "ranks", "--shape", "64x512x16", "--device", "cpu", "--simulate"]
    run = CliRunner().invoke(app, [*command, *arguments])
    assert run.exit_code == 2 and message in " ".join(run.output.split())
