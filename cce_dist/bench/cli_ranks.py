"""The benchmark's commands that torchrun starts on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cce_dist.cli_extras import need_modules

from .arguments import (
    BackendName,
    CsvPath,
    Device,
    Dtype,
    Inputs,
    JsonPath,
    Names,
    PeerPath,
    RecordPath,
    Repeats,
    Shapes,
    Size,
    Tokens,
)
from .cases import cases_of, machine_of, refusals

if TYPE_CHECKING:
    from .inputs import BenchInputs
    from .table import Cells


def ranks_command(
    size: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Ranks of a group; may be repeated. [every divisor]"),
    ] = None,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Ours under sequence parallel as well.")
    ] = True,
    tokens: Tokens = None,
    vocab: Size = 32768,
    dim: Size = 512,
    shape: Shapes = None,
    inputs: Inputs = None,
    dtype: Dtype = "bfloat16",
    device: Device = "cuda",
    repeats: Repeats = 10,
    method: Annotated[Names, typer.Option(help="Only these; may be repeated.")] = None,
    peers: Annotated[str, typer.Option(help="all, none, or names with commas.")] = "none",
    peer_path: PeerPath = None,
    backend: BackendName = "auto",
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Of a collective.")] = 120.0,
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
            made = make()
            places = make_places(job, sizes, len(made.weight), sequence_parallel)

            def save(rows: list[Cells], made: BenchInputs = made) -> None:
                if job.is_main:
                    report.add(made.description, rows)

            save(bench_ranks(job, made, methods, places, repeats=repeats, save=save))
            report.finish_case()


def megatron_command(
    model: Annotated[Names, typer.Option(help="May be repeated. [all there are]")] = None,
    loss: Annotated[
        Names,
        typer.Option(help="unfused, native, exact, exact-kept, filtered, screened, no head. [all]"),
    ] = None,
    sequence: Size = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a microbatch.")] = 2,
    microbatches: Annotated[int, typer.Option(min=1, help="Of a step.")] = 2,
    repeats: Annotated[int, typer.Option(min=3, help="Timed steps of each loss.")] = 5,
    sequence_parallel: Annotated[
        bool, typer.Option(help="With sequence parallelism as well.")
    ] = True,
    largest: Annotated[
        Names, typer.Option(help="A loss whose largest microbatch is run too; may be repeated.")
    ] = None,
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Of a collective.")] = 120.0,
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
) -> None:
    """Whole steps of a Megatron job on GPUs, with Megatron's losses and ours; all ranks are
    tensor-parallel.

    torchrun --nproc-per-node 4 -m cce_dist bench megatron --model gemma2-2b
    """
    import torch

    from .inputs import make_inputs
    from .megatron import LOSSES, Plan, bench_megatron
    from .megatron_model import MODELS, megatron_groups
    from .ranks import joined
    from .report import Report
    from .shapes import Shape

    with refusals():
        unknown = sorted(set(model or ()) - set(MODELS))
        if unknown:
            raise ValueError(f"model must be among {list(MODELS)}, got {unknown}")
        if not torch.cuda.is_available():
            raise ValueError("device must be a GPU: Megatron asks torch.cuda for one, found none")
    with refusals(), joined("cuda", timeout_seconds) as job, megatron_groups():
        report = Report(machine_of(str(job.device), 0, job.size), csv_path, json_path, None)
        for name in model or MODELS:
            sizes = MODELS[name]
            shape = Shape(batch * sequence, sizes.vocab_size, sizes.dim)
            inputs = make_inputs("zipf", shape, dtype=torch.bfloat16, device=job.device)
            about = {"model": name, "layers": sizes.layers, **inputs.description}

            def save(rows: list[Cells], about: dict[str, str | int] = about) -> None:
                if job.is_main:
                    report.add(about, rows)

            for parallel in (False, True) if sequence_parallel and job.size > 1 else (False,):
                plan = Plan(
                    loss or LOSSES, sequence, batch, microbatches, repeats, parallel, largest or ()
                )
                bench_megatron(job, sizes, inputs, plan, save)
                report.finish_case()


def train_command(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="Of `cce-dist train`; keys are overridden alike.")],
    loss: Annotated[
        Names,
        typer.Option(
            help="cce, dense or, with tp 1, a peer such as apple-cce; may be repeated. [cce, dense]"
        ),
    ] = None,
    warmup_steps: Size = 10,
    timed_steps: Size = 10,
    largest: Annotated[bool, typer.Option(help="Also the largest batch that fits.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/bench-train"),
    peer_path: PeerPath = None,
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
    record: RecordPath = None,
    title: Annotated[
        str, typer.Option(help="Of the record.")
    ] = "Whole training steps of a decoder",
) -> None:
    """Tokens a second and memory of whole training steps, with our loss, the dense one and peers.

    torchrun --nproc-per-node 4 -m cce_dist bench train launch/configs/gpus.yaml --parallel.tp 4
    """
    import torch

    from cce_dist.evidence.records import write_record
    from cce_dist.evidence.show_end_to_end import end_to_end_record
    from cce_dist.train.config_file import load_config, parse_arguments
    from cce_dist.train.errors import ConfigError
    from cce_dist.train.ranks import num_ranks

    from .report import Report
    from .training import LOSSES, bench_training

    need_modules("tokenizers")
    sys.path[:0] = [str(folder.resolve()) for folder in peer_path or ()]
    with refusals():
        try:
            size = num_ranks()
            path, overrides = parse_arguments([config, *context.args])
            chosen = load_config(path, overrides, num_ranks=size)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # "cce" alone is ours here.
    peers = [name.removeprefix("apple-") for name in loss or () if name != "cce"]
    report = Report(machine_of(device, 0, size, peers), csv_path, json_path, None)
    model = chosen.model
    sizes = {"V": chosen.data.vocab_size, "D": model.dim, "layers": model.layers}

    def save(rows: list[Cells], is_main: bool) -> None:
        if is_main:
            report.add({**sizes, "dtype": chosen.dtype}, rows)
            if record is not None:
                seed = chosen.run.seed
                made = end_to_end_record(report.rows, report.machine, record.stem, title, seed=seed)
                write_record(made, record.parent)

    how = {"warmup": warmup_steps, "steps": timed_steps, "largest": largest}
    with refusals():
        try:
            bench_training(chosen, loss or LOSSES, out, **how, save=save)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    report.finish_case()
