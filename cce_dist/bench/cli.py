"""`cce-dist bench ...`: every published figure comes from one of these commands."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Measure time, memory and error; correctness is checked first.", no_args_is_help=True
)

Shape = Annotated[int, typer.Option(min=1)]
CsvPath = Annotated[Path | None, typer.Option("--csv", help="Write the rows here as well.")]
InputsKind = Annotated[
    str, typer.Option(help="gaussian, zipf, or a file that `bench capture` wrote.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
Device = Annotated[str, typer.Option(help='"cpu", "cuda", ...')]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's choice.")]


@app.command("loss")
def loss_command(
    tokens: Shape = 2048,
    vocab: Shape = 32768,
    dim: Shape = 512,
    inputs: InputsKind = "zipf",
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    repeats: Annotated[int, typer.Option(min=3)] = 30,
    method: Annotated[list[str] | None, typer.Option(help="Only these; may be repeated.")] = None,
    csv_path: CsvPath = None,
) -> None:
    """Loss and gradients of every mode beside dense torch: time, memory, error."""
    from .loss import bench_loss

    made = _inputs(inputs, tokens, vocab, dim, dtype, device, threads)
    _publish(bench_loss(made, repeats=repeats, only=method), made, csv_path)


@app.command("filter")
def filter_command(
    tokens: Shape = 2048,
    vocab: Shape = 16384,
    dim: Shape = 256,
    inputs: InputsKind = "zipf",
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    threads: Threads = 0,
    share: Annotated[
        list[float] | None,
        typer.Option(help="Thresholds as shares of the uniform mass 128 / V; may be repeated."),
    ] = None,
    csv_path: CsvPath = None,
) -> None:
    """What each filter threshold keeps, and the error of its gradients."""
    from .filter import bench_filter

    made = _inputs(inputs, tokens, vocab, dim, dtype, device, threads)
    shares = share or [2.0**power for power in (2, 1, 0, -1, -2, -3, -4, -6, -8)]
    _publish(bench_filter(made, shares), made, csv_path)


@app.command()
def capture(
    config: Annotated[Path, typer.Argument(help="A training config, as of `cce-dist train`.")],
    out: Annotated[Path, typer.Option(help="Folder for step-<n>.pt.")] = Path("runs/captured"),
    step: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    tokens: Shape = 2048,
) -> None:
    """Train on one rank and save what the loss sees (hidden, weight, targets) at some steps."""
    from .capture import capture_inputs

    for path in capture_inputs(config, step or [0, 10, 100, 300], tokens, out):
        typer.echo(path)


def _inputs(
    kind: str, tokens: int, vocab: int, dim: int, dtype: str, device: str, threads: int
):  # BenchInputs: named where torch is imported
    import torch

    from .inputs import make_inputs

    if threads:
        torch.set_num_threads(threads)
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype):
        raise typer.BadParameter(f"dtype must name a torch dtype, got {dtype!r}")
    try:
        return make_inputs(kind, tokens, vocab, dim).to(wanted, torch.device(device))
    except (ValueError, RuntimeError) as error:
        raise typer.BadParameter(str(error)) from None


def _publish(rows: list[dict[str, str]], made, csv_path: Path | None) -> None:
    from rich.console import Console

    from .machine import describe_machine
    from .table import show, write_csv

    machine = describe_machine(made.hidden.device)
    command = shlex.join(["cce-dist", *sys.argv[1:]])
    console = Console(width=None if sys.stdout.isatty() else 180)
    title = ", ".join(f"{key} {value}" for key, value in made.shape.items())
    show(title, rows, console)
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()), style="dim")
    if csv_path is not None:
        write_csv(csv_path, rows, {**made.shape, **machine, "command": command})
        console.print(f"written: {csv_path}")
