"""The vocabulary over the ranks of torch.distributed.pipelining, beside one process."""

from __future__ import annotations

import functools
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cce_dist import LossOptions
from cce_dist.pipeline.schedules.torch_schedules import prepare_mode
from cce_dist.testing import DTYPES, RankError, RankPool, pairwise
from tests.pipeline.pipeline_jobs import (
    evaluate,
    evaluate_between,
    many_steps,
    on_last_stage,
    play_from_the_start,
    train,
)
from tests.pipeline.pipeline_mistakes import (
    MISTAKES,
    class_weights,
    die,
    fail_before_the_thread,
    fail_once,
    go_on_after_failure,
    ids,
    inputs_by_keyword,
    mistake,
    mix_up,
    phases_under_autocast,
    train_wrongly,
)
from tests.pipeline.pipeline_promises import BUGS
from tests.pipeline.pipeline_screened import check_phases, phases, train_screened
from tests.pipeline.pipeline_setup import PLANNED, SCHEDULES, Setup

OPTIONS = {
    "mean": LossOptions(reduction="mean"),
    "exact": LossOptions(reduction="sum", gradient="exact"),
    "softcap, scale": LossOptions(reduction="sum", softcap=5.0, logit_scale=0.7),
    "shift": LossOptions(reduction="mean", shift=1),
    "smoothing, z_loss": LossOptions(reduction="mean", label_smoothing=0.1, z_loss=1e-2),
    "all of them": LossOptions(
        reduction="mean",
        gradient="exact",
        softcap=5.0,
        logit_scale=0.7,
        label_smoothing=0.1,
        z_loss=1e-2,
    ),
}
# What the filter leaves out is bounded by another rule.
EXACT16 = Setup(dtype=torch.bfloat16, options=LossOptions(reduction="mean", gradient="exact"))


@pytest.mark.parametrize("schedule", [*SCHEDULES, PLANNED])
def test_each_schedule(pools: dict[int, RankPool], schedule: str) -> None:
    require_one_loss(pools[2].run(2, train, Setup(schedule), 1e-12))


# The others have four stages in test_tied_embedding_under_each_schedule.
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv", PLANNED])
def test_four_ranks_in_fp32(pools: dict[int, RankPool], schedule: str) -> None:
    setup = Setup(schedule, dtype=torch.float32, options=LossOptions(reduction="mean"))
    require_one_loss(pools[4].run(4, train, setup, 1e-6))


def require_one_loss(ranks: list[dict[str, Any]]) -> None:
    for other in ranks[1:]:
        assert torch.equal(other["losses"], ranks[0]["losses"])


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(pools: dict[int, RankPool], name: str) -> None:
    pools[2].run(2, train, Setup(options=OPTIONS[name], bias=True, scale_grads=True), 1e-12)


@pytest.mark.parametrize(
    ("schedule", "reduction"),
    [("1f1b", "mean"), ("zbv", "sum"), (PLANNED, "mean"), (PLANNED, "sum")],
)
def test_microbatches_without_targets(
    pools: dict[int, RankPool], schedule: str, reduction: str
) -> None:
    options = LossOptions(reduction=reduction, z_loss=1e-2)
    setup = Setup(schedule, ignored=True, options=options, bias=True)
    pools[2].run(2, train, setup, 1e-12)
    pools[2].run(2, train, replace(setup, microbatches=2, tied=True, bias=False), 1e-12)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", PLANNED])
def test_tensor_parallel_stages(
    pools: dict[int, RankPool], schedule: str, sequence_parallel: bool
) -> None:
    """The vocabulary over both: two stages of two ranks each."""
    setup = Setup(schedule, tensor=2, sequence_parallel=sequence_parallel, bias=True)
    require_one_loss(pools[4].run(4, train, setup, 1e-12))


@pytest.mark.parametrize("microbatches", [1, 2, 3, 5])
def test_few_microbatches(pools: dict[int, RankPool], microbatches: int) -> None:
    pools[4].run(4, train, Setup(PLANNED, microbatches=microbatches), 1e-12)


