"""`cce-dist bench megatron`, which torchrun starts on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cce_dist.bench.arguments import CsvPath, JsonPath, Names, Size, machine_of, refusals

if TYPE_CHECKING:
    from cce_dist.bench.report import Cells


def megatron_command(
    model: Annotated[Names, typer.Option(help="May be repeated. [all]")] = None,
    loss: Annotated[
        Names,
        typer.Option(help="unfused, native, exact, exact-kept, filtered, screened, no head. [all]"),
    ] = None,
    sequence: Size = 4096,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a microbatch.")] = 2,
    microbatches: Annotated[int, typer.Option(min=1, help="Microbatches of a step.")] = 2,
    repeats: Annotated[int, typer.Option(min=3, help="Timed steps of each loss.")] = 5,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Also run with sequence parallelism.")
    ] = True,
    largest: Annotated[
        Names, typer.Option(help="A loss that also runs its largest microbatch; may be repeated.")
    ] = None,
    timeout_seconds: Annotated[float, typer.Option(min=1, help="Limit of a collective.")] = 120.0,
    csv_path: CsvPath = None,
    json_path: JsonPath = None,
) -> None:
    """Whole steps of a Megatron job on GPUs, with Megatron's losses and ours; all ranks are
    tensor-parallel.

    torchrun --nproc-per-node 4 -m cce_dist bench megatron --model gemma2-2b
    """
    import torch

    from benchmarks.ranks.megatron import LOSSES, Plan, bench_megatron
    from benchmarks.ranks.megatron_model import MODELS, megatron_groups
    from cce_dist.bench.inputs import Shape, make_inputs
    from cce_dist.bench.ranks import joined
    from cce_dist.bench.report import Report

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
