"""`cce-dist eval`: the perplexity of texts by a checkpoint of `cce-dist train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cce_dist.needs.extras import need_modules

from .output import JsonPath, check_output, console_of_tables, hand_over, refusals, table_of


def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/quickstart.")],
    texts: Annotated[list[Path], typer.Argument(metavar="TEXT...", help="Files in UTF-8.")],
    checkpoint: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; else the run's newest.")
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help="Ranks that share the vocabulary; else all. Groups share the windows."),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Windows at a time on a rank; else as in training.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(help="Tokens of a window; else as in training.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(help="Tokens from window to window; else as many as a window has.")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Where the run's tokenizer is, if its data.cache has moved.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Perplexity of texts by a checkpoint of `cce-dist train`, on any number of ranks.

    Exits with 0; with 2 for bad arguments, and with 1 if a rank fails.
    """
    from cce_dist.train.evaluate.perplexity import Request, run_evaluation

    need_modules("tokenizers")
    request = Request(
        run_dir=run,
        texts=tuple(texts),
        checkpoint=checkpoint,
        tp=tp,
        batch=batch,
        sequence_length=sequence_length,
        stride=stride,
        cache=cache,
    )
    with refusals():
        check_output("--json", json_path)
    raise typer.Exit(run_evaluation(request, lambda findings: _hand_over(findings, json_path)))


def _hand_over(findings: dict[str, Any], path: Path | None) -> None:
    from cce_dist.train.errors import JobError

    try:
        hand_over(findings, path, lambda: show(findings))
    except ValueError as error:
        raise JobError(str(error)) from None


def show(findings: dict[str, Any]) -> None:
    """Shows a table of the texts, and a table of the tenths of all of them by frequency."""
    from rich.text import Text

    console = console_of_tables()
    lines = [
        "{checkpoint}, {dtype}",
        "windows of {sequence_length} tokens, {stride} apart",
        "{device}, dp {dp}, tp {tp}: {rate:,.0f} tokens/s",
    ]
    for line in lines:
        rate = findings["tokens"] / findings["seconds"]
        console.print(Text(line.format(rate=rate, **findings)), soft_wrap=True)
    texts = findings["texts"]
    if len(texts) > 1:
        texts = [*texts, {"path": "all", **findings}]
    rows = [[x["path"], *_figures(x), f"{x['bits_per_byte']:.4f}"] for x in texts]
    columns = ("text", "tokens", "nats/token", "perplexity", "bits/byte")
    console.print(table_of(columns, rows, left=1))
    rows = [
        [str(x["tenth"]), f"{x['ids']:,}", _range(x["times"]), *_figures(x)]
        for x in findings["frequency"]
    ]
    columns = ("tenth", "ids", "times each", "tokens", "nats/token", "perplexity")
    caption = "by how often the texts have the token"
    console.print(table_of(columns, rows, caption=caption, left=1))


def _figures(score: dict[str, Any]) -> list[str]:
    perplexity = score["perplexity"]
    shown = "> 1e307" if perplexity is None else f"{perplexity:,.2f}"
    return [f"{score['tokens']:,}", f"{score['nats_per_token']:.6f}", shown]


def _range(times: list[int]) -> str:
    least, most = times
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
