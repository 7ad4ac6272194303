"""`cce-dist plan`: memory and pipelines on paper."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from cce_dist.planner.models.model import PAPER
from cce_dist.planner.models.paper import PRINTED, TOKENS, MemoryRow, deviation, memory_row
from cce_dist.planner.models.presets import model_names
from cce_dist.planner.names import nearest_name

from .plan_model import model_command, models_command, refusals, times_command
from .plan_plot import require_file, require_picture


class _Commands(TyperGroup):
    """The commands; a model's name in a command's place is an error that names `plan model`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0] if args else ""
        is_model = nearest_name(name, model_names()) or Path(name).exists()
        if name and name not in self.commands and is_model:
            ctx.fail(f"No such command {name!r}; a model's plan is `cce-dist plan model {name}`")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    help="What a model takes on paper: no GPU, no torch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

HEADER = (
    "model",
    "numbers",
    "logits MB",
    "activations MB",
    "weights MB",
    "batch before",
    "batch after",
    "increase",
    "off by MB",
    "off by tokens",
)


app.command("model")(model_command)
app.command("models")(models_command)
app.command("times")(times_command)


@app.command()
def paper(
    csv_path: Annotated[
        Path | None, typer.Option("--csv", help="Write the rows here as well.")
    ] = None,
    plot_path: Annotated[
        Path | None, typer.Option("--plot", help="Draw Figure 1 as this PNG.")
    ] = None,
) -> None:
    """Table A3 of Cut Cross-Entropy, arXiv:2411.09009, and each row's distance from the print.

    Exits with 1 if a row is further from the print than rounding.
    """
    from rich.console import Console
    from rich.table import Table

    with refusals():
        require_file("csv", csv_path)
        require_picture(plot_path)
    rows = {name: memory_row(model) for name, model in PAPER.items()}
    far = [name for name in PRINTED if not deviation(name).is_rounding]
    lines = [_cells(name, row) for name, row in rows.items()]
    # Two tables, each of which fits a terminal of 80 columns.
    for caption, columns in (
        (f"memory of {TOKENS:,} tokens over 16 GPUs of 75 GiB", HEADER[:5]),
        ("largest batch there, in tokens, and how far from the printed table", HEADER[5:]),
    ):
        table = Table(caption=caption)
        chosen = ["model", *(title for title in columns if title != "model")]
        for title in chosen:
            justify = "left" if title == "model" else "right"
            table.add_column(title.replace("off by ", "off by\n"), justify=justify, no_wrap=True)
        for line in lines:
            table.add_row(*(line[HEADER.index(title)] for title in chosen))
        Console().print(table)
    with refusals():
        if csv_path is not None:
            csv_path.parent.mkdir(parents=True, exist_ok=True)
            with csv_path.open("w", newline="") as file:
                writer = csv.writer(file)
                writer.writerow(HEADER)
                writer.writerows([cell.replace(",", "") for cell in line] for line in lines)
        if plot_path is not None:
            _plot(rows, plot_path)
    if far:
        typer.echo(f"error: further from the print than rounding: {', '.join(far)}", err=True)
        raise typer.Exit(1)
    typer.echo(f"all {len(PRINTED)} rows are the printed ones, but for rounding")


def _cells(name: str, row: MemoryRow) -> tuple[str, ...]:
    off, model = deviation(name), PAPER[name]
    return (
        name,
        f"{model.parameters + model.buffers:,}",
        f"{row.logits_mb:,.0f}",
        f"{row.activations_mb:,.0f}",
        f"{row.weights_mb:,.0f}",
        f"{row.batch_before:,.0f}",
        f"{row.batch_after:,.0f}",
        f"{row.increase:.1f}",
        f"{off.mb:.2f}",
        f"{off.tokens:.2f}",
    )


def _plot(rows: dict[str, MemoryRow], path: Path) -> None:
    """Plots Figure 1: shares of memory with logits, and the batch's growth without."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.42 * len(rows) + 1.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = sorted(rows, key=lambda name: rows[name].increase)
    left = [0.0] * len(names)
    parts = (
        ("weights, gradients, optimizer", "weights_mb", "#4a6fa5"),
        ("activations", "activations_mb", "#8fb98b"),
        ("logits", "logits_mb", "#c23b22"),
    )
    for label, field, colour in parts:
        gib = [getattr(rows[name], field) / 1024 for name in names]
        axes.barh(names, gib, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, gib, strict=True)]
    for place, name in enumerate(names):
        axes.annotate(
            f"{rows[name].increase:.1f}x",
            (left[place], place),
            xytext=(4, -3),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set(xlabel=f"GiB of {TOKENS:,} tokens; how many times the batch without logits")
    axes.set_xlim(0, 1.08 * max(left))
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
