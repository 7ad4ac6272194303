"""`cce-dist doctor`: checks of this machine, its software and its ranks."""

from __future__ import annotations

from typing import Annotated

import typer

from cce_dist.distributed.launchers import MAX_SECONDS, rank_from_environment
from cce_dist.doctor.check import Check, worst
from cce_dist.doctor.report import Report, Request
from cce_dist.doctor.run import examine

from .output import JsonPath, check_output, console_of_tables, hand_over

DTYPES = ("bfloat16", "float16", "float32")
STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red", "skipped": "dim"}


def doctor(
    tp: Annotated[
        int | None, typer.Option(help="Ranks that share the vocabulary; else all that --pp leaves.")
    ] = None,
    pp: Annotated[int, typer.Option(help="Ranks of a pipeline.")] = 1,
    tokens: Annotated[
        int, typer.Option(help="Tokens in a call of the loss, for the collectives.")
    ] = 8192,
    dim: Annotated[int, typer.Option(help="Hidden size, for the collectives.")] = 2304,
    vocab: Annotated[int, typer.Option(help="Number of classes.")] = 256000,
    dtype: Annotated[
        str, typer.Option(help=f"Of the hidden states that are summed. [{'|'.join(DTYPES)}]")
    ] = "bfloat16",
    sequence_parallel: Annotated[bool, typer.Option("--sequence-parallel")] = False,
    seconds: Annotated[
        float, typer.Option(help="Time of the numerics: no mode starts later; 0: no numerics.")
    ] = 30.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds that a rank may keep the others waiting.")
    ] = 60.0,
    bandwidth: Annotated[
        float | None, typer.Option(help="Bus bandwidth that collectives should reach, in GB/s.")
    ] = None,
    json_path: JsonPath = None,
) -> None:
    """Check GPU, versions, numerics and ranks: alone, or on every rank, however started.

    Exits with 0 if nothing failed, 1 if a check did, 2 for bad arguments.
    """
    # Every other option is an argument of the request.
    request = Request(**{name: x for name, x in locals().items() if name != "json_path"})
    try:
        validate(request)
        check_output("--json", json_path)
        report = examine(request)
    except ValueError as error:
        if rank_from_environment() == 0:
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if report.rank == 0:
        try:
            hand_over(report.as_json(), json_path, lambda: show(report))
        except ValueError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from None
    elif report.mesh is None:
        # Without contact to the others no other rank reports this rank's findings.
        for check in report.checks:
            if check.status == "failure":
                place = f"rank {report.rank} on {report.hosts[0]}"
                typer.echo(f"error: {place}: {check.name}: {check.observed}", err=True)
    raise typer.Exit(report.exit_code)


def validate(request: Request) -> None:
    """Checks the options.

    Raises:
        ValueError: a value is not allowed; the message names the option.
    """
    for name in ("tp", "pp", "tokens", "dim", "vocab"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} must be >= 1, got {value}")
    if request.dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {list(DTYPES)}, got {request.dtype!r}")
    if not 0 <= request.seconds < float("inf"):
        raise ValueError(f"--seconds must be >= 0 and finite, got {request.seconds}")
    if not 0 < request.timeout <= MAX_SECONDS:
        rule = f"--timeout must be > 0 and at most {MAX_SECONDS} seconds"
        raise ValueError(f"{rule}, got {request.timeout}")
    if request.bandwidth is not None and not 0 < request.bandwidth < float("inf"):
        raise ValueError(f"--bandwidth must be > 0 and finite, got {request.bandwidth}")


def show(report: Report) -> None:
    """Shows a table of all rows, each with its remedy where there is one."""
    from rich.table import Table
    from rich.text import Text

    console = console_of_tables()
    table = Table(show_lines=False)
    table.add_column("check", max_width=24)
    table.add_column("status")
    table.add_column("found", ratio=1)
    for check in report.checks:
        status = Text(check.status, style=STYLES[check.status])
        table.add_row(Text(check.name), status, Text(lines_of(check)))
    console.print(table)
    counts = {status: sum(check.status == status for check in report.checks) for status in STYLES}
    counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(Text(f"{worst(report.checks)}: {counted}"))


def lines_of(check: Check) -> str:
    """Writes a check's finding; for a bad finding also the expectation and the remedy."""
    lines = [check.observed]
    measured = "expected_seconds" in check.numbers
    if check.expected and (measured or check.status in ("warning", "failure")):
        lines.append(f"expected: {check.expected}")
    if check.remedy:
        lines.append(f"do: {check.remedy}")
    return "\n".join(lines)
