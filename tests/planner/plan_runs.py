"""Published and measured runs beside what the planner says of them.

Its output is the tables of docs/design/planner.md.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

from cce_dist.planner.cost.hardware import GIB, HARDWARE
from cce_dist.planner.cost.head import head_cost, phase_latency
from cce_dist.planner.cost.job import SOFTWARE, Job
from cce_dist.planner.cost.stages import costs_of, make_stages
from cce_dist.planner.models.model import Model
from cce_dist.planner.models.presets import find_model
from cce_dist.planner.orders import schedules
from cce_dist.planner.orders import vocab_1f1b as orders
from cce_dist.planner.orders.predict import StageTimes, predict
from cce_dist.planner.orders.vocab_1f1b import plan_vocab_order
from cce_dist.planner.plan import Plan, make_plan
from tests.planner.plan_jobs import gpt

RESULTS = Path(__file__).parents[2] / "docs" / "notebook" / "data"
MIB = 2**20
# The published runs have the vocabulary over the pipeline in these; with how many more microbatches
# in flight than ranks.
OVER = {"vocab": 1, "synctwice": 2, "interlaced": 4}


@dataclass(frozen=True)
class Compared:
    """One run: what was measured, and what is said of it."""

    name: tuple[str, ...]
    seconds: float | None
    predicted_seconds: float
    peak: float | None  # bytes
    predicted_peak: float | None

    @property
    def time_error(self) -> float | None:
        return None if self.seconds is None else self.predicted_seconds / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        if self.peak is None or self.predicted_peak is None:
            return None
        return self.predicted_peak / self.peak - 1


@contextlib.contextmanager
def without_running_ahead() -> Iterator[None]:
    """The planned order as the published runs have it, and as this library had it when its own were
    measured."""
    cycle_alone = functools.partial(plan_vocab_order, runs_ahead=False)
    with mock.patch.object(schedules, "plan_vocab_order", cycle_alone):
        yield


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (RESULTS / name).open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _times(row: dict[str, str]) -> StageTimes:
    """Measured, of a published run, in seconds."""

    def each(key: str) -> tuple[float, ...]:
        return tuple(1e-6 * float(value) for value in row[key].split())

    if row["method"] not in OVER:
        return StageTimes(each("forward_us"), each("backward_us"))
    # Both phases are one visit there.
    visits = each("head_us")
    there_and_back = zip(each("embedding_forward_us"), each("embedding_backward_us"), strict=True)
    return StageTimes(
        each("forward_us"),
        each("backward_us"),
        statistics=tuple(value / 4 for value in visits),
        gradients=tuple(3 * value / 4 for value in visits),
        embedding=tuple((there + back) / 2 for there, back in there_and_back),
        head_latency=1e-6 * float(row["collective_us"]),
    )


def _published_plan(row: dict[str, str]) -> Plan:
    """GPT with 32 layers on 8 A100s, by the cost model alone; the head on the last stage."""
    sequence = int(row["sequence"])
    model = replace(gpt(int(row["classes"]), 3072, 32, 24, sequence), tied=False)
    # Gradients are in fp16, which has the same size.
    job = Job(sequence=sequence, microbatches=128, pp=8, gradients="bf16", loss="dense")
    layout = [int(count) for count in row["layout"].split()]
    return make_plan(model, job, HARDWARE["a100"], layout)


def _over_ranks(row: dict[str, str], plan: Plan) -> tuple[float, float]:
    """Of a published run with the vocabulary over the pipeline, whose ranks keep the logits' shards
    (8 bytes each) of one microbatch: seconds and peak by the cost model, with the stalls of this
    library's own runs on two H200s."""
    costs = costs_of(plan.model, plan.job, plan.hardware)
    middle = make_stages(costs, plan.layout)[1]
    shard = head_cost(plan.model, replace(plan.job, tp=8), plan.hardware)
    visit = shard.forward + shard.backward - shard.communication
    ranks = plan.job.pp
    times = StageTimes(
        (middle.forward,) * ranks,
        (middle.backward,) * ranks,
        statistics=(visit / 4,) * ranks,
        gradients=(3 * visit / 4,) * ranks,
        embedding=(costs.embedding_seconds,) * ranks,
        latency=costs.latency,
        head_latency=phase_latency(plan.model, plan.job, plan.hardware),
    ).with_stalls()
    parameters = middle.parameters + 2 * plan.model.num_rows * plan.model.dim / ranks
    held = (ranks + OVER[row["method"]]) * middle.kept + middle.working
    logits = 8 * plan.job.tokens * plan.model.num_rows / ranks
    seconds = predict(times, plan.job.microbatches, schedule="vocab").seconds
    return seconds, 16 * parameters + held + logits


