"""Orders of work, and when their tasks end."""

from __future__ import annotations

import json
import random
import types
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from cce_dist.planner.orders.measured import predict_file
from cce_dist.planner.orders.predict import StageTimes, predict
from cce_dist.planner.orders.schedules import held_of, make_schedule, peak_of_held
from cce_dist.planner.orders.timeline import Task, Work, run_orders

# Ranks and microbatches: none in flight at first, fewer than ranks, many.
SIZES = [(1, 1), (1, 5), (2, 2), (4, 2), (4, 8), (8, 64)]


def even(stages: int, forward: float = 1.0, backward: float = 2.0, **more: Any) -> StageTimes:
    return StageTimes((forward,) * stages, (backward,) * stages, **more)


def peak_held(
    order: Sequence[Task], held: list[float], working: Sequence[float] = (), phases: float = 0.0
) -> float:
    return peak_of_held(held_of(order, len(held)), held, working, phases=phases)


KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def in_torch(actions: list[Any], ranks: int, *, is_v: bool = False) -> list[Task]:
    """torch's orders in our words."""
    found = []
    for action in actions:
        if action is not None:
            stage, kind = action.stage_index, KINDS[action.computation_type.name]
            chunk = int(stage >= ranks) if is_v else stage // ranks
            found.append(Task(kind, action.microbatch_index, chunk))
    return found


def theirs(name: str, rank: int, ranks: int, microbatches: int, **others: int) -> list[Task]:
    """A rank's order by a schedule of torch."""
    itself = types.SimpleNamespace(
        pp_group_size=ranks, _n_microbatches=microbatches, num_stages=2 * ranks, **others
    )
    actions = getattr(torch_schedules, name)._calculate_single_rank_operations(itself, rank)
    return in_torch(actions, ranks, is_v="ZBV" in name)


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 10, 3)])
def test_interleaved_is_torchs(ranks: int, microbatches: int, chunks: int) -> None:
    each_round = microbatches // max(1, microbatches // ranks)
    sizes = {"n_local_stages": chunks, "microbatches_per_round": each_round}
    made = make_schedule("interleaved", ranks, microbatches, chunks=chunks, framework="torch")
    for rank in range(ranks):
        order = theirs("ScheduleInterleaved1F1B", rank, ranks, microbatches, **sizes)
        assert list(made.orders[rank]) == order


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (2, 8), (4, 3), (4, 16)])
def test_zbv_is_torchs(ranks: int, microbatches: int) -> None:
    made = make_schedule("zbv", ranks, microbatches, chunks=2)
    for rank in range(ranks):
        order = theirs("ScheduleZBVZeroBubble", rank, ranks, microbatches)
        assert list(made.orders[rank]) == order


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 3), (4, 4, 2)])
def test_interleaved_is_megatrons(ranks: int, microbatches: int, chunks: int) -> None:
    pytest.importorskip("megatron.core", reason="needs the extra `megatron`")
    megatrons = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    if not hasattr(megatrons, "get_schedule_table"):
        pytest.skip("this Megatron has no table of its schedule")
    table = megatrons.get_schedule_table(microbatches, chunks, ranks)
    made = make_schedule("interleaved", ranks, microbatches, chunks=chunks)
    for rank, order in enumerate(made.orders):
        forwards = [(task.microbatch, task.chunk) for task in order if task.kind == "F"]
        backwards = [(task.microbatch, task.chunk) for task in order if task.kind == "B"]
        assert forwards == table
        assert backwards == [(index, chunks - 1 - chunk) for index, chunk in table]
        warm = [task.kind for task in order].index("B") - 1
        full = microbatches * chunks
        assert warm == min(2 * (ranks - rank - 1) + (chunks - 1) * ranks, full - 1)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_every_task_once(ranks: int, microbatches: int) -> None:
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("zbv", 2), ("vocab", 1)):
        made = make_schedule(name, ranks, microbatches, chunks=chunks)
        kinds = {"zbv": "FIW", "vocab": "FSTB"}.get(name, "FB")
        every = {Task(*each) for each in product(kinds, range(microbatches), range(chunks))}
        for order in made.orders:
            assert set(order) == every and len(order) == len(every)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_closed_forms(ranks: int, microbatches: int) -> None:
    uneven = StageTimes(
        tuple(1 + 0.1 * (rank % 3) for rank in range(ranks)),
        tuple(2 + 0.2 * (rank % 2) for rank in range(ranks)),
    )
    gpipe = predict(uneven, microbatches, schedule="gpipe")
    assert gpipe.seconds == pytest.approx(gpipe.closed_form)
    found = predict(even(ranks), microbatches)
    assert found.seconds == pytest.approx(found.closed_form)
    assert found.closed_form == pytest.approx(3.0 * (microbatches + ranks - 1))
    # The last stage is the slowest in both.
    slow = StageTimes((1.0,) * (ranks - 1) + (1.7,), (2.0,) * (ranks - 1) + (3.1,))
    found = predict(slow, microbatches)
    assert found.seconds == pytest.approx(found.closed_form)
    # An upper bound here; not always, as below.
    found = predict(uneven, microbatches)
    assert found.closed_form is not None and found.seconds <= found.closed_form * (1 + 1e-9)


