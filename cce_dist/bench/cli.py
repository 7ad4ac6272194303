"""`cce-dist bench ...`: commands that users run on their own GPUs; a checkout has more."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from cce_dist.needs.checkout import (
    EXPERIMENTS,
    CheckoutGroup,
    add_checkout_commands,
    import_benchmarks,
)
from cce_dist.needs.extras import need_modules

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
    RecordPath,
    Repeats,
    Shapes,
    Size,
    Softcap,
    Threads,
    Timeout,
    Tokens,
    WorstRatio,
    cases_of,
    machine_of,
    reasons_of,
    refusals,
)

if TYPE_CHECKING:
    from .inputs import BenchInputs
    from .report import Cells

app = typer.Typer(
    help="Measure time, memory and error; correctness is checked first.",
    no_args_is_help=True,
    cls=CheckoutGroup,
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
        bool, typer.Option("--remove-ignored", help="Drop ignored tokens before peers, too.")
    ] = False,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 0,
    repeats: Repeats = 30,
    budget_seconds: Budget = 0.0,
    passes: Annotated[
        Names, typer.Option(help="loss, forward, gradient or loss+grad; may be repeated.")
    ] = None,
    method: Annotated[Names, typer.Option(help="Only these methods; may be repeated.")] = None,
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
    from .loss import Settings, measure_all
    from .machine import check_parts
    from .methods import DeviceLostError, choose_methods, parse_backend, restart_without
    from .report import Report

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


@app.command("profile")
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
        Names, typer.Option(help="A method or peer of `bench loss`; may be repeated. [filtered]")
    ] = None,
    part: Annotated[str, typer.Option(help="loss, forward, gradient or loss+grad.")] = "loss+grad",
    repeats: Repeats = 10,
    most: Annotated[int, typer.Option(min=1, help="Kernels shown for each method.")] = 30,
    peer_path: PeerPath = None,
    extra: Extra = None,
    softcap: Softcap = None,
    backend: BackendName = "auto",
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
) -> None:
    """Time of each kernel in a method's call, by torch's profiler, and of a call without it.

    On a CPU torch's operations are shown in place of kernels.
    """
    from .machine import Part
    from .methods import choose_methods, parse_backend
    from .profile import bench_profile
    from .report import Report

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
        case = make()
        rows = bench_profile(case, methods, part=chosen, repeats=repeats, most=most)
        report.add(case.description, rows)
        report.finish_case()


@app.command("ranks")
def ranks_command(
    size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Ranks of a group; may be repeated. [every divisor of all ranks]"),
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Also run our methods under sequence parallelism.")
    ] = True,
    tokens: Tokens = None,
    vocab: Size = 32768,
    dim: Size = 512,
    shape: Shapes = None,
    inputs: Inputs = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    repeats: Repeats = 10,
    method: Annotated[Names, typer.Option(help="Only these methods; may be repeated.")] = None,
    peers: Annotated[str, typer.Option(help="all, none, or names with commas.")] = "none",
    peer_path: PeerPath = None,
    backend: BackendName = "auto",
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Limit of a collective.")] = 120.0,
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
) -> None:
    """Loss and gradients where ranks share the vocabulary; start it with torchrun.

    torchrun --nproc-per-node 4 -m cce_dist bench ranks --shape gemma2-2b
    """
    from .methods import parse_backend
    from .rank_methods import choose_rank_methods
    from .ranks import bench_ranks, joined, make_places
    from .report import Report

    sys.path[:0] = [str(folder.resolve()) for folder in peer_path or ()]
    with refusals():
        methods = choose_rank_methods(method or (), peers, backend=parse_backend(backend))
        context = joined(device, timeout_seconds)
    with refusals(), context as job:
        sizes = size or [n for n in range(1, job.size + 1) if job.size % n == 0]
        cases = cases_of(inputs, shape, tokens, vocab, dim, dtype, str(job.device))
        names = [method.name for method in methods]
        machine = machine_of(str(job.device), 0, job.size, names)
        report = Report(machine, csv_path, json_path, None)
        for make in cases:
            case = make()
            places = make_places(job, sizes, len(case.weight), sequence_parallel)

            def save(rows: list[Cells], case: BenchInputs = case) -> None:
                if job.is_main:
                    report.add(case.description, rows)

            save(bench_ranks(job, case, methods, places, repeats=repeats, save=save))
            report.finish_case()


@app.command("train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train_command(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(help="Config of `cce-dist train`; options override its keys.")
    ],
    loss: Annotated[
        Names,
        typer.Option(
            help="cce, dense or, with tp 1, a peer such as apple-cce; may be repeated. [cce, dense]"
        ),
    ] = None,
    warmup_steps: Size = 10,
    timed_steps: Size = 10,
    largest: Annotated[bool, typer.Option(help="Also run the largest batch that fits.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/bench-train"),
    peer_path: PeerPath = None,
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
    record: RecordPath = None,
    title: Annotated[
        str, typer.Option(help="The record's title.")
    ] = "Whole training steps of a decoder",
) -> None:
    """Tokens a second and memory of whole training steps, with our loss, the dense one and peers.

    torchrun --nproc-per-node 4 -m cce_dist bench train launch/configs/gpus.yaml --parallel.tp 4
    """
    import torch

    from cce_dist.train.config.load import load_config, parse_arguments
    from cce_dist.train.errors import ConfigError
    from cce_dist.train.ranks import num_ranks

    from .report import Report
    from .training import LOSSES, bench_training

    need_modules("tokenizers")
    evidence = None
    if record is not None:
        command = f"{context.command_path} --record"
        evidence = import_benchmarks("evidence.show.show_end_to_end", command)
    sys.path[:0] = [str(folder.resolve()) for folder in peer_path or ()]
    with refusals():
        try:
            size = num_ranks()
            path, overrides = parse_arguments([config, *context.args])
            chosen = load_config(path, overrides, num_ranks=size)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The name "cce" means our loss here; Apple's is "apple-cce".
    peers = [name.removeprefix("apple-") for name in loss or () if name != "cce"]
    report = Report(machine_of(device, 0, size, peers), csv_path, json_path, None)
    model = chosen.model
    sizes = {"V": chosen.data.vocab_size, "D": model.dim, "layers": model.layers}

    def save(rows: list[Cells], is_main: bool) -> None:
        if is_main:
            report.add({**sizes, "dtype": chosen.dtype}, rows)
            if evidence is not None:
                evidence.write_end_to_end(
                    report.rows, report.machine, record, title, seed=chosen.run.seed
                )

    with refusals():
        try:
            bench_training(
                chosen,
                loss or LOSSES,
                out,
                warmup=warmup_steps,
                steps=timed_steps,
                largest=largest,
                save=save,
            )
        except ConfigError as error:
            raise ValueError(str(error)) from None
    report.finish_case()


add_checkout_commands(app, EXPERIMENTS)