def passes_beside_collectives() -> list[tuple[float, float]]:
    """Of published runs with the vocabulary over the pipeline and one barrier: how much longer a
    middle stage's forward and backward take, as shares, than with the head on the last stage."""
    means: dict[str, list[tuple[float, float]]] = {"base": [], "vocab": []}
    for row in _rows("published/vocab-parallel-a100.csv"):
        if row["method"] in means:
            times = _times(row)
            forward, backward = times.forward[1:-1], times.backward[1:-1]
            mean = sum(forward) / len(forward), sum(backward) / len(backward)
            means[row["method"]].append(mean)
    return [
        (forward / alone[0] - 1, backward / alone[1] - 1)
        for alone, (forward, backward) in zip(means["base"], means["vocab"], strict=True)
    ]


@without_running_ahead()
def published() -> list[tuple[Compared, Compared]]:
    """Of each published run: by its stages' measured times, and by the cost model alone."""
    found = []
    for row in _rows("published/vocab-parallel-a100.csv"):
        name = (row["method"], row["sequence"], row["classes"])
        seconds, peak = float(row["step_ms"]) / 1e3, float(row["most_mib"]) * MIB
        over = row["method"] in OVER
        simulated = predict(_times(row), 128, schedule="vocab" if over else "1f1b").seconds
        plan = _published_plan(row)
        alone, needs = _over_ranks(row, plan) if over else (plan.seconds, plan.peak)
        measured = Compared(name, seconds, simulated, None, None)
        found.append((measured, Compared(name, seconds, alone, peak, needs)))
    return found


def least_loaded() -> list[Compared]:
    """Memory of the rank that needs least, of the published runs with the head on a stage."""
    found = []
    for row in _rows("published/vocab-parallel-a100.csv"):
        if row["method"] in OVER:
            continue
        plan = _published_plan(row)
        peak = min(rank.memory.total for rank in plan.ranks)
        name = (row["method"], row["sequence"], row["classes"])
        found.append(Compared(name, None, 0.0, float(row["least_mib"]) * MIB, peak))
    return found


def embedding_seconds(sequence: int, classes: int) -> tuple[float, float]:
    """What the first stage's backward takes beside a middle one's, in a published run of 1F1B with
    as many layers: measured, and by the cost model."""
    wanted = ("base", str(sequence), str(classes))
    for row in _rows("published/vocab-parallel-a100.csv"):
        if (row["method"], row["sequence"], row["classes"]) == wanted:
            first, *middle = _times(row).backward[:-1]
            plan = _published_plan(row)
            costs = costs_of(plan.model, plan.job, plan.hardware)
            stages = make_stages(costs, plan.layout)
            said = stages[0].backward - stages[1].backward
            return first - sum(middle) / len(middle), said
    raise KeyError(wanted)


