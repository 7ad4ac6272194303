"""`cce-dist bench capture`: saves the inputs that the loss gets in a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cce_dist.bench.arguments import Size, refusals
from cce_dist.needs.extras import need_modules


def capture_command(
    config: Annotated[
        Path | None,
        typer.Argument(help="A config of `cce-dist train`, in place of the sizes."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for step-<n>.pt.")] = Path("runs/captured"),
    step: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Step to save after; may be repeated. [0, 10, 100, 300]"),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Train this long, and save the last step.")
    ] = None,
    tokens: Size = 2048,
    vocab: Annotated[int, typer.Option(min=257)] = 256000,
    dim: Size = 2304,
    layers: Size = 6,
    batch: Size = 16,
    sequence_length: Annotated[int, typer.Option(min=2)] = 1024,
    megabytes: Annotated[float, typer.Option(min=0, help="Size of the text.")] = 160.0,
) -> None:
    """Train on one rank and save what the loss sees (hidden, weight, targets) at some steps.

    The text is that of the Python installation, or the config's.
    """
    from benchmarks.fidelity.capture import capture_inputs, load_capture_config, make_capture_config

    need_modules("tokenizers")
    steps = step or ([] if seconds is not None else [0, 10, 100, 300])
    num_steps = max([*steps, 1])
    with refusals():
        if config is not None:
            chosen = load_capture_config(config, num_steps)
        else:
            chosen = make_capture_config(
                vocab,
                dim,
                layers,
                megabytes,
                out / ".cache",
                steps=num_steps,
                batch=batch,
                sequence_length=sequence_length,
            )
    for path in capture_inputs(chosen, steps, tokens, out, seconds=seconds):
        typer.echo(path)
