"""`cce-dist bench ...`: commands that users run on their own GPUs; a checkout has more."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cce_dist.needs.checkout import (
    EXPERIMENTS,
    CheckoutGroup,
    add_checkout_commands,
    import_benchmarks,
)
from cce_dist.needs.extras import need_modules

from . import arguments as arg

if TYPE_CHECKING:
    from cce_dist.options import Backend

    from .inputs import BenchInputs
    from .methods import Method
    from .report import Cells, Report

app = typer.Typer(
    help="Measure time, memory and error; correctness is checked first.",
    no_args_is_help=True,
    cls=CheckoutGroup,
)


@app.command("loss")
def loss_command(
    tokens: arg.Tokens = None,
    vocab: arg.Size = 32768,
    dim: arg.Size = 512,
    shape: arg.Shapes = None,
    inputs: arg.Inputs = None,
    ignored_fraction: arg.Ignored = 0.0,
    remove_ignored: Annotated[
        bool, typer.Option("--remove-ignored", help="Drop ignored tokens before peers, too.")
    ] = False,
    dtype: arg.Dtype = "float32",
    device: arg.Device = "cpu",
    threads: arg.Threads = 0,
    repeats: arg.Repeats = 30,
    budget_seconds: arg.Budget = 0.0,
    passes: Annotated[
        arg.Names, typer.Option(help="loss, forward, gradient or loss+grad; may be repeated.")
    ] = None,
    method: arg.Methods = None,
    peers: arg.Peers = None,
    peer_path: arg.PeerPath = None,
    peer_timeout_seconds: arg.Timeout = 120.0,
    extra: arg.Extra = None,
    softcap: arg.Softcap = None,
    entropy_bonus: arg.EntropyBonus = 0.0,
    backend: arg.BackendName = "auto",
    worst_error_ratio: arg.WorstRatio = 1.5,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for time-error.png and time-memory.png.")
    ] = None,
    failed: arg.Failed = None,
    varied: Annotated[
        bool,
        typer.Option("--varied", help="Also time the host in calls of different sizes (GPU)."),
    ] = False,
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
    with arg.refusals():
        settings = Settings(
            repeats=repeats,
            parts=check_parts("passes", passes or ["loss+grad"]),
            budget_seconds=budget_seconds,
            timeout_seconds=peer_timeout_seconds,
            worst_error_ratio=worst_error_ratio,
            compact=remove_ignored,
            backend=parse_backend(backend),
            varied=varied,
        )
        on_gpu = device.startswith("cuda")
        methods = choose_methods(method or (), peers, extra=extra or (), on_gpu=on_gpu)
        cases = arg.cases_of(
            *(inputs, shape, tokens, vocab, dim, dtype, device),
            *(ignored_fraction, softcap, entropy_bonus),
        )
    machine = arg.machine_of(device, threads, peers=[method.name for method in methods])
    report = Report(machine, csv_path, json_path, plots)
    try:
        measure_all(cases, methods, settings, report, arg.reasons_of(failed))
    except DeviceLostError as error:
        restart_without(error)


@app.command("profile")
def profile_command(
    tokens: arg.Tokens = None,
    vocab: arg.Size = 16384,
    dim: arg.Size = 256,
    shape: arg.Shapes = None,
    inputs: arg.Inputs = None,
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cuda",
    threads: arg.Threads = 0,
    method: Annotated[
        arg.Names,
        typer.Option(help="A method or peer of `bench loss`; may be repeated. [filtered]"),
    ] = None,
    part: Annotated[str, typer.Option(help="loss, forward, gradient or loss+grad.")] = "loss+grad",
    repeats: arg.Repeats = 10,
    most: Annotated[int, typer.Option(min=1, help="Kernels shown for each method.")] = 30,
    peer_path: arg.PeerPath = None,
    extra: arg.Extra = None,
    softcap: arg.Softcap = None,
    backend: arg.BackendName = "auto",
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
) -> None:
    """Time of each kernel in a method's call, by torch's profiler, and of a call without it.

    On a CPU torch's operations are shown in place of kernels.
    """
    from .machine import check_parts
    from .methods import choose_methods, parse_backend
    from .profile import bench_profile
    from .report import Report

    with arg.refusals():
        (chosen,) = check_parts("part", [part])
        our_backend = parse_backend(backend)
        on_gpu = device.startswith("cuda")
        names = method or ["filtered"]
        methods = choose_methods(names, "none", extra=extra or (), on_gpu=on_gpu)
        cases = arg.cases_of(inputs, shape, tokens, vocab, dim, dtype, device, softcap=softcap)
    machine = arg.machine_of(device, threads, peers=[each.name for each in methods])
    report = Report(machine, csv_path, json_path)
    for make in cases:
        case = make()
        rows = bench_profile(
            case, methods, backend=our_backend, part=chosen, repeats=repeats, most=most
        )
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
    tokens: arg.Tokens = None,
    vocab: arg.Size = 32768,
    dim: arg.Size = 512,
    shape: arg.Shapes = None,
    inputs: arg.Inputs = None,
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cuda",
    repeats: arg.Repeats = 10,
    method: arg.Methods = None,
    peers: Annotated[str, typer.Option(help="all, none, or names with commas.")] = "none",
    peer_path: arg.PeerPath = None,
    backend: arg.BackendName = "auto",
    simulate: Annotated[
        list[int] | None,
        typer.Option(
            min=2,
            help="In place of a job's: so many ranks one after the other on one device, with the "
            "collectives' results in place, without sequence parallelism; may be repeated.",
        ),
    ] = None,
    timeout_seconds: arg.CollectiveTimeout = 120.0,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
) -> None:
    """Loss and gradients where ranks share the vocabulary; start it with torchrun.

    torchrun --nproc-per-node 4 -m cce_dist bench ranks --shape gemma2-2b

    With --simulate one process shows each rank's own kernels, and a model of their communication:

    cce-dist bench ranks --shape gemma2-2b --simulate 4 --simulate 8
    """
    from .methods import choose_methods, parse_backend
    from .ranks import bench_ranks, joined, make_places
    from .report import Report

    with arg.refusals():
        our_backend = parse_backend(backend)
        on_gpu = device.startswith("cuda")
        methods = choose_methods(method or (), peers, on_gpu=on_gpu, ranks=True)
        if simulate and size:
            raise ValueError(f"size must not be given with simulate, got {size}")
        if simulate:
            return _simulate(
                arg.cases_of(inputs, shape, tokens, vocab, dim, dtype, device),
                *(methods, simulate, repeats, our_backend),
                Report(arg.machine_of(device, 0), csv_path, json_path),
            )
        context = joined(device, timeout_seconds)
    with arg.refusals(), context as job:
        sizes = size or [n for n in range(1, job.size + 1) if job.size % n == 0]
        cases = arg.cases_of(inputs, shape, tokens, vocab, dim, dtype, str(job.device))
        names = [method.name for method in methods]
        machine = arg.machine_of(str(job.device), 0, job.size, names)
        report = Report(machine, csv_path, json_path)
        for make in cases:
            case = make()
            places = make_places(job, sizes, len(case.weight), sequence_parallel)

            def save(rows: list[Cells], case: BenchInputs = case) -> None:
                if job.is_main:
                    report.add(case.description, rows)

            bench_ranks(job, case, methods, places, repeats=repeats, backend=our_backend, save=save)
            report.finish_case()


def _simulate(
    cases: Iterable[Callable[[], BenchInputs]],
    methods: Sequence[Method],
    sizes: Sequence[int],
    repeats: int,
    backend: Backend,
    report: Report,
) -> None:
    simulated = import_benchmarks("ranks.simulated", "cce-dist bench ranks --simulate")
    for make in cases:
        case = make()
        save = functools.partial(report.add, case.description)
        simulated.simulate_ranks(case, methods, sizes, repeats=repeats, backend=backend, save=save)
        report.finish_case()


@app.command("train", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train_command(
    context: typer.Context,
    config: Annotated[
        str, typer.Argument(help="Config of `cce-dist train`; options override its keys.")
    ],
    loss: Annotated[
        arg.Names,
        typer.Option(
            help="cce, dense or, with tp 1, a peer such as apple-cce; may be repeated. [cce, dense]"
        ),
    ] = None,
    warmup_steps: arg.Size = 10,
    timed_steps: arg.Size = 10,
    largest: Annotated[bool, typer.Option(help="Also run the largest batch that fits.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/bench-train"),
    peer_path: arg.PeerPath = None,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
    record: arg.RecordPath = None,
    title: Annotated[
        str, typer.Option(help="The record's title.")
    ] = "Whole training steps of a decoder",
) -> None:
    """Tokens a second and memory of whole training steps, with our loss, the dense one and peers.

    torchrun --nproc-per-node 4 -m cce_dist bench train launch/configs/gpus.yaml --parallel.tp 4
    """
    import torch

    from cce_dist.train.config.load import load_config, parse_arguments
    from cce_dist.train.ranks import num_ranks

    from .report import Report
    from .training import LOSSES, bench_training

    need_modules("tokenizers")
    evidence = None
    if record is not None:
        command = f"{context.command_path} --record"
        evidence = import_benchmarks("evidence.show.show_end_to_end", command)
    with arg.refusals():
        size = num_ranks()
        path, overrides = parse_arguments([config, *context.args])
        chosen = load_config(path, overrides, num_ranks=size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The name "cce" means our loss here; Apple's is "apple-cce".
    peers = [name.removeprefix("apple-") for name in loss or () if name != "cce"]
    report = Report(arg.machine_of(device, 0, size, peers), csv_path, json_path)
    model = chosen.model
    sizes = {"V": chosen.data.vocab_size, "D": model.dim, "layers": model.layers}

    def save(rows: list[Cells], is_main: bool) -> None:
        if is_main:
            report.add({**sizes, "dtype": chosen.dtype}, rows)
            if evidence is not None:
                evidence.write_end_to_end(
                    report.rows, report.machine, record, title, seed=chosen.run.seed
                )

    with arg.refusals():
        bench_training(
            chosen,
            loss or LOSSES,
            out,
            warmup=warmup_steps,
            steps=timed_steps,
            largest=largest,
            save=save,
        )
    report.finish_case()


add_checkout_commands(app, EXPERIMENTS)