def test_one_f_one_bs_formula_is_no_bound() -> None:
    """By hand: the second stage's forwards end at 9, its first backward at 10, and the first stage
    has two of 4 from there on."""
    found = predict(StageTimes((1.0, 4.0, 1.0), (4.0, 1.0, 1.0)), 2)
    assert (found.seconds, found.closed_form) == (18.0, 17.0)


@pytest.mark.parametrize("chunks", [2, 4])
def test_interleaving_divides_the_bubble(chunks: int) -> None:
    found = predict(even(4 * chunks), 16, schedule="interleaved", chunks=chunks)
    assert (
        found.seconds == pytest.approx(found.closed_form) == pytest.approx(3.0 * (16 * chunks + 3))
    )
    plain = predict(even(4, float(chunks), 2.0 * chunks), 16)
    assert found.seconds - 48 * chunks == pytest.approx((plain.seconds - 48 * chunks) / chunks)
    assert found.most_held[0] == 2 * 3 + 4 * (chunks - 1) + 1


def test_zbv_has_nearly_no_bubble() -> None:
    found = predict(even(8, 1.0, 2.0), 16, schedule="zbv", chunks=2)
    # Only ramps: forwards, inputs' and weights' gradients take equally long.
    assert found.seconds == pytest.approx(16 * 6 + 3)
    assert set(found.most_held) == {8.0}
    assert found.schedule.rank(7) == 0 and found.schedule.stage(0, 1) == 7


def test_one_f_one_b_holds_as_many_as_ranks_follow() -> None:
    assert predict(even(4), 8).most_held == (4, 3, 2, 1)
    assert predict(even(4), 2).most_held == (2, 2, 2, 1)
    assert predict(even(4), 8, schedule="gpipe").most_held == (8, 8, 8, 8)


def waits_of(rank: int, kind: str, *, embeds: bool, weighs: bool) -> list[tuple[int, str]]:
    """What a pass of one of four ranks waits for: ranks and kinds."""
    every = range(4)
    return {
        "F": [(rank - 1, "F")] if rank else [(0, "E")] * embeds,
        "B": [(rank + 1, "B")] if rank < 3 else [(x, "T") for x in every],
        "S": [(3, "F")],
        "U": [(x, "S") for x in every],
        "T": [(3, "U")] if weighs else [(x, "S") for x in every],
        "E": [],
        "G": [(0, "B")],
    }[kind]


