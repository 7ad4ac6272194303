"""Time against error and time against memory, a panel for each inputs and shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from .table import Cells

CASE = ("inputs", "N", "ignored", "V", "D", "dtype")
OURS = ("filtered", "exact", "in_forward", "exact-kept")
OURS_COLOUR, PEER_COLOUR = "#c23b22", "#4a6fa5"


def plot(rows: Sequence[Cells], folder: Path) -> list[Path]:
    """Write folder/time-error.png and folder/time-memory.png from rows of loss and gradient."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [row for row in rows if row["part"] == "loss+grad" and not row["failed"]]

    def error(row: Cells) -> float | None:
        if row["grad_hidden_error"] is None:
            return None
        return max(row["grad_hidden_error"], row["grad_weight_error"])

    paths = [folder / "time-error.png", folder / "time-memory.png"]
    _draw(drawn, error, "larger relative error of the two gradients", paths[0])
    _draw(drawn, lambda row: row["peak_extra_mib"], "peak extra memory, MiB", paths[1])
    return paths


def _draw(
    rows: Sequence[Cells], value: Callable[[Cells], float | None], label: str, path: Path
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(tuple(row[name] for name in CASE) for row in rows))
    figure = Figure(figsize=(7 * max(len(cases), 1), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for number, case in enumerate(cases):
        axes = figure.add_subplot(1, len(cases), number + 1)
        for place, row in enumerate(sorted(rows, key=lambda row: row["median_ms"])):
            height = value(row)
            if tuple(row[name] for name in CASE) != case or not height:
                continue
            colour = OURS_COLOUR if row["method"] in OURS else PEER_COLOUR
            axes.scatter(row["median_ms"], height, color=colour, s=24)
            # Methods of one time and error are common: every other label stands below its point.
            axes.annotate(
                row["method"],
                (row["median_ms"], height),
                xytext=(4, (3, -10, 13)[place % 3]),
                textcoords="offset points",
                fontsize=7,
                color=colour,
            )
        axes.set(xscale="log", yscale="log", xlabel="loss and gradients, ms", ylabel=label)
        axes.set_title(", ".join(f"{n} {v}" for n, v in zip(CASE, case, strict=True)), fontsize=8)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
