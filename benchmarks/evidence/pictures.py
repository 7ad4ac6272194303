"""The pictures of README and the guide: time and memory, four steps, a timeline, loss curves."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.evidence.figures import open_figure
from benchmarks.evidence.methods import look_of
from benchmarks.evidence.records import FOLDER, read_record
from cce_dist.cli.plan_plot import TASKS
from cce_dist.planner.orders.predict import StageTimes, predict

PICTURES = Path("docs/pictures")
GREY, ACCENT, SECOND = "#808080", "#d9542b", "#d0559b"
# (file, method, name, colour) of a bar; rows are of one H200, hidden states after 1,000 steps.
CAPTURED = "loss/loss-captured-h200.csv"
SCREENED = "screened/loss-screened-steps-h200.csv"
BARS = (
    (CAPTURED, "filtered", "filtered (the default)", ACCENT),
    (SCREENED, "screened", 'logits="screened"', SECOND),
    (CAPTURED, "exact", "exact", ACCENT),
    (CAPTURED, "flash-attn", "flash-attention", GREY),
    (CAPTURED, "torch-compile", "torch.compile", GREY),
    (CAPTURED, "liger-8", "Liger", GREY),
    (CAPTURED, "cce", "Apple's cce", GREY),
    (CAPTURED, "dense", "dense", GREY),
)
SEEDS = "convergence-256k-seeds-h200"
SHOWN = ("dense", "exact", "filtered", "screened")
STAGES, MICROBATCHES = 4, 8
# A stage's forward is 1, its backward 2; the head takes as long as one and a half stages.
HEAD_FORWARD, HEAD_BACKWARD = 1.5, 3.0


def write_pictures(records: Path = FOLDER, pictures: Path = PICTURES) -> list[Path]:
    """Draws each picture into an SVG file, for light and dark pages; returns their paths."""
    drawings: dict[str, tuple[tuple[float, float], Callable[[Any], None]]] = {
        "peers": ((8.4, 2.9), lambda figure: draw_peers(figure, records.parent)),
        "four-steps": ((8.4, 2.6), draw_four_steps),
        "pipeline": ((8.4, 3.2), draw_pipeline),
        "losses": ((8.4, 3.0), lambda figure: draw_losses(figure, records)),
    }
    paths = []
    for name, (size, draw) in drawings.items():
        path = pictures / f"{name}.svg"
        with open_figure(path, size) as figure:
            draw(figure)
        paths.append(path)
    return paths


def draw_peers(figure: Any, data: Path) -> None:
    """Draws time and memory of loss and gradients, a bar for each method."""
    rows = [_measured(data, file, method) for file, method, _, _ in BARS]
    names, colours = [bar[2] for bar in BARS], [bar[3] for bar in BARS]
    charts = (
        ("ms", "median_ms", "linear"),
        ("MiB over the gradients", "over_gradients_mib", "log"),
    )
    for axes, (label, column, scale) in zip(
        figure.subplots(1, 2, sharey=True), charts, strict=True
    ):
        values = [float(row[column]) for row in rows]
        bars = axes.barh(range(len(values)), values, color=colours, height=0.7)
        axes.bar_label(
            bars, [f"{value:,.3g}" if value < 100 else f"{value:,.0f}" for value in values]
        )
        axes.set_xscale(scale)
        axes.set(xlabel=label, yticks=range(len(names)), yticklabels=names)
        axes.margins(x=0.18)
        axes.grid(axis="y", visible=False)
    axes.invert_yaxis()


def _measured(data: Path, file: str, method: str) -> dict[str, str]:
    with (data / file).open() as lines:
        measured = [
            row
            for row in csv.DictReader(lines)
            if (row["method"], row["part"], row["inputs"], row["V"])
            == (method, "loss+grad", "step-1000", "256000")
        ]
    # The slower of two captures.
    return max(measured, key=lambda row: float(row["median_ms"]))


def draw_four_steps(figure: Any) -> None:
    """Draws two ranks, each with its rows of the head, and what they exchange in the four steps."""
    axes = figure.subplots()
    axes.set(xlim=(0, 10), ylim=(0.4, 3.6))
    axes.axis("off")
    boxes = (
        (1.35, "1  forward", "log-sum-exp of\nits own columns"),
        (3.75, "2  merge", "log-add-exp\nover the ranks"),
        (6.15, "3  backward", "columns that matter,\nboth gradients"),
        (8.55, "4  sum", "of the hidden\ngradient"),
    )
    for rank, y in enumerate((2.9, 1.1)):
        axes.text(0.02, y, f"rank {rank}\n{'first' if rank == 0 else 'last'}\nrows", va="center")
        for x, title, text in boxes:
            shared = title[0] in "24"
            colour = ACCENT if shared else "#3a86c8"
            style = {"boxstyle": "round,pad=0.5", "facecolor": "none", "edgecolor": colour}
            axes.text(x, y, f"{title}\n{text}", ha="center", va="center", bbox=style)
        for x in (2.4, 4.7, 7.25):
            axes.annotate("", (x + 0.28, y), (x, y), arrowprops={"arrowstyle": "->", "color": GREY})
    for x, text in ((3.75, "8 bytes a token"), (8.55, "[N, D]")):
        arrow = {"arrowstyle": "<->", "color": ACCENT}
        axes.annotate("", (x, 1.68), (x, 2.32), arrowprops=arrow)
        axes.text(x + 0.12, 2.0, text, va="center", color=ACCENT)


def draw_pipeline(figure: Any) -> None:
    """Draws a simulated step of 1F1B with the head on the last stage, and over all ranks."""
    ones, twos = (1.0,) * STAGES, (2.0,) * STAGES
    last = StageTimes((*ones[1:], 1 + HEAD_FORWARD), (*twos[1:], 2 + HEAD_BACKWARD))
    head = (HEAD_FORWARD / STAGES,) * STAGES, (HEAD_BACKWARD / STAGES,) * STAGES
    over = StageTimes(ones, twos, *head)
    steps = {
        "the head on the last stage": predict(last, MICROBATCHES),
        "its rows over all ranks (ScheduleVocab1F1B)": predict(
            over, MICROBATCHES, schedule="vocab"
        ),
    }
    longest = max(step.seconds for step in steps.values())
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (title, step) in zip(panels, steps.items(), strict=True):
        for kind in "FBST":
            label, colour = TASKS[kind]
            for rank, spans in enumerate(step.timeline.ranks):
                bars = [(x.start, x.end - x.start) for x in spans if x.task.kind == kind]
                axes.broken_barh(
                    bars, (rank - 0.42, 0.84), facecolors=colour, edgecolor="white", linewidth=0.3,
                    label=label if rank == 0 and axes is panels[-1] else None,
                )  # fmt: skip
        axes.set(xlim=(0, longest), ylim=(STAGES - 0.4, -0.6), yticks=range(STAGES), ylabel="rank")
        axes.set_title(f"{title}: {step.seconds:.0f}, simulated", loc="left", fontsize=9)
    panels[-1].set_xlabel("time, in forwards of a stage")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)


def draw_losses(figure: Any, records: Path) -> None:
    """Draws held-out losses of each seed, and how far each run is from dense's of its seed."""
    curves: dict[tuple[Any, Any], dict[Any, Any]] = {}
    for row in read_record(records / "convergence" / f"{SEEDS}.json").rows:
        if row["part"] == "curve" and row["step"]:
            curves.setdefault((row["method"], row["seed"]), {})[row["step"]] = row["all"]
    left, right = figure.subplots(1, 2)
    for (method, seed), curve in curves.items():
        if method not in SHOWN:
            continue
        steps, colour = list(curve), look_of(method).colour
        style: dict[str, Any] = {"color": colour, "linewidth": 1, "alpha": 0.8}
        left.plot(steps, list(curve.values()), **style)
        if method != "dense":
            dense = curves["dense", seed]
            right.plot(steps, [curve[step] - dense[step] for step in steps], **style)
    for method in SHOWN:
        left.plot([], [], color=look_of(method).colour, label=method)
    left.set(xlabel="step", ylabel="held-out loss, nats")
    right.set(xlabel="step", ylabel="difference to dense, nats")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
