"""`cce-dist bench filter`, `tiles`, `first-call` and `paper`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from cce_dist.bench.arguments import (
    BackendName,
    Budget,
    CsvPath,
    Device,
    Dtype,
    Extra,
    Failed,
    Inputs,
    JsonPath,
    Names,
    PeerPath,
    Peers,
    Repeats,
    Shapes,
    Size,
    Threads,
    Timeout,
    Tokens,
    WorstRatio,
    case_of,
    cases_of,
    machine_of,
    reasons_of,
    refusals,
    shapes_of,
)


def filter_command(
    tokens: Tokens = None,
    vocab: Size = 16384,
    dim: Size = 256,
    shape: Shapes = None,
    inputs: Inputs = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cpu",
    threads: Threads = 0,
    share: Annotated[
        list[float] | None,
        typer.Option(help="Thresholds as shares of the uniform mass 128 / V; may be repeated."),
    ] = None,
    repeats: Repeats = 3,
    backend: BackendName = "auto",
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
) -> None:
    """Kept columns, error of the gradients and time of each filter threshold."""
    from benchmarks.loss.filter import bench_filter
    from cce_dist.bench.methods import parse_backend
    from cce_dist.bench.report import Report

    shares = share or [2.0**power for power in (3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -8)]
    with refusals():
        cases = cases_of(inputs, shape, tokens, vocab, dim, dtype, device)
        chosen = parse_backend(backend)
    report = Report(machine_of(device, threads), csv_path, json_path, None)
    for make in cases:
        case = make()
        report.add(case.description, bench_filter(case, shares, repeats=repeats, backend=chosen))
        report.finish_case()


def tiles_command(
    tokens: Tokens = None,
    vocab: Size = 16384,
    dim: Size = 256,
    shape: Shapes = None,
    inputs: Inputs = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    repeats: Repeats = 10,
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
) -> None:
    """Tiles of the Triton kernels: candidates beside what the table holds, by time."""
    from benchmarks.loss.tiles import bench_tiles
    from cce_dist.bench.report import Report

    with refusals():
        cases = cases_of(inputs, shape, tokens, vocab, dim, dtype, device)
    report = Report(machine_of(device, 0), csv_path, json_path, None)
    for make in cases:
        case = make()
        with refusals():
            rows = bench_tiles(case, repeats=repeats)
        report.add(case.description, rows)
        report.finish_case()


def first_call_command(
    tokens: Tokens = None,
    vocab: Size = 16384,
    dim: Size = 256,
    shape: Shapes = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    gradient: Annotated[Names, typer.Option(help="May be repeated. [all three]")] = None,
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
) -> None:
    """Seconds of a process's first loss and gradients, with and without compiled kernels."""
    from benchmarks.loss.first_call import bench_first_calls
    from cce_dist.bench.report import Report

    with refusals():
        shapes = shapes_of("zipf", shape, tokens, vocab, dim)
    gradients = gradient or ["filtered", "exact", "in_forward"]
    report = Report(machine_of(device, 0), csv_path, json_path, None)
    for parsed in shapes:
        with refusals():
            rows = bench_first_calls(parsed, dtype=dtype, device=device, gradients=gradients)
        report.add({**dataclasses.asdict(parsed), "dtype": dtype}, rows)
        report.finish_case()


def paper_command(
    table: Annotated[Names, typer.Option(help="1, A1 or A2; may be repeated. [all]")] = None,
    shape: Shapes = None,
    tokens: Tokens = None,
    inputs: Inputs = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    threads: Threads = 0,
    repeats: Repeats = 30,
    budget_seconds: Budget = 4.0,
    method: Annotated[Names, typer.Option(help="Only these methods; may be repeated.")] = None,
    peers: Peers = None,
    peer_path: PeerPath = None,
    peer_timeout_seconds: Timeout = 120.0,
    extra: Extra = None,
    backend: BackendName = "auto",
    worst_error_ratio: WorstRatio = 1.5,
    out: Annotated[Path, typer.Option(help="Folder for .csv, .json and .md.")] = Path("runs/paper"),
    failed: Failed = None,
) -> None:
    """The tables of Cut Cross-Entropy (arXiv:2411.09009), a file for each shape and inputs.

    --shape takes one of a table's shapes, so that a run can be split, or another in its place.
    """
    from benchmarks.loss.paper import TABLES, PaperCase, bench_paper
    from cce_dist.bench.loss import Settings
    from cce_dist.bench.methods import (
        DeviceLostError,
        choose_methods,
        parse_backend,
        restart_without,
    )

    sys.path[:0] = [str(folder.resolve()) for folder in peer_path or ()]
    settings = Settings(
        repeats=repeats,
        budget_seconds=budget_seconds,
        timeout_seconds=peer_timeout_seconds,
        worst_error_ratio=worst_error_ratio,
    )
    with refusals():
        settings = dataclasses.replace(settings, backend=parse_backend(backend))
        unknown = sorted(set(table or ()) - set(TABLES))
        if unknown:
            raise ValueError(f"table must be among {list(TABLES)}, got {unknown}")
        on_gpu = device.startswith("cuda")
        methods = choose_methods(method or (), peers, extra=extra or (), on_gpu=on_gpu)
        cases = [
            PaperCase(
                name,
                f"table-{name}-{text}-{Path(kind).stem}",
                case_of(kind, parsed, dtype, device, TABLES[name].ignored_fraction),
            )
            for name in table or TABLES
            for text in shape or TABLES[name].shapes
            for kind in inputs or ["zipf"]
            for parsed in shapes_of(kind, [text], tokens, 1, 1)
        ]
    try:
        machine = machine_of(device, threads, peers=[method.name for method in methods])
        for path in bench_paper(cases, methods, settings, machine, out, failed=reasons_of(failed)):
            typer.echo(path)
    except DeviceLostError as error:
        restart_without(error)