@pytest.mark.parametrize("weighs", [False, True], ids=["", "weighs"])
@pytest.mark.parametrize("embeds", [False, True], ids=["head", "head and embedding"])
def test_passes_of_the_planned_order_start_as_soon_as_they_can(embeds: bool, weighs: bool) -> None:
    rows = (0.05,) * 4 if embeds else ()
    times = even(4, statistics=(0.5,) * 4, gradients=(1.5,) * 4, embedding=rows, head_latency=0.1)
    found = predict(times, 12, schedule="vocab", weighs=weighs)
    every = [(rank, span) for rank, spans in enumerate(found.timeline.ranks) for span in spans]
    ends = {(rank, span.task): span.end for rank, span in every}
    free = [0.0] * 4
    for rank, (task, start, end) in every:
        waits = waits_of(rank, task.kind, embeds=embeds, weighs=weighs)
        before = [ends[peer, Task(kind, task.microbatch)] for peer, kind in waits]
        # Collectives take a while, and sends of a stage none here.
        is_sent = (task.kind == "F" and rank) or (task.kind == "B" and rank < 3)
        ready = max(before, default=0.0) + (0.0 if is_sent or not before else 0.1)
        assert start == pytest.approx(max(free[rank], ready))
        free[rank] = end
    # U may wait for a pass of the last rank, for which each rank holds one microbatch more.
    assert found.most_held == tuple(held + weighs for held in (6, 5, 4, 3))
    # The order knows of no latency: each microbatch may wait for one, or for two with U.
    assert found.closed_form is not None
    assert found.seconds <= found.closed_form + 12 * 0.1 * (1 + weighs)
    assert found.schedule.weighs is weighs


def test_latency_is_on_the_way_between_ranks_alone() -> None:
    assert predict(even(4, latency=0.5), 1).seconds == pytest.approx(12 + 2 * 3 * 0.5)
    # Of eight stages, the fourth and the fifth are on one rank.
    found = predict(even(8, latency=0.5), 1, schedule="zbv", chunks=2)
    alone = predict(even(8), 1, schedule="zbv", chunks=2)
    assert found.seconds - alone.seconds == pytest.approx(2 * 6 * 0.5)


def test_peak_held_counts_what_runs() -> None:
    order = [Task("F", 0), Task("F", 1), Task("B", 0), Task("B", 1)]
    assert peak_held(order, [3.0]) == 6.0
    assert peak_held(order, [3.0], [5.0]) == 11.0
    split = [Task("F", 0), Task("I", 0), Task("F", 1), Task("W", 0), Task("I", 1), Task("W", 1)]
    assert peak_held(split, [3.0]) == 6.0
    assert peak_held([Task("F", 0), Task("S", 0), Task("B", 0)], [1.0], phases=4.0) == 5.0


def most_by_hand(order: Sequence[Task], held: list[float], working: list[float]) -> float:
    now, most = 0.0, 0.0
    for kind, _, chunk in order:
        now += held[chunk] * (kind == "F")
        most = max(most, now + working[chunk] * (kind != "F"))
        now -= held[chunk] * (kind in "BW")
    return most


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zbv", 2)])
def test_what_is_left_out_holds_less(name: str, chunks: int) -> None:
    pick = random.Random(0).uniform
    for order in make_schedule(name, 4, 12, chunks=chunks).orders:
        for _ in range(20):
            held = [pick(0, 1) for _ in range(chunks)]
            working = [pick(0, 1) for _ in range(chunks)]
            assert peak_held(order, held, working) == pytest.approx(
                most_by_hand(order, held, working)
            )


def test_gates_open_at_their_last_knock() -> None:
    def work(rank: int, kind: str, chunk: int) -> Work:
        return Work(1.0 + rank, "S" if kind == "T" else None, 0.5, kind)

    found = run_orders([[Task("S", 0), Task("T", 0)]] * 3, work, {"S": 3, "T": 3})
    assert [spans[1].start for spans in found.ranks] == [3.5, 3.5, 3.5]
    assert found.makespan == 6.5 and found.busy == (2.0, 4.0, 6.0)


