"""Tables of a plan, for `cce-dist plan`."""

from __future__ import annotations

from functools import partial
from typing import Any

from cce_dist.planner.cost.hardware import GIB
from cce_dist.planner.flags import layout_string
from cce_dist.planner.orders.predict import Prediction
from cce_dist.planner.plan import Plan

from .output import table_of

# Two tables, each of which fits a terminal of 80 columns.
TIMES = ("rank", "layers", "params M", "TFLOP", "forward", "backward", "head", "in flight")
MEMORY = ("weights", "grads", "optim.", "activ.", "head", "working", "buffers", "total")
# Ranks that are shown at either end of a long list.
SHOWN = 12


def show_plan(plan: Plan, report: dict[str, Any]) -> None:
    """Shows the tables of ranks, and their conclusions."""
    from rich.console import Console

    console, ranks = Console(), report["ranks"]
    show = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    show(_title(plan))
    console.print(table_of(TIMES, _ends(list(map(_times, ranks))), caption="of one microbatch, ms"))
    rows = [[str(rank["rank"]), *map(_gib, rank["memory_bytes"].values())] for rank in ranks]
    console.print(table_of(("rank", *MEMORY), _ends(rows), caption="GiB at the peak"))
    for line in _lines(plan, report):
        show(line)


def _title(plan: Plan) -> str:
    job = plan.job
    names = [name for name in ("tp", "pp", "cp", "dp", "ep") if getattr(job, name) > 1]
    ranks = "".join(f" {name} {getattr(job, name)}" for name in names)
    over = f" over {job.vocab_over}" if job.is_over_ranks else ""
    return (
        f"{job.gpus} GPU{'s' * (job.gpus > 1)}{ranks}: {job.microbatches} "
        f"microbatch{'es' * (job.microbatches > 1)} of {job.microbatch} x {job.sequence} tokens, "
        f"{job.schedule_name}, loss {job.loss}{over}"
    )


def _ends(rows: list[list[str]]) -> list[list[str]]:
    """Leaves out the middle of a long list."""
    return rows if len(rows) <= 2 * SHOWN else [*rows[:SHOWN], ["..."], *rows[-SHOWN:]]


def _times(rank: dict[str, Any]) -> list[str]:
    return [
        str(rank["rank"]),
        "+".join(str(stage["layers"]) for stage in rank["stages"]),
        f"{rank['parameters'] / 1e6:,.0f}",
        f"{rank['flops'] / 1e12:.1f}",
        f"{1e3 * rank['forward_seconds']:.2f}",
        f"{1e3 * rank['backward_seconds']:.2f}",
        f"{1e3 * rank['head_seconds']:.2f}",
        f"{rank['in_flight']:g}",
    ]


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _lines(plan: Plan, report: dict[str, Any]) -> list[str]:
    closed = plan.prediction.closed_form
    formula = f", {1e3 * closed:.1f} by formula" if closed is not None else ""
    largest, mine = report["largest_microbatch"], report["largest_microbatch_of_layout"]
    other = "" if largest == mine else f" by another layout, {mine} by this one"
    lines = [
        f"step: {1e3 * plan.seconds:.1f} ms (schedule {1e3 * plan.prediction.seconds:.1f}"
        f"{formula}; optimizer {1e3 * plan.optimizer_seconds:.1f})",
        f"tokens/s: {plan.tokens_per_second:,.0f}; of the GPUs' FLOPs: {plan.utilization:.1%}; "
        f"bubble: {plan.prediction.bubble:.1%}",
        f"binds: {plan.binds}",
        f"memory: {_gib(plan.peak)} GiB of {_gib(plan.hardware.room)}; largest microbatch: "
        f"{largest}{other}",
    ]
    rows = report["head_rows"]
    if rows["padded"] > rows["model"]:
        lines.append(
            f"vocabulary: {rows['model']:,} rows, {rows['padded']:,} with padding, "
            f"{rows['of_rank']:,.0f} a rank"
        )
    if plan.job.pp > 1:
        lines.append(f"layout: {layout_string(plan.layout)}")
    if "vocab_over_pipeline" in report:
        pays = report["vocab_over_pipeline"]
        loss = pays["last_stage"]["loss"]
        if plan.job.loss != loss:
            lines.append(f"{loss} on the last stage instead: {pays['verdict_on_our_loss']}")
        lines.append(f"vocabulary over the pipeline, {loss}: {pays['verdict']}")
    if "planned_order_instead" in report:
        lines.append(f"the planned order instead: {report['planned_order_instead']['verdict']}")
    if report["megatron_flags"] is not None:
        patch = report["megatron_patch"]
        script = [*patch, "pretrain_gpt.py"] if patch else []
        lines.append("Megatron: " + " ".join([*script, *report["megatron_flags"]]))
    if plan.job.stages > 1:
        stages = "; ".join(", ".join(modules) for modules in report["torch_stages"])
        lines.append(f"torch stages: {stages}")
    return [*lines, *(f"note: {note}" for note in report["notes"])]


def show_prediction(prediction: Prediction) -> None:
    """Shows the prediction from measured times, in their unit."""
    from rich.console import Console

    title = f"{prediction.schedule.name}, {prediction.schedule.microbatches} microbatches"
    rows = [
        [str(rank), f"{busy:.6g}", f"{prediction.seconds - busy:.6g}", f"{held:g}"]
        for rank, (busy, held) in enumerate(zip(prediction.busy, prediction.most_held, strict=True))
    ]
    Console().print(table_of(("rank", "busy", "waits", "in flight"), rows, title=title))
    formula = "" if prediction.closed_form is None else f", {prediction.closed_form:.6g} by formula"
    Console().print(f"step: {prediction.seconds:.6g}{formula}; bubble: {prediction.bubble:.1%}")