@pytest.mark.parametrize(
    ("microbatches", "parallel", "static"),
    [
        (row["microbatches"], row["parallel"], row["static"])
        for row in pairwise(
            {"microbatches": [1, 8], "parallel": ["", "tp", "sp"], "static": [True, False]}
        )
    ],
)
def test_tied_embedding(
    pools: dict[int, RankPool], microbatches: int, parallel: str, static: bool
) -> None:
    setup = Setup(
        PLANNED,
        microbatches=microbatches,
        tied=True,
        static=static,
        tensor=2 if parallel else 1,
        sequence_parallel=parallel == "sp",
        scale_grads=True,
    )
    pools[4].run(4, train, setup, 1e-12)


@pytest.mark.parametrize("microbatches", [1, 2, 6])
def test_a_slow_start(pools: dict[int, RankPool], microbatches: int) -> None:
    setup = Setup(PLANNED, microbatches=microbatches, tied=True, slow_start=True)
    pools[4].run(4, train, setup, 1e-12)
    pools[2].run(2, evaluate, setup)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", PLANNED])
def test_ranks_that_meet_before_a_collective(pools: dict[int, RankPool], schedule: str) -> None:
    """As on GPUs."""
    if schedule != "1f1b":
        pools[4].run(4, train, Setup(schedule, tied=True, paced=True), 1e-12)
    if schedule != "zbv":
        setup = Setup(schedule, tensor=2, sequence_parallel=True, paced=True)
        pools[4].run(4, train, setup, 1e-12)
    pools[2].run(2, evaluate, Setup(schedule, paced=True))


