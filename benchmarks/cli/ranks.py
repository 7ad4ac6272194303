"""`cce-dist bench megatron` and `pipeline`, which torchrun starts on every rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from cce_dist.bench import arguments as arg

Batch = Annotated[int, typer.Option(min=1, help="Sequences of a microbatch.")]
Microbatches = Annotated[int, typer.Option(min=1, help="Microbatches of a step.")]
Steps = Annotated[int, typer.Option(min=3, help="Timed steps of each loss or place of the head.")]


def megatron_command(
    model: Annotated[
        arg.Names, typer.Option(help="May be repeated. [gemma2-2b and llama3-8b]")
    ] = None,
    loss: Annotated[
        arg.Names,
        typer.Option(help="unfused, native, exact, exact-kept, filtered, screened, no head. [all]"),
    ] = None,
    sequence: arg.Size = 4096,
    batch: Batch = 2,
    microbatches: Microbatches = 2,
    repeats: Steps = 5,
    sequence_parallel: Annotated[
        bool, typer.Option(help="Also run with sequence parallelism.")
    ] = True,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Compute all layers anew in the backward.")
    ] = False,
    timeout_seconds: arg.CollectiveTimeout = 120.0,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
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

    with arg.refusals():
        unknown = sorted(set(model or ()) - set(MODELS))
        if unknown:
            raise ValueError(f"model must be among {list(MODELS)}, got {unknown}")
        if not torch.cuda.is_available():
            raise ValueError("device must be a GPU: Megatron asks torch.cuda for one, found none")
    with arg.refusals(), joined("cuda", timeout_seconds) as job, megatron_groups():
        report = Report(arg.machine_of(str(job.device), 0, job.size), csv_path, json_path)
        for name in model or ("gemma2-2b", "llama3-8b"):
            sizes = MODELS[name]
            shape = Shape(batch * sequence, sizes.vocab_size, sizes.dim)
            inputs = make_inputs("zipf", shape, dtype=torch.bfloat16, device=job.device)
            about = {"model": name, "layers": sizes.layers, **inputs.description}
            for parallel in (False, True) if sequence_parallel and job.size > 1 else (False,):
                plan = Plan(
                    loss or LOSSES, sequence, batch, microbatches, repeats, parallel, recompute
                )
                rows = bench_megatron(job, sizes, inputs, plan)
                if job.is_main:
                    report.add(about, rows)
                report.finish_case()


def pipeline_command(
    model: Annotated[str, typer.Option(help="gemma2-2b, llama3-8b or tiny.")] = "gemma2-2b",
    layers: Annotated[int | None, typer.Option(min=2, help="In place of the model's.")] = None,
    last_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers of the last stage. [an even share]")
    ] = None,
    head: Annotated[
        arg.Names, typer.Option(help="The head's place; may be repeated. [all]")
    ] = None,
    logits: Annotated[str, typer.Option(help="Of our losses: full or screened.")] = "full",
    sequence: arg.Size = 4096,
    batch: Batch = 1,
    microbatches: Microbatches = 16,
    repeats: Steps = 5,
    dtype: arg.Dtype = "bfloat16",
    device: arg.Device = "cuda",
    timeout_seconds: arg.CollectiveTimeout = 120.0,
    csv_path: arg.CsvPath = None,
    json_path: arg.JsonPath = None,
) -> None:
    """Steps of a pipeline of one stage a rank: the head dense or fused on the last stage, and the
    vocabulary over all ranks.

    torchrun --nproc-per-node 4 -m cce_dist bench pipeline
    """
    import torch

    from benchmarks.ranks.megatron_model import MODELS
    from benchmarks.ranks.pipeline import HEADS, Plan, bench_pipeline
    from cce_dist.bench.inputs import Shape, make_inputs
    from cce_dist.bench.ranks import joined
    from cce_dist.bench.report import Report

    with arg.refusals():
        if model not in MODELS:
            raise ValueError(f"model must be among {list(MODELS)}, got {model!r}")
        sizes = replace(MODELS[model], layers=layers or MODELS[model].layers)
    with arg.refusals(), joined(device, timeout_seconds) as job:
        report = Report(arg.machine_of(str(job.device), 0, job.size), csv_path, json_path)
        shape = Shape(batch * sequence, sizes.vocab_size, sizes.dim)
        inputs = make_inputs("zipf", shape, dtype=getattr(torch, dtype), device=job.device)
        about = {"model": model, "stages": job.size, "logits": logits, **inputs.description}
        plan = Plan(head or HEADS, sequence, batch, microbatches, repeats, logits, last_layers)
        rows = bench_pipeline(job, sizes, inputs, plan)
        if job.is_main:
            report.add(about, rows)
        report.finish_case()
