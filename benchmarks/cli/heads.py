"""`cce-dist bench heads`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cce_dist.bench import arguments as arg


def heads_command(
    head: Annotated[
        arg.Names, typer.Option(help="gemma2-2b, ..., or VOCABxDIM; may be repeated. [ten]")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="May be repeated. [1024, 8192, 32768]")
    ] = None,
    inputs: Annotated[
        arg.Names,
        typer.Option(
            help="flat, zipf, ..., or step-N: a small model's after N steps; may be repeated. "
            "[flat, zipf, and for three heads step-10, step-100, step-1000]"
        ),
    ] = None,
    method: Annotated[
        arg.Names,
        typer.Option(help="May be repeated. [filtered, exact, in_forward-exact, screened]"),
    ] = None,
    peers: Annotated[
        str, typer.Option(help="all, none, or names with commas.")
    ] = "torch-compile,flash-attn,liger-8",
    peer_path: arg.PeerPath = None,
    peer_timeout_seconds: arg.Timeout = 120.0,
    repeats: arg.Repeats = 20,
    budget_seconds: arg.Budget = 1.0,
    worst_error_ratio: arg.WorstRatio = 3.0,
    device: arg.Device = "cuda",
    csv_path: Annotated[
        Path, typer.Option("--csv", help="Gets the rows of each cell; what it has is not measured.")
    ] = Path("runs/heads.csv"),
    cache: Annotated[Path, typer.Option(help="Folder of the small models' inputs.")] = Path(
        "runs/heads"
    ),
    megabytes: Annotated[float, typer.Option(min=0, help="Size of their text.")] = 40.0,
    show: Annotated[bool, typer.Option("--show", help="Measure nothing: show the table.")] = False,
    failed: arg.Failed = None,
) -> None:
    """Loss and gradients on ten models' heads in bf16, beside the fastest exact peer's, in one
    table.

    A sample of both gradients' rows is compared with float64 before a method is timed. The same
    command goes on where it was ended; several processes may share --csv.
    """
    from benchmarks.heads.heads import (
        HEADS,
        OURS,
        TOKENS,
        Plan,
        bench_heads,
        check_kinds,
        parse_head,
        read_rows,
    )
    from benchmarks.heads.table import describe
    from cce_dist.bench.loss import Settings
    from cce_dist.bench.methods import DeviceLostError, choose_methods, restart_without

    with arg.refusals():
        heads = [parse_head(text) for text in head or HEADS]
        kinds = check_kinds(inputs or ())
        plan = Plan(heads, tokens or TOKENS, kinds, cache, megabytes, device)
        methods = choose_methods(method or OURS, peers, on_gpu=device.startswith("cuda"))
    settings = Settings(
        repeats=repeats,
        budget_seconds=budget_seconds,
        timeout_seconds=peer_timeout_seconds,
        worst_error_ratio=worst_error_ratio,
        host=False,
        strict=False,
    )
    complete = True
    if not show:
        machine = arg.machine_of(device, 0, peers=[each.name for each in methods])
        try:
            complete = bench_heads(
                plan,
                methods,
                settings,
                csv_path,
                machine=machine,
                failed=arg.reasons_of(failed),
                say=typer.echo,
            )
        except DeviceLostError as error:
            restart_without(error)
    typer.echo(describe(read_rows(csv_path)))
    raise typer.Exit(0 if complete else 1)
