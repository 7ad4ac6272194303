"""Tables of a plan, for `cce-dist plan`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cce_dist.planner.cost.hardware import GIB
from cce_dist.planner.flags import layout_string
from cce_dist.planner.orders.predict import Prediction
from cce_dist.planner.plan import Plan

# Two tables, each of which fits a terminal of 80 columns.
TIMES = ("rank", "layers", "params M", "TFLOP", "forward", "backward", "head", "in flight")
MEMORY = ("weights", "grads", "optim.", "activ.", "head", "working", "buffers", "total")
# Ranks that are shown at either end of a long list.
SHOWN = 12


def show_plan(plan: Plan, report: dict[str, Any]) -> None:
    """Shows the tables of ranks, and their conclusions."""
    from rich.console import Console

    console, ranks = Console(), report["ranks"]
    console.print(title_of(plan), markup=False, highlight=False, soft_wrap=True)
    console.print(_table("of one microbatch, ms", TIMES, [_times(rank) for rank in ranks]))
    rows = [[str(rank["rank"]), *_memory(rank)] for rank in ranks]
    console.print(_table("GiB at the peak", ("rank", *MEMORY), rows))
    for line in lines_of(plan, report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def title_of(plan: Plan) -> str:
    job = plan.job
    names = {"tp": job.tp, "pp": job.pp, "cp": job.cp, "dp": job.dp, "ep": job.ep}
    ranks = "".join(f" {name} {value}" for name, value in names.items() if value > 1)
    over = "" if job.vocab_over == "last" else f" over {job.vocab_over}"
    return (
        f"{job.gpus} GPU{'s' * (job.gpus > 1)}{ranks}: {job.microbatches} "
        f"microbatch{'es' * (job.microbatches > 1)} of {job.microbatch} x {job.sequence} tokens, "
        f"{job.schedule_name}, loss {job.loss}{over}"
    )


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table

    table = Table(caption=caption)
    for column in columns:
        table.add_column(column, justify="right")
    for index, row in enumerate(rows):
        if len(rows) > 2 * SHOWN and SHOWN <= index < len(rows) - SHOWN:
            if index == SHOWN:
                table.add_row("...", *[""] * (len(columns) - 1))
            continue
        table.add_row(*row)
    return table


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


def _memory(rank: dict[str, Any]) -> list[str]:
    memory = rank["memory_bytes"]
    kinds = ("weights", "gradients", "optimizer", "activations", "head", "working", "buffers")
    return [f"{memory[kind] / GIB:.1f}" for kind in (*kinds, "total")]


def lines_of(plan: Plan, report: dict[str, Any]) -> list[str]:
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
        f"memory: {plan.peak / GIB:.1f} GiB of {report['usable_bytes'] / GIB:.1f}; largest "
        f"microbatch: {largest}{other}",
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
    from rich.table import Table

    table = Table(
        title=f"{prediction.schedule.name}, {prediction.schedule.microbatches} microbatches"
    )
    for column in ("rank", "busy", "waits", "in flight"):
        table.add_column(column, justify="right")
    for rank, busy in enumerate(prediction.busy):
        waits, held = prediction.seconds - busy, prediction.most_held[rank]
        table.add_row(str(rank), f"{busy:.6g}", f"{waits:.6g}", f"{held:g}")
    Console().print(table)
    formula = "" if prediction.closed_form is None else f", {prediction.closed_form:.6g} by formula"
    Console().print(f"step: {prediction.seconds:.6g}{formula}; bubble: {prediction.bubble:.1%}")
