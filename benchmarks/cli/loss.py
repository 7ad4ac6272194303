"""`cce-dist bench filter` and `first-call`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from cce_dist.bench.arguments import (
    BackendName,
    CsvPath,
    Device,
    Dtype,
    Inputs,
    JsonPath,
    Names,
    Repeats,
    Shapes,
    Size,
    Threads,
    Tokens,
    cases_of,
    machine_of,
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
