"""A plan as a picture: each rank's memory by kind, and its tasks over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cce_dist.needs.extras import need_modules
from cce_dist.planner.cost.hardware import GIB
from cce_dist.planner.orders.predict import Prediction
from cce_dist.planner.plan import Plan

KINDS = {
    "weights": "#4a6fa5",
    "gradients": "#7d9cc9",
    "optimizer": "#b4c6e0",
    "activations": "#8fb98b",
    "head": "#c23b22",
    "working": "#d9b26f",
    "buffers": "#999999",
}
TASKS = {
    "F": ("forward", "#4a6fa5"),
    "B": ("backward", "#8fb98b"),
    "I": ("backward, inputs", "#8fb98b"),
    "W": ("backward, weights", "#c9dcc6"),
    "S": ("head, statistics", "#e39a8d"),
    "T": ("head, gradients", "#c23b22"),
    "E": ("embedding", "#d9b26f"),
    "G": ("embedding's gradient", "#efd9a8"),
}

# Most ranks that a picture names; tasks of a rank from which on white edges would hide them.
MOST_LABELS, MANY_TASKS = 32, 200

SUFFIXES = (".png", ".pdf", ".svg")


def require_picture(path: Path | None) -> None:
    """Checks the picture's path before anything is computed.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: the path's suffix is not among SUFFIXES.
    """
    if path is None:
        return
    need_modules("matplotlib")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"plot must end with one of {', '.join(SUFFIXES)}, got {path}")


def plot_plan(plan: Plan, path: Path) -> None:
    figure = _figure(len(plan.ranks), rows=2)
    memory, lanes = figure.subplots(2, 1)
    left = [0.0] * len(plan.ranks)
    for kind, colour in KINDS.items():
        sizes = [getattr(rank.memory, kind) / GIB for rank in plan.ranks]
        memory.barh(range(len(sizes)), sizes, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    memory.axvline(
        plan.hardware.room / GIB, color="black", linestyle="--", linewidth=1, label="usable"
    )
    memory.set(xlabel="GiB at the peak")
    _name_ranks(memory, len(left))
    memory.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    _draw(lanes, plan.prediction, unit="ms", scale=1e3)
    _save(figure, path)


def plot_timeline(prediction: Prediction, path: Path) -> None:
    figure = _figure(len(prediction.busy), rows=1)
    _draw(figure.subplots(), prediction, unit="time", scale=1.0)
    _save(figure, path)


def _figure(ranks: int, *, rows: int) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = min(2.0 + 0.4 * ranks, 14)
    figure = Figure(figsize=(13, rows * height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _name_ranks(axes: Any, ranks: int) -> None:
    """Labels the ranks from the top down: every rank, or every second, fourth, ..."""
    step = 1
    while ranks > step * MOST_LABELS:
        step *= 2
    axes.set(ylabel="rank", yticks=range(0, ranks, step))
    axes.set_ylim(ranks - 0.4, -0.6)


def _draw(axes: Any, prediction: Prediction, *, unit: str, scale: float) -> None:
    """Draws a lane for each rank; a rank's second stage is drawn lower in its lane."""
    chunks = prediction.schedule.chunks
    height = 0.9 / chunks
    edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.3}
    if max(map(len, prediction.schedule.orders)) > MANY_TASKS:
        # Without edges and snapping, a task that is narrower than a pixel fills its share of it.
        edges = {"linewidth": 0, "snap": False}
    for kind, (label, colour) in TASKS.items():
        for rank, spans in enumerate(prediction.timeline.ranks):
            for chunk in range(chunks):
                bars = [
                    (scale * span.start, scale * (span.end - span.start))
                    for span in spans
                    if span.task.kind == kind and span.task.chunk == chunk
                ]
                if bars:
                    lane = (rank - 0.45 + chunk * height, height)
                    axes.broken_barh(bars, lane, facecolors=colour, label=label, **edges)
                    label = None  # one entry of the legend
    axes.set(xlabel=unit)
    axes.set_xlim(0, scale * prediction.seconds)
    _name_ranks(axes, len(prediction.busy))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