def test_a_circle_is_named() -> None:
    def work(rank: int, kind: str, chunk: int) -> Work:
        return Work(1.0, 1 - rank, 0.0, rank)

    with pytest.raises(ValueError, match=r"must not wait in a circle, got ranks that wait: \[\(0"):
        run_orders([[Task("F", 0)], [Task("F", 0)]], work)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "2f2b"}, r"schedule must be one of \['gpipe', .*got '2f2b'"),
        ({"name": "1f1b", "ranks": 0}, "ranks must be >= 1, got 0"),
        ({"name": "1f1b", "microbatches": 10**11}, r"ranks \* chunks \* microbatches must be <= 1"),
        ({"name": "1f1b", "chunks": 2}, r"chunks .* must be 1 for '1f1b', got 2"),
        ({"name": "1f1b", "framework": "jax"}, "must be 'torch' or 'megatron', got 'jax'"),
        ({"name": "zbv", "chunks": 3}, r"chunks .* must be 2 for 'zbv', got 3"),
        ({"name": "interleaved", "chunks": 1}, r"must be >= 2 for 'interleaved', got 1"),
        (
            {"name": "interleaved", "chunks": 2, "microbatches": 10},
            r"multiple of the pipeline's ranks, 4, .*got 10; the nearest is 8",
        ),
        (
            {"name": "interleaved", "chunks": 2, "microbatches": 9, "framework": "torch"},
            r"multiple of 2, the number of rounds .*got 9; the nearest is 8",
        ),
        (
            {"name": "1f1b", "microbatches": 2, "framework": "torch"},
            r"microbatches must be >= the number of stages .*4, got 2",
        ),
    ],
)
def test_bad_schedules_are_refused(arguments: dict[str, object], message: str) -> None:
    values = {"ranks": 4, "microbatches": 8} | arguments
    name, ranks, count = values.pop("name"), values.pop("ranks"), values.pop("microbatches")
    with pytest.raises(ValueError, match=message):
        make_schedule(name, ranks, count, **values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"backward": (1.0,)}, "a time for each stage, got 2 and 1"),
        ({"forward": (-1.0, 1.0)}, "forward must be >= 0 and finite, got -1.0"),
        ({"forward": (0.0,), "backward": (0.0,)}, "must have a time > 0, got zeros alone"),
        ({"statistics": (1.0,)}, "statistics must have a time for each of 2 ranks"),
        ({"latency": float("nan")}, "latency must be >= 0 and finite, got nan"),
        ({"weight_share": 1.5}, "weight_share must be within 0 and 1, got 1.5"),
    ],
)
def test_bad_times_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StageTimes(**({"forward": (1.0, 1.0), "backward": (2.0, 2.0)} | values))


def test_which_head_times_belong_together() -> None:
    with pytest.raises(ValueError, match="must be given for the schedule 'vocab', got none"):
        predict(even(2), 4, schedule="vocab")
    for schedule in ("vocab", "1f1b"):
        with pytest.raises(ValueError, match="must both be given"):
            predict(even(2, statistics=(1.0, 1.0)), 4, schedule=schedule)
    with pytest.raises(ValueError, match="embedding must be given with statistics and gradients"):
        predict(even(2, embedding=(1.0, 1.0)), 4)
    with pytest.raises(ValueError, match="chunks must divide the number of stages, 3, got 2"):
        predict(even(3), 4, schedule="interleaved", chunks=2)


def test_times_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    given = {"forward": [1, 1.5], "backward": [2, 3], "microbatches": 8, "schedule": "gpipe"}
    file.write_text(json.dumps(given))
    assert predict_file(file).seconds == pytest.approx(7.5 + 7 * 4.5)
    assert predict_file(file, schedule="1f1b", microbatches=None).seconds == pytest.approx(39.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "times must be an object, got list"),
        ("{", "times must be a readable JSON file"),
        ('{"forward": [1], "backward": [1]}', "times must have the key 'microbatches'"),
        ('{"forwards": [1]}', r"keys of times must be among .*got \['forwards'\]"),
        (
            '{"forward": ["1"], "backward": [1], "microbatches": 1}',
            "forward must be a list of numbers",
        ),
        (
            '{"forward": [1], "backward": [1], "microbatches": 1.5}',
            "microbatches must be of type int, got 1.5",
        ),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        predict_file(file)
