"""`cce-dist bench profile`: where a method's time goes."""

from __future__ import annotations

import sys
from typing import Annotated, get_args

import typer

from .arguments import (
    BackendName,
    CsvPath,
    Device,
    Dtype,
    Extra,
    Inputs,
    JsonPath,
    Names,
    PeerPath,
    Repeats,
    Shapes,
    Size,
    Softcap,
    Threads,
    Tokens,
)
from .cases import cases_of, machine_of, refusals


def profile_command(
    tokens: Tokens = None,
    vocab: Size = 16384,
    dim: Size = 256,
    shape: Shapes = None,
    inputs: Inputs = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    threads: Threads = 0,
    method: Annotated[
        Names, typer.Option(help="As of `bench loss`, peers too; may be repeated. [filtered]")
    ] = None,
    part: Annotated[str, typer.Option(help="loss, forward, gradient or loss+grad.")] = "loss+grad",
    repeats: Repeats = 10,
    most: Annotated[int, typer.Option(min=1, help="Kernels of each method that are shown.")] = 30,
    peer_path: PeerPath = None,
    extra: Extra = None,
    softcap: Softcap = None,
    backend: BackendName = "auto",
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
) -> None:
    """Where a method's time goes: the kernels of a call, by torch's profiler, beside its median
    time without one. On a CPU torch's operations.
    """
    from .methods import choose_methods, parse_backend
    from .profile import bench_profile
    from .report import Report
    from .variants import Part

    sys.path[:0] = [str(folder.resolve()) for folder in peer_path or ()]
    with refusals():
        chosen = next((known for known in get_args(Part) if known == part), None)
        if chosen is None:
            raise ValueError(f"part must be among {list(get_args(Part))}, got {part!r}")
        methods = choose_methods(
            method or ["filtered"],
            "none",
            backend=parse_backend(backend),
            extra=extra or (),
            on_gpu=device.startswith("cuda"),
            softcap=softcap,
        )
        cases = cases_of(inputs, shape, tokens, vocab, dim, dtype, device, softcap=softcap)
    machine = machine_of(device, threads, peers=[each.name for each in methods])
    report = Report(machine, csv_path, json_path, None)
    for make in cases:
        made = make()
        rows = bench_profile(made, methods, part=chosen, repeats=repeats, most=most)
        report.add(made.description, rows)
        report.finish_case()
