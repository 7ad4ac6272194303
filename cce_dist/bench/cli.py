"""`cce-dist bench ...`: every published figure comes from one of these commands."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from cce_dist.cli_extras import need_modules

from .arguments import (
    BackendName,
    Budget,
    CsvPath,
    Device,
    Dtype,
    Extra,
    Failed,
    Ignored,
    Inputs,
    JsonPath,
    Names,
    PeerPath,
    Peers,
    Repeats,
    Shapes,
    Size,
    Softcap,
    Threads,
    Timeout,
    Tokens,
    WorstRatio,
)
from .cases import case_of, cases_of, machine_of, reasons_of, refusals, shapes_of
from .cli_converge import converge_command
from .cli_evidence import fidelity_command, probabilities_command
from .cli_pipeline import pipeline_command
from .cli_profile import profile_command
from .cli_ranks import megatron_command, ranks_command, train_command
from .cli_screen import quantize_command, screen_command

app = typer.Typer(
    help="Measure time, memory and error; correctness is checked first.", no_args_is_help=True
)


@app.command("loss")
def loss_command(
    tokens: Tokens = None,
    vocab: Size = 32768,
    dim: Size = 512,
    shape: Shapes = None,
    inputs: Inputs = None,
    ignored_fraction: Ignored = 0.0,
    remove_ignored: Annotated[
        bool, typer.Option("--remove-ignored", help="Before peers; ours do so themselves.")
    ] = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    repeats: Repeats = 30,
    budget_seconds: Budget = 0.0,
    passes: Annotated[
        Names, typer.Option(help="loss, forward, gradient or loss+grad; may be repeated.")
    ] = None,
    method: Annotated[Names, typer.Option(help="Only these; may be repeated.")] = None,
    peers: Peers = None,
    peer_path: PeerPath = None,
    peer_timeout_seconds: Timeout = 120.0,
    extra: Extra = None,
    softcap: Softcap = None,
    backend: BackendName = "auto",
    worst_error_ratio: WorstRatio = 1.5,
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for time-error.png and time-memory.png.")
    ] = None,
    failed: Failed = None,
) -> None:
    """Loss and gradients of every mode beside dense torch and peers: time, memory, error.

    Files are written anew after every method, so that nothing measured is lost.
    """
    from .guard import DeviceLostError, restart_without
    from .loss import Settings
    from .methods import choose_methods, parse_backend
    from .report import Report
    from .suite import measure_all
    from .variants import check_parts

    if plots is not None:
        need_modules("matplotlib")
    sys.path[:0] = [str(folder.resolve()) for folder in peer_path or ()]
    with refusals():
        settings = Settings(
            repeats=repeats,
            parts=check_parts(passes or ["loss+grad"]),
            budget_seconds=budget_seconds,
            timeout_seconds=peer_timeout_seconds,
            worst_error_ratio=worst_error_ratio,
            compact=remove_ignored,
        )
        on_gpu = device.startswith("cuda")
        chosen = parse_backend(backend)
        methods = choose_methods(
            method or (), peers, backend=chosen, extra=extra or (), on_gpu=on_gpu, softcap=softcap
        )
        cases = cases_of(
            inputs, shape, tokens, vocab, dim, dtype, device, ignored_fraction, softcap
        )
    machine = machine_of(device, threads, peers=[method.name for method in methods])
    report = Report(machine, csv_path, json_path, plots)
    try:
        measure_all(cases, methods, settings, report, reasons_of(failed))
    except DeviceLostError as error:
        restart_without(error)


@app.command("filter")
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
    """What each filter threshold keeps, the error of its gradients, and its time."""
    from .filter import bench_filter
    from .methods import parse_backend
    from .report import Report

    shares = share or [2.0**power for power in (3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -8)]
    with refusals():
        cases = cases_of(inputs, shape, tokens, vocab, dim, dtype, device)
        chosen = parse_backend(backend)
    report = Report(machine_of(device, threads), csv_path, json_path, None)
    for make in cases:
        made = make()
        report.add(made.description, bench_filter(made, shares, repeats=repeats, backend=chosen))
        report.finish_case()


@app.command("tiles")
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
    from .report import Report
    from .tiles import bench_tiles

    with refusals():
        cases = cases_of(inputs, shape, tokens, vocab, dim, dtype, device)
    report = Report(machine_of(device, 0), csv_path, json_path, None)
    for make in cases:
        made = make()
        with refusals():
            rows = bench_tiles(made, repeats=repeats)
        report.add(made.description, rows)
        report.finish_case()


@app.command("first-call")
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
    from .first_call import bench_first_calls
    from .report import Report

    with refusals():
        shapes = shapes_of("zipf", shape, tokens, vocab, dim)
    ways = gradient or ["filtered", "exact", "in_forward"]
    report = Report(machine_of(device, 0), csv_path, json_path, None)
    for found in shapes:
        with refusals():
            rows = bench_first_calls(found, dtype=dtype, device=device, gradients=ways)
        report.add({**dataclasses.asdict(found), "dtype": dtype}, rows)
        report.finish_case()


app.command("profile")(profile_command)
app.command("screen")(screen_command)
app.command("quantize")(quantize_command)
app.command("fidelity")(fidelity_command)
app.command("probabilities")(probabilities_command)
app.command("converge")(converge_command)
app.command("ranks")(ranks_command)
app.command("megatron")(megatron_command)
app.command("pipeline")(pipeline_command)
app.command("train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    train_command
)


@app.command()
def paper(
    table: Annotated[Names, typer.Option(help="1, A1 or A2; may be repeated. [all]")] = None,
    shape: Shapes = None,
    tokens: Tokens = None,
    inputs: Inputs = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    threads: Threads = 0,
    repeats: Repeats = 30,
    budget_seconds: Budget = 4.0,
    method: Annotated[Names, typer.Option(help="Only these; may be repeated.")] = None,
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
    from .guard import DeviceLostError, restart_without
    from .loss import Settings
    from .methods import choose_methods, parse_backend
    from .paper import TABLES, PaperCase, bench_paper

    sys.path[:0] = [str(folder.resolve()) for folder in peer_path or ()]
    settings = Settings(
        repeats=repeats,
        budget_seconds=budget_seconds,
        timeout_seconds=peer_timeout_seconds,
        worst_error_ratio=worst_error_ratio,
    )
    with refusals():
        unknown = sorted(set(table or ()) - set(TABLES))
        if unknown:
            raise ValueError(f"table must be among {list(TABLES)}, got {unknown}")
        chosen = parse_backend(backend)
        on_gpu = device.startswith("cuda")
        methods = choose_methods(
            method or (), peers, backend=chosen, extra=extra or (), on_gpu=on_gpu
        )
        cases = [
            PaperCase(
                name,
                f"table-{name}-{text}-{Path(kind).stem}",
                case_of(kind, found, dtype, device, TABLES[name].ignored_fraction),
            )
            for name in table or TABLES
            for text in shape or TABLES[name].shapes
            for kind in inputs or ["zipf"]
            for found in shapes_of(kind, [text], tokens, 1, 1)
        ]
    try:
        machine = machine_of(device, threads, peers=[method.name for method in methods])
        for path in bench_paper(cases, methods, settings, machine, out, failed=reasons_of(failed)):
            typer.echo(path)
    except DeviceLostError as error:
        restart_without(error)


@app.command()
def capture(
    config: Annotated[
        Path | None,
        typer.Argument(help="A training config, as of `cce-dist train`, in place of the sizes."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for step-<n>.pt.")] = Path("runs/captured"),
    step: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Save after it; may be repeated. [0, 10, 100, 300]"),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Train as long, and save the last step.")
    ] = None,
    tokens: Size = 2048,
    vocab: Annotated[int, typer.Option(min=257)] = 256000,
    dim: Size = 2304,
    layers: Size = 6,
    batch: Size = 16,
    sequence_length: Annotated[int, typer.Option(min=2)] = 1024,
    megabytes: Annotated[float, typer.Option(min=0, help="Of text.")] = 160.0,
) -> None:
    """Train on one rank and save what the loss sees (hidden, weight, targets) at some steps.

    The text is that of the Python installation, or the config's.
    """
    from .capture import capture_inputs, load_capture_config, make_capture_config

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
