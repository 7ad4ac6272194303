"""`cce-dist bench first-call`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from cce_dist.bench.arguments import (
    CsvPath,
    Device,
    Dtype,
    JsonPath,
    Names,
    Shapes,
    Size,
    Tokens,
    machine_of,
    refusals,
    shapes_of,
)


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
    from benchmarks.first_call import bench_first_calls
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
