"""Figures of the evidence: line charts side by side, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.evidence.methods import Look

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "cce-dist",  # the same numbers give the same bytes
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), "#808080"
    ),
}


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    name: str
    points: Sequence[tuple[float, float]]
    look: Look


@dataclass(frozen=True)
class Chart:
    """Curves over two axes.

    Args:
        scales: matplotlib's names of both axes' scales.
        names: labels of the places 0, 1, ... on the x axis, in place of numbers.
        shade: lower and upper end of a shaded band on y.
    """

    title: str
    x: str
    y: str
    curves: Sequence[Curve]
    scales: tuple[str, str] = ("linear", "linear")
    names: Sequence[str] = ()
    shade: tuple[float, float] | None = None


@contextmanager
def open_figure(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """Yields an empty figure of `size` inches, which is then written to an SVG file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, transparent=True, metadata={"Date": None})


def write_figure(path: Path, charts: Sequence[Chart]) -> None:
    """Draws the charts side by side into an SVG file, with one legend below them."""
    with open_figure(path, (4.2 * len(charts), 3.6)) as figure:
        handles: dict[str, Any] = {}
        for place, chart in enumerate(charts, 1):
            _draw(figure.add_subplot(1, len(charts), place), chart, handles)
        figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False
        )


def _draw(axes: Any, chart: Chart, handles: dict[str, Any]) -> None:
    axes.set(title=chart.title, xlabel=chart.x, ylabel=chart.y)
    axes.set_xscale(chart.scales[0])
    axes.set_yscale(chart.scales[1], **({"linthresh": 1} if chart.scales[1] == "symlog" else {}))
    if chart.names:
        axes.set_xticks(range(len(chart.names)), chart.names, fontsize=7)
    if chart.shade is not None:
        axes.axhspan(*chart.shade, color="#808080", alpha=0.2, linewidth=0)
    for curve in chart.curves:
        if not curve.points:
            continue
        x, y = zip(*curve.points, strict=True)
        (handle,) = axes.plot(
            x,
            y,
            color=curve.look.colour,
            linestyle="--" if curve.look.dashed else "-",
            marker=curve.look.marker,
            markersize=4,
            linewidth=1.4,
        )
        handles.setdefault(curve.name, handle)