def megatron(software: str = "megatron-local") -> list[Compared]:
    """Steps and peaks measured on H200s without a pipeline, by the cost model alone.

    Left out: rows that the document says the host limited, and exact-kept, which is no kind here.
    """
    models = {
        "gemma2-2b": replace(find_model("gemma2-2b"), norms=2, window=0),
        "llama3-8b": replace(find_model("llama3-8b"), layers=16),
    }
    kinds = {"unfused": "dense", "no head": "none"}
    found = []
    for row in _rows("megatron/megatron-h200.csv"):
        limited = row["tp"] == "4" and row["microbatch_tokens"] == "8192"
        if row["loss"] == "exact-kept" or limited:
            continue
        model, recompute = models[row["model"]], row["recompute"] or "none"
        job = Job(
            sequence=4096,
            microbatch=int(row["microbatch_tokens"]) // 4096,
            microbatches=int(row["microbatches"]),
            tp=int(row["tp"]),
            sequence_parallel=row["sequence_parallel"] == "yes",
            recompute=recompute,
            loss=kinds.get(row["loss"], row["loss"]),
            software=SOFTWARE[software],
        )
        plan = make_plan(model, job, HARDWARE["h200"])
        # The benchmark holds the head's weight of its inputs besides.
        extra = 2 * model.num_rows * model.dim
        name = (row["model"], row["loss"], row["tp"], row["sequence_parallel"], recompute)
        seconds = float(row["median_ms"]) / 1e3 if recompute == "none" else None
        peak = float(row["peak_gib"]) * GIB if row["peak_gib"] else None
        found.append(Compared(name, seconds, plan.seconds, peak, plan.peak + extra))
    return found


# Of each kind of GPU, the files of docs/notebook/data with its pipelines.
PIPELINES = {
    "h200": ("pipeline/pipeline-two-h200.csv", "pipeline/pipeline-two-more-h200.csv"),
    "h100": ("pipeline/pipeline-two-h100.csv",),
    "h100 with room": ("pipeline/pipeline-two-h100-room.csv",),
}
# Measured since the planned order runs ahead, and since it leaves collectives room.
RAN_AHEAD, LEFT_ROOM = {"h100", "h100 with room"}, {"h100 with room"}


def pipelines(over: str = "", gpu: str = "h200") -> list[tuple[Compared, Compared]]:
    """Two GPUs, measured, with the head on the last stage, or on both by the planned order
    ("vocab-1f1b") or a thread beside 1F1B ("vocab-thread"): by its stages' measured times and by
    the cost model alone, the time in the first stage's, the peak in each stage's.

    A thread's passes are measured with what interrupts them: those of the planned order instead.
    """
    # In the order that they ran in.
    with contextlib.ExitStack() as stack:
        if gpu not in LEFT_ROOM:
            stack.enter_context(mock.patch.object(orders, "SPARE_LATENCIES", ()))
        if gpu not in RAN_AHEAD:
            stack.enter_context(without_running_ahead())
        return _pipelines(over, gpu)


def _pipelines(over: str, gpu: str) -> list[tuple[Compared, Compared]]:
    software = replace(SOFTWARE["torch"], joint_qkv=1)
    found: list[tuple[Compared, Compared]] = []
    every = dict(_runs_of_pipelines(gpu))
    for name, stages in every.items():
        if over != (name[1] if name[1].startswith("vocab") else ""):
            continue
        seconds, count = float(stages[0]["median_ms"]) / 1e3, int(stages[0]["microbatches"])
        schedule = "vocab" if over == "vocab-1f1b" else "1f1b"
        alone = every[name[0], "vocab-1f1b"] if over else stages
        times = _times_of_stages(alone)
        if over:
            times = times.with_stalls(served=over == "vocab-thread")
        simulated = predict(times, count, schedule=schedule).seconds / 1e3
        job = Job(
            sequence=int(stages[0]["microbatch_tokens"]),
            microbatches=count,
            pp=len(stages),
            gradients="bf16",
            precision="bf16",
            loss="dense" if name[1].startswith("dense") else "filtered",
            vocab_over="pp" if over else "last",
            schedule=schedule,
            software=software,
        )
        model = _model_of(stages)
        layout = [int(row["layers"]) for row in stages]
        plan = make_plan(model, job, HARDWARE[gpu.split()[0]], layout)
        # The benchmark holds the head's weight of its inputs besides.
        extra = 2 * model.num_rows * model.dim
        for stage, row in enumerate(stages):
            peak, needs = float(row["peak_gib"]) * GIB, plan.ranks[stage].memory.total + extra
            about, step = (*name, str(stage)), seconds if stage == 0 else None
            one = Compared(about, step, simulated, None, None)
            found.append((one, Compared(about, step, plan.seconds, peak, needs)))
    return found


