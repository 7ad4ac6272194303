"""`cce-dist bench converge`."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cli import work as run
from cce_dist.bench.arguments import Names, PeerPath, Size, Threads, machine_of, refusals
from cce_dist.needs.extras import need_modules


def converge_command(
    context: typer.Context,
    vocab: Annotated[
        list[int] | None,
        typer.Option(min=257, help="May be repeated. [32768, 131072, 262144]"),
    ] = None,
    start: Annotated[
        Names, typer.Option(help="random or checkpoint; may be repeated. [both]")
    ] = None,
    method: Annotated[
        Names, typer.Option(help="May be repeated. [all; peers only on a GPU]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, from 0 on.")] = 3,
    dim: Size = 512,
    layers: Size = 4,
    tied: Annotated[
        bool, typer.Option("--tied", help="Embedding and head share a weight.")
    ] = False,
    batch: Size = 8,
    sequence_length: run.SequenceLength = 1024,
    steps: Size = 400,
    checkpoint_steps: Annotated[int, typer.Option(min=1, help="Steps before it is saved.")] = 800,
    evaluations: run.Evaluations = 10,
    held_out_tokens: Size = 65536,
    lr: Annotated[float, typer.Option(help="Highest, from random weights.")] = 1e-3,
    fine_tune_lr: Annotated[float, typer.Option(help="Highest, from the checkpoint.")] = 3e-4,
    warmup: run.Warmup = 40,
    megabytes: run.Megabytes = 160.0,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    keep: Annotated[
        str, typer.Option(help="Mass at which the filter keeps a column, 2^-6.5 or 1e-3, or auto.")
    ] = "auto",
    max_kept: Annotated[float, typer.Option(help="Field of Screen.")] = 0.125,
    data: run.Data = None,
    work_slice: run.Slice = "0/1",
    retry: run.Retry = False,
    prepare_only: run.PrepareOnly = False,
    peer_path: PeerPath = None,
    threads: Threads = 0,
    record: run.RecordFile = Path("docs/notebook/data/evidence/convergence/convergence.json"),
    title: run.Title = "Small models trained on real text",
    cache: run.Cache = Path("runs/converge"),
) -> None:
    """Train small models with the dense loss, ours and Apple's, and record what they predict.

    Each finished run is appended to the record at once; the same command again goes on.
    """
    import torch

    from benchmarks.converge.converge import Work, converge
    from benchmarks.converge.plan import STARTS, Plan, Sizes, parse_slice, settings_of
    from benchmarks.evidence.records import make_record
    from benchmarks.fidelity.candidates import choose_names

    need_modules("tokenizers")
    on_gpu = torch.cuda.is_available()
    with refusals():
        # The options from --dim to --max-kept are the fields of Sizes.
        values = {field.name: context.params[field.name] for field in dataclasses.fields(Sizes)}
        values["keep"] = keep if keep == "auto" else parse_power("keep", keep)
        sizes = Sizes(**values)
        plan = Plan(
            vocab_sizes=tuple(vocab or (32768, 131072, 262144)),
            starts=tuple(start or STARTS),
            methods=tuple(choose_names(method or (), with_apple=on_gpu)),
            num_seeds=seeds,
            work_slice=parse_slice(work_slice),
        )
        machine = machine_of("cuda" if on_gpu else "cpu", threads, peers=plan.methods)
        settings = settings_of(sizes, data or ())
        empty = make_record(
            "convergence", record.stem, title, machine, seeds=range(seeds), settings=settings
        )
        work = Work(plan, sizes, empty, record.parent, cache, tuple(data or ()))
        if prepare_only:
            return run.prepare_work(work, sizes, plan.starts)
        lasted = run.train_work(work, lambda ranks: converge(work, ranks, typer.echo, retry=retry))
    raise typer.Exit(0 if lasted else 1)


def parse_power(name: str, text: str) -> float:
    """Returns the number that `text` is: a power such as "2^-9.5", or a number as Python reads it.

    Raises:
        ValueError: `text` is neither, or not a finite number above 0.
    """
    power = re.fullmatch(r"2\^([+-]?\d+(?:\.\d+)?)", text)
    try:
        value = 2.0 ** float(power[1]) if power else float(text)
    except (ValueError, OverflowError):
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a number above 0 such as 2^-9.5 or 1e-3, got {text!r}")
    return value
