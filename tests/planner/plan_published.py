"""Steps that others published, and what the planner says of them from hardware alone."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cce_dist.planner.cost.hardware import HARDWARE, Hardware
from cce_dist.planner.cost.job import Job
from cce_dist.planner.models.model import Model
from cce_dist.planner.models.presets import find_model
from cce_dist.planner.plan import Plan, make_plan
from tests.planner.plan_jobs import gpt
from tests.planner.plan_runs import RESULTS, Compared, summary

_LLAMA405 = replace(
    find_model("llama3-70b"), dim=16384, layers=126, mlp_dim=53248, heads=128, kv_heads=16
)
_NEMOTRON4 = Model(
    classes=256000,
    dim=6144,
    layers=32,
    mlp_dim=24576,
    heads=48,
    kv_heads=8,
    gated=False,
    norm_bias=True,
)
MODELS = {
    "llama3-8b": find_model("llama3-8b"),
    "llama3-70b": find_model("llama3-70b"),
    "llama3.1-405b": _LLAMA405,
    # With GPT-2's tokenizer.
    "llama3.1-405b-51k": replace(_LLAMA405, classes=50257),
    "nemotron4-15b": _NEMOTRON4,
    "grok1-314b": replace(
        find_model("mixtral-8x7b"), classes=128256, dim=6144, layers=64, mlp_dim=32768, heads=48
    ),
    "nemotron4-340b": replace(_NEMOTRON4, dim=18432, layers=96, mlp_dim=73728, heads=96),
}


@dataclass(frozen=True)
class Published:
    """One row of docs/notebook/data/published/published-steps.csv beside its plan.

    Args:
        apart: whether it was kept from those who changed the model.
    """

    row: dict[str, str]
    plan: Plan
    compared: Compared

    @property
    def apart(self) -> bool:
        return self.row["apart"] == "yes"

    @property
    def family(self) -> str:
        row = self.row
        if row["gpu"] == "a100":
            of = "arXiv:2205.05198" if row["release"].startswith("2205") else "SC21"
            return f"A100 {of}"
        return f"{row['gpu'].upper()} {row['model'].removesuffix('-51k')} tp{row['tp']}"


def _model(row: dict[str, str]) -> Model:
    name, layers = row["model"], int(row["layers"])
    if name in MODELS:
        return replace(MODELS[name], layers=layers)
    # GPT-2's architecture: gpt-<dims>-<heads>, with Megatron's 51,200 rows; gpt3-175b of 50,257.
    rows, dim, heads = 50257, 12288, 96
    if name != "gpt3-175b":
        rows, (dim, heads) = 51200, map(int, name.split("-")[1:])
    return gpt(rows, dim, layers, heads, int(row["sequence"]))


def _hardware(row: dict[str, str]) -> Hardware:
    if row["gpu"] == "gb200":
        # What its page says, and NVLink over 72 of them.
        return replace(HARDWARE["b200"], flops=2450e12, gpus_per_host=72)
    return HARDWARE[row["gpu"]]


def _job(row: dict[str, str]) -> Job:
    tp, pp, cp = int(row["tp"]), int(row["pp"]), int(row["cp"])
    dp = int(row["gpus"]) // (tp * pp * cp)
    is_old = row["gpu"] == "a100"
    return Job(
        sequence=int(row["sequence"]),
        microbatch=int(row["microbatch"]),
        microbatches=int(row["global_batch"]) // (int(row["microbatch"]) * dp),
        tp=tp,
        pp=pp,
        chunks=int(row["virtual"]),
        cp=cp,
        dp=dp,
        ep=int(row["ep"]),
        sequence_parallel=row["sequence_parallel"] == "yes",
        distributed_optimizer=not is_old,
        overlap_data="dp" in row["overlap"],
        overlap_tensor="tp" in row["overlap"],
        gradients=row["gradients"],
        recompute=row["recompute"],
        attention=row["attention"],
        dropout=row["dropout"] != "0",
        loss="dense" if row["model"].startswith(("gpt", "grok")) else "native",
    )


def _seconds(row: dict[str, str], model: Model) -> float:
    """Measured; or by the FLOPs that its table counts, arXiv:2104.04473 (3), full recompute."""
    if row["seconds"]:
        return float(row["seconds"])
    batch, sequence, dim = int(row["global_batch"]), int(row["sequence"]), model.dim
    layers = 96 * batch * sequence * model.layers * dim**2 * (1 + sequence / (6 * dim))
    head = 96 * batch * sequence * dim * 51200 / 16
    return (layers + head) / (int(row["gpus"]) * 1e12 * float(row["tflops"]))


def published_steps() -> Iterator[Published]:
    with (RESULTS / "published/published-steps.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            model = _model(row)
            layout = [int(count) for count in row["layout"].split()] or None
            plan = make_plan(model, _job(row), _hardware(row), layout)
            name = (row["release"], row["gpu"], row["model"], row["gpus"], row["recompute"])
            peak = float(row["peak_bytes"]) if row["peak_bytes"] else None
            compared = Compared(name, _seconds(row, model), plan.seconds, peak, plan.peak)
            yield Published(row, plan, compared)


def print_tables() -> None:
    found = list(published_steps())
    for family in dict.fromkeys(each.family for each in found):
        for apart in (False, True):
            mine = [x.compared for x in found if x.family == family and x.apart == apart]
            if mine:
                print("apart |" if apart else "seen |", family, "| time |", end=" ")
                print(summary([each.time_error for each in mine]))
    print("memory |", summary([each.compared.memory_error for each in found]))


if __name__ == "__main__":
    print_tables()
