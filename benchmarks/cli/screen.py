"""`cce-dist bench screen`: error of 8-bit logits."""

from __future__ import annotations

from typing import Annotated

import typer

from cce_dist.bench.arguments import (
    BackendName,
    CsvPath,
    Device,
    Dtype,
    Inputs,
    JsonPath,
    Shapes,
    Size,
    Tokens,
    cases_of,
    machine_of,
    refusals,
)


def screen_command(
    tokens: Tokens = None,
    vocab: Size = 16384,
    dim: Size = 256,
    shape: Shapes = None,
    inputs: Inputs = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    keep: Annotated[
        float | None, typer.Option(help="The filter's threshold. [its default]")
    ] = None,
    max_kept: Annotated[float, typer.Option(min=0, max=1, help="Field of Screen.")] = 0.125,
    max_error: Annotated[float, typer.Option(min=0, help="Field of Screen.")] = 2.0**-7,
    outliers: Annotated[
        list[str] | None,
        typer.Option(help="Also run with some channels 30 times as large: alike, varying."),
    ] = None,
    times: Annotated[
        list[float] | None, typer.Option(help="Also run with logits this many times as large.")
    ] = None,
    backend: BackendName = "triton",
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
) -> None:
    """Error of each token's log-sum-exp by 8-bit logits, and by dense ones; also its mean by
    deciles of the tokens' entropy.

    On a CPU with --device cpu: --backend torch, or TRITON_INTERPRET=1 --dtype float16.
    """
    from benchmarks.fidelity.screen import bench_screen
    from cce_dist.bench.methods import parse_backend
    from cce_dist.bench.report import Report

    with refusals():
        cases = cases_of(inputs, shape, tokens, vocab, dim, dtype, device)
        chosen = parse_backend(backend)
    report = Report(machine_of(device, 0), csv_path, json_path, None)
    for make in cases:
        case = make()
        with refusals():
            kinds = [case, *(case.with_outliers(kind) for kind in outliers or ())]
            kinds += [case.times(factor) for factor in times or ()]
            for each in kinds:
                rows = bench_screen(
                    each, keep=keep, max_kept=max_kept, max_error=max_error, backend=chosen
                )
                report.add(each.description, rows)
                report.finish_case()