def _runs_of_pipelines(gpu: str) -> Iterator[tuple[tuple[str, str], list[dict[str, str]]]]:
    """Each with its rows, one a stage; the planner knows of no screened logits."""
    for file in PIPELINES[gpu]:
        stages: list[dict[str, str]] = []
        for row in _rows(file):
            if row.get("logits", "full") != "full":
                continue
            stages.append(row)
            if len(stages) == int(row["stages"]):
                name = f"{row['model']} {sum(int(each['layers']) for each in stages)}"
                yield (name, row["head"]), stages
                stages = []


def _times_of_stages(stages: list[dict[str, str]]) -> StageTimes:
    """Measured, in milliseconds."""

    def each(*keys: str) -> tuple[float, ...]:
        return tuple(sum(float(row[key]) for key in keys) for row in stages)

    if float(stages[0]["s_ms"]) == 0:
        return StageTimes(each("f_ms", "loss_ms"), each("b_ms"))
    # What looks embeddings up and sums them is measured with none of the passes.
    of_head = {"statistics": each("s_ms"), "gradients": each("t_ms")}
    return StageTimes(each("f_ms"), each("b_ms"), **of_head)


def _model_of(stages: list[dict[str, str]]) -> Model:
    name, layers = stages[0]["model"], sum(int(row["layers"]) for row in stages)
    model = replace(find_model(name), layers=layers, tied=True)
    if name == "gemma2-2b":
        return replace(model, norms=2, window=0)
    # The benchmark makes wider layers of the same proportions.
    wider = int(stages[0]["D"]) // model.dim
    dim, mlp_dim = wider * model.dim, wider * model.mlp_dim
    return replace(model, dim=dim, mlp_dim=mlp_dim, head_dim=dim // model.heads)


def summary(errors: list[float | None]) -> str:
    """How many, the mean of the magnitudes, and from where to where."""
    known = [100 * error for error in errors if error is not None]
    mean = sum(map(abs, known)) / len(known)
    return f"{len(known)} | {mean:.1f} % | {min(known):+.1f} to {max(known):+.1f} %"


def _print_tables() -> None:
    both = published()
    methods = ("base", "redis", "vocab", "synctwice", "interlaced")
    for method in methods:
        mine = [pair for pair in both if pair[0].name[0] == method]
        print("time, measured stages |", method, "|", summary([x.time_error for x, _ in mine]))
    for method in methods:
        mine = [pair for pair in both if pair[0].name[0] == method]
        print("time, cost model |", method, "|", summary([x.time_error for _, x in mine]))
        print("memory, most |", method, "|", summary([x.memory_error for _, x in mine]))
    print("memory, least |", summary([x.memory_error for x in least_loaded()]))
    for size in ("gemma2-2b", "llama3-8b"):
        for ranks in "124":
            mine = [x for x in megatron() if x.name[0] == size and x.name[2] == ranks]
            print(size, ranks, "time |", summary([x.time_error for x in mine]))
            print(size, ranks, "memory |", summary([x.memory_error for x in mine]))
    for gpu, over in itertools.product(PIPELINES, ("", "vocab-1f1b", "vocab-thread")):
        found = pipelines(over, gpu)
        for size in dict.fromkeys(pair[0].name[0] for pair in found):
            mine, what = [x for x in found if x[0].name[0] == size], f"{gpu} {over or 'last'}"
            print(size, what, "pipeline, measured |", summary([x.time_error for x, _ in mine]))
            print(size, what, "pipeline, cost model |", summary([x.time_error for _, x in mine]))
            print(size, what, "pipeline, memory |", summary([x.memory_error for _, x in mine]))


if __name__ == "__main__":
    _print_tables()
