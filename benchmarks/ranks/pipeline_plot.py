"""Plots of pipelines' timelines: a panel for each place of the head, a lane for each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.ranks.pipeline_spans import KINDS, Span

COLOURS = dict(zip(KINDS, ("#4a6fa5", "#8fb98b", "#c23b22", "#e08e45", "#a3486b"), strict=True))
NAMES = {
    "F": "forward",
    "B": "backward",
    "loss": "head's forward on the last stage",
    "S": "log-sum-exp of a part",
    "T": "gradients of a part",
}


def draw(lanes: Mapping[str, Sequence[Sequence[Span]]], path: Path) -> None:
    """Draws the timelines into a PNG.

    Args:
        lanes: for each place of the head the spans of each stage.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    end = max(span.end for stages in lanes.values() for spans in stages for span in spans)
    stages = max(len(each) for each in lanes.values())
    height = len(lanes) * (0.32 * stages + 0.45) + 0.8
    figure = Figure(figsize=(12, height), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (head, each) in enumerate(lanes.items()):
        axes = figure.add_subplot(len(lanes), 1, number + 1)
        for stage, spans in enumerate(each):
            for kind in KINDS:
                bars = [
                    (1e3 * span.start, 1e3 * (span.end - span.start))
                    for span in spans
                    if span.kind == kind
                ]
                axes.broken_barh(bars, (stage - 0.4, 0.8), color=COLOURS[kind], ec="white", lw=0.2)
        axes.set(xlim=(0, 1e3 * end), ylim=(len(each) - 0.5, -0.5), yticks=range(len(each)))
        axes.set_ylabel("stage")
        axes.set_title(head, fontsize=9, loc="left")
        if number < len(lanes) - 1:
            axes.tick_params(labelbottom=False)
        else:
            axes.set_xlabel("ms")
    patches = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in KINDS]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(KINDS), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