# Four stages, or two of two ranks each: every other schedule.
@pytest.mark.parametrize(
    ("schedule", "parallel"), list(zip(SCHEDULES, itertools.cycle(["", "sp"]), strict=False))
)
def test_tied_embedding_under_each_schedule(
    pools: dict[int, RankPool], schedule: str, parallel: str
) -> None:
    setup = Setup(schedule, tied=True, tensor=2 if parallel else 1)
    setup = replace(setup, sequence_parallel=bool(parallel), static=not parallel)
    pools[4].run(4, train, setup, 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", PLANNED])
def test_tied_embedding_in_an_evaluation(pools: dict[int, RankPool], schedule: str) -> None:
    pools[2].run(2, evaluate, Setup(schedule, tied=True))


@pytest.mark.parametrize("schedule", ["zbv", PLANNED])
def test_many_steps(pools: dict[int, RankPool], schedule: str) -> None:
    pools[2].run(2, many_steps, Setup(schedule, tied=True), 15)


def test_class_weights(pools: dict[int, RankPool]) -> None:
    pools[2].run(2, class_weights)


def test_autocast(pools: dict[int, RankPool]) -> None:
    pools[2].run(2, phases_under_autocast)


# Each schedule, and each pair of a dtype and a head.
HEADS = {"plain": {}, "tied": {"bias": True, "tied": True, "scale_grads": True}}
IN_16_BITS = [
    pytest.param(schedule, dtype, HEADS[head], id=f"{schedule}-{dtype}-{head}")
    for schedule, (dtype, head) in zip(
        (*SCHEDULES, PLANNED),
        itertools.cycle(itertools.product(("bf16", "fp16"), HEADS)),
        strict=False,
    )
]


@pytest.mark.parametrize(("schedule", "dtype", "head"), IN_16_BITS)
def test_16_bits(
    pools: dict[int, RankPool], schedule: str, dtype: str, head: dict[str, bool]
) -> None:
    """Beside float64 no further than dense logits of 16 bits in one process, by the tolerance rule;
    test_pipelining_nccl asks the same of GPUs."""
    setup = replace(EXACT16, schedule=schedule, dtype=DTYPES[dtype], **head)
    pools[2].run(2, train, setup, None)


@pytest.mark.parametrize("bug", BUGS)
def test_16_bits_refuse(pools: dict[int, RankPool], bug: str) -> None:
    # Sums of a few microbatches are as exact in 16 bits as what is summed.
    setup = replace(EXACT16, microbatches=64) if bug == "adding up in 16 bits" else EXACT16
    pools[2].run(2, train_wrongly, setup, bug)


def test_triton(pools: dict[int, RankPool]) -> None:
    options = LossOptions(reduction="sum", backend="triton")
    setup = Setup("gpipe", microbatches=2, dtype=torch.float32, options=options)
    pools[2].run(2, train, setup, 1e-5, 1)


@pytest.mark.interpreter
@pytest.mark.parametrize("gradient", ["filtered", "exact"])
def test_nothing_starts_late(pools: dict[int, RankPool], gradient: str) -> None:
    """A kernel's first start waits for the device, and within a step so for other ranks."""
    options = LossOptions(reduction="sum", backend="triton", gradient=gradient)  # pyright: ignore
    setup = Setup("gpipe", microbatches=2, dtype=torch.float32, options=options)
    assert min(pools[2].run(2, play_from_the_start, setup)) >= 4


@pytest.mark.interpreter
def test_screened_phases(pools: dict[int, RankPool]) -> None:
    ranks = pools[2].run(2, phases)
    check_phases(ranks)
    for found in ranks:
        assert found["seen"] == found["seen of values"] == {"screened": 2, "full": 0, "copies": 1}
        assert found["seen of alone"] == {"screened": 2, "full": 0, "copies": 2}
    # Of a rank of rare tokens, which would take its columns for all there is.
    assert 0 < ranks[1]["kept of values"] < 0.75 * ranks[1]["kept of alone"]


@pytest.mark.interpreter
@pytest.mark.parametrize("schedule", ["1f1b", PLANNED])
def test_screened(pools: dict[int, RankPool], schedule: str) -> None:
    """The planned one with one copy of the weight for a step's two microbatches."""
    for seen in pools[2].run(2, train_screened, schedule):
        assert seen == {"screened": 4, "full": 0, "copies": 2 if schedule == PLANNED else 4}


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", PLANNED])
def test_stages_that_ask_for_shapes(pools: dict[int, RankPool], schedule: str) -> None:
    """Their schedule calls the loss once more, on the last stage alone."""
    pools[2].run(2, train, Setup(schedule, static=False), 1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation(pools: dict[int, RankPool], schedule: str) -> None:
    pools[2].run(2, evaluate, Setup(schedule))


# Every other schedule of torch has the tied head, and ours both.
@pytest.mark.parametrize(
    ("schedule", "tied"),
    [
        *zip(SCHEDULES, itertools.cycle([False, True]), strict=False),
        *((PLANNED, tied) for tied in (False, True)),
    ],
)
def test_an_evaluation_between_steps(pools: dict[int, RankPool], schedule: str, tied: bool) -> None:
    how: dict[str, Any] = {"tied": True, "static": False} if tied else {"scale_grads": True}
    pools[2].run(2, evaluate_between, Setup(schedule, **how))


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_head_on_the_last_stage(pools: dict[int, RankPool], schedule: str, static: bool) -> None:
    pools[2].run(2, on_last_stage, Setup(schedule, static=static), 1e-12)


@pytest.mark.parametrize(("schedule", "tensor"), [("1f1b", 1), ("zbv", 1), ("1f1b", 2)])
def test_distillation_on_the_last_stage(
    pools: dict[int, RankPool], schedule: str, tensor: int
) -> None:
    distil = functools.partial(on_last_stage, distils=True)
    pools[2 * tensor].run(2 * tensor, distil, Setup(schedule, tensor=tensor), 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_head_on_the_last_stages_tensor_parallel_ranks(
    pools: dict[int, RankPool], schedule: str
) -> None:
    pools[4].run(4, on_last_stage, Setup(schedule, tensor=2), 1e-12)


@pytest.mark.parametrize(("schedule", "parallel"), [("interleaved", "sp"), (PLANNED, "tp")])
def test_evaluation_beside_tensor_parallelism(
    pools: dict[int, RankPool], schedule: str, parallel: str
) -> None:
    setup = Setup(schedule, tensor=2, sequence_parallel=parallel == "sp", tied=parallel == "tp")
    pools[4].run(4, evaluate, setup)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(pools: dict[int, RankPool], name: str) -> None:
    pools[2].run(2, mistake, name)


def test_numbers_of_microbatches(pools: dict[int, RankPool]) -> None:
    pools[2].run(2, ids)


def test_an_evaluation_in_a_steps_context(pools: dict[int, RankPool]) -> None:
    pools[2].run(2, mix_up)


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("schedule", ["1f1b", PLANNED])
def test_inputs_by_keyword(pools: dict[int, RankPool], schedule: str, static: bool) -> None:
    pools[2].run(2, inputs_by_keyword, Setup(schedule, static=static))


def test_a_failure_before_the_thread(pools: dict[int, RankPool]) -> None:
    pools[2].run(2, fail_before_the_thread)


def test_an_earlier_failure_is_remembered(pools: dict[int, RankPool]) -> None:
    pools[2].run(2, fail_once)


def test_new_stages_go_on_after_a_failure(pools: dict[int, RankPool]) -> None:
    pools[2].run(2, go_on_after_failure)


@pytest.mark.parametrize(
    ("schedule", "rank", "phase"),
    [
        ("1f1b", 0, "post"),
        ("1f1b", 1, "statistics"),
        ("zbv", 1, "gradients"),
        (PLANNED, 1, "statistics"),
        (PLANNED, 0, "gradients"),
        (PLANNED, 1, "take"),
    ],
)
def test_a_rank_that_dies_takes_the_others_down(
    pools: dict[int, RankPool], schedule: str, rank: int, phase: str
) -> None:
    require_all_down(pools[2], Setup(schedule), rank, phase)


@pytest.mark.parametrize(
    ("schedule", "rank", "phase"),
    [(PLANNED, 1, "look_up"), (PLANNED, 0, "give"), ("1f1b", 1, "add")],
)
def test_a_rank_that_dies_in_a_tied_embedding_takes_the_others_down(
    pools: dict[int, RankPool], schedule: str, rank: int, phase: str
) -> None:
    require_all_down(pools[2], Setup(schedule, tied=True), rank, phase)


@pytest.mark.parametrize(("schedule", "rank"), [("zbv", 1), (PLANNED, 0)])
def test_a_rank_that_dies_in_an_evaluation_takes_the_others_down(
    pools: dict[int, RankPool], schedule: str, rank: int
) -> None:
    require_all_down(pools[2], Setup(schedule), rank, "statistics", False)


@pytest.mark.parametrize("schedule", ["1f1b", PLANNED])
def test_a_rank_that_dies_where_ranks_meet_takes_the_others_down(
    pools: dict[int, RankPool], schedule: str
) -> None:
    require_all_down(pools[2], Setup(schedule, paced=True), 0, "gradients")


def require_all_down(pool: RankPool, setup: Setup, rank: int, *what: Any) -> None:
    # The last death took its processes along.
    pool.run(2, dist.get_rank)
    started = time.monotonic()
    with pytest.raises(RankError) as caught:
        pool.run(2, die, setup, rank, *what, timeout=40)
    # The group's timeout of 5 s, and processes on a busy core.
    assert time.monotonic() - started < 25
    said = {failed: text for failed, (text, _) in caught.value.failures.items()}
    assert "the process died" in said[rank] and "no answer" not in str(said)


def test_receive_buffers_are_made_anew_when_a_step_follows_an_evaluation() -> None:
    """As torch 2.13 does itself."""

    class Schedule:
        def __init__(self, kind: str) -> None:
            for way in ("forward", "backward"):
                setattr(self, f"_{kind}_{way}_initialized", True)

    for kind in ("stage", "stages"):
        schedule = Schedule(kind)
        made = []
        for backward in (False, False, True, True, False):
            prepare_mode(schedule, backward=backward)
            made.append(not getattr(schedule, f"_{kind}_forward_initialized"))
            schedule.__init__(kind)
        assert made == [False, False, True, False, True]
